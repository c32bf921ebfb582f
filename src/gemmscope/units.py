"""Numbers as text: units, speedups with their intervals, shares, lists of names."""

import math
import re
from collections.abc import Iterable, Sequence

from gemmscope.interval import Interval

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
MOST_DECIMALS = 6
COARSEST = 0.1  # rates are rounded as if their relative uncertainty were at most this
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


def memory(size: float) -> str:
    """Memory as vendors, drivers and PyTorch count it: a GB has 2^30 bytes.

    >>> memory(80 * 2**30), memory(1.5 * 2**30), memory(3e6)
    ('80 GB', '1.5 GB', '2.9 MB')
    """
    for factor, prefix in ((2.0**30, "GB"), (2.0**20, "MB")):
        if size >= factor:
            return f"{size / factor:.{0 if size >= 10 * factor else 1}f} {prefix}"
    return f"{size:g} B"


def _four_digits(number: float) -> str:
    decimals = 3 if number < 9.9995 else 2 if number < 99.995 else 1 if number < 999.95 else 0
    return f"{number:.{decimals}f}"


def parameters(count: int) -> str:
    """A parameter count.

    >>> parameters(8_030_261_248), parameters(124_439_808)
    ('8.03B', '124.4M')
    """
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count:,}"


def tokens(count: float) -> str:
    """A number of training tokens.

    >>> tokens(1e12), tokens(15.5e12), tokens(2_500_000)
    ('1T tokens', '15.5T tokens', '2.5M tokens')
    """
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= factor:
            return f"{count / factor:.4g}{letter} tokens"
    return f"{count:,.0f} tokens"


def percent(share: float) -> str:
    """A share of a whole.

    >>> percent(0.0834), percent(0.00004)
    ('8.3%', '<0.1%')
    """
    return "<0.1%" if 0 < share < 0.0005 else f"{share * 100:.1f}%"


def difference(ratio: float) -> str:
    """How far a ratio is from one.

    >>> difference(0.902), difference(1.0004), difference(0.9996)
    ('-9.8%', '0.0%', '0.0%')
    """
    text = f"{100 * (ratio - 1):+.1f}%"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def decimals(half_width: float) -> int:
    """How many decimals an estimate deserves: two digits of its uncertainty where these are below 36, else one.

    >>> decimals(0.012), decimals(0.087), decimals(3.2), decimals(44.0)
    (3, 2, 1, -1)
    """
    if not 0 < half_width < math.inf:
        return MOST_DECIMALS
    exponent = math.floor(math.log10(half_width))
    return 1 - exponent if half_width / 10**exponent < 3.55 else -exponent


def fixed(estimate: Interval, least: int = 0, most: int = MOST_DECIMALS, unknown: int = 2) -> int:
    """The decimals of an estimate and its ends, within limits; `unknown` where there is no interval."""
    if estimate.low is None or estimate.high is None:
        return unknown
    return min(max(decimals((estimate.high - estimate.low) / 2), least), most)


def rounded(value: float, half_width: float) -> str:
    """A rate with the digits that its relative uncertainty allows, and enough to compare rates whose errors are mostly the same.

    >>> rounded(33122.4, 0.08), rounded(33122.4, 0.005), rounded(970.2, 0.08), rounded(33122.4, math.inf)
    ('33,100', '33,120', '970', '33,122')
    >>> rounded(7275.0, 0.49), rounded(7211.0, 0.48)
    ('7,300', '7,200')
    """
    places = decimals(abs(value) * (min(half_width, COARSEST) if half_width < math.inf else half_width))
    return f"{round(value, places) if places < 0 else value:,.{min(max(places, 0), 0 if abs(value) >= 100 else 2)}f}"


def milliseconds(time_ms: float | Interval) -> str:
    """A time with the digits that its interval allows; the unit stands in the column's name.

    >>> milliseconds(0.012345), milliseconds(1.2345), milliseconds(674.881), milliseconds(Interval(674.881, 640.0, 711.0))
    ('0.01235', '1.234', '674.88', '675')
    """
    if not isinstance(time_ms, Interval):
        return f"{time_ms:.{_time_decimals(time_ms)}f}"
    usual = _time_decimals(time_ms.value)
    return f"{time_ms.value:.{fixed(time_ms, most=usual, unknown=usual)}f}"


def _time_decimals(time_ms: float) -> int:
    return 5 if time_ms < 0.1 else 3 if time_ms < 100 else 2


def time_range(time_ms: Interval) -> str:
    """A time with its error bar in brackets.

    >>> time_range(Interval(674.881, 640.0, 711.0)), time_range(Interval(2.0))
    ('675 [640, 711]', '2.000 [?]')
    """
    usual = _time_decimals(time_ms.value)
    return f"{milliseconds(time_ms)} {ends(time_ms, fixed(time_ms, most=usual, unknown=usual))}"


def tflops(rate: float) -> str:
    """TFLOP/s to about three digits.

    >>> tflops(1223.4), tflops(5.07), tflops(0.0213)
    ('1223', '5.1', '0.021')
    """
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}" if rate >= 1 else f"{rate:.3f}"


def ends(estimate: Interval, digits: int = 3) -> str:
    """The interval in brackets. What cannot be negative does not begin below zero; a question mark where there is none.

    >>> ends(Interval(1.6543, 1.6421, 1.6668)), ends(Interval(2.0))
    ('[1.642, 1.667]', '[?]')
    """
    if estimate.low is None or estimate.high is None:
        return "[?]"
    return f"[{max(estimate.low, 0.0):.{digits}f}, {estimate.high:.{digits}f}]"


