"""What all kinds of documents share: their sentences, and the text about model, batch, command, machine and samples."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from gemmscope import units
from gemmscope.document.model import Block, Message, Section, Subject
from gemmscope.document.table import Facts, Table
from gemmscope.findings import Finding, fill
from gemmscope.gpu.environment import Environment
from gemmscope.gpu.health import health_problems
from gemmscope.model.spec import RunSpec
from gemmscope.options.declare import options_of
from gemmscope.options.job import ClusterOptions, ModelOptions, RunOptions
from gemmscope.results.base import ModelSummary, Result
from gemmscope.toml import load_data
from gemmscope.workload.cases import Case

ANOTHER_GPU = "fleet-another-gpu"  # prefix of the codes of findings that quote a fleet
SPLIT = ("tp", "cp", "pp", "ep")
STATE_OF_GPU = (("SM clock", "sm_mhz", "MHz"), ("power", "power_w", "W"), ("temperature", "temperature_c", "°C"))
MODEL_OPTIONS = (*options_of(ModelOptions, RunOptions), "fused_projections", "shapes")
"""The options that name the model and how it is run."""


@cache
def phrases() -> dict[str, str]:
    """Every sentence of the documents by its code."""
    return load_data("gemmscope.document", "phrases.toml")


def phrase(code: str, **facts: Any) -> str:
    """A sentence, or a part of one, from `phrases.toml`, with its facts.

    >>> phrase("plan-small-models", shown=3, models=9)
    '3 of 9 models.'
    """
    return fill(phrases()[code], facts)


def notes(applies: Mapping[str, object]) -> str:
    """The sentences, by their codes, that apply, as one note.

    >>> notes({"numerics-better": True, "plan-close-mark": False})
    'Lower and further right is better.'
    """
    return " ".join(phrase(code) for code, is_so in applies.items() if is_so)


def sections(named: Mapping[str, Iterable[Block | None]]) -> tuple[Section, ...]:
    """A section for each title, without blocks that are None, tables without rows, and sections without blocks."""
    filled = {
        title: tuple(block for block in blocks if block is not None and (not isinstance(block, Table) or block.rows))
        for title, blocks in named.items()
    }
    return tuple(Section(title, blocks) for title, blocks in filled.items() if blocks)


def first_rows(table: Table, most: int) -> Table:
    """The table with at most `most` rows; if it has more, its note says so."""
    more = len(table.rows) - most
    if more <= 0:
        return table
    return replace(
        table, rows=table.rows[:most], note=f"{table.note} {phrase('first-rows', shown=most, rows=len(table.rows))}".strip()
    )


def facts(*lines: tuple[str, str | None]) -> Facts:
    """Names and values, without those that have no value."""
    return tuple((name, value) for name, value in lines if value)


def subject(model: ModelSummary | None, run: RunSpec | None, cases: Sequence[Case] = ()) -> Subject:
    """The model and batch of a run; without a model, bare GEMMs."""
    if model is None or run is None:
        return Subject("Bare GEMMs", bare=True)
    batch = (
        {"micro-batch": run.micro_batch_size, "sequence": run.sequence_length} if run.inputs is None else {"inputs": run.inputs}
    )
    return Subject(
        title=f"{model.name}: {_model_text(model)}",
        model={"hidden size": model.hidden_size, "layers": model.layers, "number of layers": model.num_hidden_layers},
        batch={**batch, **{name: getattr(run, name) for name in SPLIT}, "recompute": run.recompute},
        sizes={case.op: (case.inputs, case.outputs) for case in cases},
    )


def _model_text(model: ModelSummary) -> str:
    width = f", hidden size {model.hidden_size}" if model.hidden_size else ""
    return f"{model.layers} layers{width}" if model.layers != "traced" else model.layers


def described(model: ModelSummary | None) -> list[str]:
    """The sizes of the model in a line, if they are known."""
    return [model.description] if model is not None and model.description else []


def batch_lines(run: RunSpec | None, stage: int) -> list[str]:
    """The micro-batch, and how the model is split, in a line or two."""
    if run is None:
        return []
    split = f" / cp {run.cp}" if run.cp > 1 else ""
    lines = [f"micro-batch {run.micro_batch_size} x sequence {run.sequence_length}{split} = {run.tokens} tokens"]
    if run.inputs is not None:
        lines = [f"inputs: {run.inputs}"]
    parts = {
        **{f"{name} {getattr(run, name)}": getattr(run, name) > 1 for name in SPLIT},
        f"etp {run.expert_tp}": run.expert_tp != run.tp,
        "sequence parallel": run.sequence_parallel,
        f"stage {stage}": run.pp > 1,
        f"layers per stage {','.join(map(str, run.pp_layers or ()))}": bool(run.pp_layers),
        f"imbalance {run.imbalance:g}": run.imbalance != 1,
        " ".join(["recompute", run.recompute, *run.recompute_modules]): run.recompute != "none",
        f"{run.recompute_share:.0%} of the layers recomputed": run.recompute_share < 1,
        f"LoRA of rank {run.lora}, all other weights frozen": run.lora is not None,
        "separate projections": run.separate_projections,
        f"{run.gradient_accumulation} micro-batches per step": run.gradient_accumulation > 1,
    }
    named = ", ".join(part for part, applies in parts.items() if applies)
    return [*lines, named] if named else lines


def model_facts(model: ModelSummary | None, run: RunSpec | None, stage: int = 0) -> Facts:
    """Model and batch as names and values."""
    named = [("model", f"{model.name}, {_model_text(model)}")] if model is not None else []
    if run is None:
        return tuple(named)
    lines = batch_lines(run, stage)
    if run.inputs is not None:
        return (*named, ("inputs", "; ".join([run.inputs, *lines[1:]])))
    return (*named, ("micro-batch", "; ".join(lines)))


def same_model(command: str, result: Any, more: str = "", keep: Sequence[str] = MODEL_OPTIONS) -> str:
    """Another command with the same model and batch, ready to paste; empty if this result did not come from the command line.
    `result`: anything with a command; `keep` lists the options to take over."""
    if not result.command.startswith("gemmscope "):
        return ""
    keeping, kept = False, list[str]()
    for word in shlex.split(result.command)[2:]:
        if word.startswith("-"):
            keeping = word.partition("=")[0].lstrip("-").replace("-", "_").removeprefix("no_") in keep
        if keeping:
            kept.append(word)
    return shlex.join(["gemmscope", command, *kept, *more.split()])


def one_point(command: str, result: Any, values: Mapping[str, int], more: str = "") -> str:
    """The command for one point of a sweep; empty for a sweep over sizes of the model, which its other options may contradict."""
    flags = {name: declared.flags[0] for name, declared in options_of(ClusterOptions).items()}
    if not values.keys() <= flags.keys():
        return ""
    kept = [name for name in (*MODEL_OPTIONS, *flags, "stack", "state") if name not in values]
    return same_model(command, result, " ".join([more, *(f"{flags[name]} {value}" for name, value in values.items())]), kept)


def quoted_of_fleet(result: Result) -> tuple[str, ...]:
    """The findings about other GPUs of a fleet. They are shown with the answer, which is about this GPU alone."""
    return tuple(finding.text for finding in result.findings if finding.code.startswith(ANOTHER_GPU))


def gpu_messages(common: Sequence[Finding], by_gpu: Mapping[str, Sequence[Finding]]) -> tuple[Message, ...]:
    """Findings of several GPUs: those that all GPUs share once, the others after the name of their GPU."""
    first, *others = by_gpu.values()
    common_texts = [{finding.text for finding in findings} for findings in others]
    shared = [finding for finding in first if all(finding.text in texts for texts in common_texts)]
    said = {finding.text for finding in shared}
    own = [Message.of(finding, gpu) for gpu, findings in by_gpu.items() for finding in findings if finding.text not in said]
    return (*map(Message.of, common), *map(Message.of, shared), *own)


def command_facts(result: Result) -> Facts:
    """The command, and the version of gemmscope."""
    return facts(("command", result.command), ("gemmscope", result.gemmscope_version))


def versions_text(versions: Mapping[str, str]) -> str:
    """Packages with their versions."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def machine_facts(environment: Environment, device: Mapping[str, Any], versions: Mapping[str, str]) -> Facts:
    """GPU, driver, packages, system."""

    def listed(**formats: str) -> str:
        return ", ".join(text.format(device[name]) for name, text in formats.items() if device.get(name) not in (None, "", 0))

    gpu = [
        str(device.get("name", "no GPU")),
        listed(compute_capability="compute capability {}"),
        units.memory(float(device["memory_bytes"])) if device.get("memory_bytes") else "",
        listed(multiprocessors="{} multiprocessors"),
    ]
    place = [str(device.get("node") or ""), f"GPU {device['index']}" if device.get("index") is not None else ""]
    return facts(
        ("node", ", ".join(filter(None, [*place, listed(pci_bus="PCI bus {}")]))),
        ("GPU", ", ".join(filter(None, gpu))),
        ("UUID", str(device.get("uuid") or "")),
        ("health under load", _health(device.get("health"))),
        ("CPU", str(device.get("cpu") or "")),
        ("limits", listed(power_limit_w="{:.0f} W", max_sm_mhz="SM clock up to {} MHz")),
        ("driver", environment.driver),
        ("CUDA", str(device.get("cuda") or "")),
        ("packages", versions_text({**environment.packages, **versions})),
        ("system", environment.system),
        ("Python", environment.python),
        ("CPUs", str(environment.cpus)),
        ("GPUs in the machine", str(len(environment.gpus)) if len(environment.gpus) > 1 else ""),
    )


def _health(health: Any) -> str:
    if not isinstance(health, dict) or not health:
        return ""
    return "; ".join(problem.text for problem in health_problems(health, under_load=True)) or "no problems found"


def sample_text(series: Sequence[Sequence[Sequence[float]]]) -> str:
    """How many samples, in how many bursts.

    >>> sample_text([[[1.0, 1.1], [1.2]]]), sample_text([])
    ('3 in 2 bursts', '')
    """
    count = sum(len(burst) for bursts in series for burst in bursts)
    return f"{count:,} in {units.counted(max(map(len, series)), 'burst')}" if count else ""


def clock_facts(states: Sequence[Mapping[str, Any]]) -> Facts:
    """SM clock, power and temperature while measuring: the median and the range."""
    lines = []
    for name, key, unit in STATE_OF_GPU:
        values = sorted(float(value) for state in states if isinstance(value := state.get(key), (int, float)))
        if values:
            spread = f" ({values[0]:.0f} to {values[-1]:.0f})" if values[0] != values[-1] else ""
            lines.append((name, f"{values[len(values) // 2]:.0f} {unit}{spread}"))
    return tuple(lines)
