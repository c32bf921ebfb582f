"""The values of Python code that is followed without running it: objects, imports, functions, and how large they may be."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

LONGEST_VALUE = 20_000  # items or characters
LARGEST_NUMBER = 10**12
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(eq=False)
class Record:
    """An object with its attributes, or an unknown value. `hidden`: why the value, or other attributes, are not known."""

    name: str  # of its class or, where it is hidden, as the code writes it
    values: dict[str, object] = field(default_factory=dict)
    hidden: str = ""
    imported: bool = False  # `hidden` says from where
    base: str = ""  # the known class that it is, or that its class has among its bases
    methods: tuple[str, ...] = ()  # those that classes in the files add to the base
    constructed: bool = False  # it is certainly an object: the code constructs it
    defaults: Mapping[str, object] = field(default_factory=dict)  # of attributes that the code does not set
    asked: dict[str, "Record"] = field(default_factory=dict)  # attributes that were read, but not set so far

    def get(self, name: str) -> object:
        """The value of an attribute, or a hidden record of it, which later assignments fill."""
        if name in self.values:
            return self.values[name]
        if name in self.defaults:
            return self.defaults[name]
        why = self.hidden or f"{self.name} has no {name} in the file"
        return self.asked.setdefault(name, Record(f"{self.name}.{name}", hidden=why))

    def known(self) -> dict[str, object]:
        """The attributes that the code sets, and those that have such attributes themselves."""
        filled = {name: record for name, record in self.asked.items() if name not in self.values and record.known()}
        return {**filled, **self.values}


@dataclass(eq=False)
class Module:
    """A file, and what its names stand for."""

    path: Path | None
    names: dict[str, object] = field(default_factory=dict)
    stars: list["Import"] = field(default_factory=list)  # from ... import *


@dataclass(frozen=True)
class Import:
    """A module, or a name of one, that is looked up where it is used."""

    importer: Module
    module: str  # "a.b"; with dots before it, where it is relative
    name: str = ""


@dataclass(frozen=True)
class Code:
    """A function or a class of a file. `around`: the variables of the function that it is inside of."""

    node: Function | ast.ClassDef
    module: Module
    around: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)


@dataclass
class Frame:
    """The names of one call. `branches`: how many conditions were undecided around the call."""

    module: Module
    names: dict[str, object]
    branches: int = 0
    uncertain: bool = False  # it may have returned earlier


def is_plain(value: object) -> bool:
    """Whether a value is a constant, or a collection of them."""
    if isinstance(value, (list, tuple, set)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


def is_bounded(value: object) -> bool:
    """Whether a value is small enough to go on with."""
    items, count = [value], 0
    while items and count <= LONGEST_VALUE:  # lists may share parts, so that they have far more items than memory holds
        one = items.pop()
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, (list, tuple, set)) else ()
        items += inner if len(inner) <= LONGEST_VALUE else ()
        count += len(one) if isinstance(one, (str, list, tuple, dict, set, range)) else 1
    return count <= LONGEST_VALUE + 1 and (not isinstance(value, (int, float)) or abs(value) <= LARGEST_NUMBER)


def copied(value: object, copies: dict[int, Record] | None = None) -> object:
    """A deep copy of a value. Code and imports stay the same."""
    copies = {} if copies is None else copies
    if isinstance(value, Record):
        if id(value) not in copies:
            copies[id(value)] = copy = replace(value, values={}, asked={})
            copy.values |= {name: copied(inner, copies) for name, inner in value.known().items()}
        return copies[id(value)]
    if isinstance(value, (list, tuple)):
        return type(value)(copied(item, copies) for item in value)
    return {key: copied(inner, copies) for key, inner in value.items()} if isinstance(value, dict) else value


def repeats_too_often(left: object, right: object) -> bool:
    """Whether a product is a text or list that is too long."""
    lengths = [len(value) for value in (left, right) if isinstance(value, (str, list, tuple))]
    return any(length * value > LONGEST_VALUE for length in lengths for value in (left, right) if isinstance(value, int))
