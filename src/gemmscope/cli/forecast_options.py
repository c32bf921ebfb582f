"""Options of `gemmscope forecast` beside the model: GPUs and their state, what to vary, a list of GEMMs, the cost of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmscope.cli.sweep_options import axes_of
from gemmscope.errors import UserError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
    mix: str | None = None
    keep_higher: str | None = None
    cache_weights: bool = False
    as_te_benchmark: bool = False

    def given(self) -> list[str]:
        """Options that were given and are about a model, not about single GEMMs."""
        about_model = (
            "network", "nvlink_domain", "tokens", "gpus", "price", "mix", "keep_higher", "cache_weights", "as_te_benchmark",
        )  # fmt: skip
        return [name for name in about_model if getattr(self, name) not in (None, False)]

    def names(self) -> list[str]:
        """The GPUs as they were typed."""
        return [part.strip() for part in (self.gpu or "").split(",") if part.strip()]

    def axes(self) -> dict[str, Sequence[int]]:
        """The sizes to vary, with their values."""
        return axes_of(self.sweep or ())

    def prices(self) -> float | Mapping[str, float] | None:
        """One price for every GPU, or one for each by its name."""
        return parse_prices(self.price) if self.price is not None else None


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
