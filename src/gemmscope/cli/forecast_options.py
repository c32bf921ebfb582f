"""Options of `gemmscope forecast` beside the model: GPUs and their state, what to vary, a list of GEMMs, the cost of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmscope import sizes
from gemmscope.errors import UserError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SWEEP_HINT = "for example --sweep hidden_size=2k:16k:1k or --sweep micro_batch_size=1,2,4,8"
MOST_VALUES = 100_000


@dataclass(frozen=True)
class ForecastOptions:
    """Which GPUs, and what to forecast for them."""

    gpu: str | None = None
    state: str = "sustained"
    network: str | None = None
    nvlink_domain: int | None = None
    sweep: list[str] | None = None
    gemms: str | None = None
    library: str | None = None
    tokens: float | None = None
    gpus: int | None = None
    price: str | None = None
    cache_weights: bool = False
    as_te_benchmark: bool = False

    def given(self) -> list[str]:
        """Options that were given and are about a model, not about single GEMMs."""
        about_model = ("network", "nvlink_domain", "tokens", "gpus", "price", "cache_weights", "as_te_benchmark")
        return [name for name in about_model if getattr(self, name) not in (None, False)]

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
    """`hidden_size=2k:16k:1k` or `micro_batch_size=1,2,4`.

    >>> parse_sweep("hidden-size=1k:3k:1k"), parse_sweep("tp=1,2")
    (('hidden_size', range(1024, 3073, 1024)), ('tp', [1, 2]))
    """
    name, _, values = text.partition("=")
    name, parts = name.strip().replace("-", "_"), values.split(":")
    is_range = len(parts) == 3
    try:
        if "-" in values:
            raise ValueError  # noqa: TRY301  # no size is below zero
        numbers = [sizes.size(part) for part in (parts if is_range else values.split(","))]
    except ValueError:
        raise UserError(f"--sweep {shown(text)} is neither NAME=FIRST:LAST:STEP nor NAME=VALUE,VALUE,…", SWEEP_HINT) from None
    if not is_range:
        return name, numbers
    first, last, step = numbers
    if step == 0:
        raise UserError(f"--sweep {shown(text)} has a step of zero", SWEEP_HINT)
    if first > last:
        raise UserError(f"--sweep {shown(text)} ends before it begins", f"swap the ends: {name}={last}:{first}:{step}")
    if (last - first) // step >= MOST_VALUES:
        raise UserError(f"--sweep {shown(text)} has more than {MOST_VALUES} values", "take larger steps")
    return name, range(first, last + 1, step)


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
