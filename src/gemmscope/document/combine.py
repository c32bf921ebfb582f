"""Several documents on one page: their labels, their times over one common baseline, their own speedups, and whether they
belong together."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf

from gemmscope import units
from gemmscope.document.common import phrase
from gemmscope.document.model import Document, Message, NamedSpeedup, NamedTime
from gemmscope.document.table import BASELINE_CELL, Column, Table, across, grouped, table
from gemmscope.errors import UserError
from gemmscope.findings import finding
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.linears import independent_ratio

MOST_RUNS = 8  # that a page can show side by side
SpeedupRow = tuple[str, str, dict[str, Interval]]
"""What was measured, the recipe, and its speedup in every run."""
ORDER = ("training step", "linears")  # of the rows; everything else follows


def label(documents: Sequence[Document], document: Document) -> str:
    """The label of a run among several: its letter and where it ran. Empty if there is only one run."""
    return f"{letter(documents, document)} · {document.where}" if len(documents) > 1 else ""


def letter(documents: Sequence[Document], document: Document) -> str:
    """The letter of a run among several: A, B, …"""
    return chr(ord("A") + next(place for place, other in enumerate(documents) if other is document))


def sources(documents: Sequence[Document]) -> dict[str, str]:
    """Every GPU of every run that has speedups or times: its key → its label. A forecast of several GPUs has several."""
    labels: dict[str, str] = {}
    for document in documents:
        named: list[NamedTime | NamedSpeedup] = [*document.times, *document.speedups]
        for value in named:
            key = _key(documents, document, value)
            labels.setdefault(key, f"{key} ({document.name})" if document.name and len(documents) > 1 else key)
    return labels


def _key(documents: Sequence[Document], document: Document, value: NamedSpeedup | NamedTime) -> str:
    """The letter of the run, followed by the GPU if the run has several. If there is only one run, the GPU alone."""
    own = letter(documents, document)
    return value.where if len(documents) == 1 else own if value.where == document.where else f"{own} · {value.where}"


def speedup_rows(documents: Sequence[Document]) -> list[SpeedupRow]:
    """What was measured, the recipe, and its speedup in every run: the step first, then linears, then GEMMs."""
    speedups = grouped(
        ((speedup.what, speedup.recipe), (_key(documents, document, speedup), speedup.speedup))
        for document in documents
        for speedup in document.speedups
    )
    return sorted([(what, recipe, dict(by_run)) for (what, recipe), by_run in speedups.items()], key=lambda row: _place(row[0]))


def _place(what: str) -> int:
    return next((place for place, word in enumerate(ORDER) if word in what), len(ORDER))


def own_baseline(documents: Sequence[Document]) -> str:
    """The title of speedups over the BF16 of their own GPU; a forecast has no run."""
    return phrase("over-own-baseline" if any(document.forecast for document in documents) else "over-baseline-of-run")


def side_by_side_table(documents: Sequence[Document]) -> Table:
    """Every speedup over the BF16 of its own GPU and run, a column per run. Such speedups do not compare the runs themselves."""
    return table(
        "side_by_side",
        own_baseline(documents),
        speedup_rows(documents),
        Column("What", lambda row: row[0]),
        Column("Recipe", lambda row: row[1]),
        *across(sources(documents), lambda row, key: row[2].get(key), "x"),
        note=phrase("runs-own-baseline"),
    )


@dataclass(frozen=True)
class ComparedTime:
    """The time of one recipe in one run, and its speedup over the common baseline."""

    run: str  # its letter, and the GPU
    recipe: str
    time_ms: Interval
    tokens_per_s: float | None
    over: Interval
    is_baseline: bool = False


@dataclass(frozen=True)
class CommonBaseline:
    """Times of several GPUs or runs, all compared with the BF16 of one of them."""

    what: str
    baseline: str  # the run whose BF16 it is, as `run` of its times
    times: tuple[ComparedTime, ...]
    unit: str = "tokens"  # of rates

    @property
    def title(self) -> str:
        unit = f"{self.unit}/s per GPU and speedup" if self.has_rates else "speedup"
        return f"{self.what[0].upper()}{self.what[1:]}: {unit} over {BASELINE} on {self.baseline}"

    @property
    def has_rates(self) -> bool:
        return all(time.tokens_per_s is not None for time in self.times)

    def table(self) -> Table:
        """A row for each run and recipe."""
        return table(
            "common_baseline",
            self.title,
            self.times,
            Column("GPU", lambda time: time.run),
            Column("Recipe", lambda time: time.recipe),
            Column("ms", lambda time: time.time_ms, "ms"),
            Column(f"{self.unit.capitalize()}/s per GPU", lambda time: time.tokens_per_s, ",.0f", when=self.has_rates),
            Column(
                f"Speedup over {BASELINE} on {self.baseline}",
                lambda time: BASELINE_CELL if time.is_baseline else time.over,
                "x",
            ),
        )


def common_baselines(documents: Sequence[Document]) -> list[CommonBaseline]:
    """Times that at least two GPUs or runs have, over the BF16 time of the first of them; the step first.

    Steps are compared by tokens/s. Linears are timed for one micro-batch, so only runs with the same batch are compared.
    """
    times_of = grouped(
        (time.what, (_key(documents, document, time), time, document))
        for document in documents
        for time in document.times
        if 0 < time.time_ms.value < inf
    )
    compared = []
    for what in sorted(times_of, key=_place):
        first = next(((key, time, document) for key, time, document in times_of[what] if time.recipe == BASELINE), None)
        if first is None:
            continue
        rated = bool(first[1].tokens_per_s)
        kept = [entry for entry in times_of[what] if rated or entry[2].subject.batch == first[2].subject.batch]
        if len({key for key, _, _ in kept}) > 1:
            times = tuple(
                ComparedTime(
                    _named(key, time),
                    time.recipe,
                    time.time_ms,
                    time.tokens_per_s,
                    _over(first, (key, time, document)),
                    time is first[1],
                )
                for key, time, document in kept
                if bool(time.tokens_per_s) is rated and time.unit == first[1].unit
            )
            compared.append(CommonBaseline(what, _named(first[0], first[1]), times, first[1].unit))
    return compared


def _named(key: str, time: NamedTime) -> str:
    """The run with its GPU."""
    return key if time.where in key else f"{key} · {time.where}"


def _over(first: tuple[str, NamedTime, Document], other: tuple[str, NamedTime, Document]) -> Interval:
    """The speedup over the common baseline: the run's own speedup if it has one, else the ratio of two independent times."""
    (key, baseline, _), (other_key, time, document) = first, other
    if key == other_key:
        if time.recipe == BASELINE:
            return Interval(1.0, 1.0, 1.0)
        for speedup in document.speedups:
            if (speedup.where, speedup.what, speedup.recipe) == (time.where, time.what, time.recipe):
                return speedup.speedup
    rates = [baseline.tokens_per_s, time.tokens_per_s]
    value = rates[1] / rates[0] if rates[0] and rates[1] else baseline.time_ms.value / time.time_ms.value
    return independent_ratio(value, baseline.time_ms, time.time_ms)


