"""Compares the predictions of `gemmscope step` with real training steps on this GPU, and writes the results down.

    python benchmarks/step_on_gpu.py STEPS.json docs/measured/h200_steps.json docs/measured/steps.md [--backend torchao] [MODEL …]

STEPS.json holds measured steps: {"models": {name: {"config": {sizes}, backend: {recipe: {"median_ms": …}}}}}. Every model is
predicted from a stack that holds the weights of at most four layers, and verified in the same run. The second file keeps the
results; the third is generated from it, so that models and backends can be run one by one. One run takes a minute and a half;
with torchao twice as long, because it compiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gemmscope.document import document
from gemmscope.engine.kernels import CAST_SHARE
from gemmscope.findings import Finding, finding
from gemmscope.results.step import StepResult


def step(config: dict[str, Any], *options: str) -> StepResult | None:
    """One run of the command: its result; None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.json")
        sizes = [f"--{name.replace('_', '-')}={value}" for name, value in config.items() if not isinstance(value, bool)]
        flags = [f"--{name.replace('_', '-')}" for name, value in config.items() if value is True]
        command = [sys.executable, "-m", "gemmscope", "step", *sizes, *flags, *options, "--json", str(path)]
        begin = time.perf_counter()
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        print(f"{time.perf_counter() - begin:6.1f} s, exit {child.returncode}: {' '.join(command[3:])}", flush=True)
        if not path.exists():
            print(child.stderr[-1500:], flush=True)
            return None
        return StepResult.model_validate_json(path.read_text())


NAMES = {"FP8Tensorwise": "tensorwise", "FP8Rowwise": "rowwise"}  # of torchao's recipes, as torchao calls them


def summary(run: StepResult, model: dict[str, Any], backend: str) -> dict[str, Any]:
    """The part of a model's result that is kept."""
    real = {name.replace("bf16", "BF16"): measured["median_ms"] for name, measured in model.get(backend, {}).items()}
    base = statistics.mean([real["BF16"], real.get("BF16_again", real["BF16"])]) if real else None
    kept = {}
    for recipe in run.step.recipes:
        before = real.get(NAMES.get(recipe.recipe, recipe.recipe))
        if recipe.speedup is not None and recipe.speedup.known:
            kept[recipe.recipe] = {
                "predicted": {key: round(value, 4) for key, value in asdict(recipe.speedup).items()},
                "before": round(base / before, 4) if base and before else None,
                "real": round(recipe.verified.actual.value, 4) if recipe.verified else None,
                "verdict": _kept_finding(recipe.verdict) if recipe.verdict else None,
            }
    named = min((recipe.named_share for recipe in run.step.recipes if recipe.named_share is not None), default=0.0)
    advice = document(run).advice
    return {
        "date": time.strftime("%Y-%m-%d"), "config": model["config"], "seconds": run.seconds, "named": round(named, 4),
        "recommended": advice.text if advice else "nothing", "recipes": kept, "device": run.where,
        "driver": run.environment.driver, "versions": run.versions,
    }  # fmt: skip


def _kept_finding(verdict: Finding) -> dict[str, Any]:
    """Code and facts of a verdict; its sentence is written with the page."""
    return {"code": verdict.code, "facts": dict(verdict.facts)}


def verdict_text(verdict: dict[str, Any] | None) -> str:
    """The sentence of a kept verdict; `FUSED` marks estimates of fused casts."""
    if verdict is None:
        return ""
    return finding(verdict["code"], **verdict["facts"]).text + (f" {FUSED}" if verdict["facts"].get("fused_casts") else "")


FUSED = "(1)"
FUSED_NOTE = (
    f"{FUSED} Some kernels fuse a cast with a norm or an activation; {CAST_SHARE:.0%} of their time is counted as quantization."
)
HOST_BOUND = ("gpt1b_l16",)  # partly: the CPU of another machine launches at another speed


def errors(models: dict[str, Any], truth: str, *, own: Sequence[str] = ()) -> list[float]:
    """Errors of every case relative to that truth; for the models in `own`, relative to the real model of the same run."""
    every = [
        (recipe["predicted"]["value"], recipe["real" if name in own else truth])
        for name, model in models.items()
        for recipe in model["recipes"].values()
        if recipe[truth]
    ]
    return [abs(predicted / real - 1) for predicted, real in every]


