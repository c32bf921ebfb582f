"""What was measured on the user's own GPU, as factors on its forecast: `gemmscope calibrate` writes them, forecasts use them.

A forecast based on public measurements is right on average, but not for one library version, cooling and power limit. A few
linears measured here give a factor for each format and pass, in the sustained state and in bursts, and one for the quantization
of each recipe; two short training steps give one for attention, norms, optimizer and embedding. Each updates a multiplier by the
rule of everything that is measured (`stacks.py`): error bars then cover what differs from shape to shape, and little of what all
shapes share. The factors of one H200 ship with the package.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from math import hypot, log
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, Field

from gemmscope.choices import ClockState, Mode
from gemmscope.errors import UserError
from gemmscope.files import write_text
from gemmscope.findings import Finding, finding
from gemmscope.folders import config_folder
from gemmscope.forecast.coefficients import REINSTALL, read_stored
from gemmscope.forecast.stacks import HALF_WIDTHS, Multiplier
from gemmscope.forecast.training import gemm_format, library_uncertainty
from gemmscope.gpu.specs import GpuSpec, gpus, spec_of
from gemmscope.grouping import Key, grouped
from gemmscope.model.spec import RunSpec, from_hyperparameters
from gemmscope.parts import StepPart
from gemmscope.reading import LIMITS, called, read_text
from gemmscope.recipe.precisions import timed_precisions
from gemmscope.recipe.recipes import recipe, recipes
from gemmscope.results.linears import Linears, OpTime
from gemmscope.toml import load_data
from gemmscope.workload.cases import Case
from gemmscope.workload.ops import Pass

LARGEST_FACTOR = 5.0  # a larger one means that another GPU was measured
XDG_HINT = "set XDG_CONFIG_HOME to a folder that can be written"
AGAIN = "run gemmscope calibrate again, or remove the file to forecast without it"

_DESIGN = load_data("gemmscope.forecast", "coefficients/calibration.toml")
SPREAD: dict[str, float] = _DESIGN["spread"]
CASES = tuple(Case("x".join(map(str, sizes)), *sizes) for sizes in _DESIGN["linears"])
STACKS = tuple((from_hyperparameters(**stack["model"]), RunSpec(**stack["run"])) for stack in _DESIGN["step"])
CALIBRATED_PARTS: tuple[StepPart, ...] = ("attention", "norms and activations", "optimizer", "embedding")
Name = TypeVar("Name", bound=str)
Factor = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=1 / LARGEST_FACTOR, le=LARGEST_FACTOR)]
GemmFactors = dict[str, dict[Pass, Factor]]


@dataclass(frozen=True)
class Calibration:
    """Factors of one GPU, measured over forecast: `gemms[format][pass]` sustained, `burst` the same for a rested GPU,
    `quantize[recipe]`, and `parts[part of a step]`. `node`, `uuid` and `health` (under load): of the GPU that was measured.
    `own_chip`: it is the user's own."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    own_chip: ClassVar[bool] = True

    gpu: str
    device: str
    gemms: GemmFactors
    quantize: dict[str, Factor]
    burst: GemmFactors = field(default_factory=dict)
    parts: dict[StepPart, Factor] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    node: str = ""
    uuid: str = ""
    health: dict[str, int | str] = field(default_factory=dict)
    version: Literal[3] = 3

    def __post_init__(self) -> None:
        for what, names, known in (
            ("format", (*self.gemms, *self.burst), timed_precisions()),
            ("recipe", self.quantize, recipes()),
            ("calibrated part", self.parts, CALIBRATED_PARTS),
        ):
            if unknown := [name for name in names if name not in known]:
                raise ValueError(f"there is no {what} {unknown[0][:40]!r}")

    def gemm(self, fmt: str, pass_name: Pass, state: ClockState, chip: GpuSpec) -> Multiplier | None:
        """The multiplier of one kind of GEMM; if only the other state was measured, by that.

        >>> from gemmscope.gpu.specs import gpu
        >>> known = Calibration("h200", "", {"bf16": {"fprop": 1.2}}, {})
        >>> states = ("sustained", "burst")
        >>> [round(known.gemm("bf16", "fprop", state, gpu("h200")).half_width, 2) for state in states]
        [0.03, 0.1]
        """
        own, other = (self.gemms, self.burst) if state == "sustained" else (self.burst, self.gemms)
        for factors, further in ((own, 0.0), (other, SPREAD["other state"])):
            if pass_name in factors.get(fmt, {}):
                return self.multiplier(factors[fmt][pass_name], "gemms", library_uncertainty(fmt, chip), further)
        return None

    def multiplier(self, factor: float, what: str, uncertainty: float, further: float = 0.0) -> Multiplier:
        """What is known of a factor that was measured. `uncertainty`: of the forecast without; `further`: of the measurement."""
        spread = hypot(SPREAD[what], further)
        believed, seen = Multiplier(0.0, (uncertainty / HALF_WIDTHS) ** 2), Multiplier(log(factor), spread**2)
        return believed.updated(seen) if self.own_chip else Multiplier(seen.log, believed.variance)


