"""`gemmscope doctor`: what this machine can measure, why not the rest, and what to do about it."""

import importlib.util
import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from gemmscope.document.table import Column, Table, table
from gemmscope.gpu.environment import Environment, GpuFacts, environment, python_command
from gemmscope.gpu.health import Health, health_facts, health_problems
from gemmscope.gpu.nvml import open_nvml
from gemmscope.grouping import grouped
from gemmscope.process import run_worker
from gemmscope.recipe.recipes import recipes
from gemmscope.recipe.support import architecture_name, support
from gemmscope.text import visible_json
from gemmscope.units import listed, si

BUSY = 10  # per cent of utilization
LONGEST_S = 180
WITHOUT_GPU = "shapes, forecast, plan, explain, compare and report need no GPU."


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The machine, and what each backend reports: its versions and why it cannot run a recipe, or why it does not load.

    `health`: of each GPU by its number, read while the GPU may be idle.
    """

    machine: Environment
    backends: dict[str, Any]
    health: dict[int, Health] = field(default_factory=dict)

    def __repr__(self) -> str:
        gpus = ", ".join(gpu.name for gpu in self.machine.gpus) or "no GPU"
        return f"<Diagnosis: {gpus}; {', '.join(self.machine.packages) or 'no framework'}>"

    def __str__(self) -> str:
        return "\n".join((*self.answer(), *self.lines()))

    def to_json(self) -> str:
        return (
            visible_json(
                json.dumps({"environment": asdict(self.machine), "health": self.health, "backends": self.backends}, indent=1)
            )
            + "\n"
        )

    def answer(self) -> list[str]:
        """What can be measured here, then problems and what to do about them."""
        measured = grouped(
            (backend, name) for (name, backend), reason in self._reasons().items() if backend != "cpu" and not reason
        )
        if measured:
            parts = (f"{listed(names)} with {backend}" for backend, names in measured.items())
            can = f"This machine can measure {'; '.join(parts)}."
        else:
            missing = "torch is not installed" if not self.backends else "no framework here can use its GPU"
            why = missing if self.machine.gpus else "it has no NVIDIA GPU, or no driver for it"
            can = f"This machine cannot measure on a GPU: {why}. {WITHOUT_GPU}"
        return [can, *(self.problems() or (["No problems found."] if measured else []))]

    def lines(self) -> list[str]:
        """System, packages, driver and GPUs."""
        packages = ", ".join(f"{name} {version}" for name, version in self.machine.packages.items())
        return [
            f"system: {self.machine.system}, {self.machine.cpus} CPUs, Python {self.machine.python}",
            f"packages: {packages or 'none of the supported frameworks'}",
            f"driver: {self.machine.driver or 'no NVIDIA driver found'}",
            *map(_gpu_line, self.machine.gpus),
        ]

    def table(self) -> Table:
        """Recipes in rows and backends in columns: what the frameworks report, or else what the architecture supports."""
        reasons = self._reasons()

        def answer(backend: str, name: str) -> str | None:
            reason = reasons.get((name, backend))
            return None if reason is None else "no" if reason else "yes"

        return table(
            "backends",
            "What can be measured here",
            recipes(),
            Column[str]("Recipe", str),
            *(Column(backend, partial(answer, backend)) for backend in dict.fromkeys(backend for _, backend in reasons)),
            note="-: the backend does not have this recipe.",
        )

    def why_not(self) -> list[str]:
        """The reasons for every "no" of the table: by backend where one reason covers all of its recipes, else by recipe."""
        names = grouped(((backend, reason), name) for (name, backend), reason in self._reasons().items())
        reasons_of = Counter(backend for backend, _ in names)
        return [
            f"{backend}{'' if reasons_of[backend] == 1 else f', {listed(without)}'}: {reason}"
            for (backend, reason), without in names.items()
            if reason
        ]

    def _reasons(self) -> dict[tuple[str, str], str]:
        """(recipe, backend) → why it cannot be measured, or an empty text."""
        return {
            (name, backend): self._why_not(name, backend) for name, recipe in recipes().items() for backend in recipe.backends
        }

    def _why_not(self, name: str, backend: str) -> str:
        facts = self.backends.get(backend, {})
        if "why_not" in facts:
            return str(facts["why_not"][name])
        if "broken" in facts:
            return str(facts["broken"])
        capability = next((gpu.capability for gpu in self.machine.gpus if gpu.capability), None)
        if capability is None:
            return "no NVIDIA GPU" if backend != "cpu" else "torch is not installed"
        known = support(name, capability)
        return f"{backend} is not installed" if known.runs else known.note

    def problems(self) -> list[str]:
        """What prevents or distorts measurements, and what to do; the most important first."""
        lines = []
        if not self.backends:
            install = f"{python_command()} torch (the build for your CUDA), then transformer_engine[pytorch]"
            lines.append(f"{'On a machine with a GPU' if not self.machine.gpus else 'To measure'}: {install}")
        elif not self.machine.gpus:
            lines.append("To try out a measurement on the CPU: gemmscope bench --shapes 512 --device cpu")
        elif "broken" in self.backends.get("transformer_engine", {}):
            lines.append(
                f"To measure with Transformer Engine: {python_command()} --no-build-isolation transformer_engine[pytorch]"
            )
        for gpu in self.machine.gpus:
            if gpu.processes:
                others = ", ".join(map(str, gpu.processes))
                lines.append(f"GPU {gpu.index} is in use by other processes ({others}), which would distort the times.")
            elif gpu.utilization is not None and gpu.utilization > BUSY:
                lines.append(f"GPU {gpu.index} is {gpu.utilization}% busy with processes that are not visible from here.")
        return [*lines, *self._health_problems()]

    def _health_problems(self) -> list[str]:
        """Problems of the GPUs themselves. Where all GPUs of a product have equally many NVLinks active, none is missing."""
        lines = []
        for gpu in self.machine.gpus:
            health = dict(self.health.get(gpu.index, {}))
            alike = [other.index for other in self.machine.gpus if other.name == gpu.name]
            if len(alike) > 1 and len({self.health.get(index, {}).get("nvlinks_active") for index in alike}) == 1:
                health.pop("nvlinks_active", None)
            problems = health_problems(health, under_load=False)
            lines += [f"GPU {gpu.index}: {problem.text} ({problem.remedy})" for problem in problems]
        return lines


def diagnose() -> Diagnosis:
    """Look at this machine and ask the frameworks."""
    return Diagnosis(environment(), _ask_frameworks(), _health())


def _health() -> dict[int, Health]:
    nvml = open_nvml()
    return {index: health_facts(gpu) for index in range(nvml.count()) if (gpu := nvml.gpu(index))} if nvml else {}


def _ask_frameworks() -> dict[str, Any]:
    """What the backends report, from a process that may import torch; empty without torch."""
    if importlib.util.find_spec("torch") is None:
        return {}
    worker = run_worker("gemmscope.bench.probe", time_limit_s=LONGEST_S)
    code = worker.ending.code
    if code is None:
        return {"torch": {"broken": "importing it took more than three minutes"}}
    if not worker.text:
        return {"torch": {"broken": f"asking it ended with exit code {code}: {worker.reason}"}}
    return dict(json.loads(worker.text))


def _gpu_line(gpu: GpuFacts) -> str:
    architecture = architecture_name(gpu.capability) if gpu.capability else "unknown architecture"
    parts = (
        f"GPU {gpu.index}: {gpu.name}, {architecture}",
        f"{si(gpu.memory_bytes, 'B')} of memory, {si(gpu.memory_used_bytes or 0, 'B')} in use" if gpu.memory_bytes else "",
        f"power limit {gpu.power_limit_w:.0f} W" if gpu.power_limit_w else "",
        f"SM clock {gpu.now.sm_mhz} of {gpu.max_sm_mhz} MHz" if gpu.max_sm_mhz else "",
        f"{gpu.now.temperature_c} °C" if gpu.now.temperature_c is not None else "",
    )
    return ", ".join(filter(None, parts))
