"""Runs compared with each other. Two runs of the same thing differ in no row, and a slowdown of 3% is detected."""

from __future__ import annotations

import gzip
import json
from itertools import combinations, pairwise
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import pytest

from gemmscope.compare.runs import BETWEEN_RUNS, change
from gemmscope.errors import UserError
from gemmscope.interval import Interval
from gemmscope.results.compare import CompareResult
from gemmscope.results.read import read_result
from support.command import Run, run
from support.commands import compare
from support.traces import DATA, fact, recorded

__all__ = ["run"]  # the fixture

FIRST, AGAIN = DATA / "h200_bench_first.json.gz", DATA / "h200_bench_again.json.gz"
FOUR = [DATA / f"h200_bench_{name}.json.gz" for name in ("first", "again", "third", "fourth")]


def raw(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return data


def times(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [*data["linears"]["ops"], *data["linears"]["totals"]]


def slowed(path: Path, factor: float, only: tuple[str, str, str] | None = None) -> Path:
    """The second run, with rows slowed down."""
    data = raw(AGAIN)
    for row in times(data):
        if only is None or (row.get("op"), row["recipe"], row["mode"]) == only:
            for end in ("value", "low", "high"):
                row["total_ms"][end] *= factor
    path.write_text(json.dumps(data))
    return path


def verdicts(result: CompareResult) -> list[str]:
    return [row.changes[-1].verdict for row in result.rows]


@pytest.mark.parametrize("paths", list(combinations(FOUR, 2)), ids=lambda paths: " ".join(path.stem for path in paths))
def test_the_same_thing_twice_is_too_close_to_call(paths: tuple[Path, Path]) -> None:
    """Four runs in a row on one H200."""
    result = compare(paths, fail_if_slower=0.0)
    assert len(result.rows) == 35
    assert set(verdicts(result)) == {"too close to call"}
    assert result.failing() == []
    assert result.has("compare-equal")


def test_what_the_documentation_says_of_runs_in_a_row() -> None:
    all_rows, single_rows = [], []
    for pair in pairwise(FOUR):
        ratios = [row.changes[0].ratio.value for row in compare(pair).rows if row.changes[0].ratio]
        all_rows.append(abs(mean(ratios) - 1))
        single_rows.append(pstdev(ratios))
    document = " ".join((Path(__file__).parent.parent.parent / "docs" / "compare.md").read_text().split())
    assert f"together by {100 * min(all_rows):.1f} to {100 * max(all_rows):.1f}% from each run to the next" in document
    assert f"and each row by another {100 * min(single_rows):.1f} to {100 * max(single_rows):.1f}%" in document


@pytest.mark.parametrize("recipe", ["BF16", "FP8Current", "FP8Delayed", "FP8Block"])
def test_a_slowdown_of_one_row_is_found(recipe: str, tmp_path: Path) -> None:
    slow = slowed(tmp_path / "slow.json", 1.03, ("MLP Up", recipe, "autocast"))
    result = compare([FIRST, slow], fail_if_slower=0.03)
    slower = [row for row in result.rows if row.changes[0].verdict == "slower"]
    assert [(row.what, row.recipe, row.mode) for row in slower] == [("MLP Up", recipe, "autocast")]
    assert result.failing() == slower


def test_everything_slower_and_faster(tmp_path: Path) -> None:
    for factor, verdict in ((1.03, "slower"), (0.965, "faster")):
        result = compare([FIRST, slowed(tmp_path / "x.json", factor)])
        assert verdicts(result).count(verdict) >= 30
        assert fact(result.findings, "compare-changed", verdict) == verdicts(result).count(verdict)


def test_exit_codes(run: Run, tmp_path: Path) -> None:
    slow = slowed(tmp_path / "slow.json", 1.03)
    assert run(f"compare {FIRST} {AGAIN} --fail-if-slower 3%").code == 0
    assert run(f"compare {FIRST} {slow}").code == 0
    places = " ".join(f"--{form} {tmp_path}/c.{form}" for form in ("markdown", "csv", "json"))
    outcome = run(f"compare {FIRST} {slow} --fail-if-slower 3% {places}")
    assert outcome.code == 1
    result = read_result(tmp_path / "c.json")
    assert isinstance(result, CompareResult)
    assert result.has("compare-too-slow")
    assert result.limit == pytest.approx(0.03)
    assert "\nFailed --fail-if-slower 3%" in outcome.out
    assert "| MLP Up · FP8Current · autocast |" in (tmp_path / "c.markdown").read_text()
    assert (tmp_path / "c.csv").read_text().count("slower") >= 30
    assert run(f"compare {FIRST} {slow} --fail-if-slower 0.2").code == 0  # slower, but by less than 20% beyond its interval
    assert run(f"compare {FIRST} {slow} --fail-if-slower much").code == 2
    assert "3%" in run(f"compare {FIRST} {slow} --fail-if-slower 3").err  # a limit of 300% would let it pass


def widened(path: Path, factor: float, source: Path = AGAIN, only: str = "") -> Path:
    """The second run with wider intervals: all of them, or those of one op."""
    data = raw(source) if source.suffix == ".gz" else json.loads(source.read_text())
    for row in times(data):
        if not only or row.get("op") == only:
            time = row["total_ms"]
            time["low"], time["high"] = (time["value"] + factor * (time[end] - time["value"]) for end in ("low", "high"))
    path.write_text(json.dumps(data))
    return path


def test_quiet_noisy_and_slow_runs(run: Run, tmp_path: Path) -> None:
    """Quiet runs pass with 0. Noisy ones that may hide 3% end with 4, certainly slower ones with 1, noisy or not."""
    noisy, one = widened(tmp_path / "noisy.json", 60), widened(tmp_path / "one.json", 60, only="MLP Up")
    assert run(f"compare {FIRST} {AGAIN} --fail-if-slower 3%").code == 0
    outcome = run(f"compare {FIRST} {noisy} --fail-if-slower 3% --json {tmp_path}/c.json")
    assert outcome.code == 4
    assert "\nToo noisy to check --fail-if-slower 3%" in outcome.out
    assert "Passed" not in outcome.out
    result = read_result(tmp_path / "c.json")
    assert isinstance(result, CompareResult)
    assert result.failing() == []
    assert fact(result.findings, "compare-too-noisy", "rows") == len(result.unresolved()) > 1
    assert run(f"compare {FIRST} {one} --fail-if-slower 3%").code == 4  # one noisy row is enough
    assert run(f"compare {FIRST} {noisy} --fail-if-slower 90%").code == 0  # which these runs can resolve
    assert run(f"compare {FIRST} {noisy}").code == 0
    slow = slowed(tmp_path / "slow.json", 1.6)
    assert run(f"compare {FIRST} {slow} --fail-if-slower 3%").code == 1
    both = widened(tmp_path / "both.json", 60, slow, only="MLP Up")
    outcome = run(f"compare {FIRST} {both} --fail-if-slower 3%")
    assert outcome.code == 1
    assert "Too noisy" not in outcome.out


def test_which_rows_are_unresolved(tmp_path: Path) -> None:
    one = widened(tmp_path / "one.json", 60, only="MLP Up")
    result = compare([FIRST, one], fail_if_slower=0.03)
    assert {row.what for row in result.unresolved()} == {"MLP Up"}
    assert min(row.changes[-1].half_width for row in result.unresolved()) > 0.03
    assert compare([FIRST, one], fail_if_slower=0.0).unresolved() == []
    without = raw(AGAIN)
    for row in times(without):
        row["total_ms"]["low"] = row["total_ms"]["high"] = None
    (tmp_path / "without.json").write_text(json.dumps(without))
    result = compare([FIRST, tmp_path / "without.json"], fail_if_slower=0.03)  # a time without an interval resolves nothing
    assert len(result.unresolved()) == len(result.rows)
    assert fact(result.findings, "compare-too-noisy", "spread") == "interval unknown"


def test_noisy_but_clearly_faster_passes(run: Run, tmp_path: Path) -> None:
    fast = widened(tmp_path / "fast.json", 20, slowed(tmp_path / "x.json", 0.3))
    result = compare([FIRST, fast], fail_if_slower=0.03)
    assert set(verdicts(result)) == {"faster"}
    assert run(f"compare {FIRST} {fast} --fail-if-slower 3%").code == 0


def test_a_limit_from_python_must_be_a_share() -> None:
    with pytest.raises(UserError, match="fail_if_slower=3 must be between 0 and 1"):
        compare([FIRST, AGAIN], fail_if_slower=3)


def test_another_precision_is_listed_as_a_difference() -> None:
    """A run that fell back is compared by its times, and the fallback is listed beside them."""
    fallbacks = {
        difference.name: difference.values for difference in compare([FIRST, DATA / "h200_bench_fallback.json.gz"]).differences
    }
    assert fallbacks["precision of FP8Current, autocast"] == ("", "FALLBACK")
    assert not any(difference.name.startswith("precision of") for difference in compare([FIRST, AGAIN]).differences)


def test_more_than_two(run: Run, tmp_path: Path) -> None:
    outcome = run(f"compare {FIRST} {AGAIN} {slowed(tmp_path / 'slow.json', 1.05)} --json {tmp_path}/c.json")
    assert outcome.code == 0
    assert "C: " in outcome.out
    result = read_result(tmp_path / "c.json")
    assert isinstance(result, CompareResult)
    assert all(len(row.changes) == 2 for row in result.rows)


def on_chip(path: Path, **device: Any) -> Path:
    data = raw(FIRST)
    data["device"] |= device
    path.write_text(json.dumps(data))
    return path


def test_which_chip_it_was_is_compared_and_its_health_is_not(tmp_path: Path) -> None:
    one = on_chip(tmp_path / "one.json", node="node03", uuid="GPU-1", health={"corrected_errors": 0})
    later = on_chip(tmp_path / "later.json", node="node03", uuid="GPU-1", health={"corrected_errors": 9})
    other = on_chip(tmp_path / "other.json", node="node03", uuid="GPU-2", health={})
    assert compare([one, later]).differences == ()
    assert {difference.name: difference.values for difference in compare([one, other]).differences} == {
        "GPU UUID": ("GPU-1", "GPU-2")
    }
    assert compare([FIRST, one]).differences == ()  # the older file does not contain it


def test_environment_differences_come_first(run: Run, tmp_path: Path) -> None:
    other = raw(AGAIN)
    other["environment"]["driver"] = "999.99"
    other["device"]["power_limit_w"] = 500.0
    (tmp_path / "other.json").write_text(json.dumps(other))
    names = [difference.name for difference in compare([FIRST, tmp_path / "other.json"]).differences]
    assert "driver" in names
    assert "power_limit_w" in names
    outcome = run(f"compare {FIRST} {tmp_path}/other.json")
    assert outcome.out.index("999.99") < outcome.out.index("Verdict")


def bad(tmp_path: Path) -> dict[str, tuple[str, str]]:
    def write(name: str, **changes: Any) -> str:
        path = tmp_path / name
        path.write_text(json.dumps({**raw(AGAIN), **changes}))
        return str(path)

    linears = raw(AGAIN)["linears"]
    cases = [{**case, "tokens": case["tokens"] * 2} for case in linears["cases"]]
    batch = {**raw(AGAIN)["run"], "micro_batch_size": 1}
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "cut.json.gz").write_bytes(AGAIN.read_bytes()[:-900])
    return {
        write("old.json", schema_version=1): ("schema version 1", "run gemmscope bench again"),
        write("new.json", schema_version=3): ("schema version 3", "update gemmscope"),
        write("kind.json", kind="shapes"): ("not a run file of bench, step, sweep or fleet", "--json"),
        write("sizes.json", linears={**linears, "cases": cases}): ("not runs of the same thing", "measure"),
        write("batch.json", run=batch): ("micro_batch_size 31 and 1", "measure"),
        write("part.json", linears={**linears, "ops": [{"op": "a"}]}): ("is damaged", "run gemmscope bench again"),
        str(tmp_path / "text.json"): ("not valid JSON", "run file"),
        str(tmp_path / "list.json"): ("not a run file", "--json"),
        str(tmp_path / "cut.json.gz"): ("truncated", "copy it again"),
        str(tmp_path / "none.json"): ("cannot be read", "run file"),
        str(recorded("healthy_te_bf16")): ("is a profiler trace", "gemmscope explain"),
    }


def test_bad_input_is_one_message(run: Run, tmp_path: Path) -> None:
    for path, (message, hint) in bad(tmp_path).items():
        outcome = run(f"compare {FIRST} {path}")
        assert outcome.code == 2, path
        assert message in outcome.err
        assert hint in outcome.err
        assert "Traceback" not in outcome.err
    assert "at least two runs" in run(f"compare {FIRST}").err


def test_a_change_needs_both_sides_and_intervals() -> None:
    assert change(Interval(1.0), Interval(1.0), 2.0).verdict == "too close to call"
    exact, within, beyond = (Interval(value, value, value) for value in (1.0, 1 + 2 * BETWEEN_RUNS, 1 + 3 * BETWEEN_RUNS))
    assert change(exact, within, 2.0).verdict == "too close to call"
    assert change(exact, beyond, 2.0).verdict == "slower"
    assert change(None, exact, 2.0).ratio is None


def test_rows_that_only_one_run_has(tmp_path: Path) -> None:
    fewer = raw(AGAIN)
    fewer["linears"]["ops"] = [row for row in fewer["linears"]["ops"] if row["recipe"] != "FP8Block"]
    (tmp_path / "fewer.json").write_text(json.dumps(fewer))
    result = compare([FIRST, tmp_path / "fewer.json"])
    assert verdicts(result).count("missing") == fact(result.findings, "compare-missing", "rows") == 8


def test_nothing_in_common_does_not_pass(run: Run, tmp_path: Path) -> None:
    """Other recipes, or times that are not numbers: a check that compared nothing must not pass."""
    other, broken = raw(AGAIN), raw(AGAIN)
    for row in times(other):
        row["recipe"] = f"My{row['recipe']}"
    for row in times(broken):
        row["total_ms"]["value"] = 0.0
    for number, data in enumerate((other, broken)):
        (tmp_path / f"{number}.json").write_text(json.dumps(data))
        outcome = run(f"compare {FIRST} {tmp_path}/{number}.json --fail-if-slower 3%")
        assert outcome.code == 2
        assert "have no row in common" in outcome.err
        outcome = run(f"compare {FIRST} {AGAIN} {tmp_path}/{number}.json --fail-if-slower 3%")
        assert outcome.code == 2  # the last run decides; a comparison with an earlier one does not replace it
        assert f"{tmp_path}/{number}.json have no row in common" in outcome.err


def test_clocks_and_names_that_make_no_sense(run: Run, tmp_path: Path) -> None:
    data = raw(AGAIN)
    data["device"]["name"] = "\ud800"
    for task in data["tasks"]:
        for state in task["states"]:
            state["sm_mhz"] = "fast"
    (tmp_path / "odd.json").write_text(json.dumps(data))
    places = " ".join(f"--{form} {tmp_path}/c.{form}" for form in ("markdown", "csv"))
    outcome = run(f"compare {FIRST} {tmp_path}/odd.json {places}")
    assert outcome.code == 0, outcome.err
