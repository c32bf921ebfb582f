"""Models: how they are named, and how they are run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gemmscope import commands, writers
from gemmscope.api.calls import Names, as_text, prepared, takes
from gemmscope.api.jobs import Job
from gemmscope.errors import UserError, in_a_line, in_shell, option
from gemmscope.job.load import load_model, model_run, with_prediction_layers
from gemmscope.model import presets
from gemmscope.model.hf_keys import accepted
from gemmscope.model.readers import read_text
from gemmscope.model.spec import ModelSource, ModelSpec
from gemmscope.options.declare import from_python
from gemmscope.options.estimating import ExploreOptions, PlanOptions
from gemmscope.options.job import JobOptions, ModelOptions
from gemmscope.options.values import names
from gemmscope.results.plan import PlanResult

ON = "on(micro_batch_size=1, sequence_length=8192)"


class NoBatchError(UserError, AttributeError):
    """A command was called on a model whose batch is not set."""


@takes(ModelOptions)
def load(
    model: str | Path | Mapping[str, Any] | None = None,
    *,
    # options
    preset: str | None = None,
    config: str | None = None,
    module: str | None = None,
    hidden_size: int | str | None = None,
    intermediate_size: int | str | None = None,
    num_attention_heads: int | str | None = None,
    num_hidden_layers: int | str | None = None,
    num_key_value_heads: int | str | None = None,
    head_dim: int | str | None = None,
    vocab_size: int | str | None = None,
    num_experts: int | str | None = None,
    num_experts_per_tok: int | str | None = None,
    gated_mlp: bool = False,
    mtp_layers: int | str | None = None,
    ignore_key: Names | None = None,
) -> Model:
    """A model: the name of a preset, a config (file, folder, hub ID or dictionary), `file.py:function`, or sizes by name.

    >>> load("qwen3-8b").spec.hidden_size
    4096
    >>> load(hidden_size=64, intermediate_size=128, num_attention_heads=2, num_hidden_layers=3).spec.pattern()
    '3 dense'

    Options:
        preset: A well-known model, such as llama-3.1-8b. gemmscope models lists them all.
        config: A model file: Hugging Face config.json (file, folder or hub ID), Megatron-LM arguments, torchtitan TOML or
            command, Megatron-Bridge YAML or recipe.
        module: Your own nn.Module: a function that returns module, (module, inputs) or (module, inputs, loss). Tracing it needs
            torch.
        hidden_size: Hidden size. Together with the next three options, this describes a model without a file. Sizes can be
            written as 4096 or 4k (k = 1024).
        intermediate_size: MLP hidden size.
        num_attention_heads: Number of attention heads.
        num_hidden_layers: Number of layers; also instead of that of a model file.
        num_key_value_heads: With hidden_size: key/value heads, for grouped-query attention. [default: number of attention
            heads]
        head_dim: With hidden_size: size of one attention head. [default: hidden size / heads]
        vocab_size: Vocabulary size, instead of that of the model file. Adds the embedding, the output layer and the loss.
        num_experts: With hidden_size: experts of each layer, with intermediate_size as the size of one.
        num_experts_per_tok: With num_experts: how many of them each token is sent to.
        gated_mlp: With hidden_size: use a gated MLP (SwiGLU) instead of a plain one.
        mtp_layers: Number of multi-token prediction (MTP) layers after the last layer, each with its own loss (DeepSeek-V3: 1).
            [default: from the model file; 0 for Hugging Face]
        ignore_key: A key of the config.json, or a flag of the script without its dashes, that nothing reads and that changes no
            size, whatever its name says. Repeat the option for several.
    """
    given = locals()
    options = from_python(ModelOptions, given).given()
    if isinstance(model, Mapping):
        try:
            text = json.dumps(model)
        except (TypeError, ValueError, RecursionError) as error:  # an object, a cycle, thousands of levels
            raise UserError(f"the dictionary cannot be written as a config.json: {in_a_line(error)}") from error
        source = accepted(read_text(text, "the dictionary"), options.get("ignore_key", ()))
        layers = options.get("mtp_layers")
        source = source if layers is None else with_prediction_layers(source, layers)
        return Model(
            source, {}, as_text("gemmscope.load", {**given, "model": ...}, positional=["model"]).replace("Ellipsis", "{...}")
        )
    named = sorted(options.keys() - {"mtp_layers", "ignore_key"})
    if model is not None and named:
        raise UserError(f"the model is named twice: {model} and {', '.join(named)}", "use only one of them")
    if model is not None:
        name = str(model)
        options |= {"preset" if presets.named(name) else "module" if ".py:" in name else "config": name}
    return Model(load_model(**options), options, as_text("gemmscope.load", given, positional=["model"]))


@dataclass(frozen=True, repr=False)
class Model:
    """A model. `on` sets how it is run."""

    source: ModelSource
    arguments: Mapping[str, Any] = field(default_factory=dict)
    call: str = ""

    def __repr__(self) -> str:
        return f"<Model {self.call}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_") and hasattr(Job, name):
                raise NoBatchError(f"{name} needs to know how the model is run", f"{self.call}.{ON}.{name}(...)")
            raise AttributeError(f"'Model' object has no attribute {name!r}")

    @property
    def spec(self) -> ModelSpec | None:
        """The model's layers; None if the model must be traced to find them."""
        return self.source.model

    @takes(JobOptions, without=("micro_batch_size", "sequence_length"))
    def on(
        self,
        micro_batch_size: int | str | None = None,
        sequence_length: int | str | None = None,
        *,
        # options
        gradient_accumulation: int | str | None = None,
        global_batch: int | str | None = None,
        optimizer_state: Literal["bf16", "fp32"] | None = None,
        quantized_weights: bool | None = None,
        recompute: Literal["none", "selective", "full"] | None = None,
        recompute_share: float | str | None = None,
        separate_projections: bool | None = None,
        tp: int | str | None = None,
        sequence_parallel: bool | None = None,
        cp: int | str | None = None,
        pp: int | str | None = None,
        vp: int | str | None = None,
        pp_stage: int | str | None = None,
        pp_layers: Sequence[int] | str | None = None,
        ep: int | str | None = None,
        etp: int | str | None = None,
        imbalance: float | str | None = None,
        lora: int | str | None = None,
        lora_linears: Sequence[str] | str | None = None,
        tp_overlap: bool | None = None,
        dp_overlap: bool | None = None,
        ep_overlap: bool | None = None,
        cuda_graphs: bool | None = None,
        dp: int | str | None = None,
        zero: int | str | None = None,
        fsdp: int | str | None = None,
        offloaded_layers: int | str | None = None,
        gpus: int | str | None = None,
        zero_ranks: int | str | None = None,
        gradient_precision: Literal["bf16", "fp32"] | None = None,
        recompute_modules: Sequence[str] | None = None,
        partly_recomputed: bool | None = None,
        sequence_parallel_linears: bool | None = None,
        vocab_multiple: int | str | None = None,
    ) -> Job:
        """Set the batch and how the model is split over GPUs. The rest comes from the model file.

        `micro_batch_size`: sequences per micro-batch and rank; `sequence_length`: tokens per sequence.

        Options:
            gradient_accumulation: Micro-batches per optimizer step. [default: 1]
            global_batch: Sequences per optimizer step on all GPUs. Sets gradient_accumulation, or dp if gradient_accumulation
                is given. [default: micro-batch size x gradient accumulation x dp]
            optimizer_state: Precision of the optimizer states: fp32 with FP32 master weights, or bf16 for everything. [default:
                fp32 with data parallelism, else bf16]
            quantized_weights: Keep weights in the recipe's format only, not in BF16 too (Transformer Engine:
                quantized_model_init). [default: unknown]
            recompute: Recompute activations in the backward pass: of attention only (selective), or of whole layers (full).
                [default: none]
            recompute_share: Share of the layers that full recomputation runs again: 0.5 for half of them. [default: 1]
            separate_projections: Run Q, K and V (and gate and up) as separate GEMMs, as Hugging Face does, or fused, as
                Transformer Engine does. [default: fused-projections]
            tp: Tensor parallel size. [default: 1]
            sequence_parallel: Shard norms and residuals along the sequence, across the tensor parallel ranks. [default:
                no-sequence-parallel]
            cp: Context parallel size. [default: 1]
            pp: Pipeline parallel size. [default: 1]
            vp: Virtual pipeline stages: model chunks per pipeline rank (interleaved schedule). [default: 1]
            pp_stage: Pipeline stage to analyze, counted from 0. [default: the stage with the most FLOPs]
            pp_layers: Layers of each pipeline stage, if they differ.
            ep: Expert parallel size: the number of ranks that share the experts. [default: 1]
            etp: Tensor parallel size inside experts. [default: tp]
            imbalance: Load of the busiest expert relative to the average. [default: 1, balanced]
            lora: LoRA: freeze all weights and train adapters of this rank beside the linears of attention and MLP. [default:
                all weights are trained]
            lora_linears: With lora: which linears have adapters, by block (attention, mlp, experts) or by name (qkv-proj). An
                unknown name lists all names. [default: all but experts and the output head]
            tp_overlap: Overlap tensor parallel communication with GEMMs, chunk by chunk. [default: tp-overlap with sequence
                parallelism]
            dp_overlap: Overlap the exchange of gradients and weights with the backward and forward pass. [default: dp-overlap]
            ep_overlap: Overlap the all-to-all of expert parallelism with the computation of another micro-batch. [default:
                no-ep-overlap]
            cuda_graphs: Launch layers as CUDA graphs. [default: unknown]
            dp: Data parallel size: the number of GPUs divided by tp x cp x pp. [default: the smallest size that ep allows]
            zero: ZeRO stage: what is sharded across data parallel ranks. 1 shards the optimizer states (as Megatron's
                distributed optimizer does), 2 also the gradients, 3 also the weights. [default: 1 with data parallelism]
            fsdp: FSDP: number of ranks that weights, gradients and optimizer states are sharded across, as with zero 3. Fewer
                than dp x cp means hybrid sharding.
            offloaded_layers: Number of layers per rank whose activations are offloaded to CPU memory. [default: 0]
            gpus: Number of GPUs. Sets dp.
            zero_ranks: Number of ranks that share what ZeRO shards. [default: all]
            gradient_precision: Precision of the gradients that are kept and reduced.
            recompute_modules: What selective recomputation computes again. [default: core_attn]
            partly_recomputed: Recompute something that is not counted in times.
            sequence_parallel_linears: With sequence parallelism: shard the inputs of linears, too.
            vocab_multiple: Pad the vocabulary to a multiple of this times tp. [default: 1]
        """
        given = from_python(JobOptions, locals()).given()
        job = model_run(self.source, **given)
        return Job(job.source, job.run, job.findings, job.settled, self.arguments, given, as_text(f"{self.call}.on", given))

    @takes(PlanOptions, without=("gpu", "gpus", "global_batch", "sequence_length", "modes"))
    def plan(
        self,
        gpu: str,
        gpus: int | str,
        global_batch: int | str | None = None,
        sequence_length: int | str | None = None,
        *,
        # options
        recipes: Names | None = None,
        left_out: Names | None = None,
        micro_batch_size: int | str | Sequence[int] | None = None,
        optimizer_state: Literal["bf16", "fp32"] | None = None,
        recompute: str | Sequence[str] | None = None,
        tp: int | str | Sequence[int] | None = None,
        cp: int | str | Sequence[int] | None = None,
        pp: int | str | Sequence[int] | None = None,
        vp: int | str | Sequence[int] | None = None,
        ep: int | str | Sequence[int] | None = None,
        etp: int | str | Sequence[int] | None = None,
        imbalance: float | str | None = None,
        zero: int | str | Sequence[int] | None = None,
        lora: int | str | None = None,
        lora_linears: Sequence[str] | str | None = None,
        tp_overlap: bool | None = None,
        dp_overlap: bool | None = None,
        ep_overlap: bool | None = None,
        cuda_graphs: bool | None = None,
        stack: str | None = None,
        power_limit: float | str | None = None,
        network: str | float | None = None,
        nvlink_domain: int | str | None = None,
        vary: Mapping[str, Sequence[int]] | None = None,
        price: float | str | None = None,
        state: Literal["sustained", "burst"] = "sustained",
        tokens: float | str | None = None,
    ) -> PlanResult:
        """Find the fastest layouts on `gpus` GPUs of one type, with a global batch of `global_batch` sequences.

        Parts of a layout can be fixed to a value or restricted to a list: tp, pp, vp, cp, ep, etp, micro_batch_size, recompute,
        zero. `vary={"hidden": [5120, 6144]}` compares variants of the model. Ctrl-C returns the layouts computed so far.

        >>> result = load("llama-3.2-1b").plan("h100", 2, 8, 4096, recipes="fp8current", recompute="none", pp=1)
        >>> result.best.recipe
        'FP8Current'

        Options:
            recipes: Only these recipes, such as fp8current,mxfp8. [default: all that the GPU supports]
            left_out: Recipes to skip.
            micro_batch_size: Only these micro-batch sizes: sequences per micro-batch and rank. [default: searched]
            optimizer_state: Precision of the optimizer states in all layouts: fp32 with FP32 master weights, or bf16 for
                everything. [default: fp32]
            recompute: Only these kinds of activation recomputation: none, selective, full. [default: searched]
            tp: Only these tensor parallel sizes. [default: searched]
            cp: Only these context parallel sizes. [default: searched]
            pp: Only these pipeline parallel sizes. [default: searched]
            vp: Only these numbers of virtual stages per pipeline stage. [default: searched]
            ep: Only these expert parallel sizes. [default: searched]
            etp: Only these tensor parallel sizes inside experts. [default: searched: 1 and tp]
            imbalance: Load of the busiest expert relative to the average. [default: 1, balanced]
            zero: Only these kinds of sharding across data parallel ranks: 1 shards the optimizer states, 2 also the gradients,
                3 also the weights (FSDP). [default: searched: 1, 3]
            lora: LoRA: freeze all weights and train adapters of this rank beside the linears of attention and MLP. [default:
                all weights are trained]
            lora_linears: With lora: which linears have adapters, by block (attention, mlp, experts) or by name (qkv-proj). An
                unknown name lists all names. [default: all but experts and the output head]
            tp_overlap: Overlap tensor parallel communication with GEMMs, chunk by chunk. [default: tp-overlap with sequence
                parallelism]
            dp_overlap: Overlap the exchange of gradients and weights with the backward and forward pass. [default: dp-overlap]
            ep_overlap: Overlap the all-to-all of expert parallelism with the computation of another micro-batch. [default:
                no-ep-overlap]
            cuda_graphs: Launch layers as CUDA graphs. [default: unknown]
            stack: Software that runs the step: nvidia, torchtitan, pytorch and others. An unknown name lists all names.
                [default: that of the model's file, else any that runs on the GPU]
            power_limit: Power limit of each GPU in watts, as nvidia-smi sets it. [default: the GPU's usual limit]
            network: Network between NVLink domains: a name, or GB/s per GPU and direction. An unknown name lists all names.
                [default: the GPU's usual network]
            nvlink_domain: Number of GPUs in one NVLink domain. [default: the GPU's usual size]
            vary: Compare variants of the model: hidden, layers, intermediate, heads, experts or sequence with these values.
                Dependent sizes are scaled too. Repeat the option for several sizes.
            price: Price of one GPU-hour.
            state: GPU clocks: sustained, under the power limit as in long training, or burst, before the GPU reaches its power
                limit.
            tokens: Training tokens, to estimate the cost of the full run: 2T, 15.5T or 1e12 (k, M, B and T are powers of 1000).
        """
        options, context = prepared(f"{self.call}.plan", locals(), PlanOptions, ["gpu"])
        return commands.plan.plan(self.source, options, context)

    @takes(ExploreOptions, without=("gpu", "modes"))
    def explore(
        self,
        *gpus: str | Iterable[str],
        # options
        recipes: Names | None = None,
        left_out: Names | None = None,
        gpu_count: int | str = 8,
        stack: Names | None = None,
        micro_batch_size: int | str | Sequence[int] | None = None,
        sequence_length: int | str | Sequence[int] | None = None,
        tokens: float | str = 1000000000000.0,
        price: float | str | None = None,
        output: str | Path = "explore.html",
    ) -> None:
        """Write a page with controls for GPU, software, layout, batch and recipe: `model.explore("h200", "b200")`.

        Options:
            recipes: Recipes to compare, such as fp8current,mxfp8. BF16 is always included. [default: all that the GPU supports]
            left_out: Recipes to skip.
            gpu_count: Number of GPUs of the layouts, beside one GPU.
            stack: Software stacks, beside an unnamed one. [default: nvidia,torchtitan,pytorch]
            micro_batch_size: Micro-batch sizes. [default: 1,2,4,8]
            sequence_length: Sequence lengths. [default: a quarter, half and all of the usual one]
            tokens: Training tokens, to estimate the cost of the full run: 2T, 15.5T or 1e12 (k, M, B and T are powers of 1000).
            price: Price of one GPU-hour.
            output: The page.
        """
        given: dict[str, Any] = locals()
        sizes = {name: given[name] for name in ("micro_batch_size", "sequence_length") if given[name] is not None}
        read = {name: ",".join(map(str, [size] if isinstance(size, (int, str)) else size)) for name, size in sizes.items()}
        options, context = prepared(f"{self.call}.explore", given, ExploreOptions, ["gpus"], gpu=names(gpus), **read)
        if Path(options.output).suffix.lower() != ".html":
            raise UserError(f"{options.output} is not the name of a page", option("output", "explore.html"))
        named = self.arguments or {"config": "CONFIG.json"}  # a dictionary has no name
        context = replace(context, command=shlex.join(["gemmscope", "explore", *_flags(named)]))  # the page names commands
        writers.save(options.output, writers.html.explorer(commands.explore.explore(self.source, options, context)))


def _flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """The arguments of `load` as words of a command."""
    for name, value in arguments.items():
        for one in value if isinstance(value, (list, tuple)) else [value]:
            yield in_shell(option(name))
            yield from [] if one is True else [str(one)]
