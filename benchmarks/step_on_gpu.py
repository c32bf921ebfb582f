"""Holds the predictions of `gemmscope step` against real training steps, on the GPU at hand, and writes the findings as Markdown.

    python benchmarks/step_on_gpu.py STEPS.json docs/accuracy.md

STEPS.json holds measured steps: {"models": {name: {"config": {sizes}, "transformer_engine": {recipe: {"median_ms": …}}}}}. Every
model is predicted from a stack that holds the weights of at most four layers, and verified in the same run.
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


def step(config: dict[str, Any], *options: str) -> tuple[dict[str, Any], float, str]:
    """One run of the command: its run file, its seconds, what it said if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.json")
        sizes = [f"--{name.replace('_', '-')}={value}" for name, value in config.items() if not isinstance(value, bool)]
        flags = [f"--{name.replace('_', '-')}" for name, value in config.items() if value is True]
        command = [sys.executable, "-m", "gemmscope", "step", *sizes, *flags, *options, "--json", str(path)]
        begin = time.perf_counter()
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - begin
        print(f"{seconds:6.1f} s, exit {child.returncode}: {' '.join(command[3:])}", flush=True)
        return (json.loads(path.read_text()) if path.exists() else {}), seconds, child.stderr[-1500:]


def main() -> None:
    """Every model; the file is written anew after each, so that nothing is lost."""
    truth, target = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    rows, errors, notes = [], [], []
    for name, model in truth["models"].items():
        run, seconds, complaint = step(model["config"], "--verify")
        if not run:
            notes.append(f"- {name} failed: {complaint}")
            continue
        real = model["transformer_engine"]
        base = statistics.mean([real["BF16"]["median_ms"], real.get("BF16_again", real["BF16"])["median_ms"]])
        for each in run["recipes"]:
            if each["recipe"] == "BF16" or each["recipe"] not in real:
                continue
            gain = base / real[each["recipe"]]["median_ms"]
            found, verified = each["speedup"], each["verified"]
            errors.append(found["value"] / gain - 1)
            cells = (
                name, each["recipe"], f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]", f"{gain:.3f}",
                f"{errors[-1]:+.1%}", f"{verified['actual']['value']:.3f}" if verified else "",
                f"{verified['error']:+.1%}" if verified else "", each["verdict"],
            )  # fmt: skip
            rows.append(f"| {' | '.join(cells)} |")
        named = min((each["named_share"] for each in run["recipes"] if each["named_share"] is not None), default=0.0)
        recommended = run["recommendation"]["words"] if run["recommendation"] else "nothing"
        notes.append(f"- {name}: {seconds:.0f} s with verification; {named:.1%} of GPU time named; {recommended}")
        text = [
            "# Predicted against real training steps",
            "",
            f"Written by `benchmarks/step_on_gpu.py` on {run['device']['name']}, "
            f"{', '.join(f'{key} {value}' for key, value in run['versions'].items())}, driver {run['environment']['driver']}.",
            "",
            f"Mean error {statistics.mean(map(abs, errors)):.2%}, worst {max(map(abs, errors)):.2%} over {len(errors)} cases.",
            "",
            "| model | recipe | predicted speedup | measured before | error | real, same run | error | why |",
            "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |",
            *rows,
            "",
            *notes,
        ]
        target.write_text("\n".join(text) + "\n", encoding="utf-8")
    print(target.read_text() if target.exists() else "\n".join(notes))


if __name__ == "__main__":
    main()
