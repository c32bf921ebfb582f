"""Freezes every answer that needs no GPU, so that a change of the code can be shown to change no number.

    python benchmarks/frozen_numbers.py write before.json.gz                       # of this checkout
    python benchmarks/frozen_numbers.py write after.json.gz --root OTHER_CHECKOUT  # of another one
    python benchmarks/frozen_numbers.py compare before.json.gz after.json.gz --text

`write` runs the command line in this process: shapes and forecasts of every preset, layouts, every GPU, plans, sweeps, numerics,
every trace, reports and comparisons of recorded runs. It rebuilds every result of `tests/support/results.py` too, benches and
steps replayed from H200 recordings among them. `--only forecast plan` selects cases by the start of their name. `--traces`,
`--configs` and `--inputs` add folders of traces, configs and tensors (recorded.safetensors, checkpoint/model.safetensors).

`compare` exits with 1 if an exit code, a number (relative 1e-12) or a value of a run file differs; `--text` also shows where the
printed text differs.
"""

from __future__ import annotations

import argparse
import difflib
import gzip
import io
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from shlex import quote
from typing import Any

from gemmscope.toml import load_data

TOLERANCE = 1e-12
VOLATILE = re.compile(r"/(created|created_at|date|time|command|version|gemmscope|seconds|host|hostname)$")
BATCH = "--micro-batch-size 1 --sequence-length 4k"
SHORT_BATCH = "--micro-batch-size 8 --sequence-length 512"
ENCODERS = ("bert", "roberta", "gpt2", "modernbert")  # shorter sequences
WITH_RUN_FILE = ("shapes", "forecast", "plan", "explain", "compare", "numerics", "fleet")
Cases = Iterator[tuple[str, str]]  # names and command lines

LAYOUTS = {  # preset and options; one sequence of 4k
    "tp8 pp4": "llama-3.1-70b --tp 8 --pp 4 --sequence-parallel --gpus 64 --gradient-accumulation 16",
    "vp": "llama-3.1-70b --tp 4 --pp 4 --vp 5 --gpus 128 --global-batch 256 --zero 1 --tp-overlap --sequence-parallel",
    "pp_stage": "llama-3.1-70b --tp 8 --pp 4 --pp-stage 0",
    "pp_layers": "llama-3.1-70b --tp 8 --pp 4 --pp-layers 18,21,21,20 --recompute full",
    "cp": "llama-3.1-8b --cp 2 --gpus 8 --optimizer-state bf16",
    "replicas": "llama-3.1-8b --gpus 8 --zero 0",
    "zero 3": "llama-3.1-8b --gpus 8 --zero 3 --no-dp-overlap",
    "offload": "llama-3.1-8b --gpus 8 --offloaded-layers 8",
    "cost": "llama-3.1-8b --tokens 2T --price h200=2.5,b200=4 --gpus 64",
    "torchao": "llama-3.1-8b --recipes fp8current,fp8rowwise,fp8tensorwise,fp8rowwisegwhp",
    "mix": "llama-3.1-8b --keep-higher first=1,last=2,mlp.down_proj",
    "mix, tp": "llama-3.1-8b --tp 2 --keep-higher 'first=1,Attn Out'",
    "network": "llama-3.1-8b --gpus 64 --network ethernet-400",
    "domain": "llama-3.1-8b --gpus 64 --tp 8 --nvlink-domain 72",
    "burst": "llama-3.1-8b --state burst",
    "counting": "llama-3.1-8b --as-te-benchmark",
    "pre-quantized": "llama-3.1-8b --pre-quantize",
    "autocast": "llama-3.1-8b --autocast-only",
    "graphs": "llama-3.1-8b --cuda-graphs --cache-weights",
    "experts": "qwen3-30b-a3b --ep 8 --gpus 16 --ep-overlap",
    "experts, etp": "qwen3-30b-a3b --ep 4 --tp 2 --etp 1 --gpus 16 --imbalance 1.3",
    "hybrid": "nemotron-h-8b --tp 2",
    "unknown GPU": "llama-3.1-8b --gpu h1000",
    "no batch": "llama-3.1-8b",
}
PLANS = {
    "dense": "llama-3.1-8b --gpu h100 --gpus 16 --global-batch 128 --sequence-length 8k",
    "large": "llama-3.1-70b --gpu b200 --gpus 64 --global-batch 256 --sequence-length 8k --detail",
    "experts": "qwen3-30b-a3b --gpu h200 --gpus 32 --global-batch 256 --sequence-length 4k",
    "variants": "llama-3.2-1b --gpu h200 --gpus 8 --global-batch 64 --sequence-length 4k --vary layers=12,16,20",
    "hybrid": "nemotron-h-8b --gpu h100 --gpus 16 --global-batch 64 --sequence-length 4k",
}
SWEEPS = {
    "batch": "--preset llama-3.1-8b --sequence-length 2k --sweep micro_batch_size=1,2,4,8 --gpu h200,b200",
    "plane": "--preset llama-3.2-1b --sweep micro_batch_size=1,2,4 --sweep sequence_length=1k,2k,4k --gpu h100",
    "tp": "--preset llama-3.1-70b --micro-batch-size 1 --sequence-length 4k --sweep tp=1,2,4,8 --gpu h100,b300",
}


