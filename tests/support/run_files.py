"""Run files to make reports of: benches and steps recorded on an H200, and others made of recorded kernels."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from support.bench_results import RECIPES, SQUARES, recorded_results
from gemmscope.measure.campaign import Settings
from gemmscope.measure.findings import Findings, Layer
from gemmscope.measure.results import Results
from gemmscope.measure.sampler import StoppingRule
from gemmscope.workload.cases import MODES, Case, Task
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.step.breakeven import AtBatch
from gemmscope.step.cost import Budget, cost
from gemmscope.step.emit import ready_to_paste
from gemmscope.step.predict import StepSettings
from gemmscope.step.recommend import Plan, recommend
from gemmscope.store.benchfile import BenchFile, bench_file
from gemmscope.store.runfile import model_record, run_record, shapes_file
from gemmscope.store.stepfile import step_file
from gemmscope.workload.derive import derive
from gemmscope.workload.summary import totals
from support.machines import machine
from support.recorded_steps import MODELS, answered, replayed

DATA = Path(__file__).parent.parent / "data"


def recorded_bench(name: str = "first") -> dict[str, Any]:
    """A bench of the worked example on an H200: 'first', 'again' or 'fallback'."""
    found: dict[str, Any] = json.loads(gzip.decompress((DATA / f"h200_bench_{name}.json.gz").read_bytes()))
    return found


def replayed_bench(name: str = "first") -> Findings:
    """The same bench, its samples and kernels taken again by the code of today: what it would say of that measurement."""
    file = BenchFile.model_validate(recorded_bench(name))
    cases = {row.op: Case(row.op, row.tokens, row.inputs, row.outputs, row.count) for row in file.rows}
    tasks = [Task(cases[each.op], each.recipe, each.mode, each.pass_name) for each in file.tasks]
    results = Results(tasks)
    results.take({"type": "hello", "device": file.device, "versions": file.versions})
    groups = {task.key: task.group for task in tasks}
    bursts: dict[tuple[str, str, int], dict[str, Any]] = {}  # the tasks of one recipe and mode share a burst
    for task, each in zip(tasks, file.tasks, strict=True):
        results.take({"type": "ready", "task": task.key, **each.facts})
        results.take({"type": "kernels", "task": task.key, "kernels": each.kernels})
        for number, (times_ms, state) in enumerate(zip(each.rounds_ms, each.states, strict=True)):
            group = groups[each.facts.get("sum_of", [task.key])[0]]  # a sum was measured with its parts
            burst = bursts.setdefault((*group, number), {"type": "samples", "times_ms": {}, "state": state})
            burst["times_ms"][task.key] = times_ms
    for message in [*bursts.values(), *({"type": "round", "round": number} for number in range(file.rounds))]:
        results.take(message)
    layer = Layer(file.layers, dict.fromkeys(cases.values(), 1)) if file.layers else None
    return Findings(results, list(dict.fromkeys(task.recipe for task in tasks)), MODES, layer=layer)


def recorded_step(name: str = "llama8b", *, verified: bool = False, batches: bool = False) -> dict[str, Any]:
    """A step file of recorded messages; `batches` pretends that smaller ones were run too."""
    model, run = MODELS[name]
    real = replayed(name, real=True) if verified else None
    results, found = answered(name, real)
    recommended = recommend(results, [Plan(each.recipe) for each in found.recipes])
    gains = {each.recipe: each.speedup for each in found.recipes if each.speedup is not None}
    at = [AtBatch(size, run.sequence_length, gains) for size in (1, 2, run.micro_batch_size)]
    file = step_file(
        command=["step", "--json", "step.json"],
        origin="command line",
        model=model_record(model, None, ""),
        run=run_record(run, derive(model, run)),
        environment=asdict(machine()),
        settings=StepSettings("transformer_engine"),
        results=[results, *([real] if real is not None else [])],
        found=found,
        costs={each.recipe: cost(each.step, run, Budget(1e12, 256, 2.5)) for each in found.recipes},
        recommended=recommended,
        batches=at if batches else [],
        pasted=ready_to_paste(recommended.plan),
        ended="known to ±1.0%",
        seconds={"predicting": 41.0},
        notes=[],
    )
    return as_written(file.to_json())


def squares() -> dict[str, Any]:
    """Bare products of four sizes, made of recorded kernels."""
    findings = Findings(recorded_results(SQUARES), RECIPES, MODES)
    file = bench_file(
        command=["bench", "--shapes", "1024,2048,4096,8192"],
        origin="shapes",
        model=None,
        run=None,
        settings=Settings("transformer_engine"),
        rule=StoppingRule(),
        environment=asdict(machine()),
        findings=findings,
        ended="known to ±1.0%",
        notes=[],
    )
    return as_written(file.to_json())


def derived(model: ModelSpec, run: RunSpec) -> dict[str, Any]:
    """What `gemmscope shapes --json` writes."""
    workload = derive(model, run)
    summed = totals(workload, run, model)
    about: dict[str, Any] = {"command": ["shapes"], "origin": "command line", "notes": [], "trace": None, "found": None}
    return as_written(shapes_file(model=model, run=run, workload=workload, totals=summed, **about).to_json())


SIZES = "--hidden-size 4096 --intermediate-size 16384 --num-attention-heads 32 --num-hidden-layers 24"


@cache
def _made(command: str) -> str:
    """What a command of its own writes with `--json -`."""
    child = subprocess.run(
        [sys.executable, "-m", "gemmscope", *command.split(), "--json", "-"], capture_output=True, text=True, check=True
    )
    return child.stdout


def forecast() -> dict[str, Any]:
    """The worked example on a B300."""
    return as_written(_made(f"forecast {SIZES} --micro-batch-size 31 --sequence-length 512 --gpu b300"))


def sweep() -> dict[str, Any]:
    """A forecast over batches, of two GPUs."""
    return as_written(_made(f"forecast {SIZES} --sequence-length 512 --gpu b300,h200 --sweep micro_batch_size=1,4,16"))


def explanation() -> dict[str, Any]:
    """Of a trace recorded on an H200."""
    return as_written(_made(f"explain {DATA / 'traces' / 'recompute.json.gz'}"))


def as_written(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


def put(folder: Path, name: str, run: dict[str, Any]) -> Path:
    """Write it as `--json` does."""
    path = folder / name
    path.write_text(json.dumps(run), encoding="utf-8")
    return path
