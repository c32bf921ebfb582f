"""Parses the values in a Megatron file: whole numbers, switches, words, lists with one number per layer.

The file's text is kept as it is until a value is needed, because only then its type is clear: `32` is a size after `--num-layers`
and "every 32nd layer" after `--moe-layer-freq`, which also accepts `([0]*3+[1]*58)`. Such expressions are evaluated as Megatron
does, but from their syntax tree and within bounds: no text of a file is ever executed. A value that cannot be known (a variable
that the script does not set) is an `Unknown`: it is an error only where it is needed.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gemmscope.errors import UserError, shown
from gemmscope.model.limits import LARGEST, check_size
from gemmscope.model.python_code import evaluate
from gemmscope.toml import FactTable, load_data

FACTS = load_data("gemmscope.model", "megatron.toml")
"""Names of settings, and what is known about them."""
SIZE_LIKE = re.compile(r"num_\w+|\w+_(?:size|dim|rank|layers|types|pattern|heads|groups|experts)")
"""Names of settings that suggest that they change shapes."""


@dataclass(frozen=True)
class Unknown:
    """A value that the file does not determine: as written, and why it cannot be known."""

    text: str
    why: str


@dataclass(frozen=True)
class MegatronSettings:
    """The settings of a file by Megatron-core name: text from arguments, typed values from YAML. None: not given.

    The other fields are how the file format spells settings, and the framework's defaults.
    """

    values: Mapping[str, object]
    spell: Callable[[str], str]  # the name as it is written in the file
    assign: str  # name and value: "{} {}" for flags, "{}: {}" for YAML
    defaults: FactTable  # of the framework

    def example(self, name: str) -> str:
        """The setting with a valid value, as it is written in the file."""
        return self.assign.format(self.spell(name), FACTS["examples"].get(name, 1))

    def given(self, name: str) -> bool:
        return self.values.get(name) is not None

    def single(self, name: str) -> object:
        """A value that the file sets, and that is known and not a collection."""
        value, what = self.values[name], self.spell(name)
        if isinstance(value, Unknown):
            raise UserError(
                f"the value of {what} is not known: {value.text[:60]} ({value.why})", f"write the value itself after {what}"
            )
        if isinstance(value, (list, tuple, dict, set)):
            kind = "mapping" if isinstance(value, dict) else "list"
            raise UserError(f"{what} must be a single value, not a {kind}", f"write one value after {what}")
        return value

    def whole(self, name: str) -> int:
        return whole_number(self.spell(name), self.single(name), f"for example {self.example(name)}")

    def size(self, name: str, limit: str, default: int) -> int:
        return self.maybe_size(name, limit) or default

    def maybe_size(self, name: str, limit: str) -> int | None:
        if not self.given(name):
            return None
        return check_size(self.spell(name), self.whole(name), limit, f"for example {self.example(name)}")

    def maybe_count(self, name: str, limit: str) -> int | None:
        """Like `maybe_size`, where 0 means that there are none."""
        if self.given(name) and self.whole(name) == 0:
            return None
        return self.maybe_size(name, limit)

    def flag(self, name: str, *, default: bool = False) -> bool:
        if not self.given(name):
            return default
        value = self.single(name)
        if isinstance(value, bool):
            return value
        flag = {"true": True, "1": True, "false": False, "0": False}.get(self.text(name).lower())
        if flag is None:
            raise UserError(f"{self.spell(name)} must be true or false, not {shown(value)}", "write true or false")
        return flag

    def text(self, name: str, default: str = "") -> str:
        """The value if it is text, else the default."""
        value = self.values.get(name)
        return value.strip() if isinstance(value, str) else default

    def word(self, name: str, known: Sequence[str], default: str) -> str:
        """One of the known words; case does not matter."""
        if not self.given(name):
            return default
        value = self.single(name)
        for choice in known:
            if self.text(name).lower() == choice.lower():
                return choice
        choices = " or ".join(known)
        raise UserError(f"{self.spell(name)} must be {choices}, not {shown(value)}", f"write {choices}")

    def numbers(self, name: str) -> int | list[int]:
        """A whole number or a list of them that the file sets. Text may be a Python expression."""
        what, value = self.spell(name), self.values[name]
        if isinstance(value, (list, tuple)) and len(value) <= LARGEST["layers"]:
            return [whole_number(f"each number of {what}", item) for item in value]
        if not isinstance(value, str):
            return whole_number(what, self.single(name))
        try:
            return evaluate(value)
        except ValueError:
            raise UserError(
                f"{what} must be a number or a list of numbers, not {shown(value)}", "for example 1, or ([0]*3+[1]*58)"
            ) from None

    def layers(self, name: str, count: int, nth: Callable[[int, int], bool]) -> list[bool] | None:
        """Which layers a setting chooses: a number N by the rule `nth(layer, N)`, a list with a 1 for each."""
        if not self.given(name):
            return None
        what, value = self.spell(name), self.numbers(name)
        if isinstance(value, int):
            check_size(what, value, "layers")
            return [nth(layer, value) for layer in range(count)]
        if len(value) != count or set(value) - {0, 1}:
            raise UserError(
                f"{what} lists {len(value)} layers, but {self.spell('num_layers')} is {count}"
                if len(value) != count
                else f"{what} must contain only 0 and 1",
                f"write one 0 or 1 for each of the {count} layers, such as ([0]*1+[1]*{count - 1}), or N for every N-th layer",
            )
        return [*map(bool, value)]


def all_but_every(layer: int, number: int) -> bool:
    """Not every N-th layer, but the others.

    >>> [all_but_every(layer, 4) for layer in range(4)]
    [True, True, True, False]
    """
    return (layer + 1) % number != 0


def whole_number(what: str, value: object, hint: str = "for example 1") -> int:
    """A whole number, from text or from YAML; `hint` is shown where it is not one.

    >>> whole_number("--num-layers", "32")
    32
    """
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9][0-9_]{0,17}", value.strip()):
        return int(value.strip().replace("_", ""))
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18:
        return value
    raise UserError(f"{what} must be a whole number, not {shown(value)}", hint)
