"""Values as people type them: 8k, 15.5T, 3%, lists of names, shapes of GEMMs, sweeps.

`k` of a size is 1024, because a sequence length of 8k is 8192. `k` of a token count is 1000, because 2T tokens are 2e12. The
functions for numbers raise a `ValueError` whose text is the message, the others a `UserError`.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from math import isinf
from typing import Any

from gemmscope.errors import UserError, option, reject, shown
from gemmscope.toml import load_data

Shape = tuple[int, int, int]
Axes = Mapping[str, Sequence[int]]
GEMM_SIZES = ("m", "k", "n")
"""The sizes of a bare GEMM, as a sweep varies them."""

NUMBER = re.compile(r"([+-]?[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,2})?)([kmgbt]?)", re.ASCII | re.IGNORECASE)
BINARY = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
MOST_DIGITS = 40
SIZES, TOKENS = "4096, 8k or 1M", "2T, 15.5T or 1e12"
SHAPE_HINT = "for example --shapes 1024,4096 for squares, --shapes 8192x4096x14336 for MxKxN, or --shapes default"
LARGEST_SIDE = 10**12  # larger than any real size
MOST_SHAPES = 1000
SWEEP_HINT = "for example --sweep hidden_size=2k:16k:1k or --sweep micro_batch_size=1,2,4,8"
MOST_VALUES = 100_000
VARY_HINT = "for example --vary hidden=5120,6144 or --vary layers=32,40"


def size(text: str) -> int:
    """A size, or a number of things. `k`, `M`, `G` and `T` are powers of 1024.

    >>> size("4096"), size("8k"), size("8_192"), size("1M"), size("1.5k"), size("1e3")
    (4096, 8192, 8192, 1048576, 1536, 1000)
    """
    value = _value(text, BINARY)
    if value is None or value.denominator != 1:
        raise ValueError(f"{shown(text)} is not a whole number such as {SIZES}")
    return value.numerator


def token_count(text: str) -> float:
    """The tokens of a training run. `k`, `M`, `B` and `T` are powers of 1000.

    >>> token_count("2T"), token_count("15.5T"), token_count("1e12"), token_count("300B")
    (2000000000000.0, 15500000000000.0, 1000000000000.0, 300000000000.0)
    """
    value = _value(text, DECIMAL)
    if value is None:
        raise ValueError(f"{shown(text)} is not a number of tokens such as {TOKENS}")
    return float(value)


def percentage(text: str) -> float:
    """`3%` or `0.03`. A plain 3 is rejected, because it would mean 300%.

    >>> percentage("3%"), percentage("0.01")
    (0.03, 0.01)
    """
    value = _value(text.strip().removesuffix("%"), {"": 1})
    if value is None or not 0 <= (value := value / (100 if text.strip().endswith("%") else 1)) < 1:
        raise ValueError(f"must be a percentage such as 3%, or a fraction such as 0.03, got {shown(text)}")
    return float(value)


def _value(text: str, units: dict[str, int]) -> Fraction | None:
    """The exact number; None if the text is not one."""
    match = NUMBER.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        return None
    digits = match[1].replace("_", "")
    if len(digits) > MOST_DIGITS:  # Python refuses to read thousands of them
        return Fraction(10**MOST_DIGITS)
    return Fraction(digits) * units[match[2].lower()]


def number(text: str) -> float:
    """A number, as it is typed."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{shown(text)} is not a number") from None
    if isinf(value) and "inf" not in text.lower():
        raise ValueError(f"{shown(text)} is too large")
    return value


def names(given: str | Iterable[str | Iterable[str]]) -> list[str]:
    """Names separated by commas, one by one, or in lists.

    >>> names("fp8current, mxfp8"), names(["b300, h200", ["a100"]])
    (['fp8current', 'mxfp8'], ['b300', 'h200', 'a100'])
    """
    parts: list[Any] = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    listed = [name for part in parts for name in ([part] if isinstance(part, str) or not isinstance(part, Iterable) else part)]
    if wrong := [name for name in listed if not isinstance(name, str)]:
        raise UserError(f"{shown(wrong[0])} is not a name", "for example job.forecast('b300', 'h200', recipes=['mxfp8'])")
    return [part.strip() for name in listed for part in name.split(",") if part.strip()]


def stage_layers(text: str) -> tuple[int, ...]:
    """The layers of each pipeline stage: 16,15,15,15."""
    try:
        return tuple(size(part) for part in text.split(","))
    except ValueError:
        raise UserError(
            f"{option('pp_layers')} must be a list of whole numbers, got {shown(text)}",
            f"for example {option('pp_layers', '16,15,15,15')}",
        ) from None


