"""A whole training step: everything one rank runs, in the same parts that `gemmscope step` measures.

GEMMs and their quantization depend on the recipe; the head, attention, norms, activations, loss and optimizer do not, and
dilute the speedup. A model split over several GPUs also waits for collectives, for the pipeline to fill, and for the slowest GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import hypot, inf, log2

from gemmscope.forecast import traced
from gemmscope.forecast.comm import Exchange, RankShare, exchanges, offload
from gemmscope.forecast.estimate import Estimate, pairwise, ratio, total, winner_that_fits
from gemmscope.forecast.host import at_least, launch_ms
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.memory import rank_memory, shards
from gemmscope.forecast.network import Network, network_of
from gemmscope.forecast.overlap import Exposed, MicroBatch, cluster, exposed
from gemmscope.forecast.training import facts, op_ms, uncertainty_of
from gemmscope.model.spec import ModelSpec, MoeSpec, RunSpec
from gemmscope.parts import StepPart, in_order
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.results.forecast import RecipeMemory
from gemmscope.results.linears import Speedup
from gemmscope.results.step import Exchanged, StepTime, StepTimes
from gemmscope.step.cost import Budget, cost
from gemmscope.step.waterfall import levels_of, verdict
from gemmscope.workload.cases import Case
from gemmscope.workload.derive import EMBEDDING, HEAD, Workload, derive
from gemmscope.workload.ops import OPTIMIZER_BYTES_PER_PARAMETER, PASSES, GroupedLinear, Linear, Op, Optimizer
from gemmscope.workload.recorded import TracedLinear
from gemmscope.workload.sparse import IndexScores, SparseAttention, TopK
from gemmscope.workload.summary import totals

ROUTING_OPS = ("Token Dispatch", "Token Combine")
UNQUANTIZED_ROUTING = ("Router", "Shared Expert Scale")
CHANGED: tuple[StepPart, ...] = ("GEMMs", "quantization")
PROPORTIONAL: StepPart = "pipeline bubble"
WAITING: StepPart = "exposed communication"
IDLE: StepPart = "idle, host-bound"
CountedCase = tuple[Case, int, int]  # a linear, how often it runs, and how often forward does


@dataclass(frozen=True)
class StepEstimate:
    """One recipe's step: milliseconds by part, what is exchanged, and what launching it takes the CPU.

    `common` is the uncertainty of the whole step that no other recipe of the same layout changes. What the parts have in common
    is known at least to `shared_at_most`.
    """

    parts: dict[StepPart, Estimate]
    common: float = 0.0
    shared_at_most: float = inf
    exchanged: tuple[Exposed, ...] = ()
    host_ms: float = 0.0
    host_decides: float = 0.0  # how far the step follows the time of the host: from 0, not at all, to 1

    @cached_property
    def total(self) -> Estimate:
        """With all uncertainties."""
        own = total(self.parts.values())
        return own._replace(shared=hypot(min(own.shared, self.shared_at_most), self.common))

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
    def busy_ms(self) -> float:
        """What the GPU is not idle for."""
        return self.total.value - self.parts_ms.get(IDLE, 0.0)

    @property
    def host_bound(self) -> bool:
        """Launching takes longer than running: the GPU waits."""
        return self.host_ms > self.busy_ms


@dataclass(frozen=True)
class _Fixed:
    """What does not depend on the recipe: parts of one micro-batch, of one step, and what is exchanged."""

    per_micro_batch: dict[StepPart, Estimate]
    expert_activation: Estimate  # a part of the above
    optimizer: Estimate
    exchanged: list[Exchange]
    head_least_ms: float  # at the clock of a burst


class StepForecast:
    """The step of one model, run and chip in any recipe."""

    def __init__(
        self,
        forecaster: Forecaster,
        model: ModelSpec | None,
        run: RunSpec,
        workload: Workload,
        network: Network | None = None,
        *,
        fused: bool = True,
    ) -> None:
        """`model` is None for a traced one. `fused`: a compiler fuses what it runs between GEMMs."""
        self.forecaster, self.model, self.run, self.workload, self.fused = forecaster, model, run, workload, fused
        self.network = network if network is not None else network_of(forecaster.chip)
        self.linears = [op for op in workload.ops if isinstance(op, Linear)]
        self.cases = [_case(op) for op in self.linears]
        quantized = [(op, case) for op, case in zip(self.linears, self.cases, strict=True) if _part_of_linear(op) == "GEMMs"]
        self.quantized: list[CountedCase] = [(case, op.count, op.forward_runs) for op, case in quantized if op.quantized]
        self._plain: list[CountedCase] = [(case, op.count, op.forward_runs) for op, case in quantized if not op.quantized]
        self._sizes = [(case.op, case.sizes()) for _, case in quantized]
        runs = sum(op.count * op.forward_runs for op, _ in quantized)
        self._weight_runs = (2 + runs / max(sum(op.count for op, _ in quantized), 1)) / 3

    def why_not(self, name: str) -> str:
        """Why a recipe cannot run this model; empty if it can. A traced one leaves linears in BF16 that do not fit."""
        chosen = recipe(name)
        if chosen.quantizes and (self.model is not None or not self._linears_that_fit(name)):
            for op, sizes in self._sizes:
                if reason := chosen.misaligned(sizes):
                    return f"{op}: {reason}"
        return ""

    def again(self, run: RunSpec) -> "StepForecast":
        """The same model and chip, run otherwise."""
        return StepForecast(self.forecaster, self.model, run, self.workload, self.network, fused=self.fused)

    def _linears_that_fit(self, name: str) -> list[CountedCase]:
        """The linears that a recipe quantizes."""
        chosen = recipe(name)
        return [each for each in self.quantized if not chosen.quantizes or not chosen.misaligned(each[0].sizes())]

    def step(self, name: str) -> StepEstimate:
        """All parts in one recipe."""
        run, fixed, batches = self.run, self.fixed, self.run.gradient_accumulation
        one = self._micro_batch(name)
        computed = total(one.values())
        hides = MicroBatch(
            one["GEMMs"].value if "GEMMs" in one else 0.0, one["attention"].value if "attention" in one else 0.0, computed.value
        )
        waits = exposed(fixed.exchanged, run, hides)
        waited_ms = sum(each.exposed_ms for each in waits)
        once_ms = sum(each.exposed_ms for each, of in zip(waits, fixed.exchanged, strict=True) if of.per_step)
        gpu_ms = computed.value + (waited_ms - once_ms) / batches
        host_ms = self._host_ms(name)
        ahead_ms = (once_ms + fixed.optimizer.value) / batches  # the CPU goes on launching while these run
        batch_ms = at_least(gpu_ms, host_ms, ahead_ms, experts=bool(self.held.moe_layers))
        parts = {part: estimate.times(batches) for part, estimate in one.items()}
        if fixed.optimizer.value:
            parts["optimizer"] = fixed.optimizer
        if waited_ms:
            parts[WAITING] = Estimate(waited_ms, hypot(*(each.unsure_ms for each in waits)) / waited_ms)
        if run.pp > 1:  # the other stages have no output head
            head_ms = one["head and loss"].value if "head and loss" in one else 0.0
            bubble_ms = (run.pp - 1) / run.vp * (batch_ms - head_ms * (1 - 1 / run.pp))
            parts[PROPORTIONAL] = Estimate(bubble_ms, computed.own, computed.shared)
        decides = 0.0
        if batch_ms > gpu_ms * 1.0001:
            host = cluster()["host"]
            decides = (host_ms / batch_ms) ** host["sharpness"] if self.held.moe_layers else 1.0
            idle_ms = (batch_ms - gpu_ms) * batches
            parts[IDLE] = Estimate(idle_ms, decides * host["uncertainty"] * host_ms * batches / idle_ms)
        known = cluster()["steps"]["at_most"] if self.model is not None else {}  # published steps are none of a traced module
        at_most = known.get(self.forecaster.chip.architecture, inf)
        return StepEstimate(in_order(parts), self._common, at_most, tuple(waits), host_ms * batches, decides)

    def _micro_batch(self, name: str) -> dict[StepPart, Estimate]:
        """What one micro-batch computes."""
        fixed, batches = self.fixed, self.run.gradient_accumulation
        gemms, least_ms, activations, weights = self._gemms(name)
        # A weight is quantized once per step where that is kept, else wherever forward runs.
        weight_casts = 1 / batches if batches > 1 or self.forecaster.cache_weights else self._weight_runs
        quantization = total([activations, weights.times(weight_casts)])
        every: dict[StepPart, Estimate] = {"GEMMs": gemms, "quantization": quantization, **fixed.per_micro_batch}
        known = cluster()["experts"]
        if self._biased and name not in known["fused_biases"]:
            unfused = fixed.expert_activation.times(known["biased"] - 1)
            every["norms and activations"] = total([every["norms and activations"], unfused])
        least: dict[StepPart, float] = {"GEMMs": least_ms, "head and loss": fixed.head_least_ms}
        one = self._at_step_clock({part: estimate for part, estimate in every.items() if estimate.value}, least)
        return {part: estimate.times(self._slower) for part, estimate in one.items()}

    def _gemms(self, name: str) -> tuple[Estimate, float, Estimate, Estimate]:
        """As `Forecaster.in_step`. A traced model has linears that stay in BF16 beside the quantized ones."""
        if self.model is not None:
            return self.forecaster.in_step(self.quantized, name)
        fit = self._linears_that_fit(name)
        rest = [*self._plain, *(each for each in self.quantized if each not in fit)]
        gemms, least_ms, activations, weights = self.forecaster.in_step(fit, name)
        others, least_of_others, _, _ = self.forecaster.in_step(rest, BASELINE)
        return total([gemms, others]), least_ms + least_of_others, activations, weights

    def _host_ms(self, name: str) -> float:
        """What launching one micro-batch takes the CPU."""
        if self.model is not None:
            return launch_ms(name, self.held.dense_layers, self.held.moe_layers, self.run)
        graphs = cluster()["host"]["graphs"] if self.run.cuda_graphs else 1.0
        quantized = sum(count for _, count, _ in self._linears_that_fit(name))
        return traced.launch_ms(self.workload.ops, name, quantized, fused=self.fused, graphs=graphs)

    @property
    def launches(self) -> int:
        """Kernels of one micro-batch of a traced model in BF16."""
        return traced.launches(self.workload.ops, fused=self.fused)

    @cached_property
    def _biased(self) -> bool:
        """Whether experts have biases."""
        return self.model is not None and any(
            isinstance(layer.mlp, MoeSpec) and layer.mlp.expert.up_bias for layer in self.model.layers[-1:]
        )

    @cached_property
    def _slower(self) -> float:
        """Steps over the kernels that they are made of: on architectures where only published steps are known, on many GPUs."""
        factor = float(cluster()["steps"].get(self.forecaster.chip.architecture, 1.0))
        several = cluster()["several"]
        return factor * (several["factor"] + several["per_doubling"] * self._doublings if self.run.gpus > 1 else 1.0)

    @property
    def _doublings(self) -> float:
        """How often the number of GPUs has doubled beyond a few hundred."""
        return max(log2(self.run.gpus / cluster()["several"]["many"]), 0.0)

    @cached_property
    def _common(self) -> float:
        """The uncertainty of the whole step that every recipe has alike."""
        of_step = uncertainty_of("steps", self.forecaster.chip, cluster())
        known = cluster()["several"]
        several = known["uncertainty"] + known["uncertainty_per_doubling"] * self._doublings if self.run.gpus > 1 else 0.0
        experts = self.held.moe_layers or (self.model is None and any(op.groups > 1 for op in self.linears))
        return hypot(of_step, several, cluster()["experts"]["software"] if experts else 0.0)

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
        optimizer, activation, saved = Estimate(0.0), Estimate(0.0), 0.0
        for op in self.workload.ops:
            if isinstance(op, Linear):
                part = _part_of_linear(op)
                if part != "GEMMs":
                    gemms = self.forecaster.linear(_case(op), BASELINE).all_gemms()
                    times = op.count * (1 + (op.forward_runs - 1) / len(op.passes))
                    estimates.setdefault(part, []).append(gemms.times(times))
                    if part == "head and loss":
                        saved += (gemms.value - self.forecaster.least_ms(_case(op), BASELINE)) * times
                continue
            if isinstance(op, traced.TracedOp):
                part, unsure = traced.part_of(op), traced.uncertainty_of(op, fused=self.fused)
                estimates.setdefault(part, []).append(Estimate(traced.traced_ms(op, chip, fused=self.fused), 0.0, unsure))
                continue
            part, table = _part_of(op)
            estimate = self.forecaster.other(op_ms(op, chip), part, uncertainty_of(table, chip))
            if isinstance(op, Optimizer):
                optimizer = estimate.times(self._optimizer_share)
            else:
                estimates.setdefault(part, []).append(estimate)
            if op.name == "Expert Activation":
                activation = total([activation, estimate])
        parts = {part: total(of_part) for part, of_part in estimates.items()}
        if "routing" in parts:
            parts["routing"] = parts["routing"].times(float(cluster()["experts"]["routing"]))
        head = parts["head and loss"].value if "head and loss" in parts else 0.0
        exchanged = exchanges(chip, self.network, self.model, self.run, self.held)
        if self.run.offloaded_layers:
            exchanged.append(offload(self.network, self._offloaded_bytes()))
        return _Fixed(parts, activation, optimizer, exchanged, head - saved)

    @cached_property
    def held(self) -> RankShare:
        """What this rank holds."""
        in_experts = sum(op.all_parameters for op in self.linears if isinstance(op, GroupedLinear) and op.experts)
        attentions, mixers, mlps, moe_layers = (
            sum(op.count for op in self.linears if op.name == name) for name in ("Attn Out", "Mixer Out", "MLP Down", "Router")
        )
        layers = sum(self.workload.layers.values())
        updated = sum(op.updated for op in self.workload.ops if isinstance(op, Optimizer))  # all that a trace knows of them
        parameters = self.workload.parameters if self.model is not None else updated
        return RankShare(layers, moe_layers, parameters - in_experts, in_experts, attentions, attentions + mixers, mlps)

    def _offloaded_bytes(self) -> float:
        """What one micro-batch leaves in the memory of the CPU."""
        if self.model is None:
            return 0.0
        kept = rank_memory(self.model, replace(self.run, offloaded_layers=0), BASELINE, self.forecaster.chip)
        return kept.activations / max(kept.in_flight, 1.0) * min(self.run.offloaded_layers / max(self.held.layers, 1), 1.0)

    @property
    def _optimizer_share(self) -> float:
        """What the optimizer moves over what one in BF16 would that updates all the rank's parameters."""
        run, held = self.run, self.held
        bytes_moved = facts()["bandwidth"]["optimizer_bytes"][run.state_precision] / OPTIMIZER_BYTES_PER_PARAMETER
        if not run.zero_stage or not held.parameters:
            return float(bytes_moved)
        dense, experts = shards(run)
        updated = held.parameters / dense + held.in_experts / experts
        return float(bytes_moved * updated / (held.parameters + held.in_experts))


