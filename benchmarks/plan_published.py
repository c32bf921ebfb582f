"""Asks `plan` for the layouts of published runs: is each searched, is it kept, and how far behind plan's best is it?

    python benchmarks/plan_published.py RUNS.csv ... [--only WORD] [--every N] [--stack]

RUNS.csv is a table as benchmarks/fit_stacks.py reads it, or one of Megatron-Bridge's performance summary. Runs on one GPU have no
layout and are left out. `--stack`: plan is asked with the software of the run, else without.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from fit_stacks import COMPILED, STACKS
from gemmscope import signals
from gemmscope.errors import UserError
from gemmscope.forecast.calibration import calibrated
from gemmscope.forecast.communication import network_of
from gemmscope.forecast.layouts import FAST_HOST_GBPS, PlanTask, Space
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.plan import Candidate, Search, order, run_searches, slowdown
from gemmscope.forecast.stacks import software_on, stacks
from gemmscope.gpu.specs import GB, gpu
from gemmscope.job.load import load_model
from gemmscope.model.spec import RunSpec

WITHIN = 1.05  # of plan's best: published layouts should be
BRIDGE = {"GPT OSS 120B": "gpt-oss-120b", "Qwen3_30B_a3B": "qwen3-30b-a3b", "LLAMA3_70B": "llama-3.1-70b",
          "LLAMA3_8B": "llama-3.1-8b"}  # fmt: skip
RECIPES = {"FP8": "FP8Current", "FP8-CS": "FP8Current", "FP8-MX": "MXFP8"}
SWITCHES = {
    "--tp-overlap": ("tp_overlap", True),
    "--no-tp-overlap": ("tp_overlap", False),
    "--cuda-graphs": ("cuda_graphs", True),
    "--separate-projections": ("separate_projections", True),
}
AXES = ("tp", "pp", "vp", "cp", "ep", "micro_batch_size", "recompute", "zero")


@dataclass(frozen=True)
class Question:
    """What plan is asked."""

    model: tuple[str, str]  # preset or config, and which
    chip: str
    gpus: int
    global_batch: int
    sequence: int
    recipe: str
    settings: tuple[tuple[str, Any], ...] = ()
    network: str | None = None
    stack: str | None = None


@dataclass(frozen=True)
class Published:
    """One row: the question, and the layout that ran."""

    name: str
    question: Question
    layout: dict[str, Any] = field(hash=False)


def bridge_row(row: dict[str, str], named: bool) -> Published:
    """A row of Megatron-Bridge's performance summary."""
    size = {name: int(row[name] or 1) for name in ("tp", "pp", "vp", "cp", "ep")}
    stack = ("nvidia" if row["container"] >= "26.06" else "nvidia-26.04") if named else None
    question = Question(
        ("preset", BRIDGE[row["model"]]), row["system"].lower(), int(row["gpus"]), int(row["global_batch"]), int(row["sequence"]),
        RECIPES.get(row["precision"], row["precision"]), stack=stack,
    )  # fmt: skip
    zero = 3 if int(row["fsdp"] or 0) > 1 else 1
    layout = {**size, "micro_batch_size": int(row["micro_batch"]), "zero": zero, "recompute": None}
    return Published(f"Megatron-Bridge {row['container']}", question, layout)


def other_row(row: dict[str, str], folder: Path, named: bool) -> Published:
    """A row of other software."""
    kind, spec = row["model_spec"].split(":", 1)
    compiled = "compile" in row["software"].lower() and row["family"] in COMPILED
    question = Question(
        (kind, str(folder / spec) if kind == "config" else spec), row["gpu"], int(row["gpus"]), int(row["gbs"]), int(row["seq"]),
        row["recipe"], tuple(sorted(SWITCHES[word] for word in row["extra"].split())), row["network"] or None,
        ((COMPILED if compiled else STACKS)[row["family"]]) if named else None,
    )  # fmt: skip
    size = {name: int(row[name]) for name in ("tp", "pp", "vp", "cp", "ep")}
    # A sharded optimizer needs less than none, and as plan searches it, less than sharded gradients.
    zero = 3 if row["shard"] or row["zero"] == "3" else 1
    recompute = None if row["recompute_share"] else row["recompute"]
    layout = {**size, "micro_batch_size": int(row["mbs"]), "zero": zero, "recompute": recompute}
    return Published(row["id"], question, layout)


def rows_of(path: Path, named: bool) -> Iterator[Published]:
    """The rows of a table that are about several GPUs."""
    for row in csv.DictReader(path.open()):
        if int(row["gpus"]) > 1:
            yield bridge_row(row, named) if "container" in row else other_row(row, path.parent, named)


def searched(question: Question) -> tuple[Search, Forecaster]:
    """The search of `gemmscope plan`."""
    source, chip = load_model(**{question.model[0]: question.model[1]}), gpu(question.chip)
    assert source.model is not None
    links = network_of(chip, question.network)
    software = software_on(chip, question.stack, gpus=question.gpus)
    forecaster = Forecaster(chip, "sustained", measured=calibrated(chip.name)[0], software=software)
    task = PlanTask(
        source.model, question.gpus, question.global_batch, question.sequence, links.domain, links.host_gbps >= FAST_HOST_GBPS
    )
    possible = stacks()[software.name].layouts if software.name in stacks() else {}
    search = Search(task, Space(dict(possible), {"optimizer_state": "fp32", **dict(question.settings)}))
    with signals.defer_signals() as pending:
        run_searches(forecaster, [search], [question.recipe], links, pending, lambda _: None)
    search.candidates.sort(key=order)
    return search, forecaster


