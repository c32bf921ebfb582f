"""Published training runs beside their forecasts: the table of docs/measured/published_runs.csv, and how far off each is.

python benchmarks/published_runs.py
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from gemmscope.forecast.calibration import calibrated
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.stacks import software_on
from gemmscope.forecast.step import StepForecast
from gemmscope.gpu.specs import gpu
from gemmscope.interval import Interval
from gemmscope.model import presets
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload.derive import derive
from gemmscope.workload.sharding import spread

NEWEST = (26, 6)  # containers from here on are what the stack `nvidia` describes
TABLE = Path(__file__).resolve().parent.parent / "docs/measured/published_runs.csv"


@dataclass(frozen=True)
class PublishedRun:
    """One row: how the run was set up, and the tokens/s that one GPU reached."""

    fitted: bool
    container: str
    preset: str
    gpu: str
    gpus: int
    recipe: str
    global_batch: int
    micro_batch: int
    sequence: int
    fsdp: int
    tp: int
    pp: int
    cp: int
    vp: int
    ep: int
    tokens_per_s: float

    @property
    def model(self) -> ModelSpec:
        model = presets.load(self.preset).model
        assert model is not None
        return model

    @property
    def has_experts(self) -> bool:
        return any(layer.is_moe for layer in self.model.layers)

    @property
    def run(self) -> RunSpec:
        """As Megatron-Bridge's recipes run it: sequence parallelism with tensor parallelism, whole experts, uneven stages."""
        dp, layers = self.gpus // (self.tp * self.pp * self.cp), len(self.model.layers)
        return RunSpec(
            micro_batch_size=self.micro_batch, sequence_length=self.sequence,
            tp=self.tp, sequence_parallel=self.tp > 1, pp=self.pp, vp=self.vp, cp=self.cp, ep=self.ep, dp=dp,
            etp=1 if self.ep > 1 else None, zero=3 if self.fsdp > 1 else None,
            pp_layers=tuple(spread(layers, self.pp)) if layers % self.pp else None,
            gradient_accumulation=self.global_batch // (self.micro_batch * dp),
        )  # fmt: skip

    @property
    def stack(self) -> str:
        """The software of its container."""
        return "nvidia" if tuple(map(int, self.container.split("."))) >= NEWEST else "nvidia-26.04"

    @property
    def layout(self) -> str:
        """As the tables name it: `TP4 PP8 VP5`."""
        sizes = {"FSDP": self.fsdp, "TP": self.tp, "PP": self.pp, "VP": self.vp, "CP": self.cp, "EP": self.ep}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "DP"


@dataclass(frozen=True)
class Compared:
    """A run with its forecast: tokens/s of one GPU, with the error bar."""

    run: PublishedRun
    tokens_per_s: Interval

    @property
    def error(self) -> float:
        return self.tokens_per_s.value / self.run.tokens_per_s - 1

    @property
    def holds(self) -> bool:
        """Whether the error bar reaches what was published."""
        return self.tokens_per_s.overlaps(Interval(self.run.tokens_per_s, self.run.tokens_per_s, self.run.tokens_per_s))


def published_runs() -> list[PublishedRun]:
    """All rows of the table."""
    lines = [line for line in TABLE.read_text("utf-8").splitlines() if not line.startswith("#")]
    rows = []
    for row in csv.reader(lines[1:]):
        fitted, container, preset, chip, gpus, recipe, *sizes, tokens = row
        rows.append(PublishedRun(fitted == "yes", container, preset, chip, int(gpus), recipe, *map(int, sizes), float(tokens)))
    return rows


class Scorer:
    """Forecasts of published runs. GEMMs are kept: only what `cluster.toml` says is computed again."""

    def __init__(self, runs: Iterable[PublishedRun]) -> None:
        forecasters: dict[tuple[str, str], Forecaster] = {}
        self.prepared = []
        for published in runs:
            chip = gpu(published.gpu)
            if (place := (chip.name, published.stack)) not in forecasters:
                software = software_on(chip, published.stack)
                forecasters[place] = Forecaster(chip, "sustained", measured=calibrated(chip.name)[0], software=software)
            model, run = published.model, published.run
            self.prepared.append((published, forecasters[place], model, run, derive(model, run)))

    def compared(self) -> list[Compared]:
        comparisons = []
        for published, forecaster, model, run, workload in self.prepared:
            step = StepForecast(forecaster, model, run, workload).step(published.recipe).interval
            tokens = run.tokens_per_gpu * 1000
            low, high = (tokens / end for end in (step.high, step.low) if end is not None)
            comparisons.append(Compared(published, Interval(tokens / step.value, low, high)))
        return comparisons


def summary(compared: Iterable[Compared]) -> dict[str, tuple[int, float, int]]:
    """By kind: how many, their median error, and how many lie inside their error bars."""
    groups: dict[str, list[Compared]] = {}
    for comparison in compared:
        run = comparison.run
        kind = f"{'fitted' if run.fitted else 'not fitted'}, {'with experts' if run.has_experts else 'dense'}"
        groups.setdefault(kind, []).append(comparison)
    return {
        kind: (len(some), median(abs(comparison.error) for comparison in some), sum(comparison.holds for comparison in some))
        for kind, some in groups.items()
    }


def main() -> None:
    """Print the table."""
    compared = Scorer(published_runs()).compared()
    for comparison in compared:
        run, forecast = comparison.run, comparison.tokens_per_s
        print(
            f"{'*' if run.fitted else ' '} {run.preset:16} {run.gpu:6} {run.gpus:5} {run.recipe:10} {run.layout:24}"
            f" mbs {run.micro_batch} gbs {run.global_batch:5} {run.container:8}"
            f" {run.tokens_per_s:7.0f} {forecast.value:7.0f} {comparison.error:+7.1%}  [{forecast.low:.0f}, {forecast.high:.0f}]"
            f"{'' if comparison.holds else '  outside'}"
        )
    for kind, (count, error, inside) in summary(compared).items():
        print(f"{kind}: {count} runs, median error {error:.1%}, {inside} inside the error bar")


if __name__ == "__main__":
    main()
