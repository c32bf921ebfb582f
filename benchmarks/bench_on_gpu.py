"""Compares `gemmscope bench` with itself and with plain loops, on the GPU at hand, and writes the result as Markdown.

    python benchmarks/bench_on_gpu.py docs/measured/h200.md [1 3 …]     # all sections, or only these

It shows how long the reference model takes, whether two runs agree, and whether the autocast total agrees with an independent
loop of `te.Linear` in the same state and with the sum of its parts. It also checks that fallbacks, unaligned shapes, layers that
a filter skips, host-bound models, shapes too large for memory and a killed worker are reported correctly. Takes five minutes.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from gemmscope.interval import Interval
from gemmscope.results.bench import BenchResult
from gemmscope.results.linears import OpTime
from gemmscope.units import ends

REFERENCE = (
    "--hidden_size 4096 --intermediate_size 16384 --num_attention_heads 32 --num_hidden_layers 24 "
    "--micro_batch_size 31 --sequence_length 512"
)
SMALL = (
    "--hidden_size 2048 --intermediate_size 8192 --num_attention_heads 16 --num_hidden_layers 24 "
    "--micro_batch_size 8 --sequence_length 1024"
)
TINY = "--hidden_size 512 --intermediate_size 2048 --num_attention_heads 8 --num_hidden_layers 4 --micro_batch_size 4"
UNALIGNED = "--hidden_size 4096 --intermediate_size 16380 --num_attention_heads 32 --num_hidden_layers 2 --micro_batch_size 4"
HUGE = "--hidden_size 16384 --intermediate_size 1310720 --num_attention_heads 128 --num_hidden_layers 2 --micro_batch_size 2"
EXPERTS = "--preset mixtral-8x7b --micro-batch-size 1 --sequence-length 4096"

# A plain loop in the same state: the linears of a layer one after the other, recipes in turn, so that the GPU is as hot and as
# limited in power as in the bench. Each turn runs for 0.4 s, then for 0.8 s that count; the first two rounds do not count.
PLAIN_LOOP = """
import json, random, sys, time, torch, transformer_engine.pytorch as te
from transformer_engine.common import recipe
made = {"BF16": None, "FP8Current": recipe.Float8CurrentScaling(), "FP8Delayed": recipe.DelayedScaling(),
        "FP8Block": recipe.Float8BlockScaling()}
data, layers, times = {}, {}, {}
for tokens, inputs, outputs, name in json.loads(sys.argv[1]):
    layer = te.Linear(inputs, outputs, bias=False, params_dtype=torch.bfloat16)
    if (inputs, outputs) not in data:
        data[inputs, outputs] = (torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True),
                                 torch.randn(tokens, outputs, device="cuda", dtype=torch.bfloat16))
    layers.setdefault(name, []).append((layer, *data[inputs, outputs]))
    times[inputs, outputs, name] = []
def run(name, layer, x, grad):
    with te.autocast(enabled=made[name] is not None, recipe=made[name]):
        y = layer(x)
    y.backward(grad)
    x.grad = layer.weight.grad = None
def cycle(name):
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(layers[name]) + 1)]
    for mark, each in zip(marks, layers[name]):
        mark.record()
        run(name, *each)
    marks[-1].record()
    return marks
def took(marks):
    marks[-1].synchronize()
    return [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]
for name in layers:
    cycle(name)
once = {name: sum(took(cycle(name))) for name in layers}
for turn in range(8):
    for name in random.sample(list(layers), len(layers)):
        for _ in range(round(400 / once[name])):
            cycle(name)
        seen = [cycle(name) for _ in range(round(800 / once[name]))]
        if turn > 1:
            for marks in seen:
                for (layer, x, grad), ms in zip(layers[name], took(marks)):
                    times[layer.in_features, layer.out_features, name].append(ms)
print(json.dumps([sum(times[i, o, n]) / len(times[i, o, n]) for _, i, o, n in json.loads(sys.argv[1])]))
"""


def bench(options: str, **environment: str) -> tuple[BenchResult | None, float, int]:
    """One run of the command: its result (None if there is none), its seconds of wall time, its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.json")
        command = [sys.executable, "-m", "gemmscope", "bench", *options.split(), "--json", str(path)]
        begin = time.perf_counter()
        child = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
        seconds = time.perf_counter() - begin
        print(f"{seconds:6.1f} s, exit {child.returncode}: {options}", flush=True)
        if not path.exists():
            print(child.stderr[-2000:])
            return None, seconds, child.returncode
        return BenchResult.model_validate_json(path.read_text()), seconds, child.returncode


def must(result: BenchResult | None) -> BenchResult:
    """The result; fails if the run wrote none."""
    assert result is not None, "the run wrote no result"
    return result


def speedups(result: BenchResult) -> dict[tuple[str, str, str, str, str], Interval]:
    """By mode, recipe, the recipe that it is compared with, op (empty: all linears) and pass."""
    return {(entry.mode, entry.recipe, entry.over, entry.op, entry.pass_name): entry.speedup for entry in result.linears.speedups}


