"""What was measured on the reader's own GPU, as factors on its forecast: `gemmscope calibrate` writes them, forecasts use them.

A forecast of a chip that stands on public measurements is right on average; this library version, this cooling and this power
limit are not. A few linears measured here give a factor for each format and pass, in the sustained state and in bursts, and one
for each recipe's quantization; two short training steps give one for attention, norms, optimizer and embedding. Error bars then
hold what differs from shape to shape, and no longer what all shapes share. What was found on an H200 ships with the package.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from gemmscope.errors import UserError
from gemmscope.forecast.coefficients import REINSTALL
from gemmscope.forecast.findings import ForecastFindings
from gemmscope.forecast.gemm import FORMATS, LAYOUT_OF
from gemmscope.forecast.linears import Adjustment
from gemmscope.forecast.training import product_format
from gemmscope.gpu.specs import GpuSpec, gpus, spec_of
from gemmscope.measure.findings import Findings
from gemmscope.model.flags import from_hyperparameters
from gemmscope.model.spec import RunSpec
from gemmscope.recipe.recipes import recipe, recipes
from gemmscope.step.waterfall import Row
from gemmscope.workload.cases import Case

VERSION = 2
Pair = tuple[float, float]  # milliseconds, measured and forecast
LARGEST_FACTOR = 5.0  # more than that is no calibration, but another chip
AGAIN = "run gemmscope calibrate again, or remove the file to forecast without it"

# Linears from small to large, wide and narrow, few tokens and many: a minute or two for every precision.
CASES = tuple(
    Case(f"{tokens}x{inputs}x{outputs}", tokens, inputs, outputs)
    for tokens, inputs, outputs in (
        (2048, 2048, 6144), (8192, 2048, 8192), (4096, 4096, 4096), (8192, 4096, 14336), (16384, 4096, 12288),
        (16384, 14336, 4096), (8192, 8192, 8192), (4096, 8192, 28672),
    )
)  # fmt: skip


# Steps in BF16: many tokens of short sequences, and few of a long one.
STACKS = (
    (
        from_hyperparameters(
            hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_hidden_layers=2, vocab_size=32000, gated=True
        ),
        RunSpec(micro_batch_size=8, sequence_length=2048),
    ),
    (
        from_hyperparameters(
            hidden_size=2048, intermediate_size=8192, num_attention_heads=16, num_hidden_layers=2, vocab_size=32000
        ),
        RunSpec(micro_batch_size=1, sequence_length=16384),
    ),
)
CALIBRATED_ROWS: tuple[Row, ...] = ("attention", "norms and activations", "optimizer", "embedding")


@dataclass(frozen=True)
class Calibration:
    """Factors of one GPU, measured over forecast: `products[format][pass]` sustained, `burst` the same for a rested chip,
    `quantize[recipe]`, and `rows[row of a step]`."""

    gpu: str
    device: str
    products: dict[str, dict[str, float]]
    quantize: dict[str, float]
    burst: dict[str, dict[str, float]] = field(default_factory=dict)
    rows: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    version: int = VERSION

    def adjustment(self, *, other_chip: bool = False) -> Adjustment:
        """As forecasts take it; with more doubt where the chip that was measured is not the reader's own."""
        return Adjustment(self.products, self.quantize, self.rows, self.burst, own_chip=not other_chip)


def place(gpu: str) -> Path:
    """Where a GPU's calibration lies: $XDG_CONFIG_HOME/gemmscope or ~/.config/gemmscope."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "gemmscope" / "calibration" / f"{gpu}.json"


def shipped(gpu: str) -> Calibration | None:
    """What the package brings with it, for a GPU that it was measured on."""
    file = files("gemmscope.forecast").joinpath(f"coefficients/calibrated/{gpu}.json")
    return _read(file.read_text(encoding="utf-8"), f"calibrated/{gpu}.json", gpu, REINSTALL) if file.is_file() else None


def load(gpu: str) -> Calibration | None:
    """This user's calibration of a GPU, if there is one; a `UserError` if its file is damaged or of another version."""
    path = place(gpu)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", AGAIN) from None
    return _read(text, str(path), gpu, AGAIN)


def _read(text: str, origin: str, gpu: str, hint: str) -> Calibration:
    """A calibration from its JSON; a `UserError` that names `origin` if it is none."""
    try:
        data = json.loads(text)
        version = data["version"]
        if version == VERSION:
            return _checked(Calibration(**data), gpu)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{origin} is a damaged calibration: {type(error).__name__}: {str(error)[:100]}", hint) from None
    raise UserError(f"{origin} is a calibration of version {str(version)[:20]}, not {VERSION}", hint)


def _checked(found: Calibration, gpu: str) -> Calibration:
    """It is of this GPU, and its factors are numbers that a chip can have."""
    if found.gpu != gpu:
        raise ValueError(f"it is of {str(found.gpu)[:40]!r}, not of {gpu!r}")
    if not isinstance(found.device, str) or not isinstance(found.versions, dict):
        raise TypeError("its device is no text, or its versions are no table")
    factors: list[Any] = []
    for products in (found.products, found.burst):
        _known(products, FORMATS, "format")
        for passes in products.values():
            _known(passes, LAYOUT_OF, "pass")
            factors += passes.values()
    _known(found.quantize, recipes(), "recipe")
    _known(found.rows, CALIBRATED_ROWS, "row")
    for factor in [*factors, *found.quantize.values(), *found.rows.values()]:
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            raise TypeError(f"a factor of {str(factor)[:40]!r} is no number")
        if not _possible(factor):
            raise ValueError(f"a factor of {factor} is none that a GPU has")
    return found


