"""`gemmscope forecast --gemms FILE.csv`: the forecast of single products, row by row, to hold against one's own measurements."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gemmscope.cli.bench_options import LARGEST_SIZE
from gemmscope.errors import UserError, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gemmscope.forecast.gemm import State
    from gemmscope.forecast.linears import Adjustment
    from gemmscope.gpu.specs import GpuSpec

Kind = tuple[str, str | None]  # a format, and a library if one is named
REQUIRED = ("m", "k", "n", "format")
ADDED = ("gemm_ms", "quantize_ms", "low_ms", "high_ms")
HINT = "the first line names the columns m,k,n,format and, if wanted, layout,groups,library; then one product per line"
LAYOUT_NAMES = {"": "tn", "fprop": "tn", "dgrad": "nn", "wgrad": "nt", "tn": "tn", "nn": "nn", "nt": "nt"}
SPELLED = {"bfloat16": "bf16", "fp8_block": "fp8-block", "fp8block": "fp8-block", "fp4": "nvfp4"}


class Row(NamedTuple):
    """One product as it stands in the file."""

    where: str
    cells: dict[str, str]

    def kind(self, library: str | None) -> Kind:
        """Its format and its library."""
        fmt = self.cells["format"].strip().lower()
        return SPELLED.get(fmt, fmt), self.cells.get("library", "").strip().lower() or library


def read_rows(path: str) -> tuple[list[str], list[Row]]:
    """The file's columns and rows; `-` is standard input."""
    try:
        text = (sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", HINT) from None
    path = "standard input" if path == "-" else path
    try:
        reader = csv.DictReader(io.StringIO(text), strict=True)
        columns = [str(name).strip() for name in reader.fieldnames or ()]
        lowered = [name.lower() for name in columns]
        reader.fieldnames = lowered
        rows = []
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if None in row:  # what stands beyond the last column
                raise UserError(f"{where} has more cells than the first line has columns ({len(columns)})", HINT)
            rows.append(Row(where, {str(key): value or "" for key, value in row.items()}))
    except csv.Error as error:
        raise UserError(f"{path} is not CSV: {error}", HINT) from None
    twice = [name for name in dict.fromkeys(lowered) if lowered.count(name) > 1]
    if twice:
        raise UserError(f"{path} has the column {shown(twice[0])} twice", HINT)
    missing = [name for name in REQUIRED if name not in lowered]
    if missing:
        raise UserError(f"{path} has no column {', '.join(missing)}", HINT)
    if not rows:
        raise UserError(f"{path} has no products below its first line", HINT)
    return columns, rows


def gemms_csv(
    path: str, chips: Sequence[tuple[GpuSpec, Adjustment | None]], state: State, library: str | None
) -> tuple[str, list[str]]:
    """The same rows with the four times, and what these stand on; with several GPUs, once for each, in a column of its own.

    Where one of several GPUs has no such products, its times stay empty.
    """
    columns, rows = read_rows(path)
    several = len(chips) > 1
    kept = [name for name in columns if name.lower() not in (*ADDED, *(["gpu"] if several else []))]
    products = _Products.of(rows, library)
    failures: dict[Kind, list[UserError]] = {}
    out, basis = io.StringIO(), []
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*kept, *(["gpu"] if several else []), *ADDED])
    for chip, measured in chips:
        times, stands_on = products.times(chip, state, measured, failures)
        basis.append(f"{chip.name}: {'; '.join(stands_on)}")
        for row, found in zip(rows, times, strict=True):
            cells = [row.cells[name.lower()] for name in kept] + ([chip.name] if several else [])
            writer.writerow([*cells, *(f"{time:.6g}" if found[0] else "" for time in found)])
    for kind, errors in failures.items():
        if len(errors) == len(chips):
            raise UserError(f"{rows[products.kinds[kind][0]].where}: {errors[0].message}", errors[0].hint)
        basis += [f"left empty: {error.message}" for error in errors]
    return out.getvalue(), basis


