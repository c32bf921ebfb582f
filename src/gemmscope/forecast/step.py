"""A whole training step: everything one rank runs, in the same parts that `gemmscope step` measures.

GEMMs and their quantization depend on the recipe; the head, attention, norms, activations, loss and optimizer do not, and
dilute the speedup. A model split over several GPUs also waits for collectives, for the pipeline to fill, and for the slowest GPU.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, hypot, inf, log, log2

from gemmscope.forecast import traced
from gemmscope.forecast.calibration import SPREAD
from gemmscope.forecast.communication import (
    Exchange,
    Network,
    RankShare,
    cluster,
    exchanges,
    exposed,
    network_of,
    offload,
)
from gemmscope.forecast.estimate import Estimate, pairwise, total, winner_of
from gemmscope.forecast.launching import LaunchedStep, in_phases, of_layers
from gemmscope.forecast.linears import Forecaster, LinearTimes, in_common
from gemmscope.forecast.memory import rank_memory, shards
from gemmscope.forecast.mixed import (
    Assigned,
    CountedCase,
    alike,
    assigned,
    by_recipe,
    kept_share,
    without_misaligned,
)
from gemmscope.forecast.stacks import HALF_WIDTHS, LAUNCHES, ONE, WAITING, Learned, Multiplier
from gemmscope.forecast.step_estimate import PROPORTIONAL, StepEstimate, gpu_speedup, speedup
from gemmscope.forecast.training import facts, only_torchao, op_ms, uncertainty_of
from gemmscope.interval import Interval
from gemmscope.model.layer_spec import MoeSpec
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.parts import StepPart, in_order
from gemmscope.recipe.kept import KeptHigher
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.results.forecast import RecipeMemory
from gemmscope.results.linears import Speedup
from gemmscope.results.step import Exchanged, StepTime, StepTimes
from gemmscope.step.cost import Budget, cost
from gemmscope.step.waterfall import levels_of, verdict
from gemmscope.workload.cases import Case
from gemmscope.workload.derive import Workload, derive
from gemmscope.workload.ops import ADAPTERS, OPTIMIZER_BYTES_PER_PARAMETER, PASSES, Activation, GroupedLinear, Linear, Optimizer
from gemmscope.workload.summary import totals
from gemmscope.workload.traced_ops import TracedLinear

ONCE: StepPart = "idle, other"
OF_RUN = ("exchanged", "_optimizer_share", "_slower", "_common")  # of `StepForecast`: what depends on more than the workload
WHOLE_TENSOR = "FP8Tensorwise"
MEASURED_PARTS: tuple[StepPart, ...] = ("GEMMs", "norms and activations", "attention", "head and loss")
NOTHING_TO_QUANTIZE = "the model has no linears to quantize: small ones, routers and weights outside of nn.Linear stay in BF16"


def linear_case(op: Linear) -> Case:
    """The case to time for a linear."""
    rows = op.rows if isinstance(op, GroupedLinear) else ()
    if isinstance(op, TracedLinear):
        ran = {gemm.pass_name for gemm in op.seen}
        rows = tuple((op.tokens + index) // op.groups for index in range(op.groups)) if op.groups > 1 else ()
        passes = tuple(pass_name for pass_name in PASSES if pass_name in ran)
        return Case(op.name, op.tokens, op.inputs, op.outputs, op.count, rows, passes, quantized=op.quantized)
    return Case(op.name, op.tokens, op.inputs, op.outputs, op.count, rows, passes=op.passes, quantized=op.quantized)


@dataclass(frozen=True)
class _Fixed:
    """What does not depend on the recipe: parts of one micro-batch, and the optimizer, nothing sharded."""

    per_micro_batch: dict[StepPart, Estimate]
    expert_activation: Estimate  # a part of the above
    optimizer: Estimate
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
        layers: int = 0,
    ) -> None:
        """`model` is None for a traced module. `fused`: a compiler fuses the ops between GEMMs. `layers`: the number of layers
        that are compiled one by one (0: the module is compiled as a whole)."""
        self.forecaster, self.model, self.run, self.workload, self.fused = forecaster, model, run, workload, fused
        self._layers = layers
        self.network = network if network is not None else network_of(forecaster.chip)
        self.linears = [op for op in workload.ops if isinstance(op, Linear)]
        self.cases = [linear_case(op) for op in self.linears]
        quantized = [(op, case) for op, case in zip(self.linears, self.cases, strict=True) if op.facts.part == "GEMMs"]
        self.quantized: list[CountedCase] = [(case, op.count, op.forward_runs) for op, case in quantized if op.quantized]
        self._quantized_ops = [op for op, _ in quantized if op.quantized]
        self._assigned: dict[str, list[Assigned]] = {}
        self._plain: list[CountedCase] = [(case, op.count, op.forward_runs) for op, case in quantized if not op.quantized]
        self._sizes = [(case.op, case.unpadded_sizes()) for op, case in quantized if op.quantized]
        runs = sum(op.count * op.forward_runs for op, _ in quantized)
        self._weight_runs = (2 + runs / max(sum(op.count for op, _ in quantized), 1)) / 3

    def why_not(self, name: str) -> str:
        """Why a recipe cannot run this model; empty if it can. Traced modules keep misaligned linears in BF16."""
        chosen = recipe(name)
        if chosen.kept is not None:
            return self.why_not(chosen.base) or self.why_not(chosen.kept.recipe)
        if not chosen.quantizes or (self.model is None and self._linears_that_fit(name)):
            return ""
        reasons = (f"{op}: {reason}" for op, size in self._sizes if (reason := chosen.misaligned(size)))
        return next(reasons, "" if self.model is not None else NOTHING_TO_QUANTIZE)

    def assigned(self, name: str) -> list[Assigned]:
        """For each quantized linear, how many of it run in which recipe."""
        if name not in self._assigned:
            chosen = recipe(name)
            counts: list[Assigned] = [{name: count} for _, count, _ in self.quantized]
            if chosen.kept is not None:
                counts = assigned(self.model, self.run, self.workload, self._quantized_ops, chosen.base, chosen.kept)
            if self.model is None:  # linears that a recipe cannot take stay in BF16
                counts = [
                    without_misaligned(assignment, case.unpadded_sizes())
                    for assignment, (case, _, _) in zip(counts, self.quantized, strict=True)
                ]
            self._assigned[name] = counts
        return self._assigned[name]

    def kept_share(self, name: str) -> float:
        """The share of the linears that a mix keeps in higher precision."""
        return kept_share(self.assigned(name), recipe(name).base or name)

    def gpu_speedup(self, steps: Mapping[str, StepEstimate], name: str, over: str) -> Estimate:
        """The speedup of the GPU time in recipe `name` over that in recipe `over`."""
        if recipe(name).kept is None and recipe(over).kept is None:
            return gpu_speedup(steps[over], steps[name], self.forecaster.in_common(name, over))
        same = alike(self.assigned(name), self.assigned(over))
        slow, fast = (self._linears_in(steps[side], side, by_recipe(self.quantized, same)) for side in (over, name))
        return gpu_speedup(steps[over], steps[name], in_common(), slow, fast)

    def speedup(self, steps: Mapping[str, StepEstimate], name: str, over: str) -> Interval:
        """The speedup of the step in recipe `name` over the step in recipe `over`, as launched."""
        mixed = recipe(name).kept is not None or recipe(over).kept is not None
        same = sum(sum(counts.values()) for counts in alike(self.assigned(name), self.assigned(over))) if mixed else 0
        differ = 1 - same / max(sum(count for _, count, _ in self.quantized), 1)
        return speedup(steps[over], steps[name], self.gpu_speedup(steps, name, over), differ)

    def _linears_in(self, step: StepEstimate, name: str, linears: Mapping[str, list[CountedCase]]) -> Estimate:
        """The time of some linears in a step, casts included, at the clock of that step."""
        every, some = self._gemms(name), self._in_recipes(linears)
        clock = step.parts["GEMMs"].value / every.gemms.value if every.gemms.value else 0.0
        casts = some.casts(self._weight_casts).times(self._slower * self.run.gradient_accumulation)
        return total([some.gemms.times(clock), casts])

    def again(self, run: RunSpec) -> "StepForecast":
        """The same workload on the same chip in another run. What does not depend on the run is not computed again."""
        other = copy(self)
        other.run = run
        for name in OF_RUN:
            vars(other).pop(name, None)
        return other

    def _linears_that_fit(self, name: str) -> list[CountedCase]:
        """The linears that a recipe quantizes."""
        chosen = recipe(name)
        return [
            counted for counted in self.quantized if not chosen.quantizes or not chosen.misaligned(counted[0].unpadded_sizes())
        ]

    def step(self, name: str) -> StepEstimate:
        """The step in one recipe. With a mix, the first or last pipeline stage may be the slowest."""
        steps = [self._step(name), *(stage._step(name) for stage in self._ends(recipe(name).kept))]
        return max(steps, key=lambda step: step.time_ms)

    def _ends(self, kept: KeptHigher | None) -> list["StepForecast"]:
        """The first and last pipeline stage if a mix keeps their layers in higher precision; none if the run names a stage."""
        if kept is None or self.model is None or self.run.pp == 1 or self.run.pp_stage is not None:
            return []
        layers = {0: kept.first_layers, self.run.pp - 1: kept.last_layers}
        runs = [replace(self.run, pp_stage=stage) for stage, count in layers.items() if count and stage != self.workload.stage]
        return [
            StepForecast(self.forecaster, self.model, run, derive(self.model, run), self.network, fused=self.fused)
            for run in runs
        ]

    def _step(self, name: str) -> StepEstimate:
        """All parts of this stage."""
        run, fixed, batches = self.run, self.fixed, self.run.gradient_accumulation
        one = self._micro_batch(name)
        computed = total(one.values())
        computed_ms = {part: estimate.value for part, estimate in one.items()}
        software, once = self.forecaster.software, self.forecaster.software.once()
        optimizer = fixed.optimizer.times(self._optimizer_share * software.of("step").factor)
        waits = [software.exchange(exposed(exchange, run, computed_ms)) for exchange in self.exchanged]
        waited_ms = sum(wait.exposed_ms for wait in waits)
        once_ms = sum(wait.exposed_ms for wait, exchange in zip(waits, self.exchanged, strict=True) if exchange.per_step)
        gpu_ms = computed.value + (waited_ms - once_ms) / batches
        parts = {part: estimate.times(batches) for part, estimate in one.items()}
        further: dict[StepPart, Estimate] = {"optimizer": optimizer, ONCE: once}
        parts |= {part: estimate for part, estimate in further.items() if estimate.value}
        if waited_ms:
            parts[WAITING] = Estimate(waited_ms, hypot(*(wait.unsure_ms for wait in waits)) / waited_ms)
        filling, head_ms = (run.pp - 1) / run.vp, computed_ms.get("head and loss", 0.0) * (1 - 1 / run.pp)
        if run.pp > 1:  # the other stages have no output head
            parts[PROPORTIONAL] = Estimate(filling * (gpu_ms - head_ms), computed.own, computed.shared)
        beside_ms = once_ms + optimizer.value
        (launch_ms, launches), hosts = self._launches(name), software.of(LAUNCHES)
        launching = in_phases(launch_ms * hosts.factor, launches, 3 * self._weight_runs - 2, waits=self._waits)
        further_ms = beside_ms + once.value - filling * head_ms
        launched = LaunchedStep(launching, gpu_ms, batches, filling, further_ms, beside_ms / batches, hosts.half_width)
        known = cluster()["steps"]["at_most"] if self.model is not None else {}  # published steps are not those of traced modules
        at_most = known.get(self.forecaster.chip.architecture, inf)
        return StepEstimate(in_order(parts), self._common, at_most, tuple(waits), launched)

    def _micro_batch(self, name: str) -> dict[StepPart, Estimate]:
        """The computation of one micro-batch, by part of the step."""
        fixed, linears = self.fixed, self._gemms(name)
        quantization = linears.casts(self._weight_casts)
        every: dict[StepPart, Estimate] = {"GEMMs": linears.gemms, "quantization": quantization, **fixed.per_micro_batch}
        software = self.forecaster.software
        if self._biased and (unfused := software.of("biases of experts")) != ONE:
            known, activation = every["norms and activations"], fixed.expert_activation
            others = Estimate(known.value - activation.value, known.own, known.shared)
            every["norms and activations"] = total([others, unfused.of_this(activation)])
        least: dict[StepPart, float] = {"GEMMs": linears.least_ms, "head and loss": fixed.head_least_ms}
        one = self._at_step_clock({part: estimate for part, estimate in every.items() if estimate.value}, least)
        return {part: software.part(part, estimate.times(self._slower)) for part, estimate in one.items()}

    @property
    def _weight_casts(self) -> float:
        """How often a weight is quantized per micro-batch: once per step if the result is cached, else in every forward run."""
        batches = self.run.gradient_accumulation
        return 1 / batches if batches > 1 or self.forecaster.cache_weights else self._weight_runs

    def _gemms(self, name: str) -> LinearTimes:
        """All linears. A traced model has some that stay in BF16 beside the quantized ones."""
        if self.model is not None and recipe(name).kept is None:
            linears = self._in_recipe(self.quantized, name)
            if only_torchao(recipe(name)):
                gathered = self.run.zero_stage == 3 and name == WHOLE_TENSOR  # FSDP casts its shard, and gathers that
                weights = linears.weights.times(1 / shards(self.run)[0] if gathered else 1.0)
                activations = linears.activations.times(1 - self._not_repeated(name))
                linears = linears._replace(activations=activations, weights=weights)
            if not self._plain:
                return linears
            plain = self._in_recipe(self._plain, BASELINE)
            return linears._replace(gemms=total([linears.gemms, plain.gemms]), least_ms=linears.least_ms + plain.least_ms)
        of_recipes = by_recipe(self.quantized, self.assigned(name))
        of_recipes[BASELINE] = [*of_recipes.get(BASELINE, []), *self._plain]
        return self._in_recipes(of_recipes)

    def _in_recipe(self, linears: Sequence[CountedCase], name: str) -> LinearTimes:
        """Linears as this software runs them."""
        gemms, least_ms, activations, weights = self.forecaster.in_step(linears, name)
        low, casts = self.forecaster.software.low_precision(name)
        return LinearTimes(low.of_all(gemms), least_ms * low.factor, casts.of_all(activations), casts.of_all(weights))

    def _in_recipes(self, linears: Mapping[str, list[CountedCase]]) -> LinearTimes:
        times = [self._in_recipe(cases, name) for name, cases in linears.items() if cases]
        gemms, least_ms, activations, weights = zip(*times, strict=True) if times else ((), (), (), ())
        return LinearTimes(total(gemms), sum(least_ms), total(activations), total(weights))

    def _not_repeated(self, name: str) -> float:
        """The share of the casts of activations that torchao's compiled layers save: linears that read the same tensor share its
        cast, and with one scale for the whole tensor, tensor parallelism casts a rank's shard before it is gathered."""
        costs, run = self.forecaster.costs(name).quantizing, self.run
        shards = run.tp if run.sequence_parallel and name == WHOLE_TENSOR else 1
        all_ms, saved_ms, seen = 0.0, 0.0, set[tuple[str, int, int, int]]()
        for op, (case, count, runs) in zip(self._quantized_ops, self.quantized, strict=True):
            facts, times = op.facts, count * (2 + runs) / 3
            key = facts.reads, count, case.tokens, case.inputs
            sizes = (case.tokens * case.inputs, facts.reads_shard), (case.tokens * case.outputs, facts.ends_block)
            for tensor, (elements, sharded) in enumerate(sizes):
                whole_ms = costs.time_ms(elements) * times
                taken_ms = costs.time_ms(elements / shards) * times if sharded else whole_ms
                all_ms += whole_ms
                saved_ms += whole_ms if tensor == 0 and facts.reads and key in seen else whole_ms - taken_ms
            seen.add(key)
        return saved_ms / all_ms if all_ms else 0.0

    @property
    def _waits(self) -> bool:
        """Whether the CPU waits for the sizes of experts in forward."""
        return bool(self.rank_share.moe_layers) and not self.run.cuda_graphs

    def _launches(self, name: str) -> tuple[float, float]:
        """Milliseconds that the CPU needs to launch one micro-batch, and the number of launches; for a mix, the mean of its two
        recipes, weighted by their number of linears."""
        chosen = recipe(name)
        if chosen.kept is not None:
            share, pairs = (
                self.kept_share(name),
                zip(self._launches(chosen.base), self._launches(chosen.kept.recipe), strict=True),
            )
            launch_ms, launches = (low + (high - low) * share for low, high in pairs)
            return launch_ms, launches
        if self.model is not None:
            adapters = sum(op.count for op in self.linears if op.role == ADAPTERS[0])
            return of_layers(name, self.rank_share.dense_layers, self.rank_share.moe_layers, self.run, adapters)
        quantized = sum(count for _, count, _ in self._linears_that_fit(name))
        kernels = traced.launch_ms(self.workload.ops, name, quantized, self.run, fused=self.fused)
        return max(kernels, of_layers(name, self._layers, 0, self.run))

    @cached_property
    def _biased(self) -> bool:
        """Whether experts have biases."""
        return self.model is not None and any(
            isinstance(layer.mlp, MoeSpec) and layer.mlp.expert.up_bias for layer in self.model.layers[-1:]
        )

    @cached_property
    def _slower(self) -> float:
        """The ratio of a step to the sum of its kernels, on architectures known only from published steps and on several GPUs."""
        factor = float(cluster()["steps"].get(self.forecaster.chip.architecture, 1.0))
        factor *= self.forecaster.software.slower(self.run.gpus)
        several = cluster()["several"]
        return factor * (several["factor"] + several["per_doubling"] * self._doublings if self.run.gpus > 1 else 1.0)

    @property
    def _doublings(self) -> float:
        """Doublings of the number of GPUs beyond a few hundred."""
        return max(log2(self.run.gpus / cluster()["several"]["many"]), 0.0)

    @cached_property
    def _common(self) -> float:
        """The uncertainty of the whole step that all recipes have in common."""
        of_step = uncertainty_of("steps", self.forecaster.chip, cluster())
        known = cluster()["several"]
        several = known["uncertainty_per_doubling"] * self._doublings
        experts = self.rank_share.moe_layers or (self.model is None and any(op.groups > 1 for op in self.linears))
        return hypot(of_step, several, self.forecaster.software.uncertainty(experts=bool(experts)))

    def _at_step_clock(self, parts: dict[StepPart, Estimate], least: dict[StepPart, float]) -> dict[StepPart, Estimate]:
        """GEMMs in a step run at a higher clock than back to back, because the work between them draws less power.

        No part becomes faster than in a burst, whose times are `least`.
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
        """The parts that do not depend on the recipe: everything except quantized linears."""
        chip = self.forecaster.chip
        estimates: dict[StepPart, list[Estimate]] = {}
        optimizer, activation, saved = Estimate(0.0), Estimate(0.0), 0.0
        for op in self.workload.ops:
            part = op.facts.part
            if isinstance(op, Linear):
                if part == "GEMMs":
                    continue
                times = op.count * (1 + (op.forward_runs - 1) / len(op.passes))
                estimate = self.forecaster.linear(linear_case(op), BASELINE).all_gemms().times(times)
                if part == "head and loss":
                    saved += estimate.value - self.forecaster.least_ms(linear_case(op), BASELINE) * times
            elif isinstance(op, traced.TracedOp):
                part, estimate = traced.part_of(op), traced.traced_estimate(op, chip, fused=self.fused)
            else:
                estimate = self.forecaster.other(op_ms(op, chip), part, uncertainty_of(op.facts.uncertainty, chip))
            if isinstance(op, Optimizer):
                optimizer = estimate
                continue
            estimates.setdefault(part, []).append(estimate)
            if isinstance(op, Activation) and op.facts.block == "experts":
                activation = total([activation, estimate])
        parts = {part: total(of_part) for part, of_part in estimates.items()}
        if "routing" in parts:
            parts["routing"] = parts["routing"].times(float(cluster()["experts"]["routing"]))
        head = parts["head and loss"].value if "head and loss" in parts else 0.0
        return _Fixed(parts, activation, optimizer, head - saved)

    @cached_property
    def exchanged(self) -> list[Exchange]:
        """What this rank exchanges."""
        every = exchanges(self.forecaster.chip, self.network, self.model, self.run, self.rank_share)
        return [*every, *([offload(self.network, self._offloaded_bytes())] if self.run.offloaded_layers else [])]

    @cached_property
    def rank_share(self) -> RankShare:
        """The layers and parameters of this rank."""
        experts = [op for op in self.linears if op.block == "experts"]
        in_experts, trained_in_experts = sum(op.all_parameters for op in experts), sum(op.trained_parameters for op in experts)
        attentions, mixers, mlps, moe_layers = (
            sum(op.count for op in self.linears if op.facts.ends_block and op.facts.block == block)
            for block in ("attention", "mixer", "MLP", "experts")
        )
        layers = sum(self.workload.layers.values())
        updated = sum(
            op.updated for op in self.workload.ops if isinstance(op, Optimizer)
        )  # a trace knows the parameters only from the optimizer
        frozen = sum(op.groups * op.inputs * op.outputs * op.count for op in self.linears if op.frozen)
        parameters = self.workload.parameters if self.model is not None else updated + frozen
        sizes = parameters - in_experts, in_experts, updated - trained_in_experts, trained_in_experts
        return RankShare(layers, moe_layers, *sizes, attentions, attentions + mixers, mlps)

    def _offloaded_bytes(self) -> float:
        """Bytes that one micro-batch offloads to CPU memory."""
        if self.model is None:
            return 0.0
        kept = rank_memory(self.model, replace(self.run, offloaded_layers=0), BASELINE, self.forecaster.chip)
        return (
            kept.activations_bytes
            / max(kept.in_flight, 1.0)
            * min(self.run.offloaded_layers / max(self.rank_share.layers, 1), 1.0)
        )

    @cached_property
    def _optimizer_share(self) -> float:
        """Bytes that the optimizer moves, relative to a BF16 optimizer that updates all parameters of the rank."""
        run, share = self.run, self.rank_share
        bytes_moved = facts()["bandwidth"]["optimizer_bytes"][run.state_precision] / OPTIMIZER_BYTES_PER_PARAMETER
        trained = share.trained + share.trained_in_experts
        if not run.zero_stage or not trained:
            return float(bytes_moved)
        dense, experts = shards(run)
        return float(bytes_moved * (share.trained / dense + share.trained_in_experts / experts) / trained)


def learned_from(measured: StepTimes, here: StepForecast, *, same_gpu: bool) -> dict[str, Learned]:
    """What a measured step says of the software's multipliers. `here`: its forecast, on the GPU where it was measured.

    On the same GPU, a part says how long hardware and software take together; for another GPU, the hardware stays uncertain.
    """
    learned, software = dict[str, Learned](), here.forecaster.software
    for time in measured.recipes:
        forecast = here.step(time.recipe)
        expected, rest = forecast.parts, 0.0
        known_ms = {
            part: time_ms
            for part, time_ms in time.parts_ms.items()
            if 0 < time_ms < inf and part in expected and expected[part].value
        }
        wanted = MEASURED_PARTS if time.recipe == BASELINE else ("quantization",)
        for part in [part for part in wanted if part in known_ms]:
            what = part if part != "quantization" else f"quantization of {time.recipe}"
            variance = (expected[part].uncertainty / HALF_WIDTHS) ** 2
            learned[what] = _learned(variance, software.of(what), log(known_ms[part] / expected[part].value), same=same_gpu)
        if time.recipe == BASELINE and known_ms:
            for part in known_ms:
                rest += expected[part].value * exp(learned[part].moves if part in learned else 0.0)
            whole = software.of("step").and_also(software.of("runs"))
            learned["step"] = _learned(whole.variance, whole, log(sum(known_ms.values()) / rest), same=True)
            learned["runs"] = Learned(0.0, learned["step"].left)
        if time.recipe == BASELINE and same_gpu and time.launch_ms is not None and forecast.launched.launch_ms:
            hosts, seen = software.of(LAUNCHES), log(time.launch_ms.value / forecast.launched.launch_ms)
            learned[LAUNCHES] = _learned(hosts.variance, hosts, seen, same=True)
    return learned


def _learned(variance: float, known: Multiplier, seen: float, *, same: bool) -> Learned:
    """The update of one multiplier, where `variance` is that of the forecast part, hardware included."""
    noise = SPREAD["parts"] ** 2 + (0.0 if same else max(variance - known.variance, 0.0))
    after = Multiplier(0.0, variance).updated(Multiplier(seen, noise))
    return Learned(after.log, after.variance / variance if variance else 1.0)


def _model_flops_per_gpu(forecast: StepForecast) -> float:
    """Model FLOPs of one micro-batch: the mean over the GPUs that share it."""
    run = forecast.run
    if forecast.model is None:
        return totals(forecast.workload, run, None).model_flops
    names = ("micro_batch_size", "sequence_length", "separate_projections", "lora", "lora_linears")
    whole = RunSpec(**{name: getattr(run, name) for name in names})
    return totals(derive(forecast.model, whole), whole, forecast.model).model_flops / (run.tp * run.cp * run.pp)


def forecast_step(
    forecast: StepForecast, names: Sequence[str], budget: Budget | None = None, memory: Sequence[RecipeMemory] = ()
) -> StepTimes:
    """The step in every recipe, the speedup of each over every other, and the winner; with a budget, what the run costs.

    Recipes that do not fit in `memory` are neither winners nor priced; those that may not are winners only where no other fits.
    """
    needed = {needs.recipe: needs.total_bytes for needs in memory}
    unfit, unsure = ([needs.recipe for needs in memory if needs.fit == fit] for fit in ("does not fit", "may not fit"))
    failures = {name: reason for name in names if (reason := forecast.why_not(name))}
    steps = {name: forecast.step(name) for name in names if name not in failures}
    pairs = pairwise(steps, lambda name, over: forecast.speedup(steps, name, over))
    run, flops = forecast.run, _model_flops_per_gpu(forecast) * forecast.run.gradient_accumulation
    recipes = []
    for name, step in steps.items():
        time_ms = step.time_ms
        waterfall = levels_of(steps[BASELINE].parts_ms, step.parts_ms) if name != BASELINE else ()
        rate = flops / time_ms / 1e9
        recipes.append(
            StepTime(
                recipe=name,
                step_ms=step.interval,
                speedup=pairs.get((name, BASELINE)),
                tokens_per_s=run.tokens_per_gpu / time_ms * 1000,
                total_tokens_per_s=run.tokens_per_gpu * run.gpus / time_ms * 1000,
                model_tflops=rate,
                mfu=rate / forecast.forecaster.chip.tflops["bf16"],
                gpu_ms=step.gpu.interval(),
                gpu_speedup=forecast.gpu_speedup(steps, name, BASELINE).interval() if name != BASELINE else None,
                launch_ms=Estimate(step.launched.launch_ms, step.launched.unsure).interval(),
                exchanged=tuple(Exchanged(**wait._asdict()) for wait in step.exchanged),
                peak_bytes=needed.get(name),
                parts_ms=step.parts_ms,
                waterfall=waterfall,
                verdict=verdict(waterfall) if waterfall else None,
                cost=cost(step.interval, run, budget) if budget is not None and name not in unfit else None,
            )
        )
    times = StepTimes(
        origin="forecast",
        recipes=tuple(recipes),
        speedups=tuple(Speedup(recipe=name, over=over, speedup=gain) for (name, over), gain in pairs.items()),
        failures=failures,
        unfit=tuple(name for name in steps if name in unfit),
        may_not_fit=tuple(name for name in steps if name in unsure),
        gpus=run.gpus,
        global_batch=run.global_batch,
        unit="tokens" if run.inputs is None else "samples",
    )
    return times.model_copy(update={"winner": winner_of(pairs, times.unranked)})
