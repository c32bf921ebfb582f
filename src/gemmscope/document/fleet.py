"""The Document of a `FleetResult`."""

from collections.abc import Iterator, Sequence

from gemmscope import units
from gemmscope.document.common import batch_lines, command_facts, described, facts, model_facts, phrase, sections, subject
from gemmscope.document.compare import differences_table
from gemmscope.document.fleet_tables import (
    FleetView,
    figure_table,
    gpu_table,
    health_table,
    heat_map,
    node_table,
    outlier_table,
    rank_charts,
    summary_table,
    value_text,
)
from gemmscope.document.model import Document, KeyFigure, Message
from gemmscope.document.table import Facts, grouped
from gemmscope.findings import finding
from gemmscope.gpu.health import health_problems
from gemmscope.results.fleet import FleetFigure, FleetResult, Outlier

MOST_NAMED = 4  # outliers, or reasons, in one sentence
NOISY = 0.2  # with a larger limit of outliers, the measurements are called noisy
MOST_FIGURES = 4  # beside the answer
OF = {"bench": "bench", "step": "training step"}


def fleet_document(result: FleetResult, name: str = "") -> Document:
    """Build the Document of the result."""
    view = FleetView(result)
    again = view.slow and max((gpu.repeats for gpu in result.gpus), default=1) == 1
    return Document(
        kind="fleet",
        title=f"{result.name}: {OF[result.of]} on every {view.kind}",
        subject=subject(result.model, result.run),
        where=_where(view),
        answer=_answer(view),
        because=tuple(_because(view)),
        key_figures=tuple(
            KeyFigure(
                figure.name,
                value_text(figure.center, figure),
                f"chip to chip {100 * figure.spread.value:.1f}%" if figure.spread is not None else "",
            )
            for figure in _main_figures(view)
        ),
        summary=summary_table(view),
        context=tuple(_context(view)),
        sections=sections(
            {
                "Versions": [differences_table("Versions and limits that differ", result.differences)],
                "Outliers": [outlier_table(view)],
                f"Speed of every {view.kind}": rank_charts(view),
                "Metrics": [figure_table(view)],
                "Nodes": [heat_map(view), node_table(view)],
                f"{view.kind}s": [gpu_table(view), health_table(view)],
            }
        ),
        messages=(*_evidence(view), *_not_measured(result), *_health(view), *map(Message.of, result.findings)),
        facts={"Method": _method(view)},
        next_purpose=phrase("fleet-again") if again else "",
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
    result, count, kind = view.result, len(view.result.measured), view.kind
    of = units.counted(count, kind)
    if not count or not result.figures:
        return phrase("nothing-measured")
    if count == 1:
        figures = ", ".join(f"{figure.name} {value_text(figure.center, figure)}" for figure in _main_figures(view))
        return phrase("fleet-one", kind=kind, figures=figures)
    if view.slow:
        return phrase("fleet-slow", which=_counted(view.slow, f" of {of}", f" of {len(view.nodes)}"), outliers=_listed(view.slow))
    limits = [figure.limit for figure in result.figures if figure.limit is not None]
    if not limits:
        return phrase("fleet-too-few", gpus=of, least=result.rule.least_gpus, slowest=_slowest(view))
    if max(limits) > NOISY:
        return phrase("fleet-noisy", gpus=of, kind=kind, limit=max(limits))
    tested = {figure.group for figure in result.figures if figure.limit is not None}
    compared = sum(gpu.group in tested for gpu in result.measured)
    none = phrase(
        "fleet-none-slow",
        which=f"{'the ' if compared == count else ''}{compared:,} {kind}s",
        others="the others" if len(view.groups) == 1 else "the others of its type",
        limit=max(limits),
        fast=phrase("fleet-fast", which=_counted(view.fast), outliers=_listed(view.fast)) if view.fast else "",
    )
    return none if compared == count else none + phrase("fleet-not-compared", gpus=units.counted(count - compared, kind))


def _counted(outliers: Sequence[Outlier], of_gpus: str = "", of_nodes: str = "") -> str:
    """How many GPUs and whole nodes these are, with the verb."""
    whole = sum(outlier.whole_node for outlier in outliers)
    single = len(outliers) - whole
    which = [f"{single}{of_gpus}"] if single else []
    which += [f"{units.counted(whole, 'whole node')}{of_nodes}"] if whole else []
    return f"{' and '.join(which)} {'is' if len(outliers) == 1 else 'are'}"


def _listed(outliers: Sequence[Outlier]) -> str:
    """The worst outliers by name, each with the metric in which it differs the most."""
    return units.names(
        [f"{outlier.where} by {100 * abs(outlier.ratio.value - 1):.1f}% ({outlier.figure})" for outlier in outliers], MOST_NAMED
    )


def _slowest(view: FleetView) -> str:
    gpu, worst = next(((gpu, worst) for gpu in view.ordered if (worst := view.worst(gpu)) is not None), (None, None))
    if gpu is None or worst is None or worst.ratio.value >= 1:
        return ""
    return phrase("fleet-slowest", place=gpu.place, slower=1 - worst.ratio.value, figure=worst.figure.name)


def _main_figures(view: FleetView) -> list[FleetFigure]:
    """The first metrics of the largest group of GPUs."""
    kind = next(iter(view.groups), "")
    return [figure for figure in view.result.figures if figure.group == kind][:MOST_FIGURES]


def _because(view: FleetView) -> Iterator[str]:
    """Versions that differ, then the spread from chip to chip."""
    result = view.result
    if result.differences:
        listed = [f"{row.name}: {units.names(row.values, MOST_NAMED)}" for row in result.differences]
        more = phrase("fleet-differs-more", count=len(listed) - MOST_NAMED) if len(listed) > MOST_NAMED else ""
        yield phrase("fleet-differs", kind=view.kind, listed="; ".join(listed[:MOST_NAMED]), more=more)
    elif len(result.measured) > 1:
        yield phrase("fleet-same-versions", kind=view.kind)
    if view.slow and view.fast:
        yield phrase("fleet-faster", outliers=_listed(view.fast))
    group = next(iter(view.groups), "")
    times = [figure for figure in result.figures if figure.group == group and figure.unit == "ms"]
    spreads = [f"{figure.name} {figure.spread.value:.1%}" for figure in times if figure.spread is not None]
    if spreads:
        yield phrase(
            "fleet-spread", group=f" ({group})" if len(view.groups) > 1 else "", spreads=", ".join(spreads[:MOST_FIGURES])
        )


def _context(view: FleetView) -> Iterator[str]:
    result = view.result
    repeats = sorted({gpu.repeats for gpu in result.measured} or {1})
    times = " to ".join(map(str, repeats[:: max(len(repeats) - 1, 1)]))
    if result.measured:
        often = phrase("fleet-once") if repeats == [1] else phrase("fleet-repeated", repeats=times)
        yield phrase("fleet-measured", gpus=_where(view), each="each " if len(result.measured) > 1 else "", times=often)
    if len(view.groups) > 1:
        yield ", ".join(f"{count:,} x {kind}" for kind, count in view.groups.items())
    yield from described(result.model)
    yield from batch_lines(result.run, result.stage)


def _evidence(view: FleetView) -> Iterator[Message]:
    """What else differs at the worst outliers; the table lists it for all."""
    for outlier in [*view.slow, *view.fast][:MOST_NAMED]:
        if outlier.evidence:
            text = " ".join(fact.text for fact in outlier.evidence)
            yield Message.of(finding("fleet-evidence", where=outlier.where, evidence=text.removesuffix(".")))


def _health(view: FleetView) -> Iterator[Message]:
    """Problems that the drivers report, of slow GPUs and of all others."""
    places = grouped(
        ((problem.text, problem.remedy), gpu.place)
        for gpu in view.result.measured
        for problem in health_problems(view.result.health_of(gpu), under_load=True)
    )
    for (text, remedy), own in places.items():
        yield Message.of(finding("fleet-health-problem", places=[*own], problem=text, remedy=remedy))


def _not_measured(result: FleetResult) -> list[Message]:
    """GPUs without a measurement, and the reasons, the most frequent first."""
    reasons = grouped((gpu.failure, gpu.place) for gpu in result.gpus if gpu.failure)
    if not reasons:
        return []
    listed = [
        f"{units.names(places, 3)}: {reason}"
        for reason, places in sorted(reasons.items(), key=lambda reason: -len(reason[1]))[:MOST_NAMED]
    ]
    return [Message.of(finding("fleet-not-measured", gpus=sum(map(len, reasons.values())), reasons="; ".join(listed)))]


def _method(view: FleetView) -> Facts:
    result, rule, kind = view.result, view.result.rule, view.kind
    return facts(
        *model_facts(result.model, result.run, result.stage),
        ("measured", phrase("fleet-method", what=OF[result.of], kind=kind)),
        ("outliers", phrase("fleet-method-outliers", alarms=100 * rule.false_alarms, tolerance=rule.tolerance)),
        (f"minimum number of {kind}s", phrase("fleet-method-least", least=rule.least_gpus)),
        ("spread", phrase("fleet-method-spread")),
        *command_facts(result),
    )
