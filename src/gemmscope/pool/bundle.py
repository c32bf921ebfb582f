"""gemmscope and its requirements as one zip file, as they are installed here: what nodes of a cluster run sites from.

`code/` has gemmscope, which comes first on the import path of sites: every node runs the driver's version. `packages/` has its
requirements, which come last: what a node has installed is used, so that the frameworks there find the versions they know.
"""

from __future__ import annotations

import hashlib
import io
import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

REQUIREMENTS = ("jinja2", "nvidia-ml-py", "platformdirs", "pydantic", "pyyaml", "tomli")
"""What sites import of gemmscope's requirements."""
NOT_NEEDED = ("matplotlib", "rich", "typer")
"""What only the driver uses: figures and the command line."""
OF_THE_NODE = ("numpy",)
"""Large, and wherever PyTorch is."""

_SAME_TIME = (1980, 1, 1, 0, 0, 0)  # the same files make the same bundle


@dataclass(frozen=True)
class Bundle:
    """The zip file, and a fingerprint of its content."""

    content: bytes
    digest: str


def make_bundle() -> Bundle:
    """Pack gemmscope and what sites need."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, path in sorted(_files()):
            archive.writestr(zipfile.ZipInfo(name, _SAME_TIME), path.read_bytes(), zipfile.ZIP_DEFLATED)
    content = packed.getvalue()
    return Bundle(content, hashlib.sha256(content).hexdigest()[:16])


def _files() -> Iterator[tuple[str, Path]]:
    """The names in the bundle, and the files."""
    package = Path(__file__).resolve().parents[1]
    for path in package.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield f"code/{path.relative_to(package.parent).as_posix()}", path
    for needed in _closure(REQUIREMENTS):
        for file in needed.files or ():
            path = Path(str(file.locate()))
            if ".." not in file.parts and "__pycache__" not in file.parts and path.is_file():
                yield f"packages/{file.as_posix()}", path


def _closure(names: Iterable[str]) -> list[Distribution]:
    """Those of the packages that are installed, and what they require in turn."""
    waiting, taken = list(names), dict[str, Distribution]()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in taken or name in OF_THE_NODE:
            continue
        try:
            taken[name] = distribution(name)
        except PackageNotFoundError:  # for another version of Python, or another system
            continue
        required = [text for text in taken[name].requires or () if "extra" not in text.partition(";")[2]]
        waiting += [match[0] for text in required if (match := re.match(r"[\w.-]+", text))]
    return list(taken.values())
