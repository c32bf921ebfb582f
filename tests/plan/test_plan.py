"""The search: layouts that fit, the fastest, those too close to call, and the message if no layout is possible."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import gemmscope
from gemmscope.document import document
from gemmscope.errors import UserError
from gemmscope.forecast import plan as search
from gemmscope.forecast.communication import network_of
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.memory import rank_memory
from gemmscope.forecast.stacks import mixture
from gemmscope.forecast.step import StepForecast
from gemmscope.gpu.specs import GB, gpu
from gemmscope.interval import Interval
from gemmscope.job.load import load_model
from gemmscope.model.spec import RunSpec
from gemmscope.progress import Console, Reporter
from gemmscope.results.plan import PlanLayout, PlanResult
from gemmscope.workload.derive import derive
from support.commands import plan
from support.plan_files import plan_of_experts, plan_result, planned


def small(**options: Any) -> PlanResult:
    return planned("llama-3.2-1b", "h100", 8, 32, 4096, **{"restrict": {"recompute": ("none",)}, **options})


def run_of(layout: PlanLayout, sequence: int) -> RunSpec:
    """The run of a layout; the optimizer is in FP32 in all of them."""
    return RunSpec(
        layout.micro_batch_size, sequence, tp=layout.tp, cp=layout.cp, pp=layout.pp, vp=layout.vp, ep=layout.ep, dp=layout.dp,
        gradient_accumulation=layout.micro_batches, recompute=layout.recompute, recompute_share=layout.recompute_share,
        zero=layout.zero, pp_layers=layout.pp_layers, sequence_parallel=layout.tp > 1, optimizer_state="fp32",
    )  # fmt: skip


def test_the_fastest_first_and_all_fit() -> None:
    result = plan_result()
    [point] = result.points
    fitting = [layout for layout in point.layouts if not layout.may_not_fit]
    doubtful = point.layouts[len(fitting) :]
    for some in (fitting, doubtful):
        rates = [layout.tokens_per_s.value for layout in some]
        assert rates == pytest.approx(sorted(rates, reverse=True))
    assert point.fitting == len(fitting) > 100
    assert all(layout.memory_gb <= result.memory_gb for layout in fitting)
    assert all(layout.may_not_fit and layout.memory_gb > result.memory_gb for layout in doubtful)
    assert doubtful
    assert result.best is point.layouts[0]
    assert result.run is not None
    assert (result.run.gpus, result.run.global_batch) == (16, 64)


def test_a_layout_is_forecast_as_the_forecast_does() -> None:
    result, chip = plan_result(), gpu("h100")
    model = load_model(preset="llama-3.1-8b").model
    assert model is not None
    for layout in result.layouts[:: len(result.layouts) // 7]:
        run = run_of(layout, 8192)
        forecaster = Forecaster(chip, "sustained", software=mixture(chip))
        step = StepForecast(forecaster, model, run, derive(model, run), network_of(chip)).step(layout.recipe)
        assert layout.step_ms.value == pytest.approx(step.time_ms)
        assert layout.step_ms.high == pytest.approx(step.interval.high)
        assert layout.memory_gb == pytest.approx(rank_memory(model, run, layout.recipe, chip).total_bytes / GB)
        assert layout.tokens_per_s.value == pytest.approx(64 * 8192 / 16 / step.time_ms * 1000)


def test_only_as_many_layers_as_needed_are_recomputed() -> None:
    """Where all recomputed layers surely fit and none do not: a share of them, the least that fits, and that surely fits."""
    only = {"tp": 1, "pp": 1, "cp": 1, "zero": 3}
    result = planned("llama-3.1-8b", "h100", 16, 256, 8192, recipes=("BF16",), restrict=only)
    layouts = {(layout.micro_batch_size, layout.recompute, layout.recompute_share): layout for layout in result.layouts}
    model, chip = load_model(preset="llama-3.1-8b").model, gpu("h100")
    assert model is not None
    partial = [layout for layout in result.layouts if layout.recompute_share < 1]
    assert partial
    for layout in partial:
        run, whole = run_of(layout, 8192), layouts[layout.micro_batch_size, "full", 1.0]
        less = replace(run, recompute_share=layout.recompute_share - 0.25)
        verdicts = [rank_memory(model, one, "BF16", chip).fit for one in (run, less)]
        assert (verdicts[0] == "tight" and verdicts[1] == "may not fit") or (verdicts[0] == "fits" != verdicts[1])
        assert layout.step_ms.value < whole.step_ms.value
        assert layout.recomputed == f"{layout.recompute_share:.0%} of layers"
    full = planned("llama-3.1-8b", "h100", 16, 256, 8192, recipes=("BF16",), restrict={**only, "recompute": "full"})
    assert {layout.recompute_share for layout in full.layouts} == {1.0}


def test_micro_batches_divide_what_a_rank_has() -> None:
    result = planned("llama-3.2-1b", "h100", 8, 48, 4096, recipes=("BF16",), restrict={"tp": 1, "pp": 1, "cp": 1, "zero": 1})
    assert {layout.micro_batch_size for layout in result.layouts} == {1, 2, 3, 6}


def test_a_stack_has_only_its_own_layouts() -> None:
    """llm-foundry has FSDP, and nothing that splits the model; what is asked for is searched all the same."""
    foundry, split = (small(recipes=("bf16",), stack="mosaic", restrict=only) for only in ({}, {"tp": 2, "recompute": "none"}))
    assert {(layout.tp, layout.pp, layout.cp) for layout in foundry.layouts} == {(1, 1, 1)}
    assert {layout.zero for layout in foundry.layouts} == {2, 3}
    assert {layout.tp for layout in split.layouts} == {2}


def test_the_front_has_no_layout_that_another_beats() -> None:
    layouts = plan_result().layouts
    front = [layout for layout in layouts if layout.on_front]
    assert layouts[0] in front
    for layout in (layout for layout in layouts if not layout.may_not_fit):
        better = [
            other for other in front
            if other.memory_gb <= layout.memory_gb and other.tokens_per_s.value >= layout.tokens_per_s.value
        ]  # fmt: skip
        assert better
        assert layout.on_front == (better == [layout])


def test_ratios_share_errors() -> None:
    """The error bar of a ratio is narrower than that of the two times, and widest where layouts differ most."""
    best, *others = plan_result().layouts
    for other in others:
        assert other.slowdown is not None
        assert other.slowdown.value == pytest.approx(other.step_ms.value / best.step_ms.value)
        assert other.slowdown.half_width < 2**0.5 * max(best.step_ms.half_width, other.step_ms.half_width)
    about = ("splits", "recipe", "vp", "micro_batch_size")
    same = next(other for other in others if all(getattr(other, name) == getattr(best, name) for name in about))
    assert same.slowdown is not None
    assert same.slowdown.half_width < best.step_ms.half_width


def test_what_is_excluded_is_said() -> None:
    pruned = {entry.rule: entry for entry in plan_of_experts().points[0].pruned}
    assert {"gpus", "domain", "memory"} <= set(pruned)
    assert pruned["memory"].count > 0
    assert "needs" in pruned["memory"].example
    assert pruned["gpus"].unit == "splits"


@pytest.mark.parametrize(
    ("preset", "chip", "gpus", "batch", "sequence", "recipes", "chosen"),
    [
        ("llama-3.1-70b", "h100", 64, 256, 8192, ("FP8Current",), {"tp": 4, "pp": 8, "vp": 5, "micro_batch_size": 1}),
        ("llama-3.1-70b", "gb200", 64, 256, 8192, ("MXFP8",), {"tp": 2, "pp": 4, "vp": 5, "micro_batch_size": 1}),
        ("llama-3.1-70b", "gb200", 64, 256, 8192, ("NVFP4",), {"tp": 2, "pp": 4, "vp": 5, "micro_batch_size": 1}),
        ("llama-3.1-70b", "gb200", 64, 256, 8192, ("FP8Current",), {"tp": 1, "pp": 1, "zero": 3, "micro_batch_size": 2}),
        ("qwen3-30b-a3b", "h100", 16, 1024, 4096, ("FP8Current",), {"tp": 1, "pp": 1, "ep": 16, "micro_batch_size": 1}),
        ("qwen3-30b-a3b", "h100", 16, 1024, 4096, ("FP8Current",), {"pp": 2, "vp": 12, "ep": 8, "micro_batch_size": 1}),
        ("qwen3-30b-a3b", "b200", 8, 512, 4096, ("MXFP8",), {"tp": 1, "pp": 1, "ep": 8, "micro_batch_size": 4}),
        ("qwen3-30b-a3b", "gb200", 8, 512, 4096, ("MXFP8",), {"tp": 1, "pp": 1, "ep": 8, "micro_batch_size": 4}),
    ],
)
def test_published_layouts_rank_high(
    preset: str, chip: str, gpus: int, batch: int, sequence: int, recipes: tuple[str, ...], chosen: dict[str, int]
) -> None:
    """Those of NVIDIA's Megatron-Bridge performance summary are among the best tenth, or too close to call against the best."""
    result = planned(preset, chip, gpus, batch, sequence, recipes=recipes)
    ranks = [
        (rank, layout) for rank, layout in enumerate(result.layouts)
        if layout.cp == 1 and all(getattr(layout, name) == value for name, value in chosen.items())
    ]  # fmt: skip
    rank, layout = ranks[0]
    assert rank < len(result.layouts) / 10 or not (layout.slowdown is not None and layout.slowdown.above_one)


