"""What a training step computes, as plain data that crosses the process boundary as JSON: a model with the sizes of one rank.

Layers of a kind are alike, so a step of the real depth needs the weights of a few only: `slots` says which weights each layer
uses. Layers that share a slot share its memory, not its gradients: every layer runs the kernels it would run in the whole model.

A mix keeps whole layers of it in a higher precision, and parts of every layer: what a kit can run in a precision of its own.
An op of `gemmscope shapes` belongs to one part; the projections of attention belong together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle
from math import gcd

from gemmscope.errors import UserError, option
from gemmscope.findings import Finding, Notes, applicable
from gemmscope.grouping import grouped
from gemmscope.model.layer_spec import AttentionSpec, LayerSpec, MlpSpec, MoeSpec
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.recipe.kept import KeptHigher
from gemmscope.recipe.recipes import Recipe, recipe
from gemmscope.roles import kit_part, name_of
from gemmscope.step.module_plan import ModulePlan
from gemmscope.toml import load_data
from gemmscope.workload import sharding
from gemmscope.workload.derive import Workload, derive
from gemmscope.workload.ops import Linear

MOST_WEIGHTS = 4  # layers that have their own weights, over all kinds, unless there are more kinds
MOST_KINDS = 12
WHOLE_MLP = "mlp"  # all of the feed-forward block


@dataclass(frozen=True)
class NormPlaces:
    """Where the norms of a layer stand."""

    before: bool = True  # each of its blocks
    after: bool = False  # each of its blocks, before it is added
    shared: bool = False  # one norm before all blocks, which run side by side
    count: int = 0


def norm_places(layer: LayerSpec) -> NormPlaces:
    """Where the norms of a layer are, by their number: before each block; before and after; one for all; none.

    >>> mlp = MlpSpec(96, gated=False)
    >>> norm_places(LayerSpec(AttentionSpec(4, 4, 16), mlp, norms=4))
    NormPlaces(before=True, after=True, shared=False, count=4)
    >>> norm_places(LayerSpec(None, mlp, norms=1)), norm_places(LayerSpec(AttentionSpec(4, 4, 16), mlp, norms=1)).shared
    (NormPlaces(before=True, after=False, shared=False, count=1), True)
    """
    blocks = (layer.attention is not None or layer.mixer is not None) + (layer.mlp is not None)
    own_input = int(layer.input_width > 0)  # has a norm of its own
    if layer.norms == 0:
        return NormPlaces(before=False)
    if layer.norms == 1 and blocks == 2:
        return NormPlaces(shared=True, count=1)
    if layer.norms - own_input == 2 * blocks:
        return NormPlaces(after=True, count=layer.norms)
    return NormPlaces(count=blocks + own_input)


@dataclass(frozen=True)
class StackPlan:
    """One rank's step: `model` and `run` as they are there. Its layers are those of this rank, in the order they run and with the
    sizes of its share; `slots[i]` are the weights that layer i uses."""

    model: ModelSpec
    run: RunSpec
    slots: tuple[int, ...]
    linears: tuple[tuple[str, int, int], ...]  # that a recipe may quantize: role, input and output features
    expert_rows: tuple[int, ...] = ()  # by expert
    embeds: bool = True  # the first pipeline stage does
    heads: bool = True  # the last one does
    layers_before: int = 0  # on earlier pipeline stages
    layers_after: int = 0  # on later ones

    @property
    def depth(self) -> int:
        return len(self.model.layers)

    @property
    def micro_batch_size(self) -> int:
        return self.run.micro_batch_size

    @property
    def sequence_length(self) -> int:
        return self.run.sequence_length

    @property
    def accumulation(self) -> int:
        return self.run.gradient_accumulation

    @property
    def shares(self) -> int:
        """How many ranks share the tokens outside the blocks that tensor parallelism splits."""
        return self.run.tp if self.run.sequence_parallel else 1

    def misaligned(self, recipe: Recipe) -> str:
        """Why its GEMMs do not run in a recipe, in the words of a forecast; empty if they do."""
        reasons = (
            f"{name_of(role)}: {reason}"
            for role, inputs, outputs in self.linears
            if (reason := recipe.misaligned({"tokens": self.run.tokens, "input features": inputs, "output features": outputs}))
        )
        return next(reasons, "")

    @property
    def period(self) -> int:
        """The fewest layers in which every kind has its exact share."""
        return self.depth // gcd(*Counter(self.model.layers).values())

    def weights(self, most: int) -> dict[int, float]:
        """Depths to run, the deepest of at most `most` layers, with the weight of each in the step of the whole model: on the
        line through two of them."""
        if not 1 < most < self.depth:
            return {min(most, self.depth): 1.0}
        half = most // 2
        beyond = (self.depth - most) / (most - half)
        return {most: 1 + beyond, half: -beyond}

    def with_depth(self, depth: int) -> StackPlan:
        """So many of its layers: each kind keeps its share, and they are chosen evenly."""
        chosen = evenly_chosen(self.model.layers, depth)
        model = replace(self.model, layers=tuple(self.model.layers[i] for i in chosen))
        return replace(self, model=model, slots=tuple(self.slots[i] for i in chosen))

    def with_batch(self, micro_batch_size: int, sequence_length: int) -> StackPlan:
        """The same layers on another batch."""
        run = replace(self.run, micro_batch_size=micro_batch_size, sequence_length=sequence_length)
        rows = tuple(max(16, row * run.tokens // self.run.tokens // 16 * 16) for row in self.expert_rows)
        return replace(self, run=run, expert_rows=rows)

    def padded(self, multiple: int) -> StackPlan:
        """The plan with experts' tokens padded to a multiple of what a recipe needs (they are multiples of 16 already)."""
        return replace(self, expert_rows=tuple(-(-rows // multiple) * multiple for rows in self.expert_rows))

    def unrolled(self) -> StackPlan:
        """Every layer with weights of its own: the real model."""
        return replace(self, slots=tuple(range(self.depth)))


def evenly_chosen(layers: Sequence[Hashable], depth: int) -> list[int]:
    """The places of `depth` of the layers, in order: of each kind in proportion to its share, the rest of the kinds furthest
    below it.

    >>> evenly_chosen("aaabaaab", 4), evenly_chosen("abbbbb", 3), evenly_chosen("aaaa", 2)
    ([0, 2, 3, 5], [0, 1, 3], [0, 2])
    """
    places = grouped((layer, place) for place, layer in enumerate(layers))
    counts = sharding.apportion(depth, list(map(len, places.values())))
    return sorted(
        members[number * len(members) // count]
        for members, count in zip(places.values(), counts, strict=True)
        for number in range(count)
    )


def plan_step(model: ModelSpec, run: RunSpec) -> tuple[StackPlan, list[Finding]]:
    """The step of one rank, and what it runs differently from the model."""
    sharding.check(model, run)
    if special := not_run(model):
        hugging_face = f"for a preset or a Hugging Face config, add {option('hugging_face')} to run the model's own class"
        raise UserError(f"step does not support layers with {special} yet", f"{hugging_face}; or use gemmscope forecast")
    if run.cp > 1:
        raise UserError(
            "a step under context parallelism cannot be run on one GPU: its queries attend to keys of other ranks",
            f"remove {option('cp')}, or use gemmscope forecast, which supports it",
        )
    workload = derive(model, run)
    stage = workload.stage
    first, last = sharding.stage_layers(model, run)[stage]
    chosen = model.layers[first:last]
    if not chosen:
        message = f"pipeline stage {stage} has no layers, so low precision cannot speed up its step"
        raise UserError(message, f"choose another with {option('pp_stage')}")
    embeds, heads = stage == 0, stage == run.pp - 1
    vocab = sharding.padded_vocab(model.vocab_size, run) // run.tp if model.vocab_size is not None and (embeds or heads) else None
    predicts = model.prediction_layers > 0 and heads and vocab is not None
    every = (*chosen, model.predicting) if predicts else chosen
    moe = next((layer.mlp for layer in every if isinstance(layer.mlp, MoeSpec)), None)
    of_rank = replace(
        model,
        layers=tuple(_of_rank(layer, run) for layer in chosen),
        vocab_size=vocab,
        tied_embeddings=model.tied_embeddings and embeds and heads,
        prediction_layers=model.prediction_layers if predicts else 0,
        prediction_layer=_of_rank(model.predicting, run),
    )
    linears = [op for op in workload.ops if isinstance(op, Linear) and op.facts.part == "GEMMs"]
    plan = StackPlan(
        model=of_rank,
        run=run,
        slots=share_weights(of_rank.layers),
        linears=tuple(dict.fromkeys((op.role, op.inputs, op.outputs) for op in linears)),
        expert_rows=tuple(max(16, rows) for rows in sharding.expert_rows(moe, run)) if moe is not None else (),
        embeds=embeds,
        heads=heads,
        layers_before=first,
        layers_after=len(model.layers) - last,
    )
    # low-precision GEMMs need a multiple of 16 tokens: frameworks pad each expert's
    return plan.padded(16), _differences(model, run, every, workload)


def projected_widths(spec: AttentionSpec) -> list[int]:
    """The widths of queries, keys and values; fewer if keys are values too, or are those of another layer."""
    widths = [spec.q_proj_width, spec.k_width, spec.v_width]
    return widths[: 1 if spec.shares_kv else 2 if spec.values_are_keys else 3]


def share_weights(layers: tuple[LayerSpec, ...]) -> tuple[int, ...]:
    """Which weights each layer uses: those of a few layers in turn, at least one of every kind.

    >>> a, b = "dense", "MoE"
    >>> share_weights((a, a, a, a, a, a)), share_weights((a, b, b, b, b, b))
    ((0, 1, 2, 3, 0, 1), (0, 1, 2, 3, 1, 2))
    """
    kinds = list(dict.fromkeys(layers))
    if len(kinds) > MOST_KINDS:
        raise UserError(
            f"the model has {len(kinds)} kinds of layers, but a step can hold the weights of at most {MOST_KINDS}",
            f"choose a pipeline stage with fewer kinds: {option('pp')} and {option('pp_stage')}",
        )
    sizes = dict.fromkeys(kinds, 1)
    for _ in range(MOST_WEIGHTS - len(kinds)):  # one more for the kind with most layers for each slot that it has
        growing = max(kinds, key=lambda kind: layers.count(kind) / sizes[kind])
        sizes[growing] += 1 if sizes[growing] < layers.count(growing) else 0
    ends = accumulate(sizes.values())
    slots = {kind: cycle(range(end - sizes[kind], end)) for kind, end in zip(kinds, ends, strict=True)}
    return tuple(next(slots[layer]) for layer in layers)


def _of_rank(layer: LayerSpec, run: RunSpec) -> LayerSpec:
    """A layer with the heads and widths that one tensor-parallel rank holds."""
    attention, mixer, mlp = layer.attention, layer.mixer, layer.mlp
    if attention is not None:
        attention = replace(attention, heads=attention.heads // run.tp, kv_heads=max(1, attention.kv_heads // run.tp))
    if mixer is not None:
        mixer = replace(mixer, heads=mixer.heads // run.tp, groups=max(1, mixer.groups // run.tp))
    if isinstance(mlp, MlpSpec):
        mlp = _narrow(mlp, run.tp)
    elif mlp is not None:
        shared = _narrow(mlp.shared, run.tp) if mlp.shared is not None else None
        mlp = replace(mlp, expert=_narrow(mlp.expert, run.expert_tp), shared=shared)
    return replace(layer, attention=attention, mixer=mixer, mlp=mlp)


def _narrow(mlp: MlpSpec, parts: int) -> MlpSpec:
    return replace(mlp, intermediate_size=mlp.intermediate_size // parts)


def _differences(model: ModelSpec, run: RunSpec, layers: tuple[LayerSpec, ...], workload: Workload) -> list[Finding]:
    """What the stack does not run as the model does."""
    mlps = [layer.mlp for layer in layers]
    blocks = [
        block for mlp in mlps for block in ((mlp.expert, mlp.shared) if isinstance(mlp, MoeSpec) else (mlp,)) if block is not None
    ]
    norms = sorted({layer.norms for layer in layers if norm_places(layer).count != layer.norms})
    known = load_data("gemmscope.step", "stack_ops.toml")
    not_run = [op for op in workload.ops if op.role not in (*known["run"], *known["told"])]
    linears = list(dict.fromkeys(op.name for op in not_run if isinstance(op, Linear)))
    others = list(dict.fromkeys(op.name for op in not_run if not isinstance(op, Linear)))
    unknown = list(dict.fromkeys(block.activation for block in blocks if activation_kind(block.activation) is None))
    attentions = [layer.attention for layer in layers if layer.attention is not None]
    head_differs = model.head_transform or model.embedding_size not in (None, model.hidden_size)
    notes: Notes = {
        "sparse-attention-not-run": (any(attention.top_k is not None for attention in attentions), {}),
        "some-norms-not-run": (norms, {"norms": list(map(str, norms))}),
        "extra-linears-not-run": (linears, {"linears": linears}),
        "ops-not-run": (others, {"ops": others}),
        "activation-replaced": (unknown, {"activations": unknown}),
        "communication-not-run": (run.tp * run.cp * run.ep * run.pp > 1, {}),
        "quantized-after-gather": (run.sequence_parallel and run.tp > 1, {}),
        "experts-projections-fused": (run.separate_projections and any(layer.is_moe for layer in layers), {}),
        "head-transform-not-run": (head_differs, {}),
    }
    return applicable(notes)


def not_run(model: ModelSpec) -> str:
    """What the layers of a model have that the stack cannot run; empty if it can run them."""
    if any(layer.shared_block is not None for layer in model.layers):
        return "shared weights"
    if any(attention.compressed is not None for attention in model.attentions):
        return "compressed attention"
    return next((layer.streams.kind for layer in model.layers if layer.streams is not None), "")


ACTIVATION_KINDS = {"silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2", "quick_gelu": "quick_gelu"}
EXACT_GELUS = ("gelu", "gelu_python")


def activation_kind(name: str) -> str | None:
    """The activation of a model as frameworks name it; None if they do not have it.

    >>> activation_kind("swish"), activation_kind("gelu"), activation_kind("gelu_new"), activation_kind("xielu")
    ('silu', 'gelu', 'tanh gelu', None)
    """
    if name.startswith("gelu"):
        return "gelu" if name in EXACT_GELUS else "tanh gelu"
    return ACTIVATION_KINDS.get(name)


def kept_parts(kept: KeptHigher | None) -> frozenset[str]:
    """The parts of every layer that a mix keeps.

    >>> sorted(kept_parts(KeptHigher("BF16", ops=("mlp-gate-up", "mlp-down", "attention-out")))), kept_parts(None)
    (['attn out', 'mlp down', 'mlp up'], frozenset())
    """
    return frozenset(filter(None, map(kit_part, kept.ops if kept is not None else ())))


def check_kept(name: str, ops: Sequence[str]) -> None:
    """A `UserError` if a stack cannot keep what a mix of a model with these quantized ops keeps."""
    kept = recipe(name).kept
    if kept is None:
        return
    if strange := [op for op in kept.ops if not kit_part(op)]:
        possible = [name_of(op) for op in ops if kit_part(op)]
        raise UserError(
            f"a step cannot keep {name_of(strange[0])} in a different precision",
            f"it can keep {', '.join(possible)}; gemmscope forecast supports all",
        )
    for part in dict.fromkeys(map(kit_part, kept.ops)):
        present = [op for op in ops if kit_part(op) == part]
        if missing := [name_of(op) for op in present if op not in kept.ops]:
            raise UserError(
                f"a step keeps {', '.join(map(name_of, present))} in a higher precision only together, but the mix does not keep "
                f"{missing[0]}",
                f"add {missing[0]} to {option('keep_higher')}, or use gemmscope forecast, which supports each",
            )


def keeps_half_an_mlp(name: str) -> bool:
    """Whether a mix keeps one linear of an MLP and not the other.

    >>> keeps_half_an_mlp("FP8Current (in BF16: MLP Down)"), keeps_half_an_mlp("FP8Current (in BF16: MLP Gate+Up, MLP Down)")
    (True, False)
    """
    return len(kept_parts(recipe(name).kept) & {"mlp up", "mlp down"}) == 1


def too_shallow(plan: StackPlan | ModulePlan, depth: int, kept: KeptHigher | None) -> str:
    """Why a stack of this depth says nothing about the whole mix; empty if it does."""
    if kept is None or isinstance(plan, ModulePlan) or depth == plan.depth:
        return ""
    count = kept.first_layers + kept.last_layers
    return f"it keeps {count} layers in {kept.recipe}, but only {depth} fit in memory" if count >= depth else ""


def kept_layers(plan: StackPlan, kept: KeptHigher | None) -> list[bool]:
    """Which layers of a stack a mix keeps: the first and last ones of the model, as far as they are on this rank.

    A shallower stack keeps as many: so the whole depth is on the line through two shallower ones.
    """
    if kept is None:
        return [False] * plan.depth
    first, last = max(kept.first_layers - plan.layers_before, 0), max(kept.last_layers - plan.layers_after, 0)
    return [place < first or place >= plan.depth - last for place in range(plan.depth)]


def parts_of(path: str) -> frozenset[str]:
    """The parts that a linear of a layer of the stack belongs to, by its path in the layer.

    >>> sorted(parts_of("feed_forward.second.down")), sorted(parts_of("attention.projections.second"))
    (['mlp', 'mlp down'], ['qkv'])
    """
    names = path.split(".")
    if names[0] == "attention":
        return frozenset({"qkv"} if "projections" in names else {"attn out"})
    if names[0] != "feed_forward":
        return frozenset()
    block = "experts" if "experts" in names else "shared expert" if "shared" in names else WHOLE_MLP
    return frozenset({WHOLE_MLP, f"{block} {'down' if 'down' in names else 'up'}"})
