"""Forks one BF16 training into several in different precisions, and compares their losses batch by batch.

    python benchmarks/train_fork.py OUT                                                    # on a GPU: 30M parameters
    python benchmarks/train_fork.py OUT --size toy --before 60 --steps 20 --device cpu     # on a CPU, to try it

A Llama is trained in BF16, and its last steps are recorded. Weights, float32 masters and the optimizer's state are then the start
of every arm: BF16; BF16 with the last bit of one weight, and of half of all weights, changed (controls: what chance alone does);
NVFP4 (emulated) in all linears of the layers; and NVFP4 with some linears kept in BF16, all at the cost of the first and the last
layer: those two layers, the mix that the predicted damage chooses, and the mix that relative errors choose ("old"). Mixes keep
first layers, last layers and linears of all layers, of at most as many FLOPs.

The gap of an arm is its loss minus that of BF16 on the same batch. Its mean over all batches, and over the last third, has a 95%
interval from the means of ten blocks of batches, because neighbors are alike. OUT/fork.json has every loss; it is written after
every arm.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn

import gemmscope
from damage import best_kept, cells_of
from gemmscope.engine.stats import student
from gemmscope.numerics.evaluation.emulate import Emulation
from gemmscope.numerics.evaluation.error_table import error_table
from train_recipes import Masters, Settings, flip_last_bits
from training_model import SIZES, Llama, Text

RECIPE, BASELINE = "NVFP4", "BF16"
BLOCKS, RECORDED = 10, 8
Cells = set[tuple[int, str]]
"""Layers and linears that are kept in BF16."""


@dataclass(frozen=True)
class Start:
    """Where all arms begin."""

    weights: Mapping[str, torch.Tensor]
    masters: list[torch.Tensor]
    optimizer: Mapping[str, Any]
    before: int


def copied(value: Any) -> Any:
    """A copy that shares no tensor."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    return [copied(one) for one in value] if isinstance(value, list) else value


def trained(settings: Settings, text: Text, before: int, seed: int, path: Path) -> tuple[Start, float]:
    """Train in BF16, and record the last steps."""
    size = SIZES[settings.size]
    model = Llama(size, seed).to(settings.device, torch.bfloat16)
    masters, loss = Masters(model, settings), torch.zeros(())
    with gemmscope.record_tensors(model, path, steps=RECORDED, after=before - RECORDED) as recording:
        for step in range(before):
            loss = model(text.batch(step))
            loss.backward()
            masters.step(settings.rate(step))
            recording.step()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return Start(state, copied(masters._masters), copied(masters._optimizer.state_dict()), before), loss.item()


def mixes(path: Path, layers: int) -> dict[str, Cells]:
    """The cells that every arm with NVFP4 keeps in BF16."""
    table = error_table(gemmscope.quantization_errors(path, recipes=[BASELINE, RECIPE]).linears)
    assert table is not None

    def by_cell(values: Any) -> dict[tuple[int, str], float]:
        return {
            (layer, linear): float(values[row, column])
            for row, layer in enumerate(table.layers)
            for column, linear in enumerate(table.linears)
        }

    flops = by_cell(table.flops)
    ends = {cell for cell in flops if cell[0] in (0, layers - 1)}
    share = sum(flops[cell] for cell in ends)
    new, old = (best_kept(by_cell(values[RECIPE]), flops, share) for values in (table.squares, table.relative))
    return {RECIPE: set(), "first and last layer": ends, "new mix": new, "old mix": old}


def arm(start: Start, settings: Settings, text: Text, name: str, kept: Cells | None, steps: int, seed: int) -> list[float]:
    """The losses of one arm. `kept`: None if nothing is quantized."""
    torch.manual_seed(seed)
    model = Llama(SIZES[settings.size], 0).to(settings.device, torch.bfloat16)
    model.load_state_dict(start.weights)
    masters = Masters(model, settings)
    for master, value in zip(masters._masters, start.masters, strict=True):
        master.data.copy_(value)
    masters._optimizer.load_state_dict(copied(start.optimizer))
    if name.startswith(f"{BASELINE} with"):
        flip_last_bits(model, seed, one="one" in name)
        for master, parameter in zip(masters._masters, model.parameters(), strict=True):
            master.data.add_(parameter.detach().float() - master.data.bfloat16().float())
    precision: Any = nullcontext()
    if kept is not None:
        precision = emulation(model, settings, kept, seed)
    losses = torch.zeros(steps, device=settings.device)
    for step in range(steps):
        with precision:
            loss = model(text.batch(start.before + step))
        loss.backward()
        losses[step] = loss.detach()
        masters.step(settings.rate(start.before + step))
    return [float(one) for one in losses.tolist()]


