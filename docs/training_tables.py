"""Tables about the training check: loss gaps of every recipe beside predicted errors, from the recorded runs."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "benchmarks"))
from train_report import BASELINE, Comparison  # noqa: E402

SUMMARY = DOCS / "measured/h200_training.json"


@cache
def _summary() -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(SUMMARY.read_text("utf-8"))
    return summary


def what_was_trained() -> str:
    """Sizes, text, seeds, GPU and versions of the recorded runs."""
    summary = _summary()
    settings, text, seeds = summary["settings"], summary["text"], len(summary["losses"][BASELINE])
    libraries = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    rows = {
        "parameters": f"{summary['parameters'] / 1e6:.1f}M",
        "steps, tokens": f"{settings['steps']:,}, {summary['tokens'] / 1e6:.1f}M",
        "training text, validation text": f"{text['training_bytes'] / 1e6:.1f} MB, {text['validation_bytes'] / 1e6:.2f} MB",
        "learning rate, warm-up": f"{settings['learning_rate']:g}, {settings['warmup']} steps",
        "seeds": str(seeds),
        "GPU": summary["device"],
        "versions": libraries,
    }
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())])


def gaps() -> str:
    """Predicted errors and loss gaps."""
    return Comparison.read(_summary()).table()


def order() -> str:
    """Predicted order and measured order."""
    return Comparison.read(_summary()).rank_sentences()
