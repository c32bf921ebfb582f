"""The result of `fork_loop.py` and its table: how much more loss each recipe has than BF16, and the time to the same loss.

Part of `fork_loop.py`, a prototype that has not run on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fork_statistics import MEASURED, LossGap, is_known, local_slope, separated, tokens_and_ratio
from gemmscope import units
from gemmscope.interval import Interval

CONTROL = "control"  # begins the names of the forks in BF16 with one bit changed
NOT_REPEATABLE = (
    "The same steps from the same state gave different losses: kernels are not deterministic, or a step changes something that "
    "the forks do not restore. If it does, pass that object with state=[...]."
)
LUCKY = (
    "A control has a gap that its own interval does not explain: the luck of a run lasts longer than these forks. The intervals "
    "of all gaps therefore include ±{luck:.4f} for luck, from the controls; more of them (controls=) make it smaller."
)
FAILED = "{recipe} has no gap: {why}."
FLAT = (
    "The slope of the loss is not known well enough to turn a gap into tokens: 1% more tokens lower the loss by {value:.2g} "
    "[{low:.2g}, {high:.2g}]. More logged steps before this one make it better known."
)
LOCAL = "This is a local statement: from this checkpoint, over these steps. Divergence in the long run cannot be seen this way."


@dataclass(frozen=True)
class Fork:
    """One short training."""

    recipe: str
    """BF16 is the base, `control 1` and so on are the base with one bit changed; the others are recipes and mixes."""
    losses: tuple[float, ...] = ()
    """Of every step, up to one that is not finite."""
    validation: tuple[float, ...] = ()
    """Of every held-out batch, after the last step."""
    seconds: float = 0.0
    """Of one step, emulated."""
    linears: int = 0
    """Linears that computed in the recipe."""
    failure: str = ""
    """Why it ended early, or did not run."""


@dataclass(frozen=True)
class ForkResult:
    """Paired short trainings from one state of a training. As text it is a table with what it means."""

    model_name: str
    base: str
    """The precision of the base: that of the user's own training."""
    steps: int
    forks: tuple[Fork, ...]
    """The base and the controls first."""
    gaps: tuple[LossGap, ...]
    """In the order of the forks; the controls first."""
    linears: int
    """Linears of the model."""
    device: str
    versions: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    training_step: int | None = None
    """The step that the training had reached."""
    slope: Interval | None = None
    """What the loss loses while the tokens grow by 1%, at this step of the training."""

    def save(self, path: Path) -> None:
        """Write everything as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def __str__(self) -> str:
        start = f"From step {self.training_step:,}: the" if self.training_step is not None else "The"
        emulated = max(fork.linears for fork in self.forks)
        lines = [
            f"Loss of {self.model_name} in low precision, in paired short trainings (a prototype)",
            f"{start} last {self.steps - self.steps // 2:,} of {self.steps:,} steps; "
            f"emulated in {emulated} of {self.linears} linears; base: {self.base}; {self.device}; 90% intervals",
        ]
        return "\n".join([*lines, "", *self._table(), "", *self._notes()])

    def _table(self) -> Iterator[str]:
        """A row for every control and recipe; columns without a value are left out."""
        forks = {fork.recipe: fork for fork in self.forks}
        columns: dict[str, Callable[[LossGap], str]] = {
            "recipe": lambda gap: gap.recipe,
            "loss gap": lambda gap: signed(gap.gap),
            "per 100 steps": lambda gap: signed(gap.trend),
            "held-out gap": lambda gap: signed(gap.validation) if gap.validation else "",
            "speedup": lambda gap: _ratio(gap.speedup),
            "tokens": lambda gap: _more(gap.tokens) if gap.tokens else "",
            "to the same loss": lambda gap: _ratio(gap.ratio),
            "steps": lambda gap: f"{gap.steps:,}",
            "s per step": lambda gap: f"{forks[gap.recipe].seconds:.3g}",
        }
        texts = {name: [text(gap) for gap in self.gaps] for name, text in columns.items()}
        shown = [[name, *column] for name, column in texts.items() if any(column)]
        widths = [max(map(len, column)) for column in shown]
        for row in zip(*shown, strict=True):
            first, *others = (text.rjust(width) for text, width in zip(row, widths, strict=True))
            yield "  ".join([row[0].ljust(len(first)), *others])

    def _notes(self) -> Iterator[str]:
        """What the table means, and what is wrong."""
        yield f"Controls are {self.base} with one bit changed: what a difference of nothing looks like here."
        for gap in self.gaps:
            if separated(gap.trend) and not gap.recipe.startswith(CONTROL):
                yield f"The gap of {gap.recipe} is not constant: {signed(gap.trend)} per 100 steps."
        if self.slope is not None:
            yield f"Slope: 1% more tokens lower the loss by {self.slope.value:.2g} [{self.slope.low:.2g}, {self.slope.high:.2g}]."
        else:
            yield "Without the slope of the loss curve, a gap cannot be turned into tokens: there is no ratio."
        yield "One in ten of such intervals misses the true value by chance."
        if any(gap.validation for gap in self.gaps):
            yield "Intervals of held-out gaps include the noise of the batches, but not the luck of a run."
        yield LOCAL
        yield from (f"Warning: {warning}" for warning in self.warnings)


def signed(estimate: Interval) -> str:
    """A difference with its interval.

    >>> signed(Interval(0.0061, 0.0031, 0.0092)), signed(Interval(0.5))
    ('+0.0061 ± 0.0031', '+0.500000')
    """
    half = (estimate.high - estimate.low) / 2 if estimate.low is not None and estimate.high is not None else 0.0
    places = max(units.decimals(half), 0)
    return f"{estimate.value:+.{places}f}" + f" ± {half:.{places}f}" * bool(half)


def _more(tokens: Interval) -> str:
    """Tokens to the same loss, as what they are more than those of the base."""
    value, low, high = (f"{100 * ((end or 0.0) - 1):+.1f}%" for end in (tokens.value, tokens.low, tokens.high))
    return f"{value} [{low}, {high}]"


def _ratio(ratio: Interval | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio.value:.2f}x" + (f" [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio.known else "")


def time_to_same_loss(
    result: ForkResult, steps: Sequence[float], losses: Sequence[float], speedups: Mapping[str, Interval] | None = None
) -> ForkResult:
    """The result with the tokens of every recipe to the same loss, and the time to it where its speedup is given.

    `steps`, `losses`: the loss curve of the training from its first step. `speedups`: of recipes over BF16, measured, with their
    95% intervals. Where the slope of the loss is not known, gap and speedup stand side by side, without a ratio.
    """
    slope = local_slope(steps, losses, result.training_step or steps[-1])

    def completed(gap: LossGap) -> LossGap:
        speedup, tokens, ratio = (speedups or {}).get(gap.recipe), None, None
        if is_known(slope) and not gap.recipe.startswith(CONTROL):
            tokens, ratio = tokens_and_ratio(gap.gap, slope, speedup, MEASURED)
        return replace(gap, speedup=speedup, tokens=tokens, ratio=ratio)

    flat = () if is_known(slope) else (FLAT.format(**asdict(slope)),)
    return replace(result, slope=slope, gaps=tuple(map(completed, result.gaps)), warnings=(*result.warnings, *flat))
