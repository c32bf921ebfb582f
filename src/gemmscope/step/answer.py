"""From measurements to the answer: the step of every recipe, its speedup, what explains it, and which recipe to use.

Linears may be left in BF16: a block (the QKV projection, the output projection, the MLP) loses if its GEMMs, casts and norms take
longer in low precision than in BF16. The best recipe without the blocks that lose is a candidate; it is run beside the best
single recipe, and is recommended only if it wins.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import inf
from typing import Any, Literal

from gemmscope.gpu.specs import spec_of
from gemmscope.grouping import add_up
from gemmscope.interval import Interval
from gemmscope.paste.emit import ready_to_paste
from gemmscope.paste.mix import mix_to_paste
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.results.linears import Speedup, find_winner, independent_ratio
from gemmscope.results.numerics import Mix
from gemmscope.results.step import CapturedTime, Recommendation, StepTime, StepTimes, VariantResult, Verified
from gemmscope.roles import name_of
from gemmscope.step.step_measurements import StepMeasurements
from gemmscope.step.waterfall import LINEARS, ProfiledStep, attention_kernels, levels_of, place, unknown_kernels, verdict
from gemmscope.workload.summary import Totals

BYTES_PER_PARAMETER = 8  # in training: the weight, its gradient and both moments, in BF16


LEAVABLE = ("qkv", "attn out", "mlp")  # modules that can be told to stay in BF16
MODULE_OF = {"experts": "mlp", "shared expert": "mlp"}  # blocks that go with another's module
NEAR_LIMIT = 0.7  # of the step, for launching it
MARGIN = 0.02  # a block that takes longer by less does not lose: two profiled steps differ by as much


def step_times(
    measurements: StepMeasurements,
    names: Sequence[str],
    totals: Totals,
    tokens_per_gpu: float,
    *,
    real: StepMeasurements | None = None,
    as_deep: StepMeasurements | None = None,
    captured: StepMeasurements | None = None,
    by_graphs: bool = False,
) -> StepTimes:
    """The answer. `real`: what `--verify` measured; `as_deep`: the prediction of as many layers, if it did not run all;
    `captured`: the steps as CUDA graphs, which `by_graphs` decide which recipe is the fastest."""
    gpu = spec_of(str(measurements.hello.device.get("name", "")))
    on_gpu = {name: gpu_time(measurements, captured, name) for name in names}
    slow = profiled_step(measurements, measurements.deepest(BASELINE), on_gpu.get(BASELINE))
    times, failures = [], {}
    for name in names:
        step_ms = measurements.step(name)
        if step_ms is None:
            failures[name] = measurements.failure(name) or "no step of it was timed"
            continue
        gpu_ms, source = on_gpu[name] or (None, None)
        late, rounds = measurements.late_rounds(name)
        fast = profiled_step(measurements, measurements.deepest(name), on_gpu[name])
        explained = _explained(name, slow, fast) if name != BASELINE and slow is not None and fast is not None else {}
        model_tflops = totals.model_flops * totals.micro_batches_per_step / step_ms.value / 1e9
        time = StepTime(
            recipe=name,
            step_ms=step_ms,
            tokens_per_s=tokens_per_gpu / step_ms.value * 1000,
            model_tflops=model_tflops,
            mfu=model_tflops / gpu.tflops["bf16"] if gpu is not None else None,
            gpu_ms=gpu_ms,
            gpu_speedup=_gpu_speedup(measurements, captured, name, on_gpu) if name != BASELINE else None,
            gpu_time_from=source,
            launch_ms=_summed(measurements, name, lambda variant: (variant.host_ms, variant.host_each_ms)),
            sm_mhz=measurements.sm_mhz(name),
            rounds=rounds,
            late_rounds=late,
            peak_bytes=_peak_bytes(measurements, name, totals),
            parts_ms=fast.parts_ms() if fast is not None else {},
            attention_kernels=attention_kernels(fast.kernels) if fast is not None else {},
            verified=_verified(as_deep or measurements, real, name) if real is not None else None,
            captured=_captured(captured, name) if captured is not None else None,
            **explained,
        )
        times.append(time)
    not_captured = {time.recipe: captured.failure(time.recipe) for time in times if captured and time.captured is None}
    reasons = {name: reason for name, reason in not_captured.items() if reason}  # else it was interrupted before that
    compared = StepTimes(origin="measured", recipes=tuple(times), failures=failures, not_captured=reasons)
    compared = _compared(compared, measurements)
    if not by_graphs or captured is None or captured.step(BASELINE) is None:
        return compared
    return compared.model_copy(update={"winner": _compared(compared, captured).winner, "decided_by": "graphs"})


GpuTime = tuple[Interval, Literal["graph", "timely rounds", "kernels"]]


def gpu_time(measurements: StepMeasurements, captured: StepMeasurements | None, name: str) -> GpuTime | None:
    """The GPU time of a recipe's step, and how it was measured: the best way there is. None on a CPU."""
    if measurements.hello.device.get("name") == "CPU":
        return None
    if captured is not None and (as_graph := captured.step(name)) is not None:
        return as_graph, "graph"
    if (timely := measurements.timely_step(name)) is not None and not _launches_limit(measurements, name):
        return timely, "timely rounds"
    of_kernels = _summed(measurements, name, lambda variant: (variant.busy_ms, variant.busy_each_ms))
    return (of_kernels, "kernels") if of_kernels is not None else None


