"""How a run follows from what is typed and what a file says: one number of GPUs, one global batch."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.errors import UserError, in_shell
from gemmscope.job.load import ModelRun, load_model, model_run
from gemmscope.model import megatron, torchtitan
from gemmscope.model.spec import ModelSource, framework_defaults
from gemmscope.workload.sharding import check, check_schedule
from support.command import Run, run
from support.commands import forecast
from support.reading import codes, facts

__all__ = ["run"]  # the fixture

LLAMA = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention"
    " --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --swiglu"
    " --disable-bias-linear --untie-embeddings-and-output-weights --normalization RMSNorm --vocab-size 128256"
    " --micro-batch-size 1 --global-batch-size 128"
)
LAYOUT = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
VIRTUAL = "--num-layers-per-virtual-pipeline-stage 4"
WORLD = "torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py"


def script(*parts: str) -> ModelSource:
    return megatron.read(" ".join((*parts, LLAMA)), "run.sh")


def layout(source: ModelSource, **given: Any) -> tuple[int | None, int]:
    run = model_run(source, **given).run
    return run.dp, run.gradient_accumulation


def checked_run(source: ModelSource, **given: Any) -> None:
    layout = model_run(source, **given)
    assert source.model is not None
    check(source.model, layout.run)
    check_schedule(layout.run)


def message(source: ModelSource, **given: Any) -> str:
    with pytest.raises(UserError) as caught:
        checked_run(source, **given)
    return in_shell(f"{caught.value.message}\n{caught.value.hint}")


def preset(name: str, **given: Any) -> ModelRun:
    return model_run(load_model(preset=name), micro_batch_size=1, sequence_length=4096, **given)


def test_a_script_has_one_data_parallel_size() -> None:
    """Gradient accumulation and the gradient exchange use the same data-parallel size."""
    job = model_run(script(WORLD, LAYOUT))
    assert (job.run.dp, job.run.data_parallel, job.run.gradient_accumulation) == (8, 8, 16)
    assert (job.run.gpus, job.run.global_batch) == (32, 128)
    assert forecast(job, ["h100"]).dp == 8


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (8, 16)),
        ({"gpus": 64}, (16, 8)),  # the global batch stays
        ({"dp": 4}, (4, 32)),
        ({"global_batch": 256}, (8, 32)),
        ({"gpus": 64, "gradient_accumulation": 4}, (16, 4)),  # the global batch follows
        ({"gradient_accumulation": 4, "global_batch": 64}, (16, 4)),
        ({"gradient_accumulation": 4}, (8, 4)),
        ({"tp": 4}, (4, 32)),  # the GPUs stay
        ({"pp": 1}, (16, 8)),
        ({"micro_batch_size": 4}, (8, 4)),
        ({"fsdp": 4}, (8, 16)),
        ({"fsdp": 16, "gpus": 64}, (16, 8)),
    ],
)
def test_what_is_typed_over_a_script(given: dict[str, Any], expected: tuple[int, int]) -> None:
    assert layout(script(WORLD, LAYOUT), **given) == expected


def test_what_no_longer_divides_is_dropped_with_a_finding() -> None:
    job = model_run(script(WORLD, LAYOUT), tp=1, cp=3)
    assert (job.run.dp, job.run.gradient_accumulation) == (None, 128)
    assert {"data-parallel-reset", "fewest-gpus-assumed"} <= set(codes(job))
    job = model_run(script(WORLD, LAYOUT), micro_batch_size=3)
    assert (job.run.dp, job.run.gradient_accumulation) == (8, 1)
    assert "accumulation-reset" in codes(job)


def test_a_global_batch_stays_where_the_number_of_gpus_is_not_known() -> None:
    source = script(LAYOUT)  # no launcher
    job = model_run(source)
    assert (job.run.global_batch, job.run.gpus) == (128, 4)
    assert "fewest-gpus-assumed" in codes(job)
    assert all(finding.level == "warning" for finding in job.findings)  # the speedup depends on it: not only with --detail
    job = model_run(source, gpus=16)
    assert (job.run.dp, job.run.gradient_accumulation) == (4, 32)
    assert codes(job) == []


def test_virtual_stages() -> None:
    source = script(WORLD, LAYOUT, VIRTUAL)
    assert model_run(source).run.vp == 4
    assert model_run(source, pp=4).run.vp == 4  # 8 layers of a stage still divide
    reset = model_run(source, pp=16)
    assert reset.run.vp == 1
    assert "virtual-stages-reset" in codes(reset)
    unknown = model_run(script(LAYOUT, VIRTUAL))  # without a launcher
    assert unknown.run.global_batch == 128
    odd = model_run(replace(script(LAYOUT, VIRTUAL), global_batch=127))
    assert odd.run.gradient_accumulation == 2  # the fewest that it can mean
    assert "accumulation-unknown" in codes(odd)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"gpus": 24}, ("--global-batch 128 does not split", "(the global batch is from run.sh)", "--gpus 16 or --gpus 32")),
        ({"gpus": 2}, ("takes 4 GPUs (tp x cp x pp), more than --gpus 2", "--gpus 4")),
        ({"gpus": 30}, ("30 GPUs do not divide into groups of 4", "--gpus 28 or --gpus 32")),
        ({"gpus": 32, "dp": 4}, ("--gpus 32 is not 4 data-parallel replicas", "--gpus 16")),
        ({"global_batch": 100}, ("--global-batch 100 does not split", "--global-batch 96 or --global-batch 104")),
        ({"fsdp": 3}, ("--fsdp 3 does not divide the 8 ranks", "--dp 6 or --dp 9")),
        (
            {"fsdp": 8, "zero": 1},
            ("--fsdp 8 shards weights, gradients and optimizer states, but --zero 1 shards less", "remove --zero"),
        ),
        ({"fsdp": 8, "zero": 0}, ("but --zero 0 shards less",)),
        ({"zero": 4}, ("--zero must be 0, 1, 2 or 3",)),
        ({"optimizer_state": "fp16"}, ("--optimizer-state must be bf16 or fp32",)),
        ({"vp": 3}, ("--vp 3 does not divide the 16 layers of a pipeline stage", "1, 2, 4, 8, 16")),
        ({"vp": 2, "pp": 1}, ("--vp 2 splits each stage of a pipeline", "remove --vp, or add --pp: 1, 2, 4, 8, 16")),
        (
            {"vp": 2, "gradient_accumulation": 3},
            ("needs a multiple of --pp 2 micro-batches", "--gradient-accumulation 2 or --gradient-accumulation 4"),
        ),
        ({"vp": 2, "gradient_accumulation": 1}, ("a step has 1", "the nearest that works: --gradient-accumulation 2")),
        ({"vp": 2, "global_batch": 24}, ("a step has 3", "as a global batch, --global-batch 16 or --global-batch 32")),
        ({"tp_overlap": True, "sequence_parallel": False}, ("--tp-overlap overlaps the collectives of", "--sequence-parallel")),
        ({"ep": 2}, ("llama has no experts",)),
        ({"gpus": 0}, ("--gpus must be at least 1",)),
        ({"global_batch": 2.5}, ("--global-batch must be a whole number",)),
        ({"zero_ranks": 5}, ("--zero-ranks 5 does not divide the 8 ranks",)),
    ],
)
def test_refusals(given: dict[str, Any], expected: tuple[str, ...]) -> None:
    source = megatron.read(" ".join((WORLD, LAYOUT, LLAMA)), "run.sh")
    text = message(source, **given)
    for word in expected:
        assert word.replace("llama has", "run has") in text


def test_sharding_without_anyone_to_share_with_is_refused() -> None:
    assert "there is only one" in message(load_model(preset="llama-3.1-8b"), micro_batch_size=1, sequence_length=8, zero=3)
    assert preset("llama-3.1-8b", zero=3, dp=1).run.zero == 3  # given explicitly
    assert preset("llama-3.1-8b", zero=3, cp=2).run.zero == 3  # context parallelism has several
    assert preset("qwen3-30b-a3b", zero=1, ep=8).run.zero == 1  # so do experts


def test_experts_are_folded() -> None:
    """TP2 EP64 ETP1 on 64 GPUs, as Megatron does."""
    job = preset("qwen3-30b-a3b", tp=2, ep=64, etp=1, gpus=64)
    assert (job.run.dp, job.run.gpus) == (32, 64)
    assert job.source.model is not None
    check(job.source.model, job.run)
    text = message(load_model(preset="qwen3-30b-a3b"), micro_batch_size=1, sequence_length=4096, tp=2, ep=64, etp=1, gpus=48)
    assert "--ep 64 x --etp 1 does not divide the 48 ranks that share the experts (tp x cp x dp = 2 x 1 x 24)" in text
    assert "--gpus 64" in text


def test_torchtitan_takes_any_number_of_micro_batches() -> None:
    text = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 6
seq_len = 4096
[parallelism]
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
"""
    job = model_run(torchtitan.read(text, "job.toml"))
    assert (job.run.vp, job.run.gradient_accumulation) == (2, 6)
    assert forecast(job, ["h100"], gpu_count=32).gpus
    assert not forecast(job, ["h100"], gpu_count=32).has("gpus-unknown")
    alone = forecast(job, ["h100"])
    assert facts(alone, "gpus-unknown") == {"origin": "job.toml", "zero": 2, "gpus": 4, "example": 32}
    assert "--gpus 32" in next(finding.text for finding in alone.findings if finding.code == "gpus-unknown")