def _in_words(errors: list[float]) -> str:
    return f"{statistics.mean(errors):.2%} mean error, {max(errors):.2%} at worst ({len(errors)} cases)"


def markdown(kept: dict[str, Any]) -> str:
    """The page, from {backend: {model: summary}}."""
    some = next(iter(next(iter(kept.values())).values()))
    versions = {key: value for models in kept.values() for model in models.values() for key, value in model["versions"].items()}
    lines = [
        "# Predicted and real training steps",
        "",
        f"Written by `benchmarks/step_on_gpu.py` on {some['device']}, "
        f"{', '.join(f'{key} {value}' for key, value in versions.items())}, driver {some['driver']}.",
        "",
        "Each row is the speedup of a training step over BF16, not its time; an error of both times does not show. The real "
        "model of the same run shares machine, layers and libraries with the prediction, so it checks the prediction from a few "
        "layers, and nothing else. *Predicted* comes from a stack that holds the weights of at most "
        "four layers. *Real* is the model at its full depth, run right after the prediction (`--verify`). *Other machine* is the "
        "same model measured earlier on another machine by an independent script with the same layers and optimizer; these "
        "numbers were not used for the prediction. gpt1b_l16 is partly host-bound, so the CPU of the other machine affects its "
        "speedup. All that is known of the torchao layers on the other machine is that they are compiled norms and linears.",
    ]
    for backend, models in kept.items():
        lines += ["", f"## {backend}", *_section(models)]
    return "\n".join(lines) + "\n"


def _section(models: dict[str, Any]) -> list[str]:
    same, before = errors(models, "real"), errors(models, "before")
    own = [name for name in HOST_BOUND if name in models and any(recipe["before"] for recipe in models[name]["recipes"].values())]
    fair = errors(models, "before", own=own)
    lines = [
        "",
        *([f"* compared with the real model in the same run: {_in_words(same)}"] if same else []),
        *([f"* compared with the other machine: {_in_words(before)}"] if before else []),
        *([f"* the same, but {', '.join(own)} compared with the real model in the same run: {_in_words(fair)}"] if own else []),
        "",
        "| model | recipe | predicted [95%] | real | error | other machine | error | why |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, model in models.items():
        for recipe, times in model["recipes"].items():
            predicted = times["predicted"]
            cells = [name, recipe, f"{predicted['value']:.3f} [{predicted['low']:.3f}, {predicted['high']:.3f}]"]
            for truth in (times["real"], times["before"]):
                cells += [f"{truth:.3f}", f"{predicted['value'] / truth - 1:+.1%}"] if truth else ["", ""]
            lines.append(f"| {' | '.join([*cells, verdict_text(times['verdict'])])} |")
    if any(FUSED in line for line in lines):
        lines += ["", FUSED_NOTE]
    heads = "| model | predicting took | verifying took | GPU time in known kernels | recommendation |"
    lines += ["", heads, "| --- | ---: | ---: | ---: | --- |"]
    for name, model in models.items():
        took = [f"{model['seconds'][what]:.0f} s" if what in model["seconds"] else "" for what in ("predicting", "verifying")]
        lines.append(f"| {name} | {took[0]} | {took[1]} | {model['named']:.1%} | {model['recommended']} |")
    return lines


def main() -> None:
    """Run every model. The files are written after each one, so that nothing is lost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=Path)
    parser.add_argument("kept", type=Path)
    parser.add_argument("page", type=Path)
    parser.add_argument("--backend", default="transformer_engine")
    parser.add_argument("models", nargs="*")
    arguments = parser.parse_intermixed_args()
    truth = json.loads(arguments.steps.read_text())["models"]
    kept = json.loads(arguments.kept.read_text()) if arguments.kept.exists() else {}
    for name in arguments.models or truth:
        run = step(truth[name]["config"], "--verify", "--backend", arguments.backend)
        if run is not None:
            kept.setdefault(arguments.backend, {})[name] = summary(run, truth[name], arguments.backend)
            arguments.kept.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            arguments.page.write_text(markdown(kept), encoding="utf-8")
    print(arguments.page.read_text() if arguments.page.exists() else "nothing was measured")


if __name__ == "__main__":
    main()
