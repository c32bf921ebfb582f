"""Observers cannot hurt: many kinds of training are the same, bit for bit, with and without `record_tensors` and `trace_me`."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import gemmscope  # noqa: E402
from gemmscope.numerics import measure  # noqa: E402
from gemmscope.numerics.in_training import capture, experts, hooks  # noqa: E402
from gemmscope.numerics.recording import read_recording  # noqa: E402
from support import training_loops  # noqa: E402
from support.recorded import measure_few  # noqa: E402
from support.training_loops import Block, Experts, Loop, Network, check  # noqa: E402

VARIANTS = measure.variants
LOOPS = [*training_loops.loops(), *training_loops.compiled_loops()]
TRACED = (  # with a profiler, a run takes a second; benchmarks/observer_matrix.py runs all
    "plain", "numpy_random in experts", "non-reentrant checkpoints of experts", "average by deepcopy", "torch.save and pickle",
    "exception in backward", "a FLOP counter", "profiler of the user", "profiler of the user, before",
    "earlier profiler of the user", "compiled by layer",
)  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    measure_few(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")  # of torch itself
@pytest.mark.parametrize("loop", LOOPS, ids=[loop.name for loop in LOOPS])
def test_the_training_is_the_same(loop: Loop, tmp_path: Path) -> None:
    check(loop, tmp_path, *(("record", "trace", "both") if loop.name in TRACED else ("record",)))


@pytest.mark.filterwarnings("ignore")  # of torch itself
def test_the_training_of_parallel_models_is_the_same(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for loop in training_loops.parallel_loops():
            check(loop, tmp_path, "record")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # of torch itself
def test_the_training_of_two_processes_is_the_same(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(training_loops.in_two_processes, (str(tmp_path),), nprocs=2)


OURS = (capture.StepCapture, capture.Taken, experts.GemmMode, experts.ExpertHooks)


def test_nothing_is_kept_after_the_end(tmp_path: Path) -> None:
    """The user keeps the graph of a recorded step, a copy of the model, and the recording itself."""
    model = Network(Block(), Experts("batched"))
    kept: list[Any] = []
    with gemmscope.record_tensors(model, tmp_path / "t", steps=1, after=0) as recording:
        x = torch.randn(24, 16)
        kept += [model(x).square().sum(), copy.deepcopy(model), pickle.dumps(model)]
        kept[0].backward(retain_graph=True)
        recording.step()
    assert recording.recorded
    assert b"gemmscope" not in kept[2]
    observed, given = weakref.ref(model), weakref.ref(x)
    gc.collect()
    inside = [one for one in gc.get_objects() if type(one) in OURS]
    assert inside == []
    kept[0].backward()  # hooks that the graph still has do nothing
    assert all(hook._action is None for hook in gc.get_objects() if type(hook) is hooks.Hook)
    kept[1](x)
    del model, x
    kept.clear()
    gc.collect()
    assert observed() is given() is None


@pytest.mark.parametrize("where", ["_seen", "_taken", "__init__"])
def test_an_error_while_experts_run(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said once; the mode does not stay, and the modes of the training do."""

    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack
    monkeypatch.setattr(experts.GemmMode, where, fails)
    model = Network(Experts("loop"), Block())
    with (
        torch.utils.flop_counter.FlopCounterMode(display=False),
        gemmscope.record_tensors(model, tmp_path / "t", steps=1, after=0) as recording,
    ):
        before = modes()
        model(torch.randn(24, 16)).sum().backward()
        recording.step()
        assert modes() == before
    assert modes() == []
    assert capsys.readouterr().err.count("the training goes on") == 1
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_an_interrupt_while_experts_run(tmp_path: Path) -> None:
    """KeyboardInterrupt skips the hooks at the end of a module."""

    class Interrupted(Experts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise KeyboardInterrupt

    model = Network(Interrupted("loop"))
    with pytest.raises(KeyboardInterrupt), gemmscope.record_tensors(model, tmp_path / "t", steps=1, after=0):
        model(torch.randn(24, 16))
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


def test_names_with_halves_of_characters(tmp_path: Path) -> None:
    layer = nn.Sequential()
    layer.add_module("up\udc80", nn.Linear(16, 16))
    layer.add_module("experts", Experts("loop"))
    with gemmscope.record_tensors(layer, tmp_path / "t\udc80", steps=1, after=0) as recording:
        layer(torch.randn(24, 16)).sum().backward()
        recording.step()
    names = [linear.name for linear in read_recording(tmp_path / "t\udc80").linears]
    assert names[0] == "up\\udc80"
    assert len(names) == 7


@pytest.mark.parametrize("how", ["loop", "batched", "grouped"])
@pytest.mark.parametrize("cast", [False, True])
def test_what_is_recorded_of_experts(how: str, cast: bool, tmp_path: Path) -> None:
    """dW of every recorded expert has the norm that its X and dY give."""
    torch.manual_seed(0)
    model = Network(Experts(how))
    with gemmscope.record_tensors(model, tmp_path / "t", steps=1, after=0) as recording:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            loss = model(torch.randn(24, 16, requires_grad=True)).float().square().sum()
        loss.backward()
        recording.step()
    linears = [linear for linear in read_recording(tmp_path / "t").linears if linear.kind == "Experts"]
    assert len(linears) == 6
    for linear in linears:
        (step,) = linear.measured
        name, number = linear.name.split(".")[-2:]
        gradient = getattr(model.layers[0], name).grad[int(number)]
        assert tuple(step.outputs) == ("fprop", "dgrad", "wgrad")
        assert step.outputs["wgrad"] == pytest.approx(float(gradient.norm()), rel=0.02 if cast or how == "grouped" else 1e-4)


def test_the_default_type_changes_nothing_in_a_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all recipes."""
    monkeypatch.setattr(measure, "variants", VARIANTS)
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model, x = nn.Linear(16, 32), torch.randn(24, 16)
        torch.set_default_dtype(dtype)
        try:
            with gemmscope.record_tensors(nn.Sequential(model), tmp_path / str(dtype), steps=1, after=0) as recording:
                model(x).square().sum().backward()
                recording.step()
        finally:
            torch.set_default_dtype(torch.float32)
    assert (tmp_path / "torch.float32").read_bytes() == (tmp_path / "torch.float64").read_bytes()
