"""Holds the predictions of `gemmscope step` against real training steps, on the GPU at hand, and writes the findings down.

    python benchmarks/step_on_gpu.py STEPS.json docs/measured/h200_steps.json docs/accuracy.md [MODEL …]

STEPS.json holds measured steps: {"models": {name: {"config": {sizes}, "transformer_engine": {recipe: {"median_ms": …}}}}}. Every
model is predicted from a stack that holds the weights of at most four layers, and verified in the same run. The second file keeps
what was found; the third is made from it, so that models can be run one by one. A minute and a half for each.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def step(config: dict[str, Any], *options: str) -> dict[str, Any]:
    """One run of the command: its run file; stops here if it fails."""
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
            return {}
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def findings(run: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """What is kept of one model's run."""
    real = model["transformer_engine"]
    base = statistics.mean([real["BF16"]["median_ms"], real.get("BF16_again", real["BF16"])["median_ms"]])
    kept = {}
    for each in run["recipes"]:
        if each["recipe"] != "BF16" and each["recipe"] in real:
            kept[each["recipe"]] = {
                "predicted": {key: round(each["speedup"][key], 4) for key in ("value", "low", "high")},
                "before": round(base / real[each["recipe"]]["median_ms"], 4),
                "real": round(each["verified"]["actual"]["value"], 4) if each["verified"] else None,
                "verdict": each["verdict"],
            }
    named = min(each["named_share"] for each in run["recipes"] if each["named_share"] is not None)
    recommended = run["recommendation"]["words"] if run["recommendation"] else "nothing"
    return {
        "date": time.strftime("%Y-%m-%d"), "config": model["config"], "seconds": run["seconds"], "named": round(named, 4),
        "recommended": recommended, "recipes": kept, "device": run["device"]["name"], "driver": run["environment"]["driver"],
        "versions": run["versions"],
    }  # fmt: skip


def _errors(models: dict[str, Any], truth: str) -> list[float]:
    every = [each for model in models.values() for each in model["recipes"].values() if each[truth]]
    return [abs(each["predicted"]["value"] / each[truth] - 1) for each in every]


def _in_words(errors: list[float]) -> str:
    return f"{statistics.mean(errors):.2%} mean error, {max(errors):.2%} at worst ({len(errors)} cases)"


def markdown(models: dict[str, Any]) -> str:
    """The page."""
    some = next(iter(models.values()))
    same, before = _errors(models, "real"), _errors(models, "before")
    lines = [
        "# Predicted against real training steps",
        "",
        f"Written by `benchmarks/step_on_gpu.py` on {some['device']}, "
        f"{', '.join(f'{key} {value}' for key, value in some['versions'].items())}, driver {some['driver']}.",
        "",
        "The speedup of the training step over BF16, predicted from a stack that holds the weights of at most four layers; then "
        "the real model at its full depth, run right after it (`--verify`); and the same models measured earlier on another "
        "machine with a script of its own, whose layers and optimizer are the same and whose numbers were not used. "
        "gpt1b_l16 is partly host-bound: there another machine's host is no truth for this one.",
        "",
        f"* against the real model in the same run: {_in_words(same)}",
        f"* against the other machine: {_in_words(before)}",
        "",
        "| model | recipe | predicted [95%] | real | error | other machine | error | why |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, model in models.items():
        for recipe, each in model["recipes"].items():
            found = each["predicted"]
            cells = [name, recipe, f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"]
            for truth in (each["real"], each["before"]):
                cells += [f"{truth:.3f}", f"{found['value'] / truth - 1:+.1%}"] if truth else ["", ""]
            lines.append(f"| {' | '.join([*cells, each['verdict']])} |")
    lines += ["", "| model | predicting takes | verifying | GPU time named | recommended |", "| --- | ---: | ---: | ---: | --- |"]
    for name, model in models.items():
        seconds = model["seconds"]
        lines.append(
            f"| {name} | {seconds['predicting']:.0f} s | {seconds['verifying']:.0f} s | {model['named']:.1%} | "
            f"{model['recommended']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Every model; the files are written anew after each, so that nothing is lost."""
    truth, kept, page = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), Path(sys.argv[3])
    models = json.loads(kept.read_text()) if kept.exists() else {}
    for name in sys.argv[4:] or truth["models"]:
        run = step(truth["models"][name]["config"], "--verify")
        if run:
            models[name] = findings(run, truth["models"][name])
            kept.write_text(json.dumps(models, indent=1) + "\n", encoding="utf-8")
            page.write_text(markdown(models), encoding="utf-8")
    print(page.read_text() if page.exists() else "nothing was measured")


if __name__ == "__main__":
    main()
