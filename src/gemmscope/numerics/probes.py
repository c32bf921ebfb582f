"""Measures GEMM errors of reference quantizers with the whole tensors of one linear at hand: the recorder does it once per step.

From a sample of a few rows, the error of a GEMM can only be estimated as if the errors of different values were uncorrelated.
Mostly they are. They are not where values repeat: equal tokens have equal rounding errors, which add up in wgrad, and may double
the error in the first layer of a language model. The outputs of a few rows and a few columns are too few to show it. So the
recorder measures it: it quantizes up to 512 rows of an operand and multiplies their error with the whole other operand.

There is one probe for every way of rounding: recipes that round alike have similar errors, whatever the sizes of their blocks.
gemm_errors.py takes the difference between a recipe and its probe from the sample. Scales of blocks and scales of rows have
separate probes: torchao's scales of rows take a maximum of at least 1e-12, so that rows of smaller gradients underflow.

What is recorded, with A·Bᵀ = Y, ΔA·Bᵀ = α·Y + EA, and EA orthogonal to Y:

* `fprop/W/e4m3` → ‖EA‖²/‖Y‖² and α, each with its standard error, and the maximum that the scale came from,
* `fprop/e4m3+e4m3` → the correlation of EA and EB, with its standard error, and what ΔA·ΔBᵀ adds to the squared error,
  relative to ‖Y‖²: summed over the reduced dimension, in the domain in which values are rounded. Not for delayed scaling.

Where outputs are dominated by a few directions of the other operand, as in the first steps of training, errors vary from row to
row, and 512 rows are too few. What a row contributes in the first directions needs no GEMM, so it is computed for all rows, and
only the rest is estimated from the drawn ones.

Errors of stochastic rounding are uncorrelated, except for their mean: values that exceed the largest one of the format are cut
off, because block scales are rounded too. Probes are expectations, without the chance of one rounding: the mean of several
roundings is multiplied with the whole other operand, what they differ by counts as uncorrelated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite, sqrt

import torch
from torch import Tensor
from torch.nn.functional import pad

from gemmscope.numerics.quantizers import HADAMARD_SIZE, HIGH_PRECISION, Quantizer, operands, rotate
from gemmscope.numerics.recording import StepFacts, scale_maxima
from gemmscope.numerics.sample import Random, draw, sample_linear
from gemmscope.recipe.recipes import recipes
from gemmscope.workload.ops import COLUMNWISE, OPERANDS, Pass, TensorName

ROWS = 512  # a multiple of the rows that share a scale
DRAWS = 16  # of stochastic rounding, spread evenly: one alone varies by several percent where few values dominate
DIRECTIONS, ITERATIONS = 4, 4  # of the other operand that all rows are multiplied with, and steps to find them
PIECE = 4096  # rows that are converted to float32 at a time
GPU_VALUES = 2**23  # values that a GPU quantizes at a time, in few launches; a CPU is faster with fewer, which fit in its caches
BLOCKS = "blocks"
Probes = Mapping[str, tuple[float, ...]]


def rounding_of(quantizer: Quantizer) -> str:
    """The way of rounding, which errors depend on: the format, whether scales are powers of two, and what randomizes it.

    >>> rounding_of(Quantizer("e4m3", "mx_te", 32)), rounding_of(Quantizer("e2m1", "nvfp4_te", 16, stochastic=True))
    ('e4m3-power-of-two-blocks', 'e2m1-stochastic')
    """
    powers = quantizer.rule.startswith("mx") or quantizer.rule.endswith("power_of_two")
    flags = (
        ("power-of-two", powers),
        (BLOCKS, powers and quantizer.block),
        ("hadamard", quantizer.signs),
        ("stochastic", quantizer.stochastic),
        ("delayed", quantizer.delayed),
    )
    return quantizer.format + "".join(f"-{name}" for name, present in flags if present)


def recorded_key(key: str, probes: Probes) -> str:
    """The key in a recording: in older ones, blocks and rows have the same probe.

    >>> recorded_key("fprop/W/e4m3-power-of-two-blocks", {"fprop/W/e4m3-power-of-two": (0.1,)})
    'fprop/W/e4m3-power-of-two'
    """
    return key if key in probes else key.replace(f"-{BLOCKS}", "")


def probe_key(pass_name: Pass, tensor: TensorName, quantizer: Quantizer) -> str:
    """The name of an operand's probe."""
    return f"{pass_name}/{tensor}/{rounding_of(quantizer)}"


