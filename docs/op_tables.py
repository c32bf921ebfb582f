"""The worked example read op by op: tables and sentences of the tutorial, from recorded runs and a forecast."""

from __future__ import annotations

from collections.abc import Sequence

import gemmscope as gs
import worked_example
from gemmscope.choices import Mode
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.linears import Linears, OpTime
from gemmscope.units import ends
from gemmscope.workload.ops import PASSES
from worked_example import BLACKWELL, forecast_linears, measured


def h200_by_op() -> str:
    """Measured on the H200: each op in both modes, and how much of its autocast time is quantization."""
    return _by_op(measured(), ("FP8Current", "FP8Delayed", "FP8Block"))


def b300_by_op() -> str:
    """The same, forecast for a B300."""
    return _by_op(forecast_linears("b300"), ("FP8Delayed", "MXFP8", "NVFP4"))


def _by_op(linears: Linears, names: Sequence[str]) -> str:
    rows = []
    for op in _ops(linears):
        for name in names:
            shared = linears.measured_as(name, "pre-quantized")
            upper = _gain(linears, name, "pre-quantized", op).value
            gain = _gain(linears, name, "autocast", op)
            time = _time(linears, op, name, "autocast")
            share = time.quantization_ms / time.total_ms.value
            alone = f"{upper:.2f}x" if shared == name else f"as {shared}"
            rows.append([op, name, f"{gain.value:.2f}x {ends(gain, 2)}", alone, f"{share:.0%}"])
    return _table(["op", "recipe", "autocast", "pre-quantized", "quantization"], rows, text=2)


def h200_by_pass() -> str:
    """The GEMMs alone, pass by pass: where FP8Block loses."""
    linears, rows = measured(), []
    for op in _ops(linears):
        for name in PASSES:
            slow, current, block = (
                _time(linears, op, recipe, "pre-quantized").pass_ms[name].value for recipe in (BASELINE, "FP8Current", "FP8Block")
            )
            times = [f"{slow:.2f}", f"{current:.2f}", f"{block:.2f}"]
            rows.append([op, name, *times, f"{slow / current:.2f}x", f"{slow / block:.2f}x"])
    columns = ["op", "pass", "BF16 ms", "FP8Current ms", "FP8Block ms", "FP8Current", "FP8Block"]
    return _table(columns, rows, text=2)


def why_block_loses() -> str:
    """Why FP8Block gains least on Hopper, in a sentence with its numbers."""
    linears = measured()
    low, high = {}, {}
    for name in PASSES:
        gains = []
        for op in _ops(linears):
            slow, block = (_time(linears, op, recipe, "pre-quantized").pass_ms[name].value for recipe in (BASELINE, "FP8Block"))
            gains.append(slow / block)
        low[name], high[name] = min(gains), max(gains)
    forward = f"{min(low['fprop'], low['dgrad']):.2f} to {max(high['fprop'], high['dgrad']):.2f}x"
    return (
        f"In fprop and dgrad, FP8Block's GEMMs reach {forward} over {BASELINE}. In wgrad, they reach only "
        f"{low['wgrad']:.2f} to {high['wgrad']:.2f}x."
    )


def passes_differ() -> str:
    """The time of the backward passes over that of fprop, of the GEMMs alone."""
    linears, texts = measured(), []
    for name in ("dgrad", "wgrad"):
        ranges = []
        for recipe in (BASELINE, "FP8Current", "FP8Block"):
            passes = [_time(linears, op, recipe, "pre-quantized").pass_ms for op in _ops(linears)]
            ratios = [times[name].value / times["fprop"].value for times in passes]
            ranges.append(f"{min(ratios):.2f} to {max(ratios):.2f} in {recipe}")
        texts.append(f"The {name}/fprop time ratio is {', '.join(ranges[:-1])} and {ranges[-1]}.")
    return "\n".join(texts)


def why_attn_out_gains_least() -> str:
    """The op with the smallest weight gains least, in sentences with their numbers."""
    linears, lines = measured(), []
    gains = {op: _gain(linears, "FP8Delayed", "autocast", op).value for op in _ops(linears)}
    least = min(gains, key=lambda op: gains[op])
    best = max(gains, key=lambda op: gains[op])
    shares = {op: _share(linears, op, "FP8Delayed") for op in (least, best)}
    lines.append(
        f"On the H200 in FP8Delayed, {least} reaches {gains[least]:.2f}x and {best} {gains[best]:.2f}x. Quantization takes "
        f"{shares[least]:.0%} of the time of {least}, and {shares[best]:.0%} of that of {best}."
    )
    forecast = forecast_linears("b300")
    ours = {op: _gain(forecast, "NVFP4", "autocast", op).value for op in _ops(forecast)}
    least = min(ours, key=lambda op: ours[op])
    lines.append(
        f"The forecast for NVFP4 on a B300 shows the same: {least} reaches {ours[least]:.2f}x, the others "
        f"{min(ours[op] for op in ours if op != least):.2f}x or more, and quantization would take "
        f"{_share(forecast, least, 'NVFP4'):.0%} of the time of {least}."
    )
    return "\n".join(lines)