def whole_numbers(name: str) -> Callable[[str], list[int]]:
    """Reads the numbers that an option with this name is restricted to."""

    def read(text: str) -> list[int]:
        try:
            return [size(part) for part in text.split(",")]
        except ValueError:
            raise UserError(
                f"{option(name)} must be whole numbers separated by commas, got {shown(text)}",
                f"for example {option(name, '1,2,4')}",
            ) from None

    return read


def lower_names(text: str) -> list[str]:
    """Names separated by commas, in lower case."""
    return [part.strip().lower() for part in text.split(",") if part.strip()]


def bare_shapes(text: str) -> list[Shape]:
    """Squares and MxKxN triplets, separated by commas; empty for `default`.

    >>> bare_shapes("1024, 8kx4kx14336"), bare_shapes("default")
    ([(1024, 1024, 1024), (8192, 4096, 14336)], [])
    """
    if text.strip().lower() == "default":
        return []
    parts = [part.strip() for part in text.split(",")]
    many = f"--shapes names {len(parts)} shapes, more than {MOST_SHAPES}"
    reject((not any(parts), "--shapes is empty", SHAPE_HINT), (len(parts) > MOST_SHAPES, many, "name fewer"))
    return [shape(part) for part in parts if part]


def shape(text: str) -> Shape:
    """One square or one MxKxN triplet."""
    parts = text.strip().lower().split("x")
    try:
        sides = [size(part) for part in parts]
    except ValueError:
        sides = []
    if len(sides) not in (1, 3) or "-" in text or "+" in text:
        raise UserError(f"{shown(text)} is not a shape: it must be one size, or three as MxKxN", SHAPE_HINT)
    m, k, n = (min(side, LARGEST_SIDE) for side in sides * (3 // len(sides)))
    return m, k, n


def axes(texts: Iterable[str]) -> Axes:
    """The sizes to vary with their values, from the texts of `--sweep`."""
    varied: dict[str, Sequence[int]] = {}
    for text in texts:
        name, values = axis(text)
        if name in varied:
            raise UserError(f"--sweep varies {name} twice", "vary another size, or give all its values in one --sweep")
        varied[name] = values
    return varied


def axis(text: str) -> tuple[str, Sequence[int]]:
    """`hidden_size=2k:16k:1k` or `micro_batch_size=1,2,4`.

    >>> axis("hidden-size=1k:3k:1k"), axis("mbs=1,2")
    (('hidden_size', range(1024, 3073, 1024)), ('micro_batch_size', [1, 2]))
    """
    typed, _, values = text.partition("=")
    name, parts = f"--{typed.strip().replace('_', '-')}", values.split(":")
    name = load_data("gemmscope.options", "spellings.toml").get(name, name).removeprefix("--").replace("-", "_")
    is_range = len(parts) == 3
    try:
        if "-" in values:
            raise ValueError  # noqa: TRY301  # no size is below zero
        numbers = [size(part) for part in (parts if is_range else values.split(","))]
    except ValueError:
        raise UserError(f"--sweep {shown(text)} is neither NAME=FIRST:LAST:STEP nor NAME=VALUE,VALUE,…", SWEEP_HINT) from None
    if not is_range:
        return name, numbers
    first, last, step = numbers
    given = f"--sweep {shown(text)}"
    reject(
        (step == 0, f"{given} has a step of zero", SWEEP_HINT),
        (first > last, f"{given} ends before it begins", f"swap the ends: {name}={last}:{first}:{step}"),
        (last - first >= MOST_VALUES * step, f"{given} has more than {MOST_VALUES} values", "take larger steps"),
    )
    return name, range(first, last + 1, step)


def variants(texts: Iterable[str]) -> Axes:
    """The sizes of a model that `--vary` varies, with their values."""
    varied: dict[str, list[int]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = name.strip().replace("-", "_")
        try:
            numbers = [size(part) for part in values.split(",")]
        except ValueError:
            raise UserError(f"--vary {shown(text)} is not NAME=VALUE,VALUE,…", VARY_HINT) from None
        if name in varied:
            raise UserError(f"--vary varies {name} twice", "give all its values in one --vary")
        varied[name] = numbers
    return varied


def prices(text: str) -> float | Mapping[str, float]:
    """A price, or prices by GPU.

    >>> prices("2.5"), prices("h200=2.5, b300=4")
    (2.5, {'h200': 2.5, 'b300': 4.0})
    """
    try:
        if "=" not in text:
            return number(text)
        return {name.strip().lower(): number(price) for name, _, price in [part.partition("=") for part in text.split(",")]}
    except ValueError:
        raise UserError(
            f"{option('price')} {shown(text)} is not a price",
            f"per GPU-hour: {option('price', 2.5)}, or {option('price', 'h200=2.5,b300=4')}",
        ) from None
