"""Megatron-LM arguments: a launch script or command line (`--num-layers 32`), or what Megatron prints when it starts
(`num_layers ..... 32`).

A script is never run. It is split into words, with quotes and comments understood, and every flag counts wherever it is: in the
command, in an array, in a string. Variables that the script sets are filled in, and branches that they exclude are left out. A
variable that the script does not set (or sets differently in branches that may run) matters only where a size depends on it.

`megatron_run` interprets the settings; this module only translates Megatron-LM's names into Megatron-core's. Megatron-LM's other
models (BERT, T5, vision) take the same flags and are rejected: the flags describe only GPT models and hybrids completely.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import translate

from gemmscope.errors import UserError, closest, option
from gemmscope.findings import Finding, finding
from gemmscope.model.limits import LARGEST
from gemmscope.model.megatron_hybrid import HYBRID
from gemmscope.model.megatron_model import REQUIRED, other_model
from gemmscope.model.megatron_run import model_source
from gemmscope.model.megatron_settings import FACTS, SIZE_LIKE, MegatronSettings, Unknown
from gemmscope.model.shell import Shell, flags
from gemmscope.model.spec import ModelSource, framework_defaults

DEFAULTS = framework_defaults("megatron_lm")
OTHER_NAME = FACTS["other_name"]  # Megatron-LM: Megatron-core
HYBRID_SCRIPTS = {"mamba", "hybrid"}
LAUNCHER = ("nproc_per_node", "nnodes")  # of torchrun: their product is the number of GPUs; it runs on one node by default
SWITCHES = set(FACTS["switches"])
VALUED = {*FACTS["same_name"], *OTHER_NAME, *FACTS["only_here"], *FACTS["t5_only"], *LAUNCHER}
KNOWN = VALUED | SWITCHES
PROGRAM = re.compile(r"\bpretrain_(\w{1,40})\.py\b")
NOT_SIZES = re.compile("|".join(map(translate, FACTS["not_sizes"] + FACTS["bridge"]["no_shapes"])))
MOST_UNKNOWN_FLAGS = 300  # with more, the text is not a launch script, and no flag is taken for a misspelling
TELLTALE = {*REQUIRED, "ffn_hidden_size", "tensor_model_parallel_size", "micro_batch_size", "seq_length"}


@dataclass
class Arguments:
    """The arguments in a text, by Megatron-LM's names, while they are being collected. The other fields are ordered sets."""

    values: dict[str, object] = field(default_factory=dict)
    unknown: dict[str, None] = field(default_factory=dict)  # flags that are not used here
    repeated: dict[str, None] = field(default_factory=dict)
    conditional: dict[str, int] = field(default_factory=dict)  # how often it is inside an `if` or `case` of the script
    scripts: dict[str, None] = field(default_factory=dict)  # the NAME of each pretrain_NAME.py

    def add_scripts(self, text: str) -> None:
        """Remember which of Megatron-LM's programs a text runs."""
        self.scripts.update(dict.fromkeys(PROGRAM.findall(text)))

    def put(self, name: str, value: object, *, in_branch: bool = False) -> None:
        """The last value wins, as for argparse."""
        if self.values.get(name, value) != value:
            self.repeated[name] = None
        self.conditional[name] = self.conditional.get(name, 0) + 1 if in_branch else 0
        self.values[name] = value


def recognises(text: str) -> bool:
    """Whether the text has Megatron-LM arguments, as flags or as the printed list.

    >>> recognises("torchrun pretrain_gpt.py --num-layers 32"), recognises("  num_layers ........ 32")
    (True, True)
    """
    names = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z_-]*)", text)}
    return bool(TELLTALE & names) or prints_arguments(text)


def prints_arguments(text: str) -> bool:
    """Whether the text has the list that Megatron prints when it starts. Such a text may be the log of a long training."""
    return bool(TELLTALE & _read_printed(text).values.keys())


