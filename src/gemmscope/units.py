"""Numbers as text: units, speedups with their intervals, shares, lists of names."""

import re
from collections.abc import Iterable

from gemmscope.interval import Interval

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
MOST_NAMED = 8  # names in one sentence
LONGEST_KERNEL = 70  # characters of a kernel name


def si(value: float, unit: str) -> str:
    """Four digits and a prefix.

    >>> si(19.17e12, "FLOP"), si(0, "B"), si(999_999, "B")
    ('19.17 TFLOP', '0 B', '1.000 MB')
    """
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor * 0.99995:
            return f"{_four_digits(value / factor)} {prefix}{unit}"
    return f"{value:g} {unit}"


def _four_digits(number: float) -> str:
    decimals = 3 if number < 9.9995 else 2 if number < 99.995 else 1 if number < 999.95 else 0
    return f"{number:.{decimals}f}"


def parameters(count: int) -> str:
    """A parameter count.

    >>> parameters(8_030_261_248), parameters(124_439_808)
    ('8.03B', '124.4M')
    """
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count:,}"


def percent(share: float) -> str:
    """A share of a whole.

    >>> percent(0.0834), percent(0.00004)
    ('8.3%', '<0.1%')
    """
    return "<0.1%" if 0 < share < 0.0005 else f"{share * 100:.1f}%"


def milliseconds(time_ms: float) -> str:
    """A time with enough digits to check a speedup by hand; the unit stands in the column's name.

    >>> milliseconds(0.012345), milliseconds(1.2345), milliseconds(674.881)
    ('0.01235', '1.234', '674.88')
    """
    return f"{time_ms:.5f}" if time_ms < 0.1 else f"{time_ms:.3f}" if time_ms < 100 else f"{time_ms:.2f}"


def tflops(rate: float) -> str:
    """TFLOP/s to about three digits.

    >>> tflops(1223.4), tflops(5.07), tflops(0.0213)
    ('1223', '5.1', '0.021')
    """
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}" if rate >= 1 else f"{rate:.3f}"


def ends(found: Interval, digits: int = 3) -> str:
    """The interval in brackets. What cannot be negative does not begin below zero; a question mark where there is none.

    >>> ends(Interval(1.6543, 1.6421, 1.6668)), ends(Interval(2.0))
    ('[1.642, 1.667]', '[?]')
    """
    if found.low is None or found.high is None:
        return "[?]"
    return f"[{max(found.low, 0.0):,.{digits}f}, {found.high:,.{digits}f}]"


def speedup(found: Interval) -> str:
    """A speedup with its interval.

    >>> speedup(Interval(1.6543, 1.6421, 1.6668)), speedup(Interval(2.0))
    ('1.654x [1.642, 1.667]', '2.000x [?]')
    """
    return f"{found.value:.3f}x {ends(found)}"


def amount(found: Interval) -> str:
    """Days, GPU-hours or money with their interval.

    >>> amount(Interval(12.345, 12.0, 12.7)), amount(Interval(1234.5, 1200.0, 1270.0))
    ('12.35 [12.00, 12.70]', '1,234 [1,200, 1,270]')
    """
    digits = 2 if found.value < 100 else 0
    return f"{found.value:,.{digits}f} {ends(found, digits)}"


def names(items: Iterable[str], most: int = MOST_NAMED) -> str:
    """A list in a sentence, each name once, and not too many.

    >>> names(["a", "b", "a"]), names("abcdef", 4)
    ('a, b', 'a, b, c, d and 2 more')
    """
    distinct = list(dict.fromkeys(items))
    more = f" and {len(distinct) - most} more" if len(distinct) > most else ""
    return ", ".join(distinct[:most]) + more


def kernel_name(name: str, longest: int = LONGEST_KERNEL) -> str:
    """The name of a kernel without its arguments, and not too long.

    >>> kernel_name("void (anonymous namespace)::softmax<float>(float*, int)")
    'softmax<float>'
    """
    bare = name.replace("(anonymous namespace)::", "").removeprefix("void ").split("(")[0]
    return bare if len(bare) <= longest else bare[: longest - 1] + "…"


def counted(count: float, noun: str) -> str:
    """A count with its noun.

    >>> counted(1, "layer"), counted(8, "layer"), counted(2, "micro-batch")
    ('1 layer', '8 layers', '2 micro-batches')
    """
    plural = "" if count == 1 else "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{count:,.0f} {noun}{plural}"


def slug(text: str) -> str:
    """For an id or a file name.

    >>> slug("A · NVIDIA H200")
    'a-nvidia-h200'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"
