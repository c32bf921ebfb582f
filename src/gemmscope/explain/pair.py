"""Holds a step against another one, row by row: its BF16 twin, or what was predicted for it.

Rows are the parts of a step as people plan for them. They sum to the step on both sides, so differences sum to the difference.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemmscope.errors import UserError
from gemmscope.explain.account import EXPOSED, HOST, IDLE
from gemmscope.explain.diagnose import Diagnosis
from gemmscope.measure.kernels import CAST_SHARE

SAME_FLOPS = 0.1  # two traces of one model and batch differ by less
PARTS = {
    "norms": "norms and activations", "activations": "norms and activations", "elementwise": "norms and activations",
    "embedding and indexing": "embedding", "loss": "head and loss", HOST: "waiting for the host", IDLE: "idle otherwise",
    EXPOSED: "communication, exposed",
}  # fmt: skip
ROWS = (
    "products", "quantization", "attention", "norms and activations", "head and loss", "embedding", "optimizer",
    "communication, exposed", "copies", "other", "waiting for the host", "idle otherwise",
)  # fmt: skip


@dataclass(frozen=True)
class Held:
    """One row on both sides, in milliseconds per step; None where nothing was predicted. `speedup`: of all rows down to it."""

    row: str
    expected_ms: float | None
    found_ms: float
    speedup: float | None = None

    @property
    def difference_ms(self) -> float | None:
        return None if self.expected_ms is None else self.found_ms - self.expected_ms


@dataclass(frozen=True)
class Pair:
    """Two steps. `words`: what the rows say."""

    title: str
    expected: str  # what the left column is
    rows: tuple[Held, ...]
    words: tuple[str, ...]


def parts(found: Diagnosis) -> dict[str, float]:
    """The account in the rows of a plan: the head's products are the head's, and what a cast does beside casting (a norm, an
    activation) is not quantization's, as in a measured step's waterfall."""
    sums: dict[str, float] = {}
    for name, time in found.account.classes.items():
        row = PARTS.get(name, "products" if name.startswith("GEMM") else name)
        sums[row] = sums.get(row, 0.0) + time
    head = found.evidence.ms(item for item in found.evidence.items if item.product is not None and item.product.head)
    if head:
        sums["products"] = sums.get("products", 0.0) - head
        sums["head and loss"] = sums.get("head and loss", 0.0) + head
    beside = (1 - CAST_SHARE) * found.evidence.ms(item for item in found.evidence.casts if item.placed.rides)
    if beside:
        sums["quantization"] -= beside
        sums["norms and activations"] = sums.get("norms and activations", 0.0) + beside
    return {row: sums[row] for row in ROWS if row in sums}


def with_twin(slow: Diagnosis, fast: Diagnosis) -> Pair:
    """BF16 and low precision, recorded from the same training."""
    refuse_other_model(slow, fast)
    before, after = parts(slow), parts(fast)
    rows, left, right = [], 0.0, 0.0
    for row in ROWS:
        if row in before or row in after:
            left, right = left + before.get(row, 0.0), right + after.get(row, 0.0)
            rows.append(Held(row, before.get(row, 0.0), after.get(row, 0.0), left / right if right else None))
    speedup = slow.account.step_ms / fast.account.step_ms
    words = [f"speedup of the step: {speedup:.2f}x ({slow.account.step_ms:.1f} ms to {fast.account.step_ms:.1f} ms)"]
    if after.get("products") and before.get("products"):
        alone = before["products"] / after["products"]
        lost = max(rows, key=lambda held: (held.found_ms or 0) - (held.expected_ms or 0) if held.row != "products" else -1e9)
        words.append(f"the products alone gain {alone:.2f}x")
        if lost.difference_ms is not None and lost.difference_ms > 0.02 * fast.account.step_ms:
            words.append(f"what grew most: {lost.row}, by {lost.difference_ms:.1f} ms")
    if not (step_flops(slow) and step_flops(fast)):
        counts = [sum(row.count for row in each.account.census) for each in (slow, fast)]
        words.append(
            f"shapes were not recorded in both, so whether they are one training cannot be checked: {counts[0]:.0f} products per "
            f"step on one side, {counts[1]:.0f} on the other"
        )
    if slow.trace.world_size != fast.trace.world_size:
        words.append(f"a bad comparison: {slow.trace.world_size} ranks on one side, {fast.trace.world_size} on the other")
    if slow.account.micro_batches != fast.account.micro_batches:
        words.append(f"{slow.account.micro_batches} micro-batches on one side, {fast.account.micro_batches} on the other")
    what = "BF16 trace" if slow.evidence.low_share < 0.01 else "other trace"
    return Pair(f"against the {what}", slow.trace.path.name, tuple(rows), tuple(words))


def refuse_other_model(slow: Diagnosis, fast: Diagnosis) -> None:
    """Two traces of one model do the same FLOPs per step, apart from what is computed again."""
    totals = [step_flops(each) for each in (slow, fast)]
    if not all(totals):
        return
    if abs(totals[0] / totals[1] - 1) > SAME_FLOPS:
        raise UserError(
            f"{slow.trace.path} and {fast.trace.path} are not the same training: their products take "
            f"{totals[0] / 1e12:.2f} and {totals[1] / 1e12:.2f} TFLOP per step",
            "record both with the same model, batch and parallelism",
        )


def step_flops(found: Diagnosis) -> float:
    """Of linears and head, once each; zero if sizes are not known."""
    items = found.evidence.items
    if not found.evidence.flops_known:
        return 0.0
    chosen = (item.product for item in items if item.product is not None and item.scope.phase not in ("again", "optimizer"))
    return sum(product.flops for product in chosen if "bmm" not in product.layer) / found.seen.count
