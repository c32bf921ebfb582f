"""Megatron-LM arguments: a launch script or command line (`--num-layers 32`), or what Megatron prints when it starts
(`num_layers ..... 32`).

A script is not run. Its words are taken in order, quotes and comments understood, and every flag counts wherever it
stands: in the command, in an array, in a string. Variables that the script sets are filled in; one that it does not set
(or sets differently in the branches of an `if`) matters only where a size depends on it.

What the flags mean is told in `megatron_args`; here they are only brought from Megatron-LM's names to Megatron-core's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from gemmscope.errors import UserError
from gemmscope.model.megatron_args import REQUIRED, model_source
from gemmscope.model.megatron_values import Dialect, Settings, Unknown, evaluate
from gemmscope.model.source import ModelSource


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SAME_NAME = _names("""
num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size
max_position_embeddings position_embedding_type normalization make_vocab_size_divisible_by softmax_type window_size
window_attn_skip_freq
moe_ffn_hidden_size moe_router_topk moe_shared_expert_intermediate_size moe_layer_freq moe_latent_size
moe_expert_capacity_factor mtp_num_layers q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
seq_length micro_batch_size global_batch_size world_size data_parallel_size tensor_model_parallel_size
context_parallel_size pipeline_model_parallel_size pipeline_model_parallel_layout virtual_pipeline_model_parallel_size
num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank expert_model_parallel_size
expert_tensor_parallel_size recompute_granularity recompute_modules recompute_method hybrid_override_pattern
hybrid_layer_pattern heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json
experimental_attention_variant
""")
OTHER_NAME = {  # Megatron-LM: Megatron-core
    "num_experts": "num_moe_experts",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
ONLY_HERE = ("encoder_num_layers", "encoder_seq_length", "padded_vocab_size")
SWITCHES = _names("""
group_query_attention add_bias_linear add_qkv_bias qk_layernorm multi_latent_attention moe_shared_expert_gate
attention_output_gate head_wise_attn_gate is_hybrid_model sequence_parallel account_for_embedding_in_pipeline_split
account_for_loss_in_pipeline_split swiglu squared_relu quick_geglu untie_embeddings_and_output_weights
use_rotary_position_embeddings add_position_embedding recompute_activations
""")
OFF_SWITCHES = {"disable_bias_linear": "add_bias_linear", "no_position_embedding": "add_position_embedding"}
SWITCHES_TO_CORE = (  # Megatron-LM's switch, and what it sets
    ("swiglu", {"gated_linear_unit": True, "activation_func": "silu"}),
    ("quick_geglu", {"gated_linear_unit": True, "activation_func": "quick_gelu"}),
    ("squared_relu", {"activation_func": "relu2"}),
    ("untie_embeddings_and_output_weights", {"share_embeddings_and_output_weights": False}),
    ("use_rotary_position_embeddings", {"position_embedding_type": "rope"}),
    ("recompute_activations", {"recompute_granularity": "selective"}),
)
VALUED = SAME_NAME | {*OTHER_NAME, *ONLY_HERE}
KNOWN = VALUED | SWITCHES
ALIKE_BUT_OTHER = {
    "decoder_num_layers",
    "decoder_seq_length",
    "o_lora_rank",
}  # real flags that are not slips of the known ones
RECOMPUTE_MODULES = _names("core_attn moe_act layernorm mla_up_proj mlp moe shared_experts")  # several may follow the flag
TELLTALE = {*REQUIRED, "ffn_hidden_size", "tensor_model_parallel_size", "micro_batch_size", "seq_length"}


@dataclass
class Found:
    """What a text says, by Megatron-LM's names, while it is being collected."""

    values: dict[str, object] = field(default_factory=dict)
    strangers: dict[str, None] = field(default_factory=dict)  # flags that mean nothing here, in order
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
        return _source(printed, origin, lambda name: name, "{} ........ {}")
    found = _read_flags(text)
    if not found.values:
        raise UserError(
            f"{origin}: no Megatron-LM arguments in it",
            "flags such as --num-layers 32 --hidden-size 4096, or the list that Megatron prints: num_layers ..... 32",
        )
    return _source(found, origin, lambda name: "--" + name.replace("_", "-"), "{} {}")


def _source(found: Found, origin: str, spell_here: Callable[[str], str], assign: str) -> ModelSource:
    to_here = {core: here for here, core in OTHER_NAME.items()}

    def spell(name: str) -> str:
        return spell_here(to_here.get(name, name))

    dialect = Dialect(
        spell,
        assign,
        swiglu_keeps_parameters=True,
        q_lora_rank=None,
        kv_lora_rank=32,
        positions="max_position_embeddings",
    )
    notes = [f"{spell(name)} is given more than once: the last value counts" for name in found.repeated]
    if found.branched:
        notes.append(f"taken although inside a condition of the script: {', '.join(map(spell, found.branched))}")
    notes += [f"{spell(slip)} is ignored; did you mean {spell(meant)}?" for slip, meant in _slips(found.strangers)]
    return model_source(Settings(_to_core(found.values), dialect), origin, notes, [*map(spell, found.strangers)])


