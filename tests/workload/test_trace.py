"""Tracing as a whole: the worker process, and the workload that is made of what it saw."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemmscope.errors import UserError, shown
from gemmscope.model import presets
from gemmscope.model.spec import RunSpec
from gemmscope.process import Answer, Ending, worker_command
from gemmscope.workload.derive import derive
from gemmscope.workload.ops import Linear
from gemmscope.workload.summary import totals
from gemmscope.workload.trace import ModuleTrace, as_workload, trace_module
from gemmscope.workload.traced_ops import TracedLinear
from support.processes import alive, wait_until
from support.reading import codes
from support.refusals import refused, refused_with_hint
from support.workers import forked_workers

__all__ = ["forked_workers"]  # the fixture

SIZES = (2, 16)
RUN = RunSpec(*SIZES)
SHADOWS = "random queue types inspect select token string io json logging traceback warnings"


# --- the process ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def shadowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose files have the names of the standard library's."""
    for name in SHADOWS.split():
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not the standard library')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_working_directory_is_not_on_the_workers_path(shadowed: Path) -> None:
    child = subprocess.run(worker_command("gemmscope", 2, "--version"), capture_output=True, text=True, check=False)
    assert child.stderr == ""
    assert child.stdout.startswith("gemmscope 0.")


def test_the_worker_finds_the_package_of_its_parent(tmp_path: Path) -> None:
    """Also where nothing but the parent's own import path led to it."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = worker_command("gemmscope", 2, "--version")
    root = Path(command[3])
    assert (root / "gemmscope" / "process.py").is_file()
    child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert child.returncode == 0, child.stderr


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    stays = (
        "from gemmscope.process import end_with_parent; import os, time; end_with_parent(os.getppid()); "
        "print('ready', flush=True); time.sleep(3600)"
    )
    starts = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {stays!r}]).pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", starts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == "ready\n"
        assert alive(child)
        parent.kill()
    assert wait_until(lambda: not alive(child))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_ending_the_command_ends_the_tracing(tmp_path: Path, ending: signal.Signals) -> None:
    pytest.importorskip("torch", reason="tracing needs torch")
    note, factory = tmp_path / "pid", tmp_path / "slow.py"
    says = f"pathlib.Path({str(note)!r}).write_text(str(os.getpid()))"
    factory.write_text(f"import os, pathlib, time\ndef build():\n    {says}\n    time.sleep(3600)\n")
    command = [sys.executable, "-m", "gemmscope", "shapes", "--module", f"{factory}:build"]
    command += ["--micro-batch-size", "1", "--sequence-length", "8"]
    left = tmp_path / "left"
    left.mkdir()
    environment = {**os.environ, "TMPDIR": str(left)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as parent:
        assert wait_until(lambda: note.exists() and note.read_text())
        worker = int(note.read_text())
        parent.send_signal(ending)
    assert wait_until(lambda: not alive(worker))
    assert parent.returncode == 128 + ending
    assert not list(left.glob("gemmscope-*"))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_what_a_killed_command_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="tracing needs torch")
    note, factory, left = tmp_path / "pid", tmp_path / "slow.py", tmp_path / "left"
    left.mkdir()
    says = f"pathlib.Path({str(note)!r}).write_text(str(os.getpid()))"
    factory.write_text(f"import os, pathlib, time\ndef build():\n    {says}\n    time.sleep(3600)\n")
    command = [sys.executable, "-m", "gemmscope", "shapes", "--module", f"{factory}:build"]
    command += ["--micro-batch-size", "1", "--sequence-length", "8"]
    environment = {**os.environ, "TMPDIR": str(left)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as parent:
        assert wait_until(lambda: note.exists() and note.read_text())
        parent.kill()
    assert wait_until(lambda: not alive(int(note.read_text())))
    assert len(list(left.iterdir())) == 1
    command[5] = f"{factory}:absent"
    assert subprocess.run(command, capture_output=True, env=environment, check=False).returncode == 2
    assert not list(left.iterdir())


@pytest.mark.parametrize("path", ["nowhere.py", "/", "x" * 5000 + ".py", "a\0.py"])
def test_a_file_that_is_not_there_is_said_at_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch is imported, which takes seconds."""
    monkeypatch.setattr("gemmscope.workload.trace.run_worker", lambda *_, **__: pytest.fail("a worker was started"))
    with refused_with_hint("file", shown(path), hint=("build",)):
        trace_module(f"{path}:build", *SIZES)


def test_a_factory_that_leaves_a_child_running_does_not_block(tmp_path: Path) -> None:
    """The child keeps the output of the tracing process open."""
    pytest.importorskip("torch", reason="tracing needs torch")
    note = tmp_path / "pid"
    (tmp_path / "mine.py").write_text(
        "import os, pathlib, time, torch\ndef build():\n    if os.fork() == 0:\n"
        f"        pathlib.Path({str(note)!r}).write_text(str(os.getpid()))\n        time.sleep(3600)\n"
        "    return torch.nn.Sequential(torch.nn.Embedding(9, 32))\n"
    )
    assert trace_module(f"{tmp_path}/mine.py:build", *SIZES).parameters == 9 * 32
    assert wait_until(lambda: not alive(int(note.read_text())))


