"""`gemmscope plan`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from gemmscope import commands, signals
from gemmscope.cli.bench_options import RecipeOptions
from gemmscope.cli.options import ModelOptions, takes
from gemmscope.cli.output import FigureOptions, check_targets, deliver, typed_command
from gemmscope.errors import UserError, option, shown
from gemmscope.options import values as sizes

VARY_HINT = "for example --vary hidden=5120,6144 or --vary layers=32,40"


@dataclass(frozen=True)
class PlanOptions:
    """What is planned, and what the search is restricted to."""

    gpu: str | None = None
    gpus: int | None = None
    global_batch: int | None = None
    sequence_length: int | None = None
    vary: list[str] | None = None
    tokens: float | None = None
    price: float | None = None
    state: str = "sustained"
    network: str | None = None
    nvlink_domain: int | None = None
    micro_batch_size: str | None = None
    recompute: str | None = None
    zero: str | None = None
    tp: str | None = None
    cp: str | None = None
    pp: str | None = None
    vp: str | None = None
    ep: str | None = None
    etp: str | None = None
    imbalance: float | None = None
    optimizer_state: str | None = None
    tp_overlap: bool | None = None
    dp_overlap: bool | None = None
    ep_overlap: bool | None = None
    cuda_graphs: bool | None = None

    def restricted(self) -> dict[str, list[Any]]:
        """The axes that were given, with their values."""
        typed = {name: getattr(self, name) for name in ("tp", "pp", "vp", "cp", "ep", "etp", "micro_batch_size", "zero")}
        values: dict[str, list[Any]] = {name: _numbers(name, text) for name, text in typed.items() if text is not None}
        if self.recompute is not None:
            values["recompute"] = [part.strip().lower() for part in self.recompute.split(",") if part.strip()]
        return values

    def varied(self) -> dict[str, list[int]]:
        """The sizes to vary, with their values."""
        axes: dict[str, list[int]] = {}
        for text in self.vary or ():
            name, _, values = text.partition("=")
            name = name.strip().replace("-", "_")
            try:
                numbers = [sizes.size(part) for part in values.split(",")]
            except ValueError:
                raise UserError(f"--vary {shown(text)} is not NAME=VALUE,VALUE,…", VARY_HINT) from None
            if name in axes:
                raise UserError(f"--vary varies {name} twice", "give all its values in one --vary")
            axes[name] = numbers
        return axes

    def settings(self) -> dict[str, Any]:
        """The settings that all layouts share."""
        return {name: value for name in commands.plan.SETTINGS if (value := getattr(self, name)) is not None}


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [sizes.size(part) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"{option(name)} must be whole numbers separated by commas, got {shown(text)}", f"for example {option(name, '1,2,4')}"
        ) from None


@takes(ModelOptions, PlanOptions, RecipeOptions, FigureOptions)
def command(model_options: ModelOptions, options: PlanOptions, recipe_options: RecipeOptions, outputs: FigureOptions) -> None:
    """Find the fastest layout of a model on a number of GPUs."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: the matrices are small, and threads would only wait
    if modes := [name for name in ("pre_quantize", "autocast_only") if getattr(recipe_options, name)]:
        raise UserError(f"{option(modes[0])} applies only to linears, but a plan is about training steps", "remove it")
    check_targets(outputs.targets(), model_options.files())
    names = [part.strip() for part in (options.gpu or "").split(",") if part.strip()]
    with signals.defer_signals():  # also while the layouts that were computed are written
        result = commands.plan.plan(
            model_options.load(),
            names,
            options.gpus,
            global_batch=options.global_batch,
            sequence_length=options.sequence_length,
            restrict=options.restricted(),
            vary=options.varied(),
            settings=options.settings(),
            choices=recipe_options.choices(),
            state=options.state,
            network=options.network,
            nvlink_domain=options.nvlink_domain,
            tokens=options.tokens,
            price=options.price,
            command=typed_command(),
            reporter=commands.Console(),
        )
        deliver(result, outputs)
