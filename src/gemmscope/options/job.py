"""Options that name a model and say how it is run."""

from typing import Annotated, ClassVar

from gemmscope.choices import Recompute, StatePrecision
from gemmscope.options.declare import Option, Options
from gemmscope.options.values import lower_names, names, stage_layers


class ModelOptions(Options):
    """The ways of naming a model."""

    GROUP: ClassVar[str] = "Model"

    preset: Annotated[
        str | None,
        Option(
            "A well-known model, such as llama-3.1-8b. gemmscope models lists them all.",
            metavar="NAME",
            names="model/presets/",
        ),
    ] = None
    config: Annotated[
        str | None,
        Option(
            "A model file: Hugging Face config.json (file, folder or hub ID), Megatron-LM arguments, torchtitan TOML or command, "
            "Megatron-Bridge YAML or recipe.",
            metavar="PATH|ID",
        ),
    ] = None
    module: Annotated[
        str | None,
        Option(
            "Your own nn.Module: a function that returns module, (module, inputs) or (module, inputs, loss). Tracing it needs "
            "torch.",
            metavar="FILE.py:FUNCTION",
        ),
    ] = None
    hidden_size: Annotated[
        int | None,
        Option(
            "Hidden size. Together with the next three options, this describes a model without a file. Sizes can be written as "
            "4096 or 4k (k = 1024)."
        ),
    ] = None
    intermediate_size: Annotated[int | None, Option("MLP hidden size.")] = None
    num_attention_heads: Annotated[int | None, Option("Number of attention heads.")] = None
    num_hidden_layers: Annotated[int | None, Option("Number of layers; also instead of that of a model file.")] = None
    num_key_value_heads: Annotated[
        int | None,
        Option(
            "With --hidden-size: key/value heads, for grouped-query attention.",
            default="number of attention heads",
        ),
    ] = None
    head_dim: Annotated[int | None, Option("With --hidden-size: size of one attention head.", default="hidden size / heads")] = (
        None
    )
    vocab_size: Annotated[
        int | None,
        Option("Vocabulary size, instead of that of the model file. Adds the embedding, the output layer and the loss."),
    ] = None
    num_experts: Annotated[
        int | None, Option("With --hidden-size: experts of each layer, with --intermediate-size as the size of one.")
    ] = None
    num_experts_per_tok: Annotated[int | None, Option("With --num-experts: how many of them each token is sent to.")] = None
    gated_mlp: Annotated[bool, Option("With --hidden-size: use a gated MLP (SwiGLU) instead of a plain one.")] = False
    mtp_layers: Annotated[
        int | None,
        Option(
            "Number of multi-token prediction (MTP) layers after the last layer, each with its own loss (DeepSeek-V3: 1).",
            default="from the model file; 0 for Hugging Face",
        ),
    ] = None

    ignore_key: Annotated[
        tuple[str, ...],
        Option(
            "A key of the config.json, or a flag of the script without its dashes, that nothing reads and that changes no size, "
            "whatever its name says. Repeat the option for several.",
            metavar="NAME",
            parse=names,
            repeated=True,
            accepts="Names | None",
        ),
    ] = ()

    def files(self) -> list[str]:
        """The files that describe the model: never to be overwritten."""
        module = [self.module.rpartition(":")[0]] if self.module is not None else []
        return [*([self.config, f"{self.config}/config.json"] if self.config is not None else []), *module]


