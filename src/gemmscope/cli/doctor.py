"""`gemmscope doctor`: what this machine can measure, why not the rest, and what to do about it."""

from __future__ import annotations

import importlib.util
import json as json_format
import subprocess
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gemmscope.gpu.environment import Environment, GpuFacts
    from gemmscope.report.shapes import Table

EXAMPLES = """\b
Examples:
  gemmscope doctor
  gemmscope doctor --json -        (attach this to a bug report)
"""


def command(json: Annotated[str | None, typer.Option(metavar="PATH|-", help="Write the findings as JSON.")] = None) -> None:
    """What this machine can measure, and why not the rest.

    Looks at the GPU, the driver and the packages, asks the frameworks which precisions they run here, and says what to
    install or change. Works without a GPU and without torch.
    """
    from gemmscope.cli.output import write
    from gemmscope.gpu.environment import environment
    from gemmscope.report import formats

    found = environment()
    asked = _ask_frameworks()
    if json is not None:
        write(json, json_format.dumps({"environment": asdict(found), "backends": asked}, indent=1) + "\n")
        if json == "-":
            return
    above = ["gemmscope doctor", f"{found.system}, {found.cpus} CPUs, Python {found.python}"]
    above += [f"packages: {', '.join(f'{name} {version}' for name, version in found.packages.items()) or 'none that matter'}"]
    above += [f"driver: {found.driver}" if found.driver else "driver: no NVIDIA driver found"]
    above += [line for gpu in found.gpus for line in _gpu_lines(gpu)]
    formats.print_tables([_table(found, asked)], above, _advice(found, asked))


def _ask_frameworks() -> dict[str, Any]:
    """What the backends say for themselves, from a process that may import torch; empty without torch."""
    if importlib.util.find_spec("torch") is None:
        return {}
    from gemmscope.process import worker_command, worker_environment

    command = worker_command("gemmscope.measure.probe")
    try:
        child = subprocess.run(
            command, env=worker_environment(), capture_output=True, text=True, errors="replace", timeout=180, check=False
        )
    except subprocess.TimeoutExpired:
        return {"torch": {"broken": "importing it took more than three minutes"}}
    lines = child.stdout.strip().splitlines()
    try:
        answer: dict[str, Any] = json_format.loads(lines[-1])
    except (IndexError, ValueError):
        last = (child.stderr.strip().splitlines() or ["no reason given"])[-1]
        return {"torch": {"broken": f"asking it ended with exit code {child.returncode}: {last}"}}
    return answer


def _gpu_lines(gpu: GpuFacts) -> list[str]:
    from gemmscope.recipe.support import architecture_name
    from gemmscope.report.units import si

    kind = architecture_name(gpu.capability) if gpu.capability else "unknown architecture"
    parts = [f"GPU {gpu.index}: {gpu.name}, {kind}"]
    if gpu.memory_bytes:
        parts.append(f"{si(gpu.memory_bytes, 'B')} of memory, {si(gpu.memory_used_bytes or 0, 'B')} in use")
    if gpu.power_limit_w:
        parts.append(f"power limit {gpu.power_limit_w:.0f} W")
    if gpu.max_sm_mhz:
        parts.append(f"SM clock {gpu.now.sm_mhz} of {gpu.max_sm_mhz} MHz")
    if gpu.now.temperature_c is not None:
        parts.append(f"{gpu.now.temperature_c} °C")
    return [", ".join(parts)]


def _table(found: Environment, asked: dict[str, Any]) -> Table:
    """Recipe x backend, from the frameworks where they could be asked, else from the table of architectures."""
    from gemmscope.recipe.recipes import recipes
    from gemmscope.recipe.support import support
    from gemmscope.report.shapes import Table

    capability = next((gpu.capability for gpu in found.gpus if gpu.capability), None)
    rows = []
    for name, recipe in recipes().items():
        for backend in recipe.backends:
            facts = asked.get(backend, {})
            if "why_not" in facts:
                reason = facts["why_not"][name]
            elif "broken" in facts:
                reason = facts["broken"]
            elif capability is not None:
                known = support(name, capability)
                reason = "" if known.runs else known.note
                reason = reason or f"{backend} is not installed"
            else:
                reason = "no NVIDIA GPU" if backend != "cpu" else "torch is not installed"
            rows.append((name, backend, "no" if reason else "yes", reason or recipe.title))
    return Table("What can be measured here", ("Name", "Backend", "Measured", "Description"), tuple(rows))


def _advice(found: Environment, asked: dict[str, Any]) -> list[str]:
    """What to do, in the order in which it helps."""
    from gemmscope.gpu.environment import python_command

    lines = []
    if not asked:
        lines.append(f"to measure: {python_command()} torch (the build for your CUDA), then transformer_engine[pytorch]")
    elif not found.gpus:
        lines.append("no GPU to measure on: gemmscope shapes needs none; gemmscope bench --device cpu shows that measuring works")
    elif "broken" in asked.get("transformer_engine", {}):
        lines.append(f"to measure FP8: {python_command()} --no-build-isolation transformer_engine[pytorch]")
    for gpu in found.gpus:
        if gpu.processes:
            others = ", ".join(map(str, gpu.processes))
            lines.append(
                f"GPU {gpu.index} is in use by other processes ({others}): what is measured beside them is not yours alone"
            )
        elif gpu.utilization is not None and gpu.utilization > 10:
            lines.append(f"GPU {gpu.index} is {gpu.utilization}% busy with something that cannot be seen from here")
    return lines or ["all is well"]
