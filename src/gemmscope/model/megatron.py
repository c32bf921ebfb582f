"""Megatron-LM arguments: a launch script or command line (`--num-layers 32`), or what Megatron prints when it starts
(`num_layers ..... 32`).

A script is not run. Its words are taken in order, quotes and comments understood, and every flag counts wherever it
stands: in the command, in an array, in a string. Variables that the script sets are filled in; one that it does not set
(or sets differently in the branches of an `if`) matters only where a size depends on it.

What the flags mean is told in `megatron_args`; here they are only brought from Megatron-LM's names to Megatron-core's.
Megatron-LM's other models (BERT, T5, Mamba, vision) take the same flags and are refused: only GPT is described by them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from gemmscope.errors import UserError
from gemmscope.model.megatron_args import REQUIRED, model_source, other_model
from gemmscope.model.megatron_shell import ASSIGNMENT, Shell, words_of
from gemmscope.model.megatron_values import Dialect, Settings, Unknown
from gemmscope.model.source import ModelSource
from gemmscope.model.spec import LARGEST


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
LAUNCHER = ("nproc_per_node", "nnodes")  # of torchrun: together they say how many GPUs there are
T5_ONLY = ("decoder_num_layers", "decoder_seq_length")
ONLY_HERE = ("encoder_num_layers", "encoder_seq_length", "padded_vocab_size", "spec", *T5_ONLY, *LAUNCHER)
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
ALIKE_BUT_OTHER = {"o_lora_rank"}  # real flags that are not slips of the known ones
WRONG_SPELLINGS = {  # of other programs, of old releases, or just near: what Megatron-LM calls the same
    "tensor_parallel_size": "tensor_model_parallel_size",
    "tensor_model_parallel": "tensor_model_parallel_size",
    "tensor_parallel": "tensor_model_parallel_size",
    "model_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "pipeline_model_parallel": "pipeline_model_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "context_model_parallel_size": "context_parallel_size",
    "context_parallel": "context_parallel_size",
    "expert_parallel_size": "expert_model_parallel_size",
    "expert_parallel": "expert_model_parallel_size",
    "expert_tensor_model_parallel_size": "expert_tensor_parallel_size",
    "sequence_length": "seq_length",
    "seq_len": "seq_length",
    "batch_size": "micro_batch_size",
    "micro_batch": "micro_batch_size",
    "global_batch": "global_batch_size",
    "intermediate_size": "ffn_hidden_size",
    "num_key_value_heads": "num_query_groups",
    "num_kv_heads": "num_query_groups",
}
OTHER_SCRIPTS = {  # pretrain_NAME….py of Megatron-LM that does not train a GPT
    "bert": "BERT, an encoder",
    "t5": "T5, an encoder with a decoder",
    "mamba": "a model with Mamba layers",
    "hybrid": "a model with Mamba layers",
    "ict": "a pair of BERT encoders",
    "biencoder": "a pair of BERT encoders",
    "retro": "Retro, a decoder with a retriever",
    "vision": "a vision model",
    "vlm": "a vision-language model",
}
RECOMPUTE_MODULES = _names("core_attn moe_act layernorm mla_up_proj mlp moe shared_experts")  # several may follow the flag
MOST_STRANGERS = 300  # more than Megatron-LM has flags: then a text is no launch script, and nothing is a slip
TELLTALE = {*REQUIRED, "ffn_hidden_size", "tensor_model_parallel_size", "micro_batch_size", "seq_length"}


@dataclass
class Found:
    """What a text says, by Megatron-LM's names, while it is being collected."""

    values: dict[str, object] = field(default_factory=dict)
    strangers: dict[str, None] = field(default_factory=dict)  # flags that mean nothing here, in order
    repeated: dict[str, None] = field(default_factory=dict)
    branched: dict[str, None] = field(default_factory=dict)
    scripts: dict[str, None] = field(default_factory=dict)  # the NAME of each pretrain_NAME.py

    def see_scripts(self, text: str) -> None:
        """Remember which of Megatron-LM's programs a text runs."""
        self.scripts.update(dict.fromkeys(re.findall(r"\bpretrain_(\w{1,40})\.py\b", text)))

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
    return bool(TELLTALE & flags) or prints_arguments(text)


