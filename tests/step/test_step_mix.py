"""Steps of a mix: which linears of which layers run in which precision, with stand-ins for the frameworks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gemmscope.errors import UserError
from gemmscope.model.spec import RunSpec, from_hyperparameters
from gemmscope.recipe.kept import KeptHigher
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.step.answer import PartialRecipe, _to_paste
from gemmscope.step.stack_plan import StackPlan, check_kept, kept_layers, parts_of, plan_step, too_shallow
from gemmscope.step.waterfall import PlacedKernel, fallbacks

torch = pytest.importorskip("torch", reason="kits need torch")
from torch import nn  # noqa: E402

from gemmscope.engine.rule import StoppingRule  # noqa: E402
from gemmscope.results.step import StepSettings  # noqa: E402
from gemmscope.step.answer import step_times  # noqa: E402
from gemmscope.step.kits.plain import Kit  # noqa: E402
from gemmscope.step.stack import Stack, Weights  # noqa: E402
from gemmscope.step.step_campaign import StepCampaign  # noqa: E402
from gemmscope.workload.derive import derive  # noqa: E402
from gemmscope.workload.summary import totals  # noqa: E402
from support.campaigns import recorded  # noqa: E402
from support.workers import forked_workers  # noqa: E402

__all__ = ["forked_workers"]  # the fixture

MODEL = from_hyperparameters(
    hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=4, vocab_size=64, gated=True
)
RUN = RunSpec(1, 16)
MIX = "FP8Current (in BF16: first 1, last 1, MLP Down)"


def plan_of(run: RunSpec = RUN) -> StackPlan:
    return plan_step(MODEL, run)[0]


# --- Transformer Engine, by a stand-in that notes the precision of every call -----------------------------------------------


class Seen:
    """What was called in which precision."""

    def __init__(self) -> None:
        self.precisions: list[str] = ["none"]
        self.calls: list[tuple[str, str]] = []

    @contextmanager
    def autocast(self, *, enabled: bool, recipe: Any = None) -> Iterator[None]:
        self.precisions.append(type(recipe).__name__ if enabled else "none")
        try:
            yield
        finally:
            self.precisions.pop()


def stand_in(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> type[Kit]:
    """Transformer Engine's kit on modules that multiply on the CPU and note in which precision they were called."""

    def noting(kind: str, inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.calls.append((kind, seen.precisions[-1]))
        return inner(x)

    class Linear(nn.Module):
        kind = "Linear"

        def __init__(self, inputs: int, outputs: int, *, bias: bool, **_: Any) -> None:
            super().__init__()
            self.inner = nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
            return noting(f"{self.kind} {self.inner.in_features}x{self.inner.out_features}", self.inner, x)

    class LayerNormLinear(Linear):
        kind = "LayerNormLinear"

    class LayerNormMLP(Linear):
        kind = "LayerNormMLP"

        def __init__(self, hidden: int, width: int, **how: Any) -> None:
            super().__init__(hidden, hidden, bias=False)

    te = ModuleType("transformer_engine.pytorch")
    norm = lambda width, eps, dtype, device: nn.RMSNorm(width, eps=eps, dtype=dtype)  # noqa: E731
    rotary = lambda head: lambda sequence: torch.zeros(sequence, head)  # noqa: E731
    vars(te).update(
        Linear=Linear, LayerNormLinear=LayerNormLinear, LayerNormMLP=LayerNormMLP, RMSNorm=norm, LayerNorm=norm,
        RotaryPositionEmbedding=rotary, autocast=seen.autocast,
    )  # fmt: skip
    recipes = SimpleNamespace(**{name: type(name, (), {}) for name in ("Float8CurrentScaling", "Float8BlockScaling")})
    modules = {
        "transformer_engine": ModuleType("transformer_engine"),
        "transformer_engine.common": SimpleNamespace(recipe=recipes),
        "transformer_engine.pytorch": te,
        "transformer_engine.pytorch.attention": ModuleType("attention"),
        "transformer_engine.pytorch.attention.rope": SimpleNamespace(apply_rotary_pos_emb=lambda x, *_, **__: x),
        "transformer_engine.pytorch.quantization": SimpleNamespace(
            FP8GlobalState=object, FP8GlobalStateManager=SimpleNamespace(quantization_state=None)
        ),
    }
    modules["transformer_engine"].pytorch = te  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "gemmscope.step.kits.transformer_engine", raising=False)
    loaded = importlib.import_module("gemmscope.step.kits.transformer_engine")
    del sys.modules[loaded.__name__]  # not shared with other tests
    kit: type[Kit] = loaded.TransformerEngineKit
    return kit


