"""The result of `gemmscope step` as tables and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gemmscope.interval import Interval
from gemmscope.measure.findings import known, too_close
from gemmscope.recipe.recipes import BASELINE
from gemmscope.report.bench import times_faster
from gemmscope.report.shapes import Table
from gemmscope.report.units import percent, si
from gemmscope.step.answer import RecipeAnswer, StepAnswer
from gemmscope.step.breakeven import AtBatch
from gemmscope.step.cost import Cost

RUN_TO_RUN = 0.02  # the same step, another day or machine
NO_GAIN = 0.25  # of the gain: less of it is not dilution any more
STEP_COLUMNS = (
    "Name",
    "Step ms",
    "Tokens/s",
    "Model TFLOP/s",
    "MFU",
    "Speedup [95%]",
    "GPU busy ms",
    "Launching ms",
    "Peak memory",
)


def tables(found: StepAnswer) -> list[Table]:
    """The answer, the way to it, and, where it was verified, the truth."""
    rows = tuple(_row(each) for each in found.recipes)
    made = [Table("The training step of one rank, predicted", STEP_COLUMNS, rows)]
    made += [_waterfall(each) for each in found.recipes if each.waterfall is not None]
    if any(each.verified for each in found.recipes):
        made.append(_verified(found))
    return made


def _row(each: RecipeAnswer) -> tuple[str, ...]:
    return (
        each.recipe,
        f"{each.step.value:.2f}",
        f"{each.tokens_per_s:,.0f}",
        f"{each.model_tflops:.3g}",
        percent(each.utilisation) if each.utilisation is not None else "-",
        "FALLBACK" if each.fell_back else times_faster(each.speedup) if each.speedup is not None else "1",
        f"{each.busy_ms:.2f}" if each.busy_ms is not None else "-",
        f"{each.host_ms:.2f}" if each.host_ms is not None else "-",
        si(each.peak_bytes, "B") if each.peak_bytes is not None else "-",
    )


def _waterfall(each: RecipeAnswer) -> Table:
    assert each.waterfall is not None
    rows = tuple(
        (level.row, f"{level.slow_ms:.2f}", f"{level.fast_ms:.2f}", f"{level.speedup:.3f}x") for level in each.waterfall.levels
    )
    title = f"From products to the step: {BASELINE} against {each.recipe} (ms; the speedup of everything down to each row)"
    return Table(title, ("Description", BASELINE, each.recipe, "Speedup so far"), rows)


def _verified(found: StepAnswer) -> Table:
    rows = []
    for each in found.recipes:
        if each.verified is not None:
            unit = " ms" if each.recipe == BASELINE else "x"
            predicted, actual = each.verified.predicted, each.verified.actual
            rows.append(
                (
                    each.recipe,
                    f"{predicted.value:.3f}{unit} {_ends(predicted, 3)}",
                    f"{actual.value:.3f}{unit} {_ends(actual, 3)}",
                    f"{each.verified.error:+.2%}",
                    {True: "yes", False: "no", None: "?"}[each.verified.agrees],
                )
            )
    return Table("Predicted against the real model", ("Name", "Predicted", "Real", "Error", "Within doubt"), tuple(rows))


def cost_table(costs: Mapping[str, Cost]) -> Table:
    """What a whole run costs, every GPU computing all the time."""
    rows = tuple((name, *amounts(cost)) for name, cost in costs.items())
    return Table("The whole run, without communication", ("Name", "Days [95%]", "GPU-hours", "Money"), rows)


def amounts(cost: Cost) -> tuple[str, str, str]:
    """Days, GPU-hours and money."""
    return _range(cost.days), _range(cost.gpu_hours), _range(cost.money) if cost.money is not None else "-"


def break_even_table(batches: Sequence[AtBatch]) -> Table:
    """The speedup of every precision on smaller batches, and on this one."""
    names = list(batches[-1].speedups)
    rows = tuple(
        (each.words, *(times_faster(each.speedups[name]) if name in each.speedups else "-" for name in names)) for each in batches
    )
    return Table("On smaller batches (micro-batch x sequence)", ("Batch", *names), rows)


def _range(found: Interval) -> str:
    digits = 2 if found.value < 100 else 0
    return f"{found.value:,.{digits}f} {_ends(found, digits)}"


def _ends(found: Interval, digits: int) -> str:
    """The interval of what cannot be negative; a question mark where there is none."""
    return f"[{max(found.low, 0.0):,.{digits}f}, {found.high:,.{digits}f}]" if known(found) else "[?]"


def observed(found: StepAnswer, gain: float) -> list[str]:
    """The reader's own figure against the prediction: as expected, lost outside of the GEMMs, or kernels that are not right."""
    lines = []
    for each in found.recipes:
        if each.speedup is None:
            continue
        low, high = each.speedup.low * (1 - RUN_TO_RUN), each.speedup.high * (1 + RUN_TO_RUN)
        if each.fell_back:
            why = f"kernels are not what they should be: {each.words}"
        elif not known(each.speedup):
            why = "too little was measured to say"
        elif low <= gain <= high:
            why = "as expected"
        elif gain > high:
            why = "more than this step gains: the two runs differ in something else"
        elif 1 - RUN_TO_RUN <= gain <= 1 + NO_GAIN * (each.speedup.value - 1):
            why = (
                "next to nothing of it: most likely the kernels are not what they should be (low precision is not running, or "
                "not in all layers); record a trace (gemmscope trace-me) and let gemmscope explain say which products ran in what"
            )
        else:
            why = (
                "less than this step gains: overhead outside of the GEMMs and of what one GPU computes (communication, data, "
                "host, recompute); gemmscope explain finds it in a trace"
            )
        lines.append(f"observed {gain:g}x against {times_faster(each.speedup)} predicted for {each.recipe}: {why}")
    return lines


def sentences(found: StepAnswer) -> list[str]:
    """What to know beside the numbers."""
    lines = [f"{each.recipe}: {each.words}" for each in found.recipes if each.words]
    if any(each.utilisation is not None for each in found.recipes):
        lines.append(
            "MFU: model FLOPs (linears and attention, no recomputation) over the chip's dense BF16 rate, in every precision"
        )
    for each in found.recipes:
        if each.waterfall is not None and each.waterfall.unknown:
            names = ", ".join(
                name.replace("(anonymous namespace)::", "").split("(")[0][:60] for name in each.waterfall.unknown[:5]
            )
            lines.append(f"{each.recipe}: {percent(1 - each.waterfall.named)} of GPU time is in kernels of unknown kind: {names}")
        if each.host_bound and each.host_ms is not None and each.busy_ms is not None:
            times = f"the CPU {each.host_ms:.1f} ms to launch and the GPU {each.busy_ms:.1f} ms to run"
            lines.append(f"HOST-BOUND: {each.recipe} takes {times}")
        if each.speedup is not None and not each.fell_back and too_close(each.speedup):
            lines.append(f"too close to call: {each.recipe} against {BASELINE}")
    lines += [f"not measured: {name}: {reason}" for name, reason in found.failures.items()]
    if found.depth and found.depth < found.layers:
        rows = f"; rows from products to the step are those of {found.depth} layers"
        lines.append(
            f"the whole {found.layers} layers follow from stacks of {found.depth} and {max(1, found.depth // 2)}"
            + (rows if any(each.waterfall is not None for each in found.recipes) else "")
        )
    return lines