def model_cases(root: Path, configs: Path | None) -> Cases:
    """Shapes and forecasts of every preset, every GPU, and these configs."""
    for preset in sorted(path.stem for path in (root / "src/gemmscope/model/presets").glob("*.toml")):
        model = f"--preset {preset} {SHORT_BATCH if preset.startswith(ENCODERS) else BATCH}"
        yield f"shapes {preset}", f"shapes {model} --detail"
        yield f"shapes {preset}, tp", f"shapes {model} --tp 4 --separate-projections --recompute full"
        yield f"forecast {preset}", f"forecast {model} --gpu a100,h100,h200,b200,b300 --detail"
        yield f"forecast {preset}, tp", f"forecast {model} --gpu h200,b200 --tp 2 --sequence-parallel --recompute selective"
        yield f"forecast {preset}, dp", f"forecast {model} --gpu h100,b300 --gpus 8 --gradient-accumulation 4 --fsdp 8"
    for gpu in load_data("gemmscope.gpu", "specs.toml"):
        yield f"gpu {gpu}", f"forecast --preset llama-3.1-8b {BATCH} --gpu {gpu} --gpus 16 --tp 2 --detail"
        yield f"gemms {gpu}", f"forecast --shapes 1024,4096,8192x4096x14336,16kx8kx28k --gpu {gpu} --detail"
    for config in sorted(configs.glob("*.json")) if configs else ():
        yield f"config {config.name}", f"forecast --config {quote(str(config))} {BATCH} --gpu h100 --tp 2"


def run_cases(inputs: Path) -> Cases:
    """Reports and comparisons of recorded runs, errors of recorded tensors."""
    runs = {run.stem: quote(str(run)) for run in sorted(inputs.glob("*.json"))}
    for name, run in runs.items():
        yield f"report {name}", f"report {run} -o {{out}}.html --markdown {{out}}.md"
    yield "compare bench", f"compare {runs['bench']} {runs['bench again']} --fail-if-slower 3%"
    yield "compare step", f"compare {runs['step of a small model']} {runs['verified step']}"
    yield "compare sweeps", f"compare {runs['measured sweep']} {runs['measured sweep']}"
    yield "compare kinds", f"compare {runs['bench']} {runs['forecast']}"
    yield "fleet", f"fleet {runs['bench']} {runs['bench again']} {runs['bench, third run']}"
    recorded, checkpoint = inputs / "recorded.safetensors", inputs / "checkpoint" / "model.safetensors"
    if recorded.is_file():
        yield "numerics recording", f"numerics {recorded} --detail"
        yield "numerics bound", f"numerics {recorded} --bound 5%"
        yield "numerics torchao", f"numerics {recorded} --backend torchao"
        yield "numerics speed", f"numerics {recorded} --speed {runs['forecast of several GPUs']} --gpu b300"
    if checkpoint.is_file():
        yield "numerics checkpoint", f"numerics --checkpoint {checkpoint} --bound 4%"
    yield "numerics synthetic", f"numerics --synthetic outliers --preset gpt2 {SHORT_BATCH} --bound 4%"


def all_cases(root: Path, inputs: Path, traces: Path | None, configs: Path | None) -> Cases:
    """Every command line, by name."""
    yield from model_cases(root, configs)
    for name, arguments in LAYOUTS.items():
        preset, _, options = arguments.partition(" ")
        command = f"forecast --preset {preset} {'' if name == 'no batch' else BATCH} {options}"
        yield f"layout {name}", f"{command} --detail --gpu h200,b200"
        yield f"layout {name}, others", f"{command} --gpu a100,h100,b300"
    for name, arguments in PLANS.items():
        yield f"plan {name}", f"plan --preset {arguments}"
    for name, arguments in SWEEPS.items():
        yield f"sweep {name}", f"forecast {arguments}"
    own = root / "tests/data/traces"
    for trace in [path for folder in (own, traces) if folder for path in sorted(folder.glob("*.json.gz"))]:
        yield f"explain {trace.name}", f"explain {quote(str(trace))} --detail"
    yield "explain with a baseline", f"explain {own}/healthy_te_current.json.gz --baseline {own}/healthy_te_bf16.json.gz"
    yield from run_cases(inputs)
    yield "help", "--help"
    for name in load_data("gemmscope.cli", "commands.toml")["commands"]:
        yield f"help {name}", f"{name} --help"


def prepare(root: Path) -> None:
    """Every process of the pool: this checkout, empty folders for state, one core (plans depend on how they are shared out)."""
    folders = {f"XDG_{name}_HOME": tempfile.mkdtemp() for name in ("STATE", "CACHE", "CONFIG", "DATA")}
    os.environ |= {**folders, "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", "OPENBLAS_NUM_THREADS": "1"}
    os.cpu_count = lambda: 1
    for name in [name for name in sys.modules if name.partition(".")[0] == "gemmscope"]:
        del sys.modules[name]  # of the checkout that this file was started with
    sys.path[:0] = [str(root / "src"), str(root / "tests")]
    os.chdir(tempfile.mkdtemp())