def calls_of(name: str, monkeypatch: pytest.MonkeyPatch, plan: StackPlan | None = None) -> list[list[tuple[str, str]]]:
    """Layer by layer: the modules that ran, each with its precision."""
    seen, plan = Seen(), plan or plan_of()
    kit = stand_in(seen, monkeypatch)(recipe(name), device="cpu")
    stack = Stack(plan, kit, Weights(), "cpu")
    stack(torch.randint(64, (16,)), torch.randint(64, (16,))).backward()
    per_layer = len(seen.calls) // plan.depth
    return [seen.calls[first : first + per_layer] for first in range(0, len(seen.calls), per_layer)]


QKV, OUT, MLP, UP, DOWN = (
    "LayerNormLinear 32x96", "Linear 32x32", "LayerNormMLP 32x32", "LayerNormLinear 32x128", "Linear 64x32",
)  # fmt: skip
LOW = "Float8CurrentScaling"


def test_a_recipe_runs_fused_modules_in_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_of("FP8Current", monkeypatch) == [[(QKV, LOW), (OUT, LOW), (MLP, LOW)]] * 4


def test_first_and_last_layers_run_without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, rest = [(QKV, "none"), (OUT, "none"), (MLP, "none")], [(QKV, LOW), (OUT, LOW), (MLP, LOW)]
    assert calls_of("FP8Current (in BF16: first 1, last 2)", monkeypatch) == [kept, rest, kept, kept]


def test_a_linear_of_every_layer_has_its_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MLP of which one linear is kept is not one fused module."""
    kept = [(QKV, "none"), (OUT, "none"), (UP, "none"), (DOWN, "none")]
    rest = [(QKV, LOW), (OUT, LOW), (UP, LOW), (DOWN, "none")]
    assert calls_of(MIX, monkeypatch) == [kept, rest, rest, kept]


def test_a_whole_mlp_stays_one_module(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "FP8Current (in BF16: MLP Gate+Up, MLP Down, Attn Out)"
    assert calls_of(name, monkeypatch) == [[(QKV, LOW), (OUT, "none"), (MLP, "none")]] * 4


def test_another_recipe_can_be_the_higher_one(monkeypatch: pytest.MonkeyPatch) -> None:
    high = "Float8BlockScaling"
    kept, rest = [(QKV, high), (OUT, high), (MLP, high)], [(QKV, high), (OUT, LOW), (MLP, LOW)]
    assert calls_of("FP8Current (in FP8Block: first 2, QKV Proj)", monkeypatch) == [kept, kept, rest, rest]


def test_recomputed_layers_keep_their_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The precision is chosen inside of what is recomputed."""
    plan = plan_of(replace(RUN, recompute="full"))
    seen = Seen()
    kit = stand_in(seen, monkeypatch)(recipe("FP8Current (in BF16: first 1)"), device="cpu")
    block = Stack(plan, kit, Weights(), "cpu").blocks[0]
    with kit.autocast():
        block(torch.randn(16, 32, dtype=torch.bfloat16))
    assert {precision for _, precision in seen.calls} == {"none"}