def prints_arguments(text: str) -> bool:
    """Whether the text holds the list that Megatron prints when it starts: such a text may be the log of a long training."""
    return bool(TELLTALE & _read_dump(text).values.keys())


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
    notes = _note_or_refuse_other_models(found, origin, spell)
    notes += [f"{spell(name)} is given more than once: the last value counts" for name in found.repeated]
    if found.branched:
        notes.append(f"taken although inside a condition of the script: {', '.join(map(spell, found.branched))}")
    if _groups_are_ignored(found.values):
        notes.append(
            f"Megatron ignores {spell('num_query_groups')} without {spell('group_query_attention')}: "
            "every head has a key and value of its own"
        )
    notes += [f"{spell(slip)} is ignored; did you mean {spell(meant)}?" for slip, meant in _slips(found)]
    return model_source(Settings(_to_core(found.values), dialect), origin, notes, [*map(spell, found.strangers)])


def _note_or_refuse_other_models(found: Found, origin: str, spell: Callable[[str], str]) -> list[str]:
    """Other models than GPT have the same flags, and would be read as one. A note, if a script can train GPT as well."""
    for name in T5_ONLY:
        if found.values.get(name) is not None:
            raise other_model(f"{origin}: {spell(name)} belongs to", OTHER_SCRIPTS["t5"])
    if "mamba" in str(found.values.get("spec")).lower():
        raise other_model(f"{origin}: {spell('spec')} asks for", OTHER_SCRIPTS["mamba"])
    others = {name: what for name in found.scripts for kind, what in OTHER_SCRIPTS.items() if name.split("_")[0] == kind}
    for name, what in others.items():
        if "gpt" in found.scripts:
            return [f"pretrain_gpt.py is in the file, and pretrain_{name}.py as well: the flags are read as those of a GPT"]
        raise other_model(f"{origin}: pretrain_{name}.py trains", what)
    return []


def _groups_are_ignored(given: Mapping[str, object]) -> bool:
    """Whether a number of query groups is there in vain. The printed list always holds one: its default is 1."""
    used = given.get("group_query_attention") or given.get("multi_latent_attention")
    return not used and given.get("num_query_groups") not in (None, "1")


def _slips(found: Found) -> Iterator[tuple[str, str]]:
    """Unknown names a letter or two away from a known one, or known to be meant for one that is not there."""
    if len(found.strangers) >= MOST_STRANGERS:
        return
    for stranger in found.strangers:
        meant = WRONG_SPELLINGS.get(stranger)
        if meant is not None and meant not in found.values:
            yield stranger, meant
        elif meant is None and stranger not in ALIKE_BUT_OTHER:
            for near in difflib.get_close_matches(stranger, VALUED - {"spec", *LAUNCHER}, n=1, cutoff=0.9):
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
    if given.get("add_position_embedding") is False:
        core.setdefault("position_embedding_type", "none")
    for switch, settings in SWITCHES_TO_CORE:
        if given.get(switch) is True:
            core.update(settings)
    if given.get("vocab_size") is None and given.get("padded_vocab_size") is not None:
        core["vocab_size"], core["make_vocab_size_divisible_by"] = given["padded_vocab_size"], 1
    launched = [str(given.get(name)) for name in LAUNCHER]
    if given.get("world_size") is None and all(re.fullmatch("[1-9][0-9]{0,5}", number) for number in launched):
        gpus = int(launched[0]) * int(launched[1])
        core["world_size"] = gpus if gpus <= LARGEST["parallel"] else None
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
    found.see_scripts(text)
    return found


# ---- flags


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
        found.see_scripts(piece)
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
        elif piece in RECOMPUTE_MODULES and isinstance(found.values.get("recompute_modules"), str):
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
