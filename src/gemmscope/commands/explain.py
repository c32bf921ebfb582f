"""`gemmscope explain`: why a recorded training step is not faster, from its profiler trace."""

from collections.abc import Sequence
from pathlib import Path

from gemmscope.compare.traces import check_model_flops, with_prediction, with_twin
from gemmscope.errors import UserError, option
from gemmscope.explain.diagnose import TraceDiagnosis, diagnose, write_annotated
from gemmscope.explain.phase import framework_titles
from gemmscope.explain.rank_comparison import RankComparison, compare_ranks
from gemmscope.explain.recorded_trace import read_trace
from gemmscope.explain.trace_file import A_TRACE
from gemmscope.explain.trace_tables import explain_tables
from gemmscope.files import same_file
from gemmscope.forecast.better_gemms import with_better_recipe
from gemmscope.job.load import ModelRun
from gemmscope.job.rank_workload import rank_workload
from gemmscope.options.reading import ExplainOptions
from gemmscope.reading import InputFile, enough_memory
from gemmscope.results.base import damage_reported
from gemmscope.results.bench import BenchResult
from gemmscope.results.explain import ExplainResult
from gemmscope.results.read import read_result
from gemmscope.results.step import StepResult
from gemmscope.run_context import PLAIN, RunContext
from gemmscope.workload.summary import totals

PathLike = str | Path
ALONE = ExplainOptions()


def explain(
    traces: Sequence[PathLike], options: ExplainOptions = ALONE, context: RunContext = PLAIN, *, job: ModelRun | None = None
) -> ExplainResult:
    """Where the time of a recorded step went, and why it is not faster.

    `traces`: one trace; the ranks of one job (or their folder); or the same training in BF16 and low precision. `job`: the model,
    to check its FLOPs.
    """
    baseline, against, recipe, perfetto = options.baseline, options.against, options.recipe, options.perfetto
    paths = trace_files(traces)
    _check(paths, baseline, options.steps, perfetto)
    if recipe is not None and against is None:
        raise UserError(
            f"{option('recipe', recipe)} selects a recipe of a run file, but no run file is given",
            f"add {option('against', 'RUNFILE')}",
        )
    expected = read_result(against, ("bench", "step")) if isinstance(against, (str, Path)) else against
    sources = [InputFile(path, A_TRACE) for path in paths]
    if perfetto is not None:  # the trace is read once more
        for source in sources:
            source.keep()
    with enough_memory(", ".join(map(str, sources[:3]))):
        diagnosis, twin, ranks = _diagnose(sources, baseline, options.steps)
    findings = list(ranks.findings) if ranks is not None else []
    comparisons = [with_twin(twin, diagnosis)] if twin is not None else []
    if isinstance(expected, (StepResult, BenchResult)):
        origin = str(against) if isinstance(against, (str, Path)) else f"the {expected.kind} result"
        with damage_reported(expected):
            comparisons.append(with_prediction(diagnosis, expected, recipe, origin))
    if job is not None:
        subject = rank_workload(job, context.reporter.say)
        model_flops = totals(subject.workload, subject.run, subject.source.model).gemm_flops
        findings.append(check_model_flops(diagnosis, model_flops * diagnosis.account.micro_batches, subject.name))
    if perfetto is not None:
        write_annotated(diagnosis, perfetto)
        context.reporter.say(f"wrote {perfetto}; open it at https://ui.perfetto.dev")
    trace, evidence = diagnosis.trace, diagnosis.evidence
    tables = explain_tables(diagnosis, ranks.waits_us if ranks is not None else {})
    shapes = with_better_recipe(tables.gemm_shapes, trace.gpu_name) if trace.phase.judged else tables.gemm_shapes
    return ExplainResult(
        command=context.command,
        findings=(*diagnosis.findings, *findings),
        trace=str(trace.path),
        gpu=trace.gpu_name,
        rank=trace.rank,
        world_size=trace.world_size,
        steps=diagnosis.view.count,
        steps_found_by=diagnosis.view.steps.found_by,
        each_step=diagnosis.each_step,
        phase=trace.phase.name,
        judged=trace.phase.judged,
        account=diagnosis.account,
        low_share=evidence.low_share,
        low_share_of=evidence.share_of,
        framework=", ".join(framework_titles(trace.phase.frameworks)),
        verdict=diagnosis.verdict,
        causes=diagnosis.causes,
        comparisons=tuple(comparisons),
        ranks=ranks.times if ranks is not None else (),
        straggler=ranks.straggler if ranks is not None else None,
        tables=tables.model_copy(update={"gemm_shapes": shapes}),
    )