def intensity() -> str:
    """FLOPs per quantized element of each op: why a small weight gains less."""
    linears, rows = measured(), []
    for case in linears.cases:
        m, k, n = case.tokens, case.inputs, case.outputs
        elements, flops = m * k + k * n + m * n, 3 * 2 * m * k * n
        rows.append([case.op, f"{m}x{k}x{n}", f"{flops / 1e12:.2f}", f"{elements / 1e6:.0f}", f"{flops / elements:,.0f}"])
    columns = ["op", "M x K x N", "TFLOP, three passes", "million elements of X, W and dY", "FLOPs per quantized element"]
    return _table(columns, rows, text=2)


def flop_budget() -> str:
    """FLOPs of one layer and of the model, op by op."""
    shapes = gs.load(**worked_example.SIZES).on(micro_batch_size=31, sequence_length=512).shapes()
    layers, rows, total = worked_example.SIZES["num_hidden_layers"], [], 0.0
    for op in dict.fromkeys(gemm.op for gemm in shapes.gemms):
        every = [gemm for gemm in shapes.gemms if gemm.op == op]
        forward = next(gemm for gemm in every if gemm.pass_name == "fprop")
        flops = 2.0 * forward.m * forward.k * forward.n
        rows.append([op, f"{forward.k:,}", f"{forward.n:,}", f"{flops / 1e12:.2f}", f"{len(every) * flops / 1e12:.2f}"])
        total += flops
    rows.append(["**one layer**", "", "", f"**{total / 1e12:.2f}**", f"**{3 * total / 1e12:.2f}**"])
    rows.append([f"**all {layers} layers**", "", "", f"**{layers * total / 1e12:.0f}**", f"**{3 * layers * total / 1e12:.0f}**"])
    return _table(["op", "K", "N", "TFLOP forward", "TFLOP forward and backward"], rows)


def blackwell_pairs() -> str:
    """The fastest recipe on each Blackwell GPU compared with every other one, by the interval of their ratio."""
    rows = []
    for gpu, title in BLACKWELL.items():
        linears = forecast_linears(gpu)
        winner = linears.winners["autocast"]
        for name in linears.recipes:
            if name in (winner.best, BASELINE):
                continue
            ratio = next(
                entry.speedup
                for entry in linears.speedups
                if (entry.recipe, entry.over, entry.mode, entry.op) == (winner.best, name, "autocast", "")
            )
            verdict = "too close to call" if name in winner.rivals else f"{winner.best} is faster"
            rows.append([title, f"{winner.best} over {name}", f"{ratio.value:.2f}x {ends(ratio, 2)}", verdict])
    return _table(["GPU, FORECAST", "ratio", "value [90%]", "verdict"], rows, text=2)


def waterfall() -> str:
    """From the speedup of the GEMMs to that of the step: the recorded Llama step in its best recipe."""
    step = worked_example.llama_step().step
    best = max(
        (recipe for recipe in step.recipes if recipe.speedup), key=lambda recipe: recipe.speedup.value if recipe.speedup else 0.0
    )
    rows = [
        [f"{level.part}", f"{level.baseline_ms:.1f}", f"{level.recipe_ms:.1f}", f"{level.speedup:.2f}x"]
        for level in best.waterfall
    ]
    return _table(["part", "BF16 ms", f"{best.recipe} ms", "speedup so far"], rows)


def _ops(linears: Linears) -> list[str]:
    return list(dict.fromkeys(time.op for time in linears.ops))


def _time(linears: Linears, op: str, recipe: str, mode: Mode) -> OpTime:
    return next(time for time in linears.ops if (time.op, time.recipe, time.mode) == (op, recipe, mode))


def _gain(linears: Linears, recipe: str, mode: Mode, op: str) -> Interval:
    speedup = linears.speedup(recipe, mode, op)
    assert speedup is not None
    return speedup


def _share(linears: Linears, op: str, recipe: str) -> float:
    time = _time(linears, op, recipe, "autocast")
    return time.quantization_ms / time.total_ms.value


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], text: int = 1) -> str:
    """Markdown: the first columns are text, the others numbers."""
    rule = ["---" if place < text else "---:" for place in range(len(columns))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, rule, *rows])
