"""The Document of a fleet: the answer first, every outlier in tables and charts, readable at any size."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.document import document
from gemmscope.document.charts import HeatMap, RankChart
from gemmscope.document.fleet_tables import MOST_POINTS, FleetView, rank_chart, thinned
from gemmscope.document.model import Document
from gemmscope.errors import UserError
from gemmscope.fleet.gather import fleet_result
from gemmscope.results.fleet import FleetResult, GpuCondition
from gemmscope.writers import html, terminal
from support.commands import compare
from support.fleet_files import runs, shown_fleet
from support.fleets import HEALTH, run_of, simulated_fleet
from support.run_files import recorded_bench


@cache
def fleet(count: int = 64, *slow: int) -> FleetResult:
    return shown_fleet(count, dict.fromkeys(slow, 0.1), failed=0)


def table(doc: Document, title: str) -> dict[str, tuple[str, ...]]:
    """A table's rows by their first cell."""
    [own] = [table for table in doc.tables() if title in table.title]
    return {row[0].text: tuple(cell.text for cell in row[1:]) for row in own.rows}


@pytest.mark.parametrize(
    ("count", "slow", "expected"),
    [
        (1, (), "There is no other GPU to compare it with"),
        (3, (), "too few to detect outliers"),
        (16, (), "None of the 16 GPUs is slower than the others by more than"),
        (64, (13,), "1 of 64 GPUs is slow: node0001 GPU 5 by"),
        (64, (13, 37), "2 of 64 GPUs are slow: "),
    ],
)
def test_the_answer_names_the_slow_gpus_or_the_limit(count: int, slow: tuple[int, ...], expected: str) -> None:
    assert expected in document(fleet(count, *slow)).answer


def test_many_outliers_are_counted_not_listed() -> None:
    answer = document(fleet(256, *range(0, 256, 20))).answer
    assert answer.startswith("13 of 256 GPUs are slow: ")
    assert answer.endswith("and 9 more.")


def test_a_fast_gpu_is_not_called_slow() -> None:
    doc = document(shown_fleet(64, {13: -0.1}, failed=0))
    assert "None of the 64 GPUs is slower" in doc.answer
    assert "1 is faster: node0001 GPU 5" in doc.answer


def test_gpus_that_cannot_be_compared_are_not_called_fine() -> None:
    answer = document(fleet_result([*runs(8, {}), run_of(8, {}, product="NVIDIA H100")])).answer
    assert answer.startswith("None of 8 GPUs is slower than the others of its type by more than")
    assert answer.endswith("Too few of their type to compare: 1 GPU.")


def test_a_fast_node_is_not_one_gpu() -> None:
    assert (
        "; 1 whole node is faster: node0001 by" in document(shown_fleet(64, dict.fromkeys(range(8, 16), -0.1), failed=0)).answer
    )


def test_the_slowest_of_few_gpus_is_one_that_was_measured() -> None:
    assert "The slowest, node0000 GPU 1, is 0.2% slower than the median" in document(shown_fleet(2, {}, failed=2)).answer


def test_a_whole_node_is_named_once() -> None:
    doc = document(fleet(128, *range(24, 32)))
    assert "whole node" in doc.answer
    assert doc.answer.count("node0003") == 1
    assert "node0003 (whole node)" in table(doc, "Outliers")


def test_other_versions_come_right_after_the_answer() -> None:
    doc = document(fleet())
    assert "driver" in doc.because[0]
    assert "node0003" in doc.because[0]
    assert "the same on all GPUs" in document(fleet(16)).because[0]


def test_what_else_differs_is_said_of_the_worst_and_in_the_table() -> None:
    doc = document(fleet(64, 13))
    [evidence] = [message.text for message in doc.messages if message.code == "fleet-evidence"]
    assert "HW thermal slowdown" in evidence
    assert "HW thermal slowdown" in " ".join(table(doc, "Outliers")["node0001 GPU 5"])


