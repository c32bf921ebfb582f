"""What was measured so far, gathered from messages: live, or from the journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from gemmscope.engine import messages
from gemmscope.engine.messages import Hello, Message
from gemmscope.engine.stats import pieces
from gemmscope.findings import Finding, finding
from gemmscope.results.base import Samples

Measured = TypeVar("Measured", bound=Samples)


class ResultStore(Generic[Measured]):
    """Samples by the key of their task. `pieces` are what statistics are made of (`stats.py`): by task, burst by burst."""

    def __init__(self, tasks: Mapping[str, Measured]) -> None:
        self.tasks = dict(tasks)
        self.pieces: dict[str, list[list[float]]] = {key: [] for key in self.tasks}
        self.hello = Hello()
        self.findings: list[Finding] = []
        self.complete_rounds = 0

    def prepared(self) -> tuple[int, int]:
        """How many tasks are ready to be measured or have failed, and how many there are."""
        return sum(bool(result.facts) or bool(result.failure) for result in self.tasks.values()), len(self.tasks)

    def any_samples(self) -> bool:
        """Whether anything at all was measured."""
        return any(result.rounds_ms for result in self.tasks.values())

    def left(self, keys: Sequence[str]) -> list[str]:
        """Those that have not failed."""
        return [key for key in keys if not self.tasks[key].failure]

    def take(self, message: Message) -> None:
        """Record one message."""
        match message:
            case messages.Hello():
                self.hello = message
            case messages.Ready(key, facts):
                self.tasks[key].facts = dict(facts)
            case messages.Failed(key, why, kind):
                self.tasks[key].failure, self.tasks[key].failure_kind = why, kind
            case messages.Sampled(times_ms, state):
                duration_ms = self.duration_ms(times_ms)
                for key, burst in times_ms.items():
                    self.tasks[key].rounds_ms.append(list(burst))
                    self.tasks[key].states.append(dict(state))
                    self.pieces[key].append(pieces(burst, duration_ms))
            case messages.Health(facts):
                self.hello = replace(self.hello, device={**self.hello.device, "health": dict(facts)})
            case messages.Round():
                self.complete_rounds += 1
            case messages.Noticed(code, facts):
                self.findings.append(finding(code, **facts))
            case messages.Attempted(keys):
                for key in keys:
                    self.tasks[key], self.pieces[key] = self.empty(key), []

    def duration_ms(self, times_ms: Mapping[str, list[float]]) -> float:
        """How long a burst took."""
        return sum(map(sum, times_ms.values()))

    def empty(self, key: str) -> Measured:
        """A task without samples."""
        raise NotImplementedError


def identity(hello: Hello) -> dict[str, Any]:
    """What must be the same for samples to be combined: one GPU, one set of versions. Its health may change."""
    device = hello.device
    which = {"GPU": device.get("name"), "GPU UUID": device.get("uuid"), "power limit": device.get("power_limit_w")}
    return {**hello.versions, **which}
