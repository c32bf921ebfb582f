"""What `gemmscope.record_tensors` costs a training step, and whether it changes the training.

    python benchmarks/recording_cost.py                            # a Llama of hidden 2048, 4 layers, on a GPU if there is one
    python benchmarks/recording_cost.py --hidden 128 --tokens 64 --vocabulary 512 --dtype float32      # on a CPU
    python benchmarks/recording_cost.py --sizes qwen3-1.7b experts --kinds eager --pairs 5 --check     # the limits below

Blocks of steps without gemmscope, before the recorded steps, and after them take turns. The ratio is that of the median step of
a block to the median step of the block without gemmscope next to it; its interval is the 95% t-interval of the mean logarithm
over all pairs. Recorded steps are timed one by one. Losses and weights of 20 steps with and without recording are compared bit
for bit, next to a second run without it: if that differs already, the training itself is not deterministic.

With `--check`, the exit code is 1 unless no recorded step takes longer than three times a usual one, all recorded steps together
take less than 10 s and the others are within 2%, losses and weights are the same (where the training is deterministic), and the
largest memory in recorded steps is at most 2 GB above that of usual ones.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for the runs that are compared bit for bit

import torch

import gemmscope
from gemmscope.numerics.recording import read_recording

SIZES: dict[str, dict[str, int]] = {
    "qwen3-1.7b": {"hidden": 2048, "intermediate": 6144, "layers": 28, "key_heads": 8, "vocabulary": 151_936},
    "experts": {"hidden": 2048, "intermediate": 768, "layers": 8, "key_heads": 4, "vocabulary": 151_936, "experts": 64},
}
MOST_RATIO, MOST_S, MOST_OTHERS, MOST_BYTES = 3.0, 10.0, 0.02, 2e9  # of `--check`
RECORDED = 8
FEWEST_PAIRS = 5  # 4 degrees of freedom, with which the table begins
T_95 = [2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093]


def options() -> argparse.Namespace:
    """The settings from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="of one sequence; there are 4")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--intermediate", type=int, help="default: 4 times hidden")
    parser.add_argument("--key-heads", type=int, help="default: as many as heads")
    parser.add_argument("--experts", type=int, default=0, help="in every layer, 8 of them for each token")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[], help="instead of the sizes above")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a limit is exceeded")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kinds", nargs="+", default=["eager", "layers"], help="eager, layers (compiled one by one), whole")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--block", type=int, default=8, help="steps")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.pairs < FEWEST_PAIRS:
        parser.error(f"--pairs must be at least {FEWEST_PAIRS}, got {given.pairs}")
    return given


