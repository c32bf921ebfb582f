"""GPUs, data-parallel size, global batch and accumulation: what is accepted agrees, what is refused names what is accepted."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.errors import UserError, in_shell
from gemmscope.model.spec import RunSpec
from gemmscope.workload.sharding import Given, Ranks, dp_step, model_ranks, solve
from support.refusals import refused

small = st.sampled_from([1, 1, 2, 3, 4, 6, 8])
maybe = st.one_of(st.none(), st.integers(1, 300))


@st.composite
def runs(draw: st.DrawFn) -> RunSpec:
    tp = draw(small)
    etp = draw(st.sampled_from([None, *(size for size in (1, 2, 4) if tp % size == 0)]))
    return RunSpec(draw(small), 512, tp=tp, cp=draw(small), pp=draw(small), ep=draw(st.sampled_from([1, 1, 2, 8, 64])), etp=etp)


@st.composite
def asked(draw: st.DrawFn) -> Given:
    return Given(gpus=draw(st.one_of(st.none(), st.integers(1, 2000))), dp=draw(maybe), global_batch=draw(maybe),
                 gradient_accumulation=draw(st.one_of(st.none(), small)), fsdp=draw(st.one_of(st.none(), small)))  # fmt: skip


def agrees(run: RunSpec, wanted: Given, ranks: Ranks) -> bool:
    """Whether the answer has all that was asked for, and obeys the two equations."""
    dp = ranks.dp if ranks.dp is not None else dp_step(run)
    accumulation = ranks.gradient_accumulation or 1
    full = replace(run, dp=ranks.dp, gradient_accumulation=accumulation)
    return (
        full.gpus == run.tp * run.cp * run.pp * dp
        and full.global_batch == run.micro_batch_size * accumulation * dp
        and (run.tp * run.cp * dp) % (run.ep * run.expert_tp) == 0
        and wanted.gpus in (None, full.gpus)
        and wanted.dp in (None, dp)
        and wanted.global_batch in (None, full.global_batch)
        and wanted.gradient_accumulation in (None, accumulation)
        and (wanted.fsdp is None or (dp * run.cp) % wanted.fsdp == 0)
    )


def suggestions(error: UserError) -> list[dict[str, int]]:
    """The values that a refusal names."""
    named = re.findall(r"--(gpus|dp|global-batch) (\d+)", in_shell(error.hint))
    return [{name.replace("-", "_"): int(value)} for name, value in named]


@settings(max_examples=400, deadline=None)
@given(runs(), asked())
def test_what_is_accepted_agrees_and_what_is_refused_can_be_mended(run: RunSpec, wanted: Given) -> None:
    for _ in range(4):  # a refusal mends one thing; several may be wrong
        try:
            ranks = solve(run, wanted)
        except UserError as error:
            named = suggestions(error)
            assert named, (error.message, error.hint)
            first, *others = [replace(wanted, **suggestion) for suggestion in named]
            for other in others:  # every size that is named is at least better than what was refused: another refusal, or none
                assert refusal(run, other) != error.message
            wanted = first
        else:
            assert agrees(run, wanted, ranks)
            return
    raise AssertionError(f"{wanted} was never accepted for {run}")


def refusal(run: RunSpec, wanted: Given) -> str:
    try:
        solve(run, wanted)
    except UserError as error:
        return error.message
    return ""


def test_experts_are_folded_over_tensor_and_data_parallelism() -> None:
    """TP2 EP64 ETP1 on 64 GPUs."""
    run = RunSpec(1, 4096, tp=2, ep=64, etp=1)
    assert solve(run, Given(gpus=64)) == Ranks(32, None)
    assert run.gpus == 64
    assert run.data_parallel == 32
    with refused("ep=64", "48 ranks"):
        solve(run, Given(gpus=48))


def test_without_anything_it_stays_open() -> None:
    assert solve(RunSpec(1, 512, tp=2), Given()) == Ranks(None, None)
    assert solve(RunSpec(2, 512), Given(global_batch=8)) == Ranks(None, 4)  # on one replica
    assert solve(RunSpec(1, 512), Given(fsdp=8)) == Ranks(8, None)
    assert solve(RunSpec(1, 512), Given(fsdp=8, dp=32)) == Ranks(32, None)  # four groups of eight
    assert solve(RunSpec(1, 512, cp=2), Given(fsdp=8)) == Ranks(4, None)


@pytest.mark.parametrize(
    ("run", "wanted", "message", "hint"),
    [
        (RunSpec(1, 512, tp=8, pp=4), Given(gpus=16), "takes 32 GPUs (tp x cp x pp), more than --gpus 16", "--gpus 32"),
        (RunSpec(1, 512, tp=8), Given(gpus=60), "60 GPUs do not divide into groups of 8", "--gpus 56 or --gpus 64"),
        (RunSpec(1, 512, tp=8), Given(gpus=64, dp=4), "--gpus 64 is not 4 data-parallel replicas of 8 GPUs", "--gpus 32"),
        (RunSpec(2, 512), Given(dp=8, global_batch=100), "--global-batch 100 does", "--global-batch 96 or --global-batch 112"),
        (RunSpec(2, 512), Given(dp=8, global_batch=100), "--global-batch 100 does not split", "use --dp 5 or --dp 10"),
        (
            RunSpec(1, 512),
            Given(dp=8, global_batch=64, gradient_accumulation=4),
            "--global-batch 64 is not --micro-batch-size 1 x --gradient-accumulation 4 x 8 data-parallel ranks = 32",
            "--global-batch 32",
        ),
        (RunSpec(1, 512), Given(fsdp=8, dp=12), "--fsdp 8 does not divide the 12 ranks", "--dp 8 or --dp 16"),
        (RunSpec(1, 512, tp=3), Given(gpus=64, global_batch=100), "64 GPUs do not divide", "--gpus 60 or --gpus 75"),
    ],
)  # fmt: skip
def test_messages(run: RunSpec, wanted: Given, message: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        solve(run, wanted)
    assert message in in_shell(caught.value.message)
    assert hint in in_shell(caught.value.hint)


def test_gpus_of_a_replica() -> None:
    assert model_ranks(RunSpec(1, 512, tp=2, cp=4, pp=8, ep=16)) == 64
