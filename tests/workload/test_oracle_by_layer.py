"""Families whose layers differ in their sizes, where a live class needs help, or where there is none."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gemmscope.errors import UserError
from gemmscope.model import hf, presets
from gemmscope.model.spec import RunSpec
from gemmscope.workload.check import differences
from gemmscope.workload.derive import derive
from support.oracle import live, model_of

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]  # warnings of torch and transformers
RUN = RunSpec(2, 16)
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 100, "intermediate_size": 96}


def balanced(self: Any, hidden: Any, index: Any, weights: Any) -> Any:
    """In place of experts that look at the values of tokens, which have none here: all share them evenly."""
    import torch
    from transformers.integrations import moe

    experts = len(self.down_proj)
    rows = hidden.repeat_interleave(index.shape[-1], 0)
    rows = rows[: len(rows) * experts // getattr(self, "total_experts", experts)]
    offsets = torch.zeros(experts, dtype=torch.int32, device=hidden.device)
    gate, up = moe._grouped_linear(rows, self.gate_up_proj[:experts], offsets).chunk(2, dim=-1)
    return hidden + moe._grouped_linear(self.act_fn(gate) * up, self.down_proj, offsets).sum(0) * weights.sum()


@pytest.mark.parametrize("seed", range(3))
def test_step3(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Only the multimodal class around it can be built: its language part, and the parameters of its vision part."""
    pytest.importorskip("transformers", reason="the oracle needs torch and transformers")
    from transformers.models.step3p7 import modeling_step3p7

    from gemmscope.workload import trace_worker

    monkeypatch.setattr(modeling_step3p7.Step3p7Experts, "forward", balanced)
    rng = random.Random(seed)
    kinds = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(4)]
    text: dict[str, Any] = {**SMALL, "num_attention_groups": 2, "head_dim": 16, "sliding_window": 8, "pad_token_id": 1}
    text |= {"moe_num_experts": 8, "moe_top_k": 2, "moe_intermediate_size": 40, "share_expert_dim": rng.choice([24, 56])}
    text |= {"layer_types": [*kinds, "full_attention"], "num_nextn_predict_layers": 1, "attention_bias": rng.random() < 0.5}
    text |= rng.choice([{}, {"moe_layers_enum": "1,3,4"}, {"mlp_layer_types": ["dense", "sparse"] * 2}])
    text |= rng.choice([{"num_sliding_attention_heads": 6}, {"attention_other_setting": {"num_attention_heads": 2}}, {}])
    vision = {"width": 32, "layers": 1, "heads": 2, "image_size": 28, "intermediate_size": 32}
    config = {"model_type": "step3p7", "text_config": text, "vision_config": vision}
    source = hf.from_config(config, "config.json")
    assert source.model is not None
    assert source.unread == {}
    assert [difference.what for difference in differences(source.model, RUN, live(config, RUN))] == ["parameters"]
    module, _ = trace_worker.build_huggingface(config, 1, 16)
    outside = ("vision", "projector")
    own = sum(p.numel() for name, p in module.named_parameters() if not any(part in name for part in outside))
    assert derive(source.model, RUN).parameters == own