def test_gpus_that_were_not_measured_are_listed() -> None:
    doc = document(shown_fleet(16, {}, failed=2))
    [message] = [message for message in doc.messages if message.code == "fleet-not-measured"]
    assert message.level == "warning"
    assert "2 GPUs not measured" in message.text
    assert "in use" in " ".join(table(doc, "Every GPU")["node9000 GPU 7"])


def test_unhealthy_memory_is_reported_also_of_a_gpu_that_is_not_slow() -> None:
    sick = GpuCondition(health={**HEALTH, "remap_failed": 1})
    gpu_runs = [*runs(8, {})[:-1], run_of(7, {}, condition=sick)]
    messages = [message for message in document(fleet_result(gpu_runs)).messages if message.code == "fleet-health-problem"]
    assert [message.level for message in messages] == ["warning"]
    assert "node0000 GPU 7" in messages[0].text


def test_every_gpu_is_in_the_table_and_slow_ones_are_first() -> None:
    doc = document(fleet(64, 13, 37))
    places = list(table(doc, "Every GPU"))
    assert len(places) == 64
    assert set(places[:2]) == {"node0001 GPU 5", "node0004 GPU 5"}
    assert doc.summary is not None
    assert [row[0].text for row in doc.summary.rows] == places[: len(doc.summary.rows)]


def test_figures_have_center_spread_noise_and_limit() -> None:
    doc = document(fleet())
    [own] = [table for table in doc.tables() if table.title.startswith("Metrics")]
    names = [column.name for column in own.columns]
    row = dict(zip(names, own.rows[0], strict=True))
    figure = fleet().figures[0]
    assert row["Median"].value == figure.center.value
    assert row["Outlier limit"].value == figure.limit
    assert row["Chip-to-chip spread"].value == (figure.spread.value if figure.spread else None)


def test_many_gpus_that_were_not_measured_do_not_hide_the_others() -> None:
    shown = document(shown_fleet(32, {}, failed=32))
    assert shown.summary is not None
    verdicts = [row[1].text for row in shown.summary.rows]
    assert verdicts.count("not measured") == 2
    assert verdicts.count("-") == 4
    assert "58 more GPUs" in shown.summary.note


def test_fast_gpus_are_not_listed_as_the_slowest() -> None:
    view = FleetView(shown_fleet(64, {13: -0.1}, failed=0))
    assert view.ordered[-1].place == "node0001 GPU 5"


def test_a_single_gpu_is_not_called_each() -> None:
    assert document(shown_fleet(1, {}, failed=0)).context[0] == "1 GPU (NVIDIA H200), measured once"


def test_a_single_gpu_has_no_difference_from_the_median() -> None:
    doc = document(shown_fleet(1, {}, failed=0))
    assert doc.summary is not None
    assert [column.name for column in doc.summary.columns] == ["GPU", "MHz", "W", "°C", "Limited by"]
    assert doc.summary.note == ""
    assert not doc.charts()
    mixed = document(fleet_result([*runs(8, {}), run_of(8, {}, product="NVIDIA H100")]))
    assert table(mixed, "Every GPU")["node0001 GPU 0"][1:3] == ("-", "-")


def test_cpus_are_not_called_gpus() -> None:
    device = {"name": "CPU", "cpu": "EPYC"}
    for count in (1, 3, 8):
        cpus = [run_of(place, {}, device={**device, "node": f"node{place}"}, condition=GpuCondition()) for place in range(count)]
        doc = document(fleet_result(cpus))
        assert "GPU" not in terminal.text(doc, detail=True, width=200)


def test_a_slow_node_is_as_slow_as_the_times_of_its_gpus() -> None:
    """Half of the metrics are speedups, which do not change."""
    fleet = simulated_fleet(
        64, spread=0.001, noise=0.001, slow=dict.fromkeys(range(8), 0.06), modes=("autocast", "pre-quantized")
    )
    [own] = [table for table in document(fleet).tables() if table.title.startswith("Nodes")]
    speed = [column.name for column in own.columns].index("Speed, median of times")
    assert own.rows[0][speed].text == "-5.7%"


