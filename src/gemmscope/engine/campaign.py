"""Drives a campaign from the parent's side: starts workers, journals their messages, restarts them when they die, stops in time.

The parent never imports torch. It knows the worker's current task (`begin`), so a crash, a CUDA fault or a hang costs that task
and nothing else: it is recorded as failed, and a new worker takes the others. A worker that is killed from outside costs nothing
the first time. Subclasses say what is measured: which tasks are measured together, what the worker is asked to do, and how
precisely everything is known.

The request goes to the worker as one line of JSON; the end of its input means stop. Messages come back, one line each.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from gemmscope.engine.journal import RecordedRun
from gemmscope.engine.messages import Attempted, Begin, Done, Failed, Fatal, Group, Hello, Message, Noticed, Round, Sampled, parse
from gemmscope.engine.rule import StoppingRule, Uncertainty
from gemmscope.engine.store import ResultStore, identity
from gemmscope.errors import MissingFactError, UserError, option, shown
from gemmscope.findings import finding
from gemmscope.process import ProcessEndedError, WorkerProcess
from gemmscope.signals import DeferredSignals, defer_signals


class WorkerEndedError(Exception):
    """The process ended or must be ended: what happened, details, and the kind of failure that this is for its task.

    `killed`: by SIGKILL, which comes from outside the process, so the task may not be the cause.
    """

    def __init__(self, kind: str, what: str, detail: str = "", *, killed: bool = False, hint: str = "") -> None:
        super().__init__(kind, what, detail)
        self.kind, self.why, self.detail, self.killed, self.hint = kind, f"{what} {detail}".strip(), detail, killed, hint


class LocalWorkers(ExitStack):
    """Processes on this machine. One may be started early: it imports torch while others read the model."""

    def __init__(self) -> None:
        super().__init__()
        self._early: dict[str, WorkerConnection] = {}

    def start_early(self, module: str) -> None:
        """Start a process now, which the first `start` of this module returns."""
        self._early[module] = WorkerConnection(module)
        self.callback(self._early[module].close)

    def start(self, module: str) -> WorkerConnection:
        return self._early.pop(module, None) or WorkerConnection(module)


class WorkerConnection(WorkerProcess):
    """One measuring process."""

    def tell(self, content: Any) -> None:
        """Send the request, or later orders."""
        self.send(json.dumps(content).encode() + b"\n")

    def messages(self, silence_s: float, signals: DeferredSignals) -> Iterator[Message]:
        """Its messages as they arrive, until a signal arrives, including those sent by then. A `WorkerEndedError` if it ends,
        sends nothing for `silence_s`, or sends an invalid message."""
        heard = ran = time.monotonic()
        while True:
            stopping = signals.first is not None  # what it has sent so far is still read
            self.wait(silence_s, signals)
            try:
                lines = self.lines()
            except ProcessEndedError as end:
                ended = "killed by signal 9" if end.ending.killed else end.ending.how  # a killed process leaves no reason
                detail = f"({ended}){'' if end.ending.killed else end.ending.detail}"
                raise WorkerEndedError("crash", "the measuring process died", detail, killed=end.ending.killed) from end
            except ValueError as error:
                raise WorkerEndedError("error", str(error)) from error
            for line in lines:
                heard = time.monotonic()
                yield _message(line)
            if stopping:
                return
            now = time.monotonic()
            if now - heard >= silence_s:
                raise WorkerEndedError("hang", f"the measuring process sent nothing for {silence_s:g} s")
            ran = ran if self.stopped else now
            if now - ran >= STOPPED_S:  # however long a burst may take
                raise WorkerEndedError("hang", "the measuring process was stopped (SIGSTOP)")


def _message(text: bytes) -> Message:
    try:
        return parse(text)
    except ValueError as error:
        raise WorkerEndedError("error", f"the measuring process sent an invalid message: {shown(text)}") from error


STOPPED_S = 20.0  # how long a measuring process may be stopped: a batch system may suspend all of a job for a moment
Results = TypeVar("Results", bound=ResultStore[Any])
OnMessage = Callable[[Message, Any], None]


class NotStartedError(UserError):
    """No measuring process can be started on this machine, whatever is to be measured."""


@dataclass(frozen=True)
class Attempt:
    """Tasks that are measured together, in the memory of one process. A failure of the kind `ends_at` ends the attempt."""

    tasks: Sequence[str]
    ends_at: str = ""


@dataclass(kw_only=True)
class Campaign(ABC, Generic[Results]):
    """One measurement. `run` measures until the rule says stop; `results` has what was measured, also when it is interrupted."""

    worker: ClassVar[str]  # the module that the measuring process runs
    ends_itself: ClassVar[bool] = False  # the worker has something left to do after the last sample

    recipes: Sequence[str] = field(init=False)
    rounds: int | None = field(init=False, default=None)
    """The number of rounds, if it is fixed."""
    rule: StoppingRule
    recording: RecordedRun
    workers: LocalWorkers = field(repr=False)
    on_message: OnMessage = lambda *_: None
    results: Results = field(init=False)
    interrupted: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._decide_again = 0.0
        self._clock_runs = self._greeted = False
        self._at = ""  # the worker's current task
        self._killed_at: set[str] = set()

    @property
    @abstractmethod
    def part(self) -> str:
        """The fingerprint of this campaign within its run."""

    @property
    @abstractmethod
    def silence_s(self) -> float:
        """A worker that sends nothing for this long is considered hung."""

    @abstractmethod
    def attempts(self) -> Iterator[Attempt]:
        """What to measure, set after set. Each set is requested when the previous one is over, and may depend on its results."""

    @abstractmethod
    def request(self, tasks: Sequence[str]) -> dict[str, Any]:
        """What the worker is asked to do."""

    @abstractmethod
    def uncertainties(self, tasks: Sequence[str]) -> Iterable[Uncertainty]:
        """How precisely everything is known that the tasks of an attempt are measured for."""

    def wanted(self, groups: Sequence[Group], tasks: Sequence[str]) -> list[Group]:  # noqa: ARG002
        """The groups that this worker should measure more of, so that these become more precise; empty: all groups equally."""
        return []

    def widest(self) -> float | None:
        """The largest half-width of all that is measured."""
        return max((uncertainty.half_width for uncertainty in self.uncertainties(list(self.results.tasks))), default=None)

    def run(self) -> Results:
        """Measure what the journal does not have yet, until the rule is met. A signal ends it early (`interrupted`)."""
        earlier = self.recording.messages(self.part)
        with defer_signals() as signals:
            for attempt in self.attempts():
                self.rule.restart(self.results.complete_rounds)
                self._clock_runs = False
                earlier, over = self._replay(attempt, earlier)
                if over:
                    self.rule.conclude(self.uncertainties(attempt.tasks))
                elif self.ends_itself or not self._enough(attempt.tasks):
                    self._measure(attempt, signals)
                if signals.first is not None:
                    self.interrupted = signals.answered = True
                    then = "continues from here" if self.recording.journal.stays else "measures this again"
                    signals.outcome = f"the same command with {option('resume')} {then}"
                    break
        return self.results

    def _replay(self, attempt: Attempt, earlier: list[Message]) -> tuple[list[Message], bool]:
        """Process what the journal has of this attempt. Returns the messages of later attempts, and whether this one was over."""
        begun = Attempted(list(attempt.tasks))
        if not earlier:
            self._note(begun)
            return [], False
        following = (index for index, message in enumerate(earlier) if index and isinstance(message, Attempted))
        end = next(following, len(earlier))
        misfit = UserError(
            "the journal does not fit this measurement: another version of gemmscope wrote it",
            f"start again without {option('resume')}",
        )
        if earlier[0] != begun:
            raise misfit
        try:
            for message in earlier[:end]:
                self.results.take(message)
        except (KeyError, TypeError, MissingFactError) as error:  # tasks, or findings, that this measurement does not have
            raise misfit from error
        return earlier[end:], end < len(earlier) or isinstance(earlier[end - 1], Done)

    def _measure(self, attempt: Attempt, signals: DeferredSignals) -> None:
        """One worker after another, until one ends normally: each that dies costs the task it died at."""
        while left := self.results.left(attempt.tasks):
            worker = self.workers.start(self.worker)
            try:
                ended = self._converse(worker, left, attempt, signals)
            except WorkerEndedError as death:
                ended = signals.first is not None or self._survive(death, left, attempt)
            finally:
                worker.close()
            if ended:
                return

    def _converse(self, worker: WorkerConnection, tasks: list[str], attempt: Attempt, signals: DeferredSignals) -> bool:
        """Process one worker's messages until enough is measured. True: the attempt is over."""
        self._at, self._greeted = "", False
        enough, sent = False, list[Group]()
        had = {key: len(self.results.tasks[key].rounds_ms) for key in tasks} if not self.rule.decides else {}
        worker.tell({**self.request(tasks), "least_rounds": self.rule.least_rounds, "had": had})
        for message in worker.messages(self.silence_s, signals):
            if isinstance(message, Fatal):
                raise WorkerEndedError("error", message.why, hint=message.hint)
            self._note(message)
            match message:
                case Done():
                    if not enough:
                        self._enough(attempt.tasks, at_once=True)
                    return True
                case Failed(kind=kind) if kind == attempt.ends_at:
                    return True
                case Sampled() | Round() if not enough:
                    enough = self._enough(attempt.tasks)
                    if enough and not self.ends_itself:
                        self._note(Done())
                        return True
                    if enough:
                        worker.close_input()
                    elif (now := self.wanted(self.rule.open, tasks)) != sent:
                        worker.tell(now)
                        sent = now
        return True  # a signal

    def _survive(self, death: WorkerEndedError, tasks: list[str], attempt: Attempt) -> bool:
        """Record the tasks that failed with a worker that ended. True: the attempt is over."""
        if death.killed and self._at not in self._killed_at:  # the first kill at a task is not blamed on the task
            self._killed_at.add(self._at)
            return False
        if not self._greeted and not self.results.any_samples():
            why = f"the measuring process did not start {death.detail}" if death.kind == "crash" else death.why
            raise NotStartedError(why, death.hint or "gemmscope doctor shows what this machine can measure") from death
        if self.ends_itself and (self.rule.ended is not None or self._enough(attempt.tasks, at_once=True)):  # all was timed
            self._note(Noticed("kernels-not-profiled", {"reason": death.why}))
            self._note(Done())
            return True
        at = [self._at] if self._at in tasks else tasks[:1]
        for key in at if self._greeted else tasks:  # a process that does not start any more cannot measure any of them
            if not self.results.tasks[key].failure:  # else the worker itself had reported it before it died
                self._note(Failed(key, death.why, death.kind))
        return False

    def _enough(self, tasks: Sequence[str], *, at_once: bool = False) -> bool:
        """Asked after every burst; but deciding takes a moment with many tasks, and must not hold up the messages. `at_once`:
        no more messages come, so decide now."""
        began = time.monotonic()
        if not self.rule.decides or (began < self._decide_again and not at_once):
            return False
        enough = self.rule.done(self.results.complete_rounds, lambda: self.uncertainties(tasks))
        self._decide_again = began + 4 * (time.monotonic() - began)
        return enough

    def _note(self, message: Message) -> None:
        """Write a message to the journal, then use it."""
        match message:
            case Hello():
                self._greeted = True
                _must_be_alike(self.results.hello, message)
            case Begin(task):
                self._at = task
            case Sampled() if not self._clock_runs:
                self.rule.start_clock()
                self._clock_runs = True
        problem = self.recording.write(self.part, message)
        self.results.take(message)
        self.on_message(message, self.results)
        if problem:
            self.results.findings.append(finding("journal-incomplete", reason=problem))


def _must_be_alike(earlier: Hello, now: Hello) -> None:
    """Measurements that are combined must come from one GPU and one set of versions."""
    before, after = identity(earlier), identity(now)
    changed = [f"{key} was {before.get(key)} and is {value}" for key, value in after.items() if before.get(key) != value]
    if changed and earlier != Hello():
        raise UserError(
            f"the earlier measurement was made in a different environment: {', '.join(changed)}",
            f"start again without {option('resume')}",
        )
