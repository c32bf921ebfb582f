"""State-space models and their hybrids: splits, shared weights, experts on a latent vector, and wrong configs."""

from __future__ import annotations

from typing import Any

import pytest

from gemmscope.errors import UserError
from gemmscope.forecast.communication import RankShare, exchanges, network_of
from gemmscope.forecast.memory import rank_memory
from gemmscope.gpu.specs import gpu
from gemmscope.model import hf, presets
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload.derive import derive
from gemmscope.workload.ops import GroupedLinear, Linear
from gemmscope.workload.scans import Scan
from gemmscope.workload.summary import count_parameters
from support.refusals import refused


def preset(name: str) -> ModelSpec:
    model = presets.load(name).model
    assert model is not None
    return model


def read(model_type: str, **settings: Any) -> ModelSpec:
    model = hf.from_config({"model_type": model_type, **settings}, "config.json").model
    assert model is not None
    return model


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("nemotron_h", {"hybrid_override_pattern": "M|*"}, "hybrid_override_pattern must be letters for layers, not 'M|*'"),
        ("nemotron_h", {"layers_block_type": ["mlp", "rnn"]}, "a layer of nemotron_h cannot be 'rnn'"),
        ("nemotron_h", {"layers_block_type": "mlp"}, "layers_block_type must be a list with one entry per layer, not 'mlp'"),
        ("nemotron_h", {"layer_types": []}, "the number of layers must be at least 1, not 0"),
        ("nemotron_h", {"moe_latent_size": 0}, "moe_latent_size must be at least 1, not 0"),
        ("zamba2", {"num_hidden_layers": 3}, "the config lists the kinds of 54 layers, but num_hidden_layers = 3"),
        ("zamba2", {"n_mamba_heads": 7}, "n_mamba_heads = 7 heads of 731 do not add up to the mixer's width, 5120"),
        ("mamba2", {"num_heads": 100}, "num_heads = 100 heads of 64 do not add up to the mixer's width, 8192"),
        ("mamba2", {"n_groups": 3}, "the mixer's 128 heads are not a multiple of its 3 groups"),
        ("mamba2", {"conv_kernel": 0}, "conv_kernel must be at least 1, not 0"),
        ("mamba", {"time_step_rank": 0}, "time_step_rank must be at least 1, not 0"),
        ("mamba", {"state_size": "many"}, "state_size must be a whole number, not 'many'"),
        ("jamba", {"attn_layer_offset": 8}, "attn_layer_offset = 8 is not less than attn_layer_period = 8"),
        ("bamba", {"attn_layer_indices": 9}, "attn_layer_indices must be a list of layer numbers, not 9"),
        ("granitemoehybrid", {"layer_types": ["conv"] * 32}, "a layer of granitemoehybrid cannot be 'conv'"),
    ],
)
def test_wrong_configs(model_type: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read(model_type, **settings)
    assert caught.value.message.startswith(message)


def test_active_parameters() -> None:
    """As published: 31.6B with 3.6B active, 120.6B with 12.7B active."""
    counts = [count_parameters(preset(name)) for name in ("nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b")]
    assert [(round(total / 1e9, 1), round(active / 1e9, 1)) for total, active in counts] == [(31.6, 3.6), (120.7, 12.8)]


def test_experts_on_a_latent_vector() -> None:
    """A linear before the experts and one after them; the shared expert sees the hidden state."""
    workload = derive(preset("nemotron-3-super-120b-a12b"), RunSpec(1, 4096, ep=8))
    linears = {op.name: op for op in workload.ops if isinstance(op, Linear)}
    assert (linears["Latent Down Proj"].inputs, linears["Latent Down Proj"].outputs) == (4096, 1024)
    assert (linears["Expert Up"].inputs, linears["Expert Up"].outputs, linears["Expert Up"].groups) == (1024, 2688, 64)
    assert linears["Shared Expert Up"].inputs == 4096
    assert {op.width for op in workload.ops if op.name == "Token Dispatch"} == {1024}
    assert isinstance(linears["Expert Down"], GroupedLinear)


def test_shared_weights_count_once() -> None:
    """Two blocks of attention and MLP serve 13 layers; every pipeline stage holds its own copy of those that it uses."""
    model = preset("zamba2-7b")
    whole = derive(model, RunSpec(1, 64))
    qkv = [op for op in whole.ops if op.name == "QKV Proj"]
    assert [(op.count, op.all_parameters) for op in qkv] == [(7, 7168 * 21504), (6, 7168 * 21504)]
    stages = [derive(model, RunSpec(1, 64, pp=3, pp_stage=stage)) for stage in range(3)]
    block = sum(op.all_parameters for op in whole.ops if op.shares_weights)
    embedding = 32000 * 3584  # the last stage has its own
    assert sum(stage.parameters for stage in stages) == whole.parameters + 2 * block + embedding
    assert set(whole.layers) == {"Mamba-2 layer"} | {
        f"attention + Mamba-2 + MLP layer, shared block {number}" for number in (1, 2)
    }
    run, chip = RunSpec(1, 64, zero=0), gpu("h200")
    assert rank_memory(model, run, "BF16", chip).weights_bytes == 2 * whole.parameters


def test_tensor_parallel() -> None:
    """Heads and groups are split; all that is not replicated adds up to the whole."""
    model = preset("nemotron-h-8b")
    whole, half = (derive(model, RunSpec(1, 64, tp=tp)) for tp in (1, 2))
    linears = [{op.name: op for op in workload.ops if isinstance(op, Linear)} for workload in (whole, half)]
    assert linears[0]["Mixer In"].outputs == 2 * linears[1]["Mixer In"].outputs == 2 * 8192 + 2 * 8 * 128 + 128
    assert linears[0]["Mixer Out"].inputs == 2 * linears[1]["Mixer Out"].inputs == 8192
    with refused("tp=2", "Mamba-2", 1):
        derive(preset("mamba2-2.7b"), RunSpec(1, 64, tp=2))
    split = {op.name: op for op in derive(preset("falcon-mamba-7b"), RunSpec(1, 64, tp=2)).ops if isinstance(op, Linear)}
    assert (split["Mixer X Proj"].inputs, split["Mixer Time Step Proj"].outputs) == (4096, 4096)
    assert not split["Mixer X Proj"].quantized
    assert not split["Mixer Time Step Proj"].quantized
    assert split["Mixer In"].quantized


def test_context_parallel() -> None:
    """A recurrence needs the whole sequence, so its heads are split."""
    model = preset("mamba2-2.7b")
    with refused("cp=3", "Mamba-2", 80):
        derive(model, RunSpec(1, 192, cp=3))
    work = [sum(op.total().flops for op in derive(model, RunSpec(1, 1024, cp=cp)).ops if isinstance(op, Scan)) for cp in (1, 2)]
    assert work[0] == 2 * work[1]
    parameters = {"parameters": 10**9, "trained": 10**9, "in_experts": 0, "trained_in_experts": 0}
    share = RankShare(layers=64, moe_layers=0, **parameters, attentions=0, mixers=64, mlps=0)
    chip = gpu("h200")
    kinds = {one.kind for one in exchanges(chip, network_of(chip), model, RunSpec(1, 8192, cp=2), share)}
    assert "context" in kinds


def test_pipeline_of_an_irregular_pattern() -> None:
    """Stages of one block each may consist of anything."""
    model = preset("nemotron-3-nano-30b-a3b")
    kinds = [next(iter(derive(model, RunSpec(1, 64, pp=52, pp_stage=stage)).layers)) for stage in (1, 5, 2)]
    assert kinds == ["MoE layer", "attention layer", "Mamba-2 layer"]


def test_described() -> None:
    assert preset("falcon-mamba-7b").describe() == "64 Mamba layers, hidden 4096, Mamba with 8192 channels"
    assert preset("bamba-9b").describe().startswith("29 Mamba-2 + MLP, 3 attention + MLP layers, hidden 4096")