def answer(command: str) -> dict[str, Any]:
    """Run one command line: its exit code, what it prints and what it writes."""
    from gemmscope.cli import main

    place = Path(tempfile.mkdtemp())
    typed = ["gemmscope", *shlex.split(command.replace("{out}", str(place / "out")))]
    if typed[1] in WITH_RUN_FILE and "--help" not in typed:
        typed += ["--json", str(place / "run.json")]
    out, err, before, code = io.StringIO(), io.StringIO(), sys.argv, 0
    sys.argv = typed
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main.main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = before
    files = {path.name: path.read_text(errors="replace") for path in sorted(place.iterdir())}
    run = json.loads(files.pop("run.json", "null"))
    texts = {"output": out.getvalue(), "standard error": err.getvalue(), **files}
    without_assets = {name: re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL) for name, text in texts.items()}
    return {"code": code, "run": run, "texts": {name: text.replace(str(place), "OUT") for name, text in without_assets.items()}}


def rebuilt(name: str) -> dict[str, Any]:
    """One result of the tests, from recorded data."""
    from support.results import RESULTS

    return {"code": 0, "run": json.loads(RESULTS[name]().to_json()), "texts": {}}


def rebuilt_names() -> list[str]:
    """The names of these results."""
    from support.results import RESULTS

    return list(RESULTS)


def write(path: Path, root: Path, only: list[str], inputs: Path, traces: Path | None, configs: Path | None) -> None:
    """Run every case and write all answers to one file."""
    start = tuple(only) or ""
    with ProcessPoolExecutor(2, initializer=prepare, initargs=(root,)) as pool:
        names = pool.submit(rebuilt_names).result()
        results = {name: pool.submit(rebuilt, name) for name in names}
        for name, result in results.items():
            if not name.startswith("explain"):
                (inputs / f"{name}.json").write_text(json.dumps(result.result()["run"]))
        cases = all_cases(root, inputs, traces, configs)
        jobs = {name: pool.submit(answer, command) for name, command in cases if name.startswith(start)}
        jobs |= {f"result {name}": result for name, result in results.items() if f"result {name}".startswith(start)}
        answers = {name: job.result() for name, job in jobs.items()}
    text = json.dumps(answers).replace(str(root), "ROOT").replace(str(inputs), "INPUTS")
    path.write_bytes(gzip.compress(text.encode(), 6))
    print(f"{len(answers)} answers in {path}")


def differences(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two values of run files differ: the path, and both values."""
    if VOLATILE.search(path):
        return
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            yield from differences(one.get(key, "missing"), other.get(key, "missing"), f"{path}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{path}/{index}")
    elif isinstance(one, float) or isinstance(other, float):
        numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
        if not (numbers and abs(one - other) <= TOLERANCE * max(abs(one), abs(other))):
            yield path, one, other
    elif one != other:
        yield path, one, other


def compare(before: Path, after: Path, text: bool) -> int:
    """Print what differs. The number of cases with another exit code, number or value."""
    old, new = (json.loads(gzip.decompress(path.read_bytes())) for path in (before, after))
    common = [name for name in old if name in new]
    different = worded = 0
    for name in common:
        values = ({key: answers[name][key] for key in ("code", "run")} for answers in (old, new))
        places = list(differences(*values))
        different += bool(places)
        for place, was, now in places[:4]:
            print(f"{name}{place}: {str(was)[:120]} -> {str(now)[:120]}")
        for kind, was in old[name]["texts"].items():
            now = new[name]["texts"].get(kind, "")
            worded += was != now
            if text and was != now:
                lines = difflib.unified_diff(was.splitlines(), now.splitlines(), f"{name}, {kind}", "now", lineterm="", n=0)
                print("\n".join(line[:200] for line in list(lines)[:14]))
    print(f"{len(common)} answers compared: {different} differ in numbers or values, {worded} texts differ")
    if unmatched := sorted(old.keys() ^ new.keys()):
        print(f"{len(unmatched)} answers are only in one file, {unmatched[0]} for example")
    return different


def main() -> None:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--only", nargs="*", default=[])
    for folder in ("--traces", "--configs", "--inputs"):
        parser.add_argument(folder, type=Path)
    parser.add_argument("--text", action="store_true")
    given = parser.parse_args()
    if given.what == "compare":
        sys.exit(bool(compare(*given.files, text=given.text)))
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder)
        for path in sorted(given.inputs.rglob("*.safetensors")) if given.inputs else ():
            (inputs / path.relative_to(given.inputs)).parent.mkdir(parents=True, exist_ok=True)
            (inputs / path.relative_to(given.inputs)).symlink_to(path.resolve())
        write(given.files[0], given.root.resolve(), given.only, inputs, given.traces, given.configs)


if __name__ == "__main__":
    main()
