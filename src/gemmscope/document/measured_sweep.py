"""The Document of a `SweepResult`: a measured sweep, with the tables and charts that a forecast sweep has."""

from gemmscope import units
from gemmscope.document.common import SPLIT, command_facts
from gemmscope.document.model import Document, Message, Section, Subject
from gemmscope.document.sweep import sweep_answer, sweep_figures, sweep_section
from gemmscope.document.sweep_summary import sweep_summary
from gemmscope.document.table import Cell, Facts, Table, columns, number
from gemmscope.results.sweep import SweepResult

BATCH = ("micro_batch_size", "sequence_length")
SAME_CHIP = "All recipes of a point run on the same GPU, so both sides of every speedup come from one chip."


def measured_sweep_document(result: SweepResult, name: str = "") -> Document:
    """Build the Document of the result."""
    sizes = " and ".join(result.sweeps[0].sizes)
    model = f" of {result.name}" if result.model is not None else " of a GEMM"
    answer, because = sweep_answer(result.sweeps[0])
    for sweep in result.sweeps[1:]:
        because += sweep_answer(sweep)[1]
    sections = [sweep_section(sweep) for sweep in result.sweeps]
    until = _until(result) if result.sample_count != 1 else _until(result).removeprefix("each ")
    return Document(
        kind="sweep",
        title=f"Measured sweep over {sizes}{model} on {result.where}",
        subject=Subject(f"A measured sweep over {sizes}{model}"),
        where=result.where,
        answer=answer,
        because=tuple(because),
        key_figures=sweep_figures(result.sweeps[0]),
        summary=sweep_summary(result.sweeps),
        context=(
            *([result.model.description] if result.model is not None and result.model.description else []),
            *([fixed] if (fixed := _fixed(result)) else []),
            f"{units.counted(result.sample_count, 'point')} measured by gemmscope {result.of}, {until}",
            f"{result.backend} backend; every interval is a 95% confidence interval",
        ),
        sections=(*sections, *([_gpus(result)] if result.gpus else [])),
        messages=tuple(map(Message.of, result.findings)),
        facts={"Method": _method(result)},
        next_purpose="see one of these points in detail: run the same command without --sweep, and with its sizes",
        name=name,
    )


def _fixed(result: SweepResult) -> str:
    """The sizes that do not vary."""
    varied = result.sweeps[0].sizes
    if result.shape is not None:
        return ", ".join(f"{name} {size}" for name, size in zip("mkn", result.shape, strict=True) if name not in varied)
    if result.run is None:  # a module, whose inputs say it
        return ""
    sizes = [f"{name} {getattr(result.run, name)}" for name in BATCH if name not in varied]
    split = [f"{name} {value}" for name in SPLIT if name not in varied and (value := getattr(result.run, name)) > 1]
    recompute = [f"recompute {result.run.recompute}"] if result.run.recompute != "none" else []
    return ", ".join([*sizes, *split, *recompute])


def _until(result: SweepResult) -> str:
    if result.precision is None:
        return "each with a fixed number of runs"
    return f"each until its speedups are known to ±{result.precision:.1%} or for {result.time_limit_s:g} s"


def _gpus(result: SweepResult) -> Section:
    """Which GPUs measured the points."""
    rows = tuple(
        (
            Cell(gpu.place),
            Cell(gpu.name or "-"),
            number(gpu.points, str(gpu.points)),
            Cell(", ".join(f"{name} {version}" for name, version in gpu.versions.items()) or "-"),
            Cell(gpu.uuid or "-"),
        )
        for gpu in result.gpus
    )
    heads = (*columns(("GPU", "Type"), ("Points",)), *columns(("Versions", "UUID"), (), {"UUID": 1}))
    return Section("GPUs", (Table("GPUs that measured the points", heads, rows),))


def _method(result: SweepResult) -> Facts:
    lines = [
        ("model", result.model.name if result.model is not None else ""),
        ("varied", " and ".join(result.sweeps[0].sizes)),
        ("not varied", _fixed(result)),
        ("measured", f"{SAME_CHIP} Points are measured {_until(result)}."),
        ("backend", result.backend),
        ("GPUs", str(len(result.gpus))),
        *command_facts(result),
    ]
    return tuple((name, value) for name, value in lines if value)
