"""Limits of sizes, and checks that reject invalid sizes."""

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
    if value < 1:
        raise UserError(f"{what} must be at least 1, not {shown(value)}", hint)
    if value > LARGEST[limit]:
        raise UserError(f"{what} must be at most {LARGEST[limit]}, not {shown(value)}", hint)
    return value


def check_optional(what: str, value: object, limit: str) -> None:
    """`check_size`, where None is valid too."""
    if value is not None:
        check_size(what, value, limit)


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
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    known = sorted({*small, *(number // divisor for divisor in small)})
    return ", ".join(map(str, known[:most])) + (", …" if len(known) > most else "")


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
