"""Which presets are tested at length: those that are not another one in other sizes."""

from __future__ import annotations

from gemmscope.model import presets
from gemmscope.toml import load_data

ORIGINALS = tuple(name for name in presets.names() if "like" not in load_data(presets.__name__, f"{name}.toml"))