def test_hybrid_sharding_of_a_file_in_another_layout() -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 4096\n[parallelism]\n'
    source = torchtitan.read(text + "data_parallel_shard_degree = 8\ndata_parallel_replicate_degree = 4", "job.toml")
    assert (model_run(source).run.dp, model_run(source).run.zero_ranks) == (32, 8)
    assert model_run(source, gpus=64).run.zero_ranks == 8
    assert model_run(source, gpus=12).run.zero_ranks is None
    assert model_run(source, zero=0).run.zero_ranks is None


MODEL = "--preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8k --gpu h100"


def test_gpus_alone_give_the_data_parallel_size(run: Run) -> None:
    out = json.loads(run(f"forecast {MODEL} --tp 2 --gpus 64 --global-batch 256 --json -").out)
    assert (out["run"]["dp"], out["run"]["gradient_accumulation"], out["dp"]) == (32, 8, 32)
    assert out["gpus"][0]["step"]["recipes"][0]["cost"] is None


def test_tokens_are_priced_on_the_gpus_of_the_layout(run: Run) -> None:
    out = json.loads(run(f"forecast {MODEL} --tp 2 --dp 32 --tokens 1T --json -").out)
    assert out["gpus"][0]["step"]["recipes"][0]["cost"]["gpus"] == 64


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--network pigeon", "--network 'pigeon' is not a known network"),
        ("--network -1", "--network must be from 0.001 to 10000"),
        ("--nvlink-domain 0", "--nvlink-domain must be at least 1"),
        ("--sweep tp=1,2 --network pigeon", "--network 'pigeon' is not a known network"),
        ("--gpus 8 --sweep tp=1,2 --tokens 1T", "--tokens applies to the cost of one run"),
    ],
)
def test_wrong_networks_and_costs(run: Run, options: str, expected: str) -> None:
    outcome = run(f"forecast {MODEL} {options}")
    assert outcome.code == 2
    assert expected in outcome.err


