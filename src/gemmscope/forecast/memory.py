"""Memory of one GPU in training: weights, gradients, optimizer states, activations and buffers of the rank that needs most.

Everything follows from sizes, the layout and what frameworks do (Megatron-LM, torchtitan); `coefficients/memory.toml` has the
rest. `total_bytes` is the usual case. `least_bytes` and `most_bytes` bound what other settings of the same layout need, such as
BF16 gradients, a fused cross entropy or a fragmented allocator: a layout cannot fit only where even the least is too much.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

from gemmscope.forecast.memory_blocks import NOTHING, BlockMemory, block_memory
from gemmscope.gpu.specs import GpuSpec
from gemmscope.model.layer_spec import LayerSpec
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.recipe.recipes import recipe
from gemmscope.results.forecast import Fit, RecipeMemory
from gemmscope.toml import load_data
from gemmscope.workload.derive import embedding_ops, head_ops, layer_ops, prediction_ops
from gemmscope.workload.ops import ELEMENT_BYTES, FP32_BYTES
from gemmscope.workload.sharding import stage_layers

MODELS_KEPT = 16
Part = tuple[BlockMemory, BlockMemory, float]
Blocks = tuple[list[BlockMemory], BlockMemory, BlockMemory, BlockMemory]  # kinds of layers, embedding, head, prediction layer
memory_facts = cache(partial(load_data, "gemmscope.forecast", "coefficients/memory.toml"))
"""What does not follow from sizes."""


def recipe_memory(
    name: str, chip: GpuSpec, *, least_bytes: float, most_bytes: float, stage: int, in_flight: float, **rows: float
) -> RecipeMemory:
    """The result from its rows: their sum is the usual case. It does not fit only if even `least_bytes` is too much."""
    total, available = sum(rows.values()), chip.memory_bytes
    fit: Fit = "tight" if most_bytes > available else "fits"
    if total > available:
        fit = "does not fit" if least_bytes > available else "may not fit"
    return RecipeMemory(
        recipe=name, stage=stage, in_flight=in_flight, **rows, total_bytes=total, least_bytes=least_bytes, most_bytes=most_bytes,
        available_bytes=available, fit=fit,
    )  # fmt: skip


def rank_memory(model: ModelSpec, run: RunSpec, recipe_name: str, chip: GpuSpec) -> RecipeMemory:
    """Memory of the rank that needs most, on any stage of the pipeline.

    >>> from gemmscope.gpu.specs import gpu
    >>> from gemmscope.model import presets
    >>> run = RunSpec(micro_batch_size=1, sequence_length=8192, tp=2, sequence_parallel=True, dp=4)
    >>> rank_memory(presets.load("llama-3.1-8b").model, run, "FP8Current", gpu("h100")).fit
    'fits'
    """
    return memory_of(model).rank(run, [recipe_name], chip)[recipe_name]


_models: "OrderedDict[int, ModelMemory]" = OrderedDict()


def memory_of(model: ModelSpec) -> "ModelMemory":
    """The memory of this model, cached between calls: a search asks for thousands of layouts of one model."""
    known = _models.get(id(model))
    if known is None or known.model is not model:
        known = _models[id(model)] = ModelMemory(model)
        while len(_models) > MODELS_KEPT:
            _models.popitem(last=False)
    return known


def _sizes(run: RunSpec) -> tuple[Any, ...]:
    """What decides what a layer holds, beside recomputation."""
    return (
        run.micro_batch_size, run.sequence_length, run.tp, run.cp, run.ep, run.etp, run.sequence_parallel, run.pp > 1,
        run.sequence_parallel_linears, run.imbalance, run.vocab_multiple, run.separate_projections, run.lora,
        run.lora_linears,
    )  # fmt: skip


class ModelMemory:
    """The memory of one model in any layout. What a layer keeps is computed once for each way to split it."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model
        by_id = {id(layer): layer for layer in model.layers}
        self._kinds: list[LayerSpec] = list(dict.fromkeys(by_id.values()))
        kinds = {number: self._kinds.index(layer) for number, layer in by_id.items()}
        self._order = [kinds[id(layer)] for layer in model.layers]
        self._blocks: dict[tuple[Any, ...], Blocks] = {}
        self._selective: dict[tuple[Any, ...], list[BlockMemory]] = {}
        self._stages: dict[tuple[Any, ...], list[tuple[int, dict[int, int]]]] = {}

    def blocks(self, run: RunSpec) -> Blocks:
        """Every kind of layer, the embedding, the head, and a prediction layer, with nothing recomputed."""
        key = _sizes(run)
        known = self._blocks.get(key)
        if known is None:
            plain, width = replace(run, recompute="none"), self.model.hidden_size * self.model.streams
            layers = [block_memory(layer_ops(self.model, layer, plain), plain, width) for layer in self._kinds]
            embedding = block_memory(embedding_ops(self.model, plain), plain, width)
            head = block_memory(head_ops(self.model, plain), plain, width)
            one = prediction_ops(replace(self.model, prediction_layers=1), plain) if self.model.prediction_layers else ()
            known = self._blocks[key] = layers, embedding, head, block_memory(one, plain, width)
        return known

    def _recomputed(self, run: RunSpec, plain: list[BlockMemory]) -> list[BlockMemory]:
        """Every kind of layer where backward computes again what this run says."""
        if run.recompute != "selective":
            return [block.nothing_kept() for block in plain]
        key = (*_sizes(run), run.recompute_modules)
        if key not in self._selective:
            width = self.model.hidden_size * self.model.streams
            self._selective[key] = [block_memory(layer_ops(self.model, layer, run), run, width) for layer in self._kinds]
        return self._selective[key]

    def stages(self, run: RunSpec) -> list[tuple[int, dict[int, int]]]:
        """The first of every kind of pipeline stage that may need most, with how many layers of each kind it has."""
        key = (run.pp, run.pp_layers)
        known = self._stages.get(key)
        if known is None:
            kinds: dict[tuple[Any, ...], tuple[int, dict[int, int]]] = {}
            most = dict[int, int]()  # of the first stage: others hold fewer micro-batches
            for stage, (first, last) in enumerate(stage_layers(self.model, run)):
                counts = dict(sorted(Counter(self._order[first:last]).items()))
                if stage in (0, run.pp - 1) or any(count > most.get(kind, 0) for kind, count in counts.items()):
                    kinds.setdefault((stage == 0, stage == run.pp - 1, *counts.items()), (stage, counts))
                most = counts if stage == 0 else most
            known = self._stages[key] = list(kinds.values())
        return known

    def rank(self, run: RunSpec, recipes: Iterable[str], chip: GpuSpec) -> dict[str, RecipeMemory]:
        """The stage that needs most, in every recipe."""
        layers, embedding, head, prediction = self.blocks(run)
        share = run.recompute_share if run.recompute != "none" else 0
        kinds = [(self._recomputed(run, layers), share)] if share else []
        kinds += [(layers, 1 - share)] if share < 1 else []
        stages = []
        for stage, counts in self.stages(run):
            parts = [(of[kind], layers[kind], count * part) for kind, count in counts.items() for of, part in kinds]
            last = stage == run.pp - 1
            if last and self.model.prediction_layers:
                parts.append((prediction, prediction, self.model.prediction_layers))
            stages.append(_Stage.of(run, stage, parts, embedding if stage == 0 else NOTHING, head if last else NOTHING))
        return {
            name: max((stage.in_recipe(run, name, chip) for stage in stages), key=lambda memory: memory.total_bytes)
            for name in recipes
        }


