"""The Document of a `FleetResult`."""

from collections.abc import Iterator, Sequence

from gemmscope import units
from gemmscope.document.common import batch_lines, command_facts, model_facts, subject
from gemmscope.document.fleet_charts import heat_map, rank_charts
from gemmscope.document.fleet_tables import (
    difference_table,
    figure_table,
    gpu_table,
    health_table,
    node_table,
    outlier_table,
    summary_table,
    value_cell,
)
from gemmscope.document.fleet_view import FleetView
from gemmscope.document.model import Block, Document, KeyFigure, Message, Section
from gemmscope.document.table import Facts
from gemmscope.findings import finding
from gemmscope.gpu.health import health_problems
from gemmscope.results.fleet import FleetFigure, FleetResult, Outlier

MOST_NAMED = 4  # outliers, or reasons, in one sentence
NOISY = 0.2  # with a larger limit of outliers, the measurements are called noisy
MOST_FIGURES = 4  # beside the answer
OF = {"bench": "bench", "step": "training step"}
AGAIN = "measure again before you replace a GPU: --repeat 3 measures each one three times"


def fleet_document(result: FleetResult, name: str = "") -> Document:
    """Build the Document of the result."""
    view = FleetView(result)
    where = _where(view)
    messages = [*_evidence(view), *_not_measured(result), *_health(view), *map(Message.of, result.findings)]
    return Document(
        kind="fleet",
        title=f"{result.name}: {OF[result.of]} on every {view.kind}",
        subject=subject(result.model, result.run),
        where=where,
        answer=_answer(view),
        because=tuple(_because(view)),
        key_figures=tuple(_key_figures(view)),
        summary=summary_table(view),
        context=tuple(_context(view)),
        sections=tuple(_sections(view)),
        messages=tuple(messages),
        facts={"Method": _method(view)},
        next_purpose=AGAIN if view.slow and max((gpu.repeats for gpu in result.gpus), default=1) == 1 else "",
        name=name,
    )


def _where(view: FleetView) -> str:
    """How many GPUs of which product, on how many nodes."""
    count, kind = len(view.result.gpus), next(iter(view.groups)) if len(view.groups) == 1 else ""
    gpus = units.counted(count, view.kind) + (f" ({kind})" if kind and view.kind == "GPU" else "")
    gpus = f"{len(view.result.measured):,} of {gpus}" if len(view.result.measured) < count else gpus
    return f"{gpus} on {units.counted(len(view.nodes), 'node')}" if len(view.nodes) > 1 else gpus


def _answer(view: FleetView) -> str:
    """One sentence: which GPUs are outliers, or within which limit all of them are."""
    result, count = view.result, len(view.result.measured)
    of, kind = units.counted(count, view.kind), view.kind
    if not count or not result.figures:
        return "Nothing was measured."
    if count == 1:
        return f"1 {kind} measured: {_centers(view, MOST_FIGURES)}. There is no other {kind} to compare it with."
    if view.slow:
        return f"{_counted(view.slow, f' of {of}', f' of {len(view.nodes)}')} slow: {_listed(view.slow)}."
    limits = [figure.limit for figure in result.figures if figure.limit is not None]
    if not limits:
        least = result.rule.least_gpus
        return f"{of} measured, too few to detect outliers (the rule needs {least} of one type). {_slowest(view)}"
    if max(limits) > NOISY:
        return (
            f"No outlier among {of}, but the measurements are noisy: a {kind} would have to differ "
            f"by {units.percent(max(limits))} to be detected."
        )
    others = "the others" if len(view.groups) == 1 else "the others of its type"
    tested = {figure.group for figure in result.figures if figure.limit is not None}
    compared = sum(gpu.group in tested for gpu in result.measured)
    none = f"None of {'the ' if compared == count else ''}{compared:,} {kind}s is slower than {others}"
    none += f" by more than {units.percent(max(limits))}"
    none += f"; {_counted(view.fast)} faster: {_listed(view.fast)}." if view.fast else "."
    return none if compared == count else f"{none} Too few of their type to compare: {units.counted(count - compared, kind)}."


def _counted(outliers: Sequence[Outlier], of_gpus: str = "", of_nodes: str = "") -> str:
    """How many GPUs and whole nodes these are, with the verb."""
    whole = sum(outlier.whole_node for outlier in outliers)
    single = len(outliers) - whole
    which = [f"{single}{of_gpus}"] if single else []
    which += [f"{units.counted(whole, 'whole node')}{of_nodes}"] if whole else []
    return f"{' and '.join(which)} {'is' if len(outliers) == 1 else 'are'}"


def _listed(outliers: Sequence[Outlier]) -> str:
    """The worst outliers by name, each with the metric in which it differs the most."""
    named = [f"{outlier.where} by {100 * abs(outlier.ratio.value - 1):.1f}% ({outlier.figure})" for outlier in outliers]
    return units.names(named, MOST_NAMED)


def _slowest(view: FleetView) -> str:
    gpu, worst = next(((gpu, worst) for gpu in view.ordered if (worst := view.worst(gpu)) is not None), (None, None))
    if gpu is None or worst is None:
        return ""
    slower = 1 - worst.ratio.value
    return f"The slowest, {gpu.place}, is {100 * slower:.1f}% slower than the median ({worst.figure.name})." if slower > 0 else ""


def _main_figures(view: FleetView) -> list[FleetFigure]:
    """The metrics of the largest group of GPUs."""
    kind = next(iter(view.groups), "")
    return [figure for figure in view.result.figures if figure.group == kind]


