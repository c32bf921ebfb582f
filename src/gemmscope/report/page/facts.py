"""What every run file says about itself in the same words: model, batch, method, machine."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from gemmscope.report.page.parts import Facts, Subject
from gemmscope.report.units import si
from gemmscope.store.benchfile import RowRecord
from gemmscope.store.runfile import ModelRecord, RunRecord

SPLIT = ("tp", "cp", "pp", "ep")


def subject(model: ModelRecord | None, run: RunRecord | None, rows: Sequence[RowRecord] = ()) -> Subject:
    """Which model and batch; without a model, bare products."""
    if model is None or run is None:
        return Subject("Matrix products", bare=True)
    return Subject(
        title=f"{model.name}: {model_words(model)}",
        model={"hidden size": model.hidden_size, "layers": model.layers, "number of layers": model.num_hidden_layers},
        batch={
            "micro-batch": run.micro_batch_size,
            "sequence": run.sequence_length,
            **{name: getattr(run, name) for name in SPLIT},
            "recompute": run.recompute,
        },
        sizes={row.op: (row.inputs, row.outputs) for row in rows},
    )


def model_words(model: ModelRecord) -> str:
    """The model in a few words.

    >>> model_words(ModelRecord(name="llama", model_type="llama", source="", hidden_size=4096, layers="8 dense"))
    '8 dense layers of width 4096'
    """
    width = f" of width {model.hidden_size}" if model.hidden_size else ""
    return f"{model.layers} layers{width}"


def batch_words(run: RunRecord) -> str:
    """Batch and parallelism in a line."""
    tokens = f"{run.micro_batch_size} x {run.sequence_length} tokens"
    split = [f"{name} {getattr(run, name)}" for name in SPLIT if getattr(run, name) > 1]
    split += ["sequence parallel"] if run.sequence_parallel else []
    split += [f"recompute {run.recompute}"] if run.recompute != "none" else []
    split += [f"{run.gradient_accumulation} micro-batches a step"] if run.gradient_accumulation > 1 else []
    return ", ".join([tokens, *split])


def batch_facts(model: ModelRecord | None, run: RunRecord | None) -> Facts:
    """Model and batch as a list shows them."""
    made = [("model", f"{model.name}, {model_words(model)}")] if model is not None else []
    return (*made, *([("micro-batch", batch_words(run))] if run is not None else []))


def command_facts(command: Sequence[str], version: str) -> Facts:
    """What was typed, and with which gemmscope."""
    return (("command", f"gemmscope {shlex.join(command)}"), ("gemmscope", version))


def machine_facts(environment: Mapping[str, Any], device: Mapping[str, Any], versions: Mapping[str, str]) -> Facts:
    """GPU, driver, packages, system."""
    gpus = [gpu for gpu in environment.get("gpus") or () if isinstance(gpu, Mapping)]
    capability, memory = device.get("compute_capability"), device.get("memory_bytes")
    gpu = [str(device.get("name", "no GPU"))]
    gpu += [f"compute capability {capability}"] if capability else []
    gpu += [si(float(memory), "B")] if memory else []
    gpu += [f"{device['multiprocessors']} multiprocessors"] if device.get("multiprocessors") else []
    limits = [f"{device['power_limit_w']:.0f} W"] if device.get("power_limit_w") else []
    limits += [f"SM clock up to {device['max_sm_mhz']} MHz"] if device.get("max_sm_mhz") else []
    packages = {**(environment.get("packages") or {}), **versions}
    lines = [
        ("GPU", ", ".join(gpu)),
        ("limits", ", ".join(limits)),
        ("driver", str(environment.get("driver") or "")),
        ("CUDA", str(device.get("cuda") or "")),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages.items())),
        ("system", str(environment.get("system") or "")),
        ("Python", str(environment.get("python") or "")),
        ("CPUs", str(environment.get("cpus") or "")),
        ("GPUs in the machine", str(len(gpus)) if len(gpus) > 1 else ""),
    ]
    return tuple((name, value) for name, value in lines if value)
