"""The result of `gemmscope forecast` as tables and sentences: GPUs side by side, the step by its parts, sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gemmscope.forecast.findings import ForecastFindings
from gemmscope.forecast.sweep import Point, break_even, rivals_of
from gemmscope.interval import Interval
from gemmscope.measure.findings import too_close
from gemmscope.recipe.recipes import BASELINE
from gemmscope.report.bench import digits, tables, times_faster
from gemmscope.report.shapes import Table
from gemmscope.report.step import amounts
from gemmscope.step.answer import RecipeAnswer, StepAnswer
from gemmscope.step.cost import Cost
from gemmscope.step.waterfall import ROWS

BAR = "90% error bar"
MOST_PLACES = 6  # of a sweep that one line names


def gpu_tables(report: ForecastFindings, answer: StepAnswer | None) -> list[Table]:
    """All tables of one GPU, its name before each title."""
    made = tables(report)
    if answer is not None and answer.recipes:
        made += [_parts(answer)]
    return [replace(table, title=f"{report.chip.name}: {table.title}") for table in made]


def side_by_side(reports: Sequence[ForecastFindings], answers: Mapping[str, StepAnswer]) -> Table:
    """A row for each GPU and recipe: the linears in both modes, the step, and what that gains."""
    modes = reports[0].modes
    baseline = next((each.step.value for each in _recipes(answers, reports[0].chip.name) if each.recipe == BASELINE), None)
    several = len(reports) > 1 and baseline is not None
    rows = []
    for report in reports:
        steps = {each.recipe: each for each in _recipes(answers, report.chip.name)}
        for name in report.recipes:
            step = steps.get(name)
            over = f"{baseline / step.step.value:.2f}x" if several and baseline and step else "-"
            linears = [_linears(report.total(name, mode)) for mode in modes]
            gain = "1" if name == BASELINE else times_faster(step.speedup) if step and step.speedup else "-"
            close = " too close to call" if step and step.speedup and too_close(step.speedup) else ""
            rate = [f"{step.tokens_per_s:,.0f}", f"{step.model_tflops:.0f}"] if step else ["-", "-"]
            shown = [_range(step.step) if step else "-", *rate, gain + close]
            rows.append((report.chip.name, name, *linears, *shown, *([over] if several else [])))
    first = f"Over {reports[0].chip.name} {BASELINE}"
    columns = (
        "Description",
        "Recipe",
        *(f"Linears ms, {mode}" for mode in modes),
        "Step ms",
        "Tokens/s",
        "Model TFLOP/s",
        "Speedup",
    )
    title = f"FORECAST side by side: one rank's linears per micro-batch and its training step ({BAR} in brackets)"
    return Table(title, (*columns, *([first] if several else [])), tuple(rows))


def _recipes(answers: Mapping[str, StepAnswer], name: str) -> tuple[RecipeAnswer, ...]:
    return answers[name].recipes if name in answers else ()


def _linears(found: Interval | None) -> str:
    return _range(found) if found is not None else "-"


def _range(found: Interval) -> str:
    """Milliseconds with their error bar.

    >>> _range(Interval(102.04, 97.1, 107.2))
    '102.04 [97.100, 107.20]'
    """
    return f"{digits(found.value)} [{digits(found.low)}, {digits(found.high)}]"


def _parts(answer: StepAnswer) -> Table:
    """The step's rows in every recipe; the last line is what training gains."""
    names = [each.recipe for each in answer.recipes]
    present = [row for row in ROWS if any(row in each.rows for each in answer.recipes)]
    rows = [(str(row), *(f"{each.rows.get(row, 0.0):.2f}" for each in answer.recipes)) for row in present]
    rows.append(("whole step", *(f"{each.step.value:.2f}" for each in answer.recipes)))
    rows.append(("times faster", *(times_faster(each.speedup) if each.speedup else "1" for each in answer.recipes)))
    return Table(f"FORECAST of the training step of one rank, by part (ms; {BAR})", ("Description", *names), tuple(rows))


def cost_table(costs: Mapping[str, Mapping[str, Cost]]) -> Table:
    """What a whole run costs on each GPU, in each precision."""
    rows = tuple((gpu, name, *amounts(cost)) for gpu, of_gpu in costs.items() for name, cost in of_gpu.items())
    return Table("The whole run, without restarts", ("Name", "Recipe", f"Days [{BAR}]", "GPU-hours", "Money"), rows)


