"""The CPU: no speed of interest, but the whole path from task to table runs and is tested on any machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gemmscope.measure.backends.base import Prepared
from gemmscope.measure.backends.reference import OperandStore
from gemmscope.measure.task import Task
from gemmscope.recipe.recipes import Recipe


class CpuBackend:
    """BF16 with torch's own products."""

    name = "cpu"

    def __init__(self) -> None:
        self._operands = OperandStore("cpu")

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}

    def why_not(self, recipe: Recipe) -> str:
        return "" if self.name in recipe.backends else "the CPU runs BF16 only"

    def prepare(self, task: Task, recipe: Recipe, copies: int) -> Prepared:  # noqa: ARG002
        if task.case.rows:
            raise NotImplementedError("grouped products are not measured on the CPU")
        operands = self._operands.get(task.case)
        x, weight, grad = operands.x, operands.weights[0], operands.grad
        passes: dict[str, Callable[[], Any]] = {
            "fprop": lambda: x @ weight.t(),
            "dgrad": lambda: grad @ weight,
            "wgrad": lambda: grad.t() @ x,
        }
        wanted = {task.pass_name: passes[task.pass_name]} if task.pass_name else passes
        error = operands.error({name: product() for name, product in wanted.items()})
        if task.mode == "pre-quantized":
            return Prepared(lambda: (passes[task.pass_name](), None)[1], 1, error)
        leaf_x, leaf_weight = x.detach().requires_grad_(), weight.detach().requires_grad_()

        def step() -> None:
            torch.nn.functional.linear(leaf_x, leaf_weight).backward(grad)
            leaf_x.grad = leaf_weight.grad = None

        return Prepared(step, 1, error)