def trace_files(traces: Sequence[PathLike]) -> list[Path]:
    """The files; of a folder, the traces that the profiler's TensorBoard handler wrote, one for each rank."""
    files: list[Path] = []
    for path in map(Path, traces):
        try:
            names = sorted(file.name for file in path.iterdir()) if path.is_dir() else None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}", A_TRACE) from None
        inside = [path] if names is None else [path / name for name in names if name.endswith((".json", ".json.gz"))]
        if not inside:
            raise UserError(
                f"{path} is a folder without traces (.json, .json.gz)", "give a trace file, or a folder of trace files"
            )
        files += inside
    if not files:
        raise UserError("no trace is given", "give a trace file written by the PyTorch profiler")
    return files


def _check(paths: Sequence[Path], baseline: PathLike | None, steps: int | None, perfetto: PathLike | None) -> None:
    """Reject invalid arguments before a large trace is read."""
    if steps is not None and steps < 1:
        raise UserError(f"{option('steps', steps)}: a trace has at least one step", f"for example {option('steps', 3)}")
    if str(perfetto) == "-":
        raise UserError(
            f"{option('perfetto')} writes a file, not to standard output",
            f"for example {option('perfetto', 'annotated.json.gz')}",
        )
    inputs = [*paths, *([Path(baseline)] if baseline is not None else [])]
    if perfetto is not None and any(same_file(perfetto, path) for path in inputs):
        raise UserError(f"{option('perfetto', perfetto)} would overwrite an input file", "name another file")


def _diagnose(
    sources: Sequence[InputFile], baseline: PathLike | None, steps: int | None
) -> tuple[TraceDiagnosis, TraceDiagnosis | None, RankComparison | None]:
    """The trace to explain, its BF16 twin, and the ranks compared with each other, if there are several."""
    diagnoses = [diagnose(read_trace(source), steps) for source in sources]
    twin = diagnose(read_trace(baseline), steps) if baseline is not None else None
    if len(diagnoses) == 1:
        return diagnoses[0], twin, None
    if _one_job(diagnoses):
        ranks = compare_ranks(diagnoses)
        return ranks.explained, twin, ranks
    if len(diagnoses) == 2 and twin is None and sum(not diagnosis.evidence.is_low for diagnosis in diagnoses) == 1:
        slow, fast = sorted(diagnoses, key=lambda diagnosis: diagnosis.evidence.low_share)
        return fast, slow, None
    raise UserError(
        f"the {len(diagnoses)} traces are neither ranks of one job nor BF16 and low precision of one training",
        f"give one trace, and the same training in BF16 with {option('baseline', 'TRACE')}",
    )


def _one_job(diagnoses: Sequence[TraceDiagnosis]) -> bool:
    """Ranks of one job have different ranks, the same world size, and one precision: BF16 and FP8 are a pair instead."""
    ranks = {diagnosis.trace.rank for diagnosis in diagnoses}
    sizes = {diagnosis.trace.world_size for diagnosis in diagnoses}
    low = {diagnosis.evidence.is_low for diagnosis in diagnoses if diagnosis.evidence.gemms}
    return None not in ranks and len(ranks) == len(diagnoses) and len(sizes) == 1 and len(low) <= 1
