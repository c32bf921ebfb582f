"""Where a measurement stands, and how long it will take."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from gemmscope import progress
from gemmscope.bench.campaign import LinearCampaign
from gemmscope.bench.timing import bench_settings, stopping_rule
from gemmscope.engine.campaign import LocalWorkers
from gemmscope.engine.journal import Journal, RecordedRun
from gemmscope.engine.messages import Begin, Hello, Message, Ready, Round, Sampled
from gemmscope.options.measuring import TimingOptions
from gemmscope.progress import Console, PoolProgress, ProgressLine, Tenths
from gemmscope.workload.cases import bare_gemms, tasks_of


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def campaign_for_progress(tmp_path: Path, timing: TimingOptions) -> LinearCampaign:
    tasks = tasks_of(bare_gemms([(64, 64, 64)]), ["BF16", "FP8Current"], ["autocast"], {})
    recording = RecordedRun(Journal(tmp_path / "journal.sqlite3"), 1)
    return LinearCampaign(
        tasks=tasks,
        settings=bench_settings(timing, "cpu"),
        rule=stopping_rule(timing),
        recording=recording,
        workers=LocalWorkers(),
    )


def messages(campaign: LinearCampaign) -> list[Message]:
    keys = list(campaign.results.tasks)
    ready = [Ready(key, {"error": 0, "host_ms": 0.1, "copies": 1, "note": ""}) for key in keys]
    measuring = Begin(keys[0], "measuring")
    rounds: list[Message] = []
    for number in range(5):
        times = {key: [1.0 + index + number / 100] for index, key in enumerate(keys)}
        rounds += [measuring, Sampled(times, {}), Round(number)]
    return [Hello(), Begin(keys[0], "compiling"), *ready, *rounds]


def test_progress_says_what_it_does_and_how_long_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Screen())
    monkeypatch.setenv("TERM", "xterm")
    campaign = campaign_for_progress(tmp_path, TimingOptions(precision=0.0001))
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
    campaign.recording.journal.close()


def test_progress_is_silent_where_nobody_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = campaign_for_progress(tmp_path, TimingOptions())
    with Console().measuring(campaign) as show:
        for message in messages(campaign):
            campaign.results.take(message)
            show(message, campaign.results)
    assert capsys.readouterr() == ("", "")
    campaign.recording.journal.close()


def test_counting_shows_a_line_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", -1)
    for screen in (io.StringIO(), Screen()):
        monkeypatch.setattr(sys, "stderr", screen)
        with Console().counting("points", 3000) as show:
            show(1000)
        assert bool(re.search(r"1,000 of 3,000 points, about \d+ s left", screen.getvalue())) == screen.isatty()


@pytest.mark.parametrize(
    ("timing", "half_width", "left"),
    [
        (TimingOptions(precision=0.01, time_limit=1000), 0.02, 24.0),  # four times as many rounds: 12 more of 2 s
        (TimingOptions(precision=0.01, time_limit=10), 0.02, 2.0),  # the limit comes first
        (TimingOptions(precision=0.01, time_limit=1000), 0.005, 0.0),
        (TimingOptions(num_iters=100), 0.02, 2.0),  # five rounds in all, whatever the precision
        (TimingOptions(precision=0.01, time_limit=10), None, 2.0),
    ],
)
def test_time_left(tmp_path: Path, timing: TimingOptions, half_width: float | None, left: float) -> None:
    """Four rounds came in 8 s."""
    now = [100.0]
    campaign = campaign_for_progress(tmp_path, timing)
    campaign.rule.started = now[0]
    estimate = ProgressLine(campaign, clock=lambda: now[0])
    assert estimate.seconds_left(0, None) is None
    estimate.text(Begin("", "measuring"), campaign.results)
    now[0] += 8
    assert estimate.seconds_left(4, half_width) == pytest.approx(left)
    campaign.recording.journal.close()


def spread(done: int, failed: int = 0, last: str = "", total: int = 40) -> PoolProgress:
    return PoolProgress(done, failed, total, 8, 7, 1, 30.0 * (total - done), last)


def test_many_places_are_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with Console().spreading("point") as show:
        show(PoolProgress(0, 0, 40, 0, 0, 0, None, ""))
        show(spread(3, last="node03 GPU 5 lost: signal 9"))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "starting" in text
    assert "3 of 40 points done, about 18 min left; 7 of 8 GPUs busy; node03 GPU 5 lost: signal 9" in text


def test_the_only_place_says_what_it_does() -> None:
    state = PoolProgress(0, 0, 1, 1, 1, 1, None, "", "round 3, speedups known to ±1.2%")
    assert progress.spread_text(state, "GPU") == "0 of 1 GPU done; 1 of 1 GPU busy; round 3, speedups known to ±1.2%"


def test_a_log_has_a_line_for_every_tenth() -> None:
    lines: list[str] = []
    now = [0.0]
    show = Tenths("point", lines.append, lambda: now[0])
    for done in range(41):
        now[0] += 1.0
        show(spread(done))
    assert len(lines) == 10
    assert lines[0].startswith("4 of 40 points done")
    assert lines[-1].startswith("40 of 40 points done; ")


def test_a_log_says_what_happened_when_little_is_done() -> None:
    lines: list[str] = []
    now = [0.0]
    show = Tenths("point", lines.append, lambda: now[0])
    show(spread(0, last="a lost"))  # before anything is done, at once
    show(spread(1, last="b lost"))
    now[0] += 61.0
    show(spread(1, last="b lost"))
    show(spread(1, last="b lost"))
    assert [line.rpartition("; ")[2] for line in lines] == ["a lost", "b lost"]
