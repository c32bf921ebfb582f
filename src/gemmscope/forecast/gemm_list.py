"""The forecast of single GEMMs from a CSV file, row by row, to compare with one's own measurements."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemmscope.choices import ClockState
from gemmscope.errors import UserError, option, reject, shown
from gemmscope.findings import Finding, finding
from gemmscope.forecast.calibration import Calibration
from gemmscope.forecast.gemm import LAYOUT_OF, chip_limit_ms, library_and_version, model
from gemmscope.forecast.physics import Shapes
from gemmscope.forecast.training import gemm_factor
from gemmscope.gpu.specs import GpuSpec
from gemmscope.reading import LIMITS, called, read_text
from gemmscope.recipe.precisions import precisions
from gemmscope.text import csv_cell

Kind = tuple[str, str | None]  # a format, and a library if one is named
LARGEST_SIZE = 10**7
MOST_COLUMNS, MOST_CELLS = 1000, LIMITS["gemm_list"]["entries"]
MOST_KINDS = 100  # formats and libraries
REQUIRED = ("m", "k", "n", "format")
ADDED = ("gemm_ms", "quantize_ms", "low_ms", "high_ms")
HINT = "the first line names the columns m,k,n,format and optionally layout,groups,library; then one GEMM per line"
LAYOUT_NAMES = {"": "tn", "fprop": "tn", "dgrad": "nn", "wgrad": "nt", "tn": "tn", "nn": "nn", "nt": "nt"}


@dataclass(frozen=True)
class GemmForecast:
    """The same rows with four more columns, milliseconds: the GEMM, the quantization of its activations, and the ends of the 90%
    error bar of both."""

    csv: str
    findings: tuple[Finding, ...]


class GemmRow(NamedTuple):
    """One GEMM as the file has it."""

    where: str
    cells: dict[str, str]

    def cell(self, name: str) -> str:
        """A name in lower case; empty where there is no such column."""
        return self.cells.get(name, "").strip().lower()

    def size(self, name: str) -> int:
        """A whole number, or a `UserError`."""
        digits = self.cell(name).removesuffix(".0")  # as spreadsheets often write them
        if not digits.isascii() or not digits.isdigit() or not 0 < int(digits[:12]) <= LARGEST_SIZE:
            raise UserError(
                f"{self.where}: {name} is {shown(self.cells[name])}, not a whole number from 1 to {LARGEST_SIZE}", HINT
            )
        return int(digits)


def read_rows(path: str) -> tuple[list[str], list[GemmRow]]:
    """The file's columns and rows; `-` is standard input."""
    if not path:
        raise UserError(f"{option('gemms')} is empty", HINT)
    text, path = read_text(path, LIMITS["gemm_list"]["bytes"], HINT), called(path)
    try:
        reader = csv.DictReader(io.StringIO(text), strict=True)
        columns = [str(name).strip() for name in reader.fieldnames or ()]
        lowered = [name.lower() for name in columns]
        reader.fieldnames = lowered
        if len(columns) > MOST_COLUMNS:
            raise UserError(f"{path} has {len(columns)} columns, more than {MOST_COLUMNS}", HINT)
        rows: list[GemmRow] = []
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if None in row:  # cells beyond the last column
                raise UserError(f"{where} has more cells than the first line has columns ({len(columns)})", HINT)
            if len(rows) * len(columns) >= MOST_CELLS:
                raise UserError(f"{path} is too large: it has more than {MOST_CELLS} cells", "split it into several files")
            rows.append(GemmRow(where, {str(key): value or "" for key, value in row.items()}))
    except csv.Error as error:
        raise UserError(f"{path} is not CSV: {error}", HINT) from None
    twice, missing = [name for name in lowered if lowered.count(name) > 1], [name for name in REQUIRED if name not in lowered]
    reject(
        (twice, f"{path} has the column {''.join(map(shown, twice[:1]))} twice", HINT),
        (missing, f"{path} has no column {', '.join(missing)}", HINT),
        (not rows, f"{path} has no GEMMs below its first line", HINT),
    )
    return columns, rows


