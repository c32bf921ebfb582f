"""The stack of every family with mixers or unusual attention has the parameters that `shapes` counts."""

from __future__ import annotations

import json
import random

import pytest

from gemmscope.model import hf
from gemmscope.model.spec import RunSpec
from gemmscope.recipe.recipes import recipe
from gemmscope.step.stack_plan import plan_step
from gemmscope.workload.derive import derive
from support.hf_variants import variant
from support.mamba_variants import mixer_variant

pytest.importorskip("torch", reason="steps need torch")
transformers = pytest.importorskip("transformers", reason="its defaults")

from gemmscope.step.kits.plain import Kit  # noqa: E402
from gemmscope.step.stack import Stack, Weights  # noqa: E402

STATE_SPACE = ("mamba", "mamba2", "falcon_mamba", "bamba", "jamba", "falcon_h1", "granitemoehybrid", "nemotron_h")
OTHERS = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "minimax", "lfm2", "lfm2_moe", "olmo_hybrid", "llama4_text",
    "glm4_moe", "minimax_m2", "gpt_oss", "gemma2", "gemma3_text", "olmo2", "qwen3", "cohere", "deepseek_v3",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # warnings of transformers
@pytest.mark.parametrize("model_type", [*STATE_SPACE, *OTHERS])
def test_the_stack_has_the_models_parameters(model_type: str) -> None:
    rng = random.Random(f"the step of {model_type}")
    if model_type in STATE_SPACE:
        settings = mixer_variant(model_type, rng)
    else:
        settings = variant(model_type, transformers.AutoConfig.for_model(model_type).to_dict(), rng)
    model = hf.from_config(json.loads(json.dumps({"model_type": model_type, **settings})), "config.json").model
    assert model is not None
    run = RunSpec(1, 32)
    plan, findings = plan_step(model, run)
    stack = Stack(plan.unrolled(), Kit(recipe("BF16"), device="meta"), Weights(), "meta")
    assert sum(parameter.numel() for parameter in stack.parameters()) == derive(model, run).parameters
    assert findings == []
