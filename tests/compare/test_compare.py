"""Run files held against each other. Two of the same thing differ in no row; a slowdown of 3% is found."""

from __future__ import annotations

import gzip
import json
import math
import re
from itertools import combinations, pairwise
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import pytest

from gemmscope.compare.rows import BETWEEN_RUNS, change, compare
from gemmscope.store.benchfile import BenchFile, IntervalRecord
from gemmscope.store.read import read_run
from test_cli import Run, run
from support.traces import DATA, recorded

__all__ = ["run"]  # the fixture

FIRST, AGAIN = DATA / "h200_bench_first.json.gz", DATA / "h200_bench_again.json.gz"


def raw(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def planted(path: Path, factor: float, only: tuple[str, str, str] | None = None) -> Path:
    """The second run, with rows slowed down."""
    found = raw(AGAIN)
    for row in [*found["rows"], *({**total, "op": ""} for total in found["totals"])]:
        if only is None or (row["op"], row["recipe"], row["mode"]) == only:
            for end in ("value", "low", "high"):
                row["total_ms"][end] *= factor
    path.write_text(json.dumps(found))
    return path


@pytest.mark.parametrize("names", list(combinations(("first", "again", "third", "fourth"), 2)), ids=" ".join)
def test_the_same_thing_twice_is_too_close_to_call(names: tuple[str, str]) -> None:
    """Four runs in a row on one H200."""
    found = compare([read_run(DATA / f"h200_bench_{name}.json.gz") for name in names], list(names))
    assert len(found.lines) == 35
    assert {line.changes[0].verdict for line in found.lines} == {"too close to call"}
    assert found.failing(0.0) == []


def test_what_the_document_says_of_runs_in_a_row() -> None:
    together, each = [], []
    runs = [read_run(DATA / f"h200_bench_{name}.json.gz") for name in ("first", "again", "third", "fourth")]
    for pair in pairwise(runs):
        ratios = [line.changes[0].ratio for line in compare(pair, ["a", "b"]).lines]
        together.append(abs(mean(ratios) - 1))
        each.append(pstdev(ratios))
    document = " ".join((Path(__file__).parent.parent.parent / "docs" / "compare.md").read_text().split())
    assert f"together by {100 * min(together):.1f} to {100 * max(together):.1f}% from each run to the next" in document
    assert f"and each by {100 * min(each):.1f} to {100 * max(each):.1f}% about that" in document


@pytest.mark.parametrize("recipe", ["BF16", "FP8Current", "FP8Delayed", "FP8Block"])
def test_a_slowdown_of_one_row_is_found(recipe: str, tmp_path: Path) -> None:
    slow = planted(tmp_path / "slow.json", 1.03, ("MLP Up", recipe, "autocast"))
    found = compare([read_run(FIRST), read_run(slow)], ["a", "b"])
    slower = [line.key for line in found.lines if line.changes[0].verdict == "slower"]
    assert [(key.what, key.recipe, key.mode) for key in slower] == [("MLP Up", recipe, "autocast")]
    assert len(found.failing(0.03)) == 1


def test_everything_slower_and_faster(tmp_path: Path) -> None:
    for factor, verdict in ((1.03, "slower"), (0.965, "faster")):
        found = compare([read_run(FIRST), read_run(planted(tmp_path / "x.json", factor))], ["a", "b"])
        assert [line.changes[0].verdict for line in found.lines].count(verdict) >= 30


def test_exit_codes(run: Run, tmp_path: Path) -> None:
    slow = planted(tmp_path / "slow.json", 1.03)
    assert run(f"compare {FIRST} {AGAIN} --fail-if-slower 3%").code == 0
    assert run(f"compare {FIRST} {slow}").code == 0
    outcome = run(f"compare {FIRST} {slow} --fail-if-slower 3% --markdown {tmp_path}/c.md --csv {tmp_path}/c.csv")
    assert outcome.code == 1
    assert "FAILED" in outcome.out
    assert "| MLP Up · FP8Current · autocast |" in (tmp_path / "c.md").read_text()
    assert (tmp_path / "c.csv").read_text().count("slower") >= 30
    assert run(f"compare {FIRST} {slow} --fail-if-slower 0.2").code == 0  # slower, but by less than 20% beyond doubt
    assert run(f"compare {FIRST} {slow} --fail-if-slower much").code == 2
    assert "for example 3% or 0.03" in run(f"compare {FIRST} {slow} --fail-if-slower 3").err  # a limit of 300% would let it pass


def test_another_precision_is_no_slowdown_of_the_code(run: Run) -> None:
    """A run that fell back is compared by its times, and the fallback is said beside them."""
    fell = DATA / "h200_bench_fallback.json.gz"
    fallback = re.compile(r"precision of FP8Current, autocast +- +FALLBACK")
    assert fallback.search(run(f"compare {FIRST} {fell}").out)
    assert "FALLBACK" not in run(f"compare {FIRST} {AGAIN}").out


def test_more_than_two_are_a_table_over_time(run: Run, tmp_path: Path) -> None:
    outcome = run(f"compare {FIRST} {AGAIN} {planted(tmp_path / 'slow.json', 1.05)}")
    assert outcome.code == 0
    assert "over time" in outcome.out
    assert "C: " in outcome.out


def test_environment_differences_stand_first(run: Run, tmp_path: Path) -> None:
    other = raw(AGAIN)
    other["environment"]["driver"] = "999.99"
    other["device"]["power_limit_w"] = 500.0
    (tmp_path / "other.json").write_text(json.dumps(other))
    outcome = run(f"compare {FIRST} {tmp_path}/other.json")
    assert outcome.out.index("999.99") < outcome.out.index("row by row")
    assert "power_limit_w" in outcome.out


def bad(tmp_path: Path) -> dict[str, tuple[str, str]]:
    def write(name: str, **changes: Any) -> str:
        path = tmp_path / name
        path.write_text(json.dumps({**raw(AGAIN), **changes}))
        return str(path)

    rows = [{**row, "tokens": row["tokens"] * 2} for row in raw(AGAIN)["rows"]]
    batch = {**raw(AGAIN)["run"], "micro_batch_size": 1}
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "cut.json.gz").write_bytes(AGAIN.read_bytes()[:-900])
    return {
        write("old.json", schema_version=0): ("schema version 0", "measure again"),
        write("new.json", schema_version=2): ("schema version 2", "update gemmscope"),
        write("kind.json", kind="shapes"): ("not a run file of bench or step", "--json"),
        write("sizes.json", rows=rows): ("not runs of the same thing", "measure"),
        write("batch.json", run=batch): ("micro_batch_size 31 and 1", "measure"),
        write("part.json", rows=[{"op": "a"}]): ("not a whole run file", "measure again"),
        str(tmp_path / "text.json"): ("not valid JSON", "run file"),
        str(tmp_path / "list.json"): ("not a run file", "--json"),
        str(tmp_path / "cut.json.gz"): ("", ""),
        str(tmp_path / "none.json"): ("cannot be read", "run file"),
        str(recorded("healthy_te_bf16")): ("is a profiler trace", "gemmscope explain"),
    }


