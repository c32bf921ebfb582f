"""Reads every recipe and example script of training frameworks: answered, refused with the reason, or wrong.

python benchmarks/framework_files.py bridge=PATH megatron=PATH [torchtitan=PATH] [--refused]

PATH is a checkout. Wrong is an answer whose parameters are far from the size in the name (`8b`), or that differs from
`framework_files.toml`: sizes that were read by hand. The exit status is 1 if anything is wrong. `--refused` lists every refusal.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tomllib

from gemmscope.errors import UserError
from gemmscope.model.hf_keys import accepted
from gemmscope.model.layer_spec import MlpSpec, MoeSpec
from gemmscope.model.readers import read_config
from gemmscope.model.spec import ModelSource
from gemmscope.workload.summary import count_parameters

BY_HAND = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SIZE = re.compile(r"_(\d+(?:p\d+)?)(b|m)(?:_|$)")  # of a name: llama3_8b_pretrain, qwen2_1p5b_pretrain
TOLERANCE = 0.35  # names are rounded, and recipes replace the vocabulary by that of a test tokenizer


@dataclass(frozen=True)
class Entry:
    """One recipe or script: its kind, its name in the tables, and what `--config` gets."""

    kind: str
    name: str
    config: str


def bridge(root: Path) -> Iterator[Entry]:
    """The functions of Megatron-Bridge's recipes that return a configuration: pretraining, and everything else."""
    package = root / "src/megatron/bridge"
    for path in sorted([*package.glob("recipes/**/*.py"), *package.glob("perf_recipes/**/*.py")]):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            returns = ast.unparse(node.returns) if isinstance(node, ast.FunctionDef) and node.returns else ""
            if isinstance(node, ast.FunctionDef) and returns == "ConfigContainer" and re.fullmatch("[^_].*_config", node.name):
                kind = "pretraining" if "pretrain" in node.name else "finetuning"
                yield Entry(kind, f"{path.relative_to(package)}:{node.name}", f"{path}:{node.name}")


def megatron(root: Path) -> Iterator[Entry]:
    """The example scripts of Megatron-LM that have its arguments or run one of its programs."""
    for path in sorted(root.glob("examples/**/*.sh")):
        if re.search(r"--num-layers|pretrain_\w+\.py", path.read_text(encoding="utf-8", errors="replace")):
            yield Entry("scripts", str(path.relative_to(root)), str(path))


FRAMEWORKS: dict[str, Callable[[Path], Iterator[Entry]]] = {"bridge": bridge, "megatron": megatron}
"""The entries of each framework's checkout."""


def wrong(entry: Entry, source: ModelSource) -> str:
    """How an answer differs from what the name or a person says; empty where it does not."""
    model = source.model
    if model is None:
        return "no closed form"
    expected = BY_HAND.get(entry.name, {})
    moe = next((layer.mlp for layer in model.layers if isinstance(layer.mlp, MoeSpec)), None)
    heads = {attention.heads for attention in model.attentions}
    dense = {layer.mlp.intermediate_size for layer in model.layers if isinstance(layer.mlp, MlpSpec)}
    facts = {
        "layers": len(model.layers),
        "hidden": model.hidden_size,
        "heads": max(heads, default=0),
        "kv_heads": max((attention.kv_heads for attention in model.attentions), default=0),
        "head_dim": max((attention.head_dim for attention in model.attentions), default=0),
        "windows": sorted({attention.window for attention in model.attentions} - {None}),
        "ffn": max(dense, default=0),
        "experts": moe.experts if moe else 0,
        "expert_ffn": moe.expert.intermediate_size if moe else 0,
        "top_k": moe.top_k if moe else 0,
        "vocabulary": model.vocab_size or 0,
        "predictions": model.prediction_layers,
        "parameters": count_parameters(model)[0],
        "global_batch": source.global_batch,
        **{name: source.run_settings.get(name, 1) for name in ("tp", "pp", "cp", "ep", "vp")},
        "micro_batch": source.run_settings.get("micro_batch_size"),
        "sequence": source.run_settings.get("sequence_length"),
    }
    differing = [f"{name} {facts[name]} instead of {value}" for name, value in expected.items() if facts[name] != value]
    size = SIZE.search(entry.name.rpartition(":")[2])
    if size:
        named = float(size[1].replace("p", ".")) * {"b": 1e9, "m": 1e6}[size[2]]
        parameters = count_parameters(model)[0]
        if abs(parameters / named - 1) > TOLERANCE:
            differing.append(f"{parameters / 1e9:.2f}B parameters")
    return ", ".join(differing)


def check(framework: str, root: Path, *, list_refused: bool) -> bool:
    """Print what becomes of every entry of one framework; whether none is wrong."""
    commit = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout[
        :10
    ]
    answered, all_of, reasons, differing, by_hand = Counter[str](), Counter[str](), Counter[str](), list[str](), 0
    for entry in FRAMEWORKS[framework](root):
        all_of[entry.kind] += 1
        try:
            source = accepted(read_config(entry.config))
        except UserError as error:
            reason = error.message.split(": ", 1)[-1].replace(str(root), "")
            reasons[f"{entry.kind}: {re.sub(r'model of [a-z0-9_]+[(][)]', 'model', reason)[:150]}"] += 1
            if list_refused:
                print(f"  {entry.name}: {reason}")
            if entry.name in BY_HAND:
                differing.append(f"{entry.name}: refused")
            continue
        by_hand += entry.name in BY_HAND
        answered[entry.kind] += 1
        if difference := wrong(entry, source):
            differing.append(f"{entry.name}: {difference}")
    print(f"{framework} at {commit or 'an unknown commit'}")
    for kind, count in all_of.items():
        print(f"  {kind}: {answered[kind]} of {count} answered ({answered[kind] / count:.0%})")
    print(f"  {by_hand} of them compared with sizes that were read by hand")
    for reason, count in reasons.most_common():
        print(f"  {count:4} {reason}")
    for line in differing:
        print(f"  WRONG {line}")
    return not differing


def main() -> int:
    """Check the frameworks whose folders are given."""
    given = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    results = [check(name, Path(root), list_refused="--refused" in sys.argv) for name, root in given.items()]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
