"""Llama 4, Gemma 3n and 4 and DeepSeek-V4 against the live classes: configs beyond those that every family is tested with."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gemmscope.model import hf
from gemmscope.model.spec import RunSpec
from gemmscope.workload.check import differences
from support.hf_variants import variant
from support.hf_variants_shapes import SHAPE_FAMILIES
from support.oracle import compare, model_of

transformers = pytest.importorskip("transformers", reason="the oracle needs torch and transformers")
trace_worker = pytest.importorskip("gemmscope.workload.trace_worker", reason="the oracle needs torch and transformers")
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]  # warnings of torch and transformers


@pytest.mark.parametrize("model_type", SHAPE_FAMILIES)
@pytest.mark.parametrize(("seed", "sequence"), [(0, 33), (1, 3)])
def test_random_configs_as_written(model_type: str, seed: int, sequence: int) -> None:
    """What the config states and nothing else, under the names of published configs; also shorter than a compressed entry."""
    rng = random.Random(f"{model_type} as written {seed}")
    settings = variant(model_type, transformers.AutoConfig.for_model(model_type).to_dict(), rng)
    assert compare({"model_type": model_type, **settings}, RunSpec(2, sequence)) == []


@pytest.mark.parametrize("model_type", SHAPE_FAMILIES)
def test_a_bare_config(model_type: str) -> None:
    """Only a model_type: every size is the configuration class's own."""
    assert model_of({"model_type": model_type}) == model_of(transformers.AutoConfig.for_model(model_type).to_dict())


@pytest.mark.parametrize("wrapper", ["llama4", "gemma3n", "gemma4", "gemma4_unified"])
def test_the_language_part(wrapper: str) -> None:
    source = hf.from_config({"model_type": wrapper}, "config.json")
    assert [finding.code for finding in source.findings] == ["language-part-only", "defaults-of-class"]
    assert source.model == model_of({"model_type": f"{wrapper}_text"})


SIZES = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64}


@pytest.mark.parametrize(
    ("settings", "wrong", "what"),
    [
        ({"attention_chunk_size": 8}, {"attention_chunk_size": 9}, "sliding window (0: none) of 2 layers (0, 1)"),
        ({"attention_chunk_size": 8}, {"no_rope_layers": [1, 1]}, ""),
        ({"moe_layers": [0]}, {"moe_layers": [1]}, ""),
        ({"moe_layers": [0]}, {"moe_layers": []}, "parameters"),
    ],
)
def test_differences_of_llama_4_are_noticed(settings: dict[str, Any], wrong: dict[str, Any], what: str) -> None:
    """Layers may change places without another number of GEMMs; anything else is a difference."""
    config = {"model_type": "llama4_text", **SIZES, "intermediate_size": 32, "intermediate_size_mlp": 56, "num_hidden_layers": 2}
    config |= {"num_local_experts": 4, **settings}
    trace = trace_worker.answer({"config": config, "micro_batch": 1, "sequence": 16})
    assert differences(model_of(config), RunSpec(1, 16), trace) == []
    differing = {difference.what for difference in differences(model_of({**config, **wrong}), RunSpec(1, 16), trace)}
    assert what in differing if what else not differing


def test_one_gemm_for_all_iterations() -> None:
    """Sinkhorn iterations are elementwise: the trace leaves them out, because they would take most of its time."""
    config = {"model_type": "deepseek_v4", **SIZES, "moe_intermediate_size": 32, "num_hidden_layers": 1, "q_lora_rank": 8}
    config |= {"o_groups": 2, "o_lora_rank": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "qk_rope_head_dim": 8}
    module, _ = trace_worker.build_huggingface(config, 1, 8)
    assert {part.hc_sinkhorn_iters for part in module.modules() if hasattr(part, "hc_sinkhorn_iters")} == {1}
