"""Numbers as people read them."""

from __future__ import annotations

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


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