class OtherChip(Calibration):
    """The calibration of another GPU of the same kind. Forecasts start from its factors, and stay as uncertain as without."""

    own_chip = False


def place(gpu: str) -> Path:
    """Where a GPU's calibration lies in the user's configuration folder."""
    return config_folder() / "calibration" / f"{gpu}.json"


def shipped(gpu: str) -> Calibration | None:
    """The calibration that ships with the package, where there is one for this GPU."""
    file = files("gemmscope.forecast").joinpath(f"coefficients/calibrated/{gpu}.json")
    return _read(OtherChip, file.read_text("utf-8"), f"calibrated/{gpu}.json", gpu, REINSTALL) if file.is_file() else None


def load(gpu: str) -> Calibration | None:
    """The user's own calibration of a GPU, if there is one; a `UserError` if its file is damaged or of another version."""
    path = place(gpu)
    try:
        path.lstat()
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        pass  # reading the file reports why
    return _read(Calibration, read_text(path, LIMITS["calibration"]["bytes"], AGAIN), called(path), gpu, AGAIN)


def calibrated(gpu: str, *, own_only: bool = False) -> tuple[Calibration | None, list[Finding]]:
    """What was measured on this GPU, by this user or (unless `own_only`) for this package, and the finding that says so."""
    if (own := load(gpu)) is not None:
        return own, [finding("calibrated-here", device=own.device, file=str(place(gpu)))]
    if own_only or (ours := shipped(gpu)) is None:
        return None, []
    return ours, [finding("calibrated-shipped", device=ours.device)]


def _read(kind: type[Calibration], text: str, origin: str, gpu: str, hint: str) -> Calibration:
    """A calibration from its JSON; a `UserError` that names `origin` if it is not valid."""
    calibration = read_stored(kind, "calibration", text, origin, hint)
    if calibration.gpu != gpu:
        raise UserError(f"{origin} is a damaged calibration: it is of {calibration.gpu[:40]!r}, not of {gpu!r}", hint)
    return calibration


def drop_implausible(calibration: Calibration) -> tuple[Calibration, list[Finding]]:
    """Drop factors that no GPU can have, with a finding for each: they mean that the measurement went wrong.

    >>> drop_implausible(Calibration("h200", "", {"bf16": {"fprop": 1.0}}, {"FP8Block": 9.0}))[1][0].facts["what"]
    'quantization for FP8Block'
    """
    dropped = list[Finding]()

    def kept(table: Mapping[Name, float], what: str) -> dict[Name, float]:
        bad = {name: factor for name, factor in table.items() if not 1 / LARGEST_FACTOR <= factor <= LARGEST_FACTOR}
        dropped.extend(finding("implausible-factor", what=f"{what}{name}", factor=factor) for name, factor in bad.items())
        return {name: factor for name, factor in table.items() if name not in bad}

    gemms, burst = (
        {fmt: kept(passes, f"{fmt}, {state}, ") for fmt, passes in table.items()}
        for state, table in (("sustained", calibration.gemms), ("burst", calibration.burst))
    )
    quantize, parts = kept(calibration.quantize, "quantization for "), kept(calibration.parts, "")
    return replace(calibration, gemms=gemms, burst=burst, quantize=quantize, parts=parts), dropped


