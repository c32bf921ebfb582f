"""Splits a shell script into words and follows the variables that it sets. Nothing is run."""

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
LENGTH = re.compile(r"\$\{#(\w+)\}")  # how many characters a value has
DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?=([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")  # also sets the variable
ARITHMETIC = re.compile(r"\$\(\(((?:[^$()]|\((?:[^$()]|\([^$()]*\))*\))*)\)\)")
NAME_IN_ARITHMETIC = re.compile(r"[A-Za-z_]\w*")
ARITHMETIC_COMMAND = re.compile(r"^([ \t]*)(?:\(\(|let[ \t]+['\"]?)([^;\n'\"]*?)(?:\)\)|['\"])?[ \t]*$", re.MULTILINE)
CHANGE = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:([-+*/]?)=(?!=)\s*(.+)|(\+\+|--))\s*")  # of a variable, in such a command
LONGEST_VALUE = 1000  # of a variable: longer ones are lists of flags, never a size


@dataclass(frozen=True)
class Word:
    """A word of a script, without its quotes. `opens`: it is the first word of a command, after the separators `before`."""

    text: str
    quoted: bool
    opens: bool
    before: str = ""


def shell_words(text: str) -> Iterator[Word]:
    """The words of a shell script without its comments.

    >>> [word.text for word in shell_words("A=( --x 'a b' ) # no")]
    ['A=(', '--x', 'a b', ')']
    """
    parts: list[str] = []
    quoted, before, at = False, "\n", 0
    while at < len(text):
        part = PART.match(text, at)
        assert part is not None  # the last alternative matches any character
        at = part.end()
        kind = part.lastgroup or ""
        if kind in ("gap", "end"):
            if parts or quoted:
                yield Word("".join(parts), quoted, bool(before), before)
                parts, quoted, before = [], False, ""
            before += part[kind] if kind == "end" else ""
        elif kind == "comment" and not parts and not quoted:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        else:
            quoted = quoted or kind in ("single", "double")
            parts.append(part[kind].replace('\\"', '"') if kind == "double" else part[kind])
    if parts or quoted:
        yield Word("".join(parts), quoted, bool(before), before)


def with_assignments(text: str) -> str:
    """The script with its arithmetic commands written as assignments.

    >>> with_assignments("((N *= 2))\\nlet M=N+1")
    'N=$((N * (2)))\\nM=$((N+1))'
    """

    def assignment(command: re.Match[str]) -> str:
        change = CHANGE.fullmatch(command[2])
        if change is None:
            return command[0]
        name, operator, value, step = change.groups()
        if step:
            operator, value = step[0], "1"
        return f"{command[1]}{name}=$(({name} {operator} ({value})))" if operator else f"{command[1]}{name}=$(({value}))"

    return ARITHMETIC_COMMAND.sub(assignment, text)


@dataclass
class Shell:
    """The variables of a script, as far as it sets them itself."""

    values: dict[str, str] = field(default_factory=dict)
    assigned: dict[str, dict[str, None]] = field(default_factory=dict)  # every value that a name was given
    conditional: set[str] = field(default_factory=set)  # names that are set inside a condition

    def assign(self, name: str, value: str, *, in_branch: bool) -> None:
        """Remember a value. One that depends on a condition is known only if all its values are the same."""
        filled = self.fill_in(value) if len(value) <= LONGEST_VALUE else ""
        self.values[name] = filled if len(filled) <= LONGEST_VALUE else ""
        if in_branch:
            self.conditional.add(name)
        elif "$" not in filled:  # a later value replaces those of earlier conditions
            self.conditional.discard(name)
            self.assigned.pop(name, None)
        self.assigned.setdefault(name, {})[self.values[name]] = None

    def assign_defaults(self, text: str, *, in_branch: bool) -> None:
        """Remember the defaults that a text assigns in passing: `${NAME:=default}` sets NAME unless it has a value."""
        for name, default in DEFAULT.findall(text[:LONGEST_VALUE]):
            self.assign_defaults(default, in_branch=in_branch)
            if self.value(name) is None and not self._depends(name):
                self.assign(name, _without_quotes(default), in_branch=in_branch)

    def _depends(self, name: str) -> bool:
        """Whether a condition of the script gives the variable a value that is known."""
        return name in self.conditional and any("$" not in value for value in self.assigned[name])

    def value(self, name: str) -> str | None:
        """The variable's value, if the script gives it only one."""
        return None if name in self.conditional and len(self.assigned[name]) > 1 else self.values.get(name)

    def fill_in(self, text: str) -> str:
        """The text with its known variables and arithmetic replaced; unknown ones keep their $."""
        text = LENGTH.sub(self._length, text)
        for _ in range(3):  # a default may contain a variable itself
            text = VARIABLE.sub(self._replacement, text)
        return ARITHMETIC.sub(self._result, text)

    def _replacement(self, match: re.Match[str]) -> str:
        value = self.value(match[1] or match[2])
        if (value is None or "$" in value) and match[3] is not None and not self._depends(match[2]):
            value = _without_quotes(match[3])  # the default of ${NAME:-default}
        return match[0] if value is None else value[:LONGEST_VALUE]

    def _length(self, match: re.Match[str]) -> str:
        value = self.value(match[1])
        return match[0] if not value or "$" in value else str(len(value))

    def _result(self, match: re.Match[str]) -> str:
        result = self.computed(match[1])
        return match[0] if result is None else str(result)

    def computed(self, expression: str) -> int | list[int] | None:
        """The value of an arithmetic expression, in which variables have no $; None where it is not known."""
        try:
            return evaluate(NAME_IN_ARITHMETIC.sub(lambda name: self.value(name[0]) or name[0], expression))
        except ValueError:
            return None

    def resolve(self, text: str) -> str | Unknown:
        if len(text) > 100 * LONGEST_VALUE:
            return Unknown(text, "it is too long")
        filled = self.fill_in(text)
        if "$" not in filled and "`" not in filled:
            return filled
        for name in NAME_IN_ARITHMETIC.findall(filled):
            if name in self.conditional:
                values = " or ".join(list(self.assigned[name])[:6])
                return Unknown(text, f"{name} is {values}, depending on a condition of the script")
        return Unknown(text, "the script does not set it")


def _without_quotes(text: str) -> str:
    """The default of `${NAME:-"default"}` without the quotes around it."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