def test_recipes_and_parts_can_be_fixed() -> None:
    result = small(recipes=["fp8block"], restrict={"tp": 2, "recompute": ["full"], "pp": [1, 2]})
    assert {layout.recipe for layout in result.layouts} == {"FP8Block"}
    assert {layout.tp for layout in result.layouts} == {2}
    assert {layout.recompute for layout in result.layouts} == {"full"}


def test_a_slower_network_and_a_smaller_domain_cost_time() -> None:
    usual, slow = small(), small(network=5, nvlink_domain=2)
    assert usual.best is not None
    assert slow.best is not None
    assert slow.best.tokens_per_s.value < usual.best.tokens_per_s.value
    assert max(layout.tp for layout in slow.layouts) == 2
    assert (slow.network_gbps, slow.nvlink_domain) == (5.0, 2)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"gpus": None}, "is not given: the number of GPUs", "64"),
        ({"global_batch": 0}, "must be at least 1", ""),
        ({"restrict": {"tp": [3]}}, "tp=3: no layout of llama-3.2-1b on 8 GPUs has it", "possible values: 1, 2, 4, 8"),
        ({"restrict": {"pp": 5, "tp": 2}}, "pp=5: no layout", "possible values: 1, 2, 4"),
        ({"restrict": {"ep": 2}}, "ep=2: no layout", "possible values: 1"),
        ({"global_batch": 7, "restrict": {"tp": 1, "pp": 1, "cp": 1}}, "does not split over 8 GPUs", "global_batch=8"),
        ({"gpus": 7}, "global_batch=32 does not split over 7 GPUs in any layout", "global_batch=28› or ‹global_batch=35"),
        ({"restrict": {"recompute": ["some"]}}, "must be some of none, selective, full, not 'some'", "commas"),
        ({"restrict": {"zero": [4]}}, "must be some of 0, 1, 2, 3, not 4", "commas"),
        ({"restrict": {"tp": []}}, "has no values", "1,2,4"),
        ({"gpu": ["h100", "b200"]}, "a plan is for one type of GPU, not for h100, b200", "plan each"),
        ({"network": "token-ring"}, "is not a known network", "infiniband"),
        ({"tokens": -1}, "is not a number of tokens", "1e12"),
        ({"gpus": 0}, "must be at least 1, not 0", ""),
    ],
)
def test_invalid_input_names_what_works(options: dict[str, Any], message: str, hint: str) -> None:
    given: dict[str, Any] = {"gpu": "h100", "gpus": 8, "global_batch": 32, "sequence_length": 4096, **options}
    with pytest.raises(UserError) as error:
        plan(load_model(preset="llama-3.2-1b"), given.pop("gpu"), given.pop("gpus"), **given)
    text = error.value.message.replace("‹", "").replace("›", "")
    assert message in text
    assert hint in error.value.hint


