"""Options of `gemmscope forecast` beside the model: GPUs and their state, what to vary, a list of GEMMs, the cost of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from gemmscope.cli.options import GPUS, TOKENS, size
from gemmscope.errors import UserError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SWEEP_HINT = "for example --sweep hidden_size=2048:16384:1024 or --sweep micro_batch_size=1,2,4,8"
MOST_VALUES = 100_000


@dataclass(frozen=True)
class ForecastOptions:
    """Which GPUs, and what to forecast for them."""

    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="GPUs, side by side: h200, b200, b300 … (an unknown name lists them)"),
    ] = None
    state: Annotated[
        str,
        typer.Option(metavar="sustained|burst", help="The power-limited state that training runs in, or the first moments."),
    ] = "sustained"
    dp: Annotated[int | None, size("Data parallel size: replicas that exchange gradients. (default: 1)")] = None
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=A:B:STEP", help="Vary a size (or NAME=1,2,4); twice for a plane. Shows the best precision."),
    ] = None
    gemms: Annotated[
        str | None,
        typer.Option(metavar="FILE.csv|-", help="GEMMs instead of a model: columns m, k, n, format [, layout, groups, library]."),
    ] = None
    library: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --gemms: as this library was measured. (default: the GPU's usual)"),
    ] = None
    tokens: Annotated[float | None, TOKENS] = None
    gpus: Annotated[int | None, GPUS] = None
    price: Annotated[
        str | None, typer.Option(metavar="X|NAME=X,…", help="Per GPU-hour, for all GPUs or for each: h200=2.5,b300=4.")
    ] = None
    cache_weights: Annotated[
        bool, typer.Option("--cache-weights", help="Weights are quantized once per step: leave that out of the linears' times.")
    ] = False

    def given(self) -> list[str]:
        """Options that were given and are about a model, not about single GEMMs."""
        values = {name: getattr(self, name) for name in ("dp", "tokens", "gpus", "price")}
        return [
            *(name for name, value in values.items() if value is not None),
            *(["cache_weights"] if self.cache_weights else []),
        ]

    def names(self) -> list[str]:
        """The GPUs as they were typed."""
        return [part.strip() for part in (self.gpu or "").split(",") if part.strip()]

    def axes(self) -> dict[str, Sequence[int]]:
        """The sizes to vary, with their values."""
        axes: dict[str, Sequence[int]] = {}
        for text in self.sweep or ():
            name, values = parse_sweep(text)
            if name in axes:
                raise UserError(f"--sweep varies {name} twice", "vary another size, or give all its values in one --sweep")
            axes[name] = values
        return axes

    def prices(self) -> float | Mapping[str, float] | None:
        """One price for every GPU, or one for each by its name."""
        return parse_prices(self.price) if self.price is not None else None


def parse_sweep(text: str) -> tuple[str, Sequence[int]]:
    """`hidden_size=2048:16384:1024` or `micro_batch_size=1,2,4`.

    >>> parse_sweep("hidden-size=1024:3072:1024"), parse_sweep("tp=1,2")
    (('hidden_size', range(1024, 3073, 1024)), ('tp', [1, 2]))
    """
    name, _, values = text.partition("=")
    name, values = name.strip().replace("-", "_"), values.strip()
    if re.fullmatch(r"\d+:\d+:\d+", values):
        first, last, step = map(int, values.split(":"))
        if step == 0:
            raise UserError(f"--sweep {shown(text)} has a step of zero", SWEEP_HINT)
        if first > last:
            raise UserError(f"--sweep {shown(text)} ends before it begins", f"swap the ends: {name}={last}:{first}:{step}")
        if (last - first) // step >= MOST_VALUES:
            raise UserError(f"--sweep {shown(text)} has more than {MOST_VALUES} values", "take larger steps")
        return name, range(first, last + 1, step)
    if re.fullmatch(r"\d+(\s*,\s*\d+)*", values):
        return name, [int(part) for part in values.split(",")]
    raise UserError(f"--sweep {shown(text)} is neither NAME=FIRST:LAST:STEP nor NAME=VALUE,VALUE,…", SWEEP_HINT)


def parse_prices(text: str) -> float | Mapping[str, float]:
    """A price, or prices by GPU.

    >>> parse_prices("2.5"), parse_prices("h200=2.5, b300=4")
    (2.5, {'h200': 2.5, 'b300': 4.0})
    """
    try:
        if "=" not in text:
            return float(text)
        pairs = [part.partition("=") for part in text.split(",")]
        return {name.strip().lower(): float(price) for name, _, price in pairs}
    except ValueError:
        raise UserError(
            f"--price {shown(text)} is not a price", "per GPU-hour: --price 2.5, or --price h200=2.5,b300=4"
        ) from None
