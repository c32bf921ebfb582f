"""The charts of a fleet: its GPUs in the order of their speed, and a heat map of nodes and GPUs."""

from collections.abc import Iterator, Sequence

from gemmscope import units
from gemmscope.document.charts import HeatCell, HeatMap, RankChart, Ranked
from gemmscope.document.fleet_tables import throttled_text, value_cell
from gemmscope.document.fleet_view import ON_CPU, FleetView, Standing, gpu_column
from gemmscope.document.table import Facts
from gemmscope.results.fleet import FleetFigure, FleetGpu

MOST_CHARTS = 3
MOST_POINTS = 300  # of one chart; outliers are always drawn
MOST_ENDS = 40  # points at either end that are always drawn
MOST_NODES = 32  # rows of the heat map
MOST_LABELED = 16  # columns of a heat map whose cells have room for text


def rank_charts(view: FleetView) -> Iterator[RankChart]:
    """The GPUs by their speed relative to the median: first the figure with the clearest outlier."""
    scores: dict[tuple[str, str], float] = {}
    for outlier in view.result.outliers:
        key = outlier.group, outlier.figure
        scores[key] = max(scores.get(key, 0.0), abs(outlier.score))
    tested = view.result.rule.figures
    shown = [figure for figure in view.result.figures if figure.gpus and (not tested or figure.name in tested)]
    shown.sort(key=lambda figure: (-scores.get((figure.group, figure.name), 0.0), figure.unit == "x"))
    for place, figure in enumerate(shown[:MOST_CHARTS]):
        if chart := rank_chart(view, figure, main=place == 0):
            yield chart


def rank_chart(view: FleetView, figure: FleetFigure, *, main: bool) -> RankChart | None:
    """All GPUs of one product in one figure, the slowest first."""
    standings = [
        (gpu, standing) for gpu in view.result.measured for standing in view.standings[gpu.place] if standing.figure is figure
    ]
    if not standings:
        return None
    standings.sort(key=lambda pair: pair[1].ratio.value)
    called = {gpu.place for gpu, _ in standings if _is_called(view, gpu, figure)}
    kept = thinned([gpu.place in called for gpu, _ in standings])
    points = tuple(
        Ranked(
            gpu.place,
            place + 1,
            standings[place][1].ratio,
            label=gpu.place if gpu.place in called else "",
            facts=_facts(gpu, standings[place][1]),
        )
        for place in kept
        for gpu in (standings[place][0],)
    )
    kind = f" ({figure.group})" if len(view.groups) > 1 else ""
    some = (
        f" {len(points):,} of {len(standings):,} {view.kind}s are shown, among them every outlier."
        if len(points) < len(standings)
        else ""
    )
    limit = (
        f"Outliers are more than {units.percent(figure.limit)} away from the median (dashed lines)."
        if figure.limit is not None
        else f"Too few {view.kind}s to detect outliers."
    )
    return RankChart(
        f"{figure.name}{'' if figure.unit == 'x' else ': speed'} relative to the median {view.kind}{kind}",
        axis=view.kind,
        points=points,
        count=len(standings),
        limit=figure.limit,
        note=limit + some,
        main=main,
    )


def _is_called(view: FleetView, gpu: FleetGpu, figure: FleetFigure) -> bool:
    return any(figure.name in (outlier.figure, *outlier.also) for outlier in view.outliers_of(gpu))


def thinned(called: Sequence[bool], most: int = MOST_POINTS, ends: int = MOST_ENDS) -> list[int]:
    """The indices of the points to draw: all that are called outliers, both ends, and evenly spaced others.

    >>> thinned([False] * 4), thinned([True, False, False, True, False, False], most=3, ends=1)
    ([0, 1, 2, 3], [0, 3, 5])
    """
    count = len(called)
    if count <= most:
        return list(range(count))
    step = -(-count // max(most - 2 * ends, 1))
    kept = {*range(ends), *range(count - ends, count), *range(0, count, step)}
    return sorted(kept | {place for place, is_called in enumerate(called) if is_called})


def _facts(gpu: FleetGpu, standing: Standing) -> Facts:
    value, condition = gpu.figures[standing.figure.name], gpu.condition
    unit = "" if standing.figure.unit == "x" else f" {standing.figure.unit}"
    lines = [
        ("difference from the median", units.difference(standing.ratio.value)),
        (standing.figure.name, f"{value_cell(value, standing.figure.unit).text}{unit}"),
        ("SM clock", f"{condition.sm_mhz:.0f} MHz" if condition.sm_mhz is not None else ""),
        ("power", f"{condition.power_w:.0f} W" if condition.power_w is not None else ""),
        ("temperature", f"{condition.temperature_c:.0f} °C" if condition.temperature_c is not None else ""),
        ("limited by", throttled_text(gpu).strip("-")),
    ]
    return tuple((name, text) for name, text in lines if text)


def heat_map(view: FleetView) -> HeatMap | None:
    """How much slower than the median each GPU is, in the metric where it is slowest: nodes with the slowest GPUs on top."""
    places = {gpu.place: place for place, gpu in enumerate(view.ordered)}
    across = sorted({gpu_column(gpu) for gpu in view.result.gpus}, key=lambda name: (name == ON_CPU, len(name), name))
    if len(view.nodes) < 2 or len(across) < 2:
        return None
    nodes = sorted(view.nodes, key=lambda node: min(places[gpu.place] for gpu in view.nodes[node]))
    shown = nodes[:MOST_NODES][::-1]  # the last row is on top
    cells = []
    for node in shown:
        by_column = {gpu_column(gpu): gpu for gpu in view.nodes[node]}
        cells.append(tuple(_heat_cell(view, by_column.get(name), len(across)) for name in across))
    left = len(nodes) - len(shown)
    more = f" {units.counted(left, 'more node')} not shown." if left else ""
    return HeatMap(
        f"Slowdown of GPUs: the slowest {len(shown)} of {len(nodes):,} nodes" if left else "Slowdown of every GPU, by node",
        row_name="node",
        column_name="GPU",
        rows=tuple(shown),
        columns=tuple(across),
        cells=tuple(cells),
        note=f"How much slower than the median GPU, in the metric in which the GPU is slowest.{more}",
        main=True,
        measure="slowdown relative to the median",
        unit="%",
        line="outlier",
        line_meaning="slower than chance allows",
        blank="not measured, or no GPU",
        top_first=True,
    )


def _heat_cell(view: FleetView, gpu: FleetGpu | None, across: int) -> HeatCell:
    if gpu is None:
        return HeatCell(certain=True, text="")
    worst = view.worst(gpu)
    if gpu.failure or worst is None:
        return HeatCell(certain=True, text="not measured" if gpu.failure else "")
    slower = max(1 - worst.ratio.value, 0.0)
    text = f"{100 * slower:.1f}%"
    return HeatCell(text if across <= MOST_LABELED else "", slower, not view.is_slow(gpu), f"{text} ({worst.figure.name})")
