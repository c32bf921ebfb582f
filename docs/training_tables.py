"""Tables about the training check: loss gaps of every recipe beside predicted errors, from the recorded runs."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "benchmarks"))
from train_report import Comparison, comparison_of, predicted_errors  # noqa: E402

RUNS = DOCS / "measured/h200_training"


@cache
def _comparison() -> Comparison:
    return comparison_of(RUNS, predicted_errors([RUNS / "numerics.json.gz"]))


def what_was_trained() -> str:
    """Sizes, text, seeds, GPU and versions of the recorded runs."""
    facts = _comparison().facts
    settings, text = facts["settings"], facts["text"]
    libraries = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    rows = {
        "parameters": f"{facts['parameters'] / 1e6:.1f}M",
        "steps, tokens": f"{settings['steps']:,}, {facts['tokens'] / 1e6:.1f}M",
        "training text, validation text": f"{text['training_bytes'] / 1e6:.1f} MB, {text['validation_bytes'] / 1e6:.2f} MB",
        "learning rate, warm-up": f"{settings['learning_rate']:g}, {settings['warmup']} steps",
        "seeds": str(len(_comparison().seeds)),
        "GPU": facts["device"],
        "versions": libraries,
    }
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())])


def gaps() -> str:
    """Predicted errors and loss gaps of every recipe."""
    return _comparison().table()


def groups() -> str:
    """Loss gaps of the recipes with the same predicted error."""
    return _comparison().table_of_groups()


def differences() -> str:
    """Differences of these groups."""
    return _comparison().table_of_differences()


def seeds() -> str:
    """Gaps in training loss, seed by seed, early and at the end."""
    return _comparison().table_of_seeds()


def order() -> str:
    """Predicted order and measured order."""
    return _comparison().rank_sentences()


BLOCKS = {
    "training, setup": what_was_trained,
    "training, gaps": gaps,
    "training, groups": groups,
    "training, differences": differences,
    "training, seeds": seeds,
    "training, order": order,
}
