"""Explains a step's speedup: from the GEMMs alone, down through everything that dilutes it, to the step.

Every kernel of a profiled step belongs to a block of the model (`marks.py`) and has a class (`engine/kernels.py`); both
together tell which part of the step it is. Each part adds its time to both sides, and the speedup after it is that of everything
so far: the first one is what the hardware gives, the last one what training gains. Findings say it in words, for a step that was
measured or forecast.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product, takewhile

from gemmscope.bench.linears import evidence
from gemmscope.engine.kernels import CAST_SHARE, MATH, KernelFacts, attention_backend, classify, is_softmax, work_in_step
from gemmscope.findings import Finding, finding
from gemmscope.grouping import add_up, grouped, largest_sums
from gemmscope.parts import STEP_PARTS, StepPart, in_order
from gemmscope.recipe.recipes import BASELINE, Recipe
from gemmscope.recipe.recipes import recipe as recipe_named
from gemmscope.results.step import AtBatch, ProfiledPart, StepTime, StepTimes, WaterfallLevel
from gemmscope.workload.ops import Pass

LINEARS = ("qkv", "attn out", "mixer in", "mixer out", "mlp", "experts", "shared expert", "prediction")
BLOCKS: dict[str, StepPart] = {
    "attention": "attention", "linear attention": "linear attention", "head": "head and loss", "loss": "head and loss",
    "embedding": "embedding", "optimizer": "optimizer", "router": "routing", "combine": "routing",
}  # fmt: skip
BY_CLASS: dict[str, StepPart] = {
    "gemm": "GEMMs", "quantize": "quantization", "update": "quantization", "attention": "attention", "optimizer": "optimizer",
    "loss": "head and loss", "embedding": "embedding", "routing": "routing", "convolution": "convolutions",
    "linear attention": "linear attention",
}  # fmt: skip
PASSES_OF: dict[str, tuple[Pass, ...]] = {"forward": ("fprop",), "backward": ("dgrad", "wgrad")}
IN_BF16 = ("bf16", "bf16")


RUN_TO_RUN = 0.02  # the same step on another day or machine
OTHER_CLOCK = 1.03
NO_GAIN = 0.25  # a smaller share of the predicted gain is not explained by dilution


LEAST_SEQUENCE = 256


@dataclass(frozen=True)
class PlacedKernel:
    """One kernel with the block of the model that it belongs to."""

    block: str
    direction: str
    name: str
    time_us: float
    quantizes: bool = True  # the recipe does

    @property
    def parts(self) -> dict[StepPart, float]:
        """Its microseconds by part of the step: by its block, and within linears by its class. What looks like a cast is none
        where nothing is quantized; a cast that a compiler fused with a norm or an activation is divided between the two."""
        if self.block in BLOCKS and not (self.block == "attention" and classify(self.name).kernel_class == "norm"):
            return {BLOCKS[self.block]: self.time_us}  # norms of queries and keys run between their projection and attention
        work = work_in_step(self.name)
        part = BY_CLASS.get(work.kernel_class, "norms and activations")
        if part == "quantization" and not self.quantizes:
            return {"norms and activations": self.time_us}
        if part != "quantization" or work.beside is None:
            return {part: self.time_us}
        cast_us = CAST_SHARE * self.time_us
        return {part: cast_us, BY_CLASS.get(work.beside, "norms and activations"): self.time_us - cast_us}


def place(parts: Sequence[ProfiledPart], *, quantizes: bool = True) -> list[PlacedKernel]:
    """Assign every kernel to a block. Forward, a mark opens its block; backward it closes it: what came before belongs to it.

    What follows the last forward mark is that block's, its own backward included; what follows the last backward mark, up to the
    optimizer, is the embedding's.

    >>> marks = [("mlp", "forward"), ("loss", "forward"), ("loss", "backward"), ("mlp", "backward"), ("optimizer", "step")]
    >>> [(kernel.block, kernel.direction) for kernel in place([(*mark, [["kernel", 1.0, 7]]) for mark in marks])]
    [('mlp', 'forward'), ('loss', 'forward'), ('mlp', 'backward'), ('embedding', 'backward'), ('optimizer', 'step')]
    """
    placed = []
    for (block, direction, kernels), (next_block, next_direction, _) in pairwise([*parts, ("end", "step", [])]):
        owner = block
        if direction == "backward":  # of the first layer: what is left is the embedding's
            owner = "embedding" if next_direction == "step" else next_block
        placed += [PlacedKernel(owner, direction, str(name), float(time), quantizes) for name, time, *_ in kernels]
    return placed


@dataclass(frozen=True)
class ProfiledStep:
    """One recipe: the kernels of one step, the step as launched, and its GPU time.

    Kernels were recorded in one step, at the clock of that moment: they are scaled so that they add up to the GPU time. The rest
    of the step as launched is waiting.
    """

    kernels: Sequence[PlacedKernel]
    wall_ms: float
    gpu_ms: float

    @property
    def idle_ms(self) -> float:
        """Time of each step that the GPU spends waiting for the CPU."""
        return max(self.wall_ms - self.gpu_ms, 0.0)

    def parts_ms(self) -> dict[StepPart, float]:
        """Milliseconds of each part; their sum is the step as launched."""
        sums = add_up((part, time_us / 1000) for kernel in self.kernels for part, time_us in kernel.parts.items())
        idle = self.idle_ms
        scale = (self.wall_ms - idle) / sum(sums.values())
        scaled: dict[StepPart, float] = {part: time * scale for part, time in sums.items()}
        return in_order({**scaled, "idle, host-bound": idle} if idle else scaled)


def unknown_kernels(kernels: Sequence[PlacedKernel]) -> tuple[float, tuple[str, ...]]:
    """The share of GPU time in kernels of a known class, and the names of the others."""
    unknown = [kernel for kernel in kernels if not classify(kernel.name).known]
    total = sum(kernel.time_us for kernel in kernels)
    known = 1 - sum(kernel.time_us for kernel in unknown) / total if total else 0.0
    return known, tuple(dict.fromkeys(kernel.name for kernel in unknown))


def levels_of(slow: Mapping[StepPart, float], fast: Mapping[StepPart, float]) -> tuple[WaterfallLevel, ...]:
    """The parts that either side has, each with the speedup of everything down to it.

    >>> [level.speedup for level in levels_of({"GEMMs": 4.0, "attention": 2.0}, {"GEMMs": 2.0, "attention": 2.0})]
    [2.0, 1.5]
    """
    levels, slow_ms, fast_ms = [], 0.0, 0.0
    for part in (part for part in STEP_PARTS if part in slow or part in fast):
        baseline_ms, recipe_ms = slow.get(part, 0.0), fast.get(part, 0.0)
        slow_ms, fast_ms = slow_ms + baseline_ms, fast_ms + recipe_ms
        speedup = slow_ms / fast_ms if fast_ms else float("nan")
        levels.append(WaterfallLevel(part=part, baseline_ms=baseline_ms, recipe_ms=recipe_ms, speedup=speedup))
    return tuple(levels)


HOST_BOUND = 0.05  # of the step spent idle
IDLE: StepPart = "idle, host-bound"
BUBBLE: StepPart = "pipeline bubble"
USED_UP = 0.5  # of what the GEMMs gain
MOST_OF_STEP = 0.5
AS_EXPECTED = 0.9  # of the GEMMs' speedup reaches the step


def verdict(levels: Sequence[WaterfallLevel], recipe: Recipe | None = None, placed: Sequence[PlacedKernel] = ()) -> Finding:
    """Why the step gains what it gains. `recipe` and `placed` (its kernels) where it was measured: they show fallbacks."""
    name = recipe.name if recipe is not None else "this recipe"
    if recipe is not None and (fallback := fallbacks(recipe, placed)) is not None:
        return fallback
    drops: dict[str, float] = {level.part: before.speedup - level.speedup for before, level in pairwise(levels)}
    losses = {part: drop for part, drop in drops.items() if drop > 0}  # how far each part reduces the speedup
    worst = max(losses, key=lambda part: losses[part]) if losses else None
    times: dict[str, float] = {level.part: level.recipe_ms for level in levels}
    step_ms, gemms, step = sum(times.values()), levels[0].speedup, levels[-1].speedup
    idle_ms = times.get(IDLE, 0.0)
    if idle_ms > HOST_BOUND * step_ms and (worst == IDLE or step < 1):
        return finding("step-host-bound", recipe=name, idle_ms=idle_ms)
    if (bubble_ms := times.get(BUBBLE, 0.0)) > MOST_OF_STEP * step_ms:
        return finding("step-bubble", recipe=name, bubble_ms=bubble_ms, step_ms=step_ms)
    if gemms <= 1:
        return finding("step-gemms-slower", recipe=name, speedup=gemms)
    if (step > 1 and step >= AS_EXPECTED * gemms) or worst is None:
        return finding("step-gemm-bound", recipe=name)
    if worst == "quantization" and losses[worst] >= USED_UP * (gemms - 1):
        largest = max(levels[1:], key=lambda level: level.recipe_ms)
        named: list[str] = ["quantization", *([largest.part] if largest.recipe_ms >= MOST_OF_STEP * step_ms else [])]
        code = "step-quantization"
    else:
        main = sorted(losses, key=lambda part: -losses[part])[:3]
        named = [part for part in main if losses[part] > 0.1 * sum(losses.values())]
        code = "step-diluted"
    fused = "quantization" in named and _fused_casts(placed)
    return finding(code, recipe=name, parts_ms={part: times[part] for part in named}, fused_casts=fused)


def _fused_casts(placed: Sequence[PlacedKernel]) -> bool:
    """Whether a good part of the casts is fused with norms or activations, so that their time is an estimate."""
    casts = [kernel.parts for kernel in placed if "quantization" in kernel.parts]
    fused_us = sum(parts["quantization"] for parts in casts if len(parts) > 1)
    return fused_us > 0.1 * sum(parts["quantization"] for parts in casts)


def fallbacks(recipe: Recipe, placed: Sequence[PlacedKernel]) -> Finding | None:
    """Which blocks' GEMMs ran in BF16 though the recipe requests low precision; None if none did.

    Forward, a GEMM is wrong if it is not a fprop of the recipe; backward, if it is neither dgrad nor wgrad. Where activations are
    recomputed, backward GEMMs are among forward ones: only BF16 is wrong there. A model whose blocks are not marked has GEMMs
    that belong in BF16 (the head's): it is wrong if all are. So it is with a mix, whose layers may be in BF16.
    """
    if recipe.kept is not None:
        gemms = [classify(kernel.name) for kernel in placed if kernel.block in LINEARS]
        return fallbacks(recipe_named(recipe.base), placed) if _all_in_bf16(gemms) else None
    unmarked = [classify(kernel.name) for kernel in placed if kernel.block == "model"]
    wrong = [("fprop", "every GEMM")] if recipe.quantizes and _all_in_bf16(unmarked) else list[tuple[Pass, str]]()
    names = grouped(((kernel.block, kernel.direction), kernel.name) for kernel in placed)
    wrong += [
        (passes[0], f"{block} {direction}")
        for block, (direction, passes) in product(LINEARS, PASSES_OF.items())
        if any(_fell_back(recipe, passes, name) for name in set(names.get((block, direction), ())))
    ]
    if not wrong:
        return None
    requested = grouped((" x ".join(recipe.operands[pass_name]), place) for pass_name, place in wrong)
    where = [place for places in requested.values() for place in places]
    return finding("step-fallback", recipe=recipe.name, where=where, ran=" x ".join(IN_BF16), requested=list(requested))


def _all_in_bf16(kernels: Sequence[KernelFacts]) -> bool:
    return {facts.operands for facts in kernels if facts.kernel_class == "gemm"} == {IN_BF16}


def _fell_back(recipe: Recipe, passes: Sequence[Pass], name: str) -> bool:
    """Whether this kernel is a GEMM in BF16 where no pass of the recipe has one."""
    in_bf16 = classify(name).operands == IN_BF16
    return in_bf16 and all(evidence(recipe, pass_name, [name]).verdict == "fallback" for pass_name in passes)


def attention_kernels(placed: Sequence[PlacedKernel]) -> dict[str, float]:
    """Which implementations of attention ran, and the milliseconds of their kernels, the longest first.

    Where no fused kernel ran, a softmax in the model means the unfused one: the GEMMs of attention look like all others there.
    """
    of_attention = [kernel for kernel in placed if classify(kernel.name).kernel_class == "attention"]
    sums = largest_sums((backend, one.time_us / 1000) for one in of_attention if (backend := attention_backend(one.name)))
    unfused = [kernel for kernel in placed if kernel.block in ("attention", "model") and is_softmax(kernel.name)]
    return sums or ({MATH: sum(kernel.time_us for kernel in unfused) / 1000} if unfused else {})


def step_findings(times: StepTimes) -> list[Finding]:
    """What explains the speedup of each recipe, what is host-bound or too close to call, what is missing."""
    findings = [entry for time in times.recipes for entry in _of_recipe(time)]
    if waiting := [time for time in times.recipes if _says_host_bound(time)]:
        idle_ms = max(float(str(time.verdict.facts["idle_ms"])) for time in waiting if time.verdict is not None)
        findings.append(finding("step-host-bound", recipe=[time.recipe for time in waiting], idle_ms=idle_ms))
    if bound := [time for time in times.recipes if time.host_bound and not _says_host_bound(time)]:
        facts = {
            "host_ms": max(time.launch_ms.value for time in bound if time.launch_ms is not None),
            "busy_ms": max(time.gpu_ms.value for time in bound if time.gpu_ms is not None),
        }
        findings.append(finding("step-launch-bound", recipes=[time.recipe for time in bound], **facts))
    findings += _captured(times)
    code = "step-not-measured" if times.origin == "measured" else "step-not-forecast"
    findings += [finding(code, recipe=name, reason=reason) for name, reason in times.failures.items()]
    findings += _attention(times)
    if any(time.mfu is not None for time in times.recipes):
        findings.append(finding("mfu-definition"))
    return findings


def _attention(times: StepTimes) -> Iterator[Finding]:
    """Which implementation of attention ran: once for all recipes in which it is the same one."""
    alike = grouped((tuple(time.attention_kernels), time) for time in times.recipes if time.attention_kernels)
    for group in alike.values():
        kernels_ms = max((time.attention_kernels for time in group), key=lambda kernels: sum(kernels.values()))
        yield finding("attention-ran", recipes=[time.recipe for time in group], kernels_ms=dict(kernels_ms))


def _captured(times: StepTimes) -> Iterator[Finding]:
    """What CUDA graphs change, in one line; and what could not be captured."""
    both = [(time, time.captured) for time in times.recipes if time.captured is not None]
    if both:
        gains = [(time.recipe, time.speedup, captured.speedup) for time, captured in both]
        known = [(name, launched, as_graph) for name, launched, as_graph in gains if launched and as_graph]
        yield finding(
            "step-captured" if known else "step-captured-alone",
            captured_ms={time.recipe: captured.step_ms.value for time, captured in both},
            launched_ms={time.recipe: time.step_ms.value for time, _ in both},
            captured={name: as_graph.value for name, _, as_graph in known},
            launched={name: launched.value for name, launched, _ in known},
        )
    for name, reason in times.not_captured.items():
        yield finding("step-not-captured", recipe=name, reason=reason)
    clocks = {time.recipe: (time.sm_mhz, captured.sm_mhz) for time, captured in both if time.sm_mhz and captured.sm_mhz}
    if faster := {name: pair for name, pair in clocks.items() if pair[0] > OTHER_CLOCK * pair[1]}:
        name, (launched_mhz, captured_mhz) = max(faster.items(), key=lambda entry: entry[1][0] / entry[1][1])
        yield finding("launched-at-higher-clock", recipe=name, launched_mhz=launched_mhz, captured_mhz=captured_mhz)
    if by_kernels := [time.recipe for time in times.recipes if time.gpu_time_from == "kernels"]:
        yield finding("gpu-time-of-kernels", recipes=by_kernels)


def _of_recipe(time: StepTime) -> Iterator[Finding]:
    name = time.recipe
    if time.verdict is not None and not _says_host_bound(time):
        yield named_verdict(time, time.verdict)
        if time.verdict.facts.get("fused_casts"):
            yield finding("fused-casts", recipe=name, share=CAST_SHARE)
    if time.speedup is not None and time.speedup.includes_one:
        yield finding("too-close-to-call", recipe=name, over=BASELINE, what="the training step")
    if time.named_share is not None and time.named_share < 1:
        yield finding("unknown-kernels", recipe=name, share=1 - time.named_share, kernels=list(time.unknown_kernels))


def _says_host_bound(time: StepTime) -> bool:
    return time.verdict is not None and time.verdict.code == "step-host-bound"


def named_verdict(time: StepTime, why: Finding) -> Finding:
    """The verdict with the name of its recipe."""
    return replace(why, facts={**why.facts, "recipe": time.recipe})


def observed_findings(times: StepTimes, observed: float) -> list[Finding]:
    """The speedup of the user's own run compared with every prediction."""
    return [
        finding(_observed(time, observed), recipe=time.recipe, observed=observed, predicted=time.speedup)
        for time in times.recipes
        if time.recipe != BASELINE
    ]


def _observed(time: StepTime, observed: float) -> str:
    predicted = time.speedup
    if time.fell_back:
        return "observed-fallback"
    if predicted is None or predicted.low is None or predicted.high is None:
        return "observed-unknown"
    low, high = predicted.low * (1 - RUN_TO_RUN), predicted.high * (1 + RUN_TO_RUN)
    if low <= observed <= high:
        return "observed-as-expected"
    if observed > high:
        return "observed-more"
    lost = 1 - RUN_TO_RUN <= observed <= 1 + NO_GAIN * (predicted.value - 1)
    return "observed-no-gain" if lost else "observed-less"


def smaller_batches(micro_batch_size: int, sequence_length: int) -> list[tuple[int, int]]:
    """Batches to try below this one, the smallest first: half the micro-batch and so on; of one sequence, half its length.

    >>> smaller_batches(8, 4096), smaller_batches(1, 1024), smaller_batches(3, 512)
    ([(1, 4096), (2, 4096), (4, 4096)], [(1, 256), (1, 512)], [(1, 512)])
    """
    halved = micro_batch_size if micro_batch_size > 1 else sequence_length
    halves = [halved >> shift for shift in range(halved.bit_length() - 1, 0, -1)]  # a half, a quarter and so on down to 1
    if micro_batch_size > 1:
        return [(size, sequence_length) for size in halves]
    return [(1, length) for length in halves if length >= LEAST_SEQUENCE]


def break_even_finding(measured: Sequence[AtBatch], recipe: str) -> Finding:
    """The batch from which this recipe wins: it is faster than BF16 beyond its interval, on this batch and every larger one."""
    own = [batch for batch in measured if recipe in batch.speedups]
    own.sort(key=lambda batch: -batch.micro_batch_size * batch.sequence_length)
    wins = list(takewhile(lambda batch: batch.speedups[recipe].above_one, own))
    if wins:
        code = "break-even-at-smallest" if len(wins) == len(own) else "break-even-from"
        return finding(code, recipe=recipe, batch=wins[-1].name)
    if any(batch.speedups[recipe].above_one for batch in own):
        return finding("break-even-not-at-largest", recipe=recipe, batch=own[0].name)
    return finding("break-even-never", recipe=recipe)