def _case(op: Linear) -> Case:
    rows = op.rows if isinstance(op, GroupedLinear) else ()
    if isinstance(op, TracedLinear):
        ran = {gemm.pass_name for gemm in op.seen}
        rows = tuple((op.tokens + index) // op.groups for index in range(op.groups)) if op.groups > 1 else ()
        passes = tuple(each for each in PASSES if each in ran)
        return Case(op.name, op.tokens, op.inputs, op.outputs, op.count, rows, passes, quantized=op.quantized)
    return Case(op.name, op.tokens, op.inputs, op.outputs, op.count, rows, passes=op.passes, quantized=op.quantized)


def _part_of_linear(op: Linear) -> StepPart:
    if not op.quantized and op.name.startswith(("Stream", "Laurel")):
        return "norms and activations"
    if not op.quantized and not isinstance(op, TracedLinear):
        return "routing" if op.name in UNQUANTIZED_ROUTING else "linear attention" if op.name.startswith("Mixer") else "attention"
    if op.section in (HEAD, EMBEDDING):  # left in BF16, as frameworks do
        return "head and loss" if op.section == HEAD else "embedding"
    return "GEMMs"


def _part_of(op: Op) -> tuple[StepPart, str]:
    """The part of an op that is not a linear, and the table that has its uncertainty."""
    if op.kind in ("scan", "causal convolution"):
        return "linear attention", "linear attention"
    if isinstance(op, (IndexScores, SparseAttention, TopK)):
        return "attention", "sparse attention"
    if op.kind in ("attention", "batched GEMM") or op.name in ("Rotary", "Indexer Norm"):
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
    host = _host_uncertainty(slow, fast)
    if not fast.changed.value:
        return Estimate(value, host)
    share = fast.changed.value / (fast.changed.value + fast.constant.value)  # how much of the step the precision touches
    gain = ratio(slow.changed, fast.changed, in_common)
    dilution = fast.constant.shared * (1 - share) * abs(1 - 1 / value)  # a wrong constant dilutes more or less
    return Estimate(value, hypot(gain.own * share, host), hypot(gain.shared * share, dilution))


def _host_uncertainty(slow: StepEstimate, fast: StepEstimate) -> float:
    """Of a speedup: where the host decides both steps, how much longer launching one takes; where it decides one, all of it."""
    known = cluster()["host"]
    both, one = sorted((slow.host_decides, fast.host_decides))
    return hypot(both * known["uncertainty_of_ratio"], (one - both) * known["uncertainty"])


def _model_flops_per_gpu(forecast: StepForecast) -> float:
    """Of one micro-batch: the mean over the GPUs that share it, whichever stage and experts each of them has."""
    run = forecast.run
    if forecast.model is None:
        return totals(forecast.workload, run, None).model_flops
    whole = RunSpec(run.micro_batch_size, run.sequence_length, separate_projections=run.separate_projections)
    return totals(derive(forecast.model, whole), whole, forecast.model).model_flops / (run.tp * run.cp * run.pp)


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
                gpu_busy_ms=step.busy_ms,
                host_ms=step.host_ms,
                exchanged=tuple(Exchanged(**each._asdict()) for each in step.exchanged),
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
        may_not_fit=tuple(each.recipe for each in memory if each.fit == "may not fit"),
        gpus=run.gpus,
        global_batch=run.global_batch,
        unit="tokens" if run.inputs is None else "samples",
    )
