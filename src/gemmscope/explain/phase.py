"""Recognizes what a trace shows (training, a forward pass, an inference server, …) and its frameworks, each with its evidence."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from gemmscope.toml import load_data

RULES: dict[str, list[dict[str, Any]]] = load_data("gemmscope.explain", "recognize.toml")
GRADED = 3  # sequence numbers of the autograd graph: an operator without gradient gets none of its own
LONGEST_EVIDENCE = 80
TRAINING, FORWARD, NO_GRADIENT = "training", "forward pass with gradients", "forward pass without gradients"


@dataclass(frozen=True)
class TracePhase:
    """`name`: empty if nothing shows it; `evidence`: what shows it; `judged`: whether causes and advice are given for it."""

    name: str = ""
    evidence: str = ""
    judged: bool = True
    frameworks: Mapping[str, str] = field(default_factory=dict)
    """The evidence of each framework, by its name."""

    @property
    def trains(self) -> bool:
        return self.name == TRAINING

    @property
    def without_optimizer(self) -> bool:
        """Whether the trace shows that nothing is trained to the end."""
        return self.name not in ("", TRAINING)


def recognized(
    names: Collection[str], calls: Collection[str], frames: Collection[str], sequences: int, operators: bool
) -> TracePhase:
    """The phase and the frameworks. `names`: of operators, annotations and kernels; `calls`: of the CUDA or HIP API; `frames`: of
    Python functions; `sequences`: how many numbers of the autograd graph were recorded; `operators`: whether any operator was.

    >>> recognized(["aten::mm", "Optimizer.step#SGD.step"], [], [], 0, True).evidence
    'Optimizer.step#SGD.step'
    >>> recognized(["aten::mm"], [], ["diffusers/models/unet.py(12): forward"], 0, True).name
    'image or video generation'
    >>> recognized(["igemm_bwd_gtcx3_nhwc_bf16"], [], [], 0, True).name, recognized(["flash_bwd_kernel"], [], [], 0, True).name
    ('forward pass without gradients', 'training')
    >>> [recognized(["aten::mm"], [], [], count, True).name for count in (1, 9)]
    ['forward pass without gradients', 'forward pass with gradients']
    """
    kinds = {"found": names, "calls": calls, "frames": frames}

    def evidence(rule: Mapping[str, Any]) -> str:
        looked_at = ((name, rule[kind]) for kind, own in kinds.items() if kind in rule for name in own)
        parts = ((name, match[0]) for name, pattern in looked_at if (match := re.search(pattern, name)))
        return next((name if len(name) <= LONGEST_EVIDENCE else f"…{part}…" for name, part in parts), "")

    frameworks = {rule["name"]: shown for rule in RULES["framework"] if (shown := evidence(rule))}
    for rule in RULES["phase"]:
        if shown := evidence(rule):
            return TracePhase(rule["name"], shown, rule["judged"], frameworks)
    if sequences >= GRADED:
        return TracePhase(FORWARD, "operators with gradients, no backward pass", frameworks=frameworks)
    if operators:
        return TracePhase(NO_GRADIENT, "no backward pass, no optimizer, no gradients", judged=False, frameworks=frameworks)
    return TracePhase(frameworks=frameworks)


def framework_titles(names: Collection[str]) -> list[str]:
    """How frameworks are called.

    >>> framework_titles(["ddp", "dlrm"])
    ['DLRM (torchrec, FBGEMM)', 'DistributedDataParallel']
    """
    return [rule["title"] for rule in RULES["framework"] if rule["name"] in names]