def verdicts(reports: Sequence[ForecastFindings], answers: Mapping[str, StepAnswer]) -> list[str]:
    """Which precision, on each GPU, and which cannot be told apart from it."""
    lines = []
    for report in reports:
        chip = report.chip.name
        steps = [each for each in _recipes(answers, chip) if each.speedup is not None]
        if not steps:
            continue
        best = max(steps, key=lambda each: each.speedup.value if each.speedup else 0.0)
        assert best.speedup is not None
        if best.speedup.value <= 1:
            maybe = [each.recipe for each in steps if each.speedup and each.speedup.high >= 1]
            but = f", but {', '.join(maybe)} may: too close to call" if maybe else ""
            lines.append(f"{chip}: stay with {BASELINE}: nothing is forecast to gain{but}")
            continue
        rivals = rivals_of(best.recipe, best.speedup, [(each.recipe, each.speedup) for each in steps if each.speedup])
        close = f"; too close to call against {', '.join(rivals)}" if rivals else ""
        lines.append(f"{chip}: {best.recipe} is forecast fastest, {times_faster(best.speedup)} over {BASELINE}{close}")
        lines.append(f"{chip}: {best.recipe}: {best.words}")
    for report in reports:
        lines += host_bound(report.chip.name, _recipes(answers, report.chip.name))
        lines += [f"not possible: {report.chip.name}: {words}" for words in report.misaligned()]
    return lines


def host_bound(chip: str, steps: Sequence[RecipeAnswer]) -> list[str]:
    """One line where launching some recipe's step takes longer than running it."""
    bound = [each for each in steps if each.host_bound and each.host_ms and each.busy_ms]
    if not bound:
        return []
    times = ", ".join(f"{each.recipe} {each.busy_ms:.0f} ms" for each in bound)
    most = max(each.host_ms or 0.0 for each in bound)
    return [f"HOST-BOUND: {chip}: the GPU needs {times}; launching takes a CPU about {most:.0f} ms"]


# --- sweeps -----------------------------------------------------------------------------------------------------------


def sweep_table(points: Sequence[Point], names: Sequence[str], recipes: Sequence[str], gpu: str) -> Table:
    """One size: a row each with every recipe. Two: the best recipe and its gain in a plane."""
    if len(names) == 1:
        low = [name for name in recipes if name != BASELINE]
        rows = [
            (
                str(point.values[0]),
                digits(point.step_ms) if point.step_ms else "-",
                *(times_faster(point.of(name)) for name in low),
                _best(point),
            )
            for point in points
        ]
        title = f"{gpu}: FORECAST of the training step's speedup by {names[0]} ({BAR}; ? = too close to call)"
        return Table(title, (names[0], f"{BASELINE} step ms", *low, "Best"), tuple(rows))
    columns = list(dict.fromkeys(point.values[1] for point in points))
    by_values = {point.values: point for point in points}
    rows = [
        (str(first), *(_best(by_values[first, second]) for second in columns))
        for first in dict.fromkeys(point.values[0] for point in points)
    ]
    title = (
        f"{gpu}: FORECAST of the best recipe and its gain in the step: {names[0]} down, {names[1]} across (? = too close to call)"
    )
    return Table(title, (names[0], *(f"{names[1]}={second}" for second in columns)), tuple(rows))


def _best(point: Point) -> str:
    if point.why_not:
        return "-"
    name, found = point.best
    gain = "" if name == BASELINE else f" {found.value:.2f}x"
    return name + gain + ("" if point.certain else " ?") + (" HOST-BOUND" if name in point.host_bound else "")


def sweep_sentences(points: Sequence[Point], names: Sequence[str], recipes: Sequence[str], gpu: str) -> list[str]:
    """Where each recipe begins to gain, for every value of the second size; and points that cannot be."""
    lines = []
    seconds = list(dict.fromkeys(point.values[1] for point in points)) if len(names) == 2 else [None]
    for name in recipes:
        if name == BASELINE:
            continue
        begins: dict[int | None, list[str]] = {}
        for second in seconds:
            line = [point for point in points if second is None or point.values[1] == second]
            begins.setdefault(break_even(line, name), []).append(str(second))
        parts = [
            (f"from {names[0]} {since} on" if since is not None else "nowhere for certain")
            + (f" ({names[1]} {', '.join(where)})" if len(names) == 2 else "")
            for since, where in begins.items()
        ]
        lines.append(f"{gpu}: break-even: {name} gains {'; '.join(parts)}")
    bound: dict[str, list[Point]] = {}
    cannot: dict[str, list[Point]] = {}
    impossible: dict[str, list[Point]] = {}
    for point in points:
        if point.host_bound:
            bound.setdefault(", ".join(point.host_bound), []).append(point)
        if point.cannot:
            cannot.setdefault(", ".join(name for name, _ in point.cannot), []).append(point)
        if point.why_not:
            impossible.setdefault(point.why_not, []).append(point)
    for which, where in bound.items():
        words = f"launching {which} takes a CPU longer than the GPU at {_places(where)}: no gain is counted there"
        lines.append(f"HOST-BOUND: {gpu}: {words}")
    for which, where in cannot.items():
        lines.append(f"not possible: {gpu}: {which} at {_places(where)}: {where[0].cannot[0][1]}")
    return lines + [f"not possible: {_places(where)}: {why}" for why, where in impossible.items()]


def _places(points: Sequence[Point]) -> str:
    """The first few of them."""
    listed = ", ".join(" x ".join(map(str, point.values)) for point in points[:MOST_PLACES])
    return listed + (" …" if len(points) > MOST_PLACES else "")
