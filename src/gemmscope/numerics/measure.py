"""Measures what every recipe does to the GEMMs of one linear, with its tensors at hand: inside the training, or on synthetic
tensors.

The work is bounded, whatever the number of tokens. fprop and dgrad are computed for at most `TOKENS` tokens, drawn with
probabilities that follow their share in the outputs, with the whole weight in pieces; wgrad for at most `LINES` output features
and as many input features, over all tokens. Every sum is weighted with 1 / probability, so that it is unbiased. Quantized are
the values as the recipe's library would do it, with the maxima of the whole tensors.

Of fprop, the damage is measured, too: half of the sum over tokens of ⟨dY_t, ΔY_t⟩², the second-order estimate of the divergence
of the model's predictions (an empirical Fisher term), for a loss that is a sum over tokens. Of wgrad, the tokens are divided
into `GROUPS` parts: what the errors of all parts have in common is bias, the rest is noise, and so is the gradient's own. How
much the bias varies if a part is left out is its standard error.

What is returned are sums on the tensors' device, which `recording.py` makes numbers of. Nothing is read back here, no random
number of the training is used, and nothing depends on a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from gemmscope.numerics.quantizers import (
    HADAMARD_SIZE,
    HIGH_PRECISION,
    GemmOperand,
    Quantizer,
    libraries_of,
    operands,
    switches_of,
)
from gemmscope.numerics.recording import GROUPS, variant_name
from gemmscope.recipe.recipes import BASELINE, recipes
from gemmscope.workload.ops import OPERANDS, Pass, TensorName

TOKENS, LINES = 512, 128
PIECE, CPU_PIECE = 1 << 24, 1 << 20  # values of a weight that are quantized at a time; on a CPU what its caches hold
MOST_KEPT = 4  # pieces that are kept as float32
PIECE_ROWS = 128  # a multiple of the rows that share a scale
FIXED = 0.25  # share of the probability that all tokens, or all features, have alike
SMALLEST = 1e-30  # of what is divided by
Pair = tuple[GemmOperand, GemmOperand]


@cache
def variants() -> Mapping[str, Mapping[Pass, Pair]]:
    """Every recipe that changes values, as each library quantizes it, with and without what can be switched off: the operands of
    every pass."""
    names = [(name, library) for name, one in recipes().items() if one.quantizes for library in libraries_of(one)]
    every = {
        variant_name(name, library, off): {one: operands(name, one, library, off) for one in OPERANDS}
        for name, library in names
        for off in switches_of(name, library)
    }
    return every | {variant_name(BASELINE): {one: operands(BASELINE, one) for one in OPERANDS}}


@dataclass(frozen=True)
class Drawn:
    """Tokens or features that stand for all: where they are, and 1 / the number of times that each is expected to be drawn."""

    index: Tensor
    weights: Tensor
    complete: bool

    @classmethod
    def of(cls, shares: Sequence[Tensor], count: int, offset: float) -> Drawn:
        """`shares`: importance of every item, by several measures. The draw is systematic: `offset` in 0 to 1 decides it."""
        size, device = len(shares[0]), shares[0].device
        if size <= count:
            return cls(torch.arange(size, device=device), torch.ones(size, device=device, dtype=torch.float32), complete=True)
        parts = [(share / share.sum().clamp(min=SMALLEST)).nan_to_num(0.0, 0.0, 0.0) for share in shares]
        equal = torch.full_like(parts[0], 1 / size)
        probabilities = FIXED * equal + (1 - FIXED) / len(parts) * torch.stack(parts).sum(0)
        ends = probabilities.double().cumsum(0)
        places = (torch.arange(count, device=device, dtype=torch.float64) + offset) / count * ends[-1]
        index = torch.searchsorted(ends, places).clamp(max=size - 1)
        return cls(index, ends[-1].float() / (count * probabilities[index]), complete=False)


@dataclass
class Rows:
    """Rows of an operand as a GEMM reads them, in units of `scale`, and how they are quantized."""

    raw: Tensor
    scale: Tensor
    amax: Tensor
    generator: torch.Generator
    weights: Tensor | None = None
    """Of every row."""

    @cached_property
    def exact(self) -> Tensor:
        return self.raw / self.scale

    @cached_property
    def _row_weights(self) -> Tensor:
        return self.raw.new_ones(len(self.raw)) if self.weights is None else self.weights

    @cached_property
    def sums(self) -> Tensor:
        """Σ x², how many values are not zero, how many there are."""
        rows = (self.exact.square().sum(1), self.raw.count_nonzero(1), torch.full_like(self.raw[:, 0], self.raw.shape[1]))
        return torch.stack([one.float() for one in rows]) @ self._row_weights

    def quantized(self, quantizer: Quantizer, delayed: float, line_amax: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The quantized values and their errors; the sums of squared errors, of values that are not zero, of saturated ones.

        `line_amax`: the maxima of whole rows, where these are parts of them."""
        rows, width = self.raw, self.raw.shape[1]
        amax = self.amax.clamp(min=delayed) if quantizer.delayed and delayed else self.amax
        if quantizer.signs:  # the maximum of the rotated values counts, which those drawn stand for
            rows, amax = pad(rows, (0, -width % HADAMARD_SIZE)), torch.zeros_like(amax)
        elif line_amax is not None and quantizer.block == 0 and quantizer.block_rows == 1:
            rows = torch.cat([rows, line_amax[:, None]], 1)
        result = quantizer(rows, amax=amax, generator=self.generator)
        values, rounded, saturated = (part[:, :width] for part in (result.values, result.rounded, result.saturated))
        values = values / self.scale
        error = values - self.exact
        lost = (error.square().sum(1), rounded.count_nonzero(1), saturated.sum(1))
        return values, error, torch.stack([one.float() for one in lost]) @ self._row_weights


