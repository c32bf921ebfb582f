"""`gemmscope fleet` as people type it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmscope.commands import fleet as fleet_command
from gemmscope.findings import finding
from gemmscope.results.bench import BenchResult
from gemmscope.results.fleet import FleetResult
from support.command import Run, run
from support.fake_gpu import own_state
from support.fleet_files import runs
from support.refusals import unnamed

__all__ = ["own_state", "run"]  # the fixtures

COUNTS = "--shapes 32 --device cpu --recipes bf16 --num-iters 2 --num-warmup 0 --gpu-warmup 0"
LAUNCHED = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}


def test_on_the_cpu_for_real(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    out, folder = tmp_path / "fleet.json", tmp_path / "runs"
    outcome = run(f"fleet {COUNTS} --json {out} --folder {folder}")
    assert outcome.code == 0
    assert "1 CPU measured: BF16 GEMMs" in outcome.out
    result = FleetResult.model_validate_json(out.read_text())
    assert [gpu.index for gpu in result.measured] == [None]
    [file] = folder.iterdir()
    assert result.gpus[0].file == str(file)
    single = BenchResult.model_validate_json(file.read_text())
    [time] = [cell.total_ms.value for cell in single.linears.ops if cell.mode == "autocast"]
    assert result.gpus[0].figures["BF16 GEMMs"].value == pytest.approx(time, rel=1e-4)
    gathered = run(f"fleet {folder} --json -")
    assert FleetResult.model_validate_json(gathered.out).gpus[0].figures == result.gpus[0].figures


@pytest.mark.parametrize(("slow", "code"), [({}, 0), ({5: 0.1}, 3), ({5: -0.1}, 0)])
def test_a_health_check_fails_for_slow_gpus_only(
    run: Run, monkeypatch: pytest.MonkeyPatch, slow: dict[int, float], code: int
) -> None:
    monkeypatch.setattr(fleet_command, "read_runs", lambda _: (runs(16, slow), []))
    assert run("fleet somewhere").code == 0
    outcome = run("fleet somewhere --fail-if-outlier")
    assert outcome.code == code
    assert ("node0000 GPU 5" in outcome.out) or not slow


def test_run_files_that_could_not_be_written_are_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    unwritten = finding("fleet-files-missing", files=["node0000-gpu0.json"], folder="out")
    monkeypatch.setattr(fleet_command, "read_runs", lambda _: (runs(16, {}), [unwritten]))
    assert run("fleet somewhere").code == 2
    monkeypatch.setattr(fleet_command, "read_runs", lambda _: (runs(16, {5: 0.1}), [unwritten]))
    assert run("fleet somewhere --fail-if-outlier").code == 3


def test_one_gpu_has_no_chart_but_that_is_no_error(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fleet_command, "read_runs", lambda _: (runs(1, {}), []))
    outcome = run(f"fleet somewhere -o {tmp_path / 'fleet.png'}")
    assert outcome.code == 0
    assert "no chart to draw" in outcome.err


def test_a_launched_process_needs_a_folder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    outcome = run(f"fleet {COUNTS}")
    assert outcome.code == 2
    assert unnamed(outcome.err, "srun", 2, "--folder OUT") == []
    outcome = run(f"fleet {COUNTS} --folder out --json a.json")
    assert outcome.code == 2
    assert unnamed(outcome.err, "--json") == []
    assert run(f"fleet {COUNTS} --folder out --repeat 2").code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("runs --shapes 8k", "--shapes applies only to measuring"),
        ("runs --preset llama-3.1-8b --shapes 8", "apply only to measuring"),
        ("runs", "cannot be read"),
        ("--gpus 0,1", "no NVIDIA GPU"),
        ("--gpus 0,x", "--gpus must be all, or the numbers of GPUs"),
        ("--device cpu --gpus 0", "--device cpu uses none"),
        ("--device cpu --step", "needs a model"),
        ("--device cpu --shapes 8 --preset gpt2", "--shapes measures bare GEMMs"),
        ("--device cpu --compile whole", "add --step"),
        ("--device cpu --at-once 0", "--at-once must be at least 1"),
        ("--gpus 0 --ray auto", "use only one of them"),
    ],
)
def test_bad_input_is_one_message(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run(f"fleet {arguments}")
    assert outcome.code == 2
    assert message in outcome.err
    assert not outcome.out


def test_output_must_not_overwrite_a_run_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    assert unnamed(run(f"fleet {path} --json {path}").err, f"--json {path}") == []
    assert path.read_text() == "{}"