class RunOptions(Options):
    """Batch and parallelism. Options that are not given come from the model's file, if it has them."""

    GROUP: ClassVar[str] = "Run"

    micro_batch_size: Annotated[
        int | None,
        Option(
            "Sequences per micro-batch and rank. Required unless the model file sets it or --module returns inputs.",
        ),
    ] = None
    sequence_length: Annotated[
        int | None,
        Option(
            "Tokens per sequence: 8192, or 8k (k = 1024). Required unless the model file sets it or --module returns inputs.",
        ),
    ] = None
    gradient_accumulation: Annotated[int | None, Option("Micro-batches per optimizer step.", default="1")] = None
    recompute: Annotated[
        Recompute | None,
        Option(
            "Recompute activations in the backward pass: of attention only (selective), or of whole layers (full).",
            default="none",
        ),
    ] = None
    recompute_share: Annotated[
        float | None,
        Option("Share of the layers that full recomputation runs again: 0.5 for half of them.", default="1", metavar="X"),
    ] = None
    separate_projections: Annotated[
        bool | None,
        Option(
            "Run Q, K and V (and gate and up) as separate GEMMs, as Hugging Face does, or fused, as Transformer Engine does.",
            flags=("--separate-projections/--fused-projections",),
            default="fused-projections",
        ),
    ] = None
    tp: Annotated[int | None, Option("Tensor parallel size.", default="1", group="Parallelism")] = None
    sequence_parallel: Annotated[
        bool | None,
        Option(
            "Shard norms and residuals along the sequence, across the tensor parallel ranks.",
            flags=("--sequence-parallel/--no-sequence-parallel",),
            default="no-sequence-parallel",
            group="Parallelism",
        ),
    ] = None
    cp: Annotated[int | None, Option("Context parallel size.", default="1", group="Parallelism")] = None
    pp: Annotated[int | None, Option("Pipeline parallel size.", default="1", group="Parallelism")] = None
    pp_stage: Annotated[
        int | None,
        Option(
            "Pipeline stage to analyze, counted from 0.",
            default="the stage with the most FLOPs",
            group="Parallelism",
        ),
    ] = None
    pp_layers: Annotated[
        tuple[int, ...] | None,
        Option(
            "Layers of each pipeline stage, if they differ.",
            metavar="N,N,...",
            parse=stage_layers,
            accepts="Sequence[int] | str | None",
            group="Parallelism",
        ),
    ] = None
    ep: Annotated[
        int | None,
        Option(
            "Expert parallel size: the number of ranks that share the experts.",
            default="1",
            group="Parallelism",
        ),
    ] = None
    etp: Annotated[int | None, Option("Tensor parallel size inside experts.", default="tp", group="Parallelism")] = None
    imbalance: Annotated[
        float | None,
        Option(
            "Load of the busiest expert relative to the average.",
            default="1, balanced",
            group="Parallelism",
        ),
    ] = None


class OverlapOptions(Options):
    """What overlaps with what, and how layers are launched."""

    GROUP: ClassVar[str] = "Overlap and network"

    tp_overlap: Annotated[
        bool | None,
        Option(
            "Overlap tensor parallel communication with GEMMs, chunk by chunk.",
            flags=("--tp-overlap/--no-tp-overlap",),
            default="tp-overlap with sequence parallelism",
        ),
    ] = None
    dp_overlap: Annotated[
        bool | None,
        Option(
            "Overlap the exchange of gradients and weights with the backward and forward pass.",
            flags=("--dp-overlap/--no-dp-overlap",),
            default="dp-overlap",
        ),
    ] = None
    ep_overlap: Annotated[
        bool | None,
        Option(
            "Overlap the all-to-all of expert parallelism with the computation of another micro-batch.",
            flags=("--ep-overlap/--no-ep-overlap",),
            default="no-ep-overlap",
        ),
    ] = None
    cuda_graphs: Annotated[
        bool | None,
        Option("Launch layers as CUDA graphs.", flags=("--cuda-graphs/--no-cuda-graphs",), default="unknown"),
    ] = None


class SystemOptions(Options):
    """What runs the step, and what connects the GPUs."""

    GROUP: ClassVar[str] = "Overlap and network"

    stack: Annotated[
        str | None,
        Option(
            "Software that runs the step: nvidia, torchtitan, pytorch and others. An unknown name lists all names.",
            metavar="NAME",
            names="forecast/coefficients/stacks.toml stacks",
            default="that of the model's file, else any that runs on the GPU",
        ),
    ] = None
    power_limit: Annotated[
        float | None,
        Option("Power limit of each GPU in watts, as nvidia-smi sets it.", metavar="WATTS", default="the GPU's usual limit"),
    ] = None
    network: Annotated[
        str | float | None,
        Option(
            "Network between NVLink domains: a name, or GB/s per GPU and direction. An unknown name lists all names.",
            metavar="NAME|GB/S",
            names="forecast/coefficients/network.toml networks",
            parse=str,
            default="the GPU's usual network",
        ),
    ] = None
    nvlink_domain: Annotated[int | None, Option("Number of GPUs in one NVLink domain.", default="the GPU's usual size")] = None