def _launches_limit(measurements: StepMeasurements, name: str) -> bool:
    """Whether launching may take as long as running: then the GPU waits within a step, though it is busy at its end."""
    launch_ms = measurements.extrapolated(name, lambda variant: variant.host_ms)
    step_ms = measurements.step(name)
    return launch_ms is not None and step_ms is not None and launch_ms > NEAR_LIMIT * step_ms.value


def wants_graphs(measurements: StepMeasurements, names: Sequence[str]) -> bool:
    """Whether graphs would tell something new: in a recipe, the CPU is or may be the limit."""
    late = [measurements.late_rounds(name) for name in names]
    return any(2 * rounds_late >= rounds > 0 for rounds_late, rounds in late) or any(
        _launches_limit(measurements, name) for name in names
    )


def _gpu_speedup(
    measurements: StepMeasurements, captured: StepMeasurements | None, name: str, on_gpu: Mapping[str, GpuTime | None]
) -> Interval | None:
    """The speedup where the GPU is the limit. Both sides measured in the same way were measured in turn."""
    slow, fast = on_gpu.get(BASELINE), on_gpu[name]
    if slow is None or fast is None:
        return None
    if slow[1] == fast[1] == "graph" and captured is not None:
        return captured.speedup(name)
    if slow[1] == fast[1] == "timely rounds":
        return measurements.timely_speedup(name)
    return independent_ratio(slow[0].value / fast[0].value, slow[0], fast[0])


def _summed(
    measurements: StepMeasurements, name: str, quantity: Callable[[VariantResult], tuple[float | None, Sequence[float]]]
) -> Interval | None:
    """Milliseconds of the whole model: the medians of its depths, and the relative range of the deepest one's values."""
    value = measurements.extrapolated(name, lambda variant: quantity(variant)[0])
    deepest = measurements.deepest(name)
    if value is None or deepest is None or (middle := quantity(deepest)[0]) is None:
        return None
    times_ms = quantity(deepest)[1]
    return (
        Interval(value, value * min(times_ms) / middle, value * max(times_ms) / middle) if len(times_ms) > 1 else Interval(value)
    )


def _explained(name: str, slow: ProfiledStep, fast: ProfiledStep) -> dict[str, Any]:
    """The waterfall of a recipe and what it shows."""
    levels = levels_of(slow.parts_ms(), fast.parts_ms())
    named_share, unknown = unknown_kernels([*slow.kernels, *fast.kernels])
    why = verdict(levels, recipe(name), fast.kernels)
    return {"waterfall": levels, "named_share": named_share, "unknown_kernels": unknown, "verdict": why}


def _captured(captured: StepMeasurements, name: str) -> CapturedTime | None:
    """The step of a recipe as a CUDA graph; None if it could not be captured."""
    step_ms = captured.step(name)
    speedup = captured.speedup(name) if name != BASELINE else None
    return CapturedTime(step_ms=step_ms, speedup=speedup, sm_mhz=captured.sm_mhz(name)) if step_ms is not None else None


def _compared(times: StepTimes, measurements: StepMeasurements) -> StepTimes:
    """The times with the speedups of every recipe over every other one, and the winner; a fallback takes no part in it."""
    names = [time.recipe for time in times.recipes if not time.fell_back]
    ratios = {(name, over): measurements.speedup(name, over=over) for name, over in permutations(names, 2)}
    known = {pair: ratio for pair, ratio in ratios.items() if ratio is not None}
    speedups = tuple(Speedup(recipe=name, over=over, speedup=ratio) for (name, over), ratio in known.items())
    over_baseline = {name: ratio for (name, over), ratio in known.items() if over == BASELINE}
    winner = find_winner(over_baseline, lambda name, over: known.get((name, over))) if BASELINE in names else None
    recipes = [time.model_copy(update={"speedup": over_baseline.get(time.recipe)}) for time in times.recipes]
    return times.model_copy(update={"recipes": tuple(recipes), "speedups": speedups, "winner": winner})


def profiled_step(measurements: StepMeasurements, result: VariantResult | None, gpu: GpuTime | None) -> ProfiledStep | None:
    """The profiled step of a variant, for its waterfall; None if its kernels were not profiled. `gpu`: of the whole model."""
    if result is None or not result.parts:
        return None
    kernels = place(result.parts, quantizes=recipe(result.variant.recipe).quantizes)
    launched, step_ms = measurements.step(result.variant.recipe, result.variant.left_out), measurements.mean_ms(result)
    share = gpu[0].value / launched.value if gpu is not None and launched is not None else 1.0
    return ProfiledStep(kernels, step_ms, step_ms * share)


