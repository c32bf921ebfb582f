"""With `-`, standard output contains only the machine-readable text. --detail adds nothing to it."""

from __future__ import annotations

import csv
import io
import json

import pytest

from support.command import Run, run
from support.traces import DATA

__all__ = ["run"]  # the fixture

LINES = {
    "shapes": "shapes --preset gpt2 --micro-batch-size 1 --sequence-length 1k",
    "forecast": "forecast --preset gpt2 --micro-batch-size 1 --sequence-length 1k --gpu h200 --recipes fp8current",
    "compare": f"compare {DATA}/h200_bench_first.json.gz {DATA}/h200_bench_again.json.gz",
}


@pytest.mark.parametrize("name", LINES)
def test_detail_adds_nothing_to_standard_output(run: Run, name: str) -> None:
    for form in ("json", "csv", "markdown"):
        plain, detailed = run(f"{LINES[name]} --{form} -"), run(f"{LINES[name]} --{form} - --detail")
        assert (plain.code, detailed.code) == (0, 0)
        assert detailed.out.replace(" --detail", "") == plain.out  # the command line is part of the result
        assert detailed.err == plain.err == ""
        if form == "json":
            assert json.loads(detailed.out)["kind"] == name
        if form == "csv":
            rows = list(csv.reader(io.StringIO(detailed.out)))
            assert len({len(row) for row in rows}) == 1
        if form == "markdown":
            assert detailed.out.startswith("# ")


def test_everything_that_detail_shows_is_in_markdown(run: Run) -> None:
    shown, written = run(f"{LINES['shapes']} --detail").out, run(f"{LINES['shapes']} --markdown -").out
    assert "Optimizer" in shown
    assert "Optimizer" in written
