"""Reads launch scripts (shell) without running them: words, variables, functions and conditions.

A script is split into words, with quotes and comments understood, and the variables that it sets are followed (`Shell`).
`in_order` puts functions where they are called, with the arguments of the call: `train() { torchrun ... --tp $1; }` and `train 4`
far below would else give the flag before the script has set its variables. Text that the script only shows (a here-document after
`cat`) is left out. `Branches` follows conditions: `case $SIZE in 8B) ... ;; esac` runs one branch if the script sets SIZE. Where
it does not, every branch may run, and what they set depends on the condition. `[ $MOE = 1 ] && ARGS+=(...)` is a condition too,
which ends with its command.
"""

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from gemmscope.model.megatron_settings import Unknown
from gemmscope.model.python_code import evaluate

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
VARIABLE = re.compile(r"\$(\w+)|\$\{(#?\w+)(?::?[-=]([^{}]*(?:\{[^{}]*\}[^{}]*)*))?\}")  # with # its number of characters
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

    values: dict[str, dict[str, None]] = field(default_factory=dict)  # those that a name may have: several after a condition
    conditional: set[str] = field(default_factory=set)  # names that only conditions set, so that they may have no value

    def assign(self, name: str, value: str, *, in_branch: bool) -> None:
        """Remember a value. One that depends on a condition is known only if all its values are the same."""
        filled = self.fill_in(value) if len(value) <= LONGEST_VALUE else ""
        before = self.values.get(name, {})
        kept = in_branch or ("$" in filled and len(before) > 1)  # else it replaces those of earlier conditions
        if in_branch and not before and "$" not in filled:
            self.conditional.add(name)
        elif not kept:
            self.conditional.discard(name)
        elif (default := VARIABLE.fullmatch(filled)) and default[2] == name:  # of its own, which is among the values
            return
        self.values[name] = {**(before if kept else {}), filled if len(filled) <= LONGEST_VALUE else "": None}

    def assign_word(self, assigned: re.Match[str], *, in_branch: bool, quoted: bool) -> str:
        """Remember the value of an `ASSIGNMENT`, unless it is an array. Returns the value: it may have flags."""
        value = assigned[3]
        balanced = value.count("(") == value.count(")")
        # In quotes it is text, such as FREQ="([0]*3+[1]*58)"; else brackets are an array.
        if not value.startswith("(") or (balanced and quoted and "--" not in value):
            before = f"${{{assigned[1]}}}" if assigned[2] == "+=" else ""
            self.assign(assigned[1], before + value, in_branch=in_branch)
        return value[1:-1] if value.startswith("(") and value.endswith(")") and balanced else value  # an array of one word

    def assign_defaults(self, text: str, *, in_branch: bool) -> None:
        """Remember the defaults that a text assigns in passing: `${NAME:=default}` sets NAME unless it has a value."""
        for name, default in DEFAULT.findall(text[:LONGEST_VALUE]):
            self.assign_defaults(default, in_branch=in_branch)
            if self.value(name) is None and not self._depends(name):
                self.assign(name, _without_quotes(default), in_branch=in_branch)

    def _depends(self, name: str) -> bool:
        """Whether the script gives the variable a value that is known, perhaps besides others."""
        return any("$" not in value for value in self.values.get(name, ()))

    def value(self, name: str) -> str | None:
        """The variable's value, if the script gives it only one."""
        values = [*self.values.get(name, ())]
        return values[0] if len(values) == 1 else None

    def fill_in(self, text: str) -> str:
        """The text with its known variables and arithmetic replaced; unknown ones keep their $."""
        for _ in range(3):  # a default may contain a variable itself
            text = VARIABLE.sub(self._replacement, text)
        return ARITHMETIC.sub(self._result, text)

    def _replacement(self, match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if match[3] is not None and name in self.conditional:
            self.values[name][_without_quotes(match[3])] = None
        value = self.value(name.removeprefix("#"))
        if name.startswith("#"):
            return match[0] if not value or "$" in value else str(len(value))
        if (value is None or "$" in value) and match[3] is not None and not self._depends(match[2]):
            value = _without_quotes(match[3])  # the default of ${NAME:-default}
        return match[0] if value is None else value[:LONGEST_VALUE]

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
            if len(values := [*self.values.get(name, ())]) > 1:
                return Unknown(text, f"{name} is {' or '.join(values[:6])}, depending on a condition of the script")
        return Unknown(text, "the script does not set it")


def _without_quotes(text: str) -> str:
    """The default of `${NAME:-"default"}` without the quotes around it."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


DEFINITION = re.compile(
    r"""^(?P<indent>[ \t]*)(?:function[ \t]+(?P<named>\w+)(?:[ \t]*\(\))?|(?P<name>[A-Za-z_]\w*)[ \t]*\(\))[ \t]*\n?[ \t]*\{
        (?P<body>.*(?=\}[^\S\n]*$)                                      # in one line
               |(?:.*\n){1,500}?(?=(?P=indent)\}(?!\w)))                # or until a brace of the same indentation
        .*\n?""",
    re.MULTILINE | re.VERBOSE,
)
SHOWN = re.compile(  # a here-document of `cat` that goes to the screen
    r"""(?:^|(?<=[\s);&{]))cat[ \t]*(?:1?>&2[ \t]*)?<<-?[ \t]*(['\"]?)(\w+)\1[ \t]*(?:1?>&2)?[ \t]*\n
        (?:.*\n){0,500}?[ \t]*\2[ \t]*$""",
    re.MULTILINE | re.VERBOSE,
)
ALL_ARGUMENTS = re.compile(r"\$[@*]|\$\{[@*]")
ARGUMENT = re.compile(r"\$([1-9])|\$\{([1-9])(?::?[-=][^{}]*(?:\{[^{}]*\}[^{}]*)*)?\}")
LONGEST = 200_000  # characters of a script, and of what its calls add; a longer one is read as it stands
DEEPEST = 4  # functions that call functions


def in_order(text: str) -> str:
    """The script without text that it only shows, and with the functions that it calls in the place of their calls.

    A function that hands all its arguments on is left as it is: the flags of its calls count there.

    >>> in_order("go() {\\n  run --tp ${1:-1}\\n}\\nTP=2\\ngo $TP")
    'TP=2\\n  run --tp $TP'
    """
    if len(text) > LONGEST:
        return text
    text = SHOWN.sub("", text)
    definitions = [one for one in DEFINITION.finditer(text) if not ALL_ARGUMENTS.search(one["body"])]
    functions = {one["named"] or one["name"]: one for one in definitions}
    if not functions:
        return text
    names, called, left = "|".join(functions), set[str](), LONGEST
    command = re.compile(rf"[ \t]*({names})((?:[ \t]+[^;&|\\]*)?)(?:[;&|].*)?$")
    substitution = re.compile(rf"\$\(({names})((?:[ \t][^()]*)?)\)")

    def lines_for(line: str, depth: int = 0) -> Iterator[str]:
        """The line, after the bodies of the functions whose output it uses; or the body of the function that it calls."""
        nonlocal left
        whole = command.match(line)
        for call in [whole] if whole else substitution.finditer(line):
            if left >= 0 and depth < DEEPEST:
                called.add(call[1])
                body = _with_arguments(functions[call[1]]["body"].strip("\n"), [word.text for word in shell_words(call[2])])
                left -= len(body) + len(line)
                for inner in body.split("\n"):
                    yield from lines_for(inner, depth + 1)
        if not whole:
            yield line

    defined = {one.start() for one in functions.values()}
    outside = DEFINITION.sub(lambda one: "" if one.start() in defined else one[0], text)
    in_place = [part for line in outside.split("\n") for part in lines_for(line)]
    # Functions without a call stay: another script may call them.
    return "\n".join([*(one[0] for name, one in functions.items() if name not in called), *in_place])


def _with_arguments(body: str, arguments: list[str]) -> str:
    """The body with `$1` and `${1:-default}` replaced, as far as the call has these arguments."""

    def replacement(match: re.Match[str]) -> str:
        number = int(match[1] or match[2])
        return arguments[number - 1] if number <= len(arguments) else match[0]

    return ARGUMENT.sub(replacement, body)


State = Literal["taken", "skipped", "open"]
"""The state of a branch: it runs, it does not run, or that is not known."""
OTHERWISE: dict[State, State] = {"taken": "skipped", "skipped": "taken", "open": "open"}
"""The state of the command after `||`, by that of the command before."""

COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
"""Of numbers: those with a letter in tests, the others in arithmetic."""
NUMBER = re.compile("-?[0-9]{1,15}")
SHORT = re.compile(r"(?:^|[\n;])[ \t]*\[\[?[ \t][^\n]*\][ \t]*(?:&&|\|\|)")  # a condition without `if`
LONG = re.compile(r"(?:^|[\n;])[ \t]*(?:fi|esac)\b")
LONGEST_TEST = 12  # words


@dataclass
class Condition:
    """One `if`, `case` or `[ ... ] &&` ("and") that is not closed yet."""

    kind: Literal["if", "case", "and"]
    state: State = "open"
    before: list[State] = field(default_factory=list)  # the branches so far
    reading: Literal["test", "subject", "pattern", "operator", ""] = ""  # the part that the next words belong to
    collected: list[Word] = field(default_factory=list)  # the words of that part so far
    subject: str | None = None
    brackets: int = 0  # that its command has opened: an array may go on in the next line

    def enter(self, holds: bool | None) -> None:
        """Begin a branch, given whether its own condition holds; None: unknown. At most one branch runs."""
        first: State = "taken" if holds and set(self.before) <= {"skipped"} else "open"
        self.state = "skipped" if "taken" in self.before or holds is False else first
        self.before.append(self.state)
        self.reading, self.collected = "", []


@dataclass
class Branches:
    """The conditions around the current word."""

    shell: Shell
    stack: list[Condition] = field(default_factory=list)

    @property
    def skipped(self) -> bool:
        return any(condition.state == "skipped" for condition in self.stack)

    @property
    def open(self) -> bool:
        return any(condition.state == "open" for condition in self.stack)

    def consumes(self, word: Word) -> bool:
        """Whether the word belongs to the structure of a condition: keywords, tests and patterns."""
        while self.stack and self.stack[-1].kind == "and" and self._ends_short(self.stack[-1], word):
            self.stack.pop()
        top = self.stack[-1] if self.stack else None
        if top is not None and top.kind == "case" and not top.reading and ";;" in word.before:
            top.reading = "pattern"
        if word.opens and word.text in ("fi", "esac") and top is not None and top.kind == ("if" if word.text == "fi" else "case"):
            self.stack.pop()
            return True
        if top is not None and top.reading:
            self._read(top, word)
            return True
        if not word.opens or word.quoted:
            return False
        match word.text, top:
            case "[" | "[[", _:
                self.stack.append(Condition("and", reading="test", collected=[word]))
            case "if", _:
                self.stack.append(Condition("if", reading="test"))
            case "case", _:
                self.stack.append(Condition("case", reading="subject"))
            case "elif", Condition("if") as condition:
                condition.reading = "test"
            case "else", Condition("if") as condition:
                condition.enter(holds=True)
            case _:
                return False
        return True

    def _ends_short(self, top: Condition, word: Word) -> bool:
        """Whether the word is beyond the command of a condition without `if`. What follows `&&` and `||` belongs to it."""
        if top.reading == "test":
            return False
        if word.opens and top.brackets <= 0:
            if "&&" not in word.before and "||" not in word.before:
                return True
            if top.reading == "operator":
                holds = self._holds(top.collected)
                top.enter(holds if holds is None or "&&" in word.before else not holds)
            elif "||" in word.before:  # runs if the command before did not
                top.state = OTHERWISE[top.state]
        if not word.quoted:
            top.brackets += (word.text == "{") - (word.text == "}") + word.text.count("(") - word.text.count(")")
        return False

    def _read(self, top: Condition, word: Word) -> None:
        """Add the word to the part that is read, or end that part."""
        if top.kind == "if" and word.opens and word.text == "then":
            top.enter(self._holds(top.collected))
            return
        if top.reading == "subject" and word.text == "in" and top.collected:
            subject = self.shell.fill_in(top.collected[0].text)
            top.subject = subject if "$" not in subject and "`" not in subject else None
            top.reading, top.collected = "pattern", []
            return
        top.collected.append(word)
        if top.kind == "and" and word.text in ("]", "]]"):
            top.reading = "operator"
        elif top.reading == "pattern" and word.text.endswith(")"):
            patterns = [part.text.strip("()") for part in top.collected]
            top.enter(None if top.subject is None else any(fnmatchcase(top.subject, pattern) for pattern in patterns))

    def _holds(self, test: list[Word]) -> bool | None:
        """Whether a test holds: `[ $A = b ]`, `[[ -n $A ]]`, `[ $N -gt 2 ]`, `(( N > 2 ))`; None where that is not known."""
        if test and test[0].text.startswith("((") and test[-1].text.endswith("))"):
            return self._arithmetic_holds("".join(self.shell.fill_in(word.text) for word in test[:LONGEST_TEST])[2:-2])
        if not 3 < len(test) <= LONGEST_TEST or test[0].text not in ("[", "[[") or any(word.opens for word in test[1:]):
            return None
        operands = [self.shell.fill_in(word.text) for word in test[1:-1]]
        if any("$" in operand or "`" in operand for operand in operands):
            return None
        match operands:
            case ["-z" | "-n" as wanted, text]:
                return (text == "") == (wanted == "-z")
            case [left, "=" | "==" | "!=" as comparison, right]:
                equal = fnmatchcase(left, right) if test[0].text == "[[" else left == right
                return equal == (comparison != "!=")
            case [left, comparison, right] if comparison[:1] == "-" and NUMBER.fullmatch(left) and NUMBER.fullmatch(right):
                return COMPARISONS[comparison](int(left), int(right)) if comparison in COMPARISONS else None
        return None

    def _arithmetic_holds(self, test: str) -> bool | None:
        """Whether a comparison such as `N>2` holds."""
        left, comparison, right = [*re.split("(==|!=|<=|>=|<|>)", test, maxsplit=1), "!=", "0"][:3]
        first, second = self.shell.computed(left), self.shell.computed(right)
        if not isinstance(first, int) or not isinstance(second, int):
            return None
        return COMPARISONS[comparison](first, second)


PRINTERS, USAGE = ("echo", "printf"), "usage"
MOST_QUOTES = 3  # commands in quotes inside of others


@dataclass(frozen=True)
class Flag:
    """A flag without its dashes, with the words that follow it until the next one. The words before the first have no name."""

    name: str
    arguments: list[str | Unknown]
    end: str  # what ends them
    in_branch: bool  # whether a condition decides that it counts

    @property
    def value(self) -> str | Unknown:
        """The first word after it, or behind its equals sign."""
        return self.arguments[0] if self.arguments else Unknown("(none)", self.end)


def flags(text: str, shell: Shell, program: re.Pattern[str]) -> Iterator[Flag]:
    """The flags of a script that may run, in their order. `shell` and `program` as for `running_words`."""
    name, arguments, in_branch = "", list[str | Unknown](), False
    for word, inside in running_words(text, shell, program):
        if not word.startswith("--"):
            arguments.append(shell.resolve(word))
            continue
        yield Flag(name, arguments, f"the next word is {word[:60]}", in_branch)
        name, equals, value = word[2:].partition("=")
        arguments, in_branch = [shell.resolve(value)] if equals else [], inside
    yield Flag(name, arguments, "the text ends after it", in_branch)


def running_words(text: str, shell: Shell, program: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    """The words of a script that may run, without the ends of arrays, and whether a condition decides that.

    Functions are in the place of their calls, text in quotes that has flags counts as words, and `shell` follows the variables.
    Variables that hold flags but that nothing uses are left out, if the script runs the `program` itself: without a command of
    its own it only sets variables for others.
    """
    text = with_assignments(in_order(text))
    uses = re.sub(r"(^|\s)#.*", r"\1", text) if program.search(text) and "${!" not in text else ""

    def unused(word: Word) -> bool:
        assigned = ASSIGNMENT.fullmatch(word.text) if uses else None
        if assigned is None or not (assigned[3].startswith("(") or "--" in assigned[3]):
            return False
        return not re.search(rf"\b{assigned[1]}\b(?!\+?=)", uses) and not program.search(assigned[3])

    yield from _words(text, shell, unused, in_branch=False, depth=0)


def _words(text: str, shell: Shell, unused: Callable[[Word], bool], *, in_branch: bool, depth: int) -> Iterator[tuple[str, bool]]:
    has_branches = LONG.search(text) is not None or SHORT.search(text) is not None
    branches, printing, after_flag, brackets = Branches(shell), "", False, 0
    for word in shell_words(text):
        after_flag = after_flag and not word.opens
        if has_branches and (branches.consumes(word) or branches.skipped):
            continue
        if brackets > 0 or (not depth and not after_flag and unused(word)):  # the array of an unused variable may go on
            brackets += 0 if word.quoted else word.text.count("(") - word.text.count(")")
            continue
        inside, piece = in_branch or branches.open, word.text
        printing = piece if piece in PRINTERS and not word.quoted else "" if word.opens else printing
        if printing and (printing == USAGE or USAGE in piece.lower()):  # flags of the script itself
            printing = USAGE
            continue
        shell.assign_defaults(piece, in_branch=inside)
        if not after_flag and (assigned := ASSIGNMENT.fullmatch(piece)):
            piece = shell.assign_word(assigned, in_branch=inside, quoted=word.quoted)
        if word.quoted and "--" in piece and re.search(r"\s", piece) and depth < MOST_QUOTES:
            yield "--", inside  # a flag before the quotes has no value, nor has the last one inside
            yield from _words(piece, shell, unused, in_branch=inside, depth=depth + 1)
            yield "--", inside
            continue
        piece = _without_brackets(piece, quoted=word.quoted)
        after_flag = piece.startswith("--") and "=" not in piece
        yield piece, inside


def _without_brackets(piece: str, *, quoted: bool) -> str:
    """A word without the ends of the array or list that it stands in: `(--a`, `32)`, `"--a",`."""
    for left, right in ("()", "[]"):
        piece = piece.rstrip(",")
        surplus = piece.count(left) - piece.count(right)
        # A list of arguments begins with a flag or with quotes; no flag has a list as its value.
        if surplus == 1 and (left == "(" or quoted or piece.startswith("[-")):
            piece = piece.removeprefix(left)
        elif surplus == -1:
            piece = piece.removesuffix(right)
    return piece
