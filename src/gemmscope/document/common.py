"""Text that all kinds of results share: model, batch, command, machine."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from gemmscope import units
from gemmscope.document.model import Subject
from gemmscope.document.table import Facts
from gemmscope.gpu.environment import Environment
from gemmscope.gpu.health import health_problems
from gemmscope.model.spec import RunSpec
from gemmscope.results.base import ModelSummary, Result
from gemmscope.workload.cases import Case

ANOTHER_GPU = "fleet-another-gpu"  # prefix of the codes of findings that quote a fleet
SPLIT = ("tp", "cp", "pp", "ep")
MODEL_NAMES = (
    "config", "preset", "module", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "head_dim", "vocab_size", "gated_mlp", "mtp_layers",
)  # fmt: skip
"""The options that name the model."""
MODEL_OPTIONS = (
    *MODEL_NAMES, "micro_batch_size", "sequence_length", "tp",
    "sequence_parallel", "cp", "pp", "pp_stage", "pp_layers", "ep", "etp", "imbalance", "gradient_accumulation", "recompute",
    "separate_projections", "fused_projections", "shapes",
)  # fmt: skip
"""The options that name the model and how it is run."""


def subject(model: ModelSummary | None, run: RunSpec | None, cases: Sequence[Case] = ()) -> Subject:
    """The model and batch of a run; without a model, bare GEMMs."""
    if model is None or run is None:
        return Subject("Bare GEMMs", bare=True)
    split = {name: getattr(run, name) for name in SPLIT}
    return Subject(
        title=f"{model.name}: {_model_text(model)}",
        model={"hidden size": model.hidden_size, "layers": model.layers, "number of layers": model.num_hidden_layers},
        batch={**_batch(run), **split, "recompute": run.recompute},
        sizes={case.op: (case.inputs, case.outputs) for case in cases},
    )


def _batch(run: RunSpec) -> dict[str, Any]:
    if run.inputs is not None:
        return {"inputs": run.inputs}
    return {"micro-batch": run.micro_batch_size, "sequence": run.sequence_length}


def _model_text(model: ModelSummary) -> str:
    width = f", hidden size {model.hidden_size}" if model.hidden_size else ""
    return f"{model.layers} layers{width}" if model.layers != "traced" else model.layers


def batch_lines(run: RunSpec | None, stage: int) -> list[str]:
    """The micro-batch, and how the model is split, in a line or two."""
    if run is None:
        return []
    split = f" / cp {run.cp}" if run.cp > 1 else ""
    lines = [f"micro-batch {run.micro_batch_size} x sequence {run.sequence_length}{split} = {run.tokens} tokens"]
    if run.inputs is not None:
        lines = [f"inputs: {run.inputs}"]
    parts = [f"{name} {getattr(run, name)}" for name in SPLIT if getattr(run, name) > 1]
    parts += [f"etp {run.expert_tp}"] if run.expert_tp != run.tp else []
    parts += ["sequence parallel"] if run.sequence_parallel else []
    parts += [f"stage {stage}"] if run.pp > 1 else []
    parts += [f"layers per stage {','.join(map(str, run.pp_layers))}"] if run.pp_layers else []
    parts += [f"imbalance {run.imbalance:g}"] if run.imbalance != 1 else []
    parts += [f"recompute {run.recompute}"] if run.recompute != "none" else []
    parts += ["separate projections"] if run.separate_projections else []
    parts += [f"{run.gradient_accumulation} micro-batches per step"] if run.gradient_accumulation > 1 else []
    return [*lines, ", ".join(parts)] if parts else lines


def model_facts(model: ModelSummary | None, run: RunSpec | None, stage: int = 0) -> Facts:
    """Model and batch as names and values."""
    named = [("model", f"{model.name}, {_model_text(model)}")] if model is not None else []
    if run is None:
        return tuple(named)
    lines = batch_lines(run, stage)
    if run.inputs is not None:
        return (*named, ("inputs", "; ".join([run.inputs, *lines[1:]])))
    return (*named, ("micro-batch", "; ".join(lines)))


def same_model(command: str, result: Result, more: str = "", keep: Sequence[str] = MODEL_OPTIONS) -> str:
    """Another command with the same model and batch, ready to paste; empty if this result did not come from the command line.
    `keep` lists the options to take over."""
    if not result.command.startswith("gemmscope "):
        return ""
    keeping, kept = False, list[str]()
    for word in shlex.split(result.command)[2:]:
        if word.startswith("-"):
            keeping = word.partition("=")[0].lstrip("-").replace("-", "_").removeprefix("no_") in keep
        if keeping:
            kept.append(word)
    return shlex.join(["gemmscope", command, *kept, *more.split()])


def quoted_of_fleet(result: Result) -> tuple[str, ...]:
    """The findings about other GPUs of a fleet. They are shown with the answer, which is about this GPU alone."""
    return tuple(finding.text for finding in result.findings if finding.code.startswith(ANOTHER_GPU))


def command_facts(result: Result) -> Facts:
    """The command, and the version of gemmscope."""
    return (*([("command", result.command)] if result.command else []), ("gemmscope", result.gemmscope_version))


def machine_facts(environment: Environment, device: Mapping[str, Any], versions: Mapping[str, str]) -> Facts:
    """GPU, driver, packages, system."""
    capability, memory = device.get("compute_capability"), device.get("memory_bytes")
    gpu = [str(device.get("name", "no GPU"))]
    gpu += [f"compute capability {capability}"] if capability else []
    gpu += [units.si(float(memory), "B")] if memory else []
    gpu += [f"{device['multiprocessors']} multiprocessors"] if device.get("multiprocessors") else []
    limits = [f"{device['power_limit_w']:.0f} W"] if device.get("power_limit_w") else []
    limits += [f"SM clock up to {device['max_sm_mhz']} MHz"] if device.get("max_sm_mhz") else []
    packages = {**environment.packages, **versions}
    lines = [
        ("node", _place(device)),
        ("GPU", ", ".join(gpu)),
        ("UUID", str(device.get("uuid") or "")),
        ("health under load", _health(device.get("health"))),
        ("CPU", str(device.get("cpu") or "")),
        ("limits", ", ".join(limits)),
        ("driver", environment.driver or ""),
        ("CUDA", str(device.get("cuda") or "")),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages.items())),
        ("system", environment.system),
        ("Python", environment.python),
        ("CPUs", str(environment.cpus)),
        ("GPUs in the machine", str(len(environment.gpus)) if len(environment.gpus) > 1 else ""),
    ]
    return tuple((name, value) for name, value in lines if value)


def _place(device: Mapping[str, Any]) -> str:
    parts = [str(device.get("node") or "")]
    parts += [f"GPU {device['index']}"] if device.get("index") is not None else []
    parts += [f"PCI bus {device['pci_bus']}"] if device.get("pci_bus") else []
    return ", ".join(filter(None, parts))


def _health(health: Any) -> str:
    if not isinstance(health, dict) or not health:
        return ""
    return "; ".join(problem.text for problem in health_problems(health, under_load=True)) or "no problems found"
