"""Puts a launch script into the order in which it runs: functions where they are called, with the arguments of the call.

`train() { torchrun ... --tensor-model-parallel-size $1; }` and `train 4` far below: without this, the reader would meet the flag
before the script has set its variables, and without its argument. Text that the script only shows (a here-document after `cat`)
is left out. Nothing is run.
"""

import re
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from gemmscope.model.megatron_shell import shell_words

DEFINITION = re.compile(
    r"(?P<indent>[ \t]*)(?:function[ \t]+(?P<named>\w+)(?:[ \t]*\(\))?|(?P<name>[A-Za-z_]\w*)[ \t]*\(\))[ \t]*(?P<rest>\{.*)?$"
)
CLOSING = re.compile(r"([ \t]*)\}(?!\w)")
SHOWN = re.compile(r"(?:^|(?<=[\s);&{]))cat[ \t]*(?:1?>&2[ \t]*)?<<-?[ \t]*(['\"]?)(\w+)\1[ \t]*(?:1?>&2)?[ \t]*$")
ALL_ARGUMENTS = re.compile(r"\$[@*]|\$\{[@*]")
ARGUMENT = re.compile(r"\$([1-9])|\$\{([1-9])(?::?[-=][^{}]*(?:\{[^{}]*\}[^{}]*)*)?\}")
LONGEST = 200_000  # characters of a script, and of what its calls add; a longer one is read as it stands
DEEPEST = 4  # functions that call functions


@dataclass(frozen=True)
class Function:
    """A function: its body, and the numbers of the lines that define it."""

    name: str
    body: str
    lines: range


def in_order(text: str) -> str:
    """The script without text that it only shows, and with the functions that it calls in the place of their calls.

    >>> in_order("go() {\\n  run --tp ${1:-1}\\n}\\nTP=2\\ngo $TP")
    'TP=2\\n  run --tp $TP'
    """
    lines = list(_without_shown(text.split("\n")))
    functions = _functions(lines) if len(text) <= LONGEST else {}
    if not functions:
        return "\n".join(lines)
    calls = _Calls(functions)
    defined = {number for function in functions.values() for number in function.lines}
    in_place = [part for number, line in enumerate(lines) if number not in defined for part in calls.lines_for(line)]
    # Functions without a call stay: another script may call them.
    uncalled = [number for name, function in functions.items() if name not in calls.seen for number in function.lines]
    return "\n".join([*(lines[number] for number in uncalled), *in_place])


def _without_shown(lines: list[str]) -> Iterator[str]:
    """Without the here-documents of `cat` that go to the screen."""
    last = {line.strip(): number for number, line in enumerate(lines)}
    end = ""
    for number, line in enumerate(lines):
        if end:
            end = "" if line.strip() == end else end
        elif (shown := SHOWN.search(line)) and last.get(shown[2], 0) > number:
            end = shown[2]
            yield line[: shown.start()]
        else:
            yield line


def _functions(lines: list[str]) -> dict[str, Function]:
    """The functions by name. One that hands all its arguments on is left as it is: the flags of its calls count there."""
    closing: dict[str, list[int]] = {}  # lines that begin with a closing brace, by their indentation
    for number, line in enumerate(lines):
        if match := CLOSING.match(line):
            closing.setdefault(match[1], []).append(number)
    functions: dict[str, Function] = {}
    number = 0
    while number < len(lines):
        function = _function(lines, number, closing)
        if function is not None and not ALL_ARGUMENTS.search(function.body):
            functions[function.name] = function
        number = number + 1 if function is None else function.lines.stop
    return functions


def _function(lines: list[str], first: int, closing: dict[str, list[int]]) -> Function | None:
    """The function whose definition begins in this line. It ends with a brace of the same indentation, or in the same line."""
    defined = DEFINITION.match(lines[first])
    if defined is None:
        return None
    name, rest = defined["named"] or defined["name"], (defined["rest"] or "").strip()
    if len(rest) > 1 and rest.endswith("}"):
        return Function(name, rest[1:-1].strip().rstrip(";"), range(first, first + 1))
    start = first + 1
    if not rest:  # the brace is alone in the next line
        if start >= len(lines) or lines[start].strip() != "{":
            return None
        start += 1
    ends = closing.get(defined["indent"], [])
    last = bisect(ends, start - 1)
    if last == len(ends):
        return None
    return Function(name, "\n".join([rest[1:], *lines[start : ends[last]]]).strip("\n"), range(first, ends[last] + 1))


class _Calls:
    """Finds calls of functions, and puts the bodies in their place."""

    def __init__(self, functions: dict[str, Function]) -> None:
        names = "|".join(functions)
        self._functions = functions
        self._command = re.compile(rf"[ \t]*({names})((?:[ \t]+[^;&|\\]*)?)(?:[;&|].*)?$")
        self._substitution = re.compile(rf"\$\(({names})((?:[ \t][^()]*)?)\)")
        self._left = LONGEST
        self.seen: set[str] = set()

    def lines_for(self, line: str, depth: int = 0) -> Iterator[str]:
        """The line, after the bodies of the functions whose output it uses; or the body of the function that it calls."""
        command = self._command.match(line)
        calls = [command] if command else list(self._substitution.finditer(line))
        for call in calls:
            if self._left < 0 or depth == DEEPEST:
                continue
            self.seen.add(call[1])
            body = _with_arguments(self._functions[call[1]].body, [word.text for word in shell_words(call[2])])
            self._left -= len(body) + len(line)
            for inner in body.split("\n"):
                yield from self.lines_for(inner, depth + 1)
        if not command:
            yield line


def _with_arguments(body: str, arguments: list[str]) -> str:
    """The body with `$1` and `${1:-default}` replaced, as far as the call has these arguments."""

    def replacement(match: re.Match[str]) -> str:
        number = int(match[1] or match[2])
        return arguments[number - 1] if number <= len(arguments) else match[0]

    return ARGUMENT.sub(replacement, body)
