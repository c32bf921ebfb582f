"""The interface of a backend, and what all of them share: the operands of a case, and the check of results computed from them.

All recipes and modes of a case share one set of random normal data: the same values for every precision, made once. Every GEMM is
checked against float64 on a slice before it is timed.

A linear Y = X·Wᵀ has three GEMMs. Each is written here as A·Bᵀ, with both operands as [rows, contraction]: the last dimension is
the one that is summed over, and along which values share a scale.

    fprop   Y  = X · Wᵀ      A = X   [tokens, in]    B = W   [out, in]
    dgrad   dX = dY · W      A = dY  [tokens, out]   B = Wᵀ  [in, out]
    wgrad   dW = dYᵀ · X     A = dYᵀ [out, tokens]   B = Xᵀ  [in, tokens]
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch

from gemmscope.engine.timer import Prepared
from gemmscope.recipe.precisions import number_format as format_facts
from gemmscope.recipe.recipes import Recipe
from gemmscope.workload.cases import Case, Task

SLICE = 64  # rows of the output that are checked

# Rounding gives about 0.002 in bf16, 0.04 in E4M3, 0.06 in E5M2, 0.2 in E2M1. A larger error means that the result is wrong.
LARGEST_ERROR = 0.3

# pass -> (tensor, whether it is transposed) of each operand
FACTORS = {
    "fprop": (("X", False), ("W", False)),
    "dgrad": (("dY", False), ("W", True)),
    "wgrad": (("dY", True), ("X", True)),
}


def dtype_of(number_format: str) -> torch.dtype:
    """The dtype of values in this format."""
    return cast("torch.dtype", getattr(torch, format_facts(number_format)["torch"]))


@dataclass(frozen=True)
class Factor:
    """One operand of a GEMM: which tensor it is, and a view of its values as [rows, contraction]."""

    tensor: str
    values: torch.Tensor


class Operands:
    """X [tokens, in], a weight [out, in] (one per expert), and dY [tokens, out], in bf16."""

    def __init__(self, case: Case, device: str) -> None:
        make: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.rows = case.rows[0] if case.rows else case.tokens  # of the first weight
        self.x = torch.randn(case.tokens, case.inputs, **make)
        self.grad = torch.randn(case.tokens, case.outputs, **make)
        scale = case.inputs**-0.5
        self.weights = [torch.randn(case.outputs, case.inputs, **make) * scale for _ in range(max(len(case.rows), 1))]

    def tensors(self, expert: int = 0) -> dict[str, torch.Tensor]:
        """The operands by the names that recipes use; for experts, all tokens and the weight of one expert."""
        return {"X": self.x, "W": self.weights[expert], "dY": self.grad}

    def factors(self, pass_name: str, expert: int = 0) -> list[Factor]:
        """A and B of a pass."""
        tensors = self.tensors(expert)
        return [Factor(name, tensors[name].t() if transposed else tensors[name]) for name, transposed in FACTORS[pass_name]]

    def plain_gemm(self, pass_name: str, precision: torch.dtype = torch.bfloat16) -> Callable[[], torch.Tensor]:
        """The GEMM of a pass, unquantized."""
        left, right = (factor.values.to(precision) for factor in self.factors(pass_name))
        return lambda: torch.mm(left, right.t())

    @cached_property
    def references(self) -> dict[str, torch.Tensor]:
        """The first rows of each result in float64."""
        x, grad, weight = self.x[: self.rows], self.grad[: self.rows], self.weights[0].double()
        return {
            "fprop": x[:SLICE].double() @ weight.t(),
            "dgrad": grad[:SLICE].double() @ weight,
            "wgrad": grad[:, :SLICE].double().t() @ x.double(),
        }

    def error(self, results: Mapping[str, torch.Tensor]) -> float:
        """The largest ‖result − reference‖ / ‖reference‖ of the given passes, on the first rows of each."""
        worst = 0.0
        with torch.no_grad():
            for name, result in results.items():
                expected = self.references[name]
                error = float((result[: len(expected)].double() - expected).norm() / expected.norm())
                if not error < LARGEST_ERROR:  # also true for NaN
                    raise ArithmeticError(f"the result of {name} is wrong: relative error {error:.3g} against float64")
                worst = max(worst, error)
        return worst


class OperandStore:
    """Makes the operands of a case when they are first needed, and keeps them."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._operands: dict[tuple[Case, int], Operands] = {}
        self._lock = threading.Lock()  # used from several threads while kernels are compiled

    def get(self, case: Case, copy: int = 0) -> Operands:
        """Set number `copy` of the case's operands."""
        with self._lock:
            if (case, copy) not in self._operands:
                self._operands[(case, copy)] = Operands(case, self._device)
            return self._operands[(case, copy)]


@dataclass(frozen=True)
class BackendOptions:
    """Options of a run that all backends have."""

    cache_weights: bool = False  # weights are quantized once per step, and the timed micro-batch is not the first
    filter_layers: bool = True  # keep layers in BF16 that the framework's own filter excludes
    as_te_benchmark: bool = False  # linears run forward alone, on inputs that need no gradient


def training_step(
    call: Callable[..., torch.Tensor], x: torch.Tensor, weights: Sequence[torch.Tensor], grad: torch.Tensor, passes: Sequence[str]
) -> Callable[[], dict[str, torch.Tensor]]:
    """Forward and backward of a linear, which returns the results of its passes and leaves no gradients."""

    def step() -> dict[str, Any]:
        y = call(x)
        if "dgrad" in passes:
            y.backward(grad)
        results = {"fprop": y.detach(), "dgrad": x.grad, "wgrad": weights[0].grad}
        for tensor in (x, *weights):
            tensor.grad = None
        return {name: results[name] for name in passes}

    return step


class Backend:
    """Prepares tasks; the worker times them."""

    name: str

    def __init__(self, operands: OperandStore, options: BackendOptions) -> None:
        self._operands, self._options = operands, options

    def why_not(self, recipe: Recipe) -> str:
        """Why this GPU or these versions cannot run the recipe; empty if they can."""
        raise NotImplementedError

    def why_not_task(self, task: Task) -> str:
        """Why it cannot measure this task in a recipe that it runs; empty if it can."""
        raise NotImplementedError

    def get_ready(self, tasks: Sequence[Task]) -> None:
        """Work that is done for all tasks at once before they are prepared one by one, such as compiling kernels in parallel."""

    def prepare(self, task: Task, recipe: Recipe, copies: int) -> Prepared:
        """What will be timed: the task on each of so many sets of buffers in turn."""
        sets = [self.prepare_set(task, recipe, self._operands.get(task.case, copy)) for copy in range(copies)]

        def run() -> None:
            for one in sets:
                one.run()

        return replace(sets[0], run=run, copies=copies, error=max(one.error for one in sets))

    def prepare_set(self, task: Task, recipe: Recipe, operands: Operands) -> Prepared:
        """Allocate, quantize where the mode requires it, and check the result against float64, on one set of buffers."""
        raise NotImplementedError
