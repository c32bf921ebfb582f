"""A whole training step: everything one rank runs, in the rows that `gemmscope step` explains a measured one with.

Products and their quantization depend on the precision; the head, attention, norms, activations, loss and optimizer do not, and
dilute what it gains. A split model also waits for collectives, and for the pipeline to fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemmscope.forecast.comm import Communication, communication
from gemmscope.forecast.estimate import Estimate, ratio, total
from gemmscope.forecast.linears import Forecaster, in_common
from gemmscope.forecast.training import NEVER_QUANTIZED, doubt_of, facts, op_ms
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.step.answer import RecipeAnswer, StepAnswer
from gemmscope.step.waterfall import ROWS, Row, Waterfall, levels_of, verdict
from gemmscope.workload.cases import Case
from gemmscope.workload.derive import EMBEDDING, HEAD, Workload
from gemmscope.workload.ops import GroupedLinear, Linear, Op, Optimizer
from gemmscope.workload.summary import totals

ROUTING_OPS = ("Token Dispatch", "Token Combine")
BACKWARD_SHARE = 0.6  # of a micro-batch's time


@dataclass(frozen=True)
class Step:
    """One recipe's step: milliseconds by row."""

    rows: dict[Row, Estimate]

    @property
    def total(self) -> Estimate:
        return total(self.rows.values())


@dataclass(frozen=True)
class _Fixed:
    """What does not depend on the recipe: rows of one micro-batch, of one step, and what is exchanged."""

    per_micro_batch: dict[Row, Estimate]
    optimizer: Estimate
    exchanged: Communication
    head_least_ms: float  # at the clock of a burst


class StepForecast:
    """The step of one model, run and chip in any recipe."""

    def __init__(self, forecaster: Forecaster, model: ModelSpec, run: RunSpec, workload: Workload, dp: int = 1) -> None:
        self.forecaster, self.run = forecaster, run
        self.linears = [op for op in workload.ops if isinstance(op, Linear)]
        self.cases = [_case(op) for op in self.linears]
        pairs = zip(self.linears, self.cases, strict=True)
        self.quantized = [(case, op.count, op.forward_runs) for op, case in pairs if _row_of_linear(op) == "products"]
        self._workload, self._model, self._dp = workload, model, dp
        self._fixed: _Fixed | None = None
        runs = sum(count * forward for _, count, forward in self.quantized)
        self._weight_runs = (2 + runs / max(sum(count for _, count, _ in self.quantized), 1)) / 3

    def why_not(self, name: str) -> str:
        """Why a recipe cannot run this model; empty if it can."""
        asked = recipe(name)
        if asked.quantizes:
            for case, _, _ in self.quantized:
                words = asked.misaligned(case.sizes())
                if words:
                    return f"{case.op}: {words}"
        return ""

    def step(self, name: str) -> Step:
        """All rows in one recipe."""
        fixed = self.fixed()
        linears, batches = self.forecaster.together(self.quantized, name), self.run.gradient_accumulation
        quantizing = total([linears.activations, linears.weights.times(self._weight_casts())])
        parts: dict[Row, Estimate] = {"products": linears.products, "quantization": quantizing, **fixed.per_micro_batch}
        least: dict[Row, float] = {"products": linears.least_ms, "head and loss": fixed.head_least_ms}
        one = self._at_step_clock({row: part for row, part in parts.items() if part.value}, least)
        rows = {row: found.times(batches) for row, found in one.items()}
        if fixed.optimizer.value:
            rows["optimizer"] = fixed.optimizer
        batch_ms = sum(found.value for found in one.values())
        exposed = max(0.0, fixed.exchanged.data_ms - facts()["network"]["hidden_share"] * BACKWARD_SHARE * batch_ms)
        waited = batches * fixed.exchanged.per_micro_batch_ms + exposed
        if waited:
            rows["communication"] = Estimate(waited, 0.0, facts()["network"]["doubt"])
        if self.run.pp > 1:
            shared = total(one.values())
            bubble = (self.run.pp - 1) * (shared.value + fixed.exchanged.per_micro_batch_ms)
            rows["pipeline bubble"] = Estimate(bubble, shared.own, shared.shared)
        return Step({row: rows[row] for row in ROWS if row in rows})

    def _weight_casts(self) -> float:
        """How often one micro-batch quantizes a weight: once per step where it is kept, else wherever forward runs."""
        batches = self.run.gradient_accumulation
        return 1 / batches if batches > 1 or self.forecaster.cache_weights else self._weight_runs

    def _at_step_clock(self, rows: dict[Row, Estimate], least: dict[Row, float]) -> dict[Row, Estimate]:
        """Products in a step run at a higher clock than back to back: what stands between them draws less power.

        None runs faster than in a burst, whose times are `least`.
        """
        if self.forecaster.state != "sustained":
            return rows
        dense = {row: found for row, found in rows.items() if row in least}
        time_ms = sum(found.value for found in rows.values())
        if not time_ms:
            return rows
        known = facts()["clock"]
        resting = 1 - sum(found.value for found in dense.values()) / time_ms
        factor = 1 - min(known["gain_per_rest"] * resting, known["most"])
        return {row: found.times(max(factor, least[row] / found.value)) if row in dense else found for row, found in rows.items()}

    def fixed(self) -> _Fixed:
        """Everything but quantized linears, computed once."""
        if self._fixed is None:
            self._fixed = self._compute_fixed()
        return self._fixed

    def _compute_fixed(self) -> _Fixed:
        chip = self.forecaster.chip
        parts: dict[Row, list[Estimate]] = {}
        optimizer, saved = Estimate(0.0), 0.0
        for op in self._workload.ops:
            if isinstance(op, Linear):
                row = _row_of_linear(op)
                if row != "products":
                    found, times = (
                        self.forecaster.linear(_case(op), BASELINE).product(),
                        op.count * (1 + (op.forward_runs - 1) / 3),
                    )
                    parts.setdefault(row, []).append(found.times(times))
                    if row == "head and loss":
                        saved += (found.value - self.forecaster.least_ms(_case(op), BASELINE)) * times
                continue
            row, table = _row_of(op)
            found = self.forecaster.other(op_ms(op, chip), row, doubt_of(table, chip))
            if isinstance(op, Optimizer):
                optimizer = found
            else:
                parts.setdefault(row, []).append(found)
        layers = sum(op.count for op in self.linears if op.name == "Attn Out")
        held, in_experts = (
            self._workload.parameters,
            sum(op.parameters * op.count for op in self.linears if isinstance(op, GroupedLinear)),
        )
        exchanged = communication(chip, self._model, self.run, layers, held, self._dp, in_experts)
        rows = {row: total(found) for row, found in parts.items()}
        head = rows["head and loss"].value if "head and loss" in rows else 0.0
        return _Fixed(rows, optimizer, exchanged, head - saved)


