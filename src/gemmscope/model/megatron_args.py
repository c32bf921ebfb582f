"""From settings under Megatron's names to a model and a run: what Megatron-LM arguments and Megatron-Bridge YAML share.

A reader collects what its file says as `Settings`: values under Megatron-core's names (`num_moe_experts`, not
`--num-experts`), still as written, plus a `Dialect`: how that file's user spells a name, and the few defaults in which
Megatron-LM's arguments and Megatron-core's dataclasses differ. Everything else is decided here, once, as Megatron does.

What decides a shape and cannot be described is an error; what only adds work that is not counted is a note.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import chain
from pathlib import PurePath
from typing import Any

from gemmscope import errors
from gemmscope.errors import UserError, closest
from gemmscope.model.source import ModelSource
from gemmscope.model.spec import (
    LARGEST,
    AttentionSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    check_size,
    divisors_text,
)

REQUIRED = {"num_layers": "32", "hidden_size": "4096", "num_attention_heads": "32"}
"""Without these there is no model; with a value to show in messages."""

NOT_DESCRIBABLE = {
    "hybrid_override_pattern": "mixes Mamba layers in",
    "hybrid_layer_pattern": "mixes Mamba layers in",
    "is_hybrid_model": "mixes Mamba layers in",
    "heterogeneous_layers_config_path": "gives each layer its own sizes, from another file",
    "heterogeneous_layers_config_encoded_json": "gives each layer its own sizes",
    "experimental_attention_variant": "replaces the attention by a variant",
    "attention_output_gate": "widens the QKV projection by a gate",
    "head_wise_attn_gate": "widens the QKV projection by a gate",
    "moe_latent_size": "puts the experts behind a narrower projection",
}
NOT_COUNTED = {
    "mtp_num_layers": "multi-token-prediction layers, which are not included",
    "moe_expert_capacity_factor": "experts with a capacity: dropped and padded tokens are not modelled",
}
RUN_SIZES = {  # Megatron-core's name: (field of RunSpec, its limit)
    "seq_length": ("sequence_length", "sequence_length"),
    "micro_batch_size": ("micro_batch_size", "micro_batch_size"),
    "tensor_model_parallel_size": ("tp", "parallel"),
    "context_parallel_size": ("cp", "parallel"),
    "pipeline_model_parallel_size": ("pp", "parallel"),
    "expert_model_parallel_size": ("ep", "parallel"),
    "make_vocab_size_divisible_by": ("vocab_multiple", "parallel"),
}
NOT_NEEDED = {  # a run can be told otherwise, so one of these that cannot be known is left out
    *RUN_SIZES,
    *("sequence_parallel", "recompute_granularity", "global_batch_size", "world_size", "data_parallel_size"),
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout"),
    *("expert_tensor_parallel_size", "max_position_embeddings"),
}


@dataclass(frozen=True)
class Unknown:
    """A value that the file leaves open: as written, and why it cannot be known."""

    text: str
    why: str


@dataclass(frozen=True)
class Dialect:
    """How a file's user writes a setting, and the defaults that are not the same everywhere."""

    spell: Callable[[str], str]
    assign: str  # how a spelled name gets its value: "{} {}" for flags, "{}: {}" for YAML
    swiglu_keeps_parameters: bool  # the default MLP of a SwiGLU model is 2/3 as wide, to have as many parameters
    q_lora_rank: int | None
    kv_lora_rank: int
    positions: str  # the setting that says how many positions a learned embedding has


