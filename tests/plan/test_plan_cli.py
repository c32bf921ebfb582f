"""`gemmscope plan` as people type it, right and wrong."""

from __future__ import annotations

import csv
import io
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gemmscope.results.plan import PlanResult
from gemmscope.results.read import read_result
from support.command import Run, run

__all__ = ["run"]  # the fixture

SMALL = "plan --preset llama-3.2-1b --gpu h100 --gpus 8 --global-batch 32 --sequence-length 4k"
RAN_AS = """
import os, signal
from contextlib import contextmanager
from gemmscope.progress import Console

@contextmanager
def counting(self, what, total):
    yield lambda done: os.kill(os.getpid(), signal.SIGINT)

Console.counting = counting
from gemmscope.__main__ import run
run()
"""


def result(run: Run, line: str) -> PlanResult:
    outcome = run(f"{line} --json -")
    assert outcome.code == 0, outcome.err
    return PlanResult.model_validate_json(outcome.out)


def test_the_answer_comes_first(run: Run) -> None:
    outcome = run(f"{SMALL} --tokens 2T --price 2.5")
    assert outcome.code == 0
    assert outcome.out.startswith("FORECAST, not measured: layouts of llama-3.2-1b on 8 x H100")
    assert "FORECAST: fastest is FP8" in outcome.out
    assert "tokens/s per GPU, MFU" in outcome.out
    assert "2T tokens take" in outcome.out
    assert "Pareto front" in outcome.out
    assert "Excluded: " in outcome.out
    detailed = run(f"{SMALL} --detail").out
    for heading in ("Megatron-LM:\n--bf16", "Megatron-Bridge:\n", "torchtitan:\n[training]", "What the search excluded"):
        assert heading in detailed
    assert "TP x CP x PP does not divide the number of GPUs" in detailed


def test_the_next_command_runs_and_says_the_same(run: Run) -> None:
    typed = f"{SMALL} --recipes fp8current --tp 2,4 --recompute full --stack nvidia --no-dp-overlap --cuda-graphs"
    planned = result(run, typed)
    best = planned.best
    assert best is not None
    shown = run(typed).out
    command = shlex.split(shown.partition("best layout go:\n")[2].replace("\\\n", " "))
    assert command[:2] == ["gemmscope", "forecast"]
    outcome = run(" ".join([*command[1:], "--json", "-"]))
    assert outcome.code == 0, outcome.err
    assert f"{best.step_ms.value:.9f}"[:8] in outcome.out


def test_lists_restrict_the_search(run: Run) -> None:
    plan = result(
        run,
        f"{SMALL} --tp 1,2 --pp 1 --micro_batch_size 1,2 --recompute none,full --zero 1 --recipes fp8block,bf16".replace(
            "mxfp8", "fp8block"
        ),
    )
    sizes = {(layout.tp, layout.pp, layout.micro_batch_size, layout.recompute, layout.zero) for layout in plan.layouts}
    assert sizes == {(tp, 1, size, recompute, 1) for tp in (1, 2) for size in (1, 2) for recompute in ("none", "full")}
    assert {layout.recipe for layout in plan.layouts} == {"BF16", "FP8Block"}


def test_settings_of_all_layouts(run: Run) -> None:
    usual = result(run, f"{SMALL} --tp 4 --pp 1 --cp 1").best
    exposed = result(run, f"{SMALL} --tp 4 --pp 1 --cp 1 --no-tp-overlap --no-dp-overlap").best
    assert usual is not None
    assert exposed is not None
    assert exposed.tokens_per_s.value < usual.tokens_per_s.value


def test_models_compared(run: Run) -> None:
    outcome = run(f"{SMALL} --vary hidden=2048,3072 --vary layers=8,16 --tp 1")
    assert outcome.code == 0
    assert "4 models with different hidden, layers" in outcome.out
    assert "has the highest MFU" in outcome.out
    assert len(outcome.out.splitlines()) <= 30
    plan = result(run, f"{SMALL} --vary hidden=2048,3072 --vary layers=8,16 --tp 1")
    assert [tuple(point.values.items()) for point in plan.points][1] == (("hidden", 2048), ("layers", 16))