def _possible(factor: float) -> bool:
    """Whether a chip can be so far from its forecast; NaN is not."""
    return 1 / LARGEST_FACTOR <= factor <= LARGEST_FACTOR


def without_the_impossible(found: Calibration) -> tuple[Calibration, list[str]]:
    """What a file may hold, and in words what it may not: such a factor tells of something else that went wrong.

    >>> without_the_impossible(Calibration("h200", "", {"bf16": {"fprop": 1.0}}, {"FP8Block": 9.0}))[1]
    ['quantizing for FP8Block: 9.000']
    """
    left: list[str] = []

    def kept(table: Mapping[str, float], what: str) -> dict[str, float]:
        left.extend(f"{what}{name}: {factor:.3f}" for name, factor in table.items() if not _possible(factor))
        return {name: factor for name, factor in table.items() if _possible(factor)}

    products, burst = (
        {fmt: kept(passes, f"{fmt}, {state}, ") for fmt, passes in table.items()}
        for state, table in (("sustained", found.products), ("burst", found.burst))
    )
    quantize, rows = kept(found.quantize, "quantizing for "), kept(found.rows, "")
    return replace(found, products=products, burst=burst, quantize=quantize, rows=rows), left


def _known(table: Any, names: Iterable[str], what: str) -> None:
    if not isinstance(table, dict):
        raise TypeError(f"{str(table)[:40]!r} is no table by {what}")
    strange = [name for name in table if name not in set(names)]
    if strange:
        raise ValueError(f"there is no {what} {strange[0][:40]!r}")


def check_place(gpu: str) -> None:
    """A `UserError` where `save` could not write: said before minutes of measuring, not after."""
    path = place(gpu)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_written(path, error.strerror or str(error)) from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise _not_written(path, "it is a folder" if path.is_dir() else "no permission")


def save(found: Calibration) -> Path:
    """Write it where forecasts look for it."""
    path = place(found.gpu)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise _not_written(path, error.strerror or str(error)) from None
    return path


def _not_written(path: Path, why: str) -> UserError:
    return UserError(f"{path} cannot be written: {why}", "set XDG_CONFIG_HOME to a folder that can be written")


def known_gpu(device: str) -> GpuSpec:
    """The chip of the tables that a driver's name means.

    >>> known_gpu("NVIDIA H200 NVL").name, known_gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition").name
    ('h200-nvl', 'rtx-pro-6000')
    """
    found = spec_of(device)
    if found is None:
        raise UserError(f"{device} is in no table of GPUs: its forecast cannot be calibrated", f"known: {', '.join(gpus())}")
    return found


def compare(measured: Findings, forecast: ForecastFindings) -> Calibration:
    """Factors from the same linears, measured and forecast."""
    quantize: dict[str, list[Pair]] = {}
    for name in measured.columns("autocast") if "autocast" in measured.modes else ():
        for case in measured.cases:
            seen, expected = measured.cell(case, name, "autocast"), forecast.cell(case, name, "autocast")
            if seen and expected and sum(seen.quantize_ms.values()) > 0 and seen.counts:
                quantize.setdefault(name, []).append((sum(seen.quantize_ms.values()), sum(expected.quantize_ms.values())))
    hello: Mapping[str, Any] = measured.results.hello
    return Calibration(
        gpu=forecast.chip.name,
        device=str(hello.get("device", {}).get("name", "")),
        products=product_factors(measured, forecast),
        quantize={name: _factor(each) for name, each in quantize.items()},
        versions=dict(hello.get("versions", {})),
    )


def product_factors(measured: Findings, forecast: ForecastFindings) -> dict[str, dict[str, float]]:
    """Of products alone, by format and pass."""
    pairs: dict[tuple[str, str], list[Pair]] = {}
    for format_and_pass, pair in _product_times(measured, forecast):
        pairs.setdefault(format_and_pass, []).append(pair)
    products: dict[str, dict[str, float]] = {}
    for (fmt, pass_name), found in pairs.items():
        products.setdefault(fmt, {})[pass_name] = _factor(found)
    return products


def row_factors(steps: Iterable[tuple[Mapping[Row, float], Mapping[Row, float]]]) -> dict[str, float]:
    """Of a step's other parts: (measured, forecast) milliseconds of each step's rows.

    >>> row_factors([({"attention": 2.0, "products": 9.0}, {"attention": 1.0}), ({"attention": 1.0}, {"attention": 2.0})])
    {'attention': 1.0}
    """
    pairs: dict[str, list[Pair]] = {}
    for seen, expected in steps:
        for row in CALIBRATED_ROWS:
            if seen.get(row) and expected.get(row):
                pairs.setdefault(row, []).append((seen[row], expected[row]))
    return {row: _factor(found) for row, found in pairs.items()}


def _product_times(measured: Findings, forecast: ForecastFindings) -> Iterator[tuple[tuple[str, str], Pair]]:
    for name in measured.columns("pre-quantized"):
        for case in measured.cases:
            seen, expected = measured.cell(case, name, "pre-quantized"), forecast.cell(case, name, "pre-quantized")
            if seen is None or expected is None or not seen.counts:
                continue
            for pass_name, time_ms in seen.pass_ms.items():
                yield (product_format(recipe(name), pass_name, forecast.chip), pass_name), (time_ms, expected.pass_ms[pass_name])


def _factor(pairs: Sequence[Pair]) -> float:
    """What all of them take together, measured over forecast: large ones count for what they take, as they do in training.

    >>> _factor([(3.0, 2.0), (9.0, 10.0)])
    1.0
    """
    return round(sum(seen for seen, _ in pairs) / sum(expected for _, expected in pairs), 4)
