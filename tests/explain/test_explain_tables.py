"""The tables of explain, on small made traces: GEMMs by shape, attention, collectives, kernels, launches, idle time, memory."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from gemmscope.document import document
from gemmscope.explain.record_trace import slim_file
from gemmscope.explain.recorded_trace import read_trace
from gemmscope.results.explain import ExplainTables
from support.commands import explain
from support.traces import BF16, FP8, Builder, recorded, shared_trace

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
FLASH = "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 64, 4, false>, false, true, false>"
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 11, false>"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>"
H100 = {"deviceProperties": [{"name": "NVIDIA H100 80GB HBM3"}]}


def tables(builder: Builder, path: Path, **head: Any) -> ExplainTables:
    result = explain([builder.write(path, **head)])
    shown = document(result)
    assert {table.title for table in shown.tables()}  # every table can be built
    return result.tables


def one_step(*work: tuple[str, float, str, dict[str, Any]], begin: float = 10_000.0) -> Builder:
    """A step of kernels one after the other, each launched inside its operator: (kernel, us, operator, its arguments)."""
    builder = Builder()
    builder.mark("ProfilerStep#1", 4_990.0, 4_000.0)
    builder.mark("Optimizer.zero_grad#SGD", 4_991.0, 1.0)  # it is training
    moment = begin
    for number, (kernel, time, operator, arguments) in enumerate(work, start=1):
        call = 5_000.0 + 20 * number
        told = {"External id": 1000 + number, **arguments}
        builder.mark(operator, call - 5, 10, "cpu_op", args=told)
        builder.kernel(kernel, moment, time, launched=call, args={"External id": 1000 + number})
        moment += time
    return builder


def mm(m: int, k: int, n: int, dtype: str = "c10::BFloat16") -> dict[str, Any]:
    return {"Input Dims": [[m, k], [k, n]], "Input type": [dtype, dtype]}


def test_gemms_by_shape(tmp_path: Path) -> None:
    """An H200 at 700 TFLOP/s, which is normal and 71% of its roofline. FP8 would be faster, including casts."""
    large, small = mm(8192, 8192, 8192), mm(16, 4096, 4096)
    builder = one_step((BF16, 1571.0, "aten::mm", large), (BF16, 1571.0, "aten::mm", large), (BF16, 10.0, "aten::mm", small))
    rows = tables(builder, tmp_path / "t.json").gemm_shapes
    assert [(row.m, row.n, row.k, row.count) for row in rows] == [(8192, 8192, 8192, 2), (16, 4096, 4096, 1)]
    first, second = rows
    assert first.tflops == pytest.approx(700, rel=0.01)
    assert (first.bound, first.alignment_bytes, first.precision) == ("compute", 16, "BF16")
    assert first.sustained_share == pytest.approx(1.01, abs=0.01)
    assert first.roofline_share == pytest.approx(0.708, abs=0.005)
    assert first.better == "FP8"
    assert 0.5 < (first.better_ms or 0) / first.time_ms < 0.8
    assert second.bound == "memory"
    assert second.roofline_share == pytest.approx(0.70, abs=0.02)  # 33.8 MB at 4.8 TB/s


def test_misaligned_gemms_have_no_better_recipe(tmp_path: Path) -> None:
    batched = {"Input Dims": [[96, 3137, 64], [96, 64, 3137]], "Input type": ["c10::BFloat16"] * 2}
    builder = one_step((BF16, 1900.0, "aten::bmm", batched), (BF16, 500.0, "aten::mm", mm(8192, 4090, 4096)))
    rows = tables(builder, tmp_path / "t.json").gemm_shapes
    assert [(row.batch, row.alignment_bytes, row.better) for row in rows] == [(96, 2, ""), (1, 4, "")]


def test_a_gpu_that_is_not_known(tmp_path: Path) -> None:
    builder = one_step((BF16, 1571.0, "aten::mm", mm(8192, 8192, 8192)))
    row = tables(builder, tmp_path / "t.json", deviceProperties=[{"name": "Some GPU"}]).gemm_shapes[0]
    assert (row.sustained_share, row.roofline_share, row.bound, row.better) == (None, None, "", "")


def test_recorded_gemms_become_what_they_took_in_fp8() -> None:
    """The forecast for the BF16 step is near what the same training takes in FP8: its GEMMs and the casts of activations."""
    high, low = (
        explain([recorded("healthy_te_bf16")]).tables.gemm_shapes,
        explain([recorded("healthy_te_current")]).tables.gemm_shapes,
    )
    taken = {(row.m, row.n, row.k): row.time_ms for row in low if row.precision == "FP8"}
    for row in high:
        if row.better_ms is not None and (row.m, row.n, row.k) in taken and row.k < 8192:
            assert taken[row.m, row.n, row.k] < row.better_ms < 1.6 * taken[row.m, row.n, row.k]
    assert all(not row.better for row in low if row.precision == "FP8")


def sdpa(batch: int, heads: int, length: int, head: int, causal: str) -> dict[str, Any]:
    size = [batch, heads, length, head]
    inputs = ["", "", "", "", "0.", causal, "", "False"]
    return {"Input Dims": [size, size, size], "Input type": ["c10::BFloat16"] * 3, "Concrete Inputs": inputs}


def test_attention(tmp_path: Path) -> None:
    """FlashAttention on an H100: half of what cuDNN reaches there."""
    shape = sdpa(1, 16, 16384, 128, "True")
    builder = one_step((FLASH, 5_000.0, "aten::scaled_dot_product_attention", shape), (ADD, 100.0, "aten::add", {}))
    result = explain([builder.write(tmp_path / "t.json", **H100)])
    row = result.tables.attention[0]
    assert (row.backend, row.pass_name, row.causal, row.precision) == ("FlashAttention", "forward", True, "BF16")
    assert (row.batch, row.heads, row.queries, row.keys, row.head_dim) == (1, 16, 16384, 16384, 128)
    assert row.tflops == pytest.approx(220, rel=0.01)
    assert row.faster == "cuDNN"
    assert row.faster_ms == pytest.approx(1.85, abs=0.05)
    cause = next(cause for cause in result.causes if cause.code == "slow-attention")
    assert cause.cost_ms == pytest.approx(3.15, abs=0.05)


def test_a_fast_attention_is_left_alone(tmp_path: Path) -> None:
    builder = one_step((FLASH, 2_000.0, "aten::scaled_dot_product_attention", sdpa(1, 16, 16384, 128, "True")))
    row = tables(builder, tmp_path / "t.json", **H100).attention[0]
    assert (row.faster, row.faster_ms) == ("", None)


def test_recorded_attention_is_causal_where_nothing_else_is_that_fast() -> None:
    rows = explain([recorded("long_sequence")]).tables.attention
    assert {(row.backend, row.pass_name, row.causal, row.faster) for row in rows} == {
        ("cuDNN", "forward", True, ""),
        ("cuDNN", "backward", True, ""),
    }
    assert all(500 < (row.tflops or 0) < 650 for row in rows)


def test_attention_by_bmm_and_softmax(tmp_path: Path) -> None:
    scores = {"Input Dims": [[96, 2048, 64], [96, 64, 2048]], "Input type": ["c10::BFloat16"] * 2}
    values = {"Input Dims": [[96, 2048, 2048], [96, 2048, 64]], "Input type": ["c10::BFloat16"] * 2}
    builder = one_step(
        (BF16, 400.0, "aten::bmm", scores), (SOFTMAX, 900.0, "aten::_softmax", {}), (BF16, 400.0, "aten::bmm", values)
    )  # fmt: skip
    rows = tables(builder, tmp_path / "t.json", **H100).attention
    assert len(rows) == 1
    assert (rows[0].backend, rows[0].heads, rows[0].keys, rows[0].head_dim) == ("math (bmm and softmax)", 96, 2048, 64)
    assert rows[0].time_ms == pytest.approx(1.7)
    assert rows[0].faster == "cuDNN"


def test_collectives(tmp_path: Path) -> None:
    """An all-reduce of 64 MB over 4 ranks, once in 500 us, once in 900 us: 400 us of it is waiting."""
    builder = one_step((BF16, 100.0, "aten::mm", mm(4096, 4096, 4096)))
    message = {"Collective name": "allreduce", "In msg nelems": 1 << 25, "Out msg nelems": 1 << 25, "dtype": "BFloat16",
               "Group size": 4, "Process Group Description": "data_parallel", "Process Group Ranks": "[0, 2, 4, 6]"}  # fmt: skip
    builder.kernel(NCCL, 10_100.0, 500.0, stream=20, launched=5_100.0, args=message)
    builder.kernel(NCCL, 10_700.0, 900.0, stream=20, launched=5_110.0, args=message)
    info = {"distributedInfo": {"rank": 0, "world_size": 8}}
    total = tables(builder, tmp_path / "t.json", **info).collectives[0]
    assert (total.kind, total.group, total.ranks, total.count) == ("all-reduce", "data_parallel [0, 2, 4, 6]", 4, 2)
    assert total.message_bytes == 1 << 26
    assert (total.time_ms, total.waiting_ms) == pytest.approx((1.4, 0.4))
    assert total.algorithm_gbps == pytest.approx(134.2, abs=0.1)
    assert total.bus_gbps == pytest.approx(134.2 * 1.5, abs=0.2)


def test_collectives_of_older_traces(tmp_path: Path) -> None:
    """PyTorch 2.0 writes the message only to the annotation around the launch."""
    builder = one_step((BF16, 100.0, "aten::mm", mm(4096, 4096, 4096)))
    builder.mark("nccl:all_reduce", 5_095.0, 20.0, args={"Input Dims": [[1 << 20]], "Input type": ["float"]})
    builder.kernel("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", 10_200.0, 100.0, stream=20, launched=5_100.0)
    total = tables(builder, tmp_path / "t.json").collectives[0]
    assert (total.kind, total.message_bytes, total.waiting_ms) == ("all-reduce", 1 << 22, None)


def test_longest_kernels(tmp_path: Path) -> None:
    builder = one_step(*((FP8, 100.0, "aten::mm", {}) for _ in range(10)), (ADD, 5.0, "aten::add", {}))
    shown = tables(builder, tmp_path / "t.json")
    assert [(kernel.kernel_class, kernel.count) for kernel in shown.kernels] == [("GEMM FP8", 10), ("elementwise", 1)]
    assert shown.kernels[0].mean_us == pytest.approx(100)


def test_idle_time_is_that_of_the_innermost_frame(tmp_path: Path) -> None:
    """While the GPU was idle, a Python function of the data loader ran inside the training loop."""
    builder = Builder()
    builder.mark("ProfilerStep#1", 900.0, 9_000.0)
    builder.kernel(FP8, 1_000.0, 1_000.0, launched=950.0)
    builder.mark("train.py(20): main", 0.0, 20_000.0, "python_function")
    builder.mark("loader.py(7): decode", 2_100.0, 5_800.0, "python_function")
    builder.mark("<built-in method read>", 2_200.0, 5_600.0, "python_function")
    builder.kernel(FP8, 8_000.0, 1_000.0, launched=7_990.0)
    shown = tables(builder, tmp_path / "t.json")
    assert [(frame.frame, frame.kind) for frame in shown.idle_frames][:1] == [("loader.py(7): decode", "Python function")]
    assert shown.idle_frames[0].time_ms == pytest.approx(6.0)


def test_damaged_arguments_of_collectives(tmp_path: Path) -> None:
    builder = one_step((BF16, 100.0, "aten::mm", mm(4096, 4096, 4096)))
    odd = {"Collective name": ["x"], "In msg nelems": "many", "dtype": 7, "Group size": -3, "Process Group Ranks": "[0, 1, ...]"}
    builder.kernel(NCCL, 10_100.0, 500.0, stream=20, launched=5_100.0, args=odd)
    assert tables(builder, tmp_path / "t.json").collectives[0].message_bytes is None


def test_misaligned_attention_of_timesformer() -> None:
    """Known facts: linears run at 720 TFLOP/s; attention uses bmm of the misaligned size 3137 at 64 TFLOP/s."""
    shown = explain([shared_trace("timesformer_h100.json.gz")]).tables
    slow = shown.gemm_shapes[0]
    assert (slow.m, slow.n, slow.alignment_bytes, round(slow.tflops)) == (3137, 3137, 2, 64)
    assert next(row for row in shown.gemm_shapes if row.n == 3072).tflops == pytest.approx(720, rel=0.02)
    assert shown.attention[0].backend == "math (bmm and softmax)"


def test_freeing_memory_on_mi300x() -> None:
    shown = explain([shared_trace("resnet18_mi300x_hipfree.json.gz")]).tables
    assert shown.idle_frames[0].frame == "hipFree"


def test_the_recorder_keeps_what_the_tables_need(tmp_path: Path) -> None:
    """The process group and message of collectives, waits between streams, allocator calls; scalars of attention alone."""
    builder = one_step((FLASH, 100.0, "aten::scaled_dot_product_attention", sdpa(1, 16, 4096, 128, "True")))
    told = {"External id": 2, "Concrete Inputs": ["secret"], "Input Dims": [[8, 8], [8, 8]]}
    builder.mark("aten::mm", 5_200.0, 5.0, "cpu_op", args=told)
    builder.kernel(BF16, 10_100.0, 100.0, launched=5_201.0, args={"External id": 2})
    group = {"Collective name": "allreduce", "In msg nelems": 8, "Out msg nelems": 8, "dtype": "Float", "Group size": 2,
             "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}  # fmt: skip
    builder.kernel(NCCL, 10_200.0, 100.0, stream=20, launched=5_300.0, args=group)
    for number, name in enumerate(("cudaStreamWaitEvent", "cudaFree", "cudaGetDevice")):
        builder.mark(name, 5_400.0 + number, 0.5, "cuda_runtime", args={"correlation": 900 + number})
    slim_file(builder.write(tmp_path / "raw.json"), tmp_path / "small.json.gz", {})
    trace = read_trace(tmp_path / "small.json.gz")
    assert len(trace.stream_waits) == 1
    assert {call.name for call in trace.launches.values()} == {"cudaLaunchKernel", "cudaStreamWaitEvent", "cudaFree"}
    collective = next(work.message for work in trace.work if work.message is not None)
    assert (collective.kind, collective.bytes_counted, collective.ranks) == ("all-reduce", 32.0, (0, 1))
    assert [operator.concrete[5] for operator in trace.operators if operator.concrete] == ["True"]
    assert "secret" not in gzip.decompress((tmp_path / "small.json.gz").read_bytes()).decode()


def test_products_without_a_softmax_are_no_attention(tmp_path: Path) -> None:
    """DLRM multiplies pairs of features, and nothing normalizes the scores."""
    batched = {"Input Dims": [[16, 27, 64], [16, 64, 27]], "Input type": ["float"] * 2}
    product, softmax = (BF16, 100.0, "aten::bmm", batched), (SOFTMAX, 20.0, "aten::_softmax", {})
    assert not tables(one_step(product, (ADD, 10.0, "aten::add", {})), tmp_path / "pairs.json", **H100).attention
    assert not tables(one_step(product, softmax), tmp_path / "alone.json", **H100).attention
    assert tables(one_step(product, softmax, product), tmp_path / "scores.json", **H100).attention
