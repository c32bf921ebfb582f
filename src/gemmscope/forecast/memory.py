"""Memory of one GPU in training: weights, gradients, optimizer states, activations and buffers of the rank that needs most.

Everything follows from sizes, the layout and what frameworks do (Megatron-LM, torchtitan); `coefficients/memory.toml` has the
rest. `RankMemory.total` is the usual case. `least` and `most` bound what other settings of the same layout need, such as BF16
gradients, a fused cross entropy or a fragmented allocator: a layout cannot fit only where even `least` is too much.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from gemmscope.gpu.specs import GpuSpec
from gemmscope.model.spec import LayerSpec, ModelSpec, Recompute, RunSpec
from gemmscope.recipe.recipes import recipe
from gemmscope.results.forecast import Fit
from gemmscope.toml import load_data
from gemmscope.workload.derive import embedding_ops, head_ops, layer_ops
from gemmscope.workload.ops import ELEMENT_BYTES, Activation, Attention, Elementwise, GroupedLinear, Linear, Loss, Norm, Op
from gemmscope.workload.scans import CausalConv, Scan
from gemmscope.workload.sharding import stage_layers

FP32_BYTES = 4
ROUTER_BYTES = 9  # per token and expert: FP32 logits and probabilities, and the map of who goes where
MODELS_KEPT = 16

# Linears that read the same tensor: it is kept once. Tensor parallelism with sequence parallelism keeps this rank's part of it.
_ATTENTION_INPUT = ("Mixer In", "QKV Proj", "Q Proj", "K Proj", "V Proj", "Q Down Proj", "KV Down Proj")
_MLP_INPUT = ("MLP Gate+Up", "MLP Gate", "MLP Up", "Router", "Shared Expert Gate+Up", "Shared Expert Gate", "Shared Expert Up",
              "Shared Expert Scale")  # fmt: skip
_LATENT_INPUT = ("Q Up Proj", "KV Up Proj")
_EXPERT_INPUT = ("Expert Gate+Up", "Expert Gate", "Expert Up")


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank that needs most, in the usual case; `stage` is its pipeline stage."""

    weights: float
    gradients: float
    master_weights: float
    moments: float
    activations: float
    quantized_copies: float
    communication_buffers: float
    workspace: float  # logits and loss, or the gradients of one layer's activations: whichever is more
    reserve: float  # CUDA context, libraries, allocator
    least: float
    most: float
    stage: int = 0
    in_flight: float = 1.0  # micro-batches whose activations are held

    @property
    def total(self) -> float:
        return float(sum(getattr(self, row) for row in ROWS))

    def fit(self, chip: GpuSpec) -> Fit:
        """Whether it fits: certainly not where even the least is too much."""
        available = memory_bytes(chip)
        if self.least > available:
            return "does not fit"
        if self.total > available:
            return "may not fit"
        return "tight" if self.most > available else "fits"


ROWS = (
    "weights", "gradients", "master_weights", "moments", "activations", "quantized_copies", "communication_buffers", "workspace",
    "reserve",
)  # fmt: skip


def rank_memory(model: ModelSpec, run: RunSpec, recipe_name: str, chip: GpuSpec) -> RankMemory:
    """Memory of the rank that needs most, on any stage of the pipeline.

    >>> from gemmscope.gpu.specs import gpu
    >>> from gemmscope.model import presets
    >>> run = RunSpec(micro_batch_size=1, sequence_length=8192, tp=2, sequence_parallel=True, dp=4)
    >>> rank_memory(presets.load("llama-3.1-8b").model, run, "FP8Current", gpu("h100")).fit(gpu("h100"))
    'fits'
    """
    return memory_of(model).rank(run, recipe_name, chip)


_models: "OrderedDict[int, ModelMemory]" = OrderedDict()


def memory_of(model: ModelSpec) -> "ModelMemory":
    """What is known of this model's memory, kept between calls: a search asks for thousands of layouts of one model."""
    known = _models.get(id(model))
    if known is None or known.model is not model:
        known = _models[id(model)] = ModelMemory(model)
        while len(_models) > MODELS_KEPT:
            _models.popitem(last=False)
    return known


@cache
def facts() -> dict[str, Any]:
    """What does not follow from sizes."""
    return load_data("gemmscope.forecast", "coefficients/memory.toml")


