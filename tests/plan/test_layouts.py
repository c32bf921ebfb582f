"""The layouts that divide, and the rules that exclude the others."""

from __future__ import annotations

import pytest

from gemmscope.forecast.layouts import LEAST_CONTEXT, PlanTask, Pruning, Space, layouts, pipeline_layers
from gemmscope.model import presets
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload.sharding import check, check_schedule


def model(preset: str) -> ModelSpec:
    spec = presets.load(preset).model
    assert spec is not None
    return spec


def layouts_of(
    preset: str, gpus: int, batch: int, sequence: int = 8192, domain: int = 8, **given: tuple[object, ...]
) -> list[RunSpec]:
    return list(layouts(PlanTask(model(preset), gpus, batch, sequence, domain), Space(given), Pruning()))


@pytest.mark.parametrize(
    ("preset", "gpus", "batch"),
    [("llama-3.1-70b", 64, 256), ("qwen3-30b-a3b", 16, 96), ("deepseek-v3", 128, 512), ("llama-3.1-405b", 384, 768)],
)
def test_every_layout_uses_all_gpus_and_the_whole_batch_and_can_run(preset: str, gpus: int, batch: int) -> None:
    runs = layouts_of(preset, gpus, batch)
    assert len(runs) == len(set(runs)) > 50
    for run in runs:
        assert run.gpus == gpus
        assert run.global_batch == batch
    for run in runs[::41]:
        check(model(preset), run)
        check_schedule(run)


def test_the_layouts_that_published_runs_chose_are_searched() -> None:
    dense = layouts_of("llama-3.1-70b", 64, 256)
    assert any((run.tp, run.pp, run.vp, run.cp, run.micro_batch_size, run.zero) == (4, 8, 5, 1, 1, 1) for run in dense)
    assert any((run.tp, run.pp, run.cp, run.micro_batch_size, run.zero) == (1, 1, 1, 2, 3) for run in dense)
    experts = layouts_of("qwen3-30b-a3b", 16, 1024, 4096)
    assert any((run.tp, run.pp, run.ep, run.micro_batch_size) == (1, 1, 16, 1) for run in experts)
    assert any((run.tp, run.pp, run.vp, run.ep, run.micro_batch_size) == (1, 2, 12, 8, 1) for run in experts)


def test_rules() -> None:
    runs = layouts_of("llama-3.1-70b", 64, 256)
    assert max(run.tp for run in runs) == 8
    assert all(run.sequence_length // run.cp >= LEAST_CONTEXT for run in runs if run.cp > 1)
    assert not any(run.zero == 3 and run.pp > 1 for run in runs)
    assert not any(run.zero == 3 and run.ep == 1 for run in layouts_of("qwen3-30b-a3b", 16, 64))
    assert all(run.sequence_parallel == (run.tp > 1) for run in runs)
    assert max(run.tp for run in layouts_of("llama-3.1-70b", 64, 256, domain=72)) == 8  # its key/value heads
    assert {run.etp for run in layouts_of("qwen3-30b-a3b", 8, 64, 4096) if run.tp == 4} == {1, 4}


def test_what_is_excluded_is_counted() -> None:
    pruning = Pruning()
    task = PlanTask(model("llama-3.1-70b"), 64, 256, 8192, 8)
    list(layouts(task, Space({"micro_batch_size": (1, 3)}), pruning))
    assert set(pruning.counts) >= {"domain", "gpus", "layers", "context", "batch", "fsdp pipeline"}
    assert all(pruning.counts.values())
    assert pruning.examples["batch"] == "micro-batch 3 of 4 sequences"


def test_stages_with_unequal_layers_have_virtual_stages_without_an_empty_piece() -> None:
    runs = layouts_of("deepseek-v3", 256, 512, 4096, pp=(4,), tp=(1,), ep=(64,))
    assert {run.pp_layers for run in runs} == {(16, 15, 15, 15)}
    assert {run.vp for run in runs} == {1, 2, 4, 8}
    assert {1, 16} <= {run.vp for run in layouts_of("llama-3.1-405b", 512, 512, pp=(8,), tp=(8,))}  # beside the embedding


def test_what_is_given_is_all_that_is_searched() -> None:
    runs = layouts_of("llama-3.1-70b", 64, 256, tp=(2, 4), pp=(4,), vp=(1, 5), recompute=("full",), zero=(3,), cp=(4,))
    assert {(run.tp, run.pp, run.cp, run.recompute, run.zero) for run in runs} == {
        (tp, 4, 4, "full", 3)
        for tp in (2, 4)  # although no rule would choose this
    }
    assert {run.vp for run in runs} == {1, 5}
    assert layouts_of("llama-3.1-70b", 64, 256, tp=(3,)) == []


@pytest.mark.parametrize(("layers", "pp"), [(80, 8), (61, 16), (126, 16), (126, 8), (36, 8), (32, 32)])
def test_stages_hold_all_layers(layers: int, pp: int) -> None:
    stages = pipeline_layers(layers, pp)
    assert sum(stages) == layers
    assert len(stages) == pp
    assert min(stages) >= 1
