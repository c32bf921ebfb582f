"""The linears of a model in closed form, to compare a checkpoint with. No torch: the command finds them, a worker compares."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload.derive import HEAD, derive
from gemmscope.workload.ops import Linear

USUAL_SEQUENCE = 512


@dataclass(frozen=True)
class KnownLinears:
    """The number of layers, and by role the sizes that its linears may have: (inputs, outputs). The head is left out:
    vocabularies may be padded."""

    layers: int
    sizes: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)


def known_linears(model: ModelSpec) -> KnownLinears:
    """What a checkpoint of this model contains."""
    sizes: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for op in derive(model, RunSpec(micro_batch_size=1, sequence_length=model.positions or USUAL_SEQUENCE)).ops:
        if isinstance(op, Linear) and op.section != HEAD:
            sizes[op.role].add((op.inputs, op.outputs))
    return KnownLinears(len(model.layers), {op: tuple(sorted(known)) for op, known in sizes.items()})
