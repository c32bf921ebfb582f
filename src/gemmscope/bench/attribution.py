"""Splits the kernels of one linear's forward and backward pass into its parts.

A linear in training runs three GEMMs and quantizes their operands. The forward pass comes first; a compiler may put wgrad before
dgrad. Frameworks quantize in one of two ways, which the recipe's facts name:

- `once`: X and W before fprop, dY before dgrad, each for both of its GEMMs. The time of a tensor is charged half to each pass
  that uses it: X to fprop and wgrad, W to fprop and dgrad, dY to dgrad and wgrad; wholly to fprop where only fprop runs.
- `per GEMM`: the operands of every GEMM are cast again, by kernels that a compiler has fused, so tensors cannot be told apart.
  Kernels between two GEMMs are charged to the second. (Compiled code may cast for the last GEMM ahead of the second one, so
  between these two the split follows the order, not the use.) A kernel that scales the output of a GEMM belongs to that GEMM.

Every kernel is counted: fills and copies with the kernel they precede, and kernels that are neither GEMM nor quantization as
`other`. Experts run on several streams at once; the parts then add up to more than the elapsed time, and are only proportions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from gemmscope.engine.kernels import KernelFacts, KernelRun, classify
from gemmscope.grouping import add_up, grouped
from gemmscope.results.linears import QUANTIZED_ONCE, QUANTIZED_PER_GEMM, quantization_by_pass
from gemmscope.workload.ops import PASSES

CASTS = {"once": QUANTIZED_ONCE, "per GEMM": QUANTIZED_PER_GEMM}


class AttributionError(ValueError):
    """The kernels do not look like one linear's forward and backward pass."""


@dataclass(frozen=True)
class Parts:
    """Microseconds by part; `kernels` are the names behind each."""

    gemm_us: dict[str, float]  # by pass
    quantize_us: dict[str, float]  # by what is quantized: see CASTS
    other_us: float
    kernels: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def total_us(self) -> float:
        return sum(self.gemm_us.values()) + sum(self.quantize_us.values()) + self.other_us

    def charged_us(self) -> dict[str, float]:
        """Time by pass, including quantization and the rest: adds up to the total."""
        shares = quantization_by_pass(self.quantize_us, self.gemm_us)
        return {name: time + shares[name] + self.other_us / len(self.gemm_us) for name, time in self.gemm_us.items()}


@dataclass(frozen=True)
class _Piece:
    """A kernel with the fills and copies that precede it."""

    name: str
    facts: KernelFacts
    time_us: float

    @property
    def starts_gemm(self) -> bool:
        """Whether it is a GEMM, and not the second half of one (split-K)."""
        return self.facts.kernel_class == "gemm" and "reduce" not in self.name.lower()


def attribute(
    runs: Sequence[KernelRun],
    *,
    passes: Sequence[str] = PASSES,
    casts: str = "once",
    weight_cached: bool = False,
    rows: Sequence[int] = (),
) -> Parts:
    """Go through the kernels in the order they ran, and find the part that each belongs to.

    `passes` are those that ran, in their order. `weight_cached`: W was quantized earlier. `rows` are the tokens of each expert:
    experts with tokens run their own GEMM in every pass, and all experts have a weight.
    """
    pieces, left_us = _pieces(runs)
    gemms_per_pass = max(sum(1 for row in rows if row), 1)
    gemms = sum(piece.starts_gemm for piece in pieces)
    if gemms != len(passes) * gemms_per_pass:
        raise AttributionError(f"{gemms} GEMMs instead of {len(passes) * gemms_per_pass}")
    labels = [label for label, served in CASTS[casts].items() if set(served) & set(passes)]
    # before the first GEMM, every weight has one cast; X has the others: one, or one per expert
    before = takewhile(lambda piece: not piece.starts_gemm, pieces)
    of_x = max(sum(piece.facts.ends_tensor for piece in before) - (0 if weight_cached else max(len(rows), 1)), 1)
    pass_of = [name for name in passes for _ in range(gemms_per_pass)]
    parts = [part if part in (*passes, *labels) else "other" for part in _parts(pieces, pass_of, casts, of_x)]
    times_us = add_up((part, piece.time_us) for part, piece in zip(parts, pieces, strict=True))
    kernels = grouped((part, piece.name) for part, piece in zip(parts, pieces, strict=True))
    return Parts(
        {name: times_us.get(name, 0.0) for name in passes},
        {label: times_us.get(label, 0.0) for label in labels},
        times_us.get("other", 0.0) + left_us,
        {part: tuple(names) for part, names in kernels.items()},
    )


def _pieces(runs: Sequence[KernelRun]) -> tuple[list[_Piece], float]:
    """Kernels with the fills and copies before them on their stream; and the microseconds of those that no kernel follows."""
    pieces: list[_Piece] = []
    waiting: dict[int, float] = {}
    for run in runs:
        facts = classify(run.name)
        if facts.kernel_class == "memory":
            waiting[run.stream] = waiting.get(run.stream, 0.0) + run.duration_us
        else:
            pieces.append(_Piece(run.name, facts, run.duration_us + waiting.pop(run.stream, 0.0)))
    return pieces, sum(waiting.values())


def _parts(pieces: Sequence[_Piece], pass_of: Sequence[str], casts: str, of_x: int) -> Iterator[str]:
    """The part of each kernel in turn: a pass, a quantized tensor, or neither. `pass_of`: of the first GEMM, the second, …"""
    gemms = ended = 0  # how many GEMMs have started, and how many casts have ended
    after_gemm = False
    for piece in pieces:
        facts, part = piece.facts, "other"
        match facts.kernel_class:
            case "gemm":
                gemms += piece.starts_gemm
                part = pass_of[max(gemms - 1, 0)]
            case "quantize" if casts == "once":
                part = "dY" if gemms else "X" if ended < of_x else "W"
            case "quantize":  # of the next GEMM, unless it scales the output of the last one or no GEMM follows
                scaled = gemms - 1 if after_gemm and facts.scales_output else gemms
                part = f"for {pass_of[min(scaled, len(pass_of) - 1)]}"
        ended += facts.kernel_class == "quantize" and facts.ends_tensor
        after_gemm = facts.kernel_class == "gemm"
        yield part
