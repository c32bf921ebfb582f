"""Reads a profiler trace into plain records: GPU work, the calls that launched it, operators and annotations on the CPU.

Profiler versions and other tools name things differently: categories are reduced to a few, times may be text, numbers may be
missing. Events that cannot be read are skipped; only a trace without any GPU work is rejected. Times are microseconds from the
first event of the trace.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from pathlib import Path
from typing import Any

from gemmscope.errors import UserError
from gemmscope.explain.host_activity import ALLOCATION, LOADING, START_UP, activity_of
from gemmscope.explain.phase import GRADED, TracePhase, recognized
from gemmscope.explain.trace_file import HOW_TO_RECORD, OTHER_DEVICES, EventStream, reject_foreign
from gemmscope.explain.trace_file import MOST_NAMES as MOST_NAMES_LOOKED_AT
from gemmscope.reading import InputFile
from gemmscope.toml import load_data

# Category in lower case, as any profiler version writes it -> category here
CATEGORIES = {
    "kernel": "kernel", "concurrent_kernel": "kernel", "gpu_memcpy": "copy", "memcpy": "copy", "gpu_memset": "copy",
    "memset": "copy", "cuda_runtime": "launch", "cuda_driver": "launch", "runtime": "launch", "hip_runtime": "launch",
    "hip_driver": "launch", "xpu_runtime": "launch", "cpu_op": "operator", "operator": "operator", "user_annotation": "mark",
    "gpu_user_annotation": "gpu mark", "python_function": "python",
}  # fmt: skip
GEMM_OPERATORS = re.compile(r"aten::(_scaled|_grouped|_scaled_grouped)?_?(mm|addmm|bmm|baddbmm|linear|matmul|addmv|mv)(_v2)?$")
ATTENTION_FORWARD = re.compile(r"aten::_?(scaled_dot_product\w*attention|(flash|efficient|cudnn)_attention_forward)$")
ATTENTION_BACKWARD = re.compile(r"aten::_?(scaled_dot_product\w*attention|(flash|efficient|cudnn)_attention)_backward$")
CONVOLUTION = re.compile(r"aten::\w*conv(olution|[123_])\w*$")
CONVOLUTION_FORWARD = re.compile(r"aten::conv(olution|[123]d|_transpose[123]d)$")
# PyTorch's own that tell the class of a kernel
TELLING = re.compile(r"aten::\w*(norm|relu|gelu|silu|clamp_min|threshold|loss|softmax|embedding)\w*$")
CONCRETE = "Concrete Inputs"  # the values of an operator's scalars: is_causal
_WHOLE = re.compile(r"-?[0-9]{1,19}")
SKEW_US = 20.0
MOST_RECORDS = 4_000_000  # of about 1 KB each
LONGEST_NAME = 5000  # characters: the demangled names of templates are long
MOST_NAMES = 32 << 20  # characters of all names that differ; real traces have less than 2 MiB
MOST_SHAPES, MOST_DIMENSIONS = 2000, 12  # of one operator: the weights of many experts
MOST_FILES = 20_000  # of Python functions
LARGEST_SIZE = 2**40
LATEST_US = 1e20  # no valid timestamp is larger
GRAPH_LAUNCH = "GraphLaunch"  # in the names of calls that launch all kernels of a graph
LOADING_US, START_UP_US = 1e3, 1e4  # from which on a launch to an idle GPU loads code, and the first call starts the GPU
LONG_US = 50.0  # activities of the CPU from this time on may explain why the GPU was idle
LONGEST_QUEUE_US = 10e6  # a kernel that starts later than this after its launch is on another clock


Shape = list[int]  # sizes of a tensor
NCCL_MARK = "nccl:"
MOST_RANKS = 100_000
DTYPE_BYTES = (
    ("64", 8), ("double", 8), ("long", 8), ("complex", 8), ("bfloat16", 2), ("float8", 1), ("half", 2), ("16", 2), ("short", 2),
    ("32", 4), ("float", 4), ("int8", 1), ("byte", 1), ("char", 1), ("bool", 1), ("8", 1), ("int", 4),
)  # fmt: skip
# A pattern in the names of operators, annotations and kernels -> the collective
KINDS = (
    ("reduce_?scatter", "reduce-scatter"), ("all_?reduce", "all-reduce"), ("all_?gather", "all-gather"),
    ("all_?to_?all", "all-to-all"), ("broadcast", "broadcast"), ("send_?recv|send|recv", "send/receive"), ("barrier", "barrier"),
    ("reduce", "reduce"), ("gather", "gather"), ("scatter", "scatter"),
)  # fmt: skip
# Bytes on each link over the bytes of the message, of n ranks: the bus bandwidth of NCCL's tests
BUS_FACTORS = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0}


@dataclass(frozen=True, slots=True)
class CollectiveMessage:
    """`bytes_counted`: as NCCL's tests count them, the whole buffer of one rank, whichever side holds it; `ranks`: the members of
    the process group, empty if unknown; `size`: how many they are, 0 if unknown."""

    kind: str
    bytes_counted: float = 0.0
    group: str = ""
    ranks: tuple[int, ...] = ()
    size: int = 0


@dataclass(slots=True)
class Call:
    """A call on the CPU: a launch, a copy, a synchronization; or something else that took long."""

    name: str
    start: float
    end: float
    thread: Any


@dataclass(slots=True)
class GpuWork:
    """A kernel, copy or memset on the GPU."""

    name: str
    start: float
    end: float
    stream: int | str
    device: int | str
    correlation: Any
    external: Any
    copy: bool = False
    message: CollectiveMessage | None = None  # of a collective
    call: Call | None = None  # that launched it, if that was recorded

    @property
    def time(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class Operator(Call):
    """An operator on the CPU, or an annotation (mark) set there by a person or a framework."""

    external: Any = None
    shapes: list[Shape] = field(default_factory=list)
    types: list[Any] = field(default_factory=list)
    concrete: list[str] = field(default_factory=list)
    sequence: int | None = None


@dataclass
class RecordedTrace:
    """The trace of one rank. `operator_names`: by external id, for operators of which only the name is kept. `activities`: what
    the CPU did for long: operators, CUDA calls, Python functions."""

    source: InputFile
    work: list[GpuWork] = field(default_factory=list)
    launches: dict[Any, Call] = field(default_factory=dict)
    waits: list[Call] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    operator_names: dict[Any, str] = field(default_factory=dict)
    marks: list[Operator] = field(default_factory=list)
    gpu_marks: list[Operator] = field(default_factory=list)
    activities: list[Call] = field(default_factory=list)
    stream_waits: list[Call] = field(default_factory=list)
    rank: int | None = None
    world_size: int = 1
    gpu_name: str = ""
    gpu_properties: dict[str, Any] = field(default_factory=dict)  # as the profiler describes it: compute capability, and so on
    facts: dict[str, Any] = field(default_factory=dict)  # that `trace_me` recorded in addition to the events
    other_gpus: int = 0  # whose work is ignored
    host_work: dict[str, list[Call]] = field(default_factory=dict)  # by activity of the CPU (host_activity.toml)
    has_operators: bool = False
    phase: TracePhase = field(default_factory=TracePhase)
    calls: set[str] = field(default_factory=set)  # names of the calls of the CUDA or HIP API
    frames: set[str] = field(default_factory=set)  # files of Python functions
    sequences: set[Any] = field(default_factory=set)  # the first numbers of the autograd graph
    unmatched: list[Call] = field(default_factory=list)  # launches without a correlation
    slowing_options: set[str] = field(default_factory=set)  # of the profiler, which make launches slower
    events: int = 0
    categories: set[str] = field(default_factory=set)  # of events that are not read
    processes: set[str] = field(default_factory=set)
    zero_us: float = 0.0  # time of the first event, as written
    skew_us: float = 0.0  # offset of the GPU clock from the CPU clock, as written

    @property
    def path(self) -> Path:
        """The file as messages and results name it."""
        return Path(str(self.source))

    def operators_by_id(self) -> dict[Any, Operator]:
        return {operator.external: operator for operator in self.operators if operator.external is not None}


def read_trace(path: str | Path | InputFile) -> RecordedTrace:
    """Read one file; a `UserError` if it is not a trace or has no GPU work in it."""
    stream = EventStream(path)
    trace = RecordedTrace(stream.source)
    names: dict[str, str] = {}  # each is kept once
    for event in stream:
        trace.events += 1
        phase = event.get("ph", "X" if "dur" in event else None)  # some tools omit it
        if phase == "X":
            _take(trace, event, names)
        elif phase == "M" and event.get("name") == "process_name" and len(trace.processes) < MOST_NAMES_LOOKED_AT:
            trace.processes.add(str(as_table(event.get("args")).get("name", ""))[:LONGEST_NAME])
        elif event.get("name") == "[memory]":
            trace.slowing_options.add("allocations")
        if not trace.events % 10_000:
            _check_size(trace, names)
    job, devices = as_table(stream.head.get("distributedInfo")), as_list(stream.head.get("deviceProperties"))
    trace.rank, trace.world_size = _integer(job.get("rank")), _integer(job.get("world_size")) or 1
    described = list(filter(None, map(as_table, devices)))
    trace.gpu_name = next((printable(device["name"]) for device in described if device.get("name")), "")
    trace.gpu_properties, trace.facts = next(iter(described), {}), as_table(stream.head.get("gemmscope"))
    named = [record.name for record in (*trace.marks, *trace.operators)]  # what is easiest to read comes first
    names_of_work = dict.fromkeys([*named, *trace.operator_names.values(), *(work.name for work in trace.work)])
    trace.phase = recognized(names_of_work, trace.calls, trace.frames, len(trace.sequences), trace.has_operators)
    _require_gpu_work(trace)
    _one_device(trace)
    _match_by_order(trace)
    trace.gpu_name = trace.gpu_name or architecture_of(work.name for work in trace.work)
    for work in trace.work:
        work.call = trace.launches.get(work.correlation)
        if work.call is not None and GRAPH_LAUNCH in work.call.name:
            work.external = None  # of the operator that was open when the graph was captured, or of another one
    _drop_false_ids(trace)
    _find_start_up(trace)
    _align(trace)
    _from_zero(trace)
    return trace


def _check_size(trace: RecordedTrace, names: dict[str, str]) -> None:
    """Reject a trace that would need far more memory or time than any that is worth explaining."""
    kept = (trace.work, trace.launches, trace.operators, trace.operator_names, trace.marks, trace.gpu_marks, trace.activities)
    if sum(map(len, kept)) + sum(map(len, trace.host_work.values())) > MOST_RECORDS:
        raise UserError(f"{trace.path} has more than {MOST_RECORDS:,} kernels, launches and operators", "record fewer steps")
    if sum(map(len, names)) > MOST_NAMES:
        raise UserError(f"{trace.path} has more than {MOST_NAMES >> 20} MiB of different names", HOW_TO_RECORD)


def _take(trace: RecordedTrace, event: dict[str, Any], names: dict[str, str]) -> None:
    raw = event.get("cat")
    category = raw.lower() if isinstance(raw, str) else ""
    kind = CATEGORIES.get(category)
    if kind is None:
        if len(trace.categories) < MOST_NAMES_LOOKED_AT:
            trace.categories.add(category)
        return
    start, duration = _number(event.get("ts")), _number(event.get("dur", 0))
    if kind == "python":
        trace.slowing_options.add("Python stacks")
        if len(trace.frames) < MOST_FILES:
            trace.frames.add(str(event.get("name"))[:LONGEST_NAME].partition("(")[0])
    if start is None or duration is None or duration < (LONG_US if kind == "python" else 0):
        return
    name, end = printable(event.get("name", "")), start + duration
    name = names.setdefault(name, name)
    arguments, thread = as_table(event.get("args")), _key(event.get("tid"))
    correlation = _key(arguments.get("correlation"))
    external = _key(arguments.get("External id", arguments.get("external id")))
    if kind in ("kernel", "copy"):
        copy = kind == "copy" or name.startswith(("Memcpy", "Memset"))
        stream, device = _key(arguments.get("stream", event.get("tid"))), _key(arguments.get("device", event.get("pid")))
        message = message_of(arguments) if arguments.get("Collective name") else None
        trace.work.append(GpuWork(name, start, end, stream, device, correlation, external, copy, message))
        return
    call, activity = Call(name, start, end, thread), ""
    if duration >= LONG_US and kind in ("python", "operator", "launch"):
        trace.activities.append(call)
    if kind == "launch":
        activity = LOADING if "LaunchKernel" in name and duration >= LOADING_US else activity_of(name, "calls")
        trace.calls.add(name)
        if correlation is not None:
            trace.launches[correlation] = call
        elif "Launch" in name:
            trace.unmatched.append(call)
        if "Synchronize" in name or "cudaMemcpy" in name or "hipMemcpy" in name:
            trace.waits.append(call)
        elif "StreamWaitEvent" in name:
            trace.stream_waits.append(call)
    elif kind != "gpu mark" and not name.startswith("aten::"):
        activity = activity_of(name, "names")
    if activity:
        trace.host_work.setdefault(activity, []).append(call)
    if kind not in ("launch", "python"):
        _take_operator(trace, kind, Operator(name, start, end, thread, external), arguments)


def _take_operator(trace: RecordedTrace, kind: str, operator: Operator, arguments: dict[str, Any]) -> None:
    if kind in ("mark", "gpu mark") or operator.name.startswith(("ProfilerStep", "Optimizer.step")):
        operator.shapes, operator.types = _shapes(arguments.get("Input Dims"), 1), as_list(arguments.get("Input type"))[:1]
        (trace.gpu_marks if kind == "gpu mark" else trace.marks).append(operator)
        return
    trace.has_operators = True
    if len(trace.sequences) < GRADED and arguments.get("Sequence number"):
        trace.sequences.add(_key(arguments["Sequence number"]))
    if operator.external is not None:
        trace.operator_names[operator.external] = operator.name
    attention = ATTENTION_FORWARD.match(operator.name) or ATTENTION_BACKWARD.match(operator.name)
    telling = attention or any(known.match(operator.name) for known in (TELLING, GEMM_OPERATORS, CONVOLUTION))
    if operator.name.startswith(("aten::", "triton_")) and not telling:  # it says nothing about the kernels that it launches
        return
    operator.sequence = _integer(arguments.get("Sequence number"))
    trace.operators.append(operator)
    if TELLING.match(operator.name) and not attention:  # its name is enough
        return
    operator.shapes = _shapes(arguments.get("Input Dims", arguments.get("Input dims")), MOST_SHAPES)
    if operator.shapes:
        trace.slowing_options.add("operator shapes")
    operator.types = as_list(arguments.get("Input type"))[:MOST_SHAPES]
    if attention:
        operator.concrete = [value if isinstance(value, str) else "" for value in as_list(arguments.get(CONCRETE))[:20]]


def _require_gpu_work(trace: RecordedTrace) -> None:
    foreign = not trace.gpu_name and any(name.startswith(OTHER_DEVICES) for name in trace.categories)
    if not all(work.copy for work in trace.work) and not foreign:
        return
    reject_foreign(trace.path, categories=trace.categories, processes=trace.processes)
    if not trace.events:
        raise UserError(f"{trace.path} has no events: nothing was recorded", HOW_TO_RECORD)
    if any("Launch" in name for name in trace.calls):
        raise UserError(
            f"{trace.path} has kernel launches, but no GPU kernels: the profiler did not record the GPU",
            "end other profilers (Nsight, DCGM, a second torch.profiler), which keep the GPU's activity to themselves, and "
            + HOW_TO_RECORD,
        )
    raise UserError(
        f"{trace.path} has no GPU kernels: none of its {trace.events:,} events ran on a GPU",
        f"profile with ProfilerActivity.CUDA, or {HOW_TO_RECORD}",
    )


def _one_device(trace: RecordedTrace) -> None:
    """Of several GPUs in one file, keep the one with the most kernels."""
    counts = Counter(work.device for work in trace.work)
    chosen, _ = counts.most_common(1)[0]
    trace.other_gpus = len(counts) - 1
    trace.work = [work for work in trace.work if work.device == chosen]


def _match_by_order(trace: RecordedTrace) -> None:
    """Without correlations, the n-th launch started the n-th kernel, if there are as many and none began before its launch."""
    kernels = sorted((work for work in trace.work if not work.copy), key=lambda work: work.start)
    calls = sorted(trace.unmatched, key=lambda call: call.start)
    pairs = list(zip(calls, kernels, strict=False))
    if len(calls) == len(kernels) and all(work.correlation is None and call.start <= work.start for call, work in pairs):
        for number, (call, work) in enumerate(pairs):
            work.correlation = f"launch {number}"
            trace.launches[work.correlation] = call


def _find_start_up(trace: RecordedTrace) -> None:
    """The first allocation of a process creates the GPU's context and may take seconds: the steady state has none of it."""
    first = min((call.start for call in trace.launches.values() if "Launch" in call.name), default=0.0)
    calls = trace.host_work.get(ALLOCATION, [])
    early = [call for call in calls if call.end <= first and call.end - call.start >= START_UP_US]
    if early:
        trace.host_work |= {ALLOCATION: [call for call in calls if call not in early], START_UP: early}