def check_together(documents: Sequence[Document]) -> list[Message]:
    """Raise a `UserError` if the runs do not belong on one page. Return a message if their batches differ, or if a trace stands
    beside a model.

    Different batches may be compared on purpose, but the reader must know. A trace does not name its model.
    """
    if len(documents) > MOST_RUNS:
        raise UserError(f"{len(documents)} runs are too many for one page", f"give at most {MOST_RUNS}")
    for first, second in combinations(documents, 2):
        _must_belong_together(first, second)
    batches = {document.name: document.subject.batch for document in documents if document.subject.batch}
    differing = [
        name for name in next(iter(batches.values()), {}) if len({str(batch.get(name)) for batch in batches.values()}) > 1
    ]
    runs = "; ".join(f"{name}: " + ", ".join(f"{key} {batch[key]}" for key in differing) for name, batch in batches.items())
    traces = [document.name for document in documents if document.kind == "explain"]
    named = [document.name for document in documents if document.subject.model]
    messages = [Message.of(finding("runs-differ", runs=runs))] if differing else []
    if traces and named:
        messages.append(Message.of(finding("trace-of-any-model", traces=units.listed(traces), runs=units.listed(named))))
    return messages


def _must_belong_together(first: Document, second: Document) -> None:
    one, other = first.subject, second.subject
    if one.bare != other.bare and not {"explain", "compare"} & {first.kind, second.kind}:
        model, bare = (second, first) if one.bare else (first, second)
        raise _apart(f"{model.name} is for a model, {bare.name} for bare GEMMs")
    differing = [
        f"{name} {one.model[name]} and {other.model[name]}"
        for name in one.model
        if name in other.model and one.model[name] != other.model[name]
    ]
    if not differing and one.batch.get("tp") == other.batch.get("tp") and one.batch.get("ep") == other.batch.get("ep"):
        differing = [
            f"{op} of {size[0]}x{size[1]} and {other.sizes[op][0]}x{other.sizes[op][1]}"
            for op, size in one.sizes.items()
            if op in other.sizes and other.sizes[op] != size
        ]
    if differing:
        raise _apart(f"{first.name} and {second.name} are for different models: {', '.join(differing[:3])}")


def _apart(why: str) -> UserError:
    return UserError(f"these runs do not belong on one page: {why}", "run gemmscope report for each of them")