def memory_bytes(chip: GpuSpec) -> float:
    """The memory of a GPU as its driver reports it.

    >>> from gemmscope.gpu.specs import gpu
    >>> round(memory_bytes(gpu("h100")) / 1e9, 1)
    85.5
    """
    mib = facts()["total_mib"].get(chip.name)
    return float(mib * 2**20 if mib is not None else chip.memory_gb * 1e9)


class BlockMemory(NamedTuple):
    """One layer, the embedding or the head on one rank: parameters, and bytes that one micro-batch keeps for backward."""

    dense: int = 0  # parameters outside of the experts
    experts: int = 0
    quantized: int = 0  # weights of linears that recipes quantize, in and outside of experts
    quantized_experts: int = 0
    kept: float = 0.0  # by everything but linears
    context: float = 0.0  # of `kept`, what attention writes: recomputed where recomputation is selective
    inputs: float = 0.0  # of linears in high precision; a tensor that several read counts once
    plain: float = 0.0  # of `inputs`, those of linears that are never quantized
    elements: float = 0.0  # that quantized linears read: each keeps its own copy
    recomputable: float = 0.0  # of `inputs`, what norms and activations can compute again
    recomputable_elements: float = 0.0
    context_elements: float = 0.0  # of `elements`, what the output projection of attention reads
    activated_elements: float = 0.0  # and what the last linear of an MLP reads
    first: float = 0.0  # the input of the layer
    transient: float = 0.0  # gradients of activations at the widest point
    exchanged: float = 0.0  # buffers of dispatch, gathered inputs, received keys and values
    unfused: float = 0.0  # kept where kernels are not fused: outputs of experts, inputs of rotary positions
    logits: float = 0.0

    @property
    def parameters(self) -> int:
        return self.dense + self.experts


NOTHING = BlockMemory()


class ModelMemory:
    """The memory of one model in any layout. What a layer keeps is computed once for each way to split it."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model
        kinds = dict.fromkeys({id(layer): layer for layer in model.layers}.values())
        self._kinds: list[LayerSpec] = list(kinds)
        index = {layer: position for position, layer in enumerate(self._kinds)}
        by_id = {id(layer): index[layer] for layer in model.layers}
        self._order = [by_id[id(layer)] for layer in model.layers]
        self._blocks: dict[tuple[Any, ...], tuple[list[BlockMemory], BlockMemory, BlockMemory]] = {}
        self._stages: dict[tuple[Any, ...], list[tuple[int, list[int]]]] = {}
        self._last: tuple[RunSpec, list[_Stage]] | None = None  # a run is asked for in several recipes in turn

    def blocks(self, run: RunSpec) -> tuple[list[BlockMemory], BlockMemory, BlockMemory]:
        """Every kind of layer, the embedding and the head."""
        key = (
            run.micro_batch_size, run.sequence_length, run.tp, run.cp, run.ep, run.etp, run.sequence_parallel, run.pp > 1,
            run.sequence_parallel_linears, run.imbalance, run.vocab_multiple, run.separate_projections,
        )  # fmt: skip
        known = self._blocks.get(key)
        if known is None:
            plain = replace(run, recompute="none")
            layers = [_block(layer_ops(self.model, layer, plain), plain, self.model.hidden_size) for layer in self._kinds]
            embedding = _block(embedding_ops(self.model, plain), plain, self.model.hidden_size)
            head = _block(head_ops(self.model, plain), plain, self.model.hidden_size)
            known = self._blocks[key] = layers, embedding, head
        return known

    def stages(self, run: RunSpec) -> list[tuple[int, list[int]]]:
        """The first of every kind of pipeline stage, with how many layers of each kind it has. Earlier stages hold more."""
        key = (run.pp, run.pp_layers)
        known = self._stages.get(key)
        if known is None:
            kinds: dict[tuple[Any, ...], tuple[int, list[int]]] = {}
            for stage, (first, last) in enumerate(stage_layers(self.model, run)):
                chosen = self._order[first:last]
                counts = [chosen.count(kind) for kind in range(len(self._kinds))]
                kinds.setdefault((stage == 0, stage == run.pp - 1, *counts), (stage, counts))
            known = self._stages[key] = list(kinds.values())
        return known

    def rank(self, run: RunSpec, recipe_name: str, chip: GpuSpec) -> RankMemory:
        """The stage that needs most."""
        if self._last is None or self._last[0] is not run:
            layers, embedding, head = self.blocks(run)
            stages = [
                _Stage.of(run, stage, [(block, count) for block, count in zip(layers, counts, strict=True) if count],
                          embedding if stage == 0 else NOTHING, head if stage == run.pp - 1 else NOTHING)
                for stage, counts in self.stages(run)
            ]  # fmt: skip
            self._last = run, stages
        stored = storage(recipe_name, chip.architecture)
        results = [stage.in_recipe(run, stored) for stage in self._last[1]]
        return max(results, key=lambda memory: memory.total) if len(results) > 1 else results[0]


class Storage(NamedTuple):
    """How a recipe stores what it quantizes: bytes per element."""

    copies: float  # of a weight; 0 where nothing is quantized
    kept: float  # of the input of a linear
    context: float  # more, of what the output projection of attention reads
    activated: float  # more, of what the last linear of an MLP reads

    @property
    def smaller(self) -> bool:
        """Whether inputs are kept in the quantized format."""
        return self.kept < ELEMENT_BYTES


@cache
def storage(recipe_name: str, architecture: str) -> Storage:
    """On Blackwell one copy of a tensor-scaled value serves both directions."""
    chosen, twice = recipe(recipe_name), facts()["kept_twice"]
    if not chosen.quantizes:
        return Storage(0.0, ELEMENT_BYTES, 0.0, 0.0)
    once = chosen.scales == "tensor" and architecture.startswith("10.")
    context, activated = (
        0.0 if once or chosen.scales not in twice[what] else chosen.kept_bytes for what in ("context", "activated")
    )
    return Storage(chosen.weight_copy_bytes / (2 if once else 1), chosen.kept_bytes, context, activated)


def in_flight(run: RunSpec, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once: 1F1B, or interleaved with virtual stages as in Megatron.

    >>> run = RunSpec(micro_batch_size=1, sequence_length=8, pp=4, gradient_accumulation=8)
    >>> in_flight(run, 0), in_flight(run, 3), in_flight(replace(run, vp=2), 0)
    (4, 1, 5.5)
    """
    batches = run.gradient_accumulation
    if run.vp == 1 or run.pp == 1:
        return min(run.pp - stage, batches)
    chunks = 2 * (run.pp - stage - 1) + (run.vp - 1) * run.pp + 1
    return min(chunks, batches * run.vp) / run.vp


