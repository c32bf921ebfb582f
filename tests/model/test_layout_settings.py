"""What files say of data parallelism, sharding, overlap, the optimizer and CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from gemmscope.model import bridge, megatron, torchtitan
from support.megatron_files import SMALL
from support.reading import codes
from support.refusals import refused

MODEL = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
WORLD = "torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py"


def of_arguments(flags: str) -> dict[str, Any]:
    return dict(megatron.read(f"{WORLD} {SMALL} {flags}", "run.sh").run_settings)


def of_yaml(model: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    return dict(bridge.read(yaml.safe_dump({"model": {**MODEL, **(model or {})}, **sections}), "run.yaml").run_settings)


def of_toml(parallelism: str, training: str = "") -> dict[str, Any]:
    lines = "\n".join(parallelism.split("; "))
    return dict(
        torchtitan.read(
            f'[model]\nname = "llama3"\nflavor = "8B"\n[training]\n{training}\n[parallelism]\n{lines}', "job.toml"
        ).run_settings
    )


@pytest.mark.parametrize(
    ("flags", "zero"),
    [
        ("", 0),
        ("--use-distributed-optimizer", 1),
        ("--use-distributed-optimizer --data-parallel-sharding-strategy no_shard", 1),  # a strategy of Megatron-FSDP only
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", 1),
        ("--use-custom-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy=optim_grads", 2),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", 3),
        ("--use-torch-fsdp2", 3),
    ],
)
def test_what_megatrons_ranks_share(flags: str, zero: int):
    assert of_arguments(flags)["zero"] == zero


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--tp-comm-overlap --sequence-parallel --tensor-model-parallel-size 2", {"tp_overlap": True, "dp": 16}),
        ("--tp-comm-overlap --tensor-model-parallel-size 2", {"tp_overlap": False}),  # needs sequence parallelism
        ("--sequence-parallel --tensor-model-parallel-size 2", {"tp_overlap": False}),
        ("--overlap-grad-reduce", {"dp_overlap": True}),
        ("--use-torch-fsdp2", {"dp_overlap": True}),
        ("--overlap-moe-expert-parallel-comm --delay-wgrad-compute", {"ep_overlap": True}),
        ("--grad-reduce-in-bf16 --fp8-param-gather", {"gradient_precision": "bf16", "quantized_weights": True}),
        ("--cpu-offloading --cpu-offloading-num-layers 20", {"offloaded_layers": 20}),
        (
            "--recompute-granularity selective --recompute-modules layernorm moe_act",
            {"recompute_modules": ("layernorm", "moe_act")},
        ),
        ("--enable-cuda-graph", {"cuda_graphs": True}),
        ("--external-cuda-graph", {"cuda_graphs": True}),
        ("--cuda-graph-impl transformer_engine", {"cuda_graphs": True}),
        ("--cuda-graph-impl none", {"cuda_graphs": False}),
        ("--use-precision-aware-optimizer", {"optimizer_state": "fp32"}),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp32", {"optimizer_state": "fp32"}),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8", {"optimizer_state": "bf16"}),
        ("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", {"optimizer_state": "fp32"}),  # only with the switch
        (
            "--use-distributed-optimizer --num-distributed-optimizer-instances 4 --context-parallel-size 2",
            {"dp": 16, "zero": 1, "zero_ranks": 8},
        ),
        ("--pipeline-model-parallel-size 4 --tensor-model-parallel-size 2", {"dp": 4, "pp": 4}),
        ("", {"gradient_precision": "fp32", "quantized_weights": False, "offloaded_layers": None}),
        ("--grad-reduce-in-bf16", {"gradient_precision": "bf16"}),
        ("--main-grads-dtype bf16", {"gradient_precision": "bf16"}),
        ("--fp8-param-gather", {"quantized_weights": True}),
        ("--cpu-offloading-num-layers 2", {"offloaded_layers": 2}),
        (
            "--recompute-granularity selective --recompute-modules core_attn mlp",
            {"recompute": "selective", "recompute_modules": ("core_attn", "mlp"), "partly_recomputed": None},
        ),
        ("--recompute-granularity selective --recompute-modules mhc", {"recompute": "none", "partly_recomputed": True}),
        ("--recompute-granularity selective", {"recompute": "selective", "partly_recomputed": None}),
    ],
)
def test_megatron_switches(flags: str, settings: dict[str, Any]):
    read = of_arguments(flags)
    assert {name: read.get(name) for name in settings} == settings


def test_gradients_that_overlap_without_weights_are_a_finding():
    flags = "--use-distributed-optimizer --overlap-grad-reduce"
    assert "weights-not-overlapped" in codes(megatron.read(f"{SMALL} {flags}", "x"))
    assert "weights-not-overlapped" not in codes(megatron.read(f"{SMALL} {flags} --overlap-param-gather", "x"))
    assert "weights-not-overlapped" not in codes(megatron.read(f"{SMALL} --overlap-grad-reduce", "x"))


def test_an_unknown_strategy_is_refused():
    with refused("--data-parallel-sharding-strategy", "no_shard", "optim", "optim_grads_params", "'everything'"):
        of_arguments("--use-megatron-fsdp --data-parallel-sharding-strategy everything")


def test_a_bridge_file_that_says_nothing_leaves_it_open():
    assert not {"dp", "zero", "tp_overlap", "dp_overlap", "ep_overlap", "cuda_graphs", "optimizer_state"} & of_yaml().keys()


@pytest.mark.parametrize(
    ("sections", "settings"),
    [
        ({"ddp": {"use_distributed_optimizer": True}}, {"zero": 1}),
        ({"ddp": {"use_distributed_optimizer": False}}, {"zero": 0}),
        ({"optimizer": {"use_distributed_optimizer": True}}, {"zero": 1}),
        ({"dist": {"use_megatron_fsdp": True}, "ddp": {"data_parallel_sharding_strategy": "optim_grads_params"}}, {"zero": 3}),
        ({"dist": {"use_torch_fsdp2": True}}, {"zero": 3, "dp_overlap": True}),
        ({"ddp": {"overlap_grad_reduce": False}}, {"dp_overlap": False}),
        ({"ddp": {"overlap_grad_reduce": True}, "comm_overlap": {"overlap_grad_reduce": False}}, {"dp_overlap": False}),
        (
            {"ddp": {"use_distributed_optimizer": True}, "comm_overlap": {"tp_comm_overlap": False, "overlap_grad_reduce": None}},
            {"dp_overlap": True, "tp_overlap": False},  # the section turns it on by itself
        ),
        ({"comm_overlap": {"overlap_moe_expert_parallel_comm": True, "tp_comm_overlap": True}}, {"ep_overlap": True}),
        ({"optimizer": {"use_precision_aware_optimizer": False}}, {"optimizer_state": "fp32"}),
        ({"ddp": {"grad_reduce_in_fp32": True}}, {"gradient_precision": "fp32"}),
        (
            {"ddp": {"grad_reduce_in_fp32": True}, "mixed_precision": {"grad_reduce_in_fp32": False}},
            {"gradient_precision": "bf16"},
        ),
        ({"mixed_precision": {"fp8_param_gather": True}}, {"quantized_weights": True}),
        (
            {
                "optimizer": {
                    "use_precision_aware_optimizer": True,
                    "exp_avg_dtype": {"_call_": False, "_target_": "torch.bfloat16"},
                    "exp_avg_sq_dtype": "torch.bfloat16",
                }
            },
            {"optimizer_state": "bf16"},
        ),
    ],
)
def test_bridge_sections(sections: dict[str, Any], settings: dict[str, Any]):
    read = of_yaml(**sections)
    assert {name: read.get(name) for name in settings} == settings


def test_bridge_model_section():
    overlap = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "tp_comm_overlap": True, "cuda_graph_impl": "local"}
    read = of_yaml(overlap)
    assert (read["tp_overlap"], read["cuda_graphs"]) == (True, True)
    assert of_yaml({"cuda_graph_impl": "none", "enable_cuda_graph": False})["cuda_graphs"] is False
    assert of_yaml({"cpu_offloading": True, "cpu_offloading_num_layers": 3})["offloaded_layers"] == 3
    assert "offloaded_layers" not in of_yaml({"cpu_offloading": False, "cpu_offloading_num_layers": 3})


def test_bridge_names_the_section_of_a_wrong_value():
    with refused("ddp.overlap_grad_reduce", "'sometimes'"):
        of_yaml(ddp={"overlap_grad_reduce": "sometimes"})


@pytest.mark.parametrize(
    ("parallelism", "settings"),
    [
        ("", {"zero": 3, "dp": None, "zero_ranks": None}),  # all GPUs that are left
        ("data_parallel_shard_degree = -1", {"zero": 3, "dp": None}),
        ("data_parallel_shard_degree = 8", {"zero": 3, "dp": 8, "zero_ranks": None}),
        ("data_parallel_shard_degree = 8; data_parallel_replicate_degree = 4", {"zero": 3, "dp": 32, "zero_ranks": 8}),
        (
            "data_parallel_shard_degree = 8; data_parallel_replicate_degree = 4; context_parallel_degree = 2",
            {"zero": 3, "dp": 32, "zero_ranks": 16},
        ),
        ("data_parallel_shard_degree = 1; data_parallel_replicate_degree = 4", {"zero": 0, "dp": 4}),
        ("data_parallel_shard_degree = 1; context_parallel_degree = 2", {"zero": 3, "dp": 1}),
        ('data_parallel_shard_degree = 8; fsdp_reshard_after_forward = "never"', {"zero": 2}),
        ("data_parallel_shard_degree = 8; pipeline_parallel_degree = 4", {"zero": 2, "vp": None}),
        (
            'pipeline_parallel_degree = 4; fsdp_reshard_after_forward = "always"; pipeline_parallel_schedule = "Interleaved1F1B"',
            {"zero": 3, "vp": 2},
        ),
        ('pipeline_parallel_degree = 2; pipeline_parallel_schedule = "ZBVZeroBubble"', {"vp": 2}),
        ("tensor_parallel_degree = 8; enable_async_tensor_parallel = true", {"tp_overlap": True}),
        ("tensor_parallel_degree = 8", {"tp_overlap": False}),
    ],
)
def test_torchtitan(parallelism: str, settings: dict[str, Any]):
    read = of_toml(parallelism)
    assert {name: read.get(name) for name in settings} == settings
    assert read["optimizer_state"] == "fp32"
    assert read["dp_overlap"]


def test_torchtitan_in_bf16():
    assert of_toml("", 'dtype = "bfloat16"')["optimizer_state"] == "bf16"