@pytest.mark.parametrize(
    ("error", "attends"),
    [
        (ValueError("No dot product attention backend is available for the provided inputs."), False),
        (RuntimeError("cuDNN Error: [cudnn_frontend] Error: No execution plans support the graph."), False),
        (torch.OutOfMemoryError("CUDA out of memory"), None),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
        (AssertionError("a fault"), None),
    ],
)
def test_only_a_missing_kernel_makes_windows_run_elsewhere(
    error: Exception, attends: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = stand_in(Seen(), monkeypatch)
    loaded = vars(sys.modules["transformer_engine.pytorch"])
    tried = []

    def attention(*_: Any, **__: Any) -> None:
        tried.append(error)
        raise error

    loaded["DotProductAttention"] = attention
    windowed = replace(plan_of().model.layers[0].attention, window=4)
    attends_of = kit.masked_attention.__globals__["_attends"]
    for _ in range(2):
        if attends is None:
            with pytest.raises(type(error)):
                attends_of(windowed, 16, "cpu")
        else:
            assert attends_of(windowed, 16, "cpu") is attends
    assert len(tried) == (2 if attends is None else 1)  # a fault is not kept


# --- torchao: which linears are converted ------------------------------------------------------------------------------------


def converted(name: str, monkeypatch: pytest.MonkeyPatch, *, kept: bool) -> dict[str, set[str]]:
    """Recipe → the linears of a layer that are converted to it."""
    result: dict[str, set[str]] = {}

    def convert(module: nn.Module, config: str, module_filter_fn: Any) -> None:
        for path, part in module.named_modules():
            if isinstance(part, nn.Linear) and module_filter_fn(part, path):
                result.setdefault(config, set()).add(path)

    float8 = SimpleNamespace(
        Float8LinearConfig=SimpleNamespace(from_recipe_name=lambda config: config), convert_to_float8_training=convert
    )
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", float8)
    monkeypatch.delitem(sys.modules, "gemmscope.step.kits.torchao", raising=False)
    loaded = importlib.import_module("gemmscope.step.kits.torchao")
    del sys.modules[loaded.__name__]
    kit = loaded.TorchaoKit(recipe(name), device="cpu", compiled="none")
    block = Stack(plan_of(), Kit(recipe(BASELINE)), Weights(), "cpu").blocks[0]
    kit.finish(block, kept=kept)
    return result


def test_torchao_converts_what_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "FP8Rowwise (in BF16: first 1, MLP Down)"
    assert converted(name, monkeypatch, kept=True) == {}
    [paths] = converted(name, monkeypatch, kept=False).values()
    assert {part for path in paths for part in parts_of(path)} == {"qkv", "attn out", "mlp up", "mlp"}
    every = converted("FP8Rowwise", monkeypatch, kept=False)["rowwise"]
    assert {path for path in every if "mlp down" in parts_of(path)} == every - paths != set()
    higher = converted("FP8Rowwise (in FP8RowwiseGWHP: MLP Down)", monkeypatch, kept=False)
    assert higher["rowwise_with_gw_hp"] == every - paths


# --- what is kept where ------------------------------------------------------------------------------------------------------


def test_layers_of_a_pipeline_stage() -> None:
    kept = KeptHigher(BASELINE, first_layers=1, last_layers=3)
    assert kept_layers(plan_of(), kept) == [True, True, True, True]
    assert kept_layers(plan_of(), KeptHigher(BASELINE, 1, 2)) == [True, False, True, True]
    stages = [plan_of(RunSpec(1, 16, pp=2, pp_stage=stage)) for stage in (0, 1)]
    assert [kept_layers(stage, kept) for stage in stages] == [[True, True], [True, True]]
    assert [kept_layers(stage, KeptHigher(BASELINE, 1, 1)) for stage in stages] == [[True, False], [False, True]]


def test_shallower_stacks_keep_as_many_layers() -> None:
    """So that the whole depth is on the line through two of them; a stack of kept layers alone says nothing."""
    kept = KeptHigher(BASELINE, 1, 1)
    assert kept_layers(plan_of().with_depth(3), kept) == [True, False, True]
    assert too_shallow(plan_of(), 3, kept) == ""
    assert too_shallow(plan_of(), 4, KeptHigher(BASELINE, 2, 2)) == ""
    assert too_shallow(plan_of(), 2, kept) == "it keeps 2 layers in BF16, but only 2 fit in memory"


def test_what_a_stack_cannot_keep() -> None:
    ops = ("q-proj", "k-proj", "v-proj", "attention-out", "mixer-out", "mlp-down")
    check_kept("FP8Current (in BF16: Q Proj, K Proj, V Proj)", ops)
    with pytest.raises(UserError, match="only together, but the mix does not keep K Proj"):
        check_kept("FP8Current (in BF16: Q Proj)", ops)
    with pytest.raises(UserError, match="cannot keep Mixer Out in a different precision") as caught:
        check_kept("FP8Current (in BF16: Mixer Out)", ops)
    assert "MLP Down" in caught.value.hint


def test_layers_in_bf16_are_no_fallback() -> None:
    """A mix falls back where nothing ran in low precision."""
    bf16 = PlacedKernel("mlp", "forward", "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", 1.0)
    fp8 = PlacedKernel("mlp", "forward", "nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_coopA_TNT", 1.0)
    assert fallbacks(recipe("FP8Current"), [bf16, fp8]) is not None
    assert fallbacks(recipe(MIX), [bf16, fp8]) is None
    assert fallbacks(recipe(MIX), [bf16]) is not None


def test_settings_to_paste() -> None:
    texts = _to_paste(PartialRecipe("FP8Current (in BF16: first 1, last 2)"), 32)
    assert "--num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 2" in texts["Megatron-LM"]


@pytest.mark.usefixtures("forked_workers")
def test_a_mix_is_measured_beside_the_recipes(tmp_path: Path) -> None:
    """On the CPU, where both precisions of the mix are the same: a row of its own, built and run as one."""
    name = "BF16 (in BF16: first 1, MLP Down)"
    settings = StepSettings("cpu", "none", drop_ms=1, keep_ms=20, host=False, max_rounds=3)
    with recorded(tmp_path) as recording:
        from gemmscope.engine.campaign import LocalWorkers

        campaign = StepCampaign(
            plan=plan_of(), recipes=[BASELINE, name], settings=settings, rule=StoppingRule(target=0.9, longest_s=5),
            recording=recording, workers=LocalWorkers(),
        )  # fmt: skip
        results = campaign.run()
    workload = derive(MODEL, RUN)
    times = step_times(results, [BASELINE, name], totals(workload, RUN, MODEL), RUN.tokens)
    assert [time.recipe for time in times.recipes] == [BASELINE, name]
    mixed = times.of(name)
    assert mixed is not None
    assert mixed.speedup is not None
    losses = {result.variant.recipe: result.facts["loss"] for result in results.tasks.values()}
    assert losses[name] == pytest.approx(losses[BASELINE], rel=0.2)