def ratio_decimals(ratio: Interval) -> int:
    """The decimals of a ratio: an end that is not one does not look like one, and an uncertainty not like zero."""
    places = fixed(ratio, least=1, most=3)
    sides = [end for end in (ratio.low, ratio.high) if end is not None and end != 1]
    half = (ratio.high - ratio.low) / 2 if ratio.low is not None and ratio.high is not None else 0.0
    while places < 4 and (any(round(end, places) == 1 for end in sides) or (half > 0 and round(half, places) == 0)):
        places += 1
    return places


def ratio(estimate: Interval) -> str:
    """A ratio alone, above a bar: two decimals at most, fewer where its interval is wide.

    >>> ratio(Interval(1.6543, 1.6421, 1.6668)), ratio(Interval(3.01, 2.6, 3.5)), ratio(Interval(2.0))
    ('1.65x', '3.0x', '2.00x')
    """
    return f"{estimate.value:.{min(ratio_decimals(estimate), 2)}f}x"


def speedup(ratio: Interval) -> str:
    """A speedup with its interval, with the digits that the interval allows.

    >>> speedup(Interval(1.6543, 1.6421, 1.6668)), speedup(Interval(1.594, 1.509, 1.684)), speedup(Interval(2.0))
    ('1.654x [1.642, 1.667]', '1.59x [1.51, 1.68]', '2.00x [?]')
    """
    places = ratio_decimals(ratio)
    return f"{ratio.value:.{places}f}x {ends(ratio, places)}"


def short_speedup(ratio: Interval) -> str:
    """A speedup where there is no room for both ends of its interval.

    >>> short_speedup(Interval(1.6543, 1.6421, 1.6668)), short_speedup(Interval(1.65642, 1.656, 1.6568))
    ('1.654x ±0.012', '1.6564x ±0.0004')
    >>> short_speedup(Interval(2.0)), short_speedup(Interval(0.06, 0.02, 0.4))
    ('2.00x', '0.06x [0.02, 0.40]')
    """
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.2f}x"
    half = (ratio.high - ratio.low) / 2
    if half >= ratio.value:  # "±" would include negative speedups
        return speedup(ratio)
    places = ratio_decimals(ratio)
    return f"{ratio.value:.{places}f}x ±{half:.{places}f}"


def amount(estimate: Interval) -> str:
    """Days, GPU-hours or money with their interval, and the digits that it allows.

    >>> amount(Interval(12.345, 11.9, 12.8)), amount(Interval(642573.0, 547053.0, 754771.0)), amount(Interval(1234.5))
    ('12.3 [11.9, 12.8]', '640,000 [550,000, 750,000]', '1,234 [?]')
    """
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:,.{2 if estimate.value < 100 else 0}f} [?]"
    places = min(decimals((estimate.high - estimate.low) / 2), 2)
    numbers = (estimate.value, max(estimate.low, 0.0), estimate.high)
    value, low, high = (f"{round(number, places):,.{max(places, 0)}f}" for number in numbers)
    return f"{value} [{low}, {high}]"


def names(items: Iterable[str], most: int = MOST_NAMED) -> str:
    """A list in a sentence, each name once, and not too many.

    >>> names(["a", "b", "a"]), names("abcdef", 4)
    ('a, b', 'a, b, c, d and 2 more')
    """
    distinct = list(dict.fromkeys(items))
    more = f" and {len(distinct) - most} more" if len(distinct) > most else ""
    return ", ".join(distinct[:most]) + more


def listed(items: Iterable[str], last_by: str = "and") -> str:
    """All names, as the subject of a sentence.

    >>> listed(["a"]), listed("ab"), listed("abc"), listed("abc", "or")
    ('a', 'a and b', 'a, b and c', 'a, b or c')
    """
    *first, last = dict.fromkeys(items)
    return f"{', '.join(first)} {last_by} {last}" if first else last


# The return type of templates that are only defined for some arguments
CONDITION = re.compile(r"^std::enable_if<.{0,2000}?>::type ")


def kernel_name(name: str, longest: int = LONGEST_KERNEL) -> str:
    """The name of a kernel without its arguments, and not too long.

    >>> kernel_name("void (anonymous namespace)::softmax<float>(float*, int)")
    'softmax<float>'
    """
    bare = CONDITION.sub("", name).replace("(anonymous namespace)::", "").removeprefix("void ").split("(")[0]
    return bare if len(bare) <= longest else bare[: longest - 1] + "…"


def counted(count: float, noun: str) -> str:
    """A count with its noun.

    >>> counted(1, "layer"), counted(8, "layer"), counted(2, "micro-batch")
    ('1 layer', '8 layers', '2 micro-batches')
    """
    plural = "" if count == 1 else "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{count:,.0f} {noun}{plural}"


def slug(text: str) -> str:
    """The text as an id or a part of a file name.

    >>> slug("A · NVIDIA H200")
    'a-nvidia-h200'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


def steps(numbers: Sequence[int]) -> str:
    """Steps of a training.

    >>> steps((142, 143, 144)), steps((10, 20)), steps((7,))
    ('steps 142 to 144', 'steps 10, 20', 'step 7')
    """
    if len(numbers) > 2 and tuple(numbers) == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"steps {numbers[0]} to {numbers[-1]}"
    return f"{'steps' if len(numbers) > 1 else 'step'} {names(map(str, numbers))}"
