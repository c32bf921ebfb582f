"""The result of `gemmscope numerics`: what every recipe loses in accuracy, linear by linear, beside what it gains in speed."""

from collections.abc import Sequence
from math import log10
from typing import Literal

from pydantic import Field

from gemmscope.choices import Switch
from gemmscope.interval import Interval
from gemmscope.results.base import Origin, Part, Result
from gemmscope.workload.ops import Pass, TensorName

Source = Literal["recording", "checkpoint", "synthetic"]


def decibels(relative: float) -> float | None:
    """Signal to quantization noise (SQNR) of a relative error, in dB; None where there is no error.

    >>> decibels(0.1)
    20.0
    """
    return -20 * log10(relative) if relative > 0 else None


class OperandError(Part):
    """One operand of one pass: the tensor as the GEMM reads it, compared with the tensor before quantization."""

    tensor: TensorName
    format: str
    """e4m3, e5m2, e2m1 or bf16."""
    relative: float
    """Norm of the error over the norm of the tensor."""
    underflow: float = 0.0
    """Share of the values other than zero that become zero."""
    saturated: float = 0.0
    """Share of the values that are larger than what the format can hold with their scale."""
    octaves: float | None = None
    """Powers of two between the largest and the smallest value of the tensor, zeros left out."""


class PassError(Part):
    """One GEMM: its output with quantized operands, compared with the output without."""

    pass_name: Pass = Field(alias="pass")
    relative: Interval
    """Norm of the output's error over the norm of the output, in float32; the interval is that of the sample (95%)."""
    first_share: float
    """Share of the squared error that comes from the first operand: W in fprop and dgrad, X in wgrad."""
    cosine: float | None = None
    """Of the output with the exact output."""
    operands: tuple[OperandError, OperandError]


class DroppedPass(Part):
    """A GEMM that ran, but is left out of the errors of its linear in some sampled steps, or in all of them."""

    pass_name: Pass = Field(alias="pass")
    steps: tuple[int, ...]
    """The sampled steps that are left out. If there are others, the pass has an error, which is theirs."""
    reason: str


class GradientError(Part):
    """What low precision does to the gradient of a weight in one micro-batch, in squared norms, beside the gradient's own
    noise."""

    bias: float
    """What the errors of different micro-batches have in common."""
    noise: float
    """The variance of the rest."""
    own_noise: float
    """The variance of the gradient itself from micro-batch to micro-batch."""
    squared: float
    """The squared norm of the gradient."""
    energy: float = 0.0
    """What the squared norm would be if the tokens' parts of the gradient were uncorrelated."""
    arriving: float = 0.0
    """Squared norm of dY."""

    @property
    def share(self) -> float | None:
        """Bias and noise over the gradient's own noise."""
        return (self.bias + self.noise) / self.own_noise if self.own_noise > 0 else None


class LinearError(Part):
    """One linear of one layer in one recipe."""

    name: str
    """The module's name: model.layers.3.mlp.down_proj."""
    linear: str
    """Its name without the layer: mlp.down_proj."""
    layer: int | None = None
    """Counted from 0; null outside of the layers."""
    op: str = ""
    """The op of the model that it belongs to, as `shapes` calls it; empty where that is not known."""
    inputs: int = 0
    """Input features; 0 where the size is not known."""
    outputs: int = 0
    experts: int = 1
    """Experts of the layer that this stands for, all of this size."""
    tokens: float | None = None
    """Of one micro-batch that it reads, the mean of the recorded steps; of an expert, those that are routed to it."""
    recipe: str
    passes: tuple[PassError, ...] = ()
    dropped: tuple[DroppedPass, ...] = ()
    """Passes that ran but could not be computed, such as those that read a dY with NaN. The others count."""
    weight: OperandError | None = None
    """Where only the weight is known."""
    damage: float | None = None
    """Predicted divergence (KL) of the model's predictions, in nats per token: half of the sum over tokens of the squared inner
    product of dY and the output's error, for a loss that is the mean over tokens. Null where dY is not known."""
    gradient: GradientError | None = None
    """Errors of dgrad that arrive from later layers are included."""
    rerouted: float | None = None
    """Of a router: the share of tokens that get other experts, were it quantized. Routers belong to no layer, because they do not
    count."""
    failure: str = ""
    """Why there are no numbers."""

    @property
    def gemms(self) -> int:
        """How many passes run: fprop, dgrad and wgrad, or fewer where weights or inputs need no gradient."""
        return len({one.pass_name for one in self.passes} | {one.pass_name for one in self.dropped}) or 1

    @property
    def error(self) -> float | None:
        """Root mean square of the relative errors of its GEMMs, or the weight's; None where there is none."""
        errors = [one.relative.value for one in self.passes] or ([self.weight.relative] if self.weight is not None else [])
        return (sum(error**2 for error in errors) / len(errors)) ** 0.5 if errors else None


def counted_linears(linears: Sequence[LinearError]) -> list[LinearError]:
    """The linears that count in the error of a recipe: those in layers, or all if there are no layers. A head stays in BF16."""
    return [linear for linear in linears if linear.layer is not None] or list(linears)


