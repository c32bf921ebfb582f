"""Reads a torchtitan command or launch script: `./run_train.sh --module llama3 --config llama3_8b --training.seq_len 8192`.

Flags are settings of the job config: `--parallelism.tensor_parallel_degree 8` is `tensor_parallel_degree = 8` below
`[parallelism]`. The model is named by `--model.name` and `--model.flavor`, or, in releases that keep their job configs in Python,
by a module and one of its configs (`--module`, `--config`, or the variables MODULE and CONFIG of run_train.sh). What such a
config says itself is in torchtitan's code: only the command's own settings are known. A script is never run.
"""

import re

from gemmscope.errors import UserError, did_you_mean
from gemmscope.findings import Finding, finding
from gemmscope.model import torchtitan
from gemmscope.model.megatron_settings import Unknown
from gemmscope.model.shell import Shell, flags
from gemmscope.model.spec import ModelSource
from gemmscope.model.torchtitan_model import families, family_names

SECTIONS = ("model", "training", "parallelism", "activation_checkpoint")
SETTING = re.compile(rf"({'|'.join(SECTIONS)})\.([a-z][\w-]*)|(module|config)")
VARIABLES = {"MODULE": "module", "CONFIG": "config"}  # of torchtitan's run_train.sh
PROGRAM = re.compile(r"run_train\.sh|torchtitan\.train|\btrain\.py")
CONSTANTS = {"true": True, "false": False}


def recognises(text: str) -> bool:
    """Whether the text is a command or script that starts torchtitan.

    >>> recognises("./run_train.sh --module llama3 --config llama3_8b"), recognises("--num-layers 32")
    (True, False)
    """
    dotted = re.search(rf"--(?:{'|'.join(SECTIONS)})\.[a-z]", text)
    named = re.search(r"--module[= ]|\bMODULE=", text) and re.search(r"--config[= ]|\bCONFIG=", text)
    return bool(dotted or (named and re.search(r"run_train\.sh|torchtitan", text)))


def read(text: str, origin: str) -> ModelSource:
    """The model and the run settings of a torchtitan command.

    >>> read("./run_train.sh --module llama3 --config llama3_8b --training.seq_len 8192", "x.sh").model.hidden_size
    4096
    """
    tables, findings = _collect(text)
    named = tables.pop("", {})
    model = dict(tables.get("model", {}))
    if "flavor" not in model and named:
        model |= _model_of(named)
        findings.append(finding("config-not-read", config=str(named.get("config"))[:100]))
    return torchtitan.read_tables({**tables, "model": model}, origin, findings)


def _collect(text: str) -> tuple[dict[str, dict[str, object]], list[Finding]]:
    """The settings by section, and what was not known. Module and config are in the section without a name."""
    shell, tables, findings = Shell(), dict[str, dict[str, object]](), list[Finding]()
    conditional: dict[str, None] = {}  # an ordered set

    def put(section: str, name: str, value: str | Unknown | bool) -> None:
        if isinstance(value, Unknown):
            findings.append(
                finding("setting-without-value", setting=f"{section}.{name}", value=value.text[:60], reason=value.why)
            )
        else:
            tables.setdefault(section, {})[name] = _value(value) if isinstance(value, str) else value

    for flag in flags(text, shell, PROGRAM):
        if setting := SETTING.fullmatch(flag.name):
            put(setting[1] or "", (setting[2] or setting[3]).replace("-", "_"), flag.value if flag.arguments else True)
            conditional |= {f"--{flag.name}": None} if flag.in_branch else {}
    for variable, name in VARIABLES.items():
        if shell.value(variable) and name not in tables.get("", {}):
            put("", name, shell.resolve(f"${variable}"))
    if conditional:
        findings.append(finding("settings-in-condition", settings=[*conditional]))
    return tables, findings


def _value(text: str) -> object:
    if re.fullmatch(r"-?[0-9][0-9_]{0,17}", text):
        return int(text)
    return CONSTANTS.get(text.lower(), text)


def _model_of(named: dict[str, object]) -> dict[str, object]:
    """The family and flavor that a module and one of its configs stand for: llama3 and llama3_8b."""
    module, config = str(named.get("module", ""))[:100], str(named.get("config", ""))[:100]
    family = family_names().get(module.rsplit(".", 1)[-1])
    if family is None:
        raise UserError(
            f"--module {module} is not a known torchtitan model",
            f"{did_you_mean(module, family_names())}known: {', '.join(family_names())}",
        )
    flavors: dict[str, object] = families()[family]["flavors"]
    rest = _letters(config).removeprefix(_letters(family))
    fitting = [flavor for flavor in flavors if rest.startswith(_letters(flavor))]
    if not fitting:
        raise UserError(
            f"--config {config} names no known flavor of {family}",
            f"known: {', '.join(flavors)}; or name one with --model.name {family} --model.flavor {next(iter(flavors))}",
        )
    return {"name": family, "flavor": max(fitting, key=len)}


def _letters(name: str) -> str:
    """The letters and digits of a name, in lower case, so that 30B-A3B and 30b_a3b compare equal."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
