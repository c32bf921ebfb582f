"""The CPU. Its speed is not of interest, but it runs the whole path from task to table, for tests on any machine."""

import torch

from gemmscope.bench.backends.base import Backend
from gemmscope.engine.timer import Prepared
from gemmscope.recipe.recipes import Recipe
from gemmscope.workload.cases import Task


class CpuBackend(Backend):
    """BF16 and FP32 with torch's own GEMMs."""

    name = "cpu"

    def why_not(self, recipe: Recipe) -> str:
        return "" if self.name in recipe.backends else "the CPU runs only BF16 and FP32"

    def why_not_task(self, task: Task) -> str:
        if self._options.cache_weights:
            return "nothing is quantized on the CPU, so there are no weights to cache"
        return "grouped GEMMs are not measured on the CPU" if task.case.rows else ""

    def prepare(self, task: Task, recipe: Recipe, copies: int) -> Prepared:  # noqa: ARG002
        operands = self._operands.get(task.case)
        precision = torch.float32 if recipe.name == "FP32" else torch.bfloat16
        passes = (task.pass_name,) if task.pass_name else task.case.passes
        gemms = {name: operands.plain_gemm(name, precision) for name in passes}
        error = operands.error({name: multiply() for name, multiply in gemms.items()})
        if task.mode == "pre-quantized":
            return Prepared(gemms[task.pass_name], 1, error)
        x, weight, grad = (tensor.to(precision).detach() for tensor in (operands.x, operands.weights[0], operands.grad))
        x.requires_grad_()
        weight.requires_grad_()

        def step() -> None:
            y = torch.nn.functional.linear(x, weight)
            if "dgrad" in task.case.passes:
                y.backward(grad)
                x.grad = weight.grad = None

        return Prepared(step, 1, error)