def read(text: str, origin: str) -> ModelSource:
    """The model and run of a script, a command line or a printed list of arguments.

    >>> read("--num-layers 2 --hidden-size 64 --num-attention-heads 4", "args").model.pattern()
    '2 dense'
    """
    printed = _read_printed(text)
    if TELLTALE & printed.values.keys():
        return _source(printed, origin, lambda name: name, "{} ........ {}")
    arguments = _read_script(text)
    if not arguments.values:
        raise UserError(
            "there are no Megatron-LM arguments",
            "it needs flags such as --num-layers 32 --hidden-size 4096, or the list that Megatron prints: num_layers ..... 32",
        )
    return _source(arguments, origin, lambda name: "--" + name.replace("_", "-"), "{} {}")


def _source(arguments: Arguments, origin: str, spell_here: Callable[[str], str], assign: str) -> ModelSource:
    from_core = {core: here for here, core in OTHER_NAME.items()}

    def spell(name: str) -> str:
        return spell_here(from_core.get(name, name))

    findings = _check_script(arguments, spell)
    findings += [finding("setting-repeated", setting=spell(name)) for name in arguments.repeated]
    # One that several branches set to the same value counts whatever holds.
    branches = arguments.conditional.items()
    listed = {
        "settings-in-condition": [spell(name) for name, n in branches if n == 1 or (n and name in arguments.repeated)],
        "frozen-parts-not-modelled": [spell(name) for name in arguments.unknown if name.startswith("freeze_")],
    }
    findings += [finding(code, settings=names) for code, names in listed.items() if names]
    groups_are_used = arguments.values.get("group_query_attention") or arguments.values.get("multi_latent_attention")
    if not groups_are_used and arguments.values.get("num_query_groups") not in (None, "1"):  # 1 is in every printed list
        findings.append(finding("query-groups-ignored", setting=spell("num_query_groups"), switch=spell("group_query_attention")))
    misspelled = dict(_misspellings(arguments))
    findings += [finding("setting-misspelled", setting=spell(name), suggestion=spell(own)) for name, own in misspelled.items()]
    settings = MegatronSettings(_to_core(arguments.values), spell, assign, DEFAULTS)
    unread = {spell(name).lstrip("-"): True for name in arguments.unknown if _is_size(name) and name not in misspelled}
    return replace(model_source(settings, origin, findings, [*map(spell, arguments.unknown)]), unread=unread)


def _is_size(name: str) -> bool:
    """Whether an argument that is not read is called like a size, and not known to change no shape."""
    return bool(SIZE_LIKE.fullmatch(name)) and not NOT_SIZES.match(name)


def _check_script(arguments: Arguments, spell: Callable[[str], str]) -> list[Finding]:
    """Reject other models than GPT and hybrids, which have the same flags. A finding, if the file can train those as well."""
    for name, what in FACTS["other_flags"].items():
        if name in arguments.unknown:
            raise other_model(f"{spell(name)} is a setting of", what)
    for name in FACTS["t5_only"]:
        if arguments.values.get(name) is not None:
            raise other_model(f"{spell(name)} is a setting of", FACTS["other_scripts"]["t5"])
    spec = re.findall(r"[\w.]+", str(arguments.values.get("spec") or ""))
    if spec and spec[-1] not in FACTS["bridge_recipe"]["usual_layers"]:
        raise UserError(
            f"{spell('spec')} {' '.join(spec)[:100]} is code that builds the layers, which is not read",
            f"trace the model: {option('module', 'FILE.py:FUNCTION')}, or give its config.json: {option('config', 'PATH')}",
        )
    programs = {name.split("_")[0] for name in arguments.scripts}
    if re.search("mamba|hybrid", str(arguments.values.get("spec")).lower()) or (
        programs & HYBRID_SCRIPTS and "gpt" not in programs
    ):
        arguments.values[HYBRID] = True
    other = next((name for name in arguments.scripts if name.split("_")[0] in FACTS["other_scripts"]), None)
    if other is None:
        return []
    if not programs & {"gpt", *HYBRID_SCRIPTS}:
        raise other_model(f"pretrain_{other}.py trains", FACTS["other_scripts"][other.split("_")[0]])
    return [finding("read-as-gpt", script=f"pretrain_{other}.py")]