class Storage(NamedTuple):
    """How a recipe stores what it quantizes: bytes per element."""

    copies: float  # of a weight; 0 where nothing is quantized
    kept: float  # of the input of a linear
    context: float  # more, of what the output projection of attention reads
    activated: float  # more, of what the last linear of an MLP reads


@cache
def storage(recipe_name: str, architecture: str) -> Storage:
    """What a recipe stores of weights and activations. On Blackwell, one copy of a tensor-scaled value serves both directions."""
    chosen, twice = recipe(recipe_name), memory_facts()["kept_twice"]
    if not chosen.quantizes:
        return Storage(0.0, ELEMENT_BYTES, 0.0, 0.0)
    once = chosen.one_copy(architecture)
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
    return min(2 * (run.pp - stage - 1) + (run.vp - 1) * run.pp + 1, batches * run.vp) / run.vp


def _kept(block: BlockMemory, stored: Storage) -> tuple[float, float]:
    """Bytes that one micro-batch keeps for the backward pass of one layer in this recipe: the usual, and the least."""
    if stored.kept < ELEMENT_BYTES:  # inputs are kept in the quantized format
        more = block.context_elements * stored.context + block.activated_elements * stored.activated
        linears = block.plain + block.elements * stored.kept + more
        return block.kept + linears, block.kept + linears - more
    return block.kept + block.inputs, block.kept + block.inputs