class LoraOptions(Options):
    """Which weights are trained."""

    GROUP: ClassVar[str] = "Run"

    lora: Annotated[
        int | None,
        Option(
            "LoRA: freeze all weights and train adapters of this rank beside the linears of attention and MLP.",
            metavar="RANK",
            default="all weights are trained",
            group="Run",
        ),
    ] = None
    lora_linears: Annotated[
        tuple[str, ...] | None,
        Option(
            "With --lora: which linears have adapters, by block (attention, mlp, experts) or by name (qkv-proj). An unknown name "
            "lists all names.",
            metavar="NAME,...",
            parse=lambda text: tuple(lower_names(text)),
            default="all but experts and the output head",
            accepts="Sequence[str] | str | None",
            group="Run",
            after="lora",
        ),
    ] = None


class ClusterOptions(RunOptions, LoraOptions, OverlapOptions):
    """The options of a run, and what happens between replicas of the model, for commands that know all GPUs."""

    GROUP: ClassVar[str] = "Parallelism"

    vp: Annotated[
        int | None,
        Option(
            "Virtual pipeline stages: model chunks per pipeline rank (interleaved schedule).",
            default="1",
            after="pp",
        ),
    ] = None
    dp: Annotated[
        int | None,
        Option(
            "Data parallel size: the number of GPUs divided by tp x cp x pp.",
            default="the smallest size that --ep allows",
        ),
    ] = None
    zero: Annotated[
        int | None,
        Option(
            "ZeRO stage: what is sharded across data parallel ranks. 1 shards the optimizer states (as Megatron's distributed "
            "optimizer does), 2 also the gradients, 3 also the weights.",
            metavar="0|1|2|3",
            default="1 with data parallelism",
        ),
    ] = None
    fsdp: Annotated[
        int | None,
        Option(
            "FSDP: number of ranks that weights, gradients and optimizer states are sharded across, as with --zero 3. Fewer than "
            "dp x cp means hybrid sharding.",
        ),
    ] = None
    global_batch: Annotated[
        int | None,
        Option(
            "Sequences per optimizer step on all GPUs. Sets --gradient-accumulation, or --dp if --gradient-accumulation is "
            "given.",
            default="micro-batch size x gradient accumulation x dp",
            group="Run",
            after="gradient_accumulation",
        ),
    ] = None
    optimizer_state: Annotated[
        StatePrecision | None,
        Option(
            "Precision of the optimizer states: fp32 with FP32 master weights, or bf16 for everything.",
            default="fp32 with data parallelism, else bf16",
            group="Run",
            after="global_batch",
        ),
    ] = None
    quantized_weights: Annotated[
        bool | None,
        Option(
            "Keep weights in the recipe's format only, not in BF16 too (Transformer Engine: quantized_model_init).",
            flags=("--quantized-weights/--no-quantized-weights",),
            default="unknown",
            group="Run",
            after="optimizer_state",
        ),
    ] = None
    offloaded_layers: Annotated[
        int | None,
        Option(
            "Number of layers per rank whose activations are offloaded to CPU memory.",
            default="0",
            group="Overlap and network",
        ),
    ] = None


class JobOptions(ClusterOptions):
    """Everything that says how a model is run, for Python: also what only model files set."""

    gpus: Annotated[int | None, Option("Number of GPUs. Sets dp.", in_shell=False)] = None
    zero_ranks: Annotated[int | None, Option("Number of ranks that share what ZeRO shards.", default="all", in_shell=False)] = (
        None
    )
    gradient_precision: Annotated[
        StatePrecision | None, Option("Precision of the gradients that are kept and reduced.", in_shell=False)
    ] = None
    recompute_modules: Annotated[
        tuple[str, ...] | None,
        Option(
            "What selective recomputation computes again.",
            default="core_attn",
            accepts="Sequence[str] | None",
            in_shell=False,
        ),
    ] = None
    partly_recomputed: Annotated[bool | None, Option("Recompute something that is not counted in times.", in_shell=False)] = None
    sequence_parallel_linears: Annotated[
        bool | None, Option("With sequence parallelism: shard the inputs of linears, too.", in_shell=False)
    ] = None
    vocab_multiple: Annotated[
        int | None, Option("Pad the vocabulary to a multiple of this times tp.", default="1", in_shell=False)
    ] = None
