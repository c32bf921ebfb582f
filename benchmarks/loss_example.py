"""An example of `fork_loop.py`: a small Llama is trained on Python's standard library, and forked at three steps.

    python benchmarks/loss_example.py FOLDER                  # on a CPU: about two minutes on an idle core
    python benchmarks/loss_example.py FOLDER --device cuda    # on a GPU: the 30M model, and whether its training is the same

Writes FOLDER/stepN.json, with every loss of every fork, and FOLDER/log.csv. The training runs with and without forks; exit code
1 if the losses differ (`--once`: with forks only).
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from pathlib import Path

import torch

from fork_loop import fork_losses
from fork_result import time_to_same_loss
from training_model import SIZES, Llama, Size, Text

SMALL = Size(hidden=128, intermediate=256, layers=2, heads=2, sequence=32, batch=8)


def train(folder: Path, given: argparse.Namespace, *, forked: bool) -> list[float]:
    """The losses of the training, with forks after some of its steps."""
    size = SIZES["30M"] if given.device == "cuda" else SMALL
    steps, apart = given.steps, given.steps // 3
    text = Text(size, steps + given.fork_steps, 0, 64, given.device)
    torch.manual_seed(0)
    model = Llama(size, 0).to(given.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, 0.1 + 0.45 * (1 + math.cos(math.pi * min(step / steps, 1))))
    )
    called = torch.compile(model) if given.compiled else model

    def step(batch: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.zeros((), device=given.device)
        for half in text.batch(batch).chunk(2):
            with torch.autocast(given.device, dtype=torch.bfloat16):
                part = called(half) / 2
            part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return loss

    def validate() -> list[torch.Tensor]:
        with torch.no_grad(), torch.autocast(given.device, dtype=torch.bfloat16):
            return [model(batch) for batch in text.validation()]

    losses = []
    for number in range(steps):
        losses.append(float(step(number)))
        if forked and (number + 1) % apart == 0:
            batches = range(number + 1, number + 1 + given.fork_steps)
            result = fork_losses(
                model,
                optimizer,
                step,
                batches,
                recipes=given.recipes.split(","),
                keep_higher=given.keep_higher,
                steps=given.fork_steps,
                validate=validate,
                training_step=number + 1,
            )
            if result is None:
                sys.exit(1)
            result = time_to_same_loss(result, range(1, number + 2), losses)
            result.save(folder / f"step{number + 1}.json")
            print(result, flush=True)
    return losses


def main() -> None:
    """Train with forks, and without them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--fork-steps", type=int, default=60)
    parser.add_argument("--recipes", default="FP8Current,NVFP4")
    parser.add_argument("--keep-higher", default=None)
    parser.add_argument("--compiled", action="store_true", help="compile the model; its forks run uncompiled")
    parser.add_argument("--once", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    losses = train(given.folder, given, forked=True)
    with (given.folder / "log.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("step", "loss"), *enumerate(losses, start=1)])
    if not given.once:
        same = train(given.folder, given, forked=False) == losses
        print("the training is the same with and without forks" if same else "THE TRAINING IS ANOTHER ONE WITH FORKS")
        sys.exit(not same)


if __name__ == "__main__":
    main()