def test_the_map_of_a_large_fleet_says_which_nodes_it_shows() -> None:
    [plane] = [chart for chart in document(shown_fleet(400)).charts() if isinstance(chart, HeatMap)]
    assert plane.title == "Slowdown of GPUs: the slowest 32 of 51 nodes"


def test_the_map_has_nodes_and_gpus_with_outliers_beyond_the_line() -> None:
    doc = document(fleet(64, 13))
    [plane] = [chart for chart in doc.charts() if isinstance(chart, HeatMap)]
    assert plane.rows[-1] == "node0001"  # on top
    assert plane.table().rows[0][0].text == "node0001"
    uncertain = [(y, x) for y, row in enumerate(plane.cells) for x, cell in enumerate(row) if not cell.certain]
    assert uncertain == [(7, 5)]
    assert not [chart for chart in document(fleet(8)).charts() if isinstance(chart, HeatMap)]


def test_a_chart_of_many_gpus_is_thinned_and_keeps_every_outlier() -> None:
    slow = dict.fromkeys(range(0, 2000, 50), 0.1)
    view = FleetView(shown_fleet(2000, slow, failed=0))
    chart = rank_chart(view, view.result.figures[0], main=True)
    assert isinstance(chart, RankChart)
    assert len(chart.points) <= MOST_POINTS + len(slow)
    assert sum(bool(point.label) for point in chart.points) == len(view.slow) == len(slow)
    assert chart.count == 2000


@given(st.lists(st.booleans(), max_size=400), st.integers(10, 200), st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_thinning_keeps_what_is_called_and_both_ends(called: list[bool], most: int, ends: int) -> None:
    kept = thinned(called, most, ends)
    assert kept == sorted(set(kept))
    assert {place for place, is_called in enumerate(called) if is_called} <= set(kept)
    assert set(range(min(ends, len(called)))) <= set(kept)
    assert len(kept) <= most + sum(called) + 2


def test_a_large_fleet_stays_readable() -> None:
    doc = document(fleet(1500, 13))
    assert len(terminal.text(doc, detail=False, width=100).splitlines()) <= 30
    page = html.page([doc])
    assert len(page) < 5_000_000
    assert "The first 1,000 of 1,500 rows" in page


def test_kinds_of_gpus_are_told_apart() -> None:
    gpu_runs = [run_of(place, {}) for place in range(8)]
    gpu_runs += [run_of(place, {}, product="NVIDIA H100") for place in range(8, 16)]
    doc = document(fleet_result(gpu_runs))
    assert "8 x NVIDIA H200" in " ".join(doc.context)
    [own] = [table for table in doc.tables() if table.title.startswith("Metrics")]
    assert {row[1].text for row in own.rows} == {"NVIDIA H200", "NVIDIA H100"}


def test_two_fleets_are_compared_by_their_own_method() -> None:
    result = compare([shown_fleet(24, {5: 0.05}, failed=0), shown_fleet(24, failed=0)], fail_if_slower=0.03)
    doc = document(result)
    assert doc.title == "Comparison of 2 fleets"
    assert doc.answer.startswith("Failed --fail-if-slower 3%")
    assert doc.summary is not None
    assert "node0001 GPU 5" in doc.summary.rows[0][0].text
    assert "chip-to-chip differences cancel" in " ".join(value for _, value in doc.facts["Method"])
    same = compare([shown_fleet(24, failed=0)] * 2, fail_if_slower=0.03)
    assert not same.failing()
    assert document(same).answer.startswith("Passed --fail-if-slower 3%")


def test_a_fleet_is_not_compared_with_a_single_gpu() -> None:
    with pytest.raises(UserError, match="cannot be compared"):
        compare([shown_fleet(8, {}, failed=0), recorded_bench("first")])