def forecast_gemm_list(
    path: str, chips: Sequence[GpuSpec], measured: Mapping[str, Calibration | None], state: ClockState, library: str | None
) -> GemmForecast:
    """Forecast every row of the file; with several GPUs, once per GPU, with the GPU in its own column.

    `measured`: calibrations by GPU. Where one of several GPUs has no such GEMMs, its times are empty.
    """
    columns, rows = read_rows(path)
    added = ("gpu", *ADDED) if len(chips) > 1 else ADDED
    kept = [name for name in columns if name.lower() not in added]
    gemms = _Gemms.of(rows, library)
    failures: dict[Kind, list[UserError]] = {}
    out, findings = io.StringIO(), list[Finding]()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*map(csv_cell, kept), *added])
    for chip in chips:
        times, basis = gemms.times(chip, state, measured.get(chip.name), failures)
        findings.append(finding("forecast-basis", gpu=chip.name, basis=basis))
        for row, of_row in zip(rows, times, strict=True):
            cells = [*(csv_cell(row.cells[name.lower()]) for name in kept), *([chip.name] if "gpu" in added else [])]
            writer.writerow([*cells, *(f"{time:.6g}" if of_row[0] else "" for time in of_row)])
    for kind, errors in failures.items():
        if len(errors) == len(chips):
            raise UserError(f"{rows[gemms.kinds[kind][0]].where}: {errors[0].message}", errors[0].hint)
        findings += [finding("gemms-left-empty", reason=error.message) for error in errors]
    libraries = sorted({series.library for series in model().coefficients.series})
    unknown = dict.fromkeys(by for _, by in gemms.kinds if by is not None and library_and_version(by)[0] not in libraries)
    findings += [finding("library-not-measured", library=shown(by), known=libraries) for by in unknown]
    if not any(measured.values()) and any(by is None for _, by in gemms.kinds):
        findings.append(finding("library-not-named", known=libraries))
    return GemmForecast(out.getvalue(), tuple(findings))


class _Gemms(NamedTuple):
    """All GEMMs of a file: M, K, N and groups of each, its layout, and the rows of every format and library."""

    sizes: NDArray[np.float64]
    layouts: NDArray[np.str_]
    kinds: dict[Kind, list[int]]

    @staticmethod
    def of(rows: list[GemmRow], library: str | None) -> _Gemms:
        """Parse and check the rows."""
        sizes, layouts, kinds = [], [], dict[Kind, list[int]]()
        spelled = {alias: known.name for known in precisions().values() for alias in known.aliases}
        for number, row in enumerate(rows):
            m, k, n = map(row.size, ("m", "k", "n"))
            groups = row.size("groups") if row.cells.get("groups") else 1
            if row.cell("layout") not in LAYOUT_NAMES:
                problem = f"{row.where}: there is no layout {shown(row.cells['layout'])}"
                raise UserError(problem, "it can be tn (fprop), nn (dgrad) or nt (wgrad)")
            layouts.append(LAYOUT_NAMES[row.cell("layout")])
            side, most = ("k", k) if layouts[-1] == "nt" else ("m", m)  # what the groups share
            if groups > most:
                raise UserError(f"{row.where}: {groups} groups share {side} = {most}: some are empty", HINT)
            sizes.append((m, k, n, groups))
            fmt = row.cell("format")
            kinds.setdefault((spelled.get(fmt, fmt), row.cell("library") or library), []).append(number)
            if len(kinds) > MOST_KINDS:
                raise UserError(f"{row.where}: there are more than {MOST_KINDS} formats and libraries", HINT)
        return _Gemms(np.array(sizes, dtype=np.float64), np.array(layouts), kinds)

    def times(
        self, chip: GpuSpec, state: ClockState, measured: Calibration | None, failures: dict[Kind, list[UserError]]
    ) -> tuple[list[tuple[float, ...]], list[str]]:
        """The four times of every row, and what they are based on.

        A row of zeros where the GPU has no such GEMM: `failures` says why.
        """
        result, basis = np.zeros((len(self.sizes), 4)), dict[str, None]()
        for (fmt, by), chosen in self.kinds.items():
            index = np.array(chosen)
            m, k, n, groups = self.sizes[index].T
            layouts = self.layouts[index]
            shapes = Shapes.of(m, k, n, groups, (layouts == "nt") & (groups > 1))
            own = measured if by is None else None
            calibrated = own is not None and own.gemm(fmt, "fprop", state, chip) is not None
            try:
                times = model().time(chip, fmt, shapes, state, by, layouts, calibrated=calibrated)
            except UserError as error:
                failures.setdefault((fmt, by), []).append(error)
                continue
            basis[model().basis(chip, fmt, state, by).description] = None
            if own is not None:
                factors = np.ones(len(layouts))  # the user's own measurements over the forecast
                for name, layout in LAYOUT_OF.items():
                    if (known := own.gemm(fmt, name, state, chip)) is not None:
                        factors[layouts == layout] = known.factor * gemm_factor(fmt, chip)
                gemm_ms = np.maximum(times.gemm_ms * factors, chip_limit_ms(shapes, fmt, chip))
                times = replace(times, gemm_ms=gemm_ms)
            result[index] = np.stack([times.gemm_ms, times.quantize_ms, times.low_ms, times.high_ms], axis=1)
        return [tuple(row) for row in result.tolist()], list(basis) or ["none of these GEMMs"]