def _block(ops: Iterable[Op], run: RunSpec, hidden: int) -> BlockMemory:
    """What the ops of one layer (or the embedding, or the head) hold."""
    dense = experts = quantized = quantized_experts = 0
    kept = context = elements = recomputable_elements = transient = unfused = logits = exchanged = 0.0
    attended = activated = 0.0
    inputs: dict[str, float] = {}
    plain: dict[str, float] = {}
    sharded = run.tp if run.sequence_parallel else 1
    first = run.tokens / sharded * hidden * ELEMENT_BYTES
    for op in ops:
        if isinstance(op, GroupedLinear):
            experts += op.parameters * op.count
        else:
            dense += op.parameters * op.count
        if isinstance(op, Linear):
            key, size = _input(op, sharded)
            inputs[key] = max(inputs.get(key, 0.0), size * op.count)
            if not op.quantized or op.section:
                plain[key] = max(plain.get(key, 0.0), size * op.count)
            else:
                elements += size * op.count
                attended += size * op.count if key == "context" else 0.0
                activated += size * op.count if key.endswith("activated") else 0.0
                weights = op.groups * op.inputs * op.outputs * op.count
                quantized += weights
                if isinstance(op, GroupedLinear):
                    quantized_experts += weights
                if key in ("attention", "mlp", "activated", "expert activated"):
                    recomputable_elements += size * op.count
            if op.name == "Router":
                kept += op.tokens * op.outputs * ROUTER_BYTES
            if op.name == "Expert Down":
                returned = op.tokens * op.outputs * ELEMENT_BYTES
                unfused += returned
                exchanged += 2 * returned if run.ep > 1 else 0.0
        elif isinstance(op, Attention):
            rows, dims = op.batch * op.queries, op.head_dim + op.value_dim
            kept += rows * op.kv_heads * dims * ELEMENT_BYTES + rows * op.heads * op.head_dim * ELEMENT_BYTES
            context = rows * op.heads * op.value_dim * ELEMENT_BYTES
            kept += context + rows * op.heads * FP32_BYTES
            exchanged += 2 * rows * op.kv_heads * dims * ELEMENT_BYTES if run.cp > 1 else 0.0
        elif isinstance(op, Scan):
            kept += op.kept_bytes() * op.count
        elif isinstance(op, CausalConv):
            kept += op.tokens * op.channels * ELEMENT_BYTES * op.count
        elif isinstance(op, Loss):
            logits = op.rows * op.width
        elif isinstance(op, Activation):
            read = (op.forward_tensors - 1) * op.rows * op.width * ELEMENT_BYTES
            kept += read * op.count
            transient = max(transient, read + op.rows * op.width * ELEMENT_BYTES)
        elif op.name == "Rotary" and isinstance(op, Elementwise):
            unfused += op.rows * op.width * ELEMENT_BYTES
        elif isinstance(op, Norm):
            kept += op.rows * op.width * ELEMENT_BYTES * op.count
    if run.tp > 1:
        exchanged += 2 * run.tokens * hidden * ELEMENT_BYTES
    return BlockMemory(
        dense, experts, quantized, quantized_experts, kept, context,
        sum(size * ELEMENT_BYTES for key, size in inputs.items() if key != "context"),
        sum(size * ELEMENT_BYTES for key, size in plain.items()),
        elements,
        sum(size * ELEMENT_BYTES for key, size in inputs.items() if key in ("attention", "mlp", "activated", "expert activated")),
        recomputable_elements, attended, activated, first, transient + 2 * first, exchanged, unfused, logits,
    )  # fmt: skip