class _Products(NamedTuple):
    """All products of a file: M, K, N and groups of each, its layout, and the rows of every format and library."""

    sizes: NDArray[np.float64]
    layouts: NDArray[np.str_]
    kinds: dict[Kind, list[int]]

    @staticmethod
    def of(rows: list[Row], library: str | None) -> _Products:
        """Checked row by row."""
        import numpy as np

        sizes, layouts, kinds = [], [], dict[Kind, list[int]]()
        for number, row in enumerate(rows):
            m, k, n = (_size(row.cells[name], name, row.where) for name in ("m", "k", "n"))
            groups = _size(row.cells.get("groups") or "1", "groups", row.where)
            layouts.append(_layout(row.cells.get("layout", ""), row.where))
            side, most = ("k", k) if layouts[-1] == "nt" else ("m", m)  # what the groups share
            if groups > most:
                raise UserError(f"{row.where}: {groups} groups share {side} = {most}: some have nothing", HINT)
            sizes.append((m, k, n, groups))
            kinds.setdefault(row.kind(library), []).append(number)
        return _Products(np.array(sizes, dtype=np.float64), np.array(layouts), kinds)

    def times(
        self, chip: GpuSpec, state: State, measured: Adjustment | None, failures: dict[Kind, list[UserError]]
    ) -> tuple[list[tuple[float, ...]], list[str]]:
        """Row by row: product, quantization of the activations, the ends of the error bar of both; and what they stand on.

        A row of zeros where the chip has no such product: `failures` says why.
        """
        import numpy as np

        from gemmscope.forecast.gemm import chip_limit_ms, model
        from gemmscope.forecast.physics import Shapes

        found, basis = np.zeros((len(self.sizes), 4)), dict[str, None]()
        libraries = sorted({series.library for series in model().coefficients.series})
        for (fmt, by), chosen in self.kinds.items():
            index = np.array(chosen)
            m, k, n, groups = self.sizes[index].T
            layouts = self.layouts[index]
            shapes = Shapes.of(m, k, n, groups, (layouts == "nt") & (groups > 1))
            try:
                times = model().time(chip, fmt, shapes, state, by, layouts)
            except UserError as error:
                failures.setdefault((fmt, by), []).append(error)
                continue
            basis[model().basis(chip, fmt, state, by).words] = None
            if by is not None and by not in libraries:
                basis[f"{shown(by)} was measured nowhere (known: {', '.join(libraries)}): error bars are wider"] = None
            if measured is not None and by is None:
                gemm_ms = times.gemm_ms * _factors(measured, fmt, layouts, chip, state)
                times = replace(times, gemm_ms=np.maximum(gemm_ms, chip_limit_ms(shapes, fmt, chip)))
            found[index] = np.stack([times.gemm_ms, times.quantize_ms, times.low_ms, times.high_ms], axis=1)
        return [tuple(each) for each in found.tolist()], list(basis) or ["none of these products"]


def _factors(measured: Adjustment, fmt: str, layouts: NDArray[np.str_], chip: GpuSpec, state: State) -> NDArray[np.float64]:
    """What was measured on this very chip over the forecast, product by product."""
    import numpy as np

    from gemmscope.forecast.gemm import LAYOUT_OF
    from gemmscope.forecast.training import product_factor

    factors = np.ones(len(layouts))
    for name, layout in LAYOUT_OF.items():
        if (found := measured.product(fmt, name, state)) is not None:
            factors[layouts == layout] = found[0] * product_factor(fmt, chip)
    return factors


def _size(text: str, name: str, where: str) -> int:
    spoken = text.strip().removesuffix(".0")  # as tables of numbers are often written
    if not spoken.isascii() or not spoken.isdigit() or not 0 < int(spoken[:12]) <= LARGEST_SIZE:
        raise UserError(f"{where}: {name} is {shown(text)}, not a whole number from 1 to {LARGEST_SIZE}", HINT)
    return int(spoken)


def _layout(text: str, where: str) -> str:
    spoken = text.strip().lower()
    if spoken not in LAYOUT_NAMES:
        raise UserError(f"{where}: there is no layout {shown(text)}", "it can be tn (fprop), nn (dgrad) or nt (wgrad)")
    return LAYOUT_NAMES[spoken]
