"""The run file of `gemmscope step`: every step that was timed, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from pydantic import Field

from gemmscope import __version__
from gemmscope.interval import Interval
from gemmscope.step.answer import RecipeAnswer, StepAnswer
from gemmscope.step.breakeven import AtBatch
from gemmscope.step.cost import Cost
from gemmscope.step.predict import StepSettings
from gemmscope.step.recommend import Recommendation
from gemmscope.step.results import StepResults, VariantResult
from gemmscope.store.benchfile import IntervalRecord, interval_record
from gemmscope.store.runfile import ModelRecord, Record, RunRecord


class LevelRecord(Record):
    """One row of the waterfall."""

    row: str
    baseline_ms: float
    recipe_ms: float
    speedup: float = Field(description="of everything down to this row")


class CostRecord(Record):
    """Of the whole run: where the step was measured without communication, where it is forecast with it."""

    days: IntervalRecord
    gpu_hours: IntervalRecord
    money: IntervalRecord | None = None


class VerifiedRecord(Record):
    """Predicted beside real: the speedup, or the baseline's milliseconds."""

    depth: int
    predicted: IntervalRecord
    actual: IntervalRecord
    error: float


class RecipeRecord(Record):
    """One precision: milliseconds of one step on one rank."""

    recipe: str
    step_ms: IntervalRecord
    speedup: IntervalRecord | None
    tokens_per_s: float
    model_tflops: float = Field(description="FLOPs of linears and attention, recomputation left out, over the step's time")
    model_flops_utilisation: float | None = Field(
        default=None, description="model_tflops over the chip's dense BF16 rate, in every precision"
    )
    gpu_busy_ms: float | None
    host_ms: float | None = Field(description="what launching the step takes the CPU")
    host_bound: bool
    peak_bytes: float | None = Field(description="of the real model, from what the stack held")
    waterfall: list[LevelRecord]
    named_share: float | None = Field(description="of GPU time whose kernels are of a known kind")
    verdict: str
    verified: VerifiedRecord | None = None
    cost: CostRecord | None = None


class AtBatchRecord(Record):
    """What every precision gains on one batch."""

    micro_batch_size: int
    sequence_length: int
    speedups: dict[str, IntervalRecord]


class VariantRecord(Record):
    """What was run, with every sample."""

    recipe: str
    depth: int
    left_out: list[str]
    real: bool
    rounds_ms: list[list[float]]
    states: list[dict[str, Any]]
    parts: list[Any] = Field(description="part, direction, its kernels (name, microseconds, stream) of one step")
    facts: dict[str, Any]
    failure: str = ""
    failure_kind: str = ""


class RecommendationRecord(Record):
    """What to use."""

    recipe: str
    left_out: list[str]
    certain: bool
    words: str
    ready_to_paste: dict[str, str]


class StepFile(Record):
    """The whole file."""

    schema_version: Literal[1] = 1
    kind: Literal["step"] = "step"
    gemmscope_version: str = __version__
    command: list[str]
    origin: str
    model: ModelRecord
    run: RunRecord
    environment: dict[str, Any]
    device: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]
    depth: int = Field(description="of the stacks that were run")
    layers: int
    ended: str
    seconds: dict[str, float] = Field(default={}, description="what predicting took, and verifying")
    recipes: list[RecipeRecord]
    recommendation: RecommendationRecord | None
    break_even: list[AtBatchRecord] = Field(default=[], description="smaller batches, and this one last")
    variants: list[VariantRecord]
    notes: list[str]

    def to_json(self) -> str:
        """As it is written to disk."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


def step_file(
    *,
    command: Sequence[str],
    origin: str,
    model: ModelRecord,
    run: RunRecord,
    environment: dict[str, Any],
    settings: StepSettings,
    results: Sequence[StepResults],
    found: StepAnswer,
    costs: Mapping[str, Cost],
    recommended: Recommendation | None,
    batches: Sequence[AtBatch],
    pasted: Mapping[str, str],
    ended: str,
    seconds: Mapping[str, float],
    notes: Sequence[str],
) -> StepFile:
    """Put together what was found. `results`: the prediction's, and those of `--verify` and of mixed plans."""
    return StepFile(
        command=list(command),
        origin=origin,
        model=model,
        run=run,
        environment=environment,
        device=results[0].hello.get("device", {}),
        versions=results[0].hello.get("versions", {}),
        settings=asdict(settings),
        depth=found.depth,
        layers=found.layers,
        ended=ended,
        seconds=dict(seconds),
        recipes=[_recipe(each, costs.get(each.recipe)) for each in found.recipes],
        recommendation=_recommendation(recommended, pasted) if recommended is not None else None,
        break_even=[
            AtBatchRecord(
                micro_batch_size=each.micro_batch_size,
                sequence_length=each.sequence_length,
                speedups={name: interval_record(gain) for name, gain in each.speedups.items()},
            )
            for each in batches
        ],
        variants=[_variant(each) for result in results for each in result.variants.values()],
        notes=list(notes),
    )


def _maybe(found: Interval | None) -> IntervalRecord | None:
    return interval_record(found) if found is not None else None


def _recipe(each: RecipeAnswer, cost: Cost | None) -> RecipeRecord:
    levels = each.waterfall.levels if each.waterfall is not None else ()
    verified = each.verified
    return RecipeRecord(
        recipe=each.recipe,
        step_ms=interval_record(each.step),
        speedup=_maybe(each.speedup),
        tokens_per_s=each.tokens_per_s,
        model_tflops=each.model_tflops,
        model_flops_utilisation=each.utilisation,
        gpu_busy_ms=each.busy_ms,
        host_ms=each.host_ms,
        host_bound=each.host_bound,
        peak_bytes=each.peak_bytes,
        waterfall=[
            LevelRecord(row=level.row, baseline_ms=level.slow_ms, recipe_ms=level.fast_ms, speedup=level.speedup)
            for level in levels
        ],
        named_share=each.waterfall.named if each.waterfall is not None else None,
        verdict=each.words,
        verified=VerifiedRecord(
            depth=verified.depth,
            predicted=interval_record(verified.predicted),
            actual=interval_record(verified.actual),
            error=verified.error,
        )
        if verified is not None
        else None,
        cost=cost_record(cost) if cost is not None else None,
    )


def cost_record(cost: Cost) -> CostRecord:
    """As it is written to disk."""
    return CostRecord(days=interval_record(cost.days), gpu_hours=interval_record(cost.gpu_hours), money=_maybe(cost.money))


def _recommendation(found: Recommendation, pasted: Mapping[str, str]) -> RecommendationRecord:
    return RecommendationRecord(
        recipe=found.plan.recipe,
        left_out=list(found.plan.left_out),
        certain=found.certain,
        words=found.words,
        ready_to_paste=dict(pasted),
    )


def _variant(result: VariantResult) -> VariantRecord:
    variant = result.variant
    return VariantRecord(
        recipe=variant.recipe,
        depth=variant.depth,
        left_out=list(variant.left_out),
        real=variant.real,
        rounds_ms=result.rounds,
        states=result.states,
        parts=[list(part) for part in result.parts],
        facts={**result.facts, "busy_ms": result.busy_ms, "host_ms": result.host_ms},
        failure=result.failure,
        failure_kind=result.failure_kind,
    )