SLEEPS = """import time, torch
def build():
    time.sleep(3600)
class Slow(torch.nn.Linear):
    def forward(self, x):
        while True:
            try:
                time.sleep(3600)
            except ValueError:
                pass
def built():
    return Slow(16, 16), torch.zeros(16, 16)
"""


@pytest.mark.parametrize(("name", "line"), [("build", 3), ("built", 8)])
def test_a_module_that_takes_too_long_is_one_message(
    name: str, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="tracing needs torch")
    (tmp_path / "mine.py").write_text(SLEEPS)
    monkeypatch.setenv("GEMMSCOPE_MODULE_SECONDS", "0.2")
    with refused_with_hint("0.2 s", f"line {line}", hint=("GEMMSCOPE_MODULE_SECONDS",)):
        trace_module(f"{tmp_path}/mine.py:{name}", None, None)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "two", "9" * 5000])
def test_an_invalid_limit_is_one_message(seconds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(SLEEPS)
    monkeypatch.setenv("GEMMSCOPE_MODULE_SECONDS", seconds)
    with refused("GEMMSCOPE_MODULE_SECONDS"):
        trace_module(f"{tmp_path}/mine.py:build", None, None)


def test_a_factory_that_leaves_a_thread_running_does_not_block(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="tracing needs torch")
    (tmp_path / "mine.py").write_text(
        "import threading, time, torch\ndef build():\n    threading.Thread(target=lambda: time.sleep(3600)).start()\n"
        "    return torch.nn.Sequential(torch.nn.Embedding(9, 32))\n"
    )
    assert trace_module(f"{tmp_path}/mine.py:build", *SIZES).parameters == 9 * 32


def test_an_answer_that_is_cut_short_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk."""
    pytest.importorskip("torch", reason="tracing needs torch")

    def cut(module: str, request: str, answer: str, **_: Any) -> Answer:
        Path(answer).write_text('{"class_name": "Lin')
        return Answer("", Ending(1, "OSError: No space left on device"))

    (tmp_path / "mine.py").touch()
    monkeypatch.setattr("gemmscope.workload.trace.run_worker", cut)
    with refused("OSError: No space left on device"):
        trace_module(f"{tmp_path}/mine.py:build", *SIZES)


def test_a_module_among_files_with_names_of_the_standard_library(shadowed: Path) -> None:
    pytest.importorskip("torch", reason="tracing needs torch")
    (shadowed / "sizes.py").write_text("WIDTH = 32\n")
    text = "import torch\nfrom sizes import WIDTH\ndef build():\n    return torch.nn.Sequential(torch.nn.Embedding(9, WIDTH))\n"
    for name in ("mine.py", "random.py"):  # the traced file may have such a name too
        Path(name).write_text(text)
        assert trace_module(f"{name}:build", *SIZES).parameters == 9 * 32


# --- the workload ---------------------------------------------------------------------------------------------------------


def traced(module: Any, *inputs: Any) -> ModuleTrace:
    factory = pytest.importorskip("gemmscope.workload.factory", reason="tracing needs torch")
    trace_worker = pytest.importorskip("gemmscope.workload.trace_worker", reason="tracing needs torch")
    factory.move_to_meta(module)
    return trace_worker.trace_built(factory.Built(module, tuple(value.to("meta") for value in inputs), {}))


def modules() -> dict[str, Any]:
    torch = pytest.importorskip("torch", reason="tracing needs torch")
    nn = torch.nn

    class Recomputed(nn.Module):
        """Of its layers, the first `recomputed` run again in the backward pass."""

        def __init__(self, recomputed: int, frozen: bool = False) -> None:
            super().__init__()
            self.embedding, self.recomputed = nn.Embedding(10, 8), recomputed
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            for layer in self.layers:
                layer.weight.requires_grad_(not frozen)

        def forward(self, x: Any) -> Any:
            x = self.embedding(x)
            for index, layer in enumerate(self.layers):
                block = nn.Sequential(layer, nn.GELU())
                again = index < self.recomputed
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if again else block(x)
            return x

    return {
        "plain": Recomputed(0),
        "recomputed": Recomputed(3),
        "partly recomputed": Recomputed(1),
        "frozen": Recomputed(0, frozen=True),
        "frozen and recomputed": Recomputed(3, frozen=True),
    }


@pytest.mark.parametrize(
    ("name", "count", "forward_runs", "backward_gemms"),
    [
        ("plain", 3, 1, 2),
        ("recomputed", 3, 2, 2),
        ("partly recomputed", 4, 1, 1.5),
        ("frozen", 3, 1, 1),
        ("frozen and recomputed", 3, 2, 1),
    ],
)
def test_ops_add_up_to_the_gemms(name: str, count: int, forward_runs: int, backward_gemms: float) -> None:
    torch = pytest.importorskip("torch", reason="tracing needs torch")
    workload = as_workload(traced(modules()[name], torch.zeros((2, 3), dtype=torch.long)))
    linears = [op for op in workload.ops if isinstance(op, Linear)]
    (linear,) = linears
    assert isinstance(linear, TracedLinear)
    assert (linear.count, linear.forward_runs) == (count, forward_runs)
    assert linear.forward().flops == 2 * 6 * 8 * 8
    assert linear.backward().flops == backward_gemms * linear.forward().flops
    of_gemms = sum(gemm.flops * gemm.count for gemm in workload.gemms())
    written = sum(op.count * (op.forward_runs * op.forward().flops + op.backward().flops) for op in linears)
    assert written == of_gemms == totals(workload, RUN, None).gemm_flops


def test_a_linear_without_a_backward_pass() -> None:
    torch = pytest.importorskip("torch", reason="tracing needs torch")
    frozen = torch.nn.Linear(8, 8)
    frozen.requires_grad_(False)
    workload = as_workload(traced(torch.nn.Sequential(frozen, torch.nn.Linear(8, 4)), torch.zeros(6, 8)))
    first = workload.ops[0]
    assert (first.count, first.forward_runs, first.backward().flops) == (1, 1, 0)


def test_gemms_of_empty_tensors_do_not_count() -> None:
    torch = pytest.importorskip("torch", reason="tracing needs torch")
    workload = as_workload(traced(torch.nn.Linear(8, 8), torch.zeros(0, 8)))
    assert workload.gemms() == ()
    assert totals(workload, RUN, None).gemm_flops == 0


@pytest.mark.parametrize(("sequence", "exceeded"), [(1024, False), (1025, True)])
def test_a_sequence_longer_than_the_learned_positions(sequence: int, exceeded: bool) -> None:
    """Embedding tables on the meta device are never looked at, so that no trace would notice."""
    model = presets.load("gpt2").model
    assert model is not None
    assert ("positions-exceeded" in codes(derive(model, RunSpec(1, sequence)))) == exceeded


# --- what is said -----------------------------------------------------------------------------------------------------------

FACTORY = """
import torch
from helper import deep

class Peeking(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(9, 4)
    def forward(self, tokens):
        tokens.float().nonzero().tolist(), 1 // tokens.is_meta  # fails on every device
        return self.table(tokens)

def fails_in_torch():
    torch.nn.Linear(4, "four")

def fails_below():
    deep()

def long_reason():
    raise ValueError("it cannot be built:\\n  - the width is odd\\n  - and more")

def endless_reason():
    raise ValueError("x" * 10_000)
"""


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Peeking", r"\(line 10 of .*mine\.py\)"),
        ("fails_in_torch", r"\(line 14 of .*mine\.py\)"),
        ("fails_below", r"RuntimeError: too deep \(line 2 of .*helper\.py\)"),
        ("long_reason", r"ValueError: it cannot be built: - the width is odd \(line 20"),
        ("endless_reason", r"ValueError: x{299}… \(line 23"),
    ],
)
def test_errors_name_the_line_of_the_user(tmp_path: Path, name: str, message: str) -> None:
    pytest.importorskip("torch", reason="tracing needs torch")
    (tmp_path / "mine.py").write_text(FACTORY)
    (tmp_path / "helper.py").write_text("def deep():\n    raise RuntimeError('too deep')\n")
    with pytest.raises(UserError, match=message):
        trace_module(f"{tmp_path}/mine.py:{name}", *SIZES)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("where", ["mine.py", "helper.py"])
def test_a_syntax_error_is_named_by_its_own_line(tmp_path: Path, where: str) -> None:
    pytest.importorskip("torch", reason="tracing needs torch")
    (tmp_path / "mine.py").write_text("import helper\n")
    (tmp_path / where).write_text("x = 1\ny = (\n")
    with pytest.raises(UserError, match=rf"SyntaxError: '\(' was never closed \(line 2 of .*{where}\)"):
        trace_module(f"{tmp_path}/mine.py:build", *SIZES)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_factory_of_a_hugging_face_model(tmp_path: Path, use_cache: bool) -> None:
    pytest.importorskip("transformers", reason="the model is one of transformers")
    (tmp_path / "mine.py").write_text(
        "def build():\n    from transformers import LlamaConfig, LlamaForCausalLM\n"
        "    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)\n"
        f"    return LlamaForCausalLM(LlamaConfig(use_cache={use_cache}, **sizes))\n"
    )
    workload = as_workload(trace_module(f"{tmp_path}/mine.py:build", *SIZES))
    attention = totals(workload, RUN, None).attention_flops
    assert attention == 2 * 6 * 2 * 2 * (16 * 17 // 2) * 2 * 8  # layers, GEMMs, batch, heads, pairs, FLOPs, head size
