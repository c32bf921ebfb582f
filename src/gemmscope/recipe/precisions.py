"""The precisions of GEMMs, the number formats and the scales of `precisions.toml`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from pydantic import TypeAdapter

from gemmscope.errors import MissingFactError
from gemmscope.toml import FactTable, complete, load_data

FILE = "recipe/precisions.toml"
precision_facts = cache(partial(load_data, "gemmscope.recipe", "precisions.toml"))


@dataclass(frozen=True)
class Precision:
    """What the operands of a GEMM are. `precisions.toml` explains each fact."""

    name: str
    title: str
    operands: tuple[str, ...]
    bytes: float
    operand_bytes: float
    in_traces: str
    scales: tuple[str, ...] = ()
    rates: tuple[str, ...] = ()
    timed_as: str = ""
    aliases: tuple[str, ...] = ()
    first_capability: str = "0.0"
    usual: bool = False
    weight_only: bool = False
    torch_type: str = ""
    usual_ratio: float = 0.0

    @property
    def low(self) -> bool:
        """Whether its GEMMs multiply fewer than 16 bits.

        >>> [one.name for one in precisions().values() if one.low]
        ['nvfp4', 'fp8', 'mxfp8', 'fp8-block', 'int8']
        """
        return self.bytes < 2 and bool(self.rates)

    @property
    def rate(self) -> str:
        """The rate of a GPU that holds for its GEMMs."""
        return str(self.fact("rates")[0])

    def fact(self, name: str) -> Any:
        """A fact that precisions have whose GEMMs are forecast."""
        if not (value := getattr(self, name)):
            raise MissingFactError(FILE, f"precision.{self.name}.{name}")
        return value

    def runs_on(self, rates: Iterable[str], capability: tuple[int, int]) -> bool:
        """Whether tensor cores with these rates multiply it."""
        major, minor = self.first_capability.split(".")
        return self.rate in rates and capability >= (int(major), int(minor))


@cache
def precisions() -> Mapping[str, Precision]:
    """All precisions by name, of rising precision."""
    read = TypeAdapter(Precision).validate_python
    table = precision_facts()["precision"]
    own = {name: {"name": name, "in_traces": facts.get("in_traces", facts["title"])} for name, facts in table.items()}
    return FactTable({name: read(complete(Precision, facts, **own[name])) for name, facts in table.items()}, FILE, "precision")


@cache
def timed_precisions() -> tuple[str, ...]:
    """Those whose GEMMs were measured, so that they can be forecast.

    >>> timed_precisions()
    ('nvfp4', 'fp8', 'mxfp8', 'fp8-block', 'bf16')
    """
    return tuple(name for name, known in precisions().items() if known.timed_as == name)


@cache
def precision_with(operands: frozenset[str], scales: str) -> Precision:
    """The precision of GEMMs whose operands have these formats and scales.

    >>> precision_with(frozenset({"e4m3", "e5m2"}), "block128").title
    'FP8 blocks'
    >>> precision_with(frozenset({"e3m2"}), "row")
    Traceback (most recent call last):
    gemmscope.errors.MissingFactError: a fact is missing: recipe/precisions.toml has no precision with e3m2 values and row scales
    add precision with e3m2 values and row scales to src/gemmscope/recipe/precisions.toml (see CONTRIBUTING.md)
    """
    for known in precisions().values():
        if scales in known.scales and _multiplies(known, operands):
            return known
    raise MissingFactError(FILE, f"precision with {' and '.join(sorted(operands))} values and {scales} scales")


def _multiplies(known: Precision, operands: frozenset[str]) -> bool:
    """Whether operands of these formats have this precision. Formats of one width stand for each other, such as e4m3 and e5m2; of
    a precision with several widths, all are needed."""
    formats = frozenset(known.operands)
    return formats == operands or (operands <= formats and _widths(formats) == _widths(operands))


def _widths(formats: frozenset[str]) -> set[int]:
    return {number_format(name)["bits"] for name in formats}


@cache
def precision_shown(number_format: str, scales: str | None) -> Precision:
    """The precision of a kernel whose name shows a format, and perhaps how its values are scaled.

    >>> precision_shown("e4m3", "block32").title, precision_shown("e5m2", None).title, precision_shown("e2m1", "tensor").title
    ('MXFP8', 'FP8', 'NVFP4')
    """
    known = [known for known in precisions().values() if _multiplies(known, frozenset({number_format}))]
    if not known:
        raise MissingFactError(FILE, f"precision with {number_format} values")
    return next((one for one in known if scales in one.scales), next(one for one in known if one.usual))


@cache
def precision_in_traces() -> Mapping[str, Precision]:
    """All precisions by the name that those of traces have.

    >>> precision_in_traces()["FP4"].name
    'nvfp4'
    """
    return {known.in_traces: known for known in precisions().values()}


def number_format(name: str) -> Any:
    """The facts of a number format.

    >>> number_format("e4m3")["bits"]
    8
    """
    return precision_facts()["format"][name]