def test_a_sweep_over_layouts_of_the_same_gpus(run: Run) -> None:
    out = json.loads(run(f"forecast {MODEL} --gpus 64 --global-batch 256 --sweep tp=1,2,3,8 --json -").out)
    points = {point["values"]["tp"]: point["why_not"] for point in out["sweeps"][0]["points"]}
    assert [bool(why) for why in points.values()] == [False, False, True, False]
    assert "64 GPUs do not divide into groups of 3" in points[3]


def test_a_slow_network_is_slower(run: Run) -> None:
    times = [
        json.loads(run(f"forecast {MODEL} --gpus 1024 --no-dp-overlap {network} --json -").out)["gpus"][0]["step"]["recipes"][0]
        for network in ("--network 5", "--network 100")
    ]
    assert times[0]["step_ms"]["value"] > times[1]["step_ms"]["value"]


def test_commands_of_one_rank_do_not_offer_what_they_cannot_use(run: Run) -> None:
    for command in ("shapes", "bench", "step"):
        shown = run(f"{command} --help").out
        assert "--fsdp" not in shown
        assert "--tp " in shown
    assert "--fsdp" in run("forecast --help").out


SIZES = {"tp": [1, 2, 4, 8], "pp": [1, 2, 4, 8, 16], "vp": [1, 2, 4], "cp": [1, 2]}
NAMED = r"--(gpus|dp|global-batch|gradient-accumulation|vp|pp) ([0-9]+)"


