"""`gemmscope calibrate`: measures linears and short steps on this GPU, so that forecasts for it are based on them."""

from dataclasses import dataclass, replace
from pathlib import Path

from gemmscope.bench.campaign import LinearCampaign
from gemmscope.bench.choose import Choice, choose
from gemmscope.bench.linears import measured_linears
from gemmscope.bench.timing import bench_settings, check_timing, stopping_rule
from gemmscope.choices import ClockState
from gemmscope.document.table import Column, Table, table
from gemmscope.engine.campaign import LocalWorkers
from gemmscope.engine.journal import RecordedRun, fingerprint
from gemmscope.engine.rule import StoppingRule
from gemmscope.errors import UserError, option
from gemmscope.findings import Finding, finding
from gemmscope.forecast import calibration as factors
from gemmscope.forecast.calibration import Calibration
from gemmscope.forecast.linear_results import forecast_linears
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.step import StepForecast
from gemmscope.gpu.environment import environment
from gemmscope.gpu.specs import GpuSpec
from gemmscope.gpu.visible import visible_gpu
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.options.measuring import CalibrateOptions
from gemmscope.parts import StepPart
from gemmscope.progress import Reporter
from gemmscope.recipe.recipes import BASELINE, recipes
from gemmscope.results.linears import Linears
from gemmscope.results.step import StepSettings
from gemmscope.run_context import PLAIN, RunContext
from gemmscope.signals import defer_signals
from gemmscope.step.answer import gpu_time, profiled_step
from gemmscope.step.stack_plan import plan_step
from gemmscope.step.step_campaign import StepCampaign
from gemmscope.workload.cases import tasks_of
from gemmscope.workload.derive import derive

CALIBRATED = CalibrateOptions()
REST_MS, BURST_DROP_MS, BURST_KEEP_MS = 100.0, 2.0, 15.0
RESTED_PRECISION, RESTED_LIMIT_S = 0.03, 25.0
STEPS_PRECISION, STEPS_LIMIT_S = 0.02, 8.0


@dataclass(frozen=True, repr=False)
class Calibrated:
    """What was measured, and the file that forecasts read it from."""

    calibration: Calibration
    path: Path
    findings: tuple[Finding, ...]

    def __repr__(self) -> str:
        return f"<Calibrated {self.calibration.gpu} in {str(self.path)!r}>"


def calibrate(options: CalibrateOptions = CALIBRATED, context: RunContext = PLAIN) -> Calibrated | None:
    """Measure this GPU and write the factors between measured and forecast times. None if nothing could be measured."""
    check_timing(options)
    machine = environment()
    gpu = visible_gpu(machine)
    if options.on_cpu:
        which = option("device", "cpu") if options.device == "cpu" else option("backend", "cpu")
        raise UserError(f"a CPU cannot be calibrated: forecasts are for NVIDIA GPUs ({which})", f"remove {which}")
    if gpu is None:
        raise UserError(
            "there is no NVIDIA GPU here to calibrate",
            "run this on the machine that has the GPU; gemmscope forecast also works without a calibration",
        )
    choice = choose(options, machine)
    chip = factors.known_gpu(gpu.name)
    factors.check_place(chip.name)
    mark = fingerprint("calibrate", chip.name, choice.backend, choice.recipes, options.but(resume=False).values())
    with (
        context.recording(mark, resume=options.resume) as recording,
        LocalWorkers() as workers,
        defer_signals(),
    ):
        session = _CalibrationRun(choice, options, chip, recording, workers, context.reporter)
        context.reporter.say("measuring linears at sustained clocks …")
        linears, campaign = session.linears()
        if not linears.ops:
            return None
        expected = session.forecast(linears, "sustained")
        gemms, quantize = factors.gemm_factors(linears, expected, chip), factors.quantize_factors(linears, expected)
        context.reporter.say("measuring their GEMMs on a rested GPU …")
        rested, _ = session.linears(rested=True)
        hello = campaign.results.hello
        measured = Calibration(
            gpu=chip.name,
            device=str(hello.device.get("name", "")),
            gemms=gemms,
            quantize=quantize,
            burst=factors.gemm_factors(rested, session.forecast(rested, "burst"), chip),
            versions=dict(hello.versions),
            node=str(hello.device.get("node", "")),
            uuid=str(hello.device.get("uuid", "")),
            health=dict(hello.device.get("health", {})),
        )
        parts, findings = session.parts(measured) if choice.backend != "torch" else ({}, [])
        calibration, dropped = factors.drop_implausible(replace(measured, parts=parts))
        recording.deliver(lambda: factors.save(calibration), complete=True)
    return Calibrated(calibration, factors.place(calibration.gpu), (*findings, *dropped))


