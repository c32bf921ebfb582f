"""`gemmscope calibrate`."""

import typer

from gemmscope import commands, writers
from gemmscope.cli.bench_options import ChoiceOptions, TimingOptions
from gemmscope.cli.codes import NOTHING_MEASURED
from gemmscope.cli.options import takes
from gemmscope.cli.output import say, typed_command


@takes(ChoiceOptions, TimingOptions)
def command(choice_options: ChoiceOptions, timing_options: TimingOptions) -> None:
    """Measure this GPU, for more accurate forecasts of it."""
    result = commands.calibrate.calibrate(
        choices=choice_options.choices(),
        timing=timing_options.bench_timing(),
        resume=timing_options.resume,
        command=typed_command(),
        reporter=commands.Console(),
    )
    if result is None:
        say("nothing could be measured, so nothing was written")
        raise typer.Exit(NOTHING_MEASURED)
    writers.terminal.show_table(commands.calibrate.factor_table(result.calibration))
    for finding in result.findings:
        say(f"{finding.level}: {finding.text}")
    say(f"wrote {result.path}: forecasts for {result.calibration.gpu} use it from now on")
