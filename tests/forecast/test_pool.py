"""Work shared among processes: each output arrives exactly once, also if processes are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from functools import partial
from pathlib import Path

import pytest

from gemmscope import signals
from gemmscope.errors import UserError
from gemmscope.forecast.processes import computed

ITEMS = range(20)


def square(item: int) -> int:
    return item * item


def killed_once(marker: Path, item: int) -> int:
    """Kills the process that computes item 7, the first time."""
    if item == 7 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def killed_always(parent: int, item: int) -> int:
    if os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def refuse(item: int) -> int:
    raise UserError("no", f"{item}")


@pytest.mark.parametrize("processes", [0, 1, 3])
def test_every_output_arrives_once(processes: int) -> None:
    with signals.defer_signals() as deferred:
        assert sorted(computed(square, ITEMS, processes, deferred)) == [item * item for item in ITEMS]
    assert multiprocessing.active_children() == []


def test_the_items_of_a_killed_process_are_computed_again(tmp_path: Path) -> None:
    with signals.defer_signals() as deferred:
        assert sorted(computed(partial(killed_once, tmp_path / "marker"), ITEMS, 2, deferred)) == list(ITEMS)
    assert (tmp_path / "marker").exists()


def test_where_processes_are_killed_again_and_again_this_one_computes() -> None:
    with signals.defer_signals() as deferred:
        assert sorted(computed(partial(killed_always, os.getpid()), ITEMS, 2, deferred)) == list(ITEMS)
    assert multiprocessing.active_children() == []


def test_where_no_process_can_be_started_this_one_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(process: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(multiprocessing.Process, "start", fail)
    with signals.defer_signals() as deferred:
        assert list(computed(square, ITEMS, 2, deferred)) == [item * item for item in ITEMS]


@pytest.mark.parametrize("processes", [0, 2])
def test_an_error_is_raised_here(processes: int) -> None:
    with signals.defer_signals() as deferred, pytest.raises(UserError, match="no"):
        list(computed(refuse, ITEMS, processes, deferred))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("processes", [0, 2])
def test_a_signal_ends_it_with_what_was_computed(processes: int) -> None:
    outputs = []
    with signals.defer_signals() as deferred:
        for output in computed(square, range(10_000), processes, deferred):
            outputs.append(output)
            if len(outputs) == 5:
                os.kill(os.getpid(), signal.SIGINT)
        deferred.answered = True
    assert 5 <= len(outputs) < 10_000
    assert multiprocessing.active_children() == []


def test_signals_that_reach_the_whole_group_do_not_end_the_processes() -> None:
    """Neither Ctrl-C nor SIGTERM ends the processes: only the parent does."""
    outputs = []
    with signals.defer_signals() as deferred:
        for output in computed(square, range(200), 2, deferred):
            if not outputs:
                [
                    os.kill(child.pid, number)
                    for child in multiprocessing.active_children()
                    for number in signals.ENDING
                    if child.pid
                ]
            outputs.append(output)
    assert sorted(outputs) == [item * item for item in range(200)]


def test_in_another_thread() -> None:
    outputs: list[int] = []

    def work() -> None:
        with signals.defer_signals() as deferred:
            outputs.extend(computed(square, ITEMS, 2, deferred))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(outputs) == len(ITEMS)
