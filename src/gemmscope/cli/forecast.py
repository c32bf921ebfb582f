"""`gemmscope forecast`."""

import os
from typing import Any

from gemmscope import commands, signals, writers
from gemmscope.cli.bench_options import RecipeOptions, parse_shapes
from gemmscope.cli.forecast_options import ForecastOptions
from gemmscope.cli.options import ClusterOptions, ModelOptions, takes
from gemmscope.cli.output import FigureOptions, check_targets, deliver, say, typed_command, write
from gemmscope.errors import UserError, option, shown

ONLY_LINEARS = ("cache_weights", "as_te_benchmark", "pre_quantize", "autocast_only")
COST, MIXES = ("tokens", "price"), ("mix", "keep_higher")


@takes(ModelOptions, ClusterOptions, RecipeOptions, ForecastOptions, FigureOptions)
def command(
    model_options: ModelOptions,
    run_options: ClusterOptions,
    recipe_options: RecipeOptions,
    options: ForecastOptions,
    outputs: FigureOptions,
    shapes: str | None = None,
) -> None:
    """Forecast a model's linears and its training step on GPUs that are not here."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: the matrices are small, and threads would only wait
    named = [*model_options.given(), *run_options.given()]
    if options.gemms is not None:
        named += [*(["shapes"] if shapes is not None else []), *(["sweep"] if options.sweep else [])]
        _forecast_gemms(options, outputs, named, [*recipe_options.given(), *options.given()])
        return
    if options.library is not None:
        raise UserError(
            f"{option('library')} applies only to {option('gemms')}: a model is forecast with the library that training uses",
            "remove it",
        )
    named += [name for name in options.given() if name != "cache_weights"]
    if shapes is not None and (named or options.sweep):
        others = ", ".join(map(option, [*named, *(["sweep"] if options.sweep else [])]))
        raise UserError(f"{option('shapes')} forecasts bare GEMMs, but {others} applies to a model", "use only one of them")
    check_targets(outputs.targets(), [*model_options.files(), *([options.mix] if options.mix is not None else [])])
    recipe_options.explain_no_fp8(options.names())
    common: dict[str, Any] = {
        "choices": recipe_options.choices(),
        "state": options.state,
        "network": options.network,
        "nvlink_domain": options.nvlink_domain,
        "command": typed_command(),
    }
    given_gpus = {"gpus": options.gpus} if options.gpus is not None else {}
    if options.sweep:
        unused = [name for name in (*recipe_options.given(), *options.given()) if name in (*ONLY_LINEARS, *COST, *MIXES)]
        if unused:
            what = "the cost of one run" if unused[0] in COST else "one run" if unused[0] in MIXES else "the linears alone"
            raise UserError(
                f"{option('sweep')} forecasts the training step of many runs, but {option(unused[0])} applies to {what}",
                "remove it",
            )
        model, run, axes = model_options.given(), run_options.given() | given_gpus, options.axes()
        with signals.defer_signals():  # also while the points that were computed are written
            result = commands.forecast.sweep(model, run, axes, options.names(), reporter=commands.Console(), **common)
            deliver(result, outputs)
        return
    parsed = None
    if shapes is not None:
        parsed = parse_shapes(shapes) or [(side, side, side) for side in commands.bench.LADDER]
    result = commands.forecast.forecast(
        run_options.of(model_options.load(), **given_gpus) if parsed is None else None,
        options.names(),
        shapes=parsed,
        cache_weights=options.cache_weights,
        as_te_benchmark=options.as_te_benchmark,
        tokens=options.tokens,
        gpu_count=options.gpus,
        price=options.prices(),
        mix=options.mix,
        keep_higher=options.keep_higher,
        reporter=commands.Console(),
        **common,
    )
    deliver(result, outputs)


def _forecast_gemms(options: ForecastOptions, outputs: FigureOptions, named: list[str], unused: list[str]) -> None:
    """Forecast single GEMMs from a file, and write CSV to -o or --csv, else to standard output."""
    if named:
        listed = ", ".join(map(option, named))
        raise UserError(f"{option('gemms')} forecasts single GEMMs, but {listed} describes a model", "use only one of them")
    if unused:
        listed = ", ".join(map(option, unused))
        raise UserError(
            f"{option('gemms')} forecasts single GEMMs in the formats of its file: {listed} has no effect", "remove it"
        )
    if outputs.output is not None and outputs.output.lower().endswith(writers.FIGURE_ENDINGS):
        raise UserError(
            f"{option('gemms')} draws no figure, but -o {shown(outputs.output)} names one", "for example -o times.csv"
        )
    for name, path in (("json", outputs.json), ("markdown", outputs.markdown)):
        if path is not None:
            raise UserError(f"{option('gemms')} writes CSV only, not {option(name)}", "give a path with --csv or -o")
    if outputs.csv is not None and outputs.output is not None:
        raise UserError("--csv and -o both name an output file", "use only one of them")
    where = outputs.csv or outputs.output or "-"
    assert options.gemms is not None
    check_targets({"csv" if outputs.csv else "output": where}, [options.gemms])
    result = commands.forecast.forecast_gemms(options.gemms, options.names(), state=options.state, library=options.library)
    write(where, result.csv)
    for finding in result.findings:
        say(finding.text)