@settings(max_examples=150, deadline=None)
@given(
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in SIZES.items()}),
    st.fixed_dictionaries({}, optional={"gpus": st.integers(1, 300), "dp": st.integers(1, 40)}),
    st.fixed_dictionaries({}, optional={"global_batch": st.integers(1, 500), "gradient_accumulation": st.integers(1, 20)}),
)
def test_every_run_agrees_and_every_refusal_can_be_followed(
    split: dict[str, int], ranks: dict[str, int], batch: dict[str, int]
) -> None:
    """Following the advice of each error, one size at a time, ends in a run that has every requested size."""
    source = load_model(preset="llama-3.1-8b")
    asked = {"micro_batch_size": 2, "sequence_length": 4096, **split, **ranks, **batch}
    for _ in range(8):
        try:
            checked_run(source, **asked)
        except UserError as error:
            asked = mended(asked, in_shell(f"{error.message}\n{error.hint}"))
        else:
            run = model_run(source, **asked).run
            assert run.gpus == run.tp * run.cp * run.pp * run.data_parallel
            assert run.global_batch == run.micro_batch_size * run.gradient_accumulation * run.data_parallel
            assert asked.get("gpus", run.gpus) == run.gpus
            assert asked.get("global_batch", run.global_batch) == run.global_batch
            return
    raise AssertionError(f"{asked} was never accepted")


def mended(asked: dict[str, int], text: str) -> dict[str, int]:
    """The first size that an error suggests for an option that was given or that can be added."""
    hint = text.partition("\n")[2]
    if "remove --vp" in hint:
        return {**asked, "vp": 1}
    if listed := re.search(r"possible values of --(\w+)[^:]*: ([0-9]+)", hint):
        return {**asked, listed[1]: int(listed[2])}
    named = [(name.replace("-", "_"), int(value)) for name, value in re.findall(NAMED, hint)]
    assert named, text
    typed = [pair for pair in named if pair[0] in asked]
    name, value = (typed or named)[0]
    return {**asked, name: value}


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        (ModelSource("vit.py:build", None, module="vit.py:build"), ()),
        (ModelSource("config.json", None, config={"model_type": "vit", "image_size": 224}), ("micro_batch_size",)),
        (
            ModelSource("config.json", None, config={"model_type": "clip", "text_config": {}, "image_size": 1}),
            ("micro_batch_size",),
        ),
    ],
)
def test_a_module_brings_its_inputs_and_an_image_has_no_sequence(source: ModelSource, missing: tuple[str, ...]) -> None:
    if missing:
        with pytest.raises(UserError) as caught:
            model_run(source)
        assert [name for name in ("micro_batch_size", "sequence_length") if name in str(caught.value)] == list(missing)
    choice = model_run(source, **dict.fromkeys(missing, 4))
    assert choice.settled == set(missing)
    assert choice.run.inputs is None


@pytest.mark.parametrize(
    ("config", "typed", "batch"),
    [
        ({}, {}, (1, 8192)),
        ({"max_position_embeddings": 131072}, {}, (1, 8192)),
        ({"n_positions": 1000}, {}, (8, 1000)),
        ({"n_positions": 1000}, {"micro_batch_size": 2}, (2, 1000)),
        ({"n_positions": 1000}, {"sequence_length": 20_000}, (1, 20_000)),
    ],
)
def test_the_batch_that_is_assumed(config: dict[str, int], typed: dict[str, int], batch: tuple[int, int]) -> None:
    job = model_run(ModelSource("config.json", None, config={"model_type": "t5", "vocab_size": 10, **config}), **typed)
    assert (job.run.micro_batch_size, job.run.sequence_length) == batch
    [entry] = [entry for entry in job.findings if entry.code == "batch-assumed"]
    assert not [name for name in typed if name in entry.text]


def test_sequence_parallelism_of_a_model_without_a_file() -> None:
    """As the frameworks run it, for every command alike: beside tensor parallelism, where the sequence can be split."""
    source, sizes = load_model(preset="llama-3.1-8b"), {"micro_batch_size": 1, "sequence_length": 64}
    job = model_run(source, tp=2, **sizes)
    assert job.run.sequence_parallel
    assert "sequence-parallel-assumed" in [entry.code for entry in job.findings]
    assert not model_run(source, tp=2, sequence_parallel=False, **sizes).run.sequence_parallel
    assert not model_run(source, **sizes).run.sequence_parallel
    assert not model_run(source, tp=2, micro_batch_size=1, sequence_length=65).run.sequence_parallel


def test_framework_defaults_have_their_version() -> None:
    for framework in ("megatron_lm", "megatron_bridge", "torchtitan", "no_file"):
        facts = framework_defaults(framework)
        assert re.search("[0-9a-f]{9}", facts["version"])
        assert facts["source"]
        assert isinstance(facts["sequence_parallel"], bool)