def pair_key(pass_name: Pass, first: Quantizer, second: Quantizer) -> str:
    """The name of a correlation."""
    return f"{pass_name}/{rounding_of(first)}+{rounding_of(second)}"


@cache
def reference_quantizers(pass_name: Pass, tensor: TensorName) -> Mapping[str, Quantizer]:
    """One quantizer for every way of rounding that a recipe uses for this operand, by the name of its probe."""
    quantizers: dict[str, Quantizer] = {}
    for first, second in _pairs(pass_name):
        quantizer = first if OPERANDS[pass_name][0] == tensor else second
        quantizers.setdefault(probe_key(pass_name, tensor, quantizer), quantizer)
    return quantizers


@cache
def _pairs(pass_name: Pass) -> tuple[tuple[Quantizer, Quantizer], ...]:
    """The quantizers of both operands, of every recipe that quantizes this pass."""
    quantizers = [
        tuple(one.quantizer for one in operands(name, pass_name)) for name, recipe in recipes().items() if recipe.quantizes
    ]
    return tuple((first, second) for first, second in quantizers if first.format not in HIGH_PRECISION)


def compute_probes(
    x: Tensor | None,
    w: Tensor | None,
    dy: Tensor | None,
    *,
    random: Random,
    history: Mapping[TensorName, float] | None = None,
    passes: Sequence[Pass] = tuple(OPERANDS),
) -> dict[str, tuple[float, ...]]:
    """The probes of every pass whose operands are given: X [M, K], W [N, K] and dY [M, N] of one micro-batch.

    Tensors with NaN or Inf count as missing. `random` draws rows; PyTorch's own generators are not used. `history`: maxima of
    earlier steps, that delayed scaling takes; a tensor without one takes its own. `passes`: the GEMMs that run.
    """
    given: dict[TensorName, Tensor | None] = {"X": x, "W": w, "dY": dy}
    measured: dict[str, tuple[float, ...]] = {}
    with torch.no_grad():
        whole = {
            name: tensor
            for name, tensor in given.items()
            if tensor is not None and tensor.numel() and torch.isfinite(tensor).all()
        }
        for pass_name in passes:
            pair = OPERANDS[pass_name]
            if all(name in whole for name in pair):
                first, second = (whole[name].T if (name, pass_name) in COLUMNWISE else whole[name] for name in pair)
                sides = (
                    _side(pass_name, pair[0], first, second, random, (history or {}).get(pair[0])),
                    _side(pass_name, pair[1], second, first, random, (history or {}).get(pair[1])),
                )
                measured |= _probes_of_pass(pass_name, *sides)
    return {key: values for key, values in measured.items() if all(map(isfinite, values))}


Directions = tuple[Tensor, Tensor]
"""The part of the outputs in a few directions of the other operand: of the drawn rows [3, s], and the sums over all rows [3].

The three are squared norms of errors, errors times exact outputs, and squared norms of exact outputs."""


@dataclass(frozen=True)
class ProbedRows:
    """Rows of one operand, quantized in every way, and what becomes of them in the GEMM with the whole other operand."""

    rows: Tensor
    """[s, R] float32, in units that keep squares within range."""
    weights: Tensor
    errors: Mapping[str, Tensor]
    """Probe → [s, R]; of stochastic rounding, their mean."""
    means: Mapping[str, tuple[Tensor, Tensor]]
    """Probe → of every row, the squared norm of the output of its `errors`, and that output times the exact one."""
    columns: Mapping[str, tuple[Tensor, Tensor]]
    """Probe → [R], where values are rounded: weighted sums over rows of the squared error, and of the error times the value."""
    exact: Tensor
    """[s]: squared norms of the exact outputs."""
    measured: Probes
    """‖EA‖²/‖Y‖² and α, each with its standard error, and the maximum that the scale of the whole tensor comes from."""


