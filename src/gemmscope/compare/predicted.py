"""Holds a step against what was predicted for it: by a run file of `step` or `bench`, or by the model's own sizes."""

from __future__ import annotations

from gemmscope.errors import UserError
from gemmscope.explain.diagnose import Diagnosis
from gemmscope.explain.pair import ROWS, Held, Pair, parts, step_flops
from gemmscope.explain.place import LOW
from gemmscope.recipe.recipes import BASELINE
from gemmscope.store.benchfile import BenchFile
from gemmscope.store.stepfile import RecipeRecord, StepFile

RECIPES = {"FP8 blocks": ("FP8Block",), "MXFP8": ("MXFP8",), "FP4": ("NVFP4",)}
ALIASES = {"routing": "embedding"}


def with_prediction(found: Diagnosis, run: StepFile | BenchFile, recipe: str | None, origin: str) -> Pair:
    """A run file's prediction for the recipe that the trace ran."""
    return _with_step(found, run, recipe, origin) if isinstance(run, StepFile) else _with_bench(found, run, recipe, origin)


def recipe_of(found: Diagnosis, known: list[str], asked: str | None, origin: str) -> str:
    """Which of a file's recipes a trace ran: as told, else by its products and casts."""
    if asked is not None:
        chosen = next((name for name in known if name.lower() == asked.lower()), None)
        if chosen is None:
            raise UserError(f"{origin} has no recipe {asked}", f"it has {', '.join(known)}")
        return chosen
    rows = [row for row in found.account.census if row.precision in LOW]
    if not rows:
        return BASELINE if BASELINE in known else known[0]
    precision = max(rows, key=lambda row: row.time_ms).precision
    delayed = any(item.placed.facts.kernel_class == "update" for item in found.evidence.items)
    usual = ("FP8Delayed",) if delayed else ("FP8Current", "FP8Tensorwise", "FP8Rowwise")
    chosen = next((name for name in RECIPES.get(precision, usual) if name in known), None)
    if chosen is None:
        raise UserError(f"{origin} has no recipe that runs {precision} as this trace does", f"say which: --recipe {known[-1]}")
    return chosen


def _with_step(found: Diagnosis, run: StepFile, asked: str | None, origin: str) -> Pair:
    name = recipe_of(found, [each.recipe for each in run.recipes], asked, origin)
    record = next(each for each in run.recipes if each.recipe == name)
    _refuse_other_step(found, run, record, origin)
    expected: dict[str, float] = {}
    for level in record.waterfall:
        row = ALIASES.get(level.row, level.row)
        expected[row] = expected.get(row, 0.0) + level.recipe_ms
    seen = parts(found)
    rows = [Held(row, expected.get(row, 0.0), seen.get(row, 0.0)) for row in ROWS if row in expected or row in seen]
    if not expected:
        rows = [Held("step", record.step_ms.value, found.account.step_ms)]
    off = found.account.step_ms / record.step_ms.value - 1
    words = [f"predicted {record.step_ms.value:.1f} ms for {name}, found {found.account.step_ms:.1f} ms: {off:+.1%}"]
    worst = max(rows, key=lambda held: held.difference_ms or 0.0)
    if worst.difference_ms is not None and worst.difference_ms > 0.02 * found.account.step_ms:
        words.append(f"most of it: {worst.row}, {worst.difference_ms:+.1f} ms")
    base = next((each for each in run.recipes if each.recipe == BASELINE), None)
    if base is not None and name != BASELINE:
        predicted = base.step_ms.value / record.step_ms.value
        words.append(
            f"speedup over the predicted BF16 step: {base.step_ms.value / found.account.step_ms:.2f}x, {predicted:.2f}x predicted"
        )
    return Pair(f"against the prediction of {origin}", f"predicted, {name}", tuple(rows), tuple(words))


def _refuse_other_step(found: Diagnosis, run: StepFile, record: RecipeRecord, origin: str) -> None:
    """By the hidden size, which is a side of most products, and by FLOPs: the prediction's include attention's."""
    sizes = {side for item in found.evidence.products if item.product and item.product.size for side in item.product.size}
    if sizes and run.model.hidden_size and run.model.hidden_size not in sizes:
        raise UserError(
            f"{origin} is of another model than {found.trace.path}: hidden size {run.model.hidden_size} is in no product",
            "predict with the model of the recorded run",
        )
    flops, planned = step_flops(found), record.model_tflops * record.step_ms.value * 1e9
    if flops and planned and not 0.25 < flops / planned < 1.15:
        raise UserError(
            f"{origin} is of another training than {found.trace.path}: {planned / 1e12:.2f} TFLOP per step were planned, "
            f"the trace's products take {flops / 1e12:.2f}",
            "predict with the batch, sequence length and parallelism of the recorded run",
        )


