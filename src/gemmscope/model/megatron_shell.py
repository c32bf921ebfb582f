"""The words of a shell script and the variables that it sets, as far as reading it can tell: nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from gemmscope.model.megatron_values import Unknown, evaluate

PART = re.compile(
    r"""(?P<gap>\\[ \t]*\r?\n|[^\S\n]+)        # a continued line is a space
      | (?P<end>[\n;&|]+)                        # of a command
      | '(?P<single>[^']*)'
      | "(?P<double>(?:[^"\\]|\\.)*)"
      | (?P<expansion>\$\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\$\((?:[^()]|\([^()]*(?:\([^()]*\)[^()]*)*\))*\))
      | \\(?P<escaped>.)
      | (?P<comment>\#)
      | (?P<plain>[^\s'"\\$#;&|]+|.)""",
    re.VERBOSE | re.DOTALL,
)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)(?::?[-=]([^{}]*(?:\{[^{}]*\}[^{}]*)*))?\}")
ARITHMETIC = re.compile(r"\$\(\(([^$]*)\)\)")
NAME_IN_ARITHMETIC = re.compile(r"[A-Za-z_]\w*")
LONGEST_VALUE = 1000  # of a variable: longer ones hold lists of flags, never a size


@dataclass(frozen=True)
class Word:
    """A word of a script, without its quotes. `opens`: it stands where a command begins."""

    text: str
    quoted: bool
    opens: bool


def words_of(text: str) -> Iterator[Word]:
    """The words of a shell script, comments left out.

    >>> [word.text for word in words_of("A=( --x 'a b' ) # no")]
    ['A=(', '--x', 'a b', ')']
    """
    parts: list[str] = []
    quoted, opens, at = False, True, 0
    while at < len(text):
        part = PART.match(text, at)
        assert part is not None  # the last alternative matches any character
        at = part.end()
        kind = part.lastgroup or ""
        if kind in ("gap", "end"):
            if parts or quoted:
                yield Word("".join(parts), quoted, opens)
                parts, quoted, opens = [], False, False
            opens = opens or kind == "end"
        elif kind == "comment" and not parts and not quoted:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        else:
            quoted = quoted or kind in ("single", "double")
            parts.append(part[kind].replace('\\"', '"') if kind == "double" else part[kind])
    if parts or quoted:
        yield Word("".join(parts), quoted, opens)


@dataclass
class Shell:
    """The variables of a script, as far as it sets them itself."""

    values: dict[str, str] = field(default_factory=dict)
    seen: dict[str, dict[str, None]] = field(default_factory=dict)  # every value a name was given
    open_names: set[str] = field(default_factory=set)  # those that depend on a condition

    def assign(self, name: str, value: str, *, in_branch: bool) -> None:
        """Remember a value; one that a condition may replace by another is not known."""
        filled = self.fill_in(value) if len(value) <= LONGEST_VALUE else ""
        self.values[name] = filled if len(filled) <= LONGEST_VALUE else ""
        self.seen.setdefault(name, {})[self.values[name]] = None
        if in_branch:
            self.open_names.add(name)

    def value(self, name: str) -> str | None:
        """What the script says this variable is, if it says one thing."""
        return None if name in self.open_names and len(self.seen[name]) > 1 else self.values.get(name)

    def fill_in(self, text: str) -> str:
        """The text with its variables and sums replaced where they are known; what is not keeps its $."""
        for _ in range(3):  # a default may hold a variable itself
            text = VARIABLE.sub(lambda found: self._replacement(found), text)
        return ARITHMETIC.sub(lambda found: self._result(found), text)

    def _replacement(self, found: re.Match[str]) -> str:
        value = self.value(found[1] or found[2])
        if value is None and found[2] not in self.open_names:
            value = found[3]  # the default of ${NAME:-default}
        return found[0] if value is None else value[:LONGEST_VALUE]

    def _result(self, found: re.Match[str]) -> str:
        try:
            return str(evaluate(NAME_IN_ARITHMETIC.sub(lambda name: self.value(name[0]) or name[0], found[1])))
        except ValueError:
            return found[0]

    def resolve(self, text: str) -> str | Unknown:
        """The value of an argument."""
        if len(text) > 100 * LONGEST_VALUE:
            return Unknown(text, "it is too long")
        filled = self.fill_in(text)
        if "$" not in filled and "`" not in filled:
            return filled
        for name in NAME_IN_ARITHMETIC.findall(filled):
            if name in self.open_names:
                values = " or ".join(list(self.seen[name])[:6])
                return Unknown(text, f"{name} is {values}, depending on a condition of the script")
        return Unknown(text, "the text does not set it")
