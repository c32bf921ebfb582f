"""What travels to nodes: enough to run a site there, and nothing of what the node has its own of."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest

from gemmscope.pool.ray_bridge import OF_THE_NODE, REQUIREMENTS, pack_code

NOT_NEEDED = ("matplotlib", "rich", "typer")  # what only the driver uses: figures and the command line
ROOT = Path(__file__).resolve().parents[2]

# A Python that has the standard library, the bundle and numpy, and no other package.
BARE = """
import importlib.machinery, json, sys
class Numpy:
    def find_spec(name, path=None, target=None):
        return importlib.machinery.PathFinder.find_spec(name, [sys.argv[2]]) if name == "numpy" else None
sys.meta_path.append(Numpy)
sys.path[:] = [path for path in sys.path if path and "site-packages" not in path]
sys.path += [f"{sys.argv[1]}/code", f"{sys.argv[1]}/packages"]
import gemmscope.pool.place_worker, gemmscope.pool.measure_unit
print(json.dumps(sorted(name for name, module in sys.modules.items() if "site-packages" in str(getattr(module, "__file__", "")))))
"""


@pytest.fixture(scope="module")
def bundle() -> bytes:
    return pack_code()


def test_every_requirement_travels_or_there_is_a_reason_why_not() -> None:
    required = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert required is not None
    assert set(re.findall(r'"([\w-]+)', required[1])) == {*REQUIREMENTS, *NOT_NEEDED, *OF_THE_NODE}


def test_a_site_needs_the_bundle_and_numpy_alone(bundle: bytes, tmp_path: Path) -> None:
    zipfile.ZipFile(io.BytesIO(bundle)).extractall(tmp_path)
    packages = str(Path(numpy.__file__).parent.parent)
    ended = subprocess.run(
        [sys.executable, "-I", "-S", "-c", BARE, str(tmp_path), packages], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert {name.partition(".")[0] for name in json.loads(ended.stdout)} <= {"numpy"}


def test_the_same_files_make_the_same_bundle(bundle: bytes) -> None:
    assert pack_code() == bundle
    names = zipfile.ZipFile(io.BytesIO(bundle)).namelist()
    assert len(set(names)) == len(names)
    assert "code/gemmscope/findings.toml" in names
    assert not [name for name in names if "__pycache__" in name or ".." in name]
    assert len(bundle) < 20e6