def reference_twice() -> tuple[list[str], BenchResult]:
    """The reference model, all recipes, both modes, two runs in a row."""
    (run, seconds, _), (repeat, again, _) = bench(REFERENCE), bench(REFERENCE)
    first, second = must(run), must(repeat)
    own, other = speedups(first), speedups(second)
    lines = [
        f"Wall time {seconds:.1f} s and {again:.1f} s ({first.rounds} and {second.rounds} rounds). "
        f"The widest interval of all {len(own)} speedups, including single ops, passes and pairs of recipes: "
        f"±{max(speedup.half_width for speedup in own.values()):.2%}.",
        "",
        "| mode | recipe | speedup | 95% interval | again | difference |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for key, speedup in own.items():
        mode, name, over, op, _ = key
        if not op and over == "BF16":
            repeated = other[key].value
            difference = f"{repeated / speedup.value - 1:+.2%}"
            lines.append(f"| {mode} | {name} | {speedup.value:.3f} | {ends(speedup)} | {repeated:.3f} | {difference} |")
    moved = [abs(other[key].value / speedup.value - 1) for key, speedup in own.items() if key[3]]
    return [*lines, "", f"Speedups of single ops and passes moved by {max(moved):.2%} at most between the two runs."], first


def profiled_ms(result: BenchResult, cell: OpTime) -> float:
    """Time of the profiled kernels of one execution."""
    named = (cell.op, cell.recipe, cell.mode)
    task = next(task for task in result.tasks if (task.task.case.op, task.task.recipe, task.task.mode) == named)
    return float(sum(kernel[1] for kernel in task.kernels)) / 1000 / int(task.facts["copies"])


def autocast(result: BenchResult) -> list[OpTime]:
    """The ops in autocast mode."""
    return [cell for cell in result.linears.ops if cell.mode == "autocast"]


def plain_loops(result: BenchResult) -> list[str]:
    """The autocast total of every linear compared with a plain loop in its own process, in the same state."""
    lines = [
        "| op | recipe | gemmscope ms | plain loop ms | difference | sum of the parts | profiled kernels |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    cells, cases = autocast(result), {case.op: case for case in result.linears.cases}
    wanted = [[cases[cell.op].tokens, cases[cell.op].inputs, cases[cell.op].outputs, cell.recipe] for cell in cells]
    child = subprocess.run([sys.executable, "-c", PLAIN_LOOP, json.dumps(wanted)], capture_output=True, text=True, check=False)
    if child.returncode:
        return [f"The loop failed: {child.stderr[-500:]}"]
    for cell, loop in zip(cells, json.loads(child.stdout.splitlines()[-1]), strict=True):
        total = cell.total_ms.value
        parts = sum(time.value for time in cell.pass_ms.values()) / total
        texts = (cell.op, cell.recipe, f"{total:.3f}", f"{loop:.3f}", f"{total / loop - 1:+.2%}", f"{parts:.3f}")
        lines.append(f"| {' | '.join(texts)} | {profiled_ms(result, cell) / total:.3f} |")
    return lines


def told_apart() -> list[str]:
    """Cases that must be reported correctly: fallbacks, unaligned sizes, layers that a filter skips."""
    lines = []
    run, _, code = bench(
        f"{REFERENCE} --recipes fp8current --autocast-only --longest 4 --strict", NVTE_BACKWARD_OVERRIDE="high_precision"
    )
    result = must(run)
    ran = {cell.evidence["dgrad"].ran for cell in result.linears.ops if cell.recipe == "FP8Current"}
    counted = [speedup for speedup in result.linears.speedups if speedup.recipe == "FP8Current"]
    lines.append(
        f"- `NVTE_BACKWARD_OVERRIDE=high_precision`, `--strict`: exit code {code}; dgrad ran in {', '.join(sorted(ran))}; "
        f"{len(counted)} speedups formed"
    )
    run, _, _ = bench(f"{UNALIGNED} --sequence_length 1024 --recipes fp8current --longest 4")
    failures = dict.fromkeys(f"{task.task.case.op}: {task.failure}" for task in must(run).tasks if task.failure)
    lines.append(f"- an intermediate size of 16380: {'; '.join(failures)}")
    run, _, _ = bench(f"{TINY} --sequence_length 1024 --recipes fp8rowwise --longest 4")
    notes = dict.fromkeys(f"{cell.op}: {cell.left_in_baseline}" for cell in must(run).linears.ops if cell.left_in_baseline)
    lines.append(f"- torchao, layers of 512: {'; '.join(notes)}")
    return lines


def too_large_and_killed() -> list[str]:
    """Failures that must cost only the tasks they affect."""
    run, _, code = bench(f"{HUGE} --sequence_length 8192 --recipes fp8current --autocast-only --longest 6")
    failed = {task.task.case.op: task.failure_kind for task in must(run).tasks if task.failure}
    measured = sorted({cell.op for cell in must(run).linears.ops})
    large = f"- shapes too large for memory: exit code {code}; failed {json.dumps(failed)}; measured {', '.join(measured)}"
    return [large, *killed()]


def host_bound() -> list[str]:
    """Small layers: GPU time and launch time."""
    result = must(bench(f"{SMALL} --longest 15")[0])
    lines = [
        "| op | recipe | GPU ms | profiled kernels, ms | launch, ms | host-bound | quantization, ms |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: |",
    ]
    for cell in autocast(result):
        times = (f"{time:.3f}" for time in (cell.total_ms.value, profiled_ms(result, cell), cell.host_ms))
        bound = "yes" if cell.host_bound else "no"
        lines.append(f"| {cell.op} | {cell.recipe} | {' | '.join(times)} | {bound} | {cell.quantization_ms:.3f} |")
    return lines


def killed() -> list[str]:
    """Kill the worker in the middle of measuring."""
    with tempfile.TemporaryDirectory() as state:

        def kill() -> None:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and _rounds(Path(state, "gemmscope", "journal.sqlite3")) < 1:
                time.sleep(0.2)
            listed = subprocess.run(["pgrep", "-f", "gemmscope.bench.worker"], capture_output=True, text=True, check=False)
            for pid in listed.stdout.split():
                os.kill(int(pid), signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        run, _, code = bench(f"{REFERENCE} --recipes fp8current --longest 6", XDG_STATE_HOME=state)
        thread.join()
    tasks = must(run).tasks
    failed = [f"{task.task.key}: {task.failure}" for task in tasks if task.failure]
    counts = f"{sum(not task.failure for task in tasks)} of {len(tasks)} tasks measured"
    return [f"- worker killed: exit code {code}; {counts}; failed: {'; '.join(failed) or 'none'}"]


def _rounds(journal: Path) -> int:
    if not journal.exists():
        return 0
    with closing(sqlite3.connect(journal)) as database:
        try:
            return sum('"type": "round"' in content for (content,) in database.execute("SELECT content FROM message"))
        except sqlite3.Error:
            return 0


def rows_of(options: str, groups: int = 0) -> list[str]:
    """A table of another backend, or of experts."""
    result, _, _ = bench(options)
    if result is None:
        return ["It failed."]
    cases = {case.op: case for case in result.linears.cases}
    lines = ["| op | recipe | mode | ms | TFLOP/s | quantization | speedup |", "| --- | --- | --- | ---: | ---: | ---: | ---: |"]
    for cell in result.linears.ops:
        if max(len(cases[cell.op].rows), 1) > groups:
            total = cell.total_ms.value
            rate = 3 * cases[cell.op].flops / total / 1e9
            share = f"{cell.quantization_ms / total:.1%}" if cell.mode == "autocast" else ""
            gain = result.linears.speedup(cell.recipe, cell.mode, cell.op)
            known = f"{gain.value:.3f} {ends(gain)}" if gain else ""
            lines.append(f"| {cell.op} | {cell.recipe} | {cell.mode} | {total:.3f} | {rate:.0f} | {share} | {known} |")
    return lines


def main() -> None:
    """Run everything, or the named sections. The file is written after each section, so that nothing is lost."""
    target, wanted = Path(sys.argv[1]), sys.argv[2:]
    subprocess.run([sys.executable, "-m", "gemmscope", "doctor"], check=True)  # and the frameworks have been imported once
    table, run = reference_twice()
    device, versions = run.device, run.versions
    head = (
        f"# `gemmscope bench` on {device['name']}\n\n"
        f"Written by `benchmarks/bench_on_gpu.py`. {', '.join(f'{name} {version}' for name, version in versions.items())}, "
        f"CUDA {device['cuda']}, driver {run.environment.driver}, power limit {device['power_limit_w']:.0f} W.\n"
    )
    sections: dict[str, Callable[[], list[str]]] = {
        "The reference model, twice": lambda: [f"`gemmscope bench {REFERENCE}`", "", *table],
        "Compared with a plain loop of `te.Linear`": lambda: plain_loops(run),
        "Too large, and killed": too_large_and_killed,
        "Reported correctly": told_apart,
        "A small model": lambda: [f"`gemmscope bench {SMALL}`", "", *host_bound()],
        "Experts (Mixtral 8x7B, 4096 tokens)": lambda: rows_of(f"{EXPERTS} --no-fp8-delayed --longest 12", groups=1),
        "PyTorch's own GEMMs": lambda: rows_of(f"{REFERENCE} --backend torch --longest 12"),
        "torchao, compiled": lambda: rows_of(f"{REFERENCE} --backend torchao --longest 15"),
    }
    earlier = target.read_text(encoding="utf-8").split("\n## ")[1:] if target.exists() else []
    texts = {title: text.strip() for title, _, text in (section.partition("\n") for section in earlier)}
    target.parent.mkdir(parents=True, exist_ok=True)
    for number, (title, section) in enumerate(sections.items(), 1):
        if not wanted or str(number) in wanted:
            texts[title] = "\n".join([f"{time.strftime('%Y-%m-%d')}.", "", *section()])
        parts = [f"\n## {section}\n\n{texts[section]}\n" for section in sections if section in texts]
        target.write_text(head + "".join(parts), encoding="utf-8")
    print(target.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
