"""The files of a user's module are sent along with a unit, which may be measured on a machine that does not have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gemmscope.errors import UserError
from gemmscope.job.load import load_model, model_run
from gemmscope.options.measuring import BenchOptions
from gemmscope.pool import measure_unit
from gemmscope.pool import measure_unit as travelling
from gemmscope.pool.measure_unit import MeasureUnit, module_files, with_files
from gemmscope.pool.place_messages import content_of, unit_line
from gemmscope.pool.pool import Unit
from gemmscope.results.bench import BenchResult


def names(result: BenchResult) -> list[str]:
    return [repr(task.task) for task in result.tasks if task.measured]


@pytest.fixture
def module(tmp_path: Path) -> str:
    """A factory that imports a neighbour, which reads a file."""
    folder = tmp_path / "models"
    (folder / "parts").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "hook.py").write_text("secret = 1")
    (folder / "weights.bin").write_bytes(b"0" * 100)
    (folder / "size.json").write_text("48")
    (folder / "parts" / "sizes.py").write_text(
        "import json, pathlib\nSIZE = json.loads((pathlib.Path(__file__).parents[1] / 'size.json').read_text())\n"
    )
    (folder / "net.py").write_text(
        "import torch\nfrom parts.sizes import SIZE\n"
        "def build():\n    return torch.nn.Sequential(torch.nn.Linear(32, SIZE)), (torch.zeros(16, 32),)\n"
    )
    return f"{folder / 'net.py'}:build"


def test_a_module_is_measured_where_its_files_are_not(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    job, _ = loaded(module)
    options = BenchOptions(device="cpu", recipes=["BF16"], modes=("autocast",), num_iters=1, num_warmup=0)
    sent = unit_line(Unit("a", MeasureUnit(options, job, reduce=f"{__name__}:names").for_other_machines()))
    shutil.rmtree(tmp_path / "models")
    unit: MeasureUnit = content_of(json.loads(sent))
    assert set(unit.files) == {"net.py", "parts/sizes.py", "size.json"}
    imported = measure_unit._function
    monkeypatch.setattr(measure_unit, "_function", lambda name: names if name.startswith(__name__) else imported(name))
    assert any("48" in name for name in unit.run())


def test_the_own_files_are_used_where_they_are_the_same(module: str) -> None:
    job, path = loaded(module)
    files = module_files(job)
    with with_files(job, files) as same:
        assert same is job
    (path.parent / "size.json").write_text("64")
    with with_files(job, files) as other:
        assert other is not None
        assert other.source.module is not None
        there = Path(other.source.module.rpartition(":")[0])
        assert (there.parent / "size.json").read_text() == "48"
        assert other.source.origin == job.source.origin
    assert not there.exists()


def test_a_folder_that_is_too_large_to_send(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(travelling, "LARGEST_BYTES", 100)
    with pytest.raises(UserError, match="too many files to send") as error:
        module_files(loaded(module)[0])
    assert "its own folder" in error.value.hint


def loaded(module: str) -> tuple[Any, Path]:
    travelling._files.cache_clear()
    return model_run(load_model(module=module)), Path(module.rpartition(":")[0])
