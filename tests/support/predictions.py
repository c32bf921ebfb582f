"""Run files that predict the recorded training of the traces."""

from __future__ import annotations

from pathlib import Path

from gemmscope.interval import Interval
from gemmscope.model.spec import RunSpec
from gemmscope.parts import StepPart
from gemmscope.results.base import ModelSummary
from gemmscope.results.bench import BenchResult, BenchSettings
from gemmscope.results.linears import Linears, LinearsTotal
from gemmscope.results.step import StepResult, StepSettings, StepTime, StepTimes, WaterfallLevel
from gemmscope.workload.cases import Case
from support.machines import machine


def step_run(tmp_path: Path, hidden: int = 4096) -> Path:
    """A run file of `step` that predicts 58 ms for the recorded training, with the parts of its waterfall."""
    planned: dict[StepPart, float] = {
        "GEMMs": 31.0,
        "quantization": 4.4,
        "attention": 9.2,
        "norms and activations": 5.0,
        "head and loss": 5.0,
        "optimizer": 3.4,
    }

    def recipe(name: str, step_ms: float, parts: dict[StepPart, float]) -> StepTime:
        levels = [WaterfallLevel(part=part, baseline_ms=time, recipe_ms=time, speedup=1.0) for part, time in parts.items()]
        interval = Interval(step_ms, step_ms * 0.99, step_ms * 1.01)
        return StepTime(recipe=name, step_ms=interval, tokens_per_s=1.0, model_tflops=50e3 / step_ms, waterfall=tuple(levels))

    recipes = (recipe("BF16", 80.0, {}), recipe("FP8Current", 58.0, planned), recipe("FP8Delayed", 56.0, planned))
    result = StepResult(
        command="", origin="", model=ModelSummary(name="llama", hidden_size=hidden, num_hidden_layers=4, layers="4 dense"),
        run=RunSpec(micro_batch_size=2, sequence_length=4096), environment=machine(), device={}, versions={},
        settings=StepSettings("transformer_engine"), depth=4, layers=4, step=StepTimes(origin="measured", recipes=recipes),
    )  # fmt: skip
    path = tmp_path / f"step{hidden}.json"
    path.write_text(result.to_json())
    return path


def bench_run(tmp_path: Path, tokens: int = 8192) -> Path:
    """A run file of `bench` with the four linears of the recorded training."""
    sizes = {"QKV Proj": (4096, 6144), "Attn Out": (4096, 4096), "MLP Up": (4096, 28672), "MLP Down": (14336, 4096)}
    linears = Linears(
        origin="measured",
        cases=tuple(Case(op, tokens, inputs, outputs, 4) for op, (inputs, outputs) in sizes.items()),
        recipes=("BF16", "FP8Current"),
        modes=("autocast",),
        layers=4,
        totals=tuple(
            LinearsTotal(recipe=name, mode="autocast", total_ms=Interval(time), quantize_ms=quantize)
            for name, time, quantize in (("BF16", 58.0, 0.0), ("FP8Current", 34.0, 4.0))
        ),
    )
    result = BenchResult(
        command="", origin="", settings=BenchSettings("transformer_engine"), environment=machine(), device={}, versions={},
        rounds=1, linears=linears, tasks=(),
    )  # fmt: skip
    path = tmp_path / "bench.json"
    path.write_text(result.to_json())
    return path