@dataclass(frozen=True)
class Settings:
    """What a file says, by Megatron-core name: text from arguments, typed values from YAML. None: not given."""

    values: Mapping[str, object]
    dialect: Dialect

    def spell(self, name: str) -> str:
        """The name as the file's user writes it."""
        return self.dialect.spell(name)

    def given(self, name: str) -> bool:
        """Whether the file sets it."""
        return self.values.get(name) is not None

    def size(self, name: str, limit: str, default: int) -> int:
        """A positive whole number, or the default."""
        return self.maybe_size(name, limit) or default

    def maybe_size(self, name: str, limit: str) -> int | None:
        """A positive whole number where given."""
        if not self.given(name):
            return None
        return check_size(self.spell(name), whole_number(self.spell(name), self.values[name]), limit)

    def maybe_count(self, name: str, limit: str) -> int | None:
        """Like `maybe_size`, where 0 says that there is none."""
        if self.given(name) and whole_number(self.spell(name), self.values[name]) == 0:
            return None
        return self.maybe_size(name, limit)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Yes or no."""
        value = self.values.get(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        word = {"true": True, "1": True, "false": False, "0": False}.get(self.text(name).lower())
        if word is None:
            raise UserError(f"{self.spell(name)} is yes or no, not {shown(value)}", "write true or false")
        return word

    def text(self, name: str, default: str = "") -> str:
        """Text where the file has text."""
        value = self.values.get(name)
        return value.strip() if isinstance(value, str) else default

    def word(self, name: str, known: Sequence[str], default: str) -> str:
        """One of the known words, whatever its case."""
        if not self.given(name):
            return default
        for each in known:
            if self.text(name).lower() == each.lower():
                return each
        raise UserError(f"{self.spell(name)} is {shown(self.values[name])}", f"it can be {' or '.join(known)}")

    def pattern(self, name: str, layers: int) -> int | list[int] | None:
        """Which layers: every N-th (a number), or one 0 or 1 for each (a list, which may be a Python expression)."""
        if not self.given(name):
            return None
        what = self.spell(name)
        found = numbers(what, self.values[name])
        if isinstance(found, int):
            return check_size(what, found, "layers")
        if len(found) != layers or set(found) - {0, 1}:
            raise UserError(
                f"{what} lists {len(found)} layers, but {self.spell('num_layers')} is {layers}"
                if len(found) != layers
                else f"{what} holds other numbers than 0 and 1",
                f"one 0 or 1 for each of the {layers} layers, such as ([0]*1+[1]*{layers - 1}); or N: every N-th layer",
            )
        return found


def model_source(settings: Settings, origin: str, notes: Sequence[str] = (), strangers: Collection[str] = ()) -> ModelSource:
    """The model and run that the settings describe.

    `strangers` are names in the file that mean nothing here: one of them may be the misspelling of a missing setting.
    """
    left_out = [name for name in settings.values if name in NOT_NEEDED and isinstance(settings.values[name], Unknown)]
    notes = [*notes, *(f"{settings.spell(name)} is left out: {shown(settings.values[name])}" for name in left_out)]
    settings = Settings({**settings.values, **dict.fromkeys(left_out)}, settings.dialect)
    _refuse_what_cannot_be_described(settings)
    _require_sizes(settings, strangers)
    model = _model(settings, origin)
    run = _run_settings(settings, model)
    found = dict.fromkeys(chain(notes, _notes(settings, model, run)))
    return ModelSource(origin=origin, model=model, run_settings=run, notes=tuple(found))


# ---- the model


def _refuse_what_cannot_be_described(settings: Settings) -> None:
    for name, meaning in NOT_DESCRIBABLE.items():
        if settings.values.get(name) not in (None, False, "False", "false", ""):
            raise UserError(
                f"{settings.spell(name)} {meaning}: that cannot be read from a file",
                "trace the model itself: --module file.py:factory",
            )


def _require_sizes(settings: Settings, strangers: Collection[str]) -> None:
    missing = [name for name in REQUIRED if not settings.given(name)]
    if not missing:
        return
    wanted = [settings.spell(name) for name in missing]
    meant = [f"{near[0]} (did you mean {name}?)" for name in wanted if (near := _slips(name, strangers))]
    add = ", ".join(settings.dialect.assign.format(settings.spell(name), REQUIRED[name]) for name in missing)
    raise UserError(
        f"no {' and no '.join(wanted)} in the file" + (f", but {', '.join(meant)}" if meant else ""),
        f"add for example {add}",
    )


def _slips(wanted: str, strangers: Collection[str]) -> list[str]:
    """Names so like the wanted one that they may be meant for it: --hiden-size, but not --hidden-dropout."""
    return [near for near in closest(wanted, strangers) if SequenceMatcher(None, near, wanted).ratio() > 0.8]


def _model(settings: Settings, origin: str) -> ModelSpec:
    count = settings.size("num_layers", "layers", 0)
    hidden = settings.size("hidden_size", "hidden_size", 0)
    norm = settings.word("normalization", ("LayerNorm", "RMSNorm"), "LayerNorm")
    learned = settings.text("position_embedding_type", "learned_absolute") == "learned_absolute"
    dense, moe = _dense_mlp(settings, hidden), _moe_mlp(settings, hidden)
    is_moe = _moe_layers(settings, count) if moe else [False] * count
    full, near = _attention(settings, hidden, None), _attention(settings, hidden, _window(settings))
    return ModelSpec(
        name=PurePath(origin).stem or "Megatron model",
        hidden_size=hidden,
        layers=tuple(
            LayerSpec(near if windowed else full, moe if moe and expert else dense)
            for windowed, expert in zip(_windowed_layers(settings, count), is_moe, strict=True)
        ),
        vocab_size=settings.maybe_size("vocab_size", "vocab_size"),
        norm=NormSpec("rmsnorm") if norm == "RMSNorm" else NormSpec("layernorm", bias=True),
        tied_embeddings=settings.flag("share_embeddings_and_output_weights", default=True),
        positions=(settings.maybe_size(settings.dialect.positions, "sequence_length") or 0) if learned else 0,
        source=origin,
    )


def _attention(settings: Settings, hidden: int, window: int | None) -> AttentionSpec:
    heads = settings.size("num_attention_heads", "heads", 0)
    bias = settings.flag("add_bias_linear", default=True)
    rotary = settings.text("position_embedding_type") in ("rope", "mrope", "yarn")
    sinks = settings.word("softmax_type", ("vanilla", "off-by-one", "learnable"), "vanilla") == "learnable"
    if settings.flag("multi_latent_attention"):
        rope = settings.size("qk_pos_emb_head_dim", "head_dim", 64)
        return AttentionSpec(
            heads=heads,
            kv_heads=heads,
            head_dim=settings.size("qk_head_dim", "head_dim", 128) + rope,
            value_dim=settings.size("v_head_dim", "head_dim", 128),
            out_bias=bias,
            window=window,
            sinks=sinks,
            latent=LatentSpec(
                q_rank=settings.maybe_size("q_lora_rank", "hidden_size")
                if "q_lora_rank" in settings.values
                else settings.dialect.q_lora_rank,
                kv_rank=settings.size("kv_lora_rank", "hidden_size", settings.dialect.kv_lora_rank),
                rope_dim=rope,
            ),
        )
    groups = settings.size("num_query_groups", "heads", heads)
    if heads % groups:
        raise UserError(
            f"{settings.spell('num_attention_heads')} = {heads} is not a multiple of "
            f"{settings.spell('num_query_groups')} = {groups}",
            f"query groups that fit {heads} heads: {divisors_text(heads)}",
        )
    qkv_bias = bias or settings.flag("add_qkv_bias")
    qk_norm = settings.flag("qk_layernorm")
    return AttentionSpec(
        heads=heads,
        kv_heads=groups,
        head_dim=_head_dim(settings, hidden, heads),
        q_bias=qkv_bias,
        k_bias=qkv_bias,
        v_bias=qkv_bias,
        out_bias=bias,
        window=window,
        qk_norm="head" if qk_norm else None,
        qk_norm_bias=qk_norm and settings.word("normalization", ("LayerNorm", "RMSNorm"), "LayerNorm") == "LayerNorm",
        sinks=sinks,
        rotary=rotary,
    )


def _head_dim(settings: Settings, hidden: int, heads: int) -> int:
    given = settings.maybe_size("kv_channels", "head_dim")
    if given is None and hidden % heads:
        raise UserError(
            f"{settings.spell('hidden_size')} = {hidden} is not a multiple of "
            f"{settings.spell('num_attention_heads')} = {heads}, and there is no {settings.spell('kv_channels')}",
            f"heads that divide {hidden}: {divisors_text(hidden)}; or add "
            + settings.dialect.assign.format(settings.spell("kv_channels"), 128),
        )
    return given or hidden // heads


def _dense_mlp(settings: Settings, hidden: int) -> MlpSpec:
    gated, activation = settings.flag("gated_linear_unit"), settings.text("activation_func", "gelu")
    width = settings.maybe_size("ffn_hidden_size", "intermediate_size")
    if width is None:
        narrow = settings.dialect.swiglu_keeps_parameters and gated and activation == "silu"
        width = int((4 * hidden * 2 / 3) / 64) * 64 if narrow else 4 * hidden
        what = f"{settings.spell('ffn_hidden_size')} (by default from {settings.spell('hidden_size')} = {hidden})"
        check_size(what, width, "intermediate_size")
    bias = settings.flag("add_bias_linear", default=True)
    return MlpSpec(width, gated=gated, activation=activation, up_bias=bias, down_bias=bias)


def _moe_mlp(settings: Settings, hidden: int) -> MoeSpec | None:
    experts = settings.maybe_count("num_moe_experts", "experts")
    if experts is None:
        return None
    top_k = settings.size("moe_router_topk", "experts", 2)
    if top_k > experts:
        raise UserError(
            f"{settings.spell('moe_router_topk')} = {top_k}, but {settings.spell('num_moe_experts')} = {experts}",
            "for example " + settings.dialect.assign.format(settings.spell("moe_router_topk"), experts),
        )
    dense = _dense_mlp(settings, hidden)
    width = settings.size("moe_ffn_hidden_size", "intermediate_size", dense.intermediate_size)
    shared = settings.maybe_count("moe_shared_expert_intermediate_size", "intermediate_size")

    def mlp(size: int, *, fused: bool) -> MlpSpec:
        return MlpSpec(size, dense.gated, dense.activation, dense.up_bias, dense.down_bias, stored_fused=fused)

    return MoeSpec(
        experts=experts,
        top_k=top_k,
        expert=mlp(width, fused=True),
        shared=mlp(shared, fused=False) if shared else None,
        shared_gate=bool(shared) and settings.flag("moe_shared_expert_gate"),
        router_bias=dense.up_bias,
    )


def _moe_layers(settings: Settings, layers: int) -> list[bool]:
    pattern = settings.pattern("moe_layer_freq", layers) or 1
    if isinstance(pattern, int):
        return [layer % pattern == 0 for layer in range(layers)]
    return [bool(each) for each in pattern]


def _window(settings: Settings) -> int | None:
    """How many positions a query sees, itself among them. Megatron counts those before it, and -1 is all."""
    if not settings.given("window_size"):
        return None
    what = settings.spell("window_size")
    found = numbers(what, settings.values["window_size"])
    left = found if isinstance(found, int) else found[0] if len(found) == 2 else -2
    if left < -1:
        raise UserError(f"{what} is not two numbers (positions before, positions after)", "for example 4096,0")
    return None if left == -1 else check_size(what, left + 1, "sequence_length")


def _windowed_layers(settings: Settings, layers: int) -> list[bool]:
    """Every N-th layer sees the whole sequence, or those with a 0 in the list."""
    pattern = settings.pattern("window_attn_skip_freq", layers)
    if pattern is None:
        return [True] * layers
    if isinstance(pattern, int):
        return [(layer + 1) % pattern != 0 for layer in range(layers)]
    return [bool(each) for each in pattern]


# ---- the run


def _run_settings(settings: Settings, model: ModelSpec) -> dict[str, Any]:
    run: dict[str, Any] = {}
    for name, (field, limit) in RUN_SIZES.items():
        value = settings.maybe_size(name, limit)
        if value is not None:
            run[field] = value
    if settings.given("sequence_parallel"):
        run["sequence_parallel"] = settings.flag("sequence_parallel")
    if settings.given("recompute_granularity"):
        run["recompute"] = settings.word("recompute_granularity", ("selective", "full"), "")
    stages = _stage_layers(settings, len(model.layers), run.get("pp", 1))
    if stages:
        run["pp_layers"] = stages
    steps = _accumulation(settings, run)
    if steps:
        run["gradient_accumulation"] = steps
    return run


def _stage_layers(settings: Settings, layers: int, stages: int) -> tuple[int, ...] | None:
    """Layers of each pipeline stage, where the file splits them unevenly."""
    if stages == 1:
        return None
    if settings.given("pipeline_model_parallel_layout"):
        return _layout(settings, layers, stages)
    first = settings.maybe_size("num_layers_in_first_pipeline_stage", "layers")
    last = settings.maybe_size("num_layers_in_last_pipeline_stage", "layers")
    if first or last:
        rest, others = layers - (first or 0) - (last or 0), stages - bool(first) - bool(last)
        if rest < 0 or (rest % others if others else rest):
            raise UserError(
                f"the first and last pipeline stage hold {(first or 0) + (last or 0)} of {layers} layers; "
                f"the other {rest} cannot be shared equally by {others} stages",
                f"change {settings.spell('num_layers_in_first_pipeline_stage')} or "
                f"{settings.spell('num_layers_in_last_pipeline_stage')}",
            )
        middle = (rest // others,) * others if others else ()
        return (*((first,) if first else ()), *middle, *((last,) if last else ()))
    embedding = settings.flag("account_for_embedding_in_pipeline_split")
    loss = settings.flag("account_for_loss_in_pipeline_split")
    if not (embedding or loss):
        return None
    each, left_over = divmod(layers + embedding + loss, stages)
    if left_over:
        raise UserError(
            f"{layers} layers with embedding and loss counted as one each do not divide over {stages} stages",
            f"pipeline sizes that fit: {divisors_text(layers + embedding + loss)}",
        )
    return (each - embedding, *(each,) * (stages - 2), each - loss)


def _layout(settings: Settings, layers: int, stages: int) -> tuple[int, ...]:
    """`Et*3|(tt|)*29,m|L`, or a list of lists: part i goes to stage i modulo the number of stages; t is a layer."""
    value = settings.values["pipeline_model_parallel_layout"]
    parts: list[int] = []
    if isinstance(value, list) and sum(len(part) for part in value if isinstance(part, list)) <= LARGEST["layers"] * 3:
        parts = [sum(each in ("decoder", "t") for each in part) for part in value if isinstance(part, list)]
    elif isinstance(value, str) and len(value) <= 2000:
        flat = value.replace(",", "")
        for unit in (r"\(([^()]+)\)\*([0-9]{1,4})", r"([Etm|L])\*([0-9]{1,4})"):
            flat = re.sub(unit, lambda found: found[1] * int(found[2]), flat)
        if not set(flat) - set("EtmL|"):
            parts = [part.count("t") for part in flat.split("|")]
    if not parts or len(parts) % stages or sum(parts) != layers:
        raise UserError(
            f"{settings.spell('pipeline_model_parallel_layout')} is {shown(value)}: {len(parts)} parts with "
            f"{sum(parts)} layers, for {stages} stages and {layers} layers",
            "parts separated by |, each with E (embedding), t (a layer), m or L (loss), as in Et|(tt|)*14t|L",
        )
    return tuple(sum(parts[stage::stages]) for stage in range(stages))


def _ranks(settings: Settings, run: Mapping[str, Any]) -> int | None:
    """Data-parallel ranks, where the file knows how many GPUs there are."""
    world = settings.maybe_size("world_size", "parallel")
    if world is None:
        return settings.maybe_size("data_parallel_size", "parallel")
    model_ranks = run.get("tp", 1) * run.get("pp", 1) * run.get("cp", 1)
    return None if world % model_ranks else int(world // model_ranks)


def _accumulation(settings: Settings, run: Mapping[str, Any]) -> int | None:
    samples, ranks = settings.maybe_size("global_batch_size", "vocab_size"), _ranks(settings, run)
    if not samples or not ranks or "micro_batch_size" not in run:
        return None
    steps, left_over = divmod(samples, ranks * run["micro_batch_size"])
    return None if left_over or steps > LARGEST["parallel"] else steps


# ---- what the reader of the result should know


def _notes(settings: Settings, model: ModelSpec, run: Mapping[str, Any]) -> Iterator[str]:
    spell = settings.spell
    if model.vocab_size is None:
        yield f"the file gives no {spell('vocab_size')}: embedding and output head are left out"
    if not settings.given("ffn_hidden_size"):
        width = _dense_mlp(settings, model.hidden_size).intermediate_size
        yield f"{spell('ffn_hidden_size')} is not given: {width}, Megatron's default"
    for name, meaning in NOT_COUNTED.items():
        if settings.values.get(name) not in (None, 0, "0", False):
            yield f"{spell(name)} asks for {meaning}"
    if settings.given("global_batch_size") and "gradient_accumulation" not in run:
        yield (
            f"{spell('global_batch_size')} is given, but the micro-batches per step do not follow from the file: "
            "gradient accumulation is left at its default"
        )
    if any(layer.is_moe for layer in model.layers):
        expert_tp, tp = settings.maybe_size("expert_tensor_parallel_size", "parallel"), run.get("tp", 1)
        if expert_tp not in (None, tp):
            yield (
                f"{spell('expert_tensor_parallel_size')} = {expert_tp} is not modelled: "
                f"the experts are split like the rest, by tensor parallelism {tp}"
            )
    yield from _recompute_notes(settings, run)


def _recompute_notes(settings: Settings, run: Mapping[str, Any]) -> Iterator[str]:
    modules = settings.values.get("recompute_modules")
    named = set(re.findall(r"\w+", modules)) if isinstance(modules, str) else set()
    if isinstance(modules, list):
        named = {each for each in modules if isinstance(each, str)}
    named -= {"core_attn", "None"}
    if run.get("recompute") == "selective" and named:
        yield (
            f"{settings.spell('recompute_modules')}: recomputing {', '.join(sorted(named))[:100]} is not modelled, "
            "only that of attention"
        )
    if run.get("recompute") == "full" and settings.values.get("recompute_method") == "block":
        yield f"{settings.spell('recompute_method')} block recomputes only some layers: all are counted as recomputed"


# ---- values


def shown(value: object) -> str:
    """A value as it may stand in a message: short, whatever it is."""
    if isinstance(value, Unknown):
        return f"{value.text[:60]}, which is not known: {value.why}"
    if isinstance(value, (list, tuple, dict, set)):  # never written out: aliases make a short file an endless value
        return "a mapping" if isinstance(value, dict) else "a list"
    return errors.shown(value)


def whole_number(what: str, value: object) -> int:
    """A whole number, from text or as it is.

    >>> whole_number("--num-layers", "32")
    32
    """
    if isinstance(value, Unknown):
        raise UserError(f"{what} is {shown(value)}", f"write the number itself after {what}")
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9][0-9_]{0,17}", value.strip()):
        return int(value.strip().replace("_", ""))
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18:
        return value
    raise UserError(f"{what} must be a whole number, not {shown(value)}", f"for example {what} 4096")


def numbers(what: str, value: object) -> int | list[int]:
    """A whole number or a list of them, from YAML or from text that may be a Python expression."""
    if isinstance(value, (list, tuple)) and len(value) <= LARGEST["layers"]:
        return [whole_number(f"each number of {what}", each) for each in value]
    if not isinstance(value, str):
        return whole_number(what, value)
    try:
        return evaluate(value)
    except ValueError:
        raise UserError(
            f"{what} must be a number or a list of numbers, not {shown(value)}", "for example 1, or ([0]*3+[1]*58)"
        ) from None


def evaluate(text: str) -> int | list[int]:
    """The value of an expression of numbers, lists, + - * / and parentheses, without executing it; else ValueError.

    >>> evaluate("([0]*2+[1])*2")
    [0, 0, 1, 0, 0, 1]
    """
    # Depth of the syntax tree is bounded before Python's parser sees the text: it recurses.
    if not re.fullmatch(r"[0-9\[\]()+*/,\s-]{1,100000}", text) or sum(map(text.count, "+-*/([")) > 200:
        raise ValueError("not such an expression")
    try:
        return _value_of(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError, TypeError) as error:
        raise ValueError("not such an expression") from error


def _value_of(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 10**12:
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_whole(_value_of(each)) for each in node.elts]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_whole(_value_of(node.operand))
    if isinstance(node, ast.BinOp):
        return _combine(node.op, _value_of(node.left), _value_of(node.right))
    raise ValueError("not a number, a list or a sum or product of them")


def _combine(op: ast.operator, left: int | list[int], right: int | list[int]) -> int | list[int]:
    if isinstance(op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    if isinstance(op, ast.Mult) and isinstance(right, list) and isinstance(left, int):
        left, right = right, left
    if isinstance(op, ast.Mult) and isinstance(left, list):
        if len(left) * _whole(right) > LARGEST["layers"]:
            raise ValueError("a list longer than any model has layers")
        return left * _whole(right)
    a, b = _whole(left), _whole(right)
    if isinstance(op, ast.Div | ast.FloorDiv) and b:
        return a // b
    results = {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b}
    if type(op) not in results or abs(results[type(op)]) > 10**12:
        raise ValueError("not a sum or product of whole numbers")
    return results[type(op)]


def _whole(value: int | list[int]) -> int:
    if isinstance(value, list):
        raise ValueError("a list where a number is needed")  # noqa: TRY004 - one exception for every wrong text
    return value
