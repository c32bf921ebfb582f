"""Megatron-LM arguments: a launch script or command line (`--num-layers 32`), or what Megatron prints when it starts
(`num_layers ..... 32`).

A script is not run. Its words are taken in order, quotes and comments understood, and every flag counts wherever it stands:
in the command, in an array, in a string. Variables that the script sets are filled in; one that it does not set (or sets
differently in the branches of an `if`) matters only where a size depends on it.

What the flags mean is told in `megatron_args`; here they are only brought from Megatron-LM's names to Megatron-core's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gemmscope.errors import UserError, closest
from gemmscope.model.megatron_args import REQUIRED, Dialect, Settings, Unknown, evaluate, model_source
from gemmscope.model.source import ModelSource

SAME_NAME = """
num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size max_position_embeddings
position_embedding_type normalization make_vocab_size_divisible_by softmax_type window_size window_attn_skip_freq
moe_ffn_hidden_size moe_router_topk moe_shared_expert_intermediate_size moe_layer_freq moe_latent_size
moe_expert_capacity_factor mtp_num_layers q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
seq_length micro_batch_size global_batch_size world_size data_parallel_size tensor_model_parallel_size
context_parallel_size pipeline_model_parallel_size pipeline_model_parallel_layout expert_model_parallel_size
expert_tensor_parallel_size recompute_granularity recompute_modules recompute_method hybrid_override_pattern
hybrid_layer_pattern heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json
experimental_attention_variant
""".split()
OTHER_NAME = {  # Megatron-LM: Megatron-core
    "num_experts": "num_moe_experts",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
ONLY_HERE = ("encoder_num_layers", "encoder_seq_length", "padded_vocab_size")
SWITCHES = """
group_query_attention add_bias_linear add_qkv_bias qk_layernorm multi_latent_attention moe_shared_expert_gate
attention_output_gate head_wise_attn_gate is_hybrid_model sequence_parallel account_for_embedding_in_pipeline_split
account_for_loss_in_pipeline_split swiglu squared_relu quick_geglu untie_embeddings_and_output_weights
use_rotary_position_embeddings add_position_embedding recompute_activations
""".split()
OFF_SWITCHES = {"disable_bias_linear": "add_bias_linear", "no_position_embedding": "add_position_embedding"}
SWITCHES_TO_CORE = (  # Megatron-LM's switch, and what it sets
    ("swiglu", {"gated_linear_unit": True, "activation_func": "silu"}),
    ("quick_geglu", {"gated_linear_unit": True, "activation_func": "quick_gelu"}),
    ("squared_relu", {"activation_func": "relu2"}),
    ("untie_embeddings_and_output_weights", {"share_embeddings_and_output_weights": False}),
    ("use_rotary_position_embeddings", {"position_embedding_type": "rope"}),
    ("recompute_activations", {"recompute_granularity": "selective"}),
)
VALUED = frozenset([*SAME_NAME, *OTHER_NAME, *ONLY_HERE])
KNOWN = VALUED | {*SWITCHES, *OFF_SWITCHES}
ALIKE_BUT_OTHER = {"decoder_num_layers", "decoder_seq_length"}  # real flags that are not slips of the known ones
TELLTALE = {*REQUIRED, "ffn_hidden_size", "tensor_model_parallel_size", "micro_batch_size", "seq_length"}


@dataclass
class Found:
    """What a text says, by Megatron-LM's names, while it is being collected."""

    values: dict[str, object] = field(default_factory=dict)
    strangers: list[str] = field(default_factory=list)
    repeated: dict[str, None] = field(default_factory=dict)
    branched: dict[str, None] = field(default_factory=dict)

    def put(self, name: str, value: object, *, in_branch: bool = False) -> None:
        """The last value wins, as for argparse."""
        if self.values.get(name, value) != value:
            self.repeated[name] = None
        if in_branch:
            self.branched[name] = None
        self.values[name] = value


def recognises(text: str) -> bool:
    """Whether the text holds Megatron-LM arguments, as flags or as the printed list.

    >>> recognises("torchrun pretrain_gpt.py --num-layers 32"), recognises("  num_layers ........ 32")
    (True, True)
    """
    flags = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z_-]*)", text)}
    return bool(TELLTALE & flags) or bool(TELLTALE & _read_dump(text).values.keys())


def read(text: str, origin: str) -> ModelSource:
    """The model and run of a script, a command line or a printed list of arguments.

    >>> read("--num-layers 2 --hidden-size 64 --num-attention-heads 4", "args").model.pattern()
    '2 dense'
    """
    printed = _read_dump(text)
    if TELLTALE & printed.values.keys():
        return _source(printed, origin, lambda name: name, "{} ........ {}", "the list is printed again with another")
    found = _read_flags(text)
    if not found.values:
        raise UserError(
            f"{origin}: no Megatron-LM arguments in it",
            "flags such as --num-layers 32 --hidden-size 4096, or the list that Megatron prints: num_layers ..... 32",
        )
    return _source(found, origin, lambda name: "--" + name.replace("_", "-"), "{} {}", "given more than once, with another")


