"""Campaigns for tests: with their own journal, and real workers or workers that follow a script."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemmscope.bench.campaign import LinearCampaign
from gemmscope.engine.campaign import LocalWorkers, WorkerEndedError
from gemmscope.engine.journal import Journal, RecordedRun
from gemmscope.engine.messages import Message
from gemmscope.engine.rule import StoppingRule
from gemmscope.results.bench import BenchSettings
from gemmscope.signals import DeferredSignals
from gemmscope.workload.cases import MODES, Case, tasks_of

CASES = [Case("QKV Proj", 32, 32, 96, 2), Case("MLP Up", 32, 32, 128, 2)]
Script = Callable[[dict[str, Any]], Iterable[Message]]


def interrupt() -> None:
    """Interrupt this process as Ctrl-C does."""
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def recorded(folder: Path, *, resume: bool = False) -> Iterator[RecordedRun]:
    """The one run of a journal in this folder."""
    journal = Journal(folder / "journal.sqlite3")
    try:
        with journal.recording("test", "gemmscope", resume=resume) as recording:
            yield recording
    finally:
        journal.close()


def small_campaign(recording: RecordedRun, recipes: list[str], **changes: Any) -> LinearCampaign:
    """Two small linears on the CPU; `changes`: of the rule, or of the campaign."""
    rule = {"least_rounds": 2, "target": 0.5} | {name: changes.pop(name) for name in ("target", "longest_s") if name in changes}
    settings = {
        "tasks": tasks_of(CASES, recipes, MODES, {}),
        "settings": BenchSettings("cpu", drop_ms=1, keep_ms=2, max_rounds=5, silence_s=60),
        "rule": StoppingRule(**rule),
        "workers": LocalWorkers(),
    }
    return LinearCampaign(recording=recording, **(settings | changes))


@dataclass
class Scripted:
    """Workers that send the messages of a script. They end after the last message, or with the signal `death`."""

    script: Script
    death: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)

    def start(self, module: str) -> Scripted:
        return self

    def tell(self, content: Any) -> None:
        if isinstance(content, dict):
            self.requests.append(content)

    def close_input(self) -> None: ...

    def messages(self, silence_s: float, signals: DeferredSignals) -> Iterator[Message]:
        for message in self.script(self.requests[-1]):
            yield message
            if signals.first is not None:
                return
        if self.death:
            raise WorkerEndedError("crash", "the measuring process died", self.death)

    def close(self) -> None: ...