def _side(
    pass_name: Pass, tensor: TensorName, operand: Tensor, other: Tensor, random: Random, earlier: float | None
) -> ProbedRows:
    largest = [one.abs().amax().float().clamp(min=1e-30) for one in (operand, other)]
    energy = torch.stack([(piece.float() / largest[1]).square().sum(0) for piece in other.split(PIECE)]).sum(0)
    importance = torch.cat([(piece.float() / largest[0]).square() @ energy for piece in operand.split(PIECE)])
    chosen, weights = draw(importance.double().cpu().numpy(), ROWS, random)
    index = torch.from_numpy(chosen).to(operand.device)
    rows = operand[index].float()
    generator, seed = torch.Generator(operand.device), int(random.integers(2**31))
    errors: dict[str, Tensor] = {}
    columns: dict[str, tuple[Tensor, Tensor]] = {}
    weight = torch.from_numpy(weights).to(operand.device, torch.float32)
    expected: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
    used: dict[str, float] = {}
    directions: dict[str, Directions] = {}
    """What rows contribute in the first directions; empty if all rows were drawn, and of stochastic rounding."""
    basis = _first_directions(other, largest[1], generator.manual_seed(seed)) if len(rows) < len(operand) else None
    for key, quantizer in reference_quantizers(pass_name, tensor).items():
        maxima = _block_maxima(operand, index, quantizer) if quantizer.block_rows > 1 else None
        padded = pad(rows, (0, -rows.shape[1] % HADAMARD_SIZE))
        amax = largest[0].new_tensor(earlier) if quantizer.delayed and earlier else largest[0]
        if quantizer.signs:
            amax = torch.stack([_rotated(piece, quantizer.signs).abs().amax() for piece in operand.split(PIECE)]).amax()
        used[key] = float(amax)
        drawn = [
            (quantizer(padded, amax=amax, block_amax=maxima, generator=generator.manual_seed(seed), turn=turn).values - padded)
            / largest[0]
            for turn in (range(0, 256, 256 // DRAWS) if quantizer.stochastic else (0,))
        ]
        columns[key] = _columns(drawn, padded / largest[0], weight, quantizer.signs)
        if quantizer.stochastic:
            expected[key] = _expected(drawn, padded / largest[0], other, largest[1], quantizer.signs)
        errors[key] = _mean(drawn)[:, : rows.shape[1]]
        if basis is not None and not quantizer.stochastic:
            directions[key] = _in_directions(operand, index, largest[0], quantizer, amax, *basis)
    rows = rows / largest[0]
    squares, across = _outputs(torch.cat([rows, *errors.values()]), other, largest[1], len(rows))
    means = dict(zip(errors, zip(squares.split(len(rows))[1:], across.split(len(rows))[1:], strict=True), strict=True))
    outputs = means | {
        key: (drawn_squares + means[key][0] - of_mean, drawn_across + means[key][1] - across_mean)
        for key, (drawn_squares, drawn_across, of_mean, across_mean) in expected.items()
    }
    exact = squares[: len(rows)]
    measured = {key: _measured((*one, exact), weight, directions.get(key), used[key]) for key, one in outputs.items()}
    return ProbedRows(rows, weight, errors, means, columns, exact, measured)


def _measured(
    outputs: tuple[Tensor, Tensor, Tensor], weights: Tensor, directions: Directions | None, maximum: float
) -> tuple[float, ...]:
    """A probe, from the drawn rows: `outputs` are squared norms of errors, errors times exact outputs, squared norms of these."""
    drawn, known = list(outputs), [0.0, 0.0, 0.0]
    if directions is not None:
        drawn = [one - part for one, part in zip(outputs, directions[0], strict=True)]
        known = directions[1].tolist()
    parallel, parallel_sd = weighted_ratio(drawn[1], drawn[2], weights, (known[1], known[2]))
    rest = drawn[0] - 2 * parallel * drawn[1] + parallel**2 * drawn[2]
    known_rest = known[0] - 2 * parallel * known[1] + parallel**2 * known[2]
    return (*weighted_ratio(rest, drawn[2], weights, (known_rest, known[2])), parallel, parallel_sd, maximum)


def _first_directions(other: Tensor, scale: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Directions [R, d] in which `other` is largest, by subspace iteration, and its Gram matrix in them [d, d]."""
    basis = torch.randn(other.shape[1], DIRECTIONS, generator=generator, dtype=torch.float32, device=other.device)
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(basis).Q
        outputs = [(piece.float() / scale) @ basis for piece in other.split(PIECE)]
        products = zip(other.split(PIECE), outputs, strict=True)
        last, basis = basis, torch.stack([(piece.float() / scale).T @ output for piece, output in products]).sum(0)
    return last, last.T @ basis


def _in_directions(
    operand: Tensor, index: Tensor, scale: Tensor, quantizer: Quantizer, amax: Tensor, basis: Tensor, gram: Tensor
) -> Directions:
    """Quantize all rows, and multiply them with the directions."""
    exact, errors = [], []
    values = 0 if operand.device.type == "cpu" else GPU_VALUES
    for piece in operand.split(max(values // operand.shape[1] // ROWS, 1) * ROWS):
        rows = pad(piece.float(), (0, -piece.shape[1] % HADAMARD_SIZE))
        error = ((quantizer(rows, amax=amax).values - rows) / scale)[:, : piece.shape[1]]
        exact.append((piece.float() / scale) @ basis)
        errors.append(error @ basis)
    one, other = torch.cat(errors), torch.cat(exact)
    parts = torch.stack([(one @ gram * one).sum(1), (one @ gram * other).sum(1), (other @ gram * other).sum(1)])
    return parts[:, index], parts.sum(1)


def _columns(drawn: list[Tensor], rows: Tensor, weights: Tensor, signs: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    exact, squares, across = _rotated(rows, signs), 0.0, 0.0
    for error in (_rotated(values, signs) for values in drawn):
        squares = squares + weights @ error.square()
        across = across + weights @ (error * exact)
    return squares / len(drawn), across / len(drawn)


def _outputs(stacked: Tensor, other: Tensor, scale: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of every row: the squared norm of its output, and that output times the one of its exact row, the first `count` rows."""
    squares, across = (torch.zeros(len(stacked), dtype=torch.float32, device=stacked.device) for _ in range(2))
    for piece in other.split(PIECE):
        dtype = other.dtype if other.is_cuda else torch.float32  # bfloat16 is slow on CPUs
        output = (stacked.to(dtype) @ (piece / scale).to(dtype).T).float()
        squares += output.square().sum(1)
        across += (output.unflatten(0, (-1, count)) * output[:count]).sum(2).flatten()
    return squares, across


def _expected(
    drawn: list[Tensor], rows: Tensor, other: Tensor, scale: Tensor, signs: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same for stochastic rounding, for errors that are uncorrelated in the domain in which values are rounded: of every draw
    [draws, s], and of their mean [s]."""
    energy = torch.zeros(rows.shape[1], dtype=torch.float32, device=rows.device)
    for piece in other.split(PIECE):
        energy += _rotated(piece.float() / scale, signs).square().sum(0)
    exact, errors = _rotated(rows, signs), [_rotated(error, signs) for error in drawn]
    errors.append(_mean(errors))
    *squares, of_mean = (error.square() @ energy for error in errors)
    *across, across_mean = ((error * exact) @ energy for error in errors)
    return torch.stack(squares), torch.stack(across), of_mean, across_mean


def _mean(errors: list[Tensor]) -> Tensor:
    total = errors[0].clone()
    for error in errors[1:]:
        total += error
    return total / len(errors)


def _rotated(values: Tensor, signs: tuple[int, ...]) -> Tensor:
    """The values in the domain in which they are rounded, padded to whole blocks."""
    values = pad(values, (0, -values.shape[1] % HADAMARD_SIZE))
    return rotate(values, signs) if signs else values


def _block_maxima(operand: Tensor, index: Tensor, quantizer: Quantizer) -> Tensor:
    """The maxima of the square blocks that the rows lie in."""
    size = quantizer.block_rows
    groups, places = torch.unique(index // size, return_inverse=True)
    maxima = torch.stack([operand[start : start + size].abs().amax(0) for start in (groups * size).tolist()]).float()
    return pad(maxima, (0, -maxima.shape[1] % quantizer.block)).unflatten(1, (-1, quantizer.block)).amax(2)[places]


def _probes_of_pass(pass_name: Pass, first: ProbedRows, second: ProbedRows) -> dict[str, tuple[float, ...]]:
    measured = {**first.measured, **second.measured}
    for one, other in _pairs(pass_name):
        names = [
            probe_key(pass_name, tensor, quantizer) for tensor, quantizer in zip(OPERANDS[pass_name], (one, other), strict=True)
        ]
        key = pair_key(pass_name, one, other)
        if key not in measured and names[0] in first.errors and names[1] in second.errors:
            alpha, beta = measured[names[0]][2], measured[names[1]][2]
            errors = (first.errors[names[0]] - alpha * first.rows, second.errors[names[1]] - beta * second.rows)
            correlation, standard_error = _correlation(
                errors[0] @ second.rows.T, first.rows @ errors[1].T, first.weights, second.weights
            )
            share = 1.0
            for side, name, quantizer in ((first, names[0], one), (second, names[1], other)):
                share *= _share_of_mean(side, name) if quantizer.stochastic else 1.0
            measured[key] = (correlation * share, standard_error * share)
            if not (one.delayed or other.delayed):  # with delayed scaling, values saturate and the products of errors add up too
                measured[key] += (_second_order(first, names[0], second, names[1]),)
    return measured


def _second_order(first: ProbedRows, key: str, second: ProbedRows, other: str) -> float:
    """What ΔA·ΔBᵀ adds: its own square, and its products with ΔA·Bᵀ and A·ΔBᵀ."""
    (squares, across), (other_squares, other_across) = first.columns[key], second.columns[other]
    added = squares @ other_squares + 2 * squares @ other_across + 2 * across @ other_squares
    total = float(first.weights @ first.exact)
    return float(added) / total if total else 0.0


def _share_of_mean(side: ProbedRows, key: str) -> float:
    """The share of the norm of stochastic rounding's error that can be correlated: that of its mean."""
    rest, _, parallel, *_ = side.measured[key]
    squares, across = side.means[key]
    of_mean, _ = weighted_ratio(squares - 2 * parallel * across + parallel**2 * side.exact, side.exact, side.weights)
    return min(sqrt(max(of_mean, 0.0) / rest), 1.0) if rest > 0 else 1.0


def _correlation(one: Tensor, other: Tensor, rows: Tensor, columns: Tensor) -> tuple[float, float]:
    """The correlation of two errors of the same outputs, each [s, t], with its standard error from both draws."""
    product = one * other
    scale = sqrt(float(rows @ one.square() @ columns) * float(rows @ other.square() @ columns))
    variance = 0.0
    for weights, sums in ((rows, product @ columns), (columns, rows @ product)):
        variance += float(((1 - 1 / weights) * (weights * sums).square()).sum())
    return (float(rows @ product @ columns) / scale, sqrt(variance) / scale) if scale else (0.0, 0.0)


def weighted_ratio(
    numerators: Tensor, denominators: Tensor, weights: Tensor, known: tuple[float, float] = (0.0, 0.0)
) -> tuple[float, float]:
    """The ratio of two weighted sums over drawn rows, with its standard error. Numerators [draws, s] are averaged over draws of
    stochastic rounding, whose variance counts too. `known`: what is added to both sums, without an error."""
    total = float(weights @ denominators) + known[1]
    if not total > 0:
        return 0.0, 0.0
    draws = numerators.reshape(-1, len(weights))
    ratios = (draws @ weights + known[0]) / total
    ratio = float(ratios.mean())
    residuals, uncertain = weights * (draws.mean(0) - ratio * denominators), 1 - 1 / weights
    residuals = residuals - uncertain @ residuals / uncertain.sum().clamp(min=1e-30)  # the number of rows is fixed
    count = max(len(weights), 2)
    variance = float(uncertain @ residuals.square()) * count / (count - 1) / total**2
    if len(draws) > 1:
        variance += float(ratios.var()) / len(draws)
    return ratio, sqrt(max(variance, 0.0))


def sample_with_probes(
    x: Tensor | None,
    w: Tensor | None,
    dy: Tensor | None,
    *,
    dtype: torch.dtype,
    budget: int,
    random: Random,
    step: int = 0,
    history: Sequence[StepFacts] = (),
    passes: Sequence[Pass] = tuple(OPERANDS),
) -> tuple[StepFacts, dict[str, Tensor]]:
    """As `sample_linear`, with probes. `history`: the earlier recorded steps, for delayed scaling."""
    facts, kept = sample_linear(x, w, dy, dtype=dtype, budget=budget, random=random, step=step, passes=passes)
    given = (tensor.to(dtype) if tensor is not None else None for tensor in (x, w, dy))
    try:
        probes = compute_probes(*given, random=random, history=scale_maxima(history, facts), passes=passes)
    except torch.OutOfMemoryError:  # probes need more memory than the sample, especially for large vocabularies
        return facts, kept
    return facts.model_copy(update={"probes": probes}), kept
