"""What a Megatron run says about its ranks: how many share the batch, what they share, and what overlaps.

Data-parallel ranks are the GPUs that tensor, context and pipeline parallelism leave. They keep whole copies of the optimizer,
unless the distributed optimizer (ZeRO-1) or FSDP splits it. Every overlap and CUDA graphs must be turned on: launch arguments
that do not name one leave it off. A Megatron-Bridge file may hold only some settings; then the others stay unknown.
"""

from collections.abc import Mapping
from typing import Any

from gemmscope.model.limits import LARGEST
from gemmscope.model.megatron_values import FACTS, MegatronSettings

FSDP = ("use_megatron_fsdp", "use_custom_fsdp")
STRATEGY, TORCH_FSDP = "data_parallel_sharding_strategy", "use_torch_fsdp2"
DISTRIBUTED_OPTIMIZER, INSTANCES = "use_distributed_optimizer", "num_distributed_optimizer_instances"
PRECISION_AWARE, MOMENTS = "use_precision_aware_optimizer", ("exp_avg_dtype", "exp_avg_sq_dtype")
GRADIENTS, WEIGHTS = "overlap_grad_reduce", "overlap_param_gather"
TENSOR, EXPERTS = "tp_comm_overlap", "overlap_moe_expert_parallel_comm"
GRAPHS, GRAPH_KIND = ("enable_cuda_graph", "external_cuda_graph"), "cuda_graph_impl"
BF16_GRADIENTS, FP32_GRADIENTS, GRADIENT_TYPE = "grad_reduce_in_bf16", "grad_reduce_in_fp32", "main_grads_dtype"
QUANTIZED_WEIGHTS = ("fp8_param_gather", "fp4_param_gather")
OFFLOADING, OFFLOADED_LAYERS = "cpu_offloading", "cpu_offloading_num_layers"
NAMES = {*FSDP, STRATEGY, TORCH_FSDP, DISTRIBUTED_OPTIMIZER, INSTANCES, PRECISION_AWARE, *MOMENTS, GRADIENTS, WEIGHTS}
NAMES |= {TENSOR, EXPERTS, *GRAPHS, GRAPH_KIND, BF16_GRADIENTS, FP32_GRADIENTS, GRADIENT_TYPE, *QUANTIZED_WEIGHTS}
NAMES |= {OFFLOADING, OFFLOADED_LAYERS}
"""All settings that this module reads."""


def layout(settings: MegatronSettings, run: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `RunSpec` beyond one replica that the file sets. `run`: the fields that were read before."""
    fields: dict[str, Any] = {
        "dp": data_parallel(settings, run),
        "zero": _zero(settings),
        "zero_ranks": None,
        "optimizer_state": _optimizer_state(settings),
        "tp_overlap": _any(settings, TENSOR),
        "dp_overlap": True if settings.flag(TORCH_FSDP) else _any(settings, GRADIENTS),
        "ep_overlap": _any(settings, EXPERTS),
        "cuda_graphs": _cuda_graphs(settings),
        "gradient_precision": _gradient_precision(settings),
        "quantized_weights": _any(settings, *QUANTIZED_WEIGHTS),
        "offloaded_layers": _offloaded_layers(settings),
    }
    if fields["tp_overlap"] and not run.get("sequence_parallel"):
        fields["tp_overlap"] = False  # Megatron overlaps only with sequence parallelism
    groups = settings.maybe_size(INSTANCES, "parallel") or 1
    if fields["zero"] and fields["dp"] and groups > 1:
        sharing, rest = divmod(fields["dp"] * run.get("cp", 1), groups)
        fields["zero_ranks"] = sharing if not rest else None
    return {name: value for name, value in fields.items() if value is not None}


def data_parallel(settings: MegatronSettings, run: Mapping[str, Any]) -> int | None:
    """Replicas that share the batch, where the file says how many GPUs there are."""
    world = settings.maybe_size("world_size", "parallel")
    if world is None:
        return settings.maybe_size("data_parallel_size", "parallel")
    replicas, rest = divmod(world, run.get("tp", 1) * run.get("pp", 1) * run.get("cp", 1))
    return replicas if replicas and not rest else None


def accumulation(samples: int | None, run: Mapping[str, Any]) -> int | None:
    """Micro-batches per step, where the global batch and the data-parallel ranks are known."""
    if not samples or "dp" not in run or "micro_batch_size" not in run:
        return None
    micro_batches, rest = divmod(samples, run["dp"] * run["micro_batch_size"])
    return None if rest or not 0 < micro_batches <= LARGEST["parallel"] else micro_batches


def weights_exposed(settings: MegatronSettings, run: Mapping[str, Any]) -> bool:
    """Whether only gradients are exchanged during computation, and the weights after it."""
    return bool(run.get("dp_overlap") and run.get("zero") and not settings.flag(TORCH_FSDP) and _any(settings, WEIGHTS) is False)


def _any(settings: MegatronSettings, *names: str) -> bool | None:
    """Whether one of these switches is on; None where the file does not say."""
    if any(settings.flag(name) for name in names):
        return True
    return False if settings.silent_means_off or any(settings.given(name) for name in names) else None


def _zero(settings: MegatronSettings) -> int | None:
    """The ZeRO stage: Megatron-FSDP's strategy, everything with torch's FSDP, the optimizer with the distributed optimizer."""
    if settings.flag(TORCH_FSDP):
        return 3
    strategies: dict[str, int] = FACTS["sharding_strategies"]
    if _any(settings, *FSDP) and settings.given(STRATEGY):
        return strategies[settings.word(STRATEGY, tuple(strategies), "no_shard")]
    sharded = _any(settings, DISTRIBUTED_OPTIMIZER)
    return None if sharded is None else int(sharded)


def _optimizer_state(settings: MegatronSettings) -> str | None:
    """Master weights and moments are FP32, unless the precision-aware optimizer keeps both moments in fewer bits."""
    if settings.flag(PRECISION_AWARE) and all(_bits(settings.values.get(name)) <= 16 for name in MOMENTS):
        return "bf16"
    return "fp32" if settings.silent_means_off or settings.given(PRECISION_AWARE) else None


def _gradient_precision(settings: MegatronSettings) -> str | None:
    """Gradients are summed and exchanged in FP32, unless a setting says BF16."""
    if settings.given(FP32_GRADIENTS):
        return "fp32" if settings.flag(FP32_GRADIENTS) else "bf16"
    if settings.flag(BF16_GRADIENTS) or _bits(settings.values.get(GRADIENT_TYPE)) <= 16:
        return "bf16"
    return "fp32" if settings.silent_means_off else None


def _offloaded_layers(settings: MegatronSettings) -> int | None:
    return settings.maybe_count(OFFLOADED_LAYERS, "layers") if settings.flag(OFFLOADING, default=True) else None


def _bits(dtype: object) -> int:
    name = dtype.strip().lower().rpartition(".")[2] if isinstance(dtype, str) else ""
    return {"bf16": 16, "bfloat16": 16, "fp16": 16, "float16": 16, "half": 16, "fp8": 8, "uint8": 8}.get(name, 32)


def _cuda_graphs(settings: MegatronSettings) -> bool | None:
    kind = settings.text(GRAPH_KIND).lower()
    if kind and kind != "none":
        return True
    return False if kind else _any(settings, *GRAPHS)