def _slips(strangers: Mapping[str, None]) -> Iterator[tuple[str, str]]:
    """Unknown names a letter or two away from a known one."""
    for stranger in strangers:
        near = difflib.get_close_matches(stranger, VALUED, n=1, cutoff=0.9)
        if near and stranger not in ALIKE_BUT_OTHER and len(strangers) < 300:
            yield stranger, near[0]


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
    if given.get("add_position_embedding") is False:
        core.setdefault("position_embedding_type", "none")
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
            name = re.split(r"[:\]|>]", before.split()[-1])[-1]  # after a rank or a time
            value = after.lstrip(".").strip()
            if name in KNOWN:
                found.put(name, words.get(value, value))
    padded = re.search(r"padded vocab \(size: ([0-9]{1,12})\)", text)
    if padded and found.values.get("vocab_size", 0) is None:  # the tokenizer's size, printed after the arguments
        found.values["vocab_size"] = padded[1]
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
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)(?::?[-=]([^{}]*(?:\{[^{}]*\}[^{}]*)*))?\}")
ARITHMETIC = re.compile(r"\$\(\(([^$]*)\)\)")
NAME_IN_ARITHMETIC = re.compile(r"[A-Za-z_]\w*")
LONGEST_VALUE = 1000  # of a variable: longer ones hold lists of flags, never a size


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


@dataclass
class Shell:
    """The variables of a script, as far as it sets them itself."""

    values: dict[str, str] = field(default_factory=dict)
    seen: dict[str, dict[str, None]] = field(default_factory=dict)  # every value a name was given
    open_names: set[str] = field(default_factory=set)  # those that depend on a condition

    def assign(self, name: str, value: str, *, in_branch: bool) -> None:
        """Remember a value; one that a condition may replace by another is not known."""
        filled = self.fill_in(value) if len(value) <= LONGEST_VALUE else ""
        self.values[name] = filled if len(filled) <= LONGEST_VALUE else ""
        self.seen.setdefault(name, {})[self.values[name]] = None
        if in_branch:
            self.open_names.add(name)

    def value(self, name: str) -> str | None:
        """What the script says this variable is, if it says one thing."""
        return None if name in self.open_names and len(self.seen[name]) > 1 else self.values.get(name)

    def fill_in(self, text: str) -> str:
        """The text with its variables and sums replaced where they are known; what is not keeps its $."""
        for _ in range(3):  # a default may hold a variable itself
            text = VARIABLE.sub(lambda found: self._replacement(found), text)
        return ARITHMETIC.sub(lambda found: self._result(found), text)

    def _replacement(self, found: re.Match[str]) -> str:
        value = self.value(found[1] or found[2])
        if value is None and found[2] not in self.open_names:
            value = found[3]  # the default of ${NAME:-default}
        return found[0] if value is None else value[:LONGEST_VALUE]

    def _result(self, found: re.Match[str]) -> str:
        try:
            return str(evaluate(NAME_IN_ARITHMETIC.sub(lambda name: self.value(name[0]) or name[0], found[1])))
        except ValueError:
            return found[0]

    def resolve(self, text: str) -> str | Unknown:
        """The value of an argument."""
        if len(text) > 100 * LONGEST_VALUE:
            return Unknown(text, "it is too long")
        filled = self.fill_in(text)
        if "$" not in filled and "`" not in filled:
            return filled
        for name in NAME_IN_ARITHMETIC.findall(filled):
            if name in self.open_names:
                values = " or ".join(list(self.seen[name])[:6])
                return Unknown(text, f"{name} is {values}, depending on a condition of the script")
        return Unknown(text, "the text does not set it")


def _read_flags(text: str) -> Found:
    found = Found()
    _collect(text, Shell(), found, in_branch=False, depth=0)
    return found


def _collect(text: str, shell: Shell, found: Found, *, in_branch: bool, depth: int) -> None:
    """Walk through the words: assignments, flags and the value that follows a flag."""
    has_branches = re.search(r"(?:^|[\n;])[ \t]*(?:fi|esac)\b", text) is not None
    branches, waiting, switch = 0, "", ""
    for word in words_of(text):
        if word.opens and has_branches:
            branches = max(0, branches + {"if": 1, "case": 1, "fi": -1, "esac": -1}.get(word.text, 0))
        inside, piece = in_branch or branches > 0, word.text
        assigned = None if waiting else ASSIGNMENT.fullmatch(piece)
        if assigned:
            piece = assigned[3]
            if assigned[2] == "=" and not piece.startswith("("):
                shell.assign(assigned[1], piece, in_branch=inside)
        if word.quoted and "--" in piece and re.search(r"\s", piece) and depth < 3:
            _collect(piece, shell, found, in_branch=inside, depth=depth + 1)
            continue
        piece = _without_brackets(piece)
        if piece.startswith("--"):
            if waiting:
                found.put(waiting, Unknown("nothing", f"{piece[:60]} follows it"))
            waiting = switch = ""
            name, equals, value = piece[2:].partition("=")
            name = name.rstrip(":").replace("-", "_")
            if name in OFF_SWITCHES:
                found.put(OFF_SWITCHES[name], value=False, in_branch=inside)
            elif name in SWITCHES:
                found.put(name, value=value.lower() != "false", in_branch=inside)
                switch = name
            elif name in VALUED and equals:
                found.put(name, shell.resolve(value), in_branch=inside)
            elif name in VALUED:
                waiting = name
            elif re.fullmatch(r"[a-z]\w{0,80}", name):
                found.strangers[name] = None
        elif waiting:
            found.put(waiting, shell.resolve(piece), in_branch=inside)
            waiting = ""
        elif piece in RECOMPUTE_MODULES and found.values.get("recompute_modules"):
            found.values["recompute_modules"] = f"{found.values['recompute_modules']} {piece}"
        elif switch and piece.lower() == "false":
            found.values[switch] = False
        else:
            switch = ""
    if waiting:
        found.put(waiting, Unknown("nothing", "the text ends after it"))


def _without_brackets(piece: str) -> str:
    """A word without the ends of the array or list that it stands in: `(--a`, `32)`, `"--a",`."""
    for left, right in ("()", "[]"):
        piece = piece.rstrip(",")
        surplus = piece.count(left) - piece.count(right)
        if surplus == 1:
            piece = piece.removeprefix(left)
        elif surplus == -1:
            piece = piece.removesuffix(right)
    return piece
