"""What kernel names show: which class of work a kernel does, and the precision of a GEMM.

Names are decoded by the table in `kernel_names.toml`. `evidence.py` compares the precision with the one requested.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from gemmscope.toml import load_data

KernelClass = Literal[
    "gemm", "quantize", "update", "memory",
    "convolution", "attention", "linear attention", "norm", "activation", "loss", "routing", "embedding", "optimizer", "layout",
    "elementwise", "communication", "other",
]  # fmt: skip


LONGEST_KNOWN = 3000  # characters of a name that are looked at: the longest recorded name has as many


@dataclass(frozen=True)
class KernelRun:
    """One execution of a kernel as the profiler saw it."""

    name: str
    duration_us: float
    stream: int = 0


@dataclass(frozen=True)
class KernelFacts:
    """What a name says. `operands` and `scales` are None where it proves nothing about them. `known`: the table has the name,
    even where it belongs to no class."""

    kernel_class: KernelClass
    operands: tuple[str, str] | None = None
    scales: str | None = None
    ends_tensor: bool = False  # the last kernel of one tensor's quantization
    scales_output: bool = False  # right after a GEMM: applies the scales that the GEMM left out
    finishes: bool = False  # the second kernel of a GEMM: the sum of split-K, or an epilogue
    known: bool = True


@cache
def classify(name: str) -> KernelFacts:
    """The facts in one kernel's name.

    >>> classify("nvjet_sm90_qrtst_128x160_128x5_2x1_v_bz_coopA_algo2_TNT").operands
    ('e4m3', 'e5m2')
    """
    known = name[:LONGEST_KNOWN]
    for pattern, rule in _patterns():
        if pattern.search(known):
            operands, scales = _nvjet(name) if "nvjet_" in name else (rule.get("operands"), rule.get("scales"))
            pair = (operands[0], operands[1]) if operands else None
            flags = {flag: rule.get(flag, False) for flag in ("ends_tensor", "scales_output", "finishes")}
            return KernelFacts(rule["class"], pair, scales, **flags)
    return KernelFacts("other", known=False)


@cache
def may_be_gemm(name: str) -> bool:
    """Whether a name that the table does not have looks like that of a GEMM.

    >>> may_be_gemm("my_matmul_kernel"), may_be_gemm("my_copy_kernel")
    (True, False)
    """
    return re.search(_rules()["unknown"]["gemm"], name) is not None


@cache
def _patterns() -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    return [(re.compile(rule["found"]), rule) for rule in _rules()["kernel"]]


CAST_SHARE = 0.75  # of a kernel that casts and does a norm or an activation as well: 0.82, 0.85 and 0.56 in three compiled steps
# on an H200, compared with the same step in BF16, which does the norms and activations alone


@dataclass(frozen=True)
class StepWork:
    """What a kernel is for in a training step. `beside`: it casts, and does a norm, an activation or the like as well, so that
    `CAST_SHARE` of its time is the cast's, and the rest is that of `beside`."""

    kernel_class: KernelClass
    beside: KernelClass | None = None


@cache
def work_in_step(name: str) -> StepWork:
    """Like `classify`, for a whole step, in which a compiler may fuse casts with norms, activations and the like.

    >>> work_in_step("triton_poi_fused_mul_silu_3")
    StepWork(kernel_class='activation', beside=None)
    >>> work_in_step("triton_red_fused_abs_gelu_max_6")
    StepWork(kernel_class='quantize', beside='activation')
    """
    facts, rules = classify(name), _rules()["inductor"]
    if not name.startswith("triton_") or facts.kernel_class not in ("quantize", "elementwise", "norm", "activation"):
        return StepWork(facts.kernel_class)
    work = next((rule["class"] for rule in rules["work"] if re.search(rule["found"], name)), None)
    if re.search(rules["casts"], name):
        return StepWork("quantize", work)
    if facts.kernel_class in ("norm", "activation"):
        return StepWork(facts.kernel_class)
    return StepWork(work or ("elementwise" if facts.scales_output else facts.kernel_class))


MATH = "math (bmm and softmax)"  # attention that no fused kernel computes


@cache
def attention_backend(name: str) -> str | None:
    """The implementation of attention that a kernel's name shows; None if it shows none.

    >>> attention_backend("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16")
    'cuDNN'
    >>> attention_backend("pytorch_flash::flash_fwd_kernel"), attention_backend("my_attention")
    ('FlashAttention', None)
    """
    return next((rule["name"] for rule in _rules()["attention"] if re.search(rule["found"], name)), None)


@cache
def is_softmax(name: str) -> bool:
    """Whether a kernel computes a softmax, not its logarithm.

    >>> is_softmax("softmax_warp_forward<BFloat16>"), is_softmax("cunn_SoftMaxForward<LogSoftMaxForwardEpilogue>")
    (True, False)
    """
    return re.search(r"[Ss]oft_?[Mm]ax", name) is not None and re.search(r"[Ll]og_?[Ss]oft", name) is None


@cache
def _rules() -> dict[str, Any]:
    return load_data("gemmscope.engine", "kernel_names.toml")


def _nvjet(name: str) -> tuple[list[str] | None, str | None]:
    """Decode `nvjet_sm90_qqtst_…`: five letters name both operands, three name one format for both."""
    tag = re.search(r"nvjet_(?:sm\d+_)?([a-z]{3,5})_", name)
    letters = _rules()["nvjet"]["letters"]
    if tag is None or any(letter not in letters for letter in tag[1]):
        return None, None
    operands = [letters[letter] for letter in (tag[1][:2] if len(tag[1]) == 5 else tag[1][0] * 2)]
    for rule in _rules()["nvjet"]["scales"]:
        if re.search(rule["found"], name):
            return operands, str(rule["is"])
    return operands, "none" if operands[0] in ("bf16", "fp16", "fp32") else "tensor"
