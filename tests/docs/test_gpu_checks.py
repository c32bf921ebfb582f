"""`benchmarks/gpu_checks.py`: its commands exist, a check that fails or takes too long does not stop the others."""

from __future__ import annotations

import shlex
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import typer

from gemmscope.cli.main import app

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu_checks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_checks  # type: ignore[import-not-found]

    module: ModuleType = gpu_checks
    return module


def test_the_commands_of_all_checks_exist(gpu_checks: ModuleType) -> None:
    group = typer.main.get_command(app)
    for check in gpu_checks.checks().values():
        program, name, *arguments = shlex.split(check.command)
        if program == "gemmscope":
            command = group.get_command(None, name)  # type: ignore[attr-defined, arg-type]
            assert command.make_context(name, arguments).command.name == name
        else:
            scripts = [part for part in shlex.split(check.command.replace("'", "")) if part.endswith(".py")]
            assert scripts
            assert all((ROOT / script).exists() for script in scripts)


def test_every_check_has_its_turn(gpu_checks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that succeeds, one that fails, one that hangs, and one for which no time is left."""
    monkeypatch.setattr(gpu_checks, "GRACE_S", 0.2)
    checks = {
        "fine": gpu_checks.Check("fine", "Writes a file", "python -c \"open('{out}/result','w')\"", 60.0),
        "fails": gpu_checks.Check("fails", "Fails", "python -c 'import sys; sys.exit(3)'", 60.0),
        "hangs": gpu_checks.Check("hangs", "Hangs", "sleep 600", 0.5),
        "late": gpu_checks.Check("late", "Not started", "sleep 600", 1e6),
    }
    monkeypatch.setattr(gpu_checks, "checks", lambda: checks)
    out, archive = tmp_path / "out", tmp_path / "results.tar.gz"
    endings = {name: gpu_checks.run(check, out_folder(out)) for name, check in checks.items() if name != "late"}
    assert endings == {"fine": "ok", "fails": "exit code 3", "hangs": "ended after its time limit of 0 s"}
    monkeypatch.setattr(sys, "argv", ["gpu_checks.py", str(out), "fine", "late", "--seconds", "600", "--archive", str(archive)])
    assert gpu_checks.main() == 1
    with tarfile.open(archive) as packed:
        assert {"out/result", "out/fine.log"} <= set(packed.getnames())


def out_folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path
