"""What a model is and how it is run: two frozen descriptions that all other stages start from, and what a reader makes of a file.

`ModelSpec` has the sizes that decide which GEMMs run, layer by layer, because real models are not uniform: the first layers of an
MoE may be dense, every sixth layer of Gemma sees the whole sequence. `RunSpec` has the batch and how the work is split over GPUs.
Neither knows file formats (the readers do) or operations (`workload` does).

Every size is checked when a spec is made, so that later stages can rely on it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, cached_property, partial
from itertools import groupby
from math import gcd
from typing import Annotated, Any, Literal

from gemmscope.choices import RECOMPUTE, STATE_PRECISIONS, Recompute, StatePrecision
from gemmscope.errors import UserError, option, reject, shown
from gemmscope.findings import Finding
from gemmscope.model.layer_spec import AttentionSpec, LayerSpec, LinearSpec, MlpSpec, MoeSpec
from gemmscope.model.limits import Checked, Size, check_flag, check_size, head_size
from gemmscope.toml import FactTable, load_data

EVERY_SECOND = "every second GEMM"
recomputed_facts = cache(partial(load_data, "gemmscope.model", "recomputed.toml"))
"""What selective recomputation runs again in backward."""


def framework_defaults(framework: str) -> FactTable:
    """What a framework does where the file says nothing.

    >>> framework_defaults("megatron_lm")["sequence_parallel"], framework_defaults("torchtitan")["sequence_parallel"]
    (False, True)
    """
    facts: FactTable = load_data("gemmscope.model", "framework_defaults.toml")[framework]
    return facts


@dataclass(frozen=True)
class NormSpec:
    """Which normalisation the model uses, and which parameters it has."""

    kind: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    weight: bool = True
    bias: bool = False


@dataclass(frozen=True)
class LayerInputsSpec(Checked):
    """A second embedding table that has, for every token, an input of `width` for each layer (Gemma 3n and 4)."""

    vocab_size: Annotated[int, Size("vocab_size_per_layer_input", "vocab_size")]
    width: Annotated[int, Size("hidden_size_per_layer_input", "hidden_size")]


@dataclass(frozen=True)
class ModelSpec(Checked):
    """A whole model. `vocab_size` None: only the layers are known (six plain hyperparameters), no embedding and no head."""

    name: str
    hidden_size: Annotated[int, Size("hidden_size", "hidden_size")]
    layers: tuple[LayerSpec, ...]
    vocab_size: Annotated[int | None, Size("vocab_size", "vocab_size")] = None
    norm: NormSpec = NormSpec()
    tied_embeddings: bool = False
    # where it differs from the hidden size, projections stand between
    embedding_size: Annotated[int | None, Size("embedding_size", "hidden_size")] = None
    embedding_projection_bias: bool = False
    positions: int = 0  # learned position embeddings
    positions_on_hidden: bool = False  # as wide as the hidden size, where the embedding is narrower
    token_types: int = 0
    embedding_norm: bool = False
    final_norm: bool = True
    head_bias: bool = False
    head_transform: bool = False  # masked-LM heads: a dense layer and a norm before the vocabulary
    head_transform_bias: bool = True
    first_linears: tuple[LinearSpec, ...] = ()  # between the embedding and the first layer
    last_linears: tuple[LinearSpec, ...] = ()  # between the last layer and the final norm
    layer_inputs: LayerInputsSpec | None = None
    unused_parameters: int = 0  # parameters that no listed operation of the training step uses
    # multi-token prediction: layers after the last one, each with a loss of its own
    prediction_layers: Annotated[int, Size(option("mtp_layers"), "layers", or_none=True)] = 0
    prediction_layer: LayerSpec | None = None  # what they are; None: as the last layer
    prediction_shared: bool = False  # all of them use the same weights
    model_type: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("num_hidden_layers", len(self.layers), "layers")

    @property
    def embedding_width(self) -> int:
        return self.embedding_size or self.hidden_size

    @property
    def attentions(self) -> Iterator[AttentionSpec]:
        """The attention of every layer that has one."""
        return (layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def predicting(self) -> LayerSpec:
        """A layer of multi-token prediction."""
        return self.prediction_layer or self.layers[-1]

    @property
    def streams(self) -> int:
        """Residual streams between the layers."""
        return max(layer.streams.count if layer.streams is not None else 1 for layer in self.layers)

    @property
    def causal(self) -> bool:
        """Whether a position sees only those before it; a recurrence sees no others."""
        return all(attention.causal for attention in self.attentions)

    def layer_groups(self, first: int = 0, last: int | None = None) -> Iterator[tuple[LayerSpec, int]]:
        """The distinct layers among `layers[first:last]` with how often each occurs, in order of first appearance."""
        key = (first, len(self.layers) if last is None else last)
        if key not in self._groups:
            chosen, groups = self.layers[first:last], dict[LayerSpec, int]()
            by_id = {id(layer): layer for layer in chosen}  # most models repeat one object: hash it once
            for one, count in Counter(map(id, chosen)).items():
                groups[by_id[one]] = groups.get(by_id[one], 0) + count
            self._groups[key] = tuple(groups.items())
        yield from self._groups[key]

    @cached_property
    def _groups(self) -> dict[tuple[int, int], tuple[tuple[LayerSpec, int], ...]]:
        """Cache of `layer_groups`, because sweeps ask for the same groups many times."""
        return {}

    def pattern(self) -> str:
        """The kinds of layers in order: `3 dense, 58 MoE`; of hybrids, what each layer consists of: `36 KDA + MoE`."""
        plain = all(layer.is_plain for layer in self.layers)
        kinds = [("MoE" if layer.is_moe else "dense") if plain else layer.kind for layer in self.layers]
        runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
        if len(runs) > 4:
            runs = sorted(Counter(kinds).items(), key=lambda counted: counted[0] != "dense" if plain else -counted[1])
        return ", ".join(f"{count} {kind}" for kind, count in runs)

    def describe(self) -> str:
        """The sizes in one line: `32 dense layers, hidden 4096, 32 heads (8 key/value), intermediate 14336`."""
        parts = [f"{self.pattern()} layers", f"hidden {self.hidden_size}"]
        attention = next(self.attentions, None)
        if attention is not None:
            shared = f" ({attention.kv_heads} key/value)" if attention.kv_heads != attention.heads else ""
            sparse = f", {attention.top_k} positions each" if attention.top_k is not None else ""
            parts.append(f"{attention.heads} heads{shared}{sparse}")
        mixer = next((layer.mixer for layer in self.layers if layer.mixer is not None), None)
        if mixer is not None:
            sizes = f"with {mixer.heads} heads of {mixer.value_dim}" if mixer.value_dim > 1 else f"with {mixer.heads} channels"
            parts.append(f"{mixer.name} {sizes if mixer.kind != 'short convolution' else f'over {mixer.conv_kernel} positions'}")
        mlp = self.layers[0].mlp
        if isinstance(mlp, MlpSpec):
            parts.append(f"intermediate {mlp.intermediate_size}")
        moe = next((layer.mlp for layer in self.layers if isinstance(layer.mlp, MoeSpec)), None)
        if moe is not None:
            parts.append(f"{moe.experts} experts of {moe.expert.intermediate_size}, top {moe.top_k}")
        if self.prediction_layers:
            parts.append(f"{self.prediction_layers} prediction layer{'s' if self.prediction_layers > 1 else ''}")
        return ", ".join(parts)


def from_hyperparameters(
    *,
    hidden_size: int,
    intermediate_size: int,
    num_attention_heads: int,
    num_hidden_layers: int,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    vocab_size: int | None = None,
    num_experts: int | None = None,
    num_experts_per_tok: int | None = None,
    gated: bool = False,
    name: str = "",
    source: str = "",
) -> ModelSpec:
    """A uniform decoder with these sizes: multi-head attention, plain MLPs, no biases, no rotary positions.

    Without a vocabulary there is no embedding and no head. With `num_experts`, every MLP is one of so many experts.

    >>> from_hyperparameters(hidden_size=8, intermediate_size=32, num_attention_heads=2, num_hidden_layers=3).pattern()
    '3 dense'
    """
    hidden = check_size(option("hidden_size"), hidden_size, "hidden_size")
    heads = check_size(option("num_attention_heads"), num_attention_heads, "heads")
    if head_dim is None:
        head_dim = head_size(hidden, heads)
    if (num_experts is None) != (num_experts_per_tok is None):
        missing = option("num_experts" if num_experts is None else "num_experts_per_tok", "N")
        raise UserError("the sizes of the experts are incomplete", f"add {missing}")
    mlp = MlpSpec(intermediate_size, gated=gated, activation="silu" if gated else "gelu")
    layer = LayerSpec(
        attention=AttentionSpec(
            heads=heads, kv_heads=heads if num_key_value_heads is None else num_key_value_heads, head_dim=head_dim, rotary=False
        ),
        mlp=mlp if num_experts is None or num_experts_per_tok is None else MoeSpec(num_experts, num_experts_per_tok, mlp),
    )
    layers = check_size(option("num_hidden_layers"), num_hidden_layers, "layers")
    return ModelSpec(
        name=name or "transformer", hidden_size=hidden, layers=(layer,) * layers, vocab_size=vocab_size, source=source
    )


@dataclass(frozen=True)
class RunSpec(Checked):
    """One micro-batch on one rank, and how the model, the optimizer and the batch are split over GPUs.

    `dp` counts as frameworks do: all GPUs over tp x cp x pp. Expert parallelism is folded over the others: ep x etp ranks among
    the tp x cp x dp of a pipeline stage share the experts. `imbalance` is the load of the busiest expert over the average.
    `pp_layers` gives each pipeline stage its number of layers, where they differ; `vp` is the number of pieces that a stage
    consists of (virtual stages).
    """

    micro_batch_size: Annotated[int, Size(option("micro_batch_size"), "micro_batch_size")]
    sequence_length: Annotated[int, Size(option("sequence_length"), "sequence_length")]
    tp: Annotated[int, Size(option("tp"), "parallel")] = 1
    sequence_parallel: bool = False
    # Tokens of linears that tp does not split (router, latent down-projections) are sharded with the sequence, as in Megatron;
    # torchtitan gathers them first. Only with sequence_parallel.
    sequence_parallel_linears: bool = True
    cp: Annotated[int, Size(option("cp"), "parallel")] = 1
    pp: Annotated[int, Size(option("pp"), "parallel")] = 1
    pp_stage: int | None = None  # None: the stage with most FLOPs
    pp_layers: tuple[int, ...] | None = None
    ep: Annotated[int, Size(option("ep"), "parallel")] = 1
    # tensor parallelism inside the experts; None: as everywhere else
    etp: Annotated[int | None, Size(option("etp"), "parallel")] = None
    imbalance: float = 1.0
    gradient_accumulation: Annotated[int, Size(option("gradient_accumulation"), "parallel")] = 1
    recompute: Recompute = "none"
    recompute_modules: tuple[str, ...] = ()  # where it is selective: those of recomputed.toml; none: attention
    recompute_share: float = 1.0  # of the layers
    lora: Annotated[int | None, Size(option("lora"), "hidden_size")] = None  # rank of the adapters; None: all weights are trained
    lora_linears: tuple[str, ...] = ()  # blocks, roles or modules that have adapters; none: all but experts and the head
    # the vocabulary is padded to a multiple of this times tp
    vocab_multiple: Annotated[int, Size("vocab_multiple", "parallel")] = 1
    separate_projections: bool = False
    vp: Annotated[int, Size(option("vp"), "parallel")] = 1
    dp: Annotated[int | None, Size(option("dp"), "parallel")] = None  # None: as few as can share the experts
    zero: int | None = None  # what data-parallel ranks share: 1 optimizer, 2 and gradients, 3 and weights; None: 1 with dp > 1
    # how many share it (hybrid sharding); None: all that hold the same weights
    zero_ranks: Annotated[int | None, Size(option("zero_ranks"), "parallel")] = None
    optimizer_state: StatePrecision | None = None  # fp32: with FP32 master weights; None: bf16 on one rank, fp32 with dp > 1
    tp_overlap: bool = True  # collectives of tensor parallelism are split and overlap with the GEMMs; needs sequence_parallel
    dp_overlap: bool = True  # gradients and weights are exchanged during backward and forward
    ep_overlap: bool = False  # the all-to-all of one micro-batch overlaps with the computation of another
    cuda_graphs: bool | None = None  # None: not known
    # What only memory depends on.
    gradient_precision: StatePrecision | None = None  # of the gradients that are kept and reduced; None: not known
    quantized_weights: bool | None = None  # weights are kept in the recipe's format alone, not in BF16; None: not known
    partly_recomputed: bool = False  # backward also computes something again that is not counted in times
    offloaded_layers: int = 0  # layers whose activations are offloaded to CPU memory
    # Sizes of the inputs of a module that brings its own ("8 x 3 x 224 x 224"). A sequence is then one sample, of length 1.
    inputs: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.zero is not None and (type(self.zero) is not int or self.zero not in range(4)):
            raise UserError(
                f"{option('zero')} must be 0, 1, 2 or 3, not {shown(self.zero)}",
                "1 shards the optimizer states across data-parallel ranks, 2 also gradients, 3 also weights",
            )
        if self.optimizer_state not in (None, *STATE_PRECISIONS):
            raise UserError(
                f"{option('optimizer_state')} must be {' or '.join(STATE_PRECISIONS)}, not {shown(self.optimizer_state)}",
                "fp32 keeps master weights and moments in FP32, as most frameworks do",
            )
        for name in ("tp_overlap", "dp_overlap", "ep_overlap", "cuda_graphs"):
            if getattr(self, name) is not None:
                check_flag(option(name), getattr(self, name), f"for example {option(name, 'True')}")
        if self.recompute not in RECOMPUTE:
            raise UserError(
                f"{option('recompute')} must be {' or '.join(RECOMPUTE)}, not {shown(self.recompute)}",
                "selective recomputes only attention, full recomputes whole layers",
            )
        for name in self.recompute_modules:
            if name not in (known := (*recomputed_facts()["modules"], EVERY_SECOND)):
                raise UserError(f"{option('recompute_modules')} has no {shown(name)}", f"it knows {', '.join(known)}")
        adapters = f"{option('lora_linears')} says where adapters are, but there are none"
        reject(
            (self.lora_linears and self.lora is None, adapters, f"add {option('lora', 16)}"),
            (
                not 0.0 <= self.recompute_share <= 1.0,
                f"{option('recompute_share')} must be from 0 to 1, not {shown(self.recompute_share)}",
                "it is the share of the layers that are recomputed: 0.5 for every second one",
            ),
            (
                not isinstance(self.imbalance, (int, float)) or not 1.0 <= self.imbalance < float("inf"),
                f"{option('imbalance')} must be at least 1, not {shown(self.imbalance)}",
                "it is the load of the busiest expert over the average: from 1 (balanced) to the number of experts",
            ),
        )

    @property
    def expert_tp(self) -> int:
        return self.etp if self.etp is not None else self.tp

    @property
    def data_parallel(self) -> int:
        """`dp`, or the fewest ranks that can share the experts."""
        sharing = self.ep * self.expert_tp
        return self.dp if self.dp is not None else sharing // gcd(sharing, self.tp * self.cp)

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.data_parallel

    @property
    def global_batch(self) -> int:
        """Sequences of one step on all GPUs."""
        return self.micro_batch_size * self.gradient_accumulation * self.data_parallel

    @property
    def zero_stage(self) -> int:
        return self.zero if self.zero is not None else int(self.data_parallel * self.cp > 1)

    @property
    def state_precision(self) -> StatePrecision:
        """Of master weights and moments."""
        return self.optimizer_state or ("fp32" if self.data_parallel > 1 else "bf16")

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank: context parallelism splits the sequence."""
        return self.micro_batch_size * self.sequence_length // self.cp

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens of one step for each GPU that shares the model (tp x cp x pp)."""
        return self.tokens * self.gradient_accumulation / (self.tp * self.pp)


RUN_SETTINGS = tuple(field.name for field in fields(RunSpec) if field.name != "inputs")


@dataclass(frozen=True)
class ModelSource:
    """A model, and where it came from.

    `run_settings` are the `RunSpec` fields that the file gives (batch, sequence, parallel sizes); the user's own arguments
    override them. `findings` say what was assumed, ignored or not included. `model` is None where only a trace shows the shapes:
    the user's own `module`, or a `config` whose model type has no closed form.
    """

    origin: str
    model: ModelSpec | None
    run_settings: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    config: Mapping[str, Any] | None = None  # the Hugging Face config, for tracing the same model
    module: str | None = None  # file.py:factory
    global_batch: int | None = None  # sequences per step on all GPUs, where the file says
    unread: Mapping[str, bool] = field(default_factory=dict)  # keys of the config that nothing reads; whether named like a size
    framework: str = ""  # whose file it is, where that decides which recipes can be used
    stack: str = ""  # the software that runs it, as forecasts name it, where the file shows it
