"""Kernel names of other GPUs and frameworks, from their sources and published profiles, and how each must be classified."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmscope.engine.kernels import classify

# Each line: class, or class and operands, or class, operands and scales; a tab; the name.
TABLE = Path(__file__).parent.parent / "data" / "kernel_names.tsv"
CASES = [line.split("\t") for line in TABLE.read_text().splitlines()]


@pytest.mark.parametrize(("told", "name"), CASES)
def test_names(told: str, name: str) -> None:
    facts = classify(name)
    recognised = (facts.kernel_class, facts.operands[0] if facts.operands else None, facts.scales)
    wanted = tuple(told.split(":"))
    assert recognised[: len(wanted)] == wanted


def test_types_alone_do_not_make_a_product() -> None:
    """A cast with FP4 or half in its template arguments is not a GEMM."""
    assert classify("void at::native::vectorized_elementwise_kernel<4, Op<c10::Float4_e2m1fn_x2>>").kernel_class == "elementwise"
    assert classify("void my_copy<half4_t>(half4_t*)").kernel_class == "other"
