"""Findings: statements that accompany the numbers of a result, as values.

A finding has a code, a level and its facts. Stages make findings with `finding(code, ...)`; tests, exit codes and pages look at
codes. `findings.toml` is the one file that turns them into sentences, and `sentence` is the one function that does so.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from string import Formatter
from typing import Any, Literal

from gemmscope import units
from gemmscope.errors import MissingFactError, in_shell
from gemmscope.interval import Interval
from gemmscope.toml import load_data

Level = Literal["error", "warning", "note"]
Fact = None | bool | int | float | str | Interval | list[str] | dict[str, float]


@dataclass(frozen=True)
class Finding:
    """One thing to know. `level`: an error makes a number invalid, a warning puts it in question, a note explains it."""

    code: str
    level: Level
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Facts that come from a run file: an interval is a table of its three numbers there."""
        object.__setattr__(self, "facts", {name: _interval(fact) for name, fact in self.facts.items()})

    @property
    def text(self) -> str:
        """The sentence of `findings.toml`, with the facts filled in."""
        return sentence(self)


def _interval(fact: Fact) -> Fact:
    return Interval(**fact) if isinstance(fact, dict) and fact.keys() == {"value", "low", "high"} else fact


def finding(code: str, **facts: Fact) -> Finding:
    """A finding of a known code, with the level that the table gives it.

    >>> finding("nothing-measured")
    Finding(code='nothing-measured', level='warning', facts={})
    """
    if code not in catalog():
        raise MissingFactError("findings.toml", code)
    return Finding(code, catalog()[code]["level"], facts)


Notes = Mapping[str, tuple[object, Mapping[str, Fact]]]
"""Findings by their codes: whether each applies, and its facts."""


def applicable(notes: Notes) -> list[Finding]:
    """The findings that apply, in the order of the table.

    >>> applicable({"nothing-measured": (True, {}), "single-round": (False, {})})
    [Finding(code='nothing-measured', level='warning', facts={})]
    """
    return [finding(code, **facts) for code, (applies, facts) in notes.items() if applies]


def sentence(entry: Finding) -> str:
    """The finding as a sentence.

    >>> sentence(finding("too-close-to-call", recipe="FP8Block", over="BF16", what="the training step"))
    'Too close to call: FP8Block and BF16 for the training step.'
    """
    if entry.code not in catalog():
        raise KeyError(entry.code)  # of a damaged run file
    return in_shell(fill(catalog()[entry.code]["text"], entry.facts))


def fill(text: str, facts: Mapping[str, Any]) -> str:
    """A sentence of a catalog with its facts: `{name:format}`, in the formats that `_Sentence` lists.

    >>> fill("{names} {names:is|are} left of {count:count layer}.", {"count": 3, "names": ["a", "b"]})
    'a, b are left of 3 layers.'
    """
    return _Sentence().format(text, **facts)


def without_repeats(findings: Iterable[Finding]) -> list[Finding]:
    """Each finding once, in order: a measurement that was restarted repeats its findings."""
    result: list[Finding] = []
    result.extend(entry for entry in findings if entry not in result)
    return result


@cache
def catalog() -> dict[str, Any]:
    """Every code with its level and its sentence."""
    return dict(load_data("gemmscope", "findings.toml"))  # a code may come from a file: a wrong one is a KeyError


class _Sentence(Formatter):
    """Formats facts. `{ops}` joins a list, `{speedup:x}` writes a speedup with its interval, `{time:ms}` a time, `{share:%}` a
    share, `{ratio:.2fx}` a ratio, `{layers:count layer}` a count with its noun, `{names:kernel}` kernels by their short names,
    `{ratios:.2f}` every value of a table, `{names:does|do}` one of two texts by how many there are; anything else as Python
    does."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if "|" in format_spec:
            one, _, several = format_spec.partition("|")
            return one if (len(value) if isinstance(value, (list, tuple)) else value) == 1 else several
        match value:
            case list() | tuple():
                return units.names(map(units.kernel_name if format_spec == "kernel" else str, value))
            case dict():
                return ", ".join(f"{name} {self.format_field(number, format_spec)}" for name, number in value.items())
            case Interval():
                return units.speedup(value)
        match format_spec.split():
            case ["ms"]:
                return f"{units.milliseconds(value)} ms"
            case ["%"]:
                return units.percent(value)
            case ["count", *noun]:
                return units.counted(value, " ".join(noun))
        if format_spec.endswith("fx"):
            return f"{value:{format_spec[:-1]}}x"
        return str(super().format_field(value, format_spec))