def shards(run: RunSpec) -> tuple[int, int]:
    """Ranks that share optimizer states (and more) of the weights outside of the experts, and of the experts."""
    if run.zero_stage == 0:
        return 1, 1
    dense = run.data_parallel * run.cp
    experts = max(run.tp * dense // (run.ep * run.expert_tp), 1)
    most = run.zero_ranks or dense * run.tp
    return min(dense, most), min(experts, most)


def state_bytes(run: RunSpec, weights: tuple[float, float], trained: tuple[float, float]) -> dict[str, float]:
    """Rows of the result: weights, gradients and optimizer states. `weights`, `trained`: how many parameters there are, and how
    many of them are this rank's where they are sharded."""
    zero, fp32 = run.zero_stage, run.state_precision == "fp32"
    size = FP32_BYTES if fp32 else ELEMENT_BYTES
    return {
        "weights_bytes": (
            trained[1] * size + (weights[1] - trained[1]) * ELEMENT_BYTES if zero == 3 else weights[0] * ELEMENT_BYTES
        ),
        "gradients_bytes": gradient_size(run) * trained[zero >= 2],
        "master_weights_bytes": trained[1] * FP32_BYTES if fp32 and zero < 3 else 0.0,
        "moments_bytes": 2 * trained[1] * size,
    }


def gradient_size(run: RunSpec) -> int:
    """Bytes of one gradient."""
    return FP32_BYTES if (run.gradient_precision or run.state_precision) == "fp32" else ELEMENT_BYTES


def reserve_bytes(run: RunSpec) -> float:
    """CUDA context, libraries, allocator."""
    return float(memory_facts()["reserve_gb"]["usual" if run.gpus == 1 else "usual_several_gpus"] * 1e9)


class _Stage(NamedTuple):
    """The part of one pipeline stage that does not depend on the recipe, in bytes."""

    stage: int
    layers: BlockMemory  # all of them together
    widest: BlockMemory  # the layer that keeps most
    whole: BlockMemory  # the same without recomputation
    ends: float  # kept by the embedding and the head
    logits: float
    kept_batches: float  # micro-batches whose activations are on the GPU: those in flight, less what is offloaded to the CPU
    states: dict[str, float]  # the rows of `state_bytes`
    buffers: float
    open_states: float  # states that more data-parallel ranks could shard

    @classmethod
    def of(cls, run: RunSpec, stage: int, parts: Sequence[Part], embedding: BlockMemory, head: BlockMemory) -> "_Stage":
        """`parts`: each kind of layer, the same without recomputation, and how many of it there are."""
        zero = run.zero_stage
        of_kinds = [[value * count for value in block] for block, _, count in parts]
        layers = BlockMemory._make(map(sum, zip(NOTHING, *of_kinds, strict=True)))
        pairs = [(block, whole) for block, whole, _ in parts] or [(NOTHING, NOTHING)]
        widest, whole = max(pairs, key=lambda pair: pair[1].kept + pair[1].inputs)
        depth = sum(count for *_, count in parts)
        # What is counted more than once above.
        repeated = sum(block.shared * count for block, _, count in parts) - sum(
            {id(of): of.shared for _, of, _ in parts}.values()
        )
        layers = layers._replace(dense=layers.dense - repeated, quantized=max(layers.quantized - repeated, 0))
        ends, (dense_shards, expert_shards) = (embedding, head), shards(run)
        weights, trained = (
            (dense + experts, dense / dense_shards + experts / expert_shards)
            for dense, experts in (
                (layers.dense + sum(end.dense for end in ends), layers.experts),
                (layers.trained + sum(end.trained for end in ends), layers.trained_experts),
            )
        )
        total, shared = weights
        trained = weights if run.lora is None else trained
        blocks = [*(block for block, _ in pairs), *ends]
        largest, largest_trained = (max(block.parameters for block in blocks), max(block.all_trained for block in blocks))
        buffers = max(block.exchanged for block, _ in pairs) + (2 * widest.first if run.pp > 1 else 0.0)
        if zero >= 2 and total > shared:
            buffers += largest_trained * gradient_size(run)
        if zero == 3 and total > shared:  # a pipeline gathers weights and shares gradients once per step, as in torchtitan
            buffers += ELEMENT_BYTES * (total if run.pp > 1 else memory_facts()["gathered"]["layers"] * largest)
            buffers += gradient_size(run) * max(trained[0] - trained[1] - largest_trained, 0.0) if run.pp > 1 else 0.0
        states, open_states = state_bytes(run, weights, trained), 0.0
        if run.zero and run.dp is None and run.gpus == run.tp * run.cp * run.pp:
            open_states = states["master_weights_bytes"] + states["moments_bytes"]
            open_states += states["weights_bytes"] if zero == 3 else 0.0
            open_states += states["gradients_bytes"] if zero >= 2 else 0.0
        on_gpu = max(1 - run.offloaded_layers / depth, 0.0) if run.offloaded_layers and depth else 1.0
        return cls(
            stage, layers, widest, whole, embedding.kept + head.kept + head.inputs, head.logits + layers.logits,
            in_flight(run, stage) * on_gpu, states, buffers, open_states,
        )  # fmt: skip

    def in_recipe(self, run: RunSpec, name: str, chip: GpuSpec) -> RecipeMemory:
        """The memory in one recipe, with bounds for settings that the run leaves open."""
        known, layers, states, stored = memory_facts(), self.layers, dict(self.states), storage(name, chip.architecture)
        gradients, zero, fp32 = states["gradients_bytes"], run.zero_stage, run.state_precision == "fp32"
        all_copies = copies = layers.quantized * stored.copies
        if copies and zero == 3:  # they last as long as the gathered weights
            copies = min(copies, known["gathered"]["layers"] * stored.copies * self.widest.quantized)
        elif copies and run.quantized_weights:
            states["weights_bytes"] -= layers.quantized * ELEMENT_BYTES
        usual, least_kept = _kept(layers, stored)
        activations = usual * self.kept_batches + self.ends
        least_kept = min(layers.first, least_kept) if run.partly_recomputed else least_kept
        again = _kept(self.whole, stored)[0] - _kept(self.widest, stored)[0]  # what backward computes again of one layer
        backward = self.widest.transient + max(again, 0.0)
        loss, every_state = known["logit_bytes"], sum(states.values())
        # The lower bound assumes the best settings that the run leaves open: gradients in BF16, weights only in the quantized
        # format, a fused loss, states sharded over any number of ranks.
        spared = self.open_states
        if fp32 and run.gradient_precision is None and not (self.open_states and zero >= 2):
            spared += gradients / 2
        if copies and zero < 3 and (fp32 or run.lora is not None) and run.quantized_weights is None:
            spared += layers.quantized * ELEMENT_BYTES
        least = every_state - spared + copies + least_kept * self.kept_batches + self.ends
        least += max(self.logits * loss["least"], backward) + known["reserve_gb"]["least"] * 1e9
        unfused = self.kept_batches * layers.unfused
        scattered = known["fragmentation"]["most"] * (activations + unfused + self.buffers + gradients)
        most = every_state + all_copies + activations + unfused + self.buffers + scattered
        most += max(self.logits * loss["most"], backward) + known["reserve_gb"]["most"] * 1e9
        return recipe_memory(
            name, chip, stage=self.stage, in_flight=in_flight(run, self.stage), least_bytes=least, most_bytes=most, **states,
            activations_bytes=activations, quantized_copies_bytes=copies, communication_bytes=self.buffers,
            workspace_bytes=max(self.logits * loss["usual"], backward), reserve_bytes=reserve_bytes(run),
        )  # fmt: skip
