"""A whole training step: everything one rank runs, in the same parts that `gemmscope step` measures.

GEMMs and their quantization depend on the recipe; the head, attention, norms, activations, loss and optimizer do not, and
dilute the speedup. A model split over several GPUs also waits for collectives, and for the pipeline to fill.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gemmscope.forecast.comm import Communication, communication
from gemmscope.forecast.estimate import Estimate, pairwise, ratio, total, winner_that_fits
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.training import NEVER_QUANTIZED, facts, op_ms, uncertainty_of
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.parts import StepPart, in_order
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.results.forecast import RecipeMemory
from gemmscope.results.linears import Speedup
from gemmscope.results.step import StepTime, StepTimes
from gemmscope.step.cost import Budget, cost
from gemmscope.step.waterfall import levels_of, verdict
from gemmscope.workload.cases import Case
from gemmscope.workload.derive import EMBEDDING, HEAD, Workload, derive
from gemmscope.workload.ops import GroupedLinear, Linear, Op, Optimizer
from gemmscope.workload.summary import totals

ROUTING_OPS = ("Token Dispatch", "Token Combine")
BACKWARD_SHARE = 0.6  # of a micro-batch's time
CHANGED: tuple[StepPart, ...] = ("GEMMs", "quantization")
PROPORTIONAL: StepPart = "pipeline bubble"
IDLE: StepPart = "idle, host-bound"


@dataclass(frozen=True)
class StepEstimate:
    """One recipe's step: milliseconds by part."""

    parts: dict[StepPart, Estimate]

    @cached_property
    def total(self) -> Estimate:
        return total(self.parts.values())

    @cached_property
    def changed(self) -> Estimate:
        """What depends on the recipe."""
        return total(estimate for part, estimate in self.parts.items() if part in CHANGED)

    @cached_property
    def constant(self) -> Estimate:
        """What does not; a pipeline bubble follows the rest of the step."""
        return total(estimate for part, estimate in self.parts.items() if part not in (*CHANGED, PROPORTIONAL))

    @property
    def parts_ms(self) -> dict[StepPart, float]:
        return {part: estimate.value for part, estimate in self.parts.items()}

    @property
    def host_bound(self) -> bool:
        """Launching takes longer than running: the GPU waits."""
        return IDLE in self.parts


@dataclass(frozen=True)
class _Fixed:
    """What does not depend on the recipe: parts of one micro-batch, of one step, and what is exchanged."""

    per_micro_batch: dict[StepPart, Estimate]
    optimizer: Estimate
    exchanged: Communication
    head_least_ms: float  # at the clock of a burst


