"""Facts for the tooltip of a measured time: its samples, and the clocks."""

from collections.abc import Mapping, Sequence
from typing import Any

from gemmscope import units
from gemmscope.document.table import Facts

QUANTITIES = (("SM clock", "sm_mhz", "MHz"), ("power", "power_w", "W"), ("temperature", "temperature_c", "°C"))


def sample_text(series: Sequence[Sequence[Sequence[float]]]) -> str:
    """How many samples, in how many bursts.

    >>> sample_text([[[1.0, 1.1], [1.2]]]), sample_text([])
    ('3 in 2 bursts', '')
    """
    count = sum(len(burst) for bursts in series for burst in bursts)
    return f"{count:,} in {units.counted(max(map(len, series)), 'burst')}" if count else ""


def clock_facts(states: Sequence[Mapping[str, Any]]) -> Facts:
    """SM clock, power and temperature while measuring: the median and the range."""
    facts = []
    for name, key, unit in QUANTITIES:
        values = sorted(float(value) for state in states if isinstance(value := state.get(key), (int, float)))
        if values:
            spread = f" ({values[0]:.0f} to {values[-1]:.0f})" if values[0] != values[-1] else ""
            facts.append((name, f"{values[len(values) // 2]:.0f} {unit}{spread}"))
    return tuple(facts)