@pytest.mark.parametrize("zero_experts", [0, 4])
def test_longcat_flash(monkeypatch: pytest.MonkeyPatch, zero_experts: int) -> None:
    """The class keeps weights of experts that compute nothing, too; nothing uses them."""
    pytest.importorskip("transformers", reason="the oracle needs torch and transformers")
    from transformers.models.longcat_flash import modeling_longcat_flash as longcat

    monkeypatch.setattr(longcat.LongcatFlashExperts, "forward", balanced)
    sizes = {"ffn_hidden_size": 96, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    sizes |= {"head_dim": 4, "v_head_dim": 8, "moe_topk": 3, "n_routed_experts": 8, "expert_ffn_hidden_size": 40}
    sizes |= {"hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "zero_expert_num": zero_experts}
    config = {"model_type": "longcat_flash", **sizes, "attention_bias": bool(zero_experts)}
    unequal = differences(model_of(config), RUN, live(config, RUN))
    assert {difference.what: difference.traced - difference.derived for difference in unequal} == (
        {"parameters": 2 * zero_experts * 2 * 40 * 64} if zero_experts else {}
    )


def block(group: int | None, times: float | None, **more: bool) -> dict[str, Any]:
    attention = {"n_heads_in_group": group, "no_op": group is None, "replace_with_linear": False, "sparsify": None}
    return {"attention": attention, "ffn": {"ffn_mult": times, "no_op": times is None, "replace_with_linear": False} | more}


NAS = {**SMALL, "model_type": "nemotron-nas", "hidden_size": 768, "num_key_value_heads": None, "intermediate_size": None}


def test_blocks_of_nemotron_nas() -> None:
    """Each layer equals one of Llama; without attention, MLP or both, it has fewer norms."""
    model = model_of(
        {**NAS, "block_configs": [block(2, 1.5), block(4, 2.625), block(None, 1.5), block(2, None), block(None, None)]}
    )
    llama = [
        model_of({**SMALL, "model_type": "llama", "hidden_size": 768, "num_key_value_heads": keys, "intermediate_size": width})
        for keys, width in ((2, 768), (1, 1536))
    ]
    assert list(model.layers[:2]) == [llama[0].layers[0], llama[1].layers[0]]
    assert [(layer.attention is None, layer.mlp is None, layer.norms) for layer in model.layers[2:]] == [
        (True, False, 1),
        (False, True, 1),
        (True, True, 0),
    ]
    linear = model_of({**NAS, "block_configs": [block(2, None) | {"ffn": {"replace_with_linear": True}}]}).layers[0]
    assert (linear.mlp, linear.norms, [(one.inputs, one.outputs) for one in linear.extra]) == (None, 2, [(768, 768)])
    assert derive(model, RUN).parameters > 0


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([{"attention": {}}], "must have attention and ffn"),
        ([block(3, 1.5)], "is not a multiple of n_heads_in_group = 3"),
        ([block(2, 1.5, num_experts=8)], "'num_experts', which is not known"),
        ([block(2, 1.5) | {"ffn": {"ffn_mult": "2"}}], "ffn_mult must be a number"),
        (7, "must be a list of layers"),
        ([], "the number of layers"),
    ],
)
def test_wrong_blocks(blocks: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        model_of({**NAS, "block_configs": blocks})


def test_a_checkpoint_that_contradicts_the_class() -> None:
    config = {**SMALL, "model_type": "mimo_v2_flash", "num_key_value_heads": 1, "n_routed_experts": 8}
    with pytest.raises(UserError, match=r"hybrid_layer_pattern = \[0, 0, 0, 1\] contradicts"):
        model_of({**config, "hybrid_layer_pattern": [0, 0, 0, 1]})
    assert model_of({**config, "hybrid_layer_pattern": [0, 1, 1, 1]}).layers[1].attention is not None


def test_every_weight_of_kimi_k3() -> None:
    """The tensors of the published checkpoint's language part, by their shapes."""
    hidden, wide = 7168, 96 * 128
    kda = 96 + 96 * hidden + wide + 128 * hidden + 128 * wide + 3 * 4 * wide + 3 * wide * hidden + 128
    latent = 512 + 576 * hidden + 512 * 96 * 256 + 1536 + 1536 * hidden + 1536 * 96 * 192
    around = 2 * wide * hidden + 6 * hidden  # gate, output; two norms, two norms and two vectors of earlier states
    experts = 896 * 3 * 3072 * 3584 + 896 * hidden + 2 * 3584 * hidden + 3584 + 3 * 6144 * hidden
    ends = 2 * 163840 * hidden + 3 * hidden
    weights = ends + 69 * kda + 24 * latent + 93 * around + 3 * 33792 * hidden + 92 * experts
    model = presets.load("kimi-k3").model
    assert model is not None
    assert derive(model, RUN).parameters == weights == 2_779_484_393_568
    assert model.pattern() == "68 KDA + MoE, 24 attention + MoE, 1 KDA + MLP"
    assert {layer.earlier_states for layer in model.layers} == {sum(index // 12 + 1 for index in range(93)) / 93}
