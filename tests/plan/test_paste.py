"""The best layout as settings: what a framework's file says is what the layout is."""

from __future__ import annotations

import re

import pytest

from gemmscope.interval import Interval
from gemmscope.model.readers import read_text
from gemmscope.paste.emit import layout_to_paste
from gemmscope.recipe.frameworks import frameworks
from gemmscope.recipe.recipes import recipes
from gemmscope.results.plan import PlanLayout

MEGATRON = (
    "torchrun pretrain_gpt.py --num-layers {layers} --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --swiglu --max-position-embeddings 8192 --vocab-size 32000 {experts} "
)
EXPERTS = "--num-experts 64 --moe-router-topk 4 --moe-ffn-hidden-size 1024"


def layout(**sizes: object) -> PlanLayout:
    times = {"step_ms": Interval(1.0, 0.9, 1.1), "tokens_per_s": Interval(1.0, 0.9, 1.1), "mfu": 0.5, "memory_gb": 60.0}
    usual = {"recipe": "FP8Current", "micro_batch_size": 1, "micro_batches": 16, "zero": 1, "dp": 2}
    return PlanLayout.model_validate({**times, **usual, **sizes})


LAYOUTS = {
    "pipeline": layout(tp=4, etp=4, pp=8, vp=5),
    "context": layout(tp=2, etp=2, cp=2, micro_batch_size=2, recompute="full"),
    "fsdp": layout(zero=3, dp=64, recipe="MXFP8"),
    "experts": layout(ep=8, dp=16, pp=2, vp=4, recipe="BF16", recompute="selective"),
    "folded experts": layout(tp=2, etp=1, ep=8, dp=16, recipe="NVFP4"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_megatron_reads_what_was_meant(name: str) -> None:
    chosen = LAYOUTS[name]
    experts = chosen.ep > 1
    text = layout_to_paste(chosen, 256, 8192, 80, experts=experts)["Megatron-LM"]
    script = MEGATRON.format(layers=80, experts=EXPERTS if experts else "") + "\\\n" + text
    source = read_text(script, "train.sh")
    read = source.run_settings
    sizes = ("tp", "cp", "pp", "ep", "micro_batch_size", "recompute")
    assert {size: read.get(size, 1 if size != "recompute" else "none") for size in sizes} == {
        size: getattr(chosen, size) for size in sizes
    }
    assert read.get("vp", 1) == chosen.vp
    assert read["sequence_length"] == 8192
    assert source.global_batch == 256
    assert read.get("zero") == chosen.zero
    if experts:
        assert read.get("etp", chosen.tp) == chosen.etp


@pytest.mark.parametrize("name", LAYOUTS)
def test_torchtitan_reads_what_was_meant(name: str) -> None:
    chosen = LAYOUTS[name]
    layers, batch = 80 if chosen.ep == 1 else 48, chosen.micro_batch_size * 16 * chosen.dp
    text = layout_to_paste(chosen, batch, 8192, layers, experts=chosen.ep > 1)["torchtitan"]
    flavor = '[model]\nname = "llama3"\nflavor = "70B"\n' if chosen.ep == 1 else '[model]\nname = "qwen3"\nflavor = "30B-A3B"\n'
    text = text.replace("[model]\n", flavor) if "[model]" in text else flavor + "\n" + text
    read = read_text(text, "train.toml").run_settings
    assert {size: read.get(size, 1) for size in ("tp", "cp", "pp", "ep", "micro_batch_size")} == {
        size: getattr(chosen, size) for size in ("tp", "cp", "pp", "ep", "micro_batch_size")
    }
    assert read.get("vp", 1) == chosen.vp
    assert read["gradient_accumulation"] == 16
    assert read["sequence_length"] == 8192


@pytest.mark.parametrize("name", [name for name, recipe in recipes().items() if recipe.backends != ("cpu",)])
def test_every_recipe_has_settings_or_a_comment(name: str) -> None:
    """Where a framework does not have the recipe, its settings say that they train in another one."""
    texts, settings = layout_to_paste(layout(recipe=name), 32, 8192, 80, experts=False), recipes()[name].settings
    assert "--bf16" in texts["Megatron-LM"]
    assert bool(re.search("--fp[48]-recipe", texts["Megatron-LM"])) == ("megatron" in settings and name != "BF16")
    assert texts["Megatron-Bridge"].startswith("mixed_precision=bf16") == ("bridge" in settings)
    assert ("[quantize.linear" in texts["torchtitan"]) == ("torchtitan" in settings)
    pasted = {known.title: key in settings for key, known in frameworks().items() if "layout" in known.paste}
    assert {framework: "does not have" not in text for framework, text in texts.items()} == (
        pasted if name != "BF16" else dict.fromkeys(pasted, True)
    )


def test_uneven_stages() -> None:
    even = layout_to_paste(layout(pp=8, vp=2, pp_layers=(15, *[16] * 6, 15)), 32, 8192, 126, experts=False)
    assert "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split" in even["Megatron-LM"]
    sizes = "--num-layers 61 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 8"
    for virtual in (1, 4, 8):  # a script's own reader has the same stages
        texts = layout_to_paste(layout(pp=4, vp=virtual, pp_layers=(16, 15, 15, 15)), 32, 8192, 61, experts=False)
        read = read_text(f"torchrun pretrain_gpt.py {sizes} {texts['Megatron-LM']}", "train.sh").run_settings
        assert (read["pp_layers"], read.get("vp", 1)) == ((16, 15, 15, 15), virtual)
        assert "\"model.pipeline_model_parallel_layout='Et" in texts["Megatron-Bridge"]
