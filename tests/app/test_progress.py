"""Where a measurement stands, and how long it will take."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from gemmscope.app import progress
from gemmscope.app.bench import BenchTiming
from gemmscope.app.progress import Console, ProgressLine, TimeLeft
from gemmscope.measure.campaign import Campaign
from gemmscope.measure.journal import Journal
from gemmscope.workload.cases import bare_gemms, tasks_of


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def campaign_for_progress(tmp_path: Path, timing: BenchTiming) -> Campaign:
    tasks = tasks_of(bare_gemms([(64, 64, 64)]), ["BF16", "FP8Current"], ["autocast"], {})
    return Campaign(tasks, timing.settings("cpu"), timing.rule(), Journal(tmp_path / "journal.sqlite3"))


def messages(campaign: Campaign) -> list[dict[str, Any]]:
    keys = list(campaign.results.tasks)
    ready = [{"type": "ready", "task": key, "error": 0, "host_ms": 0.1, "copies": 1, "note": ""} for key in keys]
    measuring = {"type": "begin", "task": keys[0], "what": "measuring"}
    rounds: list[dict[str, Any]] = []
    for number in range(5):
        times = {key: [1.0 + index + number / 100] for index, key in enumerate(keys)}
        rounds += [measuring, {"type": "samples", "times_ms": times, "state": {}}, {"type": "round", "round": number}]
    return [{"type": "hello"}, {"type": "begin", "task": keys[0], "what": "compiling"}, *ready, *rounds]


def test_progress_says_what_it_does_and_how_long_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Screen())
    monkeypatch.setenv("TERM", "xterm")
    campaign = campaign_for_progress(tmp_path, BenchTiming(precision=0.0001))
    line = ProgressLine(campaign)
    said = []
    with Console().measuring(campaign) as show:
        for message in messages(campaign):
            campaign.results.take(message)
            said.append(line.text(message, campaign.results))
            show(message, campaign.results)
    assert said[:4] == ["preparing 0 of 2", "compiling kernels", "preparing 1 of 2", "preparing 2 of 2"]
    assert re.fullmatch(r"round 5, speedups known to ±\d+\.\d%, about \d+ s left", said[-1])
    assert "loading the framework" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    campaign.journal.close()  # type: ignore[attr-defined]


def test_progress_is_silent_where_nobody_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = campaign_for_progress(tmp_path, BenchTiming())
    with Console().measuring(campaign) as show:
        for message in messages(campaign):
            campaign.results.take(message)
            show(message, campaign.results)
    assert capsys.readouterr() == ("", "")
    campaign.journal.close()  # type: ignore[attr-defined]


def test_counting_shows_a_line_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", -1)
    for screen in (io.StringIO(), Screen()):
        monkeypatch.setattr(sys, "stderr", screen)
        with Console().counting("points", 3000) as show:
            show(1000)
        assert ("1,000 of 3,000 points, about 0 s left" in screen.getvalue()) == screen.isatty()


@pytest.mark.parametrize(
    ("timing", "half_width", "left"),
    [
        (BenchTiming(precision=0.01, time_limit=1000), 0.02, 24.0),  # four times as many rounds: 12 more of 2 s
        (BenchTiming(precision=0.01, time_limit=10), 0.02, 2.0),  # the limit comes first
        (BenchTiming(precision=0.01, time_limit=1000), 0.005, 0.0),
        (BenchTiming(num_iters=100), 0.02, 2.0),  # five rounds in all, whatever the precision
        (BenchTiming(precision=0.01, time_limit=10), None, 2.0),
    ],
)
def test_time_left(tmp_path: Path, timing: BenchTiming, half_width: float | None, left: float) -> None:
    """Four rounds came in 8 s."""
    now = [100.0]
    campaign = campaign_for_progress(tmp_path, timing)
    campaign.rule.started = now[0]
    estimate = TimeLeft(campaign, clock=lambda: now[0])
    assert estimate.seconds(0, None) is None
    estimate.begin(0)
    now[0] += 8
    assert estimate.seconds(4, half_width) == pytest.approx(left)
    campaign.journal.close()  # type: ignore[attr-defined]
