"""Tables of simulated fleets: what the outlier rule finds, how often intervals hold, and what 10,000 GPUs cost."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from gemmscope.toml import parse_toml

SIMULATED = Path(__file__).parent / "measured/fleet_simulated.toml"


@cache
def _tables() -> dict[str, Any]:
    return parse_toml(SIMULATED.read_text("utf-8"))


def outliers() -> str:
    """Slow GPUs found, and false alarms."""
    tables = _tables()
    parts = [
        "How often one slow GPU is found, in simulated fleets (8 GPUs in a node, noise 0.3%, tolerance 2%). Each cell "
        "simulates the number of fleets given; false alarms are counted over the three cells of a row. Brackets give "
        "95% intervals.",
        tables["one"],
        "If 5% of the GPUs are slow, the share of these that is found:",
        tables["some"],
        "If no GPU is slow, how often one or more are reported as outliers:",
        tables["none"],
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def spread() -> str:
    """How often the intervals of the spread and of another GPU contain the truth."""
    return str(_tables()["spread"]).strip()


def scale() -> str:
    """Time and memory for 10,000 GPUs."""
    return str(_tables()["scale"]).strip()
