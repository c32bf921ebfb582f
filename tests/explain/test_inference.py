"""Inference is recognised and not mistaken for training."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmscope.errors import UserError
from support.traces import ADAM, BF16, FP8, Builder, codes, fact, steady

FOREACH_COPY = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::TensorListMetadata<2>, "
    "at::native::(anonymous namespace)::CopyFunctor<int, long, 2, 1, 1>, at::native::Copy<int, long> >"
)


def forwards(marks: list[str], kernel: str = BF16) -> Builder:
    """Forward passes of 2 ms, each inside an annotation, with two kernels that copy lists of tensors."""
    builder = Builder()
    for number, mark in enumerate(marks):
        base = 1000.0 + 2000 * number
        if mark:
            builder.mark(mark, base, 1990)
        builder.mark("aten::linear", base + 1, 3, "cpu_op", args={"External id": number + 1})
        for place in range(2):
            builder.kernel(FOREACH_COPY, base + 5 + 5 * place, 5.0, launched=base + 2)
        for place in range(19):
            builder.kernel(kernel, base + 15 + 100 * place, 100.0, launched=base + 3, args={"External id": number + 1})
    return builder


def test_a_step_that_is_marked(tmp_path: Path) -> None:
    diagnosis = forwards(["ProfilerStep#1", "ProfilerStep#2"]).diagnose(tmp_path / "t.json")
    assert diagnosis.trace.phase.without_optimizer
    assert diagnosis.account.step_ms == pytest.approx(2.0, rel=0.02)
    assert fact(diagnosis.findings, "phase", "found_by") == "profiler step marks"
    assert "optimizer" not in diagnosis.account.classes_ms
    assert not diagnosis.causes
    assert diagnosis.verdict.code == "step-not-judged"


def test_annotations_of_an_engine_without_operators(tmp_path: Path) -> None:
    builder = forwards(["execute_model"] * 2)
    builder.events = [event for event in builder.events if event["cat"] != "cpu_op"]
    assert builder.diagnose(tmp_path / "t.json").trace.phase.without_optimizer


def test_without_any_mark_the_recording_is_one_step(tmp_path: Path) -> None:
    """Two kernels that apply something to many tensors are not an optimizer, and do not end a step."""
    diagnosis = forwards(["", ""]).diagnose(tmp_path / "t.json")
    assert (diagnosis.view.count, diagnosis.view.steps.found_by) == (1, "the whole recording")
    assert diagnosis.account.step_ms == pytest.approx(3.91, rel=0.01)
    assert "phase" in codes(diagnosis.findings)


@pytest.mark.parametrize(
    "name", ["aten::mm_backward", "Optimizer.step#SGD.step", "autograd::engine::evaluate_function: MmBackward0"]
)
def test_training_is_not_inference(name: str, tmp_path: Path) -> None:
    builder = forwards(["ProfilerStep#1", "ProfilerStep#2"])
    builder.mark(name, 1500.0, 10.0, "cpu_op", args={"External id": 77})
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert not diagnosis.trace.phase.without_optimizer
    assert diagnosis.trace.phase.trains


def test_kernels_alone_do_not_prove_inference(tmp_path: Path) -> None:
    builder = Builder()
    for number in range(10):
        builder.kernel(FP8, 100.0 * number, 90.0)
    with pytest.raises(UserError, match="does not show where a training step begins"):
        builder.diagnose(tmp_path / "t.json")
    trained = steady().diagnose(tmp_path / "u.json")
    assert ADAM in {work.name for work in trained.trace.work}
    assert not trained.trace.phase.without_optimizer