def _source(found: Found, origin: str, spell_here: object, assign: str, again: str) -> ModelSource:
    assert callable(spell_here)
    to_here = {core: here for here, core in OTHER_NAME.items()}

    def spell(name: str) -> str:
        return str(spell_here(to_here.get(name, name)))

    dialect = Dialect(
        spell, assign, swiglu_keeps_parameters=True, q_lora_rank=None, kv_lora_rank=32, positions="max_position_embeddings"
    )
    notes = [f"{spell(name)} is {again} value: the last one counts" for name in found.repeated]
    if found.branched:
        names = ", ".join(map(spell, found.branched))
        notes.append(f"inside a condition of the script, taken as if it held: {names}")
    strangers = list(dict.fromkeys(map(str, map(spell_here, found.strangers))))
    notes += [f"{slip} is ignored; did you mean {meant}?" for slip, meant in _slips(strangers, map(spell, KNOWN))]
    return model_source(Settings(_to_core(found.values), dialect), origin, notes, strangers)


def _slips(strangers: list[str], known: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Unknown names a letter or two away from a known one."""
    names = sorted(known)
    for stranger in strangers[:200]:
        for near in closest(stranger, [name for name in names if abs(len(name) - len(stranger)) <= 2], 1):
            if sum(a != b for a, b in zip(sorted(stranger), sorted(near), strict=False)) <= len(near) // 3:
                yield stranger, near


def _to_core(given: Mapping[str, object]) -> dict[str, object]:
    """The same settings under Megatron-core's names, as Megatron-LM translates its arguments."""
    core = {OTHER_NAME.get(name, name): value for name, value in given.items()}
    core.setdefault("make_vocab_size_divisible_by", 128)
    for here, fallback in (("num_layers", "encoder_num_layers"), ("seq_length", "encoder_seq_length")):
        if core.get(here) is None:
            core[here] = core.get(fallback)
    if given.get("group_query_attention"):
        core.setdefault("num_query_groups", 1)
    else:
        core.pop("num_query_groups", None)
    for switch, settings in SWITCHES_TO_CORE:
        if given.get(switch) is True:
            core.update(settings)
    if given.get("vocab_size") is None and given.get("padded_vocab_size") is not None:
        core["vocab_size"], core["make_vocab_size_divisible_by"] = given["padded_vocab_size"], 1
    return core


# ---- the printed list


def _read_dump(text: str) -> Found:
    found = Found()
    words = {"True": True, "False": False, "None": None}
    for line in text.splitlines():
        before, dots, after = line.partition(" ..")
        if dots and before.strip():
            name = re.split(r"[:\]|>]", before.split()[-1])[-1]
            value = after.lstrip(".").strip()
            if name in KNOWN:
                found.put(name, words.get(value, value))
            elif name.isidentifier() and len(found.strangers) < 1000:
                found.strangers.append(name)
        padded = re.search(r"padded vocab \(size: ([0-9]{1,12})\)", line)
        if padded:  # the tokenizer's size, before padding, printed after the arguments
            found.values.setdefault("vocab_size", None)
            found.values["vocab_size"] = found.values["vocab_size"] or padded[1]
    return found


# ---- flags


PART = re.compile(
    r"""(?P<gap>\\[ \t]*\r?\n|[^\S\n]+)        # a continued line is a space
      | (?P<end>[\n;&|]+)                        # of a command
      | '(?P<single>[^']*)'
      | "(?P<double>(?:[^"\\]|\\.)*)"
      | (?P<expansion>\$\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\$\((?:[^()]|\([^()]*(?:\([^()]*\)[^()]*)*\))*\))
      | \\(?P<escaped>.)
      | (?P<comment>\#)
      | (?P<plain>[^\s'"\\$#;&|]+|.)""",
    re.VERBOSE | re.DOTALL,
)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$\{?(?P<name>\w+)(?:(?<=\w)(?P<op>:?[-=])(?P<default>[^{}]*(?:\{[^{}]*\}[^{}]*)*))?\}?")


@dataclass(frozen=True)
class Word:
    """A word of a script, without its quotes. `opens`: it stands where a command begins."""

    text: str
    quoted: bool
    opens: bool


def words_of(text: str) -> Iterator[Word]:
    """The words of a shell script, comments left out.

    >>> [word.text for word in words_of("A=( --x 'a b' ) # no")]
    ['A=(', '--x', 'a b', ')']
    """
    parts: list[str] = []
    quoted, opens, at = False, True, 0
    while at < len(text):
        part = PART.match(text, at)
        assert part is not None  # the last alternative matches any character
        at = part.end()
        kind = part.lastgroup or ""
        if kind in ("gap", "end"):
            if parts or quoted:
                yield Word("".join(parts), quoted, opens)
                parts, quoted, opens = [], False, False
            opens = opens or kind == "end"
        elif kind == "comment" and not parts and not quoted:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        else:
            quoted = quoted or kind in ("single", "double")
            parts.append(part[kind].replace('\\"', '"') if kind == "double" else part[kind])
    if parts or quoted:
        yield Word("".join(parts), quoted, opens)
