"""`gemmscope forecast --gemms FILE.csv`: the forecast of single products, row by row, to hold against one's own measurements."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gemmscope.cli.bench_options import LARGEST_SIZE
from gemmscope.errors import UserError, shown

if TYPE_CHECKING:
    from gemmscope.forecast.gemm import State
    from gemmscope.gpu.specs import GpuSpec

REQUIRED = ("m", "k", "n", "format")
ADDED = ("gemm_ms", "quantize_ms", "low_ms", "high_ms")
HINT = "the first line names the columns m,k,n,format and, if wanted, layout,groups,library; then one product per line"
LAYOUT_NAMES = {"": "tn", "fprop": "tn", "dgrad": "nn", "wgrad": "nt", "tn": "tn", "nn": "nn", "nt": "nt"}
SPELLED = {"bfloat16": "bf16", "fp8_block": "fp8-block", "fp8block": "fp8-block", "fp4": "nvfp4"}


def read_rows(path: str) -> tuple[list[str], list[dict[str, str]]]:
    """The file's columns and rows."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", HINT) from None
    try:
        reader = csv.DictReader(io.StringIO(text), strict=True)
        columns = [str(name).strip() for name in reader.fieldnames or ()]
        lowered = [name.lower() for name in columns]
        reader.fieldnames = lowered
        rows = [{str(key): value or "" for key, value in row.items() if key is not None} for row in reader]
    except csv.Error as error:
        raise UserError(f"{path} is not CSV: {error}", HINT) from None
    missing = [name for name in REQUIRED if name not in lowered]
    if missing:
        raise UserError(f"{path} has no column {', '.join(missing)}", HINT)
    if not rows:
        raise UserError(f"{path} has no products below its first line", HINT)
    return columns, rows


def gemms_csv(path: str, chips: Sequence[GpuSpec], state: State, library: str | None) -> str:
    """The same rows with the four times; with several GPUs, once for each, named in a column of its own."""
    columns, rows = read_rows(path)
    several = len(chips) > 1
    kept = [name for name in columns if name.lower() not in (*ADDED, *(["gpu"] if several else []))]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*kept, *(["gpu"] if several else []), *ADDED])
    for chip in chips:
        for row, times in zip(rows, _times(path, rows, chip, state, library), strict=True):
            writer.writerow(
                [*(row[name.lower()] for name in kept), *([chip.name] if several else []), *(f"{time:.6g}" for time in times)]
            )
    return out.getvalue()


def _times(path: str, rows: list[dict[str, str]], chip: GpuSpec, state: State, library: str | None) -> list[tuple[float, ...]]:
    """Row by row: product, quantization of the activations, and the ends of the error bar of both together."""
    import numpy as np

    from gemmscope.forecast.gemm import model
    from gemmscope.forecast.physics import Shapes

    found = np.zeros((len(rows), 4))
    kinds: dict[tuple[str, str | None], list[int]] = {}
    sizes = np.zeros((len(rows), 4))
    layouts = []
    for number, row in enumerate(rows):
        where = f"{path}, line {number + 2}"
        sizes[number] = [
            *(_size(row[name], name, where) for name in ("m", "k", "n")),
            _size(row.get("groups") or "1", "groups", where),
        ]
        layouts.append(_layout(row.get("layout", ""), where))
        fmt = row["format"].strip().lower()
        kinds.setdefault((SPELLED.get(fmt, fmt), row.get("library", "").strip().lower() or library), []).append(number)
    names = np.array(layouts)
    for (fmt, by), chosen in kinds.items():
        index = np.array(chosen)
        m, k, n, in_groups = sizes[index].T
        shapes = Shapes.of(m, k, n, in_groups, (names[index] == "nt") & (in_groups > 1))
        try:
            times = model().time(chip, fmt, shapes, state, by, names[index])
        except UserError as error:
            raise UserError(f"{path}, line {chosen[0] + 2}: {error.message}", error.hint) from None
        found[index] = np.stack([times.gemm_ms, times.quantize_ms, times.low_ms, times.high_ms], axis=1)
    return [tuple(each) for each in found.tolist()]


def _size(text: str, name: str, where: str) -> int:
    spoken = text.strip()
    if not spoken.isascii() or not spoken.isdigit() or not 0 < int(spoken[:12]) <= LARGEST_SIZE:
        raise UserError(f"{where}: {name} is {shown(text)}, not a whole number from 1 to {LARGEST_SIZE}", HINT)
    return int(spoken)


def _layout(text: str, where: str) -> str:
    spoken = text.strip().lower()
    if spoken not in LAYOUT_NAMES:
        raise UserError(f"{where}: there is no layout {shown(text)}", "it can be tn (fprop), nn (dgrad) or nt (wgrad)")
    return LAYOUT_NAMES[spoken]
