"""What low precision does to the gradients of weights: the errors of wgrad, and those of dgrad that arrive from later layers.

The error of a dgrad has a part from W, which is the same for all tokens and for many steps, and a part from dY, which differs
from token to token. Both travel to all earlier layers. On the way they are diluted: the gradient of the residual stream is that
of later layers plus what a block adds, and only what is added has passed through quantized GEMMs. How much that is follows from
the norms of dY at the linears that end a block, which read the residual stream's gradient.

Bias stays when many micro-batches are averaged, noise averages out with the gradient's own noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from gemmscope.grouping import grouped
from gemmscope.results.numerics import GradientError, LinearError
from gemmscope.roles import role_named

LEAST_SIGNAL = 0.02  # share of a gradient's squared norm that is no noise, where the measured one is smaller
SOFTMAX = (
    "q",
    "k",
    "query",
    "key",
)  # their gradients pass through the softmax, which removes most of the error of dgrad before it


@dataclass(frozen=True)
class Arriving:
    """The squared relative error of a gradient."""

    bias: float = 0.0
    noise: float = 0.0

    def plus(self, other: Arriving, share: float = 1.0) -> Arriving:
        """With another error added, of which a share counts."""
        return Arriving(self.bias + share * other.bias, self.noise + share * other.noise)


def completed(linears: Sequence[LinearError]) -> list[LinearError]:
    """The linears with their damage in nats per token, for a loss that is the mean over the tokens of a micro-batch, and with the
    errors that arrive at their gradients."""
    tokens = max((linear.tokens or 0.0 for linear in linears), default=0.0)
    scaled = [one if one.damage is None else one.model_copy(update={"damage": one.damage * tokens}) for one in linears]
    return with_arriving_errors(scaled)


def with_arriving_errors(linears: Sequence[LinearError]) -> list[LinearError]:
    """The linears with the errors that arrive at their dY included in their gradients' errors."""
    updated: dict[tuple[str, str], GradientError] = {}
    for recipe, own in grouped((linear.recipe, linear) for linear in linears if linear.layer is not None).items():
        signal = _signal(own)
        for name, arriving in _arriving(own).items():
            gradient = next(one.gradient for one in own if one.name == name)
            if gradient is not None:
                bias = gradient.bias + arriving.bias * signal * gradient.squared
                noise = gradient.noise + arriving.noise * gradient.energy + arriving.bias * gradient.own_noise
                updated[recipe, name] = gradient.model_copy(update={"bias": bias, "noise": noise})
    return [
        linear.model_copy(update={"gradient": updated.get((linear.recipe, linear.name), linear.gradient)}) for linear in linears
    ]


def _signal(linears: Iterable[LinearError]) -> float:
    """The share of the gradients' squared norms that is no noise: one for all, because that of a single micro-batch is
    uncertain."""
    known = [one.gradient for one in linears if one.gradient is not None and one.gradient.squared > 0]
    shares = [1 - one.own_noise / one.squared for one in known]
    return min(max(fmean(shares), LEAST_SIGNAL), 1.0) if shares else 1.0


def _arriving(linears: Sequence[LinearError]) -> Mapping[str, Arriving]:
    """The error of dY of every linear, from the last layer to the first one."""
    errors: dict[str, Arriving] = {}
    stream, added, before = Arriving(), Arriving(), 0.0
    for block, end in _blocks(linears):
        norm = fmean(one.gradient.arriving for one in end if one.gradient is not None) if end and end[0].gradient else 0.0
        share = min(max(1 - before / norm, 0.0), 1.0) if norm and before and end[0].experts == 1 else 0.5
        stream = stream.plus(added, share if before else 0.0)
        before = norm if norm and end[0].experts == 1 else before or norm
        inside = stream.plus(_dgrad(end))
        rest = [one for one in block if one not in end]
        for one in block:
            through_softmax = one.linear.rpartition(".")[2].partition("_")[0] in SOFTMAX
            errors[one.name] = stream if one in end or through_softmax else inside
        added = _dgrad(end).plus(_dgrad(rest))
    return errors


def _blocks(linears: Sequence[LinearError]) -> list[tuple[list[LinearError], list[LinearError]]]:
    """The linears of every block, the last block first, and those that end it."""
    blocks = grouped(((one.layer or 0, "attn" in one.linear or "attention" in one.linear), one) for one in linears)
    ordered = [list(blocks[key]) for key in sorted(blocks, key=lambda key: (-key[0], key[1]))]
    return [(block, [one for one in block if (role := role_named(one.op)) is not None and role.ends_block]) for block in ordered]


def _dgrad(linears: Sequence[LinearError]) -> Arriving:
    """The mean error that the dgrads of some linears add."""
    passes = [one for linear in linears for one in linear.passes if one.pass_name == "dgrad"]
    if not passes:
        return Arriving()
    of_weights = [one.relative.value**2 * one.first_share for one in passes]
    return Arriving(fmean(of_weights), fmean(one.relative.value**2 for one in passes) - fmean(of_weights))
