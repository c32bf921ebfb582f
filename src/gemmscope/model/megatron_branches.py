"""Follows the conditions of a launch script: which branch of an `if` or `case` runs, if the script itself determines it.

`case $SIZE in 8B) ... ;; esac` runs one branch if the script sets SIZE. Where it does not, every branch may run, and what they
set depends on the condition. `[ $MOE = 1 ] && ARGS+=(...)` is a condition too, which ends with its command. Nothing is executed
here.
"""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from gemmscope.model.megatron_shell import Shell, Word

State = Literal["taken", "skipped", "open"]
"""The state of a branch: it runs, it does not run, or that is not known."""
OTHERWISE: dict[State, State] = {"taken": "skipped", "skipped": "taken", "open": "open"}
"""The state of the command after `||`, by that of the command before."""

COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
NUMBER = re.compile("-?[0-9]{1,15}")
IN_ARITHMETIC = {"==": "-eq", "!=": "-ne", "<=": "-le", ">=": "-ge", "<": "-lt", ">": "-gt"}
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
        if "taken" in self.before or holds is False:
            self.state = "skipped"
        else:
            self.state = "taken" if holds and set(self.before) <= {"skipped"} else "open"
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
            return self._read(top, word)
        if not word.opens or word.quoted:
            return False
        if word.text in ("[", "[["):
            self.stack.append(Condition("and", reading="test", collected=[word]))
            return True
        if word.text in ("if", "case"):
            self.stack.append(Condition("if", reading="test") if word.text == "if" else Condition("case", reading="subject"))
            return True
        if top is not None and top.kind == "if" and word.text in ("elif", "else"):
            if word.text == "elif":
                top.reading = "test"
            else:
                top.enter(holds=True)
            return True
        return False

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

    def _read(self, top: Condition, word: Word) -> bool:
        if top.kind == "and":
            top.collected.append(word)
            top.reading = "operator" if word.text in ("]", "]]") else top.reading
        elif top.reading == "test":
            if word.opens and word.text == "then":
                top.enter(self._holds(top.collected))
            else:
                top.collected.append(word)
        elif top.reading == "subject":
            if word.text == "in" and top.collected:
                subject = self.shell.fill_in(top.collected[0].text)
                top.subject = subject if "$" not in subject and "`" not in subject else None
                top.reading, top.collected = "pattern", []
            else:
                top.collected.append(word)
        else:
            top.collected.append(word)
            if word.text.endswith(")"):
                patterns = [part.text.strip("()") for part in top.collected]
                top.enter(None if top.subject is None else any(fnmatchcase(top.subject, pattern) for pattern in patterns))
        return True

    def _holds(self, test: list[Word]) -> bool | None:
        """Whether a test holds: `[ $A = b ]`, `[[ -n $A ]]`, `[ $N -gt 2 ]`, `(( N > 2 ))`; None where that is not known."""
        if test and test[0].text.startswith("((") and test[-1].text.endswith("))"):
            return self._arithmetic_holds("".join(self.shell.fill_in(word.text) for word in test[:LONGEST_TEST])[2:-2])
        if not 3 < len(test) <= LONGEST_TEST or test[0].text not in ("[", "[[") or any(word.opens for word in test[1:]):
            return None
        operands = [self.shell.fill_in(word.text) for word in test[1:-1]]
        if any("$" in operand or "`" in operand for operand in operands):
            return None
        if len(operands) == 2 and operands[0] in ("-z", "-n"):
            return (operands[1] == "") == (operands[0] == "-z")
        if len(operands) != 3:
            return None
        left, comparison, right = operands
        if comparison in ("=", "==", "!="):
            equal = fnmatchcase(left, right) if test[0].text == "[[" else left == right
            return equal == (comparison != "!=")
        if comparison in COMPARISONS and NUMBER.fullmatch(left) and NUMBER.fullmatch(right):
            return COMPARISONS[comparison](int(left), int(right))
        return None

    def _arithmetic_holds(self, test: str) -> bool | None:
        """Whether a comparison such as `N>2` holds."""
        left, comparison, right = [*re.split("(==|!=|<=|>=|<|>)", test, maxsplit=1), "!=", "0"][:3]
        first, second = self.shell.computed(left), self.shell.computed(right)
        if not isinstance(first, int) or not isinstance(second, int):
            return None
        return COMPARISONS[IN_ARITHMETIC[comparison]](first, second)
