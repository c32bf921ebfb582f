"""`gemmscope calibrate`: measures linears and short steps on this GPU, and forecasts of it use what was found from then on."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from gemmscope.cli.bench import campaign_of, measure
from gemmscope.cli.bench_options import ChoiceOptions, TimingOptions
from gemmscope.cli.bench_output import Target
from gemmscope.cli.choose import Choice, choose, visible_gpu
from gemmscope.cli.options import takes
from gemmscope.cli.output import say
from gemmscope.cli.progress import Progress
from gemmscope.errors import UserError

if TYPE_CHECKING:
    from gemmscope.forecast.calibration import Calibration
    from gemmscope.forecast.findings import ForecastFindings
    from gemmscope.forecast.gemm import State
    from gemmscope.gpu.specs import GpuSpec
    from gemmscope.measure.findings import Findings
    from gemmscope.model.spec import ModelSpec, RunSpec
    from gemmscope.step.waterfall import Row

EXAMPLES = """\b
Examples:
  gemmscope calibrate
  gemmscope calibrate --recipes fp8current,fp8block --longest 120
"""
REST_MS, BURST_DROP_MS, BURST_KEEP_MS = 100.0, 2.0, 15.0
RESTED_KNOWN_TO, RESTED_LONGEST_S = 0.03, 25.0
STEPS_KNOWN_TO, STEPS_LONGEST_S = 0.02, 8.0


@takes(ChoiceOptions, TimingOptions)
def command(choices: ChoiceOptions, timing: TimingOptions) -> None:
    """Measure this GPU, so that `gemmscope forecast --gpu` of it stands on what it really does.

    Eight linears in every precision that the GPU runs, both modes, in the sustained state; their products once more on a
    rested chip; and two short training steps. A minute or two (90 s on an H200). The factors between measured and forecast
    times are written to the user's configuration folder. Other GPUs' forecasts stay as they are.
    """
    from gemmscope.forecast.calibration import check_place, compare, known_gpu, save, without_the_impossible
    from gemmscope.gpu.environment import environment

    timing.check()
    machine = environment()
    choice = choose(choices, machine, cache_weights=timing.cache_weights)
    gpu = visible_gpu(machine)
    if choice.backend == "cpu" or gpu is None:
        raise UserError("calibrating needs an NVIDIA GPU: forecasts are of GPUs", "leave out --device cpu")
    chip = known_gpu(gpu.name)
    check_place(chip.name)
    say("linears in the state that training runs in …")
    findings = _linears(choice, timing)
    found = compare(findings, _forecast(findings, chip, "sustained"))
    say("their products on a rested chip …")
    found = replace(found, burst=_burst(choice, timing, chip))
    if choice.backend != "torch":
        found = replace(found, rows=_rows(choice, chip, found))
    found, impossible = without_the_impossible(found)
    _tell(found)
    for words in impossible:
        say(f"warning: left out, no GPU is so far from its forecast: {words}")
    say(f"wrote {save(found)}: forecasts of {chip.name} use it from now on")


def _linears(choice: Choice, timing: TimingOptions, *, rested: bool = False) -> Findings:
    """The designed linears, measured; ends here if that is not to be."""
    from gemmscope.forecast.calibration import CASES
    from gemmscope.measure.findings import Findings
    from gemmscope.measure.link import Link
    from gemmscope.measure.sampler import StoppingRule

    with Link() as started:
        target = Target("calibration", "designed shapes", list(CASES))
        campaign, _ = campaign_of(target, choice, timing, started, for_nsight=False)
        if rested:
            campaign.settings = replace(campaign.settings, rest_ms=REST_MS, drop_ms=BURST_DROP_MS, keep_ms=BURST_KEEP_MS)
            campaign.rule = StoppingRule(target=RESTED_KNOWN_TO, longest_s=RESTED_LONGEST_S)
        ended, interrupted = measure(campaign, resume=timing.resume)
    caches = timing.cache_weights
    findings = Findings(campaign.results, choice.recipes, choice.modes, backend=choice.backend, cache_weights=caches)
    if interrupted or not findings.cells():
        say("nothing is written: " + (ended if interrupted else "nothing could be measured"))
        raise typer.Exit(130 if interrupted else 1)
    return findings


def _burst(choice: Choice, timing: TimingOptions, chip: GpuSpec) -> dict[str, dict[str, float]]:
    """Of products on a rested chip, measured over forecast."""
    from gemmscope.forecast.calibration import product_factors

    findings = _linears(replace(choice, modes=["pre-quantized"]), timing, rested=True)
    return product_factors(findings, _forecast(findings, chip, "burst"))


def _forecast(findings: Findings, chip: GpuSpec, state: State) -> ForecastFindings:
    """The same linears from public measurements."""
    from gemmscope.forecast.findings import ForecastFindings
    from gemmscope.forecast.linears import Forecaster

    forecaster = Forecaster(chip, state, cache_weights=findings.cache_weights)
    return ForecastFindings(forecaster, findings.cases, findings.recipes, findings.modes)


def _rows(choice: Choice, chip: GpuSpec, found: Calibration) -> dict[str, float]:
    """Of what is no product, measured over forecast; empty if no step could be run."""
    from gemmscope.forecast.calibration import STACKS, row_factors

    try:
        return row_factors([_step(choice, chip, found, *stack) for stack in STACKS])
    except UserError as error:
        say(f"warning: attention, norms and optimizer are not calibrated: {error.message}")
        return {}


def _step(
    choice: Choice, chip: GpuSpec, found: Calibration, model: ModelSpec, run: RunSpec
) -> tuple[dict[Row, float], dict[Row, float]]:
    """A short step in BF16: milliseconds of its rows, measured and forecast."""
    from gemmscope.forecast.linears import Forecaster
    from gemmscope.forecast.step import StepForecast
    from gemmscope.measure.sampler import StoppingRule
    from gemmscope.recipe.recipes import BASELINE
    from gemmscope.step.answer import rows_of
    from gemmscope.step.plan import plan_step
    from gemmscope.step.predict import StepRun, StepSettings
    from gemmscope.store.journal import Journal, state_folder
    from gemmscope.workload.derive import derive

    say(f"a step of {len(model.layers)} layers, {run.micro_batch_size} x {run.sequence_length} tokens …")
    rule = StoppingRule(target=STEPS_KNOWN_TO, longest_s=STEPS_LONGEST_S)
    settings, journal = StepSettings(choice.backend, host=False), Journal(state_folder() / "journal.sqlite3")
    made = StepRun(plan_step(model, run)[0], [BASELINE], settings, rule, journal, command=sys.argv[1:])
    with Progress(made) as show:
        made.on_message = show
        made.run()
    forecast = StepForecast(Forecaster(chip, "sustained", measured=found.adjustment()), model, run, derive(model, run))
    expected = {row: part.value for row, part in forecast.step(BASELINE).rows.items()}
    return rows_of(made.results, BASELINE) or {}, expected


def _tell(found: Calibration) -> None:
    """Measured over forecast, all of it."""
    for state, products in (("sustained", found.products), ("burst", found.burst)):
        for fmt, passes in products.items():
            said = ", ".join(f"{name} {factor:.3f}" for name, factor in passes.items())
            say(f"{fmt}, {state}: measured over forecast: {said}")
    for name, factor in found.quantize.items():
        say(f"quantizing for {name}: measured over forecast: {factor:.3f}")
    for row, factor in found.rows.items():
        say(f"{row}: measured over forecast: {factor:.3f}")
