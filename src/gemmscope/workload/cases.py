"""What to measure, as plain data that crosses the process boundary as JSON.

A *case* is one op of the workload with its size. A *task* is a case in one recipe and one mode. The tasks of one recipe and mode
form a *group*: they run one after another in a burst, as they do in training. The GPU then runs at the clock that their power
allows. That clock differs from group to group by several percent, so groups must not share a burst: on an H200, the speedup of
FP8Block came out 3% lower when it shared a burst with its bare GEMMs, which draw more power than it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from pydantic import TypeAdapter

from gemmscope.choices import Mode
from gemmscope.grouping import grouped
from gemmscope.workload.ops import PASSES, GroupedLinear, Linear, Pass, gemm_size

LEAST_BYTES_IN_FLIGHT_OVER_L2 = 3  # with less, the times would be those of the cache


@dataclass(frozen=True)
class Case:
    """A linear (or the experts of one layer, with `rows` tokens each) of one size; `count` of them run per micro-batch.

    `passes` are the passes that run: all three, or only fprop for a bare GEMM.
    """

    op: str
    tokens: int
    inputs: int
    outputs: int
    count: int = 1
    rows: tuple[int, ...] = ()
    passes: tuple[Pass, ...] = PASSES
    quantized: bool = True  # False: frameworks leave it in BF16 whatever the recipe

    @property
    def flops(self) -> int:
        """The FLOPs of one GEMM, the same in all three passes."""
        return 2 * self.tokens * self.inputs * self.outputs

    def sizes(self) -> dict[str, int]:
        """Tokens and features, by their names in messages."""
        return {f"tokens of expert {index}": row for index, row in enumerate(self.rows)} | self.unpadded_sizes()

    def unpadded_sizes(self) -> dict[str, int]:
        """The same without the tokens of experts, which frameworks pad in training."""
        tokens = {} if self.rows else {"tokens": self.tokens}
        return tokens | {"input features": self.inputs, "output features": self.outputs}

    @property
    def bytes_touched(self) -> int:
        """The size of X, W and Y in bf16: one set of buffers."""
        return 2 * (self.tokens * self.inputs + self.tokens * self.outputs + self.weights)

    @property
    def least_bytes(self) -> int:
        """The memory that forward and backward need in any precision: X, W and Y in bf16, and their gradients."""
        return 2 * self.bytes_touched

    @property
    def weights(self) -> int:
        """Elements of the weight, all experts together."""
        return max(len(self.rows), 1) * self.inputs * self.outputs


@dataclass(frozen=True)
class Task:
    """One thing to time. Autocast: forward and backward of the linear. Pre-quantized: the GEMM of one pass."""

    case: Case
    recipe: str
    mode: Mode
    pass_name: str = ""  # pre-quantized only

    @property
    def key(self) -> str:
        """Names the task in journals and run files."""
        return " / ".join(part for part in (self.case.op, self.recipe, self.mode, self.pass_name) if part)

    @property
    def group(self) -> tuple[str, Mode]:
        return (self.recipe, self.mode)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Task:
        return TypeAdapter(Task).validate_python(data)


def cases_of(linears: Iterable[Linear], *, as_run: bool = False) -> list[Case]:
    """The distinct linears of a workload; equal ones are counted together. `as_run`: with the passes that run, not with all."""
    by_case = grouped((_case(linear), linear) for linear in linears)
    ran = {case: {gemm.pass_name for linear in alike for gemm in linear.gemms()} for case, alike in by_case.items()}
    passes = {case: tuple(name for name in PASSES if name in ran[case] or not as_run) for case in by_case}
    return [replace(case, count=sum(one.count for one in alike), passes=passes[case]) for case, alike in by_case.items()]


def _case(linear: Linear) -> Case:
    rows = linear.rows if isinstance(linear, GroupedLinear) else ()
    return Case(linear.name, linear.tokens, linear.inputs, linear.outputs, rows=rows, quantized=linear.quantized)


def tasks_of(cases: Sequence[Case], recipes: Sequence[str], modes: Sequence[Mode], same_kernels: dict[str, str]) -> list[Task]:
    """Every combination to measure.

    A recipe with the same GEMM kernels as another one (`same_kernels`) is not measured again in pre-quantized mode.
    """
    groups = [
        (recipe, mode)
        for recipe, mode in product(recipes, modes)
        if mode == "autocast" or same_kernels.get(recipe) not in recipes
    ]
    return [
        Task(case, recipe, mode, pass_name)
        for (recipe, mode), case in product(groups, cases)
        for pass_name in (case.passes if mode == "pre-quantized" else ("",))
    ]


CALLED: dict[Pass, str] = {"fprop": "", "dgrad": " (dgrad)", "wgrad": " (wgrad)"}


def forward_calls(cases: Iterable[Case]) -> list[Case]:
    """Every GEMM as the forward pass of a layer of its size, as Transformer Engine's benchmark script runs them.

    >>> [(each.op, each.tokens, each.inputs, each.outputs) for each in forward_calls([Case("MLP Up", 8, 2, 4)])]
    [('MLP Up', 8, 2, 4), ('MLP Up (dgrad)', 8, 4, 2), ('MLP Up (wgrad)', 2, 8, 4)]
    """
    return [
        replace(case, op=case.op + CALLED[name], tokens=m, inputs=k, outputs=n, passes=PASSES[:1])
        for case in cases
        for name in PASSES
        for m, k, n in [gemm_size(case.tokens, case.inputs, case.outputs, name)]
    ]


def op_of(name: str) -> str:
    """The op that a forward call belongs to.

    >>> op_of("MLP Up (dgrad)"), op_of("MLP Up")
    ('MLP Up', 'MLP Up')
    """
    return name.removesuffix(CALLED["dgrad"]).removesuffix(CALLED["wgrad"])


def bare_gemms(shapes: Iterable[tuple[int, int, int]]) -> list[Case]:
    """MxKxN triplets as cases: one GEMM each, the fprop of a linear with M tokens, K input and N output features.

    >>> bare_gemms([(256, 512, 128)])[0].op
    '256x512x128'
    """
    return [Case(f"{m}x{k}x{n}", m, k, n, passes=PASSES[:1]) for m, k, n in dict.fromkeys(shapes)]