def _input(op: Linear, sharded: int) -> tuple[str, float]:
    """Which tensor a linear reads, and how many elements of it this rank keeps."""
    size = float(op.tokens * op.inputs)
    if op.name == "Attn Out":
        return "context", size  # what attention keeps anyway
    if op.name in _ATTENTION_INPUT:
        return "attention", size / (sharded if "Down" not in op.name else 1)
    if op.name in _MLP_INPUT:
        return "mlp", size / (sharded if op.name not in ("Router", "Shared Expert Scale") else 1)
    if op.name in _LATENT_INPUT:
        return op.name, size / sharded
    if op.name in _EXPERT_INPUT:
        return "expert", size
    if op.name.endswith(" Down"):
        return "expert activated" if op.name == "Expert Down" else "activated", size
    return op.name, size / (sharded if op.name == "LM Head" else 1)


def _kept(block: BlockMemory, run: RunSpec, stored: Storage, recompute: Recompute) -> tuple[float, float]:
    """Bytes that one micro-batch keeps for the backward pass of one layer in this recipe: the usual, and the least."""
    if recompute == "full":
        return block.first, block.first
    if stored.smaller:
        more = block.context_elements * stored.context + block.activated_elements * stored.activated
        linears = block.plain + block.elements * stored.kept + more
        attention = block.context if recompute == "none" else 0.0
        spared = block.recomputable_elements * stored.kept + block.activated_elements * stored.activated
    else:
        linears, attention, spared, more = block.inputs, block.context, block.recomputable, 0.0
    kept = block.kept - block.context + attention + linears
    return (kept - spared, block.first) if run.partly_recomputed else (kept, kept - more)


