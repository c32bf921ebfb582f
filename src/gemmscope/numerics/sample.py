"""Draws the sample of one linear in one step from its whole tensors X, W and dY, in bounded memory and a bounded number of bytes.

Rows, and blocks of the reduced dimension, are drawn without replacement, with probabilities that follow their share of the
output's squared norm (three quarters) and are equal (one quarter), so that no weight exceeds 4 times that of an equal draw. Each
item is kept with exactly its probability, so that sums weighted with 1 / probability are unbiased. The random numbers come from
a generator of its own: that of the training is never used. Of many experts, a few stand for all: `few_experts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from gemmscope.grouping import grouped
from gemmscope.numerics.names import LinearName
from gemmscope.numerics.recording import BLOCK, EXPONENTS, PLACES, WEIGHT_BLOCKS, PassFacts, StepFacts, TensorFacts
from gemmscope.workload.ops import COLUMNWISE, OPERANDS, Pass, TensorName

CHUNK, CPU_CHUNK = 1 << 23, 1 << 18  # values that are converted to float32 at a time: 32 MiB; on a CPU what its cache holds
IMPORTANCE = 0.75  # share of the probability that follows the energies; the rest is equal
SMALL_BLOCK = min(WEIGHT_BLOCKS)
FEWEST_ROWS, ENOUGH_ROWS, MOST_ROWS = 8, 32, 512
NARROWEST, NARROW = 2 * BLOCK, 8 * BLOCK  # of the reduced dimension: kept at least, and before there are enough rows
Random = np.random.Generator


@dataclass(frozen=True)
class TensorSummary:
    """A whole tensor in numbers. Energies are in units of `scale`²."""

    facts: TensorFacts
    scale: float
    """The largest finite magnitude, 1 if that is 0."""
    exponents: Tensor
    row_energy: Tensor
    column_energy: Tensor
    blocks: Mapping[int, Tensor]
    """Of W: size → maxima of its square blocks."""


def random_for(seed: int, *parts: str | int) -> Random:
    """A generator of its own for each linear, step and purpose: no sample depends on what else is recorded."""
    numbers = [part if isinstance(part, int) else crc32(part.encode("utf-8", "surrogatepass")) for part in parts]
    return np.random.default_rng([seed, *numbers])


def draw(importance: np.ndarray, count: int, random: Random) -> tuple[np.ndarray, np.ndarray]:
    """`count` different indices, ascending, and the weight of each: 1 / probability of being drawn.

    Systematic sampling in random order: one random number decides all, and each index has exactly its probability.

    >>> indices, weights = draw(np.array([1.0, 1.0, 100.0, 1.0]), 2, random_for(0))
    >>> len(indices), bool(2 in indices), float(weights[indices == 2][0])
    (2, True, 1.0)
    """
    size = len(importance)
    if count >= size:
        return np.arange(size), np.ones(size)
    probabilities = _probabilities(importance, count)
    order = random.permutation(size)
    ends = np.cumsum(probabilities[order])
    ends *= count / ends[-1]
    passed = np.floor(ends + random.random())
    hits = np.diff(passed, prepend=0.0) > 0
    chosen = np.sort(order[hits])
    return chosen, 1 / probabilities[chosen]


def _probabilities(importance: np.ndarray, count: int) -> np.ndarray:
    """The probabilities of being drawn: none is above 1, and their sum is `count`."""
    size = len(importance)
    total = importance.sum()
    usable = isfinite(total) and total > 0
    shares = IMPORTANCE * importance / total + (1 - IMPORTANCE) / size if usable else np.full(size, 1 / size)
    certain = np.zeros(size, dtype=bool)
    while True:
        rest = count - certain.sum()
        probabilities = np.where(certain, 1.0, shares * rest / shares[~certain].sum())
        above = (probabilities >= 1) & ~certain
        if not above.any():
            return probabilities
        certain |= above


def chunks(tensor: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Pieces of the rows of a matrix, as `dtype` and then float32, each with the row where it begins."""
    size = CPU_CHUNK if tensor.device.type == "cpu" else CHUNK
    rows = max(size // max(tensor.shape[1], 1) // SMALL_BLOCK, 1) * SMALL_BLOCK
    for start in range(0, tensor.shape[0], rows):
        yield start, tensor[start : start + rows].to(dtype).float()


def summary(tensor: Tensor, dtype: torch.dtype, *, blocks: bool = False) -> TensorSummary:
    """Maxima, counts and energies of a matrix."""
    amax, largest = _maxima(tensor, dtype)
    scale = largest if largest > 0 else 1.0
    nonzero = torch.zeros((), dtype=torch.int64, device=tensor.device)
    exponents = torch.zeros(EXPONENTS, dtype=torch.int64, device=tensor.device)
    row_energy, columns = (torch.zeros(size, dtype=torch.float32, device=tensor.device) for size in tensor.shape)
    small = row_energy.new_empty([-(-size // SMALL_BLOCK) for size in tensor.shape]) if blocks else row_energy
    for start, values in chunks(tensor, dtype):  # into tensors of the final size: pieces kept between others fragment the memory
        biased = (values.view(torch.int32) >> 23).to(torch.uint8)  # without the sign
        exponents += torch.bincount(biased.reshape(-1), minlength=EXPONENTS)
        nonzero += torch.count_nonzero(values)
        if blocks:
            small[start // SMALL_BLOCK : -(-(start + len(values)) // SMALL_BLOCK)] = _block_maxima(values, SMALL_BLOCK)
        squares = _squares(values, scale)
        row_energy[start : start + len(values)] = squares.sum(1)
        columns += squares.sum(0)
    block_maxima: dict[int, Tensor] = {}
    if blocks:
        block_maxima = {SMALL_BLOCK: small.to(dtype), BLOCK: _block_maxima(small, BLOCK // SMALL_BLOCK).to(dtype)}
    facts = TensorFacts(
        amax=amax,
        norm=scale * sqrt(float(row_energy.sum(dtype=torch.float64))),
        zeros=(tensor.numel() - int(nonzero)) / tensor.numel(),
        nonfinite=int(exponents[-1]),
    )
    return TensorSummary(facts, scale, exponents.float(), row_energy, columns, block_maxima)


def _maxima(tensor: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """The largest magnitude, NaN where there is one, and the largest finite one."""
    amax = float(amax_of(tensor, dtype))
    if isfinite(amax):
        return amax, amax
    finite = [torch.nan_to_num(piece.abs(), 0.0, 0.0, 0.0).amax() for _, piece in chunks(tensor, dtype)]
    return amax, float(torch.stack(finite).amax())


def amax_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest magnitude, on the tensor's device, without synchronization."""
    low, high = torch.aminmax(tensor)
    return torch.maximum(low.abs(), high.abs()).to(dtype).float()


def _squares(values: Tensor, scale: float) -> Tensor:
    """The squares of the finite values, in units of `scale`² so that they stay in the range of float32."""
    return torch.nan_to_num(values / scale, 0.0, 0.0, 0.0).square_()


def _block_maxima(values: Tensor, size: int) -> Tensor:
    rows, columns = (-(-length // size) * size for length in values.shape)
    padded = torch.nn.functional.pad(values.abs(), (0, columns - values.shape[1], 0, rows - values.shape[0]))
    return padded.view(rows // size, size, columns).amax(1).view(rows // size, columns // size, size).amax(2)


def weighted_energies(tensor: Tensor, dtype: torch.dtype, scale: float, weights: Tensor, *, by_column: bool) -> Tensor:
    """Sum of squares of every row, columns weighted; or of every column, rows weighted."""
    energies = torch.zeros(tensor.shape[by_column], dtype=torch.float32, device=tensor.device)
    for start, piece in chunks(tensor, dtype):
        squares = _squares(piece, scale)
        if by_column:
            energies += weights[start : start + len(squares)] @ squares
        else:
            energies[start : start + len(squares)] = squares @ weights
    return energies


def output_norm(first: Tensor, second: Tensor, dtype: torch.dtype) -> float | None:
    """Norm of first · secondᵀ, from GEMMs in `dtype` on a GPU and in float32 elsewhere; None if it is not finite."""
    total = torch.zeros((), dtype=torch.float64, device=first.device)
    rows = max(CHUNK // max(len(second), 1) // BLOCK, 1) * BLOCK
    work = dtype if first.is_cuda else torch.float32
    right = second.to(dtype).to(work)
    for start in range(0, len(first), rows):
        output = (first[start : start + rows].to(dtype).to(work) @ right.T).float()
        scale = output.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
        total += output.div_(scale).square_().sum() * scale.double() ** 2
    norm = sqrt(value) if isfinite(value := float(total)) else inf
    return norm if isfinite(norm) else None


def kept_sizes(budget: int, reduced: int, itemsize: int) -> tuple[int, int]:
    """Rows of each operand, and length of the reduced dimension, that fit in the bytes of one pass.

    >>> kept_sizes(95_000, 4096, 2), kept_sizes(95_000, 512, 2), kept_sizes(3_000_000, 4096, 2), kept_sizes(8_000, 4096, 2)
    ((20, 1024), (42, 512), (174, 4096), (5, 256))
    """

    def rows(width: int) -> int:
        per_row = 2 * itemsize * width + itemsize * (width // 16 + width // 128 + 2) + 16
        return (budget - 8 * width) // per_row

    width = min(reduced, NARROW)
    while rows(width) < FEWEST_ROWS and width > NARROWEST:
        width = max(width // 2 // BLOCK, 2) * BLOCK
    while width < reduced and rows(min(2 * width, reduced)) >= ENOUGH_ROWS:
        width = min(2 * width, reduced)
    return max(min(rows(width), MOST_ROWS), 1), width


def sample_linear(
    x: Tensor | None,
    w: Tensor | None,
    dy: Tensor | None,
    *,
    dtype: torch.dtype,
    budget: int,
    random: Random,
    step: int = 0,
    passes: Sequence[Pass] = tuple(OPERANDS),
) -> tuple[StepFacts, dict[str, Tensor]]:
    """The facts and the kept tensors of one linear: X [M, K], W [N, K], dY [M, N], of which some may be missing.

    Operands are taken as `dtype`, in which the GEMM reads them without quantization. At most `budget` bytes of tensors are kept.
    `passes`: the GEMMs that run.
    """
    with torch.no_grad():
        given: dict[TensorName, Tensor | None] = {"X": x, "W": w, "dY": dy}
        whole = {name: tensor for name, tensor in given.items() if tensor is not None and tensor.numel()}
        summaries = {name: summary(tensor, dtype, blocks=name == "W") for name, tensor in whole.items()}
        passes = [name for name in passes if OPERANDS[name][0] in whole]
        if "X" in whole and "dY" not in whole:
            passes = ["fprop"]
        facts: dict[Pass, PassFacts] = {}
        kept: dict[str, Tensor] = {f"{name}.exponents": one.exponents.cpu() for name, one in summaries.items()}
        for pass_name in passes:
            facts[pass_name], tensors = _sample_pass(
                pass_name, whole, summaries, dtype, (budget - 4 * EXPONENTS * len(whole)) // len(passes), random
            )  # fmt: skip
            kept |= {f"{pass_name}.{name}": tensor.cpu() for name, tensor in tensors.items()}
    described = {name: one.facts for name, one in summaries.items()}
    tokens = next((len(tensor) for name, tensor in whole.items() if name != "W"), None)
    return StepFacts(step=step, tokens=tokens, tensors=described, passes=facts), kept


def _sample_pass(
    pass_name: Pass,
    whole: Mapping[TensorName, Tensor],
    summaries: Mapping[TensorName, TensorSummary],
    dtype: torch.dtype,
    budget: int,
    random: Random,
) -> tuple[PassFacts, dict[str, Tensor]]:
    names = [name for name in OPERANDS[pass_name] if name in whole]
    across = {name: (name, pass_name) in COLUMNWISE for name in names}
    energies = {name: summaries[name].row_energy if across[name] else summaries[name].column_energy for name in names}
    reduced = len(energies[names[0]])
    count, width = kept_sizes(budget * 2 // len(names), reduced, dtype.itemsize)
    joint = torch.stack([energies[name].double() for name in names]).prod(0)
    by_block = torch.nn.functional.pad(joint, (0, -reduced % BLOCK)).view(-1, BLOCK).sum(1)
    blocks, block_weights = draw(np.asarray(by_block.cpu()), -(-width // BLOCK), random)
    kept = torch.cat([torch.arange(start * BLOCK, min((start + 1) * BLOCK, reduced)) for start in blocks.tolist()])
    kept = kept.to(joint.device)
    tensors: dict[str, Tensor] = {}
    for place, name in zip(PLACES, OPERANDS[pass_name], strict=True):
        if name not in whole:
            continue
        other = next((energies[one] for one in names if one != name), None)
        if other is None:
            importance = summaries[name].column_energy if across[name] else summaries[name].row_energy
        else:
            importance = weighted_energies(whole[name], dtype, summaries[name].scale, other, by_column=across[name])
        chosen, weights = draw(np.asarray(importance.double().cpu()), count, random)
        index = torch.from_numpy(chosen).to(kept.device)
        lines = (whole[name][:, index].T if across[name] else whole[name][index]).to(dtype)
        tensors |= {
            f"{place}.rows": lines[:, kept].contiguous(),
            f"{place}.weights": torch.from_numpy(weights).float(),
            f"{place}.row_amax": torch.stack([end.abs() for end in torch.aminmax(lines, dim=1)]).amax(0).float(),
            f"{place}.energy": energies[name][kept].float(),
        }
        for size in WEIGHT_BLOCKS if name == "W" else ():
            maxima = summaries[name].blocks[size].T if across[name] else summaries[name].blocks[size]
            columns = torch.unique(kept // size)
            tensors[f"{place}.amax{size}"] = maxima[index // size][:, columns].contiguous()
    scales = [summaries[name].scale ** 2 for name in names]
    product = float(joint.sum()) * scales[0] * (scales[1] if len(scales) > 1 else 1.0)
    operands = [whole[name].T if across[name] else whole[name] for name in names]
    norm = output_norm(operands[0], operands[1], dtype) if len(operands) == 2 else None
    facts = PassFacts(
        reduced=reduced,
        blocks=tuple(int(start) * BLOCK for start in blocks),
        weights=tuple(float(weight) for weight in block_weights),
        product=product if isfinite(product) else None,
        norm=norm,
    )
    return facts, tensors


EXPERTS = 2  # of each layer


def few_experts(names: Mapping[str, LinearName], seed: int) -> dict[str, int]:
    """The linears to sample: path → the number of experts that it stands for, 1 where it is not an expert.

    >>> from gemmscope.numerics.names import name_linears
    >>> paths = [f"layers.0.experts.{number}.up_proj" for number in range(8)] + ["layers.0.o_proj"]
    >>> names = name_linears(dict.fromkeys(paths, (64, 64)))
    >>> sorted(few_experts(names, seed=0).values())
    [1, 8, 8]
    """
    experts = grouped((_group(name), name.expert) for name in names.values() if name.expert is not None)
    groups = {group: set(numbers) for group, numbers in experts.items()}
    chosen = {
        group: random_for(seed, group[0] or 0, group[1]).choice(sorted(numbers), min(EXPERTS, len(numbers)), replace=False)
        for group, numbers in groups.items()
    }
    return {
        path: 1 if name.expert is None else len(groups[_group(name)])
        for path, name in names.items()
        if name.expert is None or name.expert in chosen[_group(name)]
    }


def _group(name: LinearName) -> tuple[int | None, str]:
    return name.layer, name.linear.rpartition(".")[0]