def architecture_of(kernels: Iterable[str]) -> str:
    """What the names of kernels say about a GPU that the trace does not name; empty if they say nothing.

    >>> architecture_of(["Cijk_Ailk_Bljk_BBS_BH_MT256x112x64_ISA942_IU1"]), architecture_of(["ampere_sgemm_128x64_nn"])
    ('AMD Instinct MI300 series (ISA942 in kernel names)', '')
    >>> architecture_of(["nvjet_sm90_tst_128x64_64x8_4x1_v_bz_TNT"])
    'NVIDIA Hopper (nvjet_sm90 in kernel names)'
    """
    rules: list[dict[str, str]] = load_data("gemmscope.gpu", "other_gpus.toml")["architecture"]
    matches = ((rule["is"], match[0]) for name in kernels for rule in rules if (match := re.search(rule["kernel"], name)))
    return next((f"{device} ({shown} in kernel names)" for device, shown in matches), "")


def _drop_false_ids(trace: RecordedTrace) -> None:
    """Old profilers write the number of the launch as the id of the operator, which is then that of another one."""
    kernels = [work for work in trace.work if work.external is not None]
    if not kernels or any(work.external != work.correlation for work in kernels):
        return
    operators = trace.operators_by_id()
    pairs = [(operators.get(work.external), work.call) for work in kernels]
    inside = [
        operator.start <= call.start <= operator.end for operator, call in pairs if operator is not None and call is not None
    ]
    if sum(inside) < 0.5 * len(inside):
        for work in kernels:
            work.external = None


