"""Limits of sizes, and checks that reject invalid sizes."""

from dataclasses import dataclass
from types import NoneType
from typing import Annotated, ClassVar, get_args, get_origin, get_type_hints

from gemmscope.errors import UserError, shown

# Far above anything ever trained: a larger number is a mistake in the input.
LARGEST = {
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "heads": 2**16,
    "head_dim": 2**16,
    "layers": 10_000,
    "vocab_size": 2**28,
    "experts": 2**16,
    "streams": 2**10,
    "micro_batch_size": 2**20,
    "sequence_length": 2**28,
    "parallel": 2**17,
}


def check_size(what: str, value: object, limit: str, hint: str = "") -> int:
    """Return `value` if it is a whole number from 1 to `LARGEST[limit]`; else raise a `UserError` that names it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{what} must be a whole number, not {shown(value)}", hint)
    if not 1 <= value <= LARGEST[limit]:
        wanted = f"at most {LARGEST[limit]}" if value > 1 else "at least 1"
        raise UserError(f"{what} must be {wanted}, not {shown(value)}", hint)
    return value


@dataclass(frozen=True)
class Size:
    """Annotates a field that is a size: its name in messages, and which limit of `LARGEST` applies."""

    name: str
    limit: str
    or_none: bool = False  # 0 means that there are none


class Checked:
    """Base of descriptions: their sizes are checked when one is made. None is valid where the type of the field allows it."""

    _sizes: ClassVar[list[tuple[str, Size, bool]]]  # the field, its size, whether it may be None

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls, include_extras=True)
        sizes = {name: hint for name, hint in hints.items() if get_origin(hint) is Annotated}
        cls._sizes = [(name, hint.__metadata__[0], NoneType in get_args(hint.__origin__)) for name, hint in sizes.items()]

    def __post_init__(self) -> None:
        for field, size, optional in self._sizes:
            value = getattr(self, field)
            if not (optional and value is None) and not (size.or_none and value == 0):
                check_size(size.name, value, size.limit)


def check_flag(what: str, value: object, hint: str) -> bool:
    """`value` if it is true or false, or a `UserError` that names it."""
    if not isinstance(value, bool):
        raise UserError(f"{what} must be true or false, not {shown(value)}", hint)
    return value


def divisors_text(number: int, most: int = 12) -> str:
    """Divisors for a message, the smallest first, at most `most` of them.

    >>> divisors_text(12), divisors_text(12, most=2)
    ('1, 2, 3, 4, 6, 12', '1, 2, …')
    """
    known = divisors(number)
    return ", ".join(map(str, known[:most])) + (", …" if len(known) > most else "")


def divisors(number: int) -> list[int]:
    """All divisors of a number, the smallest first."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def check_divides(parts: int, size: int, message: str, hint: str) -> None:
    """Raise a `UserError` with this message unless `parts` divides `size`; its hint ends with the numbers that do."""
    if size % parts:
        raise UserError(message, f"{hint}: {divisors_text(size)}")


def head_size(hidden: int, heads: int) -> int:
    """The default size of a head: hidden / heads, which must be a whole number.

    >>> head_size(4096, 32)
    128
    """
    if hidden % heads:
        raise UserError(
            f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}, and head_dim is not given",
            f"numbers of heads that divide {hidden}: {divisors_text(hidden, most=16)}; or set head_dim",
        )
    return hidden // heads