class Training:
    """A model, its optimizer and its data, from a seed."""

    def __init__(self, given: argparse.Namespace, kind: str) -> None:
        from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        heads = max(given.hidden // 128, 1)
        width = given.intermediate or 4 * given.hidden
        of_experts = {"num_experts": given.experts, "num_experts_per_tok": 8, "moe_intermediate_size": width}
        config = (Qwen3MoeConfig if given.experts else LlamaConfig)(
            hidden_size=given.hidden, intermediate_size=width, num_hidden_layers=given.layers, num_attention_heads=heads,
            num_key_value_heads=given.key_heads or heads, vocab_size=given.vocabulary, use_cache=False,
            **(of_experts if given.experts else {}),
        )  # fmt: skip
        with torch.device(self.device):
            self.model: Any = AutoModelForCausalLM.from_config(config).to(getattr(torch, given.dtype)).train()
        if kind == "layers":
            for layer in self.model.model.layers:
                layer.compile()
        elif kind == "whole":
            self.model = torch.compile(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self.device == "cuda")
        self.batches = torch.Generator().manual_seed(1)
        self.shape, self.vocabulary = (4, given.tokens), given.vocabulary

    def step(self) -> torch.Tensor:
        tokens = torch.randint(0, self.vocabulary, self.shape, generator=self.batches).to(self.device)
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def timed(self, after: Any = None) -> float:
        start = time.perf_counter()
        self.step()
        if after is not None:
            after()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The geometric mean, and its 95% interval."""
    logs = [math.log(ratio) for ratio in ratios]
    half = T_95[min(len(logs) - FEWEST_PAIRS, len(T_95) - 1)] * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.mean(logs)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def cost(given: argparse.Namespace, kind: str, folder: Path) -> dict[str, Any]:
    """Ratios of step times, and the times of recorded steps."""
    training = Training(given, kind)
    for _ in range(4):
        training.timed()
    usual_bytes = largest_bytes()
    path = folder / f"{kind}.safetensors"
    finished = gemmscope.record_tensors(training.model, path, steps=RECORDED, after=1)
    with finished:
        inside = [training.timed(finished.step) for _ in range(RECORDED + 2)]
    more_bytes = largest_bytes() - usual_bytes
    waiting = gemmscope.record_tensors(training.model, folder / "never.safetensors", after=1_000_000_000)
    waiting.__enter__()
    blocks: dict[str, list[float]] = {"without": [], "before": [], "after": []}
    actions = {"without": None, "before": waiting.step, "after": finished.step}
    orders = (["without", "before", "after"], ["after", "without", "before"], ["before", "after", "without"])
    for pair in range(given.pairs):
        for name in orders[pair % 3]:
            blocks[name].append(statistics.median(training.timed(actions[name]) for _ in range(given.block)))
    recorded = read_recording(path)
    return {
        "kind": kind,
        "step_ms": 1e3 * statistics.median(blocks["without"]),
        "before": interval([one / other for one, other in zip(blocks["before"], blocks["without"], strict=True)]),
        "after": interval([one / other for one, other in zip(blocks["after"], blocks["without"], strict=True)]),
        "recorded_ms": [1e3 * seconds for seconds in inside[1 : RECORDED + 1]],
        "more_bytes": more_bytes,
        "linears": len(recorded.linears),
        "complete": sum(any(len(step.outputs) == 3 for step in one.measured) for one in recorded.linears),
        "file_mb": path.stat().st_size / 1e6,
    }


def largest_bytes() -> int:
    """The largest memory on the GPU since the last call."""
    if not torch.cuda.is_available():
        return 0
    largest = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return int(largest)


def exceeded(result: dict[str, Any]) -> list[str]:
    """The limits that a result exceeds."""
    ratio, total = max(result["recorded_ms"]) / result["step_ms"], sum(result["recorded_ms"]) / 1e3
    others = max(result[name][1] - 1 for name in ("before", "after"))  # surely slower
    checks = {
        f"a recorded step takes {ratio:.1f} times a usual one": ratio > MOST_RATIO,
        f"recorded steps take {total:.1f} s": total > MOST_S,
        f"other steps take {others:.1%} longer": others > MOST_OTHERS,
        f"{result['more_bytes'] / 1e9:.1f} GB more memory": result["more_bytes"] > MOST_BYTES,
        "losses or weights differ": result["deterministic"] and not result["same"],
    }
    return [text for text, true in checks.items() if true]


def losses(given: argparse.Namespace, kind: str, path: Path | None) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of 20 steps from the same seed, recorded if there is a path, and the weights after them."""
    training = Training(given, kind)
    losses_of_steps = []
    recording = gemmscope.record_tensors(training.model, path, steps=5, after=8) if path is not None else None
    if recording is not None:
        recording.__enter__()
    for _ in range(20):
        losses_of_steps.append(training.step())
        if recording is not None:
            recording.step()
    return [loss.item() for loss in losses_of_steps], [parameter.detach().cpu() for parameter in training.model.parameters()]


def same(one: tuple[list[float], list[torch.Tensor]], other: tuple[list[float], list[torch.Tensor]]) -> bool:
    """Bit for bit."""
    return one[0] == other[0] and all(torch.equal(left, right) for left, right in zip(one[1], other[1], strict=True))


def main() -> None:
    """Every kind, one after the other."""
    given = options()
    results, problems = [], list[str]()
    with tempfile.TemporaryDirectory() as name:
        for sizes, kind in product(given.sizes or [""], given.kinds):
            vars(given).update({"experts": 0} | SIZES[sizes] if sizes else {})
            start = time.perf_counter()
            result = cost(given, kind, Path(name))
            torch.use_deterministic_algorithms(mode=True, warn_only=True)
            without, recorded = losses(given, kind, None), losses(given, kind, Path(name) / "same.safetensors")
            result["same"] = same(without, recorded)
            result["deterministic"] = result["same"] or same(without, losses(given, kind, None))
            torch.use_deterministic_algorithms(mode=False)
            result["seconds"], result["sizes"] = time.perf_counter() - start, sizes
            problems += [f"{sizes} {kind}: {problem}".strip() for problem in exceeded(result)]
            results.append(result)
            show(result)
            if given.json:  # after every kind: a time limit may come before the end
                write(given, results)
    if given.check:
        print("\n".join(problems) or "within all limits")
        sys.exit(bool(problems))


def write(given: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """What was measured so far, with the machine and the settings."""
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    settings = {key: value for key, value in vars(given).items() if key != "json"}
    content = {"machine": machine, "torch": torch.__version__, "settings": settings, "results": results}
    given.json.write_text(json.dumps(content, indent=1))


def show(result: dict[str, Any]) -> None:
    """One result as lines."""
    print(f"{result['sizes']} {result['kind']}: {result['step_ms']:.2f} ms per step without gemmscope")
    for name in ("before", "after"):
        value, low, high = result[name]
        print(f"  {name} the recorded steps: {value:.4f}x [{low:.4f}, {high:.4f}]")
    print("  recorded steps: " + ", ".join(f"{one:.1f} ms" for one in result["recorded_ms"]))
    print(f"  {result['more_bytes'] / 1e9:.2f} GB more memory while they run")
    print(f"  {result['complete']} of {result['linears']} linears complete, {result['file_mb']:.1f} MB")
    equal = (
        "the same, bit for bit"
        if result["same"]
        else "DIFFERENT"
        if result["deterministic"]
        else "the training is not deterministic"
    )
    print(f"  losses and weights of 20 steps with and without recording: {equal} ({result['seconds']:.0f} s in all)")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
