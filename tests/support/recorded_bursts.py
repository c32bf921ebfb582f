"""The reference model's linears, run after run on four H200s: milliseconds of every cycle of every burst that counted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

Run = dict[str, list[list[float]]]  # "autocast FP8Block" -> bursts of cycles; BF16's linears are the sums of their products
MACHINES: list[list[Run]] = json.loads(
    gzip.decompress((Path(__file__).parent.parent / "data" / "h200_bursts.json.gz").read_bytes())
)
BASELINE = "pre-quantized BF16"
