"""Holds `gemmscope bench` against itself and against plain loops, on the GPU at hand, and writes the findings as Markdown.

    python benchmarks/bench_on_gpu.py docs/measured/h200.md

What it shows: how long the reference's model takes, whether two runs agree, whether the autocast total is what an independent
loop of `te.Linear` takes in the same state, and that fallbacks, unaligned shapes, host-bound models, shapes too large for memory
and a killed worker are reported as what they are.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

REFERENCE = (
    "--hidden_size 4096 --intermediate_size 16384 --num_attention_heads 32 --num_hidden_layers 24 "
    "--micro_batch_size 31 --sequence_length 512"
)
SMALL = (
    "--hidden_size 2048 --intermediate_size 8192 --num_attention_heads 16 --num_hidden_layers 24 "
    "--micro_batch_size 8 --sequence_length 1024"
)
EXPERTS = "--preset mixtral-8x7b --micro-batch-size 1 --sequence-length 4096"

PLAIN_LOOP = """
import json, sys, torch, transformer_engine.pytorch as te
from transformer_engine.common import recipe
tokens, inputs, outputs = map(int, sys.argv[1:4])
precision = {"BF16": None, "FP8Current": recipe.Float8CurrentScaling(), "FP8Delayed": recipe.DelayedScaling(),
             "FP8Block": recipe.Float8BlockScaling()}[sys.argv[4]]
layer = te.Linear(inputs, outputs, bias=False, params_dtype=torch.bfloat16)
x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
grad = torch.randn(tokens, outputs, device="cuda", dtype=torch.bfloat16)
def step():
    with te.autocast(enabled=precision is not None, recipe=precision):
        y = layer(x)
    y.backward(grad)
    x.grad = layer.weight.grad = None
for _ in range(400):  # a second or two: hot and at its power limit
    step()
times = []
for _ in range(20):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(10):
        step()
    b.record(); torch.cuda.synchronize()
    times.append(a.elapsed_time(b) / 10)
print(json.dumps(sorted(times)[10]))
"""


def bench(options: str, **environment: str) -> tuple[dict[str, Any], float, int]:
    """One run of the command: its run file, its seconds of wall time, its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.json")
        command = [sys.executable, "-m", "gemmscope", "bench", *options.split(), "--json", str(path)]
        begin = time.perf_counter()
        child = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
        seconds = time.perf_counter() - begin
        if not path.exists():
            print(child.stderr[-2000:])
            return {}, seconds, child.returncode
        return json.loads(path.read_text()), seconds, child.returncode


def speedups(run: dict[str, Any]) -> dict[tuple[str, str], dict[str, float]]:
    """Of all linears together, by (mode, recipe)."""
    return {(each["mode"], each["recipe"]): each["speedup"] for each in run.get("speedups", []) if not each["op"]}