def piece_values(tensor: Tensor) -> int:
    """The values that are computed with at a time."""
    return CPU_PIECE if tensor.device.type == "cpu" else PIECE


def piece_rows(tensor: Tensor) -> int:
    """The rows of a matrix that are computed with at a time: whole blocks of rows that share a scale."""
    return max(piece_values(tensor) // int(tensor.shape[1]) // PIECE_ROWS, 1) * PIECE_ROWS


def tensor_numbers(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Of a whole tensor: maximum, norm of the finite values over it, numbers of zeros and of NaN and Inf, smallest magnitude."""
    amax = amax_of(tensor, dtype)
    scale = torch.where((amax > 0) & amax.isfinite(), amax, 1.0)
    parts = []
    for piece in tensor.split(max(piece_values(tensor) // tensor.shape[1], 1)):
        magnitudes = piece.to(dtype).abs()
        finite = magnitudes.isfinite()
        safe = torch.where(finite, magnitudes, 0.0)
        norm = torch.linalg.vector_norm(safe / scale, dtype=torch.float32)
        smallest = torch.where(safe > 0, safe, torch.inf).amin()
        parts.append(torch.stack([one.float() for one in (norm, magnitudes.count_nonzero(), (~finite).sum(), smallest)]))
    norms, nonzero, nonfinite, smallest = torch.stack(parts, 1).unbind()
    return torch.stack([amax, norms.norm(), tensor.numel() - nonzero.sum(), nonfinite.sum(), smallest.amin()])


@dataclass
class LinearMeasurement:
    """One linear in one training step: X [M, K], W [N, K], dY [M, N], of which some may be missing; `passes`: those that run.

    `dtype`: in which the GEMM reads its operands without quantization. `delayed`: maxima of earlier steps, for delayed scaling.
    `top_k`: of a router, the experts that it chooses for a token.
    """

    x: Tensor
    w: Tensor
    dy: Tensor | None
    dtype: torch.dtype
    seed: int
    passes: Sequence[Pass] = tuple(OPERANDS)
    delayed: Mapping[TensorName, float] = field(default_factory=dict)
    top_k: int = 0

    def __post_init__(self) -> None:
        self._generator = torch.Generator(self.x.device).manual_seed(self.seed)
        self._offset = (self.seed % 8191 + 0.5) / 8191
        given: tuple[tuple[TensorName, Tensor | None], ...] = (("X", self.x), ("W", self.w), ("dY", self.dy))
        self._given = {name: tensor for name, tensor in given if tensor is not None}
        self._amax = {name: amax_of(tensor, self.dtype) for name, tensor in self._given.items()}
        self._scale = {name: torch.where((amax > 0) & amax.isfinite(), amax, 1.0) for name, amax in self._amax.items()}
        self._energy: dict[TensorName, Tensor] = {name: self._energies(name, 1) for name in ("X", "dY") if name in self._given}

    def _energies(self, name: TensorName, dim: int) -> Tensor:
        """Sums of squares along a dimension, in units of the scale, without a copy of the tensor."""
        tensor = self._given[name]
        narrow = tensor.float() if tensor.dtype == torch.float64 else tensor
        norms = torch.linalg.vector_norm(narrow, dim=dim, dtype=torch.float32)
        return (norms / self._scale[name]).square()

    def _rows(self, name: TensorName, rows: Tensor, weights: Tensor | None = None) -> Rows:
        raw = rows.to(self.dtype).float()
        return Rows(raw, self._scale[name], self._amax[name], self._generator, weights)

    def numbers(self) -> dict[str, Tensor]:
        """All numbers, by the name of what they are of."""
        with torch.no_grad():
            measured = {f"tensor/{name}": tensor_numbers(tensor, self.dtype) for name, tensor in self._given.items()}
            running = [name for name in self.passes if "dY" in self._given or name == "fprop"]
            of_tokens = [name for name in running if name != "wgrad"]
            if of_tokens:
                measured |= self._by_tokens(of_tokens)
            return measured | (self._weight_gradient() if "wgrad" in running else {})

    @staticmethod
    def quantizing(pass_name: Pass, dtype: torch.dtype) -> dict[str, Pair]:
        """The variants that change values of this pass."""
        kept = [name for name, own in HIGH_PRECISION.items() if own == dtype]
        pairs = {name: passes[pass_name] for name, passes in variants().items()}
        return {name: pair for name, pair in pairs.items() if any(one.quantizer.format not in kept for one in pair)}

    # --- fprop and dgrad --------------------------------------------------------------------------------------------------

    def _by_tokens(self, passes: Sequence[Pass]) -> dict[str, Tensor]:
        shares = list(self._energy.values())
        drawn = Drawn.of([*shares, *([shares[0] * shares[1]] if len(shares) > 1 else [])], TOKENS, self._offset)
        rows: dict[Pass, Rows] = {"fprop": self._rows("X", self.x[drawn.index], drawn.weights)}
        if self.dy is not None:
            rows["dgrad"] = self._rows("dY", self.dy[drawn.index], drawn.weights)
        weight = WeightPieces(self)
        exact = {"fprop": torch.cat([rows["fprop"].exact @ one.exact.T for _, one in weight.pieces()], 1)}
        if "dgrad" in passes:
            of_pieces = [rows["dgrad"].exact[:, at] @ one.exact for at, one in weight.pieces()]
            exact["dgrad"] = torch.stack(of_pieces).sum(0)
        measured = {f"output/{name}": (exact[name].square().sum(1) @ drawn.weights)[None] for name in passes}
        known: dict[tuple[Pass, Pair], Tensor] = {}  # recipes may have a pass in common
        for name in variants():
            for pass_name in passes:
                if (pair := self.quantizing(pass_name, self.dtype).get(name)) is None:
                    continue
                if (pass_name, pair) not in known:
                    own = rows[pass_name]
                    _, error, lost = own.quantized(pair[1].quantizer, self.delayed.get(pair[1].tensor, 0.0))
                    parts = [torch.zeros_like(exact[pass_name]) for _ in range(2)]  # from the error of W, from that of the tokens
                    lost_w = torch.zeros_like(lost)
                    for at, w_values, w_error, lost_here in weight.quantized(pair[0]):
                        lost_w += lost_here
                        if pass_name == "fprop":
                            parts[0][:, at], parts[1][:, at] = own.exact @ w_error.T, error @ w_values.T
                        else:
                            parts[0] += own.exact[:, at] @ w_error
                            parts[1] += error[:, at] @ w_values
                    gradient = rows["dgrad"].exact if pass_name == "fprop" and "dgrad" in rows else None
                    numbers = token_numbers(parts, exact[pass_name], gradient, drawn)
                    rerouted = self._rerouted(exact[pass_name], parts, drawn)
                    known[pass_name, pair] = torch.cat([numbers, lost_w, weight.sums, lost, own.sums, *rerouted])
                measured[f"{name}/{pass_name}"] = known[pass_name, pair]
        return measured

    def _rerouted(self, exact: Tensor, errors: Sequence[Tensor], drawn: Drawn) -> list[Tensor]:
        """Of a router: the share of tokens that get other experts."""
        if not self.top_k:
            return []
        chosen = [
            torch.zeros_like(one).scatter(1, one.topk(self.top_k).indices, 1.0) for one in (exact, exact + errors[0] + errors[1])
        ]
        changed = (chosen[0] != chosen[1]).any(1).float()
        return [(changed @ drawn.weights / drawn.weights.sum())[None]]

    def weight_rows(self, at: slice) -> Rows:
        """A piece of the weight."""
        return self._rows("W", self.w[at])

    # --- wgrad --------------------------------------------------------------------------------------------------------------

    def _weight_gradient(self) -> dict[str, Tensor]:
        sides, tokens = [], len(self.x)
        names: tuple[TensorName, ...] = ("X", "dY")
        for place, name in enumerate(names):
            drawn = Drawn.of([self._energies(name, 0)], LINES, (self._offset + 0.37 * place) % 1)
            sides.append((drawn, self._rows(name, self._given[name][:, drawn.index].T.contiguous(), drawn.weights)))
        (of_x, x), (of_dy, dy) = sides
        weights = of_dy.weights[:, None] * of_x.weights
        count = min(GROUPS, tokens)

        def grouped(rows: Tensor) -> Tensor:
            return pad(rows, (0, -tokens % count)).unflatten(1, (count, -1)).transpose(0, 1)

        def product(left: Tensor, right: Tensor) -> Tensor:
            return torch.bmm(grouped(left), grouped(right).transpose(1, 2))

        exact = product(dy.exact, x.exact)
        total = exact.sum(0)
        norms = weights * total.square()
        measured = {
            "output/wgrad": norms.sum()[None],
            "gradient": torch.stack([norms.sum(), (weights * exact.square()).sum(), self._energy["X"] @ self._energy["dY"]]),
        }
        known, roots = {}, weights.sqrt()  # `known`: X by quantizer; stochastic rounding is for dY alone
        for variant, pair in self.quantizing("wgrad", self.dtype).items():
            if pair[0].quantizer not in known:
                known[pair[0].quantizer] = x.quantized(pair[0].quantizer, self.delayed.get("X", 0.0))
            x_values, x_error, x_lost = known[pair[0].quantizer]
            _, dy_error, dy_lost = dy.quantized(pair[1].quantizer, self.delayed.get("dY", 0.0))
            first, second = product(dy.exact, x_error), product(dy_error, x_values)
            error = first + second
            whole, of_first, of_second = error.sum(0), first.sum(0), second.sum(0)
            terms = [whole.square(), of_first.square(), of_second.square(), whole * total, total.square()]
            sums = torch.stack(terms) * weights
            lines = [sums[::4].sum(dim) for dim, drawn in ((2, of_dy), (1, of_x)) if not drawn.complete]
            ends = torch.cat(lines or [sums.new_zeros(2, 1)], 1)
            of_groups = (error * roots).flatten(1)
            across = of_groups @ of_groups.T
            lost = [x_lost, x.sums, dy_lost, dy.sums]
            parts = [sums.sum((1, 2)), (ends @ ends.T).flatten(), *lost, across.sum(1), across.diagonal()]
            measured[f"{variant}/wgrad"] = torch.cat(parts)
        return measured


class WeightPieces:
    """The whole weight, in pieces that bound the memory. Where a quantizer treats rows and columns alike, the quantized values
    of the last one are used again: fprop and dgrad of a recipe read the same."""

    def __init__(self, linear: LinearMeasurement) -> None:
        w = linear.w
        height = piece_rows(w)
        self._linear, self._places = linear, [slice(at, min(at + height, len(w))) for at in range(0, len(w), height)]
        self._kept: dict[int, Rows] = {}
        self._last: tuple[Quantizer | None, list[tuple[Tensor, Tensor, Tensor]]] = (None, [])
        self.lines = torch.stack([one.abs() for one in torch.aminmax(w, dim=0)]).amax(0).to(linear.dtype).float()
        self.sums = torch.stack([one.sums for _, one in self.pieces()]).sum(0)

    def pieces(self) -> Iterator[tuple[slice, Rows]]:
        """Where every piece is, and its rows. Only the first few are kept."""
        for number, at in enumerate(self._places):
            rows = self._kept.get(number) or self._linear.weight_rows(at)
            if number < MOST_KEPT:
                self._kept[number] = rows
            yield at, rows

    def quantized(self, operand: GemmOperand) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Every piece with its quantized values, their errors, and what `Rows.quantized` sums up, always as [outputs, inputs]."""
        quantizer, delayed = operand.quantizer, self._linear.delayed.get("W", 0.0)
        alike = quantizer.block == quantizer.block_rows and not quantizer.stochastic and len(self._places) <= MOST_KEPT
        if alike and self._last[0] == quantizer:
            yield from ((at, *one) for at, one in zip(self._places, self._last[1], strict=True))
            return
        self._last = (quantizer if alike else None, [])
        for at, rows in self.pieces():
            if operand.columnwise:
                across = Rows(rows.raw.T.contiguous(), rows.scale, rows.amax, rows.generator)
                values, error, lost = across.quantized(quantizer, delayed, self.lines)
                one = (values.T, error.T, lost)
            else:
                one = rows.quantized(quantizer, delayed)
            if alike:
                self._last[1].append(one)
            yield at, *one


def token_numbers(parts: Sequence[Tensor], exact: Tensor, gradient: Tensor | None, drawn: Drawn) -> Tensor:
    """Sums over tokens, of the error of outputs, which has a part from each operand: its square, those of its parts, its product
    with the exact output, the square of that, the damage; and Σ a², Σ ab, Σ ba, Σ b² of the first and the fifth."""
    error = parts[0] + parts[1]
    terms = [(error, error), (parts[0], parts[0]), (parts[1], parts[1]), (error, exact), (exact, exact)]
    rows = [torch.linalg.vecdot(*pair) for pair in terms]
    damage = torch.linalg.vecdot(gradient, error).square() if gradient is not None else torch.zeros_like(rows[0])
    weighted = torch.stack([*rows, damage]) * drawn.weights
    ends = weighted[::4] * float(not drawn.complete)
    return torch.cat([weighted.sum(1), (ends @ ends.T).flatten()])


def weight_numbers(w: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The error of a weight as fprop reads it, in every variant that changes its values."""
    amax, lost, sums = amax_of(w, dtype), dict[str, Tensor](), torch.zeros(3, device=w.device, dtype=torch.float32)
    pairs = LinearMeasurement.quantizing("fprop", dtype)
    for piece in w.split(piece_rows(w)):
        rows = Rows(piece.to(dtype).float(), amax, amax, torch.Generator(w.device))
        sums = sums + rows.sums
        for name, pair in pairs.items():
            lost[name] = lost.get(name, 0.0) + rows.quantized(pair[0].quantizer, 0.0)[2]
    return {name: torch.cat([own, sums]) for name, own in lost.items()}


def amax_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest magnitude, on the tensor's device, without synchronization."""
    low, high = torch.aminmax(tensor)
    return torch.maximum(low.abs(), high.abs()).to(dtype).float()
