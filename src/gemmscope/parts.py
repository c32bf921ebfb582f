"""The parts of a training step: one vocabulary for `step`, `forecast`, `explain` and `compare`.

The order is that of a waterfall: the GEMMs first, then everything that dilutes their speedup.
"""

from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

StepPart = Literal[
    "GEMMs", "convolutions", "quantization", "norms and activations", "attention", "linear attention", "routing", "head and loss",
    "embedding", "optimizer", "exposed communication", "pipeline bubble", "copies", "other", "idle, host-bound", "idle, other",
]  # fmt: skip
STEP_PARTS: tuple[StepPart, ...] = get_args(StepPart)
Value = TypeVar("Value")


def in_order(parts: Mapping[StepPart, Value]) -> dict[StepPart, Value]:
    """The parts that are there, in the order of the vocabulary.

    >>> in_order({"optimizer": 1.0, "GEMMs": 5.0})
    {'GEMMs': 5.0, 'optimizer': 1.0}
    """
    return {part: parts[part] for part in STEP_PARTS if part in parts}
