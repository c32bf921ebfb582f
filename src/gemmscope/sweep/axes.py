"""What a sweep varies, forecast or measured: its sizes, every combination of their values, and those that are not possible."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import product
from math import prod
from typing import Any, TypeVar

from gemmscope.errors import UserError, did_you_mean, in_python, option, shown
from gemmscope.job.load import SIZES, ModelRun, assumed_batch, load_model, model_run
from gemmscope.model.spec import ModelSpec
from gemmscope.results.base import ModelSummary
from gemmscope.results.sweep import SweepPoint
from gemmscope.signals import DeferredSignals

MEASURED_SIZES = (*SIZES, "micro_batch_size", "sequence_length", "gradient_accumulation", "tp", "cp", "pp", "ep", "etp")
"""Sizes that change what one GPU runs."""
FORECAST_SIZES = (*MEASURED_SIZES, "global_batch", "vp", "dp", "zero", "fsdp", "gpus")
"""Sizes that forecasts can vary."""
LINEAR_SIZES = tuple(name for name in MEASURED_SIZES if name != "gradient_accumulation")
"""Sizes that change the linears of one micro-batch."""
MOST_POINTS = 100_000
MOST_REASONS, OTHER_REASONS = 20, "other reasons (see the table of all points)"

Axes = Mapping[str, Sequence[int]]
Point = TypeVar("Point")


def check_axes(axes: Axes, sizes: Sequence[str], model: Mapping[str, Any], most: int = MOST_POINTS) -> None:
    """A `UserError` for sizes that cannot vary, too many of them, or too many points."""
    for name in axes:
        if name not in sizes:
            hint = f"{did_you_mean(name, sizes)}sizes: {', '.join(sizes)}"
            raise UserError(f"{shown(name)} is not a size that a sweep can vary", hint)
    if not 1 <= len(axes) <= 2:
        raise UserError(f"a sweep varies one or two sizes, not {len(axes)}", "use one or two")
    if single := [name for name, values in axes.items() if not isinstance(values, Sequence) or isinstance(values, str)]:
        raise UserError(
            f"the sweep needs a list of values for {single[0]}, not {shown(axes[single[0]])}", f"for example {single[0]} 1, 2, 4"
        )
    if empty := [name for name, values in axes.items() if not values]:
        raise UserError(f"the sweep gives {empty[0]} no values", f"for example {empty[0]} 1, 2, 4")
    if (points := prod(map(len, axes.values()))) > most:
        raise UserError(f"the sweep has {points} points, more than {most}", "take larger steps")
    other = [way for way in ("config", "preset", "module") if model.get(way) is not None]
    varied = [name for name in axes if name in SIZES]
    if other and varied:
        raise UserError(
            f"the sweep varies {varied[0]} of a model given by its sizes, but {option(other[0])} names a model",
            "give the sizes (hidden_size and so on) instead, or vary the run: micro_batch_size, sequence_length, tp …",
        )


def combinations(axes: Axes) -> Iterable[dict[str, int]]:
    """Every combination of values, each once."""
    for combination in product(*(dict.fromkeys(values) for values in axes.values())):
        yield dict(zip(axes, combination, strict=True))


def configurations(
    model: Mapping[str, Any], run: Mapping[str, Any], axes: Axes, describe: Callable[[ModelRun], Point], deferred: DeferredSignals
) -> tuple[list[tuple[dict[str, int], Point]], list[tuple[dict[str, int], str]]]:
    """Every combination that is possible, as `describe` returns it, and the others with the reason. If none is possible, the
    first reason is raised. A signal ends it. `model` and `run` are the arguments of `load_model` and `model_run`.
    """
    load = cache(lambda sizes: load_model(**{**model, **dict(sizes)}))  # most sweeps vary the run, not the model
    if "sequence_length" in axes:  # all points have the batch of the longest sequence, not each its own
        source = load(tuple((name, values[0]) for name, values in axes.items() if name in SIZES))
        run = {
            **assumed_batch({**source.run_settings, **run, **{name: max(values) for name, values in axes.items()}}, source),
            **run,
        }

    def described(values: Mapping[str, int]) -> Point:
        sizes = tuple((name, value) for name, value in values.items() if name in SIZES)
        return describe(model_run(load(sizes), **{**run, **{name: value for name, value in values.items() if name not in SIZES}}))

    return possible_points(axes, described, deferred)


def possible_points(
    axes: Axes, describe: Callable[[Mapping[str, int]], Point], deferred: DeferredSignals | None = None
) -> tuple[list[tuple[dict[str, int], Point]], list[tuple[dict[str, int], str]]]:
    """Every combination for which `describe` raises no `UserError`, with what it returns, and the others with the reason."""
    possible: list[tuple[dict[str, int], Point]] = []
    impossible: list[tuple[dict[str, int], str]] = []
    first: UserError | None = None
    for values in combinations(axes):
        if deferred is not None and deferred.first is not None:
            break
        try:
            possible.append((values, describe(values)))
        except UserError as error:
            first = first or error
            impossible.append((values, in_python(error.message)))
    if not possible and first is not None:
        raise first
    return possible, impossible


def by_reason(points: Iterable[SweepPoint]) -> dict[str, list[str]]:
    """The points without times, by reason. Beyond `MOST_REASONS`, the other reasons are combined."""
    reasons: dict[str, list[str]] = {}
    for point in points:
        reasons.setdefault(
            point.reason if (point.reason in reasons or len(reasons) < MOST_REASONS) else OTHER_REASONS, []
        ).append(point.place)
    return reasons


def swept_model(model: ModelSpec | None, origin: str, axes: Axes) -> ModelSummary:
    """Which model a sweep is about; without its sizes where some of them vary."""
    about = ModelSummary.of(model, model.name if model is not None else origin, origin)
    varies = any(name in SIZES for name in axes)
    return about.model_copy(update={"hidden_size": None, "num_hidden_layers": None, "description": ""}) if varies else about