def same(run: RunSpec, layout: dict[str, Any]) -> bool:
    """Whether a run has the published layout; what is not known of that is any."""
    own = {name: getattr(run, name) for name in AXES} | {"zero": 3 if run.zero_stage == 3 else 1}
    others = (run.offloaded_layers or run.recompute_share < 1) and layout["recompute"] is not None
    return not others and all(wanted in (None, own[name]) for name, wanted in layout.items())


def described(run: RunSpec) -> str:
    """The layout in a few words."""
    sizes = {"TP": run.tp, "PP": run.pp, "VP": run.vp, "CP": run.cp, "EP": run.ep, "mbs": run.micro_batch_size}
    parts = [f"{name}{size}" for name, size in sizes.items() if size > 1] + ["FSDP"] * (run.zero_stage == 3)
    parts += [f"{run.recompute} {run.recompute_share:.0%}"] * (run.recompute != "none")
    return " ".join([*parts, *[f"offload{run.offloaded_layers}"] * bool(run.offloaded_layers)]) or "DP"


def recommended(ordered: list[Candidate], forecaster: Forecaster) -> Candidate | None:
    """Plan's best: the fastest; where its memory is tight or it offloads, the fastest that is as fast as far as is known."""
    safe = (other for other in ordered if other is ordered[0] or is_close(ordered[0], other, forecaster))
    usual = (other for other in safe if other.fit != "tight" and not other.run.offloaded_layers)
    return next(usual, ordered[0] if ordered else None)


def is_close(best: Candidate, other: Candidate, forecaster: Forecaster) -> bool:
    """Whether it is too close to call between both."""
    low = slowdown(best, other, forecaster).interval().low
    return low is not None and low <= 1


def waits(candidate: Candidate) -> str:
    """What the step is spent on, in percent."""
    parts = sorted(candidate.step.parts_ms.items(), key=lambda item: -item[1])[:5]
    exposed = [f"{wait.kind} {wait.exposed_ms / candidate.step.time_ms:.0%}" for wait in candidate.step.exchanged]
    return ", ".join([f"{part} {time_ms / candidate.step.time_ms:.0%}" for part, time_ms in parts] + exposed)


def main() -> None:
    """One line for each published layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--only", default="", help="rows whose name, model or GPU has one of these words")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--stack", action="store_true")
    parser.add_argument("--detail", action="store_true", help="what the steps are spent on")
    asked = parser.parse_args()
    every: dict[tuple[Question, str], Published] = {}
    for one in (row for path in asked.runs for row in rows_of(path, asked.stack)):
        every.setdefault((one.question, str(one.layout)), one)
    wanted = asked.only.split(",")
    chosen = [one for one in every.values() if any(part in f"{one.name} {one.question}" for part in wanted)][:: asked.every]
    groups: dict[Question, list[Published]] = {}
    for one in chosen:
        groups.setdefault(one.question, []).append(one)
    behind: list[float] = []
    counts = {"kept": 0, "may not fit": 0, "dropped": 0, "not searched": 0, "too close to call": 0}
    for question, of_question in groups.items():
        try:
            search, forecaster = searched(question)
        except UserError as error:
            print(of_question[0].name, error.message, flush=True)
            continue
        best = recommended(search.candidates, forecaster)
        for one in of_question:
            about = f"{one.name:24} {Path(question.model[1]).stem:16} {question.chip} x {question.gpus:4} {question.recipe:10}"
            runs = [run for run in search.runs if same(run, one.layout)]
            kept = [candidate for candidate in search.candidates if same(candidate.run, one.layout)]
            layout = " ".join(f"{name}{value}" for name, value in one.layout.items() if value not in (None, 1, "none"))
            if not kept or best is None:
                what = "dropped" if runs else "not searched"
                counts[what] += 1
                print(f"{about} {layout}: {what}", flush=True)
                continue
            mine = kept[0]
            close = mine is best or is_close(best, mine, forecaster)
            behind.append(mine.step.time_ms / best.step.time_ms)
            counts["may not fit" if mine.fit == "may not fit" else "kept"] += 1
            counts["too close to call"] += close
            print(
                f"{about} {layout}: {mine.fit}, {mine.memory_gb:.0f} of {forecaster.chip.memory_bytes / GB:.0f} GB, "
                f"{behind[-1] - 1:+.1%}{' (too close to call)' if close else ''}; best {described(best.run)}, "
                f"{best.fit}, {best.memory_gb:.0f} GB",
                flush=True,
            )
            if asked.detail:
                print(f"    published {waits(mine)}\n    best      {waits(best)}")
    print(counts)
    if behind:
        within = sum(value <= WITHIN for value in behind)
        print(f"{len(behind)} kept: {median(behind) - 1:+.1%} in the median, {max(behind) - 1:+.1%} at most, {within} within 5%")


if __name__ == "__main__":
    main()
