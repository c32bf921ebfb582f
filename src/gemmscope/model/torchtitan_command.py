"""Reads a torchtitan command or launch script: `./run_train.sh --module llama3 --config llama3_8b --training.seq_len 8192`.

Flags are settings of the job config: `--parallelism.tensor_parallel_degree 8` is `tensor_parallel_degree = 8` below
`[parallelism]`. The model is named by `--model.name` and `--model.flavor`, or, in releases that keep their job configs in Python,
by a module and one of its configs (`--module`, `--config`, or the variables MODULE and CONFIG of run_train.sh). What torchtitan's
own configs say is in `torchtitan_jobs.toml`; any other is refused. A script is never run.
"""

import re
from math import prod

from gemmscope.errors import UserError, did_you_mean, option
from gemmscope.findings import Finding, finding
from gemmscope.model import torchtitan
from gemmscope.model.megatron_settings import Unknown
from gemmscope.model.shell import Shell, flags
from gemmscope.model.spec import ModelSource
from gemmscope.model.torchtitan_model import families, family_names
from gemmscope.model.torchtitan_registry import checkpointing
from gemmscope.toml import load_data

SECTIONS = ("model", "training", "parallelism", "compile", "activation_checkpoint")
LAUNCHER = ("nproc_per_node", "nnodes")  # of torchrun
SETTING = re.compile(rf"({'|'.join(SECTIONS)})\.([a-z][\w-]*)|(module|config|nproc[_-]per[_-]node|nnodes)")
VARIABLES = {"MODULE": "module", "CONFIG": "config", "NGPU": "nproc_per_node"}  # of torchtitan's run_train.sh
CHECKPOINTING = re.compile(r"\bactivation[-_]checkpoint:([a-z-]+)")
SPLITS = ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree", "data_parallel_replicate_degree")
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
    gpus = [named.pop(name, 1) for name in LAUNCHER] if LAUNCHER[0] in named else []
    registries = bool(named) and "flavor" not in tables.get("model", {})
    if registries:
        job = _job_of(named)
        tables = {name: {**job.get(name, {}), **tables.get(name, {})} for name in {**job, **tables}}
    if policy := CHECKPOINTING.search(text):
        tables["activation_checkpoint"] = checkpointing(policy[1])
    numbers = [number for number in gpus if type(number) is int and number > 0]
    if len(numbers) == len(LAUNCHER):
        tables["parallelism"] = _share(prod(numbers), tables.get("parallelism", {}))
    return torchtitan.read_tables(tables, origin, findings, registries=registries)


def _share(gpus: int, parallelism: dict[str, object]) -> dict[str, object]:
    """The parallel sizes of a job that starts on so many GPUs: FSDP has those that are left."""
    degrees = {name: parallelism[name] for name in SPLITS if name in parallelism}
    split = prod(degree for degree in degrees.values() if type(degree) is int and degree > 0)
    if parallelism.get("data_parallel_shard_degree", -1) != -1:
        return parallelism
    if gpus % split:
        sizes = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        raise UserError(f"{gpus} GPUs cannot be split by {sizes}", "correct --nproc_per_node and --nnodes, or the degrees")
    return {**parallelism, "data_parallel_shard_degree": gpus // split}


def _collect(text: str) -> tuple[dict[str, dict[str, object]], list[Finding]]:
    """The settings by section, and what was not known. Module and config are in the section without a name."""
    shell, tables, findings = Shell(), dict[str, dict[str, object]](), list[Finding]()
    conditional: dict[str, None] = {}  # an ordered set

    def put(section: str, name: str, value: str | Unknown | bool) -> None:
        if isinstance(value, Unknown) and name in LAUNCHER:
            tables.setdefault(section, {})[name] = None
        elif isinstance(value, Unknown):
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


def _job_of(named: dict[str, object]) -> dict[str, dict[str, object]]:
    """The tables of one of torchtitan's own configs."""
    module, config = str(named.get("module", ""))[:100], str(named.get("config", ""))[:100]
    family = family_names().get(module.removesuffix(".config_registry").rsplit(".", 1)[-1])
    if family is None:
        raise UserError(
            f"--module {module} is not a known torchtitan model",
            f"{did_you_mean(module, family_names())}known: {', '.join(family_names())}",
        )
    jobs: dict[str, dict[str, dict[str, object]]] = load_data("gemmscope.model", "torchtitan_jobs.toml").get(family, {})
    if config not in jobs:
        raise UserError(
            f"--config {config} is not one of torchtitan's own jobs of {family}",
            f"{did_you_mean(config, jobs)}for one of your own, give its registry, {option('config', 'config_registry.py:NAME')}; "
            f"or name the model: --model.name {family} --model.flavor {next(iter(families()[family]['flavors']))}",
        )
    return jobs[config]
