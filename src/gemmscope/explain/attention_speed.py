"""Attention: which implementation ran, how fast, and whether a faster one exists for the shape on this GPU."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gemmscope.engine.kernels import MATH, attention_backend, is_softmax
from gemmscope.explain.recorded_trace import ATTENTION_BACKWARD, ATTENTION_FORWARD, Operator
from gemmscope.explain.step_evidence import StepEvidence, main_kernels
from gemmscope.explain.trace_view import TimedWork
from gemmscope.explain.work_class import BF16, FP16
from gemmscope.findings import finding
from gemmscope.gpu.specs import spec_of
from gemmscope.grouping import grouped, largest_sums
from gemmscope.recipe.precisions import precisions
from gemmscope.results.explain import AttentionPass, AttentionTotal, Cause
from gemmscope.toml import load_data

RATES: list[dict[str, Any]] = load_data("gemmscope.explain", "attention.toml")["rate"]
LONG = 1024  # the least number of keys for which the rates of the table hold
SLOW = 0.7  # a backend below this share of another one's rate is slow: closer rates depend on the shape
FASTEST = 1.1  # a rate above this multiple of the best known rate is not possible
LARGEST_HEAD = 256
BACKWARD_FLOPS = 2.5  # over those of forward: five GEMMs instead of two
HEADS_SECOND = re.compile(r"scaled_dot_product|_cudnn_attention")  # [batch, heads, sequence, head size]; others swap the middle
PRECISIONS = tuple(precisions()[name] for name in ("bf16", "fp16", "fp8", "fp32"))
FORWARD = re.compile(r"fprop|fwd|[Ff]orward")
BACKWARD = re.compile(r"bprop|bwd|[Bb]ackward|dot_do_o|convert_dq|reduce_head")
# The place of is_causal among the arguments of PyTorch's operators
CAUSAL_AT = {"aten::scaled_dot_product_attention": 5, "aten::_scaled_dot_product_flash_attention": 4,
             "aten::_scaled_dot_product_efficient_attention": 6, "aten::_scaled_dot_product_cudnn_attention": 6,
             "aten::_cudnn_attention_forward": 9, "aten::_efficient_attention_forward": 11}  # fmt: skip
FLASH_TEMPLATE = re.compile(r"_traits<.*?>\s*>?, ?(?:\(bool\))?(?:true|false|0|1), ?(?:\(bool\))?(true|false|0|1)")


@dataclass(frozen=True)
class _Key:
    """What the kernels of one row have in common."""

    backend: str
    pass_name: AttentionPass
    shape: tuple[int, int, int, int, int] | None = None  # batch, heads, queries, keys, head size
    causal: bool | None = None
    precision: str = ""


def attention_causes(step: StepEvidence) -> Iterator[Cause]:
    """Attention that another implementation runs clearly faster on this GPU."""
    slow = [(row, items) for row, items in attention_rows(step) if row.faster_ms is not None]
    items = [item for _, group in slow for item in group]
    if not slow or not step.ms(items):
        return
    longest = slow[0][0]
    time_ms, saved_ms = step.ms(items), sum(row.time_ms - (row.faster_ms or 0.0) for row, _ in slow)
    evidence = finding(
        "cause-slow-attention", **step.time_facts(time_ms), backend=longest.backend, tflops=longest.tflops or 0.0,
        faster=longest.faster, faster_ms=time_ms - saved_ms, queries=longest.queries or 0, keys=longest.keys or 0,
        head_dim=longest.head_dim or 0,
    )  # fmt: skip
    yield step.cause("slow-attention", min(saved_ms, time_ms), [evidence], items, "", longest.backend)


def attention_rows(step: StepEvidence) -> list[tuple[AttentionTotal, list[TimedWork]]]:
    """The time of attention by backend, pass and shape, the longest first, and the work of each row."""
    pairs = ((_key(item), item) for item in step.items)
    groups = grouped((key, item) for key, item in pairs if key is not None)
    beside = [item for item in step.items if item.name == "attention" and _beside_products(item)]
    math = [items for key, items in groups.items() if key.backend == MATH]
    for item in beside if math else ():  # it belongs to the products around it
        min(math, key=lambda items: min(abs(item.index - one.index) for one in items)).append(item)
    _share_helpers(groups)
    rows = [(_row(step, key, items), items) for key, items in groups.items()]
    return sorted(rows, key=lambda row: -row[0].time_ms)


def _share_helpers(groups: dict[_Key, list[TimedWork]]) -> None:
    """Kernels without a shape (reductions, conversions of dQ) belong to the only shape of their backend and pass."""
    for key in [key for key in groups if key.shape is None]:
        alike = [other for other in groups if (other.backend, other.pass_name) == (key.backend, key.pass_name) and other.shape]
        if len(alike) == 1:
            groups[alike[0]] += groups.pop(key)


def _key(item: TimedWork) -> _Key | None:
    """None for work that is no attention, and for a softmax of its own."""
    if item.name != "attention" or _beside_products(item):
        return None
    if item.work_class.is_gemm:
        return _math_key(item)
    name = item.work.name
    forward = next((one for one in item.scope.operators if ATTENTION_FORWARD.match(one.name)), None)
    backward = next((one for one in item.scope.operators if ATTENTION_BACKWARD.match(one.name)), None)
    chosen = backward or forward
    pass_name: AttentionPass = "forward" if chosen is not None or FORWARD.search(name) else ""
    pass_name = "backward" if backward is not None or BACKWARD.search(name) else pass_name
    types = " ".join(map(str, chosen.types[:2])) if chosen is not None else ""
    precision = next((known.in_traces for known in PRECISIONS if known.torch_type in types), "")
    shape = _shape(chosen) if chosen is not None else None
    return _Key(attention_backend(name) or "other", pass_name, shape, _causal(item, forward), precision)


def _beside_products(item: TimedWork) -> bool:
    """A softmax, or elementwise work between batched GEMMs and it."""
    return is_softmax(item.work.name) or item.work_class.eager


def _shape(operator: Operator) -> tuple[int, int, int, int, int] | None:
    """Batch, heads, queries, keys and head size, from the inputs of PyTorch's operators; the backward's begin with a gradient."""
    shapes = [shape for shape in operator.shapes if len(shape) == 4]
    if ATTENTION_BACKWARD.match(operator.name):
        shapes = shapes[1:]
    if len(shapes) < 2:
        return None
    middle = (1, 2) if HEADS_SECOND.search(operator.name) else (2, 1)
    query, key = shapes[0], shapes[1]
    sizes = query[0], query[middle[0]], query[middle[1]], key[middle[1]], query[3]
    return sizes if min(sizes) > 0 else None


def _causal(item: TimedWork, operator: Operator | None) -> bool | None:
    at = CAUSAL_AT.get(operator.name, 0) if operator is not None else 0
    value = operator.concrete[at] if operator is not None and at < len(operator.concrete) else ""
    if at and value in ("True", "False"):
        return bool(value == "True")
    template = FLASH_TEMPLATE.search(item.work.name[:2000])
    if template is not None:
        return template[1] in ("true", "1")
    return True if "Causal" in item.work.name else None


def _math_key(item: TimedWork) -> _Key:
    """A batched GEMM that multiplies queries and keys, or scores and values: one of its sizes is that of a head."""
    size, pass_name = item.gemm.size, item.gemm.pass_name
    phase: AttentionPass = "forward" if pass_name in ("fprop", "recomputed") else "backward" if pass_name else ""
    if size is None or min(size) <= 0 or item.gemm.flops <= 0:
        return _Key(MATH, phase)
    m, k, n = size
    keys, head = (n, k) if n == m else (k, n) if k == m else (max(k, n), min(k, n))
    return _Key(MATH, phase, (1, round(item.gemm.flops / (2.0 * m * k * n)), m, keys, head), None, item.gemm.precision)


def _row(step: StepEvidence, key: _Key, items: Sequence[TimedWork]) -> AttentionTotal:
    time_us = sum(item.work.time for item in items)
    # Several kernels make up one attention: the one that runs longest counts. Where shapes are not known, layers of different
    # kinds may run different ones, each about as long.
    times = largest_sums((item.work.name, item.work.time) for item in items)
    longest, *others = times
    counted = {longest, *(name for name in others if key.shape is None and times[name] > times[longest] / 2)}
    runs = sum(item.work.name in counted for item in items)
    flops = _flops(key, items, runs)
    tflops = flops / time_us / 1e6 if flops and time_us else None
    if tflops is not None and key.causal is None and _too_fast(tflops, key, step):
        key = replace(key, causal=True)  # without the mask it would be faster than anything that exists
        tflops /= 2
    peak = _rates(step)[1]
    if tflops is not None and peak is not None and tflops > peak:  # the shape is not that of these kernels
        key, tflops = replace(key, shape=None, causal=None), None
    batch, heads, queries, keys, head = key.shape if key.shape is not None else (None,) * 5
    row = AttentionTotal(
        backend=key.backend, pass_name=key.pass_name, batch=batch, heads=heads, queries=queries, keys=keys, head_dim=head,
        causal=key.causal, precision=key.precision, count=runs / step.view.count, time_ms=time_us / 1000 / step.view.count,
        tflops=tflops, kernel=main_kernels(items, 1)[0],
    )  # fmt: skip
    return _with_faster(row, step)


def _too_fast(tflops: float, key: _Key, step: StepEvidence) -> bool:
    rates, peak = _rates(step)
    best = max((rate[key.pass_name] for rate in rates), default=None) if key.pass_name else None
    square = key.shape is not None and key.shape[2] == key.shape[3]
    return best is not None and peak is not None and square and tflops > FASTEST * best * peak


def _rates(step: StepEvidence) -> tuple[list[dict[str, Any]], float | None]:
    """The rates of the GPU's architecture, and its rate in BF16."""
    spec = spec_of(step.view.trace.gpu_name)
    capability = spec.capability[0] if spec is not None else None
    peak = step.gpu.peak(BF16) or step.gpu.peak(FP16) if step.gpu is not None else None
    return [rate for rate in RATES if rate["capability"] == capability], peak


