"""Several documents on one page: their labels, their speedups side by side, and whether they belong together."""

from collections.abc import Mapping, Sequence
from itertools import combinations

from gemmscope.document.model import Document, Message, NamedSpeedup
from gemmscope.document.table import NOTHING, Cell, Column, Table, speedup_cell
from gemmscope.errors import UserError
from gemmscope.findings import finding
from gemmscope.interval import Interval

MOST_RUNS = 8  # that a page can show side by side
ORDER = ("training step", "linears")  # of what stands side by side; the rest follows


def label(documents: Sequence[Document], document: Document) -> str:
    """How a run is called beside others: a letter, and where it ran; nothing if it is alone."""
    return f"{letter(documents, document)} · {document.where}" if len(documents) > 1 else ""


def letter(documents: Sequence[Document], document: Document) -> str:
    """The letter of a run among several: A, B, …"""
    return chr(ord("A") + next(place for place, other in enumerate(documents) if other is document))


def sources(documents: Sequence[Document]) -> dict[str, str]:
    """Every GPU of every run that has speedups: its key → its label. A forecast of several GPUs has several."""
    found: dict[str, str] = {}
    for document in documents:
        for each in document.speedups:
            key = _key(documents, document, each)
            found.setdefault(key, f"{key} ({document.name})" if document.name else key)
    return found


def _key(documents: Sequence[Document], document: Document, each: NamedSpeedup) -> str:
    own = letter(documents, document)
    return own if each.where == document.where else f"{own} · {each.where}"


def speedup_rows(documents: Sequence[Document]) -> list[tuple[str, str, dict[str, Interval]]]:
    """What, in which recipe, and the speedup of every run that has one: the step first, then linears, then GEMMs."""
    found: dict[tuple[str, str], dict[str, Interval]] = {}
    for document in documents:
        for each in document.speedups:
            found.setdefault((each.what, each.recipe), {})[_key(documents, document, each)] = each.speedup
    rows = [(what, recipe, by_run) for (what, recipe), by_run in found.items()]
    return sorted(rows, key=lambda row: next((place for place, word in enumerate(ORDER) if word in row[0]), len(ORDER)))


def side_by_side_table(documents: Sequence[Document]) -> Table:
    """Every speedup, a column per run; for two runs, how far they are apart."""
    keys = list(sources(documents))
    rows = []
    for what, recipe, by_run in speedup_rows(documents):
        cells = [speedup_cell(by_run.get(key)) for key in keys]
        rows.append((Cell(what), Cell(recipe), *cells, *([_difference(by_run, keys)] if len(keys) == 2 else [])))
    heads = [Column("What", numeric=False), Column("Recipe", numeric=False), *map(Column, keys)]
    heads += [Column(f"{keys[1]} vs {keys[0]}")] if len(keys) == 2 else []
    return Table("Speedup over BF16", tuple(heads), tuple(rows))


def _difference(by_run: Mapping[str, Interval], keys: Sequence[str]) -> Cell:
    """The second against the first, and whether their intervals overlap."""
    first, second = (by_run.get(key) for key in keys)
    if first is None or second is None:
        return NOTHING
    ratio = second.value / first.value - 1
    return Cell(f"{ratio:+.1%}" + (", intervals overlap" if first.overlaps(second) else ""), ratio)


def check_together(documents: Sequence[Document]) -> list[Message]:
    """A `UserError` if the runs do not belong on one page; else what the reader must know of their differences.

    Other batches may be compared on purpose; the reader must know.
    """
    if len(documents) > MOST_RUNS:
        raise UserError(f"{len(documents)} runs are too many for one page", f"give at most {MOST_RUNS}")
    for first, second in combinations(documents, 2):
        _must_belong_together(first, second)
    batches = {document.name: document.subject.batch for document in documents if document.subject.batch}
    first_batch = next(iter(batches.values()), {})
    differing = [name for name in first_batch if len({str(batch.get(name)) for batch in batches.values()}) > 1]
    if not differing:
        return []
    runs = "; ".join(f"{name}: " + ", ".join(f"{key} {batch[key]}" for key in differing) for name, batch in batches.items())
    return [Message.of(finding("runs-differ", runs=runs))]


def _must_belong_together(first: Document, second: Document) -> None:
    one, other = first.subject, second.subject
    if one.bare != other.bare and not {"explain", "compare"} & {first.kind, second.kind}:
        model, bare = (second, first) if one.bare else (first, second)
        raise _apart(f"{model.name} is about a model, {bare.name} about bare GEMMs", model, bare)
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
        raise _apart(f"{first.name} and {second.name} are about different models: {', '.join(differing[:3])}", first, second)


def _apart(why: str, *documents: Document) -> UserError:
    commands = " and ".join(f"gemmscope report {document.name}" for document in documents)
    return UserError(f"these runs do not belong on one page: {why}", f"make a report of each: {commands}")