def _peak_bytes(measurements: StepMeasurements, name: str, totals: Totals) -> float | None:
    """The peak memory of the real model: what the step allocated beyond its own weights, plus weights, gradients and moments of
    all layers. A live module is the real model."""
    if any("real_peak_bytes" in result.facts for result in measurements.of(name)):
        return measurements.extrapolated(name, lambda result: result.facts.get("real_peak_bytes"))
    plain = {result.variant.depth: result.facts.get("held_bytes") for result in measurements.of(BASELINE)}

    def beyond(result: VariantResult) -> float | None:
        peak, allocated = result.facts.get("peak_bytes"), result.facts.get("held_bytes")
        if not peak or allocated is None:
            return None
        as_baseline = plain.get(result.variant.depth)  # weights quantized once per step are kept beside those of BF16
        return float(peak - (min(allocated, as_baseline) if as_baseline is not None else allocated))

    activations = measurements.extrapolated(name, beyond)
    return activations + BYTES_PER_PARAMETER * totals.parameters_of_rank if activations is not None else None


def _verified(measurements: StepMeasurements, real: StepMeasurements, name: str) -> Verified | None:
    """The real step beside the prediction of as many layers; None if one of them is missing."""
    predicted, actual = (store.step(name) if name == BASELINE else store.speedup(name) for store in (measurements, real))
    deepest = real.deepest(name)
    if actual is None or predicted is None or deepest is None or deepest.variant.depth != measurements.layers:
        return None  # a shallower real model is a different model
    return Verified(depth=deepest.variant.depth, predicted=predicted, actual=actual)


@dataclass(frozen=True)
class PartialRecipe:
    """A recipe, and the blocks of every layer that stay in BF16."""

    recipe: str
    left_out: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """In words.

        >>> PartialRecipe("FP8Current", ("qkv", "attn out")).name
        'FP8Current with qkv and attn out in BF16'
        """
        return self.recipe + (f" with {' and '.join(self.left_out)} in {BASELINE}" if self.left_out else "")


def block_ms(measurements: StepMeasurements, recipe: str) -> dict[str, float]:
    """Milliseconds of every block of all layers, forward and backward; nothing where kernels were not profiled."""
    result = next((result for result in measurements.of(recipe) if result.parts), None)
    kernels = [kernel for kernel in place(result.parts) if kernel.block in LINEARS] if result is not None else []
    return add_up((MODULE_OF.get(kernel.block, kernel.block), kernel.time_us / 1000) for kernel in kernels)


def losing_blocks(measurements: StepMeasurements, recipe: str) -> tuple[str, ...]:
    """The blocks that take longer in the recipe than in BF16."""
    baseline_ms, recipe_ms = block_ms(measurements, BASELINE), block_ms(measurements, recipe)
    return tuple(block for block in LEAVABLE if recipe_ms.get(block, 0.0) > baseline_ms.get(block, inf) * (1 + MARGIN))


def candidate(measurements: StepMeasurements, times: StepTimes) -> PartialRecipe | None:
    """A mixed plan that could beat every single recipe; None if no block loses, or all do. A fallback is never its recipe."""
    single = [time for time in times.recipes if recipe(time.recipe).quantizes and recipe(time.recipe).kept is None]
    others = [time for time in single if not time.fell_back]
    if not others:
        return None
    best = min(others, key=lambda time: time.step_ms.value).recipe  # though BF16 is faster, it may win without blocks that lose
    losing = losing_blocks(measurements, best)
    return PartialRecipe(best, losing) if losing and len(losing) < len(LEAVABLE) else None


def recommend(measurements: StepMeasurements, plans: Sequence[PartialRecipe]) -> Recommendation | None:
    """Among what was measured: the fastest plan, and those too close to call against it; None if BF16 was not measured."""
    if measurements.step(BASELINE) is None:
        return None
    by_name = {plan.name: plan for plan in plans}

    def ratio(name: str, over: str) -> Interval | None:
        plan, other = by_name[name], by_name[over]
        return measurements.speedup(plan.recipe, plan.left_out, over=other.recipe, over_left_out=other.left_out)

    speedups = {name: measurements.speedup(plan.recipe, plan.left_out) for name, plan in by_name.items() if name != BASELINE}
    winner = find_winner({name: speedup for name, speedup in speedups.items() if speedup is not None}, ratio)
    best = by_name.get(winner.best, PartialRecipe(winner.best))
    texts = _to_paste(best, measurements.layers)
    return Recommendation(
        recipe=best.recipe, left_out=best.left_out, speedup=winner.speedup, rivals=winner.rivals, ready_to_paste=texts
    )


def _to_paste(plan: PartialRecipe, layers: int) -> dict[str, str]:
    """The settings of a plan in every framework that can express it."""
    chosen = recipe(plan.recipe)
    if chosen.kept is None:
        return ready_to_paste(plan.recipe, plan.left_out)
    kept = chosen.kept
    mix = Mix(
        recipe=chosen.base,
        higher=kept.recipe,
        first_layers=kept.first_layers,
        last_layers=kept.last_layers,
        linears=tuple(map(name_of, kept.ops)),
        error=0.0,
    )
    return mix_to_paste(mix, mix.linears, layers)
