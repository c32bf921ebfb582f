"""What a command is run with: how it was called, and where its progress, its result and its journal go."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemmscope.engine.journal import RecordedRun, not_resumed, open_journal
from gemmscope.progress import QUIET, Reporter


@dataclass(frozen=True)
class RunContext:
    """`command`: the call, as the result says it. `deliver` writes the result of a measurement, which is finished only after
    that; `stream` gets the points of a sweep that are there so far, every few seconds. `state`: the folder of the journal, where
    that is not the user's: many nodes may share a home folder over a network, where SQLite must not be."""

    command: str = ""
    reporter: Reporter = QUIET
    deliver: Callable[[Any], None] | None = None
    stream: Callable[[Any], None] | None = None
    state: Path | None = None

    @contextmanager
    def recording(self, mark: str, *, resume: bool) -> Iterator[RecordedRun]:
        """The journal's record of a measurement with this fingerprint; with `resume`, that of one that was cut short."""
        with closing(open_journal(self.state)) as journal, journal.recording(mark, self.command, resume=resume) as recording:
            if resume and (warning := not_resumed(recording)) is not None:
                self.reporter.say(warning.text)
            yield recording

    def finish(self, recording: RecordedRun, result: Any, *, complete: bool) -> None:
        """Deliver the result. Only if it is `complete` and written, there is nothing left to resume."""
        recording.deliver(lambda: self.deliver(result) if self.deliver is not None else None, complete=complete)


PLAIN = RunContext()
"""Says nothing and writes nothing."""
