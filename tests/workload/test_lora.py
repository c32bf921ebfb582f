"""LoRA: the closed form against a live model whose weights are frozen and whose linears have adapters, as PEFT adds them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from gemmscope.errors import UserError
from gemmscope.model import presets
from gemmscope.model.spec import RunSpec
from gemmscope.workload.check import differences
from gemmscope.workload.derive import Workload, derive, with_lora
from gemmscope.workload.ops import ADAPTERS, Linear, Optimizer
from gemmscope.workload.traced_ops import TracedLinear
from support.oracle import model_of

known = presets.load("llama-3.1-8b").model
assert known is not None
LLAMA = known
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
CONFIG = {"model_type": "llama", "vocab_size": 96, "tie_word_embeddings": False, **SIZES}
QWEN = {**CONFIG, "model_type": "qwen2", "tie_word_embeddings": True}
GEMMA = {**CONFIG, "model_type": "gemma2", "head_dim": 16, "sliding_window": 8}
MIXTRAL = {**CONFIG, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
OF_MODULES = {"attention": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
OF_MODULES |= {"q-proj": ("q_proj",), "v-proj": ("v_proj",)}


def live_with_adapters(config: dict[str, Any], rank: int, names: tuple[str, ...]) -> Any:
    """transformers' model, frozen, with adapters beside its linears."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    trace_worker = pytest.importorskip("gemmscope.workload.trace_worker")
    factory = pytest.importorskip("gemmscope.workload.factory")

    class LoraLinear(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base = base
            self.lora_a = torch.nn.Linear(base.in_features, rank, bias=False)
            self.lora_b = torch.nn.Linear(rank, base.out_features, bias=False)

        def forward(self, x: Any) -> Any:
            return self.base(x) + 2.0 * self.lora_b(self.lora_a(x))

    live = transformers.AutoConfig.for_model(**config, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(live)
    model.requires_grad_(requires_grad=False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names:
                setattr(module, name, LoraLinear(child))
    factory.move_to_meta(model)
    tokens = torch.zeros((2, 16), dtype=torch.long, device="meta")
    return trace_worker.trace_built(factory.Built(model, (tokens,), {}))


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("config", "linears"),
    [(CONFIG, ()), (CONFIG, ("q-proj", "v-proj")), (CONFIG, ("mlp",)), (QWEN, ()), (GEMMA, ()), (MIXTRAL, ())],
)
def test_every_gemm_is_that_of_the_live_model(config: dict[str, Any], linears: tuple[str, ...]) -> None:
    default = ("attention",) if config is MIXTRAL else ("attention", "mlp")
    names = tuple(module for name in linears or default for module in OF_MODULES[name])
    trace = live_with_adapters(config, 8, names)
    run = RunSpec(2, 16, lora=8, lora_linears=linears)
    model = model_of(pytest.importorskip("transformers").AutoConfig.for_model(**config).to_dict())
    unequal = differences(model, run, trace)
    if linears:  # gradients of attention that nothing reads, in the first layer: a fused kernel computes them all the same
        unequal = [one for one in unequal if not one.what.startswith("attention backward")]
    assert unequal == []
    trained = sum(op.updated for op in derive(model, replace(run, separate_projections=True)).ops if isinstance(op, Optimizer))
    assert trained == trace.trainable


def test_adapters_take_the_place_of_weight_gradients() -> None:
    linears = [op for op in derive(LLAMA, RunSpec(1, 512, lora=16)).ops if isinstance(op, Linear)]
    passes = Counter[tuple[str, tuple[str, ...]]]()
    for op in linears:
        passes[op.role, op.passes] += op.count
    frozen, all_three = ("fprop", "dgrad"), ("fprop", "dgrad", "wgrad")
    assert passes["qkv-proj", frozen] == 31, "all layers but the first, whose input needs no gradient"
    assert passes["qkv-proj", ("fprop",)] == 1
    assert passes["mlp-down", frozen] == 32
    assert passes["lm-head", frozen] == 1
    assert passes["lora-a", ("fprop", "wgrad")] == 1
    assert passes["lora-a", all_three] == 31 + 3 * 32
    assert passes["lora-b", all_three] == 4 * 32
    assert not any(op.quantized for op in linears if op.role in ADAPTERS)


def test_tensor_parallelism_splits_the_adapters_with_their_linears() -> None:
    ops = derive(LLAMA, RunSpec(1, 512, tp=4, lora=16)).ops
    sizes = {op.label: (op.inputs, op.outputs) for op in ops if isinstance(op, Linear) and op.role in ADAPTERS}
    assert (sizes["QKV Proj LoRA A"], sizes["QKV Proj LoRA B"]) == ((4096, 16), (16, 6144 // 4))
    assert (sizes["MLP Down LoRA A"], sizes["MLP Down LoRA B"]) == ((14336 // 4, 16), (16, 4096))


def test_a_later_pipeline_stage_needs_every_gradient_of_its_input() -> None:
    ops = derive(LLAMA, RunSpec(1, 512, pp=2, pp_stage=1, lora=16)).ops
    assert {op.passes for op in ops if isinstance(op, Linear) and op.role == "qkv-proj"} == {("fprop", "dgrad")}


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"lora": 0}, "lora=0|must be at least 1", ""),
        ({"lora": 8000}, "lora=8000 is larger than QKV Proj", "at most lora=4096"),
        ({"lora": 8, "lora_linears": ("foo",)}, "names no linear", "mlp-gate-up"),
    ],
)
def test_lora_that_is_not_possible_is_one_message(settings: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        derive(LLAMA, RunSpec(1, 512, **settings))
    assert hint in str(raised.value)


def test_a_traced_module_gets_adapters_too() -> None:
    """Its linears keep the passes that were recorded, without wgrad."""
    seen = tuple(replace(gemm, op="blocks.*.up", count=4) for gemm in derive(LLAMA, RunSpec(1, 64)).gemms()[:3])
    sizes = {"tokens": seen[0].m, "inputs": seen[0].k, "outputs": seen[0].n}
    linear = TracedLinear(label="blocks.*.up", count=4, seen=seen, **sizes)
    router = replace(linear, label="blocks.*.gate", convertible=False)
    run = RunSpec(1, 64, lora=8)
    workload = with_lora(Workload((linear, router), stage=0), run, "mine.py")
    assert [op.label for op in workload.ops if op.role in ADAPTERS] == ["blocks.*.up LoRA A", "blocks.*.up LoRA B"]
    assert {gemm.pass_name for gemm in workload.gemms() if gemm.op == "blocks.*.up"} == {"fprop", "dgrad"}
    assert workload.findings[0].facts["ops"] == ["blocks.*.up"]
    with pytest.raises(UserError, match=r"mine\.py has no linears that adapters can be added to"):
        with_lora(Workload((router,), stage=0), run, "mine.py")
