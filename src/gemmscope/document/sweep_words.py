"""How sweeps are named in titles and sentences: a forecast says FORECAST everywhere, a measured one never."""

from dataclasses import dataclass

from gemmscope import units
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.sweep import GpuSweep, MeasuredSweep, SweepPoint, Swept

OF: dict[Swept, str] = {"training step": "the training step", "linears": "the linears", "GEMM": "the GEMM"}


@dataclass(frozen=True)
class Wording:
    """Titles of one sweep, and words of its sentences."""

    name: str  # beside other sweeps
    of: str  # what was measured or forecast
    section: str
    curve: str
    heat: str
    points: str
    break_even: str
    summary: str
    plane: str
    line: str  # how the line with the number of points begins
    faster: str  # how the line with the break-even begins
    beyond: str
    possible: str  # what points are called that can be ranked
    not_ranked: str  # the column that says why others cannot
    blank: str  # what cells of a heat map without a speedup mean


def wording(sweep: GpuSweep) -> Wording:
    """The words of a sweep, by where its numbers come from."""
    return _measured(sweep) if isinstance(sweep, MeasuredSweep) else _forecast(sweep)


def _forecast(sweep: GpuSweep) -> Wording:
    gpu = f"{sweep.gpu}: FORECAST"
    return Wording(
        name=sweep.gpu,
        of="the training step",
        section=f"{gpu} of the training step",
        curve=f"{gpu} speedup of the training step over {BASELINE}",
        heat=f"{gpu} of the best recipe and its speedup of the training step over {BASELINE}",
        points=f"{gpu}, every point of the sweep",
        break_even=f"{gpu} break-even: faster than {BASELINE} beyond the error bar, from here to the end of the sweep",
        summary="Best recipe for the training step [90% error bar]",
        plane=f"Best recipe and its speedup over {BASELINE}",
        line=f"{sweep.gpu}: at",
        faster=f"{sweep.gpu}: faster than {BASELINE}",
        beyond="error bar",
        possible="possible point",
        not_ranked="Not possible",
        blank="not possible, or does not fit",
    )


def _measured(sweep: MeasuredSweep) -> Wording:
    mode, of = f", {sweep.mode}" if sweep.mode else "", OF[sweep.what]
    return Wording(
        name=sweep.mode or sweep.gpu,
        of=f"{of} in {sweep.mode} mode" if sweep.mode else of,
        section=f"{sweep.what[0].upper()}{sweep.what[1:]}{mode}",
        curve=f"Speedup of {of} over {BASELINE}{mode}",
        heat=f"Best recipe and its speedup of {of} over {BASELINE}{mode}",
        points=f"Every point of the sweep{mode}",
        break_even=f"Break-even{mode}: faster than {BASELINE} beyond the interval, from here to the end of the sweep",
        summary=f"Best recipe for {of} [95% interval]",
        plane=f"Best recipe and its speedup over {BASELINE}{mode}",
        line=f"{sweep.mode.capitalize()}: at" if sweep.mode else "At",
        faster=f"{sweep.mode.capitalize()}: faster than {BASELINE}" if sweep.mode else f"Faster than {BASELINE}",
        beyond="interval",
        possible="measured point",
        not_ranked="Not measured",
        blank="not possible, or not measured",
    )


def time_name(sweep: GpuSweep) -> str:
    """The column of the baseline's time."""
    return f"{BASELINE} step ms" if sweep.subject == "training step" else f"{BASELINE} ms"


def point_name(point: SweepPoint) -> str:
    """The sizes of a point, for a sentence."""
    return units.names(f"{name} {value}" for name, value in point.values.items())
