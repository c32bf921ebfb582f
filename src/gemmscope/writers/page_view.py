"""How the parts of a Document are arranged on a page: what is on the first screen, and what follows for each GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from gemmscope.document.charts import Chart, HeatMap
from gemmscope.document.combine import CommonBaseline, ComparedTime, common_baselines, label, letter
from gemmscope.document.model import Block, Document, Message, Section
from gemmscope.document.palette import recipe_key, shapes
from gemmscope.document.table import Table, grouped
from gemmscope.recipe.recipes import BASELINE
from gemmscope.units import ratio, rounded, slug, speedup
from gemmscope.writers.chart_data import ChartData

LARGEST_BESIDE = 14  # rows of a table that fits beside the answer
MOST_COLUMNS = 6  # of a narrow table
MOST_BELOW = 5  # columns of the table below the answer


@dataclass(frozen=True)
class Group:
    """The sections about one of several GPUs, with its messages; sections about the whole result have no GPU."""

    gpu: str
    sections: tuple[Section, ...]
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class View:
    """A Document in the order of the page."""

    document: Document
    label: str
    prefix: str  # of ids
    beside: Block | None  # shown beside the answer; None: the rates of several GPUs, if there are any
    several_gpus: bool
    below: Table | None  # the short table, where it has room below the answer
    summary: Table | None  # else it follows the first screen
    messages: tuple[Message, ...]
    groups: tuple[Group, ...]

    def anchor(self, title: str) -> str:
        """The id of a section; with several runs, it contains the run's letter."""
        return slug(f"{self.prefix} {title}")


def views(documents: Sequence[Document]) -> list[View]:
    """The documents as the page arranges them."""
    return [_view(documents, document) for document in documents]


def _view(documents: Sequence[Document], document: Document) -> View:
    several = bool(common_baselines([document]))
    beside = None if several else _beside(document)
    below = None if document.advice or document.cards else _below(document, beside)
    sections = [
        replace(section, blocks=tuple(block for block in section.blocks if block is not beside and block != below))
        for section in document.sections
    ]
    groups = [
        (gpu, tuple(group))
        for gpu, group in groupby([section for section in sections if section.blocks], key=lambda section: section.gpu)
    ]
    gpus = {gpu for gpu, _ in groups if gpu}
    caused = bool(document.cards)  # cards say more than the messages of the same causes
    messages = [message for message in document.messages if not (caused and message.code.startswith("cause-"))]
    return View(
        document=document,
        label=label(documents, document),
        prefix=letter(documents, document) if len(documents) > 1 else "",
        beside=beside,
        several_gpus=several,
        below=below,
        summary=None if below or document.cards or not document.charts() else document.summary,
        messages=tuple(message for message in messages if message.gpu not in gpus),
        groups=tuple(
            Group(gpu, own, tuple(message for message in messages if gpu and message.gpu == gpu)) for gpu, own in groups
        ),
    )


def _fits(table: Table | None) -> bool:
    return table is not None and len(table.rows) <= LARGEST_BESIDE


def _below(document: Document, beside: Block | None) -> Table | None:
    """The table below the answer: the summary, or the table after a heat map, which shows the same. None without charts."""
    table = document.summary if document.charts() else None
    if isinstance(beside, HeatMap):
        blocks = [block for section in document.sections for block in section.blocks]
        table = next((block for block in blocks[blocks.index(beside) :] if isinstance(block, Table)), None)
    return _narrow(table) if table is not None and _fits(table) else None


def _narrow(table: Table) -> Table:
    """The table without some optional columns, if there are many; the tables below have them."""
    kept = sorted(sorted(range(len(table.columns)), key=lambda place: table.columns[place].drop)[:MOST_BELOW])
    kept = kept if any(column.drop for column in table.columns) else list(range(len(table.columns)))
    return table.only(kept)


def is_small(open_blocks: Sequence[Block]) -> bool:
    """Whether a section shows one narrow table, so that another such section may stand beside it."""
    return len(open_blocks) == 1 and isinstance(open_blocks[0], Table) and len(open_blocks[0].columns) <= MOST_COLUMNS


def without(title: str, gpu: str) -> str:
    """A title without the name of its GPU, for a section below that name.

    >>> without("b300: Training step", "b300")
    'Training step'
    """
    return title.removeprefix(f"{gpu}: ")


def _beside(document: Document) -> Chart | Table | None:
    """The main chart, else a table that is not long."""
    charts = document.charts()
    chart = next((chart for chart in charts if chart.main), charts[0] if charts else None)
    tables = [block for section in document.sections for block in section.blocks if isinstance(block, Table)]
    return chart or next((table for table in tables if _fits(table)), None)


def rates_data(common: CommonBaseline) -> ChartData:
    """A bar for each GPU or run and recipe: tokens/s, or the speedup where only times are known; all over one baseline."""

    def bar(time: ComparedTime, place: int) -> ChartData:
        rate = time.tokens_per_s if common.has_rates else time.over.value
        plain = rounded(time.tokens_per_s or 0.0, time.time_ms.half_width)
        scaled = time.over.times((rate or 0.0) / time.over.value)
        return {
            "recipe": time.recipe,
            "color": recipe_key(time.recipe, place),
            "value": rate,
            "low": scaled.low,
            "high": scaled.high,
            "text": (f"{plain} · " if common.has_rates else "") + ratio(time.over),
            "facts": [
                *([[f"{common.unit}/s per GPU", plain]] if time.tokens_per_s is not None else []),
                [f"speedup over {BASELINE} on {common.baseline}", speedup(time.over)],
                ["time", f"{time.time_ms.value:,.2f} ms"],
            ],
        }

    groups = grouped((time.run, bar(time, place)) for place, time in enumerate(common.times))
    first = next(time for time in common.times if time.is_baseline)
    keys = [bar["color"] for bars in groups.values() for bar in bars]
    return {
        "type": "rates",
        "unit": f"{common.unit}/s per GPU" if common.has_rates else f"speedup over {BASELINE} on {common.baseline}",
        "baseline": f"{BASELINE} on {common.baseline}",
        "at": first.tokens_per_s if common.has_rates else 1.0,
        "groups": [{"name": name, "bars": bars} for name, bars in groups.items()],
        "shapes": shapes(keys),
    }
