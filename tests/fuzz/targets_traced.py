"""What a traced module may look like: any names, any sizes, passes that are missing, empty tensors."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from unittest import mock

from hypothesis import strategies as st

from fuzz.hostile import OUTPUTS, TEXTS
from fuzz.targets import Target, command_line
from gemmscope.workload.ops import PASSES, BatchedGemm, Convolution, Gemm, gemm_size
from gemmscope.workload.trace import ModuleTrace
from gemmscope.workload.traced_ops import Moved, OtherWork, TracedAttention

SIZES = st.sampled_from([0, 1, 7, 8, 16, 64, 128, 4096, 2**20, 2**40, 2**62])
COUNTS = st.sampled_from([1, 1, 2, 3, 100, 10**9])
GEMMS = st.builds(
    Gemm, TEXTS | st.sampled_from(["layers.*.up", "lm_head"]), st.sampled_from(PASSES), SIZES, SIZES, SIZES, COUNTS, COUNTS
)


def linear(op: str, tokens: int, inputs: int, outputs: int, count: int) -> tuple[Gemm, ...]:
    """All passes of one linear."""
    return tuple(Gemm(op, name, *gemm_size(tokens, inputs, outputs, name), count=count) for name in PASSES)


LINEARS = st.builds(linear, TEXTS, SIZES, SIZES, SIZES, COUNTS)
BATCHED = st.builds(
    BatchedGemm,
    role=st.sampled_from(["batched-gemm", "attention-gemm"]),
    label=TEXTS,
    direction=st.sampled_from(["forward", "backward"]),
    m=SIZES,
    k=SIZES,
    n=SIZES,
    batch=SIZES,
    count=COUNTS,
)
CONVOLUTIONS = st.builds(
    Convolution,
    role=st.just("convolution"),
    label=TEXTS,
    direction=st.sampled_from(["forward", "backward"]),
    flops=SIZES,
    count=COUNTS,
)
MOVED = st.builds(Moved, flops=SIZES, bytes_moved=SIZES, launches=SIZES, fused_bytes=SIZES, kernels=SIZES)
OTHERS = st.builds(
    OtherWork,
    path=TEXTS,
    kind=st.sampled_from(["norm", "softmax", "loss", "embedding", "unheard-of"]),
    forward=MOVED,
    backward=MOVED,
)
ATTENTION = st.builds(
    TracedAttention,
    **dict.fromkeys(
        ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim"), st.sampled_from([1, 7, 64, 2**20])
    ),
    label=TEXTS,
    pairs=st.sampled_from([1.0, 1e12]),
    causal=st.booleans(),
    count=COUNTS,
    backward_runs=st.integers(0, 1),
)
TRACES = st.builds(
    ModuleTrace,
    class_name=TEXTS,
    parameters=SIZES,
    gemms=st.lists(GEMMS, max_size=3).map(tuple) | st.lists(LINEARS, max_size=3).map(lambda groups: tuple(chain(*groups))),
    batched_gemms=st.lists(BATCHED, max_size=2).map(tuple),
    convolutions=st.lists(CONVOLUTIONS, max_size=2).map(tuple),
    masks=st.dictionaries(st.sampled_from(["none", "causal", "explicit"]), st.integers(0, 9)),
    versions=st.dictionaries(TEXTS, TEXTS, max_size=2),
    attentions=st.lists(ATTENTION, max_size=1).map(tuple),
    others=st.lists(OTHERS, max_size=2).map(tuple),
    linear_paths=st.lists(TEXTS | st.just("layers.*.up"), max_size=2).map(tuple),
    heads=st.just(()) | st.just(("lm_head",)),
    trainable=SIZES,
    saved_bytes=SIZES,
    inputs=st.none() | TEXTS,
    samples=st.none() | st.sampled_from([1, 8, 2**20]),
)
COMMANDS = st.sampled_from(
    [["shapes"], ["forecast", "--gpu", "h200"], ["forecast", "--gpu", "a100,b300", "--recipes", "BF16,FP8Block"]]
)


def run_traced(case: tuple[list[str], list[str], ModuleTrace], folder: Path) -> str:
    """A config without closed form, whose tracing gives this."""
    command, output, trace = case
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "unheard-of"}))
    with mock.patch("gemmscope.job.rank_workload.trace_huggingface", mock.Mock(return_value=trace)):
        return command_line([*command, "--config", str(path), "--micro-batch-size", "1", "--sequence-length", "64", *output])


TARGETS = [Target("traced-module", st.tuples(COMMANDS, OUTPUTS, TRACES), run_traced)]
