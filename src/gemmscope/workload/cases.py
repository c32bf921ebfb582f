"""What is to be measured, as plain data that crosses the process boundary as JSON.

A *case* is one op of the workload with its size. A *task* is a case in one recipe and one mode. The tasks of one recipe and mode
form a *group*: they run one after another in a burst, as they do in training. The chip then runs at the clock that their power
allows it. That differs from group to group by several per cent, so groups must not share a burst: on an H200, FP8Block's
speedup came out 3% lower when it shared one with its bare products, which draw more power than it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gemmscope.workload.ops import PASSES, GroupedLinear, Linear, Pass

Mode = Literal["autocast", "pre-quantized"]
MODES: tuple[Mode, ...] = ("autocast", "pre-quantized")

LEAST_BYTES_IN_FLIGHT_OVER_L2 = 3  # or the cache would be measured


@dataclass(frozen=True)
class Case:
    """A linear (or the experts of one layer: `rows` tokens each) of one size; `count` of them run per micro-batch.

    `passes` are those that are run: all three, or fprop alone where a bare product was asked for (`--shapes`).
    """

    op: str
    tokens: int
    inputs: int
    outputs: int
    count: int = 1
    rows: tuple[int, ...] = ()
    passes: tuple[Pass, ...] = PASSES

    @property
    def flops(self) -> int:
        """Of one product; the three passes are alike."""
        return 2 * self.tokens * self.inputs * self.outputs

    def sizes(self) -> dict[str, int]:
        """Tokens and features, by the names that messages use."""
        rows = {f"tokens of expert {index}": row for index, row in enumerate(self.rows)} or {"tokens": self.tokens}
        return rows | {"input features": self.inputs, "output features": self.outputs}

    @property
    def bytes_touched(self) -> int:
        """Of X, W and Y in bf16: what one set of buffers takes."""
        return 2 * (self.tokens * self.inputs + self.tokens * self.outputs + self.weights)

    @property
    def least_bytes(self) -> int:
        """What forward and backward cannot do without, in any precision: X, W and Y in bf16, and their gradients."""
        return 2 * self.bytes_touched

    @property
    def weights(self) -> int:
        """Elements of the weight, all experts together."""
        return max(len(self.rows), 1) * self.inputs * self.outputs


@dataclass(frozen=True)
class Task:
    """One thing to time. Autocast: forward and backward of the linear. Pre-quantized: one pass's product alone."""

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
        case = {**data["case"], "rows": tuple(data["case"]["rows"]), "passes": tuple(data["case"]["passes"])}
        return Task(Case(**case), data["recipe"], data["mode"], data["pass_name"])


def cases_of(linears: Iterable[Linear]) -> list[Case]:
    """The distinct linears of a workload; equal ones are counted together."""
    counts: dict[Case, int] = {}
    for linear in linears:
        rows = linear.rows if isinstance(linear, GroupedLinear) else ()
        case = Case(linear.name, linear.tokens, linear.inputs, linear.outputs, rows=rows)
        counts[case] = counts.get(case, 0) + linear.count
    return [Case(case.op, case.tokens, case.inputs, case.outputs, count, case.rows) for case, count in counts.items()]


def tasks_of(cases: Sequence[Case], recipes: Sequence[str], modes: Sequence[Mode], same_kernels: dict[str, str]) -> list[Task]:
    """Every combination that is a measurement of its own.

    A recipe whose products are those of another one (`same_kernels`) is not measured again in pre-quantized mode.
    """
    tasks = []
    for recipe in recipes:
        for mode in modes:
            if mode == "pre-quantized" and same_kernels.get(recipe) in recipes:
                continue
            tasks += [
                Task(case, recipe, mode, pass_name)
                for case in cases
                for pass_name in (case.passes if mode == "pre-quantized" else ("",))
            ]
    return tasks


def bare_products(shapes: Iterable[tuple[int, int, int]]) -> list[Case]:
    """MxKxN triplets as cases: one product each, fprop of a linear with M tokens, K input and N output features.

    >>> bare_products([(256, 512, 128)])[0].op
    '256x512x128'
    """
    return [Case(f"{m}x{k}x{n}", m, k, n, passes=PASSES[:1]) for m, k, n in dict.fromkeys(shapes)]