def _misspellings(arguments: Arguments) -> Iterator[tuple[str, str]]:
    """Unknown flags that are another spelling of a known one, or differ from it by a letter or two; and the known one."""
    if len(arguments.unknown) >= MOST_UNKNOWN_FLAGS:
        return
    for name in arguments.unknown:
        meant = FACTS["other_spellings"].get(name)
        if meant is not None and meant not in arguments.values:
            yield name, meant
        elif meant is None and name not in FACTS["not_misspelled"]:
            for similar in closest(name, VALUED - {"spec", *LAUNCHER}, 1, cutoff=0.9):
                yield name, similar


def _to_core(given: Mapping[str, object]) -> dict[str, object]:
    """The same settings under Megatron-core's names, as Megatron-LM translates its arguments."""
    core = {OTHER_NAME.get(name, name): value for name, value in given.items()}
    core.setdefault("make_vocab_size_divisible_by", DEFAULTS["vocab_multiple"])
    for here, fallback in (("num_layers", "encoder_num_layers"), ("seq_length", "encoder_seq_length")):
        if core.get(here) is None:
            core[here] = core.get(fallback)
    if given.get("group_query_attention"):
        core.setdefault("num_query_groups", 1)
    else:
        core.pop("num_query_groups", None)
    if given.get("add_position_embedding") is False:
        core.setdefault("position_embedding_type", "none")
    for switch, settings in FACTS["switches_to_core"].items():
        if given.get(switch) is True:
            core.update(settings)
    if given.get("vocab_size") is None and given.get("padded_vocab_size") is not None:
        core["vocab_size"], core["make_vocab_size_divisible_by"] = given["padded_vocab_size"], 1
    launched = [str(given.get(name, default)) for name, default in zip(LAUNCHER, (None, 1), strict=True)]
    if given.get("world_size") is None and all(re.fullmatch("[1-9][0-9]{0,5}", number) for number in launched):
        gpus = int(launched[0]) * int(launched[1])
        core["world_size"] = gpus if gpus <= LARGEST["parallel"] else None
    return core


def _read_printed(text: str) -> Arguments:
    arguments = Arguments()
    constants = {"True": True, "False": False, "None": None}
    for line in text.splitlines():
        before, dots, after = line.partition(" ..")
        if dots and before.strip():
            name = re.split(r"[:\]|>]", before.split()[-1])[-1]  # after a rank or a time
            value = after.lstrip(".").strip()
            if name in KNOWN:
                arguments.put(name, constants.get(value, value))
            elif value not in ("None", "False", "0", "1"):
                arguments.unknown |= {name: None} if _is_size(name) else {}
    padded = re.search(r"padded vocab \(size: ([0-9]{1,12})\)", text)
    if padded and arguments.values.get("vocab_size", 0) is None:  # the tokenizer's size, printed after the arguments
        arguments.values["vocab_size"] = padded[1]
    arguments.add_scripts(text)
    return arguments


def _read_script(text: str) -> Arguments:
    """The flags of the script that are arguments of Megatron, with their values."""
    arguments = Arguments()
    for flag in flags(text, Shell(), PROGRAM):
        for word in flag.arguments:
            arguments.add_scripts(word.text if isinstance(word, Unknown) else word)
        name, value = flag.name.rstrip(":").replace("-", "_"), flag.value
        if name in FACTS["off_switches"]:
            arguments.put(FACTS["off_switches"][name], value=False, in_branch=flag.in_branch)
        elif name in SWITCHES:
            off = isinstance(value, str) and value.lower() == "false"
            arguments.put(name, value=not off, in_branch=flag.in_branch)
        elif name in VALUED:
            # the flags with several values
            more = {"recompute_modules": FACTS["recompute_modules"], "spec": flag.arguments[1:2]}.get(name, ())
            if isinstance(value, str):
                value = " ".join([value, *(str(word) for word in flag.arguments[1:] if word in more)])
            arguments.put(name, value, in_branch=flag.in_branch)
        elif re.fullmatch(r"[a-z]\w{0,80}", name):
            arguments.unknown[name] = None
    return arguments