def test_files(run: Run, tmp_path: Path) -> None:
    outcome = run(
        f"{SMALL} --json {tmp_path}/run.json --csv {tmp_path}/run.csv --markdown {tmp_path}/run.md -o {tmp_path}/front.svg"
    )
    assert outcome.code == 0
    read = read_result(tmp_path / "run.json")
    assert isinstance(read, PlanResult)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "run.csv").read_text())))
    assert len(rows) > len(read.layouts[:200])
    assert "| FP8Delayed |" in (tmp_path / "run.md").read_text()
    assert "<svg" in (tmp_path / "front.svg").read_text()
    assert run(f"report {tmp_path}/run.json -o {tmp_path}/page.html").code == 0
    assert "Pareto front" in (tmp_path / "page.html").read_text()


def test_ctrl_c_shows_what_was_computed(tmp_path: Path) -> None:
    line = SMALL.replace("llama-3.2-1b", "llama-3.1-8b").replace("--gpus 8", "--gpus 64").replace("batch 32", "batch 256")
    command = [sys.executable, "-c", RAN_AS, *line.split(), "--json", str(tmp_path / "run.json")]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert outcome.returncode == 130, outcome.stderr
    assert "Interrupted after " in outcome.stdout
    read = read_result(tmp_path / "run.json")
    assert isinstance(read, PlanResult)
    assert read.interrupted
    assert read.best is not None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan --preset llama-3.2-1b --gpus 8 --global-batch 32 --sequence-length 4k", "no GPU is named"),
        ("plan --gpu h100 --gpus 8 --global-batch 32 --sequence-length 4k", "no model is named"),
        (SMALL.replace("--gpus 8", ""), "--gpus is not given"),
        (f"{SMALL} --tp 1,x", "--tp must be whole numbers separated by commas, got '1,x'"),
        (f"{SMALL} --tp 3", "--tp 3: no layout of llama-3.2-1b on 8 GPUs has it"),
        (f"{SMALL} --vary hidden", "--vary 'hidden' is not NAME=VALUE,VALUE,…"),
        (f"{SMALL} --vary width=5", "'width' is not a size that a plan can vary"),
        (f"{SMALL} --vary hidden=64 --vary hidden=128", "--vary varies hidden twice"),
        (f"{SMALL} --recompute most", "--recompute must be some of none, selective, full"),
        (f"{SMALL} --recipes nvfp4", "NVFP4 cannot run on h100"),
        (f"{SMALL} --gpus 100000000", "--gpus must be at most 131072"),
        (f"{SMALL} --network carrier-pigeon", "is not a known network"),
        (f"{SMALL} --pre-quantize", "--pre-quantize applies only to linears"),
        (f"{SMALL} --json a.json --csv a.json", "two outputs go to the same place"),
        (SMALL.replace("llama-3.2-1b", "llama-3.1-405b"), "no layout of llama-3.1-405b fits on 8 h100"),
    ],
)
def test_invalid_input(run: Run, line: str, message: str) -> None:
    outcome = run(line)
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err
    assert len(outcome.err.splitlines()) <= 3


def test_costs_do_not_hide_what_tells_layouts_apart(run: Run) -> None:
    line = "plan --preset llama-3.1-8b --gpu h200 --gpus 64 --global-batch 512 --sequence-length 8k --recipes fp8delayed"
    lines = run(f"{line} --tokens 2T --price 2.5").out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("Recipe"))
    assert "Sharding" in lines[start]
    end = lines[start].index("Micro-batch") + len("Micro-batch")
    names = [line[:end] for line in lines[start + 2 : start + 8]]
    assert len(set(names)) == 6