def check_place(gpu: str) -> None:
    """Raise a `UserError` if `save` could not write, before minutes of measuring rather than after."""
    path = place(gpu)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise OSError("it is a folder" if path.is_dir() else "no permission")  # noqa: TRY301
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}", XDG_HINT) from None


def save(calibration: Calibration) -> None:
    """Write the calibration where forecasts look for it."""
    check_place(calibration.gpu)
    write_text(place(calibration.gpu), json.dumps(asdict(calibration), indent=1) + "\n", XDG_HINT)


def known_gpu(device: str) -> GpuSpec:
    """The GPU in the tables that the driver calls by this name.

    >>> known_gpu("NVIDIA H200 NVL").name, known_gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition").name
    ('h200-nvl', 'rtx-pro-6000')
    """
    spec = spec_of(device)
    if spec is None:
        raise UserError(f"{device} is not in the table of GPUs: its forecast cannot be calibrated", f"known: {', '.join(gpus())}")
    return spec


def quantize_factors(measured: Linears, forecast: Linears) -> dict[str, float]:
    """The factor on the time of quantization, for each recipe."""
    return _factors(
        (name, (seen.quantization_ms, expected.quantization_ms))
        for name, seen, expected in _op_times(measured, forecast, "autocast")
        if seen.quantization_ms > 0
    )


def gemm_factors(measured: Linears, forecast: Linears, chip: GpuSpec) -> GemmFactors:
    """The factor on the time of GEMMs, by format and pass."""
    flat = _factors(
        ((gemm_format(recipe(name), pass_name, chip), pass_name), (time_ms.value, expected.pass_ms[pass_name].value))
        for name, seen, expected in _op_times(measured, forecast, "pre-quantized")
        for pass_name, time_ms in seen.pass_ms.items()
    )
    by_format = grouped((fmt, (pass_name, factor)) for (fmt, pass_name), factor in flat.items())
    return {fmt: dict(of_format) for fmt, of_format in by_format.items()}


def part_factors(steps: Iterable[tuple[Mapping[StepPart, float], Mapping[StepPart, float]]]) -> dict[StepPart, float]:
    """The factor on the time of a step's other parts, from the (measured, forecast) milliseconds of each step.

    >>> part_factors([({"attention": 2.0, "GEMMs": 9.0}, {"attention": 1.0}), ({"attention": 1.0}, {"attention": 2.0})])
    {'attention': 1.0}
    """
    return _factors(
        (part, (seen[part], expected[part]))
        for seen, expected in steps
        for part in CALIBRATED_PARTS
        if seen.get(part) and expected.get(part)
    )


def _op_times(measured: Linears, forecast: Linears, mode: Mode) -> Iterator[tuple[str, OpTime, OpTime]]:
    """The recipe, the measured and the forecast time of every op that has both times."""
    for name in measured.columns(mode) if mode in measured.modes else ():
        for case in measured.cases:
            seen, expected = (linears.op_time(case.op, name, mode) for linears in (measured, forecast))
            if seen is not None and expected is not None and seen.counts:
                yield name, seen, expected


def _factors(times_ms: Iterable[tuple[Key, tuple[float, float]]]) -> dict[Key, float]:
    """By key, the sum of measured times divided by the sum of forecasts, so that large ops weigh as much as in training.

    >>> _factors([("FP8Block", (3.0, 2.0)), ("FP8Block", (9.0, 10.0))])
    {'FP8Block': 1.0}
    """
    sums = {key: [sum(column) for column in zip(*pairs, strict=True)] for key, pairs in grouped(times_ms).items()}
    return {key: round(seen / expected, 4) for key, (seen, expected) in sums.items()}