class StepForecast:
    """The step of one model, run and chip in any recipe."""

    def __init__(self, forecaster: Forecaster, model: ModelSpec, run: RunSpec, workload: Workload, dp: int = 1) -> None:
        self.forecaster, self.model, self.run, self.workload = forecaster, model, run, workload
        self.linears = [op for op in workload.ops if isinstance(op, Linear)]
        self.cases = [_case(op) for op in self.linears]
        pairs = zip(self.linears, self.cases, strict=True)
        self.quantized = [(case, op.count, op.forward_runs) for op, case in pairs if _part_of_linear(op) == "GEMMs"]
        self._dp, self._sizes = dp, [(case.op, case.sizes()) for case, _, _ in self.quantized]
        runs = sum(count * forward for _, count, forward in self.quantized)
        self._weight_runs = (2 + runs / max(sum(count for _, count, _ in self.quantized), 1)) / 3

    def why_not(self, name: str) -> str:
        """Why a recipe cannot run this model; empty if it can."""
        chosen = recipe(name)
        if chosen.quantizes:
            for op, sizes in self._sizes:
                if reason := chosen.misaligned(sizes):
                    return f"{op}: {reason}"
        return ""

    def step(self, name: str) -> StepEstimate:
        """All parts in one recipe."""
        fixed, batches = self.fixed, self.run.gradient_accumulation
        gemms, gemms_least_ms, activations, weights = self.forecaster.in_step(self.quantized, name)
        # A weight is quantized once per step where that is kept, else wherever forward runs.
        weight_casts = 1 / batches if batches > 1 or self.forecaster.cache_weights else self._weight_runs
        quantization = total([activations, weights.times(weight_casts)])
        every: dict[StepPart, Estimate] = {"GEMMs": gemms, "quantization": quantization, **fixed.per_micro_batch}
        least: dict[StepPart, float] = {"GEMMs": gemms_least_ms, "head and loss": fixed.head_least_ms}
        one = self._at_step_clock({part: estimate for part, estimate in every.items() if estimate.value}, least)
        parts = {part: estimate.times(batches) for part, estimate in one.items()}
        if fixed.optimizer.value:
            parts["optimizer"] = fixed.optimizer
        batch_ms = sum(estimate.value for estimate in one.values())
        network = facts()["network"]
        exposed = max(0.0, fixed.exchanged.data_ms - network["hidden_share"] * BACKWARD_SHARE * batch_ms)
        waited = batches * fixed.exchanged.per_micro_batch_ms + exposed
        if waited:
            parts["exposed communication"] = Estimate(waited, 0.0, network["uncertainty"])
        if self.run.pp > 1:
            shared = total(one.values())
            bubble = (self.run.pp - 1) * (shared.value + fixed.exchanged.per_micro_batch_ms)
            parts["pipeline bubble"] = Estimate(bubble, shared.own, shared.shared)
        busy, launch_ms = total(parts.values()), self.launch_ms(name)
        if launch_ms > busy.value:
            idle_ms, unsure_ms = launch_ms - busy.value, facts()["host"]["uncertainty"] * launch_ms
            parts[IDLE] = Estimate(idle_ms, 0.0, max(unsure_ms - busy.value * busy.shared, 0.0) / idle_ms)
        return StepEstimate(in_order(parts))

    def _at_step_clock(self, parts: dict[StepPart, Estimate], least: dict[StepPart, float]) -> dict[StepPart, Estimate]:
        """GEMMs in a step run at a higher clock than back to back, because what runs between them draws less power.

        None runs faster than in a burst, whose times are `least`.
        """
        time_ms = sum(estimate.value for estimate in parts.values())
        if self.forecaster.state != "sustained" or not time_ms:
            return parts
        known = facts()["clock"]
        resting = 1 - sum(estimate.value for part, estimate in parts.items() if part in least) / time_ms
        factor = 1 - min(known["gain_per_rest"] * resting, known["most"])
        return {
            part: estimate.times(max(factor, least[part] / estimate.value)) if part in least else estimate
            for part, estimate in parts.items()
        }

    @cached_property
    def fixed(self) -> _Fixed:
        """Everything but quantized linears."""
        chip = self.forecaster.chip
        estimates: dict[StepPart, list[Estimate]] = {}
        optimizer, saved = Estimate(0.0), 0.0
        for op in self.workload.ops:
            if isinstance(op, Linear):
                part = _part_of_linear(op)
                if part != "GEMMs":
                    gemms = self.forecaster.linear(_case(op), BASELINE).all_gemms()
                    times = op.count * (1 + (op.forward_runs - 1) / 3)
                    estimates.setdefault(part, []).append(gemms.times(times))
                    if part == "head and loss":
                        saved += (gemms.value - self.forecaster.least_ms(_case(op), BASELINE)) * times
                continue
            part, table = _part_of(op)
            estimate = self.forecaster.other(op_ms(op, chip), part, uncertainty_of(table, chip))
            if isinstance(op, Optimizer):
                optimizer = estimate
            else:
                estimates.setdefault(part, []).append(estimate)
        experts = [op for op in self.linears if isinstance(op, GroupedLinear)]
        in_experts = sum(op.parameters * op.count for op in experts)
        exchanged = communication(chip, self.model, self.run, self.layers, self.workload.parameters, self._dp, in_experts)
        parts = {part: total(of_part) for part, of_part in estimates.items()}
        head = parts["head and loss"].value if "head and loss" in parts else 0.0
        return _Fixed(parts, optimizer, exchanged, head - saved)

    @property
    def layers(self) -> int:
        """That this rank holds."""
        return sum(op.count for op in self.linears if op.name == "Attn Out")

    def launch_ms(self, name: str) -> float:
        """About what the CPU takes to launch a step."""
        table = facts()["host"]["layer_ms"]
        return float(table.get(name, table["other"]) * self.layers * self.run.gradient_accumulation)


def _case(op: Linear) -> Case:
    rows = op.rows if isinstance(op, GroupedLinear) else ()
    return Case(op.name, op.tokens, op.inputs, op.outputs, op.count, rows)


