"""All that is recorded of one linear in one step: its sample, and the probes that only whole tensors can give."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemmscope.numerics.probes import measure_probes
from gemmscope.numerics.recording import OPERANDS, StepFacts, scale_maxima
from gemmscope.numerics.sample import Random, sample_linear
from gemmscope.results.numerics import Pass


def measure_linear(
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
        probes = measure_probes(*given, random=random, history=scale_maxima(history, facts), passes=passes)
    except torch.OutOfMemoryError:  # probes need more memory than the sample, especially for large vocabularies
        return facts, kept
    return facts.model_copy(update={"probes": probes}), kept
