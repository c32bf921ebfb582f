"""Run files to make reports of: benches and steps recorded on an H200, and others made of recorded kernels."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_results import RECIPES, SQUARES, recorded_results
from gemmscope.measure.campaign import Settings
from gemmscope.measure.findings import Findings
from gemmscope.measure.sampler import StoppingRule
from gemmscope.measure.task import MODES
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.step.breakeven import AtBatch
from gemmscope.step.cost import Budget, cost
from gemmscope.step.emit import ready_to_paste
from gemmscope.step.predict import StepSettings
from gemmscope.step.recommend import Plan, recommend
from gemmscope.store.benchfile import bench_file
from gemmscope.store.runfile import model_record, run_record, shapes_file
from gemmscope.store.stepfile import step_file
from gemmscope.workload.derive import derive
from gemmscope.workload.summary import totals
from machines import machine
from test_recorded_steps import MODELS, answered, replayed

DATA = Path(__file__).parent / "data"


def recorded_bench(name: str = "") -> dict[str, Any]:
    """A bench of the worked example on an H200: '', 'again' or 'fallback'."""
    found: dict[str, Any] = json.loads(gzip.decompress((DATA / f"report_bench{name and '_' + name}.json.gz").read_bytes()))
    return found


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


def forecast() -> dict[str, Any]:
    """What `gemmscope forecast` would write, with the numbers of a measured run: only its form matters here."""
    bench, step = recorded_bench(), recorded_step()
    keys = ("recipe", "step_ms", "speedup", "tokens_per_s", "model_tflops", "waterfall", "verdict")
    gpu = {
        "gpu": "b300", "title": "B300", "capability": "10.3", "basis": ["bf16: measured elsewhere"],
        **{key: bench[key] for key in ("rows", "speedups", "totals", "memory")},
        "step": [{key: each[key] for key in keys} for each in step["recipes"]], "not_possible": {"FP8Block": "not on this GPU"},
    }  # fmt: skip
    head = {
        "schema_version": 1,
        "kind": "forecast",
        "gemmscope_version": "0.1.0",
        "command": ["forecast"],
        "origin": "command line",
    }
    body = {
        "coefficients": "fitted",
        "state": "sustained",
        "model": bench["model"],
        "run": bench["run"],
        "gpus": [gpu],
        "notes": [],
    }
    return {**head, **body, "sweeps": [], "something_new": 1}


def explanation() -> dict[str, Any]:
    """What `gemmscope explain --json` writes, made up: only its form matters here."""
    words = {"title": "the host cannot keep up", "evidence": ["GPU idle 42%"], "advice": ["CUDA graphs"]}
    cause = {"cause": "host", "cost_ms": 12.0, "speedup_without": 1.3, "kernels": [], "where": "forward", **words}
    rows = [
        {"row": "products", "expected_ms": 20.0, "found_ms": 22.0},
        {"row": "other", "expected_ms": None, "found_ms": 1.0},
    ]
    held = {"title": "Against the prediction", "expected": "predicted", "words": ["12 ms more"], "rows": rows}
    return {
        "schema_version": 1,
        "kind": "explain",
        "command": ["explain", "trace.json"],
        "trace": "trace.json",
        "gpu": "NVIDIA H200",
        "steps": 2,
        "steps_found_by": "marks",
        "step_ms": 50.0,
        "busy_ms": 38.0,
        "classes_ms": {"GEMM FP8": 20.0, "quantization": 6.0, "attention": 12.0, "idle": 12.0},
        "products": [{"precision": "FP8", "count": 144, "time_ms": 20.0, "flops": 1e12}],
        "verdict": "the host cannot keep up",
        "causes": [cause],
        "held": [held],
        "notes": ["made up"],
    }


def as_written(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


def put(folder: Path, name: str, run: dict[str, Any]) -> Path:
    """Write it as `--json` does."""
    path = folder / name
    path.write_text(json.dumps(run), encoding="utf-8")
    return path