def test_nothing_fits() -> None:
    with pytest.raises(UserError) as error:
        planned("llama-3.1-70b", "h100", 4, 64, 8192, recipes=["bf16"])
    assert "no layout of llama-3.1-70b fits on 4 h100 with 80 GB each: the smallest needs" in error.value.message
    assert "GB per GPU (BF16, " in error.value.message
    needed = int("".join(filter(str.isdigit, error.value.hint.split(";")[0])))
    assert planned("llama-3.1-70b", "h100", needed, 64, 8192, recipes=["bf16"]).best is not None
    with pytest.raises(UserError):
        planned("llama-3.1-70b", "h100", needed // 2, 64, 8192, recipes=["bf16"])


def test_what_exceeds_the_gpu_is_no_recommendation() -> None:
    result = planned("llama-3.1-8b", "h100", 2, 8, 8192, recipes=["bf16"], restrict={"zero": 1, "tp": 1, "pp": 1})
    assert result.best is not None
    assert result.best.may_not_fit
    answer = str(result)
    assert "no layout certainly fits in the 80 GB of a GPU. The fastest that may fit is BF16 with CP2" in " ".join(answer.split())
    assert "of the 0 layouts" not in answer
    assert not result.ready_to_paste


def test_offloading_is_recommended_only_where_it_is_surely_faster() -> None:
    result = plan_result()
    [point] = result.points
    fastest = point.layouts[0].model_copy(update={"offloaded_layers": 8, "tight": False})
    for high, offloads in ((1.1, False), (1.3, True)):
        slower = Interval(high - 0.08, high - 0.15, high)
        others = (fastest, point.layouts[1].model_copy(update={"slowdown": slower, "tight": False, "offloaded_layers": 0}))
        other = result.model_copy(update={"points": (point.model_copy(update={"layouts": others}),)})
        assert other.best is not None
        assert bool(other.best.offloaded_layers) == offloads
        assert ("no published run shows that offloading is hidden" in " ".join(str(other).split())) != offloads


def test_one_gpu() -> None:
    result = planned("llama-3.2-1b", "h200", 1, 4, 4096)
    assert {(layout.tp, layout.pp, layout.dp, layout.zero) for layout in result.layouts} == {(1, 1, 1, 0)}
    assert "DP1" in str(result)


def test_a_traced_model_has_no_layouts(tmp_path: Any) -> None:
    with pytest.raises(UserError, match="is traced"):
        plan(load_model(module="file.py:make"), "h100", 8, global_batch=8, sequence_length=512)


def test_several_processes_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = small().layouts
    monkeypatch.setattr(search, "WORTH_SHARING", 1)
    monkeypatch.setattr(search, "AT_A_TIME", 7)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    parallel = small().layouts
    assert len(parallel) == len(alone)
    for one, other in zip(parallel, alone, strict=True):
        assert (one.recipe, one.splits, one.micro_batch_size, one.zero) == (
            other.recipe, other.splits, other.micro_batch_size, other.zero,
        )  # fmt: skip
        assert one.step_ms.value == pytest.approx(other.step_ms.value)


def test_in_python_ctrl_c_returns_what_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def counting(self: Reporter, what: str, total: int) -> Iterator[Any]:
        yield lambda done: os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Console, "counting", counting)
    result = gemmscope.load("llama-3.1-8b").plan("h100", 16, 64, "8k")
    assert result.interrupted
    assert 0 < len(result.layouts) < len(plan_result().layouts)
    assert "Interrupted" in str(result)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_layout_of_a_file_is_ranked(tmp_path: Any) -> None:
    text = (
        "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 8 --swiglu --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 "
        "--global-batch-size 32 --tensor-model-parallel-size {tp} --sequence-parallel --use-distributed-optimizer "
        "--untie-embeddings-and-output-weights --vocab-size 32000 --position-embedding-type rope"
    )
    path = tmp_path / "train.sh"
    path.write_text("torchrun pretrain_gpt.py " + text.format(tp=4))
    result = plan(load_model(config=str(path)), "h100", 8)
    assert result.points[0].global_batch == 32
    [about] = [finding for finding in result.findings if finding.code == "plan-file-layout"]
    rank = about.facts["rank"]
    assert isinstance(rank, int)
    assert result.layouts[rank - 1].tp == 4
    assert rank > 1


def test_memory_that_is_tight_is_said() -> None:
    for result in (plan_result(), plan_of_experts()):
        best = result.best
        assert best is not None
        model = load_model(preset=result.name).model
        assert model is not None
        chip, run = gpu(result.gpu), replace(result.run) if result.run is not None else None
        assert run is not None
        assert best.tight == (rank_memory(model, run, best.recipe, chip).most_bytes > chip.memory_bytes)
        assert result.has("plan-memory-tight") == best.tight


def test_all_layouts_have_the_same_optimizer() -> None:
    """By default, a single replica would have no FP32 master weights. In a comparison, it has them like the others."""
    usual, light = small(restrict={"tp": 8}), small(restrict={"tp": 8}, optimizer_state="bf16")
    assert usual.run is not None
    assert (usual.run.data_parallel, usual.run.state_precision) == (1, "fp32")
    assert usual.best is not None
    assert light.best is not None
    assert light.best.memory_gb < usual.best.memory_gb
    assert "--optimizer-state fp32" in document(usual).next_command
    assert "--optimizer-state" not in document(light).next_command