def _case(op: Linear) -> Case:
    rows = op.rows if isinstance(op, GroupedLinear) else ()
    return Case(op.name, op.tokens, op.inputs, op.outputs, op.count, rows)


def _row_of_linear(op: Linear) -> Row:
    if op.name in NEVER_QUANTIZED:
        return "routing"
    if op.section in (HEAD, EMBEDDING):  # left in BF16, as frameworks do
        return "head and loss" if op.section == HEAD else "embedding"
    return "products"


def _row_of(op: Op) -> tuple[Row, str]:
    """Where an op that is no linear falls, and the table that knows its doubt."""
    if op.kind in ("attention", "batched GEMM") or op.name == "Rotary":
        return "attention", "attention"
    if op.kind == "optimizer":
        return "optimizer", "bandwidth"
    if op.section == HEAD:
        return "head and loss", "bandwidth"
    if op.section == EMBEDDING or op.kind == "embedding":
        return "embedding", "bandwidth"
    return ("routing" if op.name in ROUTING_OPS else "norms and activations"), "bandwidth"


def step_answer(forecast: StepForecast, names: Sequence[str], model: ModelSpec, run: RunSpec, workload: Workload) -> StepAnswer:
    """All recipes in the form that `gemmscope step` reports: speedups, tokens per second, the way from products to the step."""
    flops = totals(workload, run, model).model_flops * run.gradient_accumulation
    tokens = run.tokens * run.cp * run.gradient_accumulation
    baseline = forecast.step(BASELINE)
    made, failures = [], {}
    for name in names:
        reason = forecast.why_not(name)
        if reason:
            failures[name] = reason
            continue
        found = forecast.step(name)
        time_ms, fall, words = found.total.value, None, ""
        if name != BASELINE:
            sides = [{row: part.value for row, part in each.rows.items()} for each in (baseline, found)]
            fall = Waterfall(levels_of(*sides), 1.0, ())
            words = verdict(fall, recipe(name), ())
        made.append(
            RecipeAnswer(
                recipe=name,
                step=found.total.interval(),
                speedup=speedup(baseline, found).interval() if name != BASELINE else None,
                tokens_per_s=tokens / time_ms * 1000,
                model_tflops=flops / time_ms / 1e9,
                utilisation=flops / time_ms / 1e9 / forecast.forecaster.chip.tflops["bf16"],
                busy_ms=time_ms,
                host_ms=launching_ms(forecast, name),
                peak_bytes=None,
                waterfall=fall,
                words=words,
                rows={row: part.value for row, part in found.rows.items()},
            )
        )
    return StepAnswer(tuple(made), failures, 0, len(model.layers))


def launching_ms(forecast: StepForecast, name: str) -> float:
    """Roughly what the CPU takes to launch a step."""
    table = facts()["host"]["layer_ms"]
    layers = sum(op.count for op in forecast.linears if op.name == "Attn Out")
    return float(table.get(name, table["other"]) * layers * forecast.run.gradient_accumulation)


CHANGED: tuple[Row, ...] = ("products", "quantization")
PROPORTIONAL: Row = "pipeline bubble"


def speedup(slow: Step, fast: Step) -> Estimate:
    """How many times faster. What both sides run alike errs alike, and so hardly moves the ratio."""
    value = slow.total.value / fast.total.value
    changed = [total(part for row, part in each.rows.items() if row in CHANGED) for each in (slow, fast)]
    if not changed[1].value:
        return Estimate(value)
    constant = total(part for row, part in fast.rows.items() if row not in (*CHANGED, PROPORTIONAL))
    share = changed[1].value / (changed[1].value + constant.value)  # how much of the step the precision touches
    gain = ratio(changed[0], changed[1], in_common())
    dilution = constant.shared * (1 - share) * abs(1 - 1 / value)  # a wrong constant dilutes more or less
    return Estimate(value, gain.own * share, ((gain.shared * share) ** 2 + dilution**2) ** 0.5)
