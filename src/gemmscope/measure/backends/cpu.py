"""The CPU. Its speed is not of interest, but it runs the whole path from task to table, for tests on any machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gemmscope.measure.backends.base import Options, Prepared
from gemmscope.measure.backends.reference import OperandStore
from gemmscope.recipe.recipes import Recipe
from gemmscope.workload.cases import Task


class CpuBackend:
    """BF16 and FP32 with torch's own GEMMs."""

    name = "cpu"

    def __init__(self, operands: OperandStore, options: Options) -> None:
        self._operands, self._options = operands, options

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}

    def why_not(self, recipe: Recipe) -> str:
        return "" if self.name in recipe.backends else "the CPU runs only BF16 and FP32"

    def why_not_task(self, task: Task) -> str:
        if self._options.cache_weights:
            return "nothing is quantized on the CPU, so there are no weights to cache"
        return "grouped GEMMs are not measured on the CPU" if task.case.rows else ""

    def get_ready(self, tasks: Sequence[Task]) -> None:
        """Nothing to compile."""

    def prepare(self, task: Task, recipe: Recipe, copies: int) -> Prepared:  # noqa: ARG002
        operands = self._operands.get(task.case)
        precision = torch.float32 if recipe.name == "FP32" else torch.bfloat16
        x, weight, grad = (tensor.to(precision) for tensor in (operands.x, operands.weights[0], operands.grad))
        passes: dict[str, Callable[[], Any]] = {
            "fprop": lambda: x @ weight.t(),
            "dgrad": lambda: grad @ weight,
            "wgrad": lambda: grad.t() @ x,
        }
        wanted = {name: passes[name] for name in ((task.pass_name,) if task.pass_name else task.case.passes)}
        error = operands.error({name: gemm() for name, gemm in wanted.items()})
        if task.mode == "pre-quantized":
            return Prepared(lambda: (passes[task.pass_name](), None)[1], 1, error)
        leaf_x, leaf_weight = x.detach().requires_grad_(), weight.detach().requires_grad_()

        def step() -> None:
            torch.nn.functional.linear(leaf_x, leaf_weight).backward(grad)
            leaf_x.grad = leaf_weight.grad = None

        def forward() -> None:
            torch.nn.functional.linear(leaf_x, leaf_weight)

        return Prepared(step if "dgrad" in task.case.passes else forward, 1, error)