def shards(run: RunSpec) -> tuple[int, int]:
    """Ranks that share optimizer states (and more) of the weights outside of the experts, and of the experts."""
    if run.zero_stage == 0:
        return 1, 1
    dense = run.data_parallel * run.cp
    experts = max(run.tp * dense // (run.ep * run.expert_tp), 1)
    most = run.zero_ranks or dense * run.tp
    return min(dense, most), min(experts, most)


class _Stage(NamedTuple):
    """One pipeline stage without what depends on the recipe: bytes, of its layers together and of the largest."""

    stage: int
    layers: BlockMemory  # all of them together
    widest: BlockMemory  # the layer that keeps most
    ends: float  # kept by the embedding and the head
    logits: float
    held: float  # micro-batches in flight, less what waits in the memory of the CPU
    in_flight: float
    largest: int  # parameters of the largest layer, or of the embedding or the head
    weights: float
    gradients: float
    master: float
    moments: float
    buffers: float
    reserve: float
    open_states: float  # which more data-parallel ranks could share

    @classmethod
    def of(
        cls, run: RunSpec, stage: int, parts: Sequence[tuple[BlockMemory, int]], embedding: BlockMemory, head: BlockMemory
    ) -> "_Stage":
        """`parts`: each kind of layer, with how many of it there are."""
        known, zero, fp32 = facts(), run.zero_stage, run.state_precision == "fp32"
        if len(parts) == 1:
            (block, depth), *_ = parts
            layers = BlockMemory._make(value * depth for value in block)
            widest = block
        else:
            layers = BlockMemory._make(sum(block[place] * count for block, count in parts) for place in range(len(NOTHING)))
            widest = max((block for block, _ in parts), key=lambda block: block.kept + block.inputs, default=NOTHING)
            depth = sum(count for _, count in parts)
        dense, experts = layers.dense + embedding.dense + head.dense, layers.experts
        dense_shards, expert_shards = shards(run)
        shared, whole = dense / dense_shards + experts / expert_shards, dense + experts
        largest = max(max((block.parameters for block, _ in parts), default=0), embedding.parameters, head.parameters)
        gradient_bytes = FP32_BYTES if (run.gradient_precision or run.state_precision) == "fp32" else ELEMENT_BYTES
        state_bytes = FP32_BYTES if fp32 else ELEMENT_BYTES
        weights = shared * state_bytes if zero == 3 else whole * ELEMENT_BYTES
        gradients = gradient_bytes * (shared if zero >= 2 else whole)
        master, moments = shared * FP32_BYTES if fp32 and zero < 3 else 0.0, 2 * shared * state_bytes
        buffers = max((block.exchanged for block, _ in parts), default=0.0) + (2 * widest.first if run.pp > 1 else 0.0)
        if zero >= 2 and whole > shared:
            buffers += largest * gradient_bytes
        if zero == 3 and whole > shared:  # a pipeline gathers weights and shares gradients once per step, as in torchtitan
            buffers += ELEMENT_BYTES * (whole if run.pp > 1 else known["gathered"]["layers"] * largest)
            buffers += gradient_bytes * max(whole - shared - largest, 0.0) if run.pp > 1 else 0.0
        open_states = 0.0
        if run.zero and run.dp is None and run.gpus == run.tp * run.cp * run.pp:
            open_states = master + moments + (weights if zero == 3 else 0.0) + (gradients if zero >= 2 else 0.0)
        on_gpu = max(1 - run.offloaded_layers / depth, 0.0) if run.offloaded_layers and depth else 1.0
        held = in_flight(run, stage)
        return cls(
            stage, layers, widest, embedding.kept + head.kept + head.inputs, head.logits, held * on_gpu, held, largest,
            weights, gradients, master, moments, buffers,
            known["reserve_gb"]["usual" if run.gpus == 1 else "usual_several_gpus"] * 1e9, open_states,
        )  # fmt: skip

    def in_recipe(self, run: RunSpec, stored: Storage) -> RankMemory:
        """With activations and copies of one recipe, and the bounds of what settings that the run leaves open would change."""
        known, layers = facts(), self.layers
        weights, gradients, zero, fp32 = self.weights, self.gradients, run.zero_stage, run.state_precision == "fp32"
        all_copies = copies = layers.quantized * stored.copies
        if copies and zero == 3:  # they last as long as the gathered weights
            copies = min(copies, known["gathered"]["layers"] * stored.copies * self.widest.quantized)
        elif copies and run.quantized_weights:
            weights -= layers.quantized * ELEMENT_BYTES
        usual, least_kept = _kept(layers, run, stored, run.recompute)
        activations = usual * self.held + self.ends
        backward = self.widest.transient
        if run.recompute == "full":
            backward += _kept(self.widest, run, stored, "none")[0]
        loss = known["logit_bytes"]
        workspace = max(self.logits * loss["usual"], backward)
        states = weights + gradients + self.master + self.moments
        # What the run does not say may be as frameworks do it at best: gradients in BF16, weights in the quantized format alone,
        # a fused loss, states shared by any number of ranks.
        spared = self.open_states
        if fp32 and run.gradient_precision is None and not (self.open_states and zero >= 2):
            spared += gradients / 2
        if copies and zero < 3 and fp32 and run.quantized_weights is None:
            spared += layers.quantized * ELEMENT_BYTES
        least = states - spared + copies + least_kept * self.held + self.ends
        least += max(self.logits * loss["least"], backward) + known["reserve_gb"]["least"] * 1e9
        unfused = 0.0 if run.recompute == "full" else self.held * layers.unfused
        scattered = known["fragmentation"]["most"] * (activations + unfused + self.buffers + gradients)
        most = states + all_copies + activations + unfused + self.buffers + scattered
        most += max(self.logits * loss["most"], backward) + known["reserve_gb"]["most"] * 1e9
        return RankMemory(
            weights, gradients, self.master, self.moments, activations, copies, self.buffers, workspace, self.reserve,
            least, most, self.stage, self.in_flight,
        )  # fmt: skip