def _align(trace: RecordedTrace) -> None:
    """Correct the GPU clock where kernels would start before their launch, or much too late after it."""
    lags = sorted(work.start - work.call.start for work in trace.work if work.call is not None)
    if not lags:
        return
    least = lags[len(lags) // 200]
    if not -SKEW_US <= least <= LONGEST_QUEUE_US:
        trace.skew_us = least
        _shift([*trace.work, *trace.gpu_marks], least)


def _from_zero(trace: RecordedTrace) -> None:
    """Count time from the first event: nanoseconds since 1970 would use up the digits of a float."""
    timed: list[Any] = [*trace.work, *trace.launches.values(), *trace.operators, *trace.marks, *trace.gpu_marks]
    trace.zero_us = min(record.start for record in timed)
    active = [call for calls in trace.host_work.values() for call in calls]
    _shift([*timed, *trace.waits, *trace.stream_waits, *trace.activities, *active], trace.zero_us)
    trace.work.sort(key=lambda work: (work.start, work.end))
    for records in (trace.operators, trace.marks, trace.gpu_marks, trace.activities, trace.waits, trace.stream_waits):
        records.sort(key=lambda record: (record.start, -record.end))


def _shift(records: list[Any], time_us: float) -> None:
    """Subtract a time from each record, once: most waits are launches as well."""
    for record in {id(record): record for record in records}.values():
        record.start -= time_us
        record.end -= time_us


def _number(value: Any) -> float | None:
    """A time; some tools write it as text.

    >>> _number("1.5"), _number(None), _number("soon"), _number(float("nan"))
    (1.5, None, None, None)
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < LATEST_US else None  # rejects NaN, too


def printable(value: Any) -> str:
    """A name that can be written to any file: lone surrogates, which JSON allows, are replaced.

    >>> printable("nvjet"), printable(chr(0xD800) + "x"), printable(None)
    ('nvjet', '?x', 'None')
    """
    text = str(value)[:LONGEST_NAME]
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _integer(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None else None


def _key(value: Any) -> Any:
    """An id that can be a dictionary key: numbers written as text become numbers.

    >>> _key("7"), _key(7), _key("-1"), _key("--1"), _key("²"), _key([7]), _key(float("nan"))
    (7, 7, -1, '--1', '²', None, None)
    """
    if isinstance(value, str):
        return int(value) if _WHOLE.fullmatch(value) else value
    return value if isinstance(value, int) or (isinstance(value, float) and isfinite(value)) else None


def as_list(value: Any) -> list[Any]:
    """A value of a trace, if it is a list; else an empty one."""
    return value if isinstance(value, list) else []


def _shapes(value: Any, count: int) -> list[Shape]:
    """The first arguments of an operator, those that are the sizes of tensors."""
    lists = [shape for shape in as_list(value)[:count] if isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS]
    return [shape for shape in lists if all(isinstance(size, int) and 0 <= size <= LARGEST_SIZE for size in shape)]


def as_table(value: Any) -> dict[str, Any]:
    """A value of a trace, if it is a table; else an empty one."""
    return value if isinstance(value, dict) else {}


def message_of(arguments: dict[str, Any]) -> CollectiveMessage:
    """The message that the profiler describes in the arguments of a collective's kernel."""
    width = element_bytes(arguments.get("dtype"))
    ranks = _ranks(arguments.get("Process Group Ranks"))
    description = arguments.get("Process Group Description")
    group = description if isinstance(description, str) and description not in ("", "undefined") else ""
    name = arguments.get("Process Group Name")
    return CollectiveMessage(
        kind=kind_of(str(arguments.get("Collective name", ""))),
        bytes_counted=width * max(0.0, *(_number(arguments.get(f"{side} msg nelems")) or 0.0 for side in ("In", "Out"))),
        group=(group or str(name if name is not None else ""))[:100],
        ranks=ranks,
        size=max(_integer(arguments.get("Group size")) or 0, 0) or len(ranks),
    )


def message_of_mark(name: str, shapes: Sequence[Shape], types: Sequence[Any]) -> CollectiveMessage:
    """From the annotation `nccl:all_reduce` that PyTorch sets around the launch, with the shape of the first tensor.

    >>> message_of_mark("nccl:all_reduce", [[1024, 2]], ["float"]).bytes_counted
    8192.0
    """
    size = float(prod(shapes[0])) * element_bytes(types[0] if types else None) if shapes and shapes[0] else 0.0
    return CollectiveMessage(kind_of(name.removeprefix(NCCL_MARK)), size)


def kind_of(name: str) -> str:
    """The collective that a name shows; empty if it shows none.

    >>> kind_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL"), kind_of("_reduce_scatter_base"), kind_of("ncclDevKernel_Generic")
    ('all-reduce', 'reduce-scatter', '')
    """
    return next((kind for pattern, kind in KINDS if re.search(pattern, name.lower())), "")


def element_bytes(dtype: Any) -> int:
    """Bytes of one element; 0 if the type is unknown.

    >>> [element_bytes(name) for name in ("BFloat16", "c10::Half", "float", "Float8_e4m3fn", "Long", "Byte", None)]
    [2, 2, 4, 1, 8, 1, 0]
    """
    text = dtype.lower() if isinstance(dtype, str) else ""
    return next((width for part, width in DTYPE_BYTES if part in text), 0)


def _ranks(value: Any) -> tuple[int, ...]:
    """The profiler writes a list as text, and shortens long ones with "...".

    >>> _ranks("[0, 1, 2]"), _ranks("[0, 1, ...]"), _ranks(None)
    ((0, 1, 2), (), ())
    """
    text = value if isinstance(value, str) else ",".join(map(str, value)) if isinstance(value, list) else ""
    if not re.fullmatch(r"\[?[0-9, ]+\]?", text) or len(text) > 8 * MOST_RANKS:
        return ()
    return tuple(int(number) for number in re.findall(r"[0-9]{1,9}", text))