@dataclass(frozen=True)
class _CalibrationRun:
    """Everything that the measurements share."""

    choice: Choice
    options: CalibrateOptions
    chip: GpuSpec
    recording: RecordedRun
    workers: LocalWorkers
    reporter: Reporter

    def linears(self, *, rested: bool = False) -> tuple[Linears, LinearCampaign]:
        """The designed linears; `rested`: their GEMMs alone, each on a GPU that was idle before."""
        choice = replace(self.choice, modes=["pre-quantized"]) if rested else self.choice
        same = {name: other for name, known in recipes().items() if (other := known.same_kernels_as)}
        settings, rule = bench_settings(self.options, choice.backend), stopping_rule(self.options)
        if rested:
            settings = replace(settings, rest_ms=REST_MS, drop_ms=BURST_DROP_MS, keep_ms=BURST_KEEP_MS)
            rule = StoppingRule(target=RESTED_PRECISION, longest_s=RESTED_LIMIT_S)
        tasks = tasks_of(factors.CASES, choice.recipes, choice.modes, same)
        campaign = LinearCampaign(tasks=tasks, settings=settings, rule=rule, recording=self.recording, workers=self.workers)
        self._run(campaign)
        caches = self.options.cache_weights
        return measured_linears(
            campaign.results, choice.recipes, choice.modes, backend=choice.backend, cache_weights=caches
        ), campaign

    def _run(self, campaign: LinearCampaign | StepCampaign) -> None:
        """Measure. A signal ends the calibration; `resume` continues it."""
        with self.reporter.measuring(campaign) as on_message, defer_signals() as signals:
            campaign.on_message = on_message
            campaign.run()
            if campaign.interrupted:
                raise signals.interruption()

    def forecast(self, measured: Linears, state: ClockState) -> Linears:
        """The same linears from public measurements."""
        return forecast_linears(
            Forecaster(self.chip, state, cache_weights=measured.cache_weights), measured.cases, measured.recipes, measured.modes
        )

    def parts(self, measured: Calibration) -> tuple[dict[StepPart, float], list[Finding]]:
        """The factors of everything that is not a GEMM; empty if no step could be run."""
        try:
            return factors.part_factors([self._step(measured, *stack) for stack in factors.STACKS]), []
        except UserError as error:
            return {}, [finding("parts-not-calibrated", reason=error.message)]

    def _step(self, measured: Calibration, model: ModelSpec, run: RunSpec) -> tuple[dict[StepPart, float], dict[StepPart, float]]:
        """A short step in BF16: milliseconds of its parts, measured and forecast."""
        self.reporter.say(
            f"measuring a step of {len(model.layers)} layers, {run.micro_batch_size} x {run.sequence_length} tokens …"
        )
        rule = StoppingRule(target=STEPS_PRECISION, longest_s=STEPS_LIMIT_S)
        settings = StepSettings(self.choice.backend, host=False)
        plan, _ = plan_step(model, run)
        step = StepCampaign(
            plan=plan, recipes=[BASELINE], settings=settings, rule=rule, recording=self.recording, workers=self.workers
        )
        self._run(step)
        deepest = step.results.deepest(BASELINE)
        profiled = profiled_step(step.results, deepest, gpu_time(step.results, None, BASELINE)) if deepest is not None else None
        forecast = StepForecast(Forecaster(self.chip, "sustained", measured=measured), model, run, derive(model, run))
        return profiled.parts_ms() if profiled is not None else {}, forecast.step(BASELINE).parts_ms


def factor_table(calibration: Calibration) -> Table:
    """Every factor of a calibration."""
    listed = {
        f"{fmt} GEMMs, {state}, {pass_name}": factor
        for state, formats in (("sustained", calibration.gemms), ("burst", calibration.burst))
        for fmt, passes in formats.items()
        for pass_name, factor in passes.items()
    }
    listed |= {f"quantization, {name}": factor for name, factor in calibration.quantize.items()}
    listed |= {str(part): factor for part, factor in calibration.parts.items()}

    return table(
        "factors",
        f"Measured over forecast time on {calibration.device}",
        listed,
        Column[str]("Part", str),
        Column("Factor", lambda name: listed[name], ".3f"),
    )