def _flops(key: _Key, items: Sequence[TimedWork], runs: int) -> float:
    if key.backend == MATH:
        return sum(item.gemm.flops for item in items)
    if key.shape is None:
        return 0.0
    batch, heads, queries, keys, head = key.shape
    forward = 4.0 * batch * heads * queries * keys * head * (0.5 if key.causal and queries == keys else 1.0)
    return runs * forward * (BACKWARD_FLOPS if key.pass_name == "backward" else 1.0)


def _with_faster(row: AttentionTotal, step: StepEvidence) -> AttentionTotal:
    """Name the backend that the table gives a clearly higher rate than this one reached."""
    rates, peak = _rates(step)
    judged = step.view.trace.phase.judged
    if not judged or peak is None or row.tflops is None or row.pass_name == "" or (row.keys or 0) < LONG:
        return row
    if row.precision not in (BF16, FP16) or (row.head_dim or 0) > LARGEST_HEAD or (row.head_dim or 0) % 8:
        return row
    own = next((rate[row.pass_name] for rate in rates if rate["name"] == row.backend), 0.0)
    for rate in rates:
        reached = rate[row.pass_name]
        if rate["name"] != row.backend and own < SLOW * reached and row.tflops < SLOW * reached * peak:
            faster_ms = row.time_ms * row.tflops / (reached * peak)
            return row.model_copy(update={"faster": rate["name"], "faster_ms": faster_ms})
    return row