def test_bad_input_is_one_message(run: Run, tmp_path: Path) -> None:
    for path, (words, hint) in bad(tmp_path).items():
        outcome = run(f"compare {FIRST} {path}")
        assert outcome.code == 2, path
        assert words in outcome.err
        assert hint in outcome.err
        assert "Traceback" not in outcome.err
    assert "nothing to be compared with" in run(f"compare {FIRST}").err


def test_a_change_needs_both_sides_and_intervals() -> None:
    one = IntervalRecord(value=1.0, low=None, high=None)
    assert change(one, one, 2.0).verdict == "too close to call"
    exact = IntervalRecord(value=1.0, low=1.0, high=1.0)
    within, beyond = (IntervalRecord(value=v, low=v, high=v) for v in (1 + 2 * BETWEEN_RUNS, 1 + 3 * BETWEEN_RUNS))
    assert change(exact, within, 2.0).verdict == "too close to call"
    assert change(exact, beyond, 2.0).verdict == "slower"
    assert math.isnan(change(None, exact, 2.0).ratio)


def test_rows_that_only_one_run_has(tmp_path: Path) -> None:
    fewer = raw(AGAIN)
    fewer["rows"] = [row for row in fewer["rows"] if row["recipe"] != "FP8Block"]
    found = compare([read_run(FIRST), BenchFile.model_validate(fewer)], ["a", "b"])
    assert sum(line.changes[0].verdict == "missing" for line in found.lines) == 8


def test_nothing_in_common_does_not_pass(run: Run, tmp_path: Path) -> None:
    """Other recipes, or times that are no numbers: a check that compared nothing must not say that all is well."""
    other, broken = raw(AGAIN), raw(AGAIN)
    for row in [*other["rows"], *other["totals"]]:
        row["recipe"] = f"My{row['recipe']}"
    for row in [*broken["rows"], *broken["totals"]]:
        row["total_ms"]["value"] = math.nan
    for number, found in enumerate((other, broken)):
        (tmp_path / f"{number}.json").write_text(json.dumps(found))
        outcome = run(f"compare {FIRST} {tmp_path}/{number}.json --fail-if-slower 3%")
        assert outcome.code == 2
        assert "no row was measured in" in outcome.err
        outcome = run(f"compare {FIRST} {AGAIN} {tmp_path}/{number}.json --fail-if-slower 3%")
        assert outcome.code == 2  # the last run decides, and a comparison with the one before does not stand in for it
        assert f"and in {tmp_path}/{number}.json: recipes" in outcome.err


def test_clocks_and_names_that_make_no_sense(run: Run, tmp_path: Path) -> None:
    found = raw(AGAIN)
    found["device"]["name"] = "\ud800"
    for task in found["tasks"]:
        for state in task["states"]:
            state["sm_mhz"] = "fast"
    (tmp_path / "odd.json").write_text(json.dumps(found))
    outcome = run(f"compare {FIRST} {tmp_path}/odd.json --markdown {tmp_path}/c.md --csv {tmp_path}/c.csv")
    assert outcome.code == 0, outcome.err