class RecipeError(Part):
    """One recipe in all linears."""

    recipe: str
    error: float
    """Root mean square of the linears' errors, each weighted by its damage where that is known; otherwise every linear of every
    layer counts once, experts of a layer together."""
    relative: float | None = None
    """The same without weights, where `error` has them."""
    damage: float | None = None
    """Predicted divergence (KL) of the model's predictions, in nats per token."""
    gradient: float | None = None
    """Squared errors of all weight gradients over their own noise from micro-batch to micro-batch."""
    worst: str
    """The linear with the most damage, or with the largest error where damage is not known."""
    worst_error: float
    speedup: Interval | None = None
    """Of the step, or of all linears, over BF16."""
    rivals: tuple[str, ...] = ()
    """Recipes whose speed is too close to call against this one's."""


class Moment(Part):
    """One recording of a training, to compare it with others."""

    origin: str
    steps: tuple[int, ...]
    recipes: tuple[RecipeError, ...]
    octaves: dict[TensorName, float] = {}
    """Powers of two between the largest and the smallest value of a tensor, mean over the linears."""


class StaleScale(Part):
    """Delayed scaling on recorded steps: how far a tensor grew above the scale of earlier steps."""

    name: str
    tensor: TensorName
    growth: float
    """The tensor's maximum over that of the history: above 1, values saturate."""
    saturated: float | None = None
    """In files of earlier versions, as what follows."""
    relative: float | None = None
    fresh_relative: float | None = None


class DepthError(Part):
    """A recipe in all linears at once: the error of every layer's output, and of its gradient."""

    recipe: str
    forward: tuple[float, ...]
    """Relative error of the output of every layer."""
    backward: tuple[float, ...] = ()
    """Relative error of the gradient that reaches every layer's input."""
    loss: float | None = None
    """Loss with the recipe minus loss without."""


class Mix(Part):
    """A recipe for most linears, and what stays in a higher precision."""

    recipe: str
    higher: str
    """The recipe of what is kept higher, BF16 or one with a smaller error."""
    first_layers: int = 0
    last_layers: int = 0
    linears: tuple[str, ...] = ()
    """Kept higher in every layer: names without the layer."""
    error: float
    """Root mean square of the linears' errors, weighted as that of a recipe."""
    relative: float | None = None
    """The same without weights, where `error` has them."""
    damage: float | None = None
    """Predicted divergence (KL) of the model's predictions, in nats per token."""
    kept_share: float = 0.0
    """Share of the linears' FLOPs that are kept higher."""
    speedup: Interval | None = None
    """Over BF16: of the step or of all linears, as for the recipes; each linear's time added up."""

    @property
    def is_mixed(self) -> bool:
        """Whether anything is kept higher."""
        return bool(self.first_layers or self.last_layers or self.linears)


class MixedPrecision(Part):
    """What to keep higher, so that the error stays below a bound at the least cost in speed."""

    bound: float | None = None
    """Null where none was given: then nothing is chosen."""
    cost: Literal["time", "bits"] = "bits"
    """What counts: the time, or, without speeds, FLOPs times the bits of their operands."""
    chosen: Mix | None = None
    """Null where no mix is below the bound, or none was given."""
    frontier: tuple[Mix, ...] = ()
    """Mixes that no other beats in both error and cost, the fastest first. Each part of a mix costs 0.5% of the time."""
    settings: dict[str, str] = {}
    """Framework → lines to paste for the chosen mix."""


class ProbedDamage(Part):
    """The divergence of the model's predictions, as a probe measured it and as it is predicted."""

    recipe: str
    layer: int | None = None
    """The only layer in low precision; null: all of them."""
    measured: float
    predicted: float | None = None


class NumericsResult(Result):
    """Quantization error of every linear, pass and recipe."""

    kind: Literal["numerics"] = "numerics"
    source: Source
    origin: str
    """The file, or the model of synthetic tensors."""
    model_name: str = ""
    steps: tuple[int, ...] = ()
    """Recorded training steps."""
    tokens: int | None = None
    """Of one micro-batch on one rank."""
    without: tuple[Switch, ...] = ()
    """What is switched off in the recipes that have it."""
    sampled_bytes: int | None = None
    """In files of earlier versions, as `seconds`."""
    layers: int = 0
    recipes: tuple[RecipeError, ...] = ()
    """The smallest error first."""
    linears: tuple[LinearError, ...] = ()
    stale: tuple[StaleScale, ...] = ()
    probed: tuple[ProbedDamage, ...] = ()
    moments: tuple[Moment, ...] = ()
    """This recording and later ones, if there are any."""
    depth: tuple[DepthError, ...] = ()
    speed_origin: Origin | None = None
    speed_of: Literal["step", "linears"] | None = None
    speed_gpu: str = ""
    speed_file: str = ""
    """The run file with the speeds; empty where they were forecast for this result."""
    mixed: MixedPrecision | None = None
    device: str = ""
    versions: dict[str, str] = {}
    seconds: float = 0.0
    interrupted: bool = False
    """Some linears were not computed."""

    @property
    def sample_count(self) -> int:
        """The errors that were computed: one for each linear, pass and recipe."""
        return len(self.linears)

    @property
    def name(self) -> str:
        return self.model_name or self.origin

    @property
    def counted(self) -> list[LinearError]:
        """The linears that count."""
        return counted_linears(self.linears)