def _part_of_linear(op: Linear) -> StepPart:
    if op.name in NEVER_QUANTIZED:
        return "routing"
    if op.section in (HEAD, EMBEDDING):  # left in BF16, as frameworks do
        return "head and loss" if op.section == HEAD else "embedding"
    return "GEMMs"


def _part_of(op: Op) -> tuple[StepPart, str]:
    """The part of an op that is not a linear, and the table that has its uncertainty."""
    if op.kind in ("attention", "batched GEMM") or op.name == "Rotary":
        return "attention", "attention"
    if op.kind == "optimizer":
        return "optimizer", "bandwidth"
    if op.section == HEAD:
        return "head and loss", "bandwidth"
    if op.section == EMBEDDING or op.kind == "embedding":
        return "embedding", "bandwidth"
    return ("routing" if op.name in ROUTING_OPS else "norms and activations"), "bandwidth"


def speedup(slow: StepEstimate, fast: StepEstimate, in_common: float) -> Estimate:
    """Of the step. `in_common` is the share of the shared errors of the GEMMs that both sides have alike; parts that both sides
    run alike have the same error, which hardly moves the ratio."""
    value = slow.total.value / fast.total.value
    if not fast.changed.value:
        return Estimate(value)
    share = fast.changed.value / (fast.changed.value + fast.constant.value)  # how much of the step the precision touches
    gain = ratio(slow.changed, fast.changed, in_common)
    dilution = fast.constant.shared * (1 - share) * abs(1 - 1 / value)  # a wrong constant dilutes more or less
    return Estimate(value, gain.own * share, ((gain.shared * share) ** 2 + dilution**2) ** 0.5)


def _model_flops_per_gpu(forecast: StepForecast) -> float:
    """Of one micro-batch: the mean over the stages of a pipeline, not those of the busiest."""
    run, model, workload = forecast.run, forecast.model, forecast.workload
    if run.pp > 1:
        run = replace(run, pp=1, pp_stage=None, pp_layers=None)
        workload = derive(model, run)
    return totals(workload, run, model).model_flops / forecast.run.pp


def forecast_step(
    forecast: StepForecast, names: Sequence[str], budget: Budget | None = None, memory: Sequence[RecipeMemory] = ()
) -> StepTimes:
    """The step in every recipe, the speedup of each over every other, and the winner; with a budget, what the run costs.

    Recipes that do not fit in `memory` are neither winners nor priced.
    """
    needed = {each.recipe: each.total_bytes for each in memory}
    unfit = [each.recipe for each in memory if each.fit == "does not fit"]
    failures = {name: reason for name in names if (reason := forecast.why_not(name))}
    steps = {name: forecast.step(name) for name in names if name not in failures}
    pairs = pairwise(steps, lambda name, over: speedup(steps[over], steps[name], forecast.forecaster.in_common(name, over)))
    run, flops = forecast.run, _model_flops_per_gpu(forecast) * forecast.run.gradient_accumulation
    recipes = []
    for name, step in steps.items():
        time_ms = step.total.value
        waterfall = levels_of(steps[BASELINE].parts_ms, step.parts_ms) if name != BASELINE else ()
        rate = flops / time_ms / 1e9
        recipes.append(
            StepTime(
                recipe=name,
                step_ms=step.total.interval(),
                speedup=pairs.get((name, BASELINE)),
                tokens_per_s=run.tokens_per_gpu / time_ms * 1000,
                total_tokens_per_s=run.tokens_per_gpu * run.gpus / time_ms * 1000,
                model_tflops=rate,
                mfu=rate / forecast.forecaster.chip.tflops["bf16"],
                gpu_busy_ms=time_ms - step.parts_ms.get(IDLE, 0.0),
                host_ms=forecast.launch_ms(name),
                peak_bytes=needed.get(name),
                parts_ms=step.parts_ms,
                waterfall=waterfall,
                verdict=verdict(waterfall) if waterfall else None,
                cost=cost(step.total.interval(), run, budget) if budget is not None and name not in unfit else None,
            )
        )
    return StepTimes(
        origin="forecast",
        recipes=tuple(recipes),
        speedups=tuple(Speedup(recipe=name, over=over, speedup=gain) for (name, over), gain in pairs.items()),
        winner=winner_that_fits(pairs, unfit),
        failures=failures,
        unfit=tuple(name for name in steps if name in unfit),
        gpus=run.gpus,
        global_batch=run.global_batch,
    )