def emulation(model: nn.Module, settings: Settings, kept: Cells, seed: int) -> Emulation:
    """The linears of the layers in the recipe, but for those that are kept."""

    def why_kept(path: str) -> str:
        return "the head" if path == "lm_head" else "kept" if cells_of(f".{path}") in kept else ""

    if settings.device == "cpu":
        return Emulation(model, RECIPE, why_kept=why_kept, seed=seed)
    from compiled_quantizers import compiled

    return Emulation(model, RECIPE, why_kept=why_kept, **compiled())


def gap(losses: list[float], reference: list[float]) -> dict[str, float]:
    """The mean difference, and half of its 95% interval."""
    differences = [one - other for one, other in zip(losses, reference, strict=True)]
    length = max(len(differences) // BLOCKS, 1)
    means = [fmean(differences[place : place + length]) for place in range(0, length * BLOCKS, length) if differences[place:]]
    return {"mean": fmean(differences), "half_width": student(len(means) - 1) * stdev(means) / len(means) ** 0.5}


def arms(kept: Mapping[str, Cells]) -> Iterator[tuple[str, Cells | None]]:
    """The name of every arm and what it keeps in BF16. BF16 comes first."""
    yield from (
        (name, None) for name in (BASELINE, f"{BASELINE} with one bit changed", f"{BASELINE} with half of the bits changed")
    )
    yield from kept.items()


def main() -> None:
    """Train, fork, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=SIZES, default="30M")
    parser.add_argument("--before", type=int, default=1000, help="steps in BF16 before the fork")
    parser.add_argument("--steps", type=int, default=300, help="of every arm")
    parser.add_argument("--seeds", type=int, default=2, help="runs of every arm, with other random roundings and changed bits")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no arm starts that might not end in time")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    began, longest, size = time.monotonic(), 0.0, SIZES[given.size]
    # the rate goes down slowly: the arms run at about half of the highest one
    settings = Settings(size=given.size, steps=2 * (given.before + given.steps), warmup=given.before // 10, device=given.device)
    text = Text(size, given.before + given.steps, 0, min(64, settings.validation_windows), given.device)
    start, loss = trained(settings, text, given.before, 0, given.out / "fork.safetensors")
    kept = mixes(given.out / "fork.safetensors", size.layers)
    print(f"{given.before} steps in BF16, loss {loss:.4f}, {time.monotonic() - began:.0f} s", flush=True)
    done: list[dict[str, Any]] = []
    reference: list[float] = []
    for seed in range(given.seeds):
        for name, cells in arms(kept):
            arm_began = time.monotonic()
            if (seed and name == BASELINE) or arm_began - began + longest > given.seconds:
                continue
            losses = arm(start, settings, text, name, cells, given.steps, seed)
            reference, longest = reference or losses, max(longest, time.monotonic() - arm_began)
            third = len(losses) // 3
            row = {"arm": name, "seed": seed, "kept": sorted(map(list, cells or ())), "gap": gap(losses, reference),
                   "last_third": gap(losses[-third:], reference[-third:]), "losses": losses}  # fmt: skip
            done.append(row)
            whole, last = (f"{row[key]['mean']:+.4f} ± {row[key]['half_width']:.4f}" for key in ("gap", "last_third"))
            print(
                f"{name:32} seed {seed}: gap {whole}, in the last third {last}, {time.monotonic() - arm_began:.0f} s", flush=True
            )
            machine = torch.cuda.get_device_name() if given.device != "cpu" else "CPU"
            content = {"machine": machine, "torch": torch.__version__, "before": given.before, "steps": given.steps, "arms": done}
            (given.out / "fork.json").write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
