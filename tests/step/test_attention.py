"""Attention of steps on the CPU: norms of queries and keys, windows, sinks."""

from __future__ import annotations

from typing import Any

import pytest

from gemmscope.model.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from gemmscope.model.spec import ModelSpec, NormSpec, RunSpec
from gemmscope.recipe.recipes import recipe
from gemmscope.step.stack_plan import plan_step

torch = pytest.importorskip("torch", reason="attention needs torch")

from gemmscope.step.attention_modules import Core, QkNorms  # noqa: E402
from gemmscope.step.kits.plain import Kit  # noqa: E402

SEQUENCE = 12
KIT = Kit(recipe("FP32"))


def core(**settings: Any) -> Core:
    spec = AttentionSpec(4, 2, 8, rotary=False, **settings)
    plan, findings = plan_step(ModelSpec("tiny", 32, (LayerSpec(spec, MlpSpec(16, gated=False)),)), RunSpec(2, SEQUENCE))
    assert findings == []
    return Core(KIT, spec, plan, None)


def by_hand(projected: Any, mask: Any, sinks: Any = None) -> Any:
    """[tokens, Q + K + V] to [tokens, width]: softmax of all scores that the mask allows, and of a sink."""
    parts = projected.view(2, SEQUENCE, 8, 8).transpose(1, 2).split([4, 2, 2], dim=1)
    q, k, v = parts[0], parts[1].repeat_interleave(2, dim=1), parts[2].repeat_interleave(2, dim=1)
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~mask, float("-inf")).exp()
    total = scores.sum(-1, keepdim=True) + (sinks.exp()[:, None, None] if sinks is not None else 0.0)
    return (scores / total @ v).transpose(1, 2).reshape(2 * SEQUENCE, 32)


POSITIONS = torch.arange(SEQUENCE)
BACK = POSITIONS[:, None] - POSITIONS


@pytest.mark.parametrize(
    ("settings", "mask"),
    [
        ({}, BACK >= 0),
        ({"causal": False}, BACK > -SEQUENCE),
        ({"window": 3}, (BACK >= 0) & (BACK < 3)),
        ({"window": 100}, BACK >= 0),
        ({"window": 4, "causal": False}, BACK.abs() <= 2),
        ({"window": 3, "sinks": True}, (BACK >= 0) & (BACK < 3)),
        ({"sinks": True}, BACK >= 0),
        ({"sinks": True, "causal": False}, BACK > -SEQUENCE),
        ({"chunk": 4}, (BACK >= 0) & (POSITIONS[:, None] // 4 == POSITIONS // 4)),
        ({"chunk": 5}, (BACK >= 0) & (POSITIONS[:, None] // 5 == POSITIONS // 5)),
    ],
)
def test_masks(settings: dict[str, Any], mask: Any) -> None:
    torch.manual_seed(0)
    module, projected = core(**settings), torch.randn(2 * SEQUENCE, 64)
    sinks = None
    if settings.get("sinks"):
        sinks = module.attention.sinks.data.normal_()
    assert torch.allclose(module(projected), by_hand(projected, mask, sinks), atol=1e-5)


def test_three_tensors_are_as_one() -> None:
    module, projected = core(), torch.randn(2 * SEQUENCE, 64)
    assert torch.equal(module(projected), module(*projected.split([32, 16, 16], dim=-1)))


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("over", ["head", "each_head", "full"])
def test_norms_of_queries_and_keys(over: Any, kind: Any) -> None:
    spec = AttentionSpec(4, 2, 8, qk_norm=over)
    norms = QkNorms(KIT, NormSpec(kind), spec)
    q, k = torch.randn(2, 3, 32), torch.randn(2, 3, 16)
    for parameter in norms.parameters():
        parameter.data.uniform_(0.5, 1.5)
    weights = [parameter.detach().flatten() for parameter in norms.parameters()]
    for result, tensor, weight in zip(norms(q, k), (q, k), weights, strict=True):
        rows = tensor if over == "full" else tensor.unflatten(-1, (-1, 8))
        rows = rows - rows.mean(-1, keepdim=True) if kind == "layernorm" else rows
        normed = (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5)).flatten(2 if over == "full" else -2)
        assert torch.allclose(result, normed * weight.repeat(tensor.shape[-1] // weight.numel()), atol=1e-5)
