"""Options of sweeps: which sizes take which values, and which GPUs measure the points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmscope import commands
from gemmscope.errors import UserError, option, shown
from gemmscope.options import values as sizes

if TYPE_CHECKING:
    from collections.abc import Sequence


SWEEP_HINT = "for example --sweep hidden_size=2k:16k:1k or --sweep micro_batch_size=1,2,4,8"
MOST_VALUES = 100_000


@dataclass(frozen=True)
class SweepOptions:
    """What a measured sweep varies, and where its points are measured."""

    sweep: list[str] | None = None
    gpus: str | None = None
    ray: str | None = None

    def axes(self) -> dict[str, Sequence[int]]:
        """The sizes to vary, with their values."""
        return axes_of(self.sweep or ())

    def places(self) -> commands.Places:
        """Where the points are measured, as the application takes it."""
        return commands.Places(self.gpus, self.ray)

    def check_alone(self) -> None:
        """Raise a `UserError` for options that only a sweep supports."""
        if self.ray is not None:
            raise UserError(
                f"{option('ray')} spreads many measurements over a cluster, but this is a single one",
                f"add {option('sweep')}, or measure every GPU with gemmscope fleet",
            )

    def gpu_count(self) -> int | None:
        """The number of GPUs of the full run, as given with --gpus."""
        if self.gpus is None:
            return None
        try:
            return sizes.size(self.gpus)
        except ValueError:
            raise UserError(
                f"{option('gpus')} is the number of GPUs of the full run, got {shown(self.gpus)}",
                f"for example {option('gpus', 256)}; with {option('sweep')} it names the GPUs that measure",
            ) from None


def axes_of(texts: Sequence[str]) -> dict[str, Sequence[int]]:
    """The sizes to vary with their values, from the values of --sweep."""
    axes: dict[str, Sequence[int]] = {}
    for text in texts:
        name, values = parse_sweep(text)
        if name in axes:
            raise UserError(f"--sweep varies {name} twice", "vary another size, or give all its values in one --sweep")
        axes[name] = values
    return axes


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