def reference_twice() -> tuple[list[str], dict[str, Any]]:
    """The reference's model, all recipes, both modes, two runs in a row."""
    (first, seconds, _), (second, again, _) = bench(REFERENCE), bench(REFERENCE)
    lines = [
        f"Wall time {seconds:.1f} s and {again:.1f} s ({first['rounds']} and {second['rounds']} rounds; {first['ended']}).",
        "",
        "| mode | recipe | speedup | 95% interval | again | difference |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    other = speedups(second)
    for (mode, name), found in speedups(first).items():
        repeated = other[(mode, name)]["value"]
        interval = f"[{found['low']:.3f}, {found['high']:.3f}]"
        difference = f"{repeated / found['value'] - 1:+.2%}"
        lines.append(f"| {mode} | {name} | {found['value']:.3f} | {interval} | {repeated:.3f} | {difference} |")
    return lines, first


def plain_loops(run: dict[str, Any]) -> list[str]:
    """The autocast total of a linear against a loop that anyone would write, in its own process, hot."""
    lines = [
        "| op | recipe | gemmscope ms | plain loop ms | difference | profiled kernels / total |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in run["rows"]:
        if row["mode"] != "autocast" or row["op"] not in ("QKV Proj", "MLP Down"):
            continue
        sizes = [str(row[name]) for name in ("tokens", "inputs", "outputs")]
        child = subprocess.run(
            [sys.executable, "-c", PLAIN_LOOP, *sizes, row["recipe"]], capture_output=True, text=True, check=False
        )
        if child.returncode:
            print(child.stderr[-1000:])
            continue
        loop, total = json.loads(child.stdout.splitlines()[-1]), row["total_ms"]["value"]
        named = (row["op"], row["recipe"], row["mode"])
        task = next(task for task in run["tasks"] if (task["op"], task["recipe"], task["mode"]) == named)
        profiled = sum(kernel[1] for kernel in task["kernels"]) / 1000 / task["facts"]["copies"] / total
        lines.append(f"| {row['op']} | {row['recipe']} | {total:.3f} | {loop:.3f} | {total / loop - 1:+.2%} | {profiled:.3f} |")
    return lines


def told_apart() -> list[str]:
    """What must be reported as what it is."""
    lines = []
    run, _, code = bench(
        f"{REFERENCE} --recipes fp8current --autocast-only --longest 6 --strict", NVTE_BACKWARD_OVERRIDE="high_precision"
    )
    words = {row["evidence"]["dgrad"]["words"] for row in run["rows"] if row["recipe"] == "FP8Current"}
    lines.append(f"- `NVTE_BACKWARD_OVERRIDE=high_precision`, `--strict`: exit code {code}; dgrad {', '.join(sorted(words))}")
    odd = "--hidden_size 4096 --intermediate_size 16380 --num_attention_heads 32 --num_hidden_layers 2 --micro_batch_size 4"
    run, _, _ = bench(f"{odd} --sequence_length 1024 --recipes fp8current --longest 6")
    failures = dict.fromkeys(f"{task['op']}: {task['failure']}" for task in run["tasks"] if task["failure"])
    lines.append(f"- an intermediate size of 16380: {'; '.join(failures)}")
    run, _, _ = bench(f"{SMALL} --longest 15")
    bound = [f"{row['op']} {row['recipe']}" for row in run["rows"] if row["host_bound"]]
    lines.append(f"- a small model: host-bound are {', '.join(bound) or 'none'}")
    huge = "--hidden_size 65536 --intermediate_size 524288 --num_attention_heads 512 --num_hidden_layers 2 --micro_batch_size 1"
    run, _, code = bench(f"{huge} --sequence_length 8192 --recipes fp8current --autocast-only --longest 10")
    failed = {task["op"]: task["failure_kind"] for task in run.get("tasks", []) if task["failure"]}
    measured = sorted({row["op"] for row in run.get("rows", [])})
    lines.append(f"- shapes too large for memory: exit code {code}; failed {json.dumps(failed)}; measured {', '.join(measured)}")
    return [*lines, *killed()]


def killed() -> list[str]:
    """Kill the worker in the middle of measuring."""

    def kill() -> None:
        time.sleep(16)
        found = subprocess.run(["pgrep", "-f", "gemmscope.measure.worker"], capture_output=True, text=True, check=False)
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    run, _, code = bench(f"{REFERENCE} --recipes fp8current --longest 12")
    thread.join()
    failed = [f"{task['op']} {task['recipe']} {task['mode']}: {task['failure']}" for task in run["tasks"] if task["failure"]]
    counts = f"{sum(not task['failure'] for task in run['tasks'])} of {len(run['tasks'])} tasks measured"
    return [f"- worker killed: exit code {code}; {counts}; failed: {'; '.join(failed) or 'none'}"]


def experts() -> list[str]:
    """A Mixtral layer's grouped products."""
    run, _, _ = bench(f"{EXPERTS} --recipes fp8current,fp8block --autocast-only --longest 15")
    lines = ["| op | recipe | ms | TFLOP/s | quantizing |", "| --- | --- | ---: | ---: | ---: |"]
    for row in run["rows"]:
        if row["groups"] > 1:
            total = row["total_ms"]["value"]
            rate = 6 * row["tokens"] * row["inputs"] * row["outputs"] / total / 1e9
            lines.append(
                f"| {row['op']} | {row['recipe']} | {total:.3f} | {rate:.0f} | {sum(row['quantize_ms'].values()) / total:.1%} |"
            )
    return lines


def main() -> None:
    """Run everything and write it down."""
    target = Path(sys.argv[1])
    table, run = reference_twice()
    device, versions = run["device"], run["versions"]
    text = [
        f"# `gemmscope bench` on {device['name']}",
        "",
        f"Written by `benchmarks/bench_on_gpu.py`. {', '.join(f'{name} {version}' for name, version in versions.items())}, "
        f"CUDA {device['cuda']}, driver {run['environment']['driver']}, power limit {device['power_limit_w']:.0f} W.",
        *("", "## The reference's model, twice", "", f"`gemmscope bench {REFERENCE}`", "", *table),
        *("", "## Against a plain loop of `te.Linear`", "", *plain_loops(run)),
        *("", "## Experts (Mixtral 8x7B, 4096 tokens)", "", *experts()),
        *("", "## Told apart", "", *told_apart()),
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    main()
