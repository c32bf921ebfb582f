"""`gemmscope calibrate`: measures a few linears on this GPU, and forecasts of it use what was found from then on."""

from __future__ import annotations

import typer

from gemmscope.cli.bench import campaign_of, measure
from gemmscope.cli.bench_options import ChoiceOptions, TimingOptions
from gemmscope.cli.bench_output import Target
from gemmscope.cli.choose import choose, visible_gpu
from gemmscope.cli.options import takes
from gemmscope.cli.output import say
from gemmscope.errors import UserError

EXAMPLES = """\b
Examples:
  gemmscope calibrate
  gemmscope calibrate --recipes fp8current,fp8block --longest 120
"""


@takes(ChoiceOptions, TimingOptions)
def command(choices: ChoiceOptions, timing: TimingOptions) -> None:
    """Measure this GPU, so that `gemmscope forecast --gpu` of it stands on what it really does.

    Eight linears in every precision that the GPU runs, both modes, in the sustained state. The factors between measured and
    forecast times are written to the user's configuration folder. Other GPUs' forecasts stay as they are.
    """
    from gemmscope.forecast.calibration import CASES, compare, known_gpu, save
    from gemmscope.forecast.findings import ForecastFindings
    from gemmscope.forecast.linears import Forecaster
    from gemmscope.gpu.environment import environment
    from gemmscope.measure.findings import Findings
    from gemmscope.measure.link import Link

    timing.check()
    machine = environment()
    choice = choose(choices, machine)
    gpu = visible_gpu(machine)
    if choice.backend == "cpu" or gpu is None:
        raise UserError("calibrating needs an NVIDIA GPU: forecasts are of GPUs", "leave out --device cpu")
    chip = known_gpu(gpu.name)
    with Link() as started:
        target = Target("calibration", "designed shapes", list(CASES))
        campaign, _ = campaign_of(target, choice, timing, started, for_nsight=False)
        ended, interrupted = measure(campaign, resume=timing.resume)
    results = campaign.results
    findings = Findings(results, choice.recipes, choice.modes, backend=choice.backend)
    if interrupted or not findings.cells():
        say("nothing is written: " + (ended if interrupted else "nothing could be measured"))
        raise typer.Exit(130 if interrupted else 1)
    plain = ForecastFindings(Forecaster(chip, "sustained"), findings.cases, choice.recipes, choice.modes)
    found = compare(findings, plain)
    for fmt, passes in found.products.items():
        said = ", ".join(f"{name} {factor:.3f}" for name, factor in passes.items())
        say(f"{fmt}: measured over forecast: {said}")
    for name, factor in found.quantize.items():
        say(f"quantizing for {name}: measured over forecast: {factor:.3f}")
    say(f"wrote {save(found)}: forecasts of {chip.name} in the sustained state use it from now on")