def _with_bench(found: Diagnosis, run: BenchFile, asked: str | None, origin: str) -> Pair:
    known = list(dict.fromkeys(total.recipe for total in run.totals if total.mode == "autocast"))
    if not known:
        raise UserError(f"{origin} holds no linears with quantization (autocast)", "run gemmscope bench with a model")
    name = recipe_of(found, known, asked, origin)
    _refuse_other_sizes(found, run, origin)
    total = next(each for each in run.totals if each.recipe == name and each.mode == "autocast")
    times = found.account.micro_batches
    seen_in = parts(found)
    products, quantization = (seen_in.pop(row, 0.0) for row in ("products", "quantization"))
    expected_quantize = total.quantize_ms * times
    rows = [
        Held("products", total.total_ms.value * times - expected_quantize, products),
        Held("quantization", expected_quantize, quantization),
        *(Held(row, None, time) for row, time in seen_in.items()),
    ]
    planned, seen = total.total_ms.value * times, products + quantization
    words = [
        f"linears: {planned:.1f} ms measured by bench for {name} ({times} micro-batches of {run.layers or '?'} layers), "
        f"{seen:.1f} ms in the trace: {seen / planned - 1:+.1%}"
    ]
    base = next((each for each in run.totals if each.recipe == BASELINE and each.mode == "autocast"), None)
    if base is not None and name != BASELINE:
        saved = (base.total_ms.value - total.total_ms.value) * times
        step = found.account.step_ms
        gain = base.total_ms.value / total.total_ms.value
        words.append(f"linears gain {gain:.2f}x: {saved:.1f} ms; of a step of {step:.1f} ms that is {(step + saved) / step:.2f}x")
    return Pair(f"against {origin}", f"measured alone, {name}", tuple(rows), tuple(words))


def _refuse_other_sizes(found: Diagnosis, run: BenchFile, origin: str) -> None:
    planned = {tuple(sorted((row.tokens, row.inputs, row.outputs))) for row in run.rows}
    seen = {tuple(sorted(item.product.size)) for item in found.evidence.products if item.product and item.product.size}
    if seen and planned and len(planned & seen) < 0.5 * len(planned):
        some = ["x".join(map(str, size)) for size in (sorted(planned)[0], sorted(seen)[0])]
        raise UserError(
            f"{origin} is of another model or batch than {found.trace.path}: few of its products are in the trace "
            f"({some[0]} was measured, {some[1]} ran)",
            "run gemmscope bench with the batch, sequence length and parallelism of the recorded run",
        )
    layers = run.layers
    flops = sum(2.0 * row.tokens * row.inputs * row.outputs * row.count * 3 for row in run.rows if row.mode == "autocast")
    recipes = len({row.recipe for row in run.rows if row.mode == "autocast"}) or 1
    linear = found.evidence.products
    took = sum(item.product.flops for item in linear if item.product and item.scope.phase != "again") / found.seen.count
    planned_flops = flops / recipes * found.account.micro_batches
    if took and planned_flops and not 0.8 < took / planned_flops < 1.25:
        raise UserError(
            f"{origin} is of {layers or 'other'} layers: {planned_flops / 1e12:.2f} TFLOP per step, the trace's linears take "
            f"{took / 1e12:.2f}",
            "run gemmscope bench with the depth and batch of the recorded run",
        )


def with_sizes(found: Diagnosis, flops_per_step: float, origin: str) -> list[str]:
    """Against what the model itself says: do the products of the trace add up to those of the config?"""
    took = step_flops(found)
    if not took:
        return [f"{origin}: the trace has no shapes, so its products cannot be held against the model's"]
    off = took / flops_per_step
    if 0.98 < off < 1.02:
        told = "as the model says"
    elif off > 1:
        told = f"{off:.2f} times what the model says: other sizes, or padding"
    else:
        told = f"{off:.2f} of what the model says: layers run outside of plain products, or other sizes"
    return [f"{origin}: products take {took / 1e12:.2f} TFLOP per step, {flops_per_step / 1e12:.2f} by its sizes: {told}"]