def _centers(view: FleetView, most: int) -> str:
    figures = _main_figures(view)
    return ", ".join(f"{figure.name} {_center(figure)}" for figure in figures[:most])


def _center(figure: FleetFigure) -> str:
    unit = "" if figure.unit == "x" else f" {figure.unit}"
    return f"{value_cell(figure.center, figure.unit).text}{unit}"


def _because(view: FleetView) -> Iterator[str]:
    """Versions that differ, then the spread from chip to chip."""
    result = view.result
    if result.differences:
        listed = [f"{row.name}: {units.names(row.values, MOST_NAMED)}" for row in result.differences]
        yield f"Differs between {view.kind}s: {'; '.join(listed[:MOST_NAMED])}" + (
            f"; {len(listed) - MOST_NAMED} more." if len(listed) > MOST_NAMED else "."
        )
    elif len(result.measured) > 1:
        yield f"Driver and library versions are the same on all {view.kind}s."
    if view.slow and view.fast:
        yield f"Faster than the others: {_listed(view.fast)}."
    times = [figure for figure in _main_figures(view) if figure.unit == "ms"]
    spreads = [(figure.name, figure.spread.value) for figure in times if figure.spread is not None]
    if spreads:
        listed = [f"{name} {100 * spread:.1f}%" for name, spread in spreads[:MOST_FIGURES]]
        yield f"Chip-to-chip spread{f' ({next(iter(view.groups))})' if len(view.groups) > 1 else ''}: {', '.join(listed)}."


def _key_figures(view: FleetView) -> Iterator[KeyFigure]:
    """Medians with the spread from chip to chip, for the page."""
    for figure in _main_figures(view)[:MOST_FIGURES]:
        spread = f"chip to chip {100 * figure.spread.value:.1f}%" if figure.spread is not None else ""
        yield KeyFigure(figure.name, _center(figure), spread)


def _context(view: FleetView) -> Iterator[str]:
    result = view.result
    repeats = sorted({gpu.repeats for gpu in result.measured} or {1})
    times = " to ".join(map(str, repeats[:: max(len(repeats) - 1, 1)]))
    prefix = "each " if len(result.measured) > 1 else ""
    if result.measured:
        yield f"{_where(view)}, {prefix}measured " + ("once" if repeats == [1] else f"{times} times: the median counts")
    if len(view.groups) > 1:
        yield ", ".join(f"{count:,} x {kind}" for kind, count in view.groups.items())
    if result.model is not None and result.model.description:
        yield result.model.description
    yield from batch_lines(result.run, result.stage)


def _evidence(view: FleetView) -> Iterator[Message]:
    """What else differs at the worst outliers; the table lists it for all."""
    for outlier in [*view.slow, *view.fast][:MOST_NAMED]:
        if outlier.evidence:
            text = " ".join(fact.text for fact in outlier.evidence)
            yield Message.of(finding("fleet-evidence", where=outlier.where, evidence=text.removesuffix(".")))


def _health(view: FleetView) -> Iterator[Message]:
    """Problems that the drivers report, of slow GPUs and of all others."""
    places: dict[tuple[str, str], list[str]] = {}
    for gpu in view.result.measured:
        for problem in health_problems(view.result.health_of(gpu), under_load=True):
            places.setdefault((problem.text, problem.remedy), []).append(gpu.place)
    for (text, remedy), own in places.items():
        yield Message.of(finding("fleet-health-problem", places=own, problem=text, remedy=remedy))


def _not_measured(result: FleetResult) -> list[Message]:
    """GPUs without a measurement, and the reasons, the most frequent first."""
    failed = [gpu for gpu in result.gpus if gpu.failure]
    if not failed:
        return []
    reasons: dict[str, list[str]] = {}
    for gpu in failed:
        reasons.setdefault(gpu.failure, []).append(gpu.place)
    ordered = sorted(reasons.items(), key=lambda reason: -len(reason[1]))[:MOST_NAMED]
    listed = [f"{units.names(places, 3)}: {reason}" for reason, places in ordered]
    return [Message.of(finding("fleet-not-measured", gpus=len(failed), reasons="; ".join(listed)))]


def _sections(view: FleetView) -> Iterator[Section]:
    ranked = list(rank_charts(view))
    plane = heat_map(view)
    named: list[tuple[str, Sequence[Block | None]]] = [
        ("Versions", (difference_table(view),)),
        ("Outliers", (outlier_table(view),)),
        (f"Speed of every {view.kind}", ranked),
        ("Metrics", (figure_table(view),)),
        ("Nodes", (plane, node_table(view))),
        (f"{view.kind}s", (gpu_table(view), health_table(view))),
    ]
    for title, blocks in named:
        if shown := tuple(block for block in blocks if block is not None):
            yield Section(title, shown)


def _method(view: FleetView) -> Facts:
    result, rule, kind = view.result, view.result.rule, view.kind
    called = (
        f"further from the median than chance allows in any metric; at most {100 * rule.false_alarms:.2g}% of fleets of normally "
        f"distributed chips have a false alarm, and differences below {units.percent(rule.tolerance)} are never reported"
    )
    lines = [
        *model_facts(result.model, result.run, result.stage),
        ("measured", f"the same {OF[result.of]} on every {kind}; both sides of every ratio on the same {kind}"),
        ("outliers", called),
        (f"minimum number of {kind}s", f"{rule.least_gpus} of one type; with fewer, none is reported as an outlier"),
        ("spread", "the standard deviation from chip to chip, without outliers, with the measurement noise removed"),
        *command_facts(result),
    ]
    return tuple((name, value) for name, value in lines if value)
