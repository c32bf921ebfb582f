"""Equal commands give equal files, whatever the hash seed, the threads, processes and cores, the terminal and the locale."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

import gemmscope
from gemmscope.forecast import plan as search
from gemmscope.forecast.gemm import model
from gemmscope.forecast.physics import Shapes
from gemmscope.gpu.specs import gpu
from gemmscope.results.plan import PlanResult

TRACE = Path(__file__).parents[1] / "data" / "traces" / "experts.json.gz"
SIZES = "--hidden-size 64 --intermediate-size 128 --num-attention-heads 4 --num-hidden-layers 1"
FILES = "--json NAME.json --csv NAME.csv --markdown NAME.md"
BATCH = "--micro-batch-size 1 --sequence-length"
MODEL = "--preset qwen3-30b-a3b"
COMMANDS = {
    "shapes": f"shapes {MODEL} --ep 8 {BATCH} 4096 {FILES}",
    "forecast": f"forecast {MODEL} --ep 8 {BATCH} 4096 --gpu h200,b200 {FILES} -o NAME.svg",
    "sweep": f"forecast {SIZES} --micro-batch-size 1 --gpu h200 --sweep sequence_length=512:10752:32 {FILES}",
    "plan": f"plan {MODEL} --gpu b200 --gpus 8 --global-batch 64 --sequence-length 4096 --tp 1 {FILES} -o NAME.png",
    "explain": f"explain {TRACE} {FILES}",
    "numerics": f"numerics --synthetic outliers {SIZES} --micro-batch-size 1 --sequence-length 64 {FILES}",
    "report": "report plan.json -o NAME.html --markdown NAME.md",
}
ALL = """
import os, sys
from gemmscope.cli.main import main
if sys.argv[1] == "one":
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    os.cpu_count = lambda: 3
for line in sys.argv[2:]:
    sys.argv = ["gemmscope", *line.split()]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, (line, ended.code)
"""


def started(folder: Path, cores: str, **environment: str) -> subprocess.Popen[bytes]:
    """A process that runs all commands in a folder."""
    folder.mkdir()
    lines = [line.replace("NAME", name) for name, line in COMMANDS.items()]
    return subprocess.Popen(
        [sys.executable, "-c", ALL, cores, *lines], cwd=folder, env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def files(folder: Path, process: subprocess.Popen[bytes]) -> dict[str, str]:
    """The digest of every file that the commands write, and of what they print."""
    printed, errors = process.communicate()
    assert process.returncode == 0, errors.decode()
    written = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: sha256(content).hexdigest() for name, content in {**written, "printed": printed}.items()}


def test_equal_commands_give_equal_bytes(tmp_path: Path) -> None:
    few = {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1", "TZ": "UTC", "LC_ALL": "C.UTF-8"}
    more = {"PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2", "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    one, other = started(tmp_path / "1", "all", **few), started(tmp_path / "2", "one", **more, TERM="dumb", USER="other")
    first, second = files(tmp_path / "1", one), files(tmp_path / "2", other)
    assert {name for name in first if first[name] != second.get(name)} == set()
    assert {Path(name).suffix for name in first} == {"", ".json", ".csv", ".md", ".svg", ".png", ".html"}
    assert len(first) > 20


@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
def test_a_gemm_has_the_same_time_whatever_is_computed_beside_it(fmt: str) -> None:
    sides = np.random.default_rng(0).integers(16, 40_000, size=(3, 701))
    whole = model().time(gpu("h200"), fmt, Shapes.of(*sides), in_training=True).gemm_ms
    for count in (1, 2, 5, 64, 333):
        part = model().time(gpu("h200"), fmt, Shapes.of(*sides[:, :count]), in_training=True).gemm_ms
        assert part.tolist() == whole[:count].tolist()


def test_a_plan_does_not_depend_on_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(processes: int) -> PlanResult:
        monkeypatch.setattr(search, "processes_for", lambda *_: processes)
        monkeypatch.setattr(search, "AT_A_TIME", 3)
        return gemmscope.load("qwen3-30b-a3b").plan("b200", 8, 64, 4096, recompute="none", tp=1)

    assert planned(0).to_json() == planned(3).to_json()
