"""The CPU. Its speed is not of interest, but it runs the whole path from task to table, for tests on any machine."""

import torch

from gemmscope.bench.backends.base import Backend, Operands, dtype_of, training_step
from gemmscope.engine.timer import Prepared
from gemmscope.recipe.recipes import Recipe
from gemmscope.workload.cases import Task


class CpuBackend(Backend):
    """What is not quantized, with torch's own GEMMs."""

    name = "cpu"

    def why_not(self, recipe: Recipe) -> str:
        return "" if self.name in recipe.backends else "the CPU runs only BF16 and FP32"

    def why_not_task(self, task: Task) -> str:
        if self._options.cache_weights:
            return "nothing is quantized on the CPU, so there are no weights to cache"
        return "grouped GEMMs are not measured on the CPU" if task.case.rows else ""

    def prepare_set(self, task: Task, recipe: Recipe, operands: Operands) -> Prepared:
        precision = dtype_of(recipe.operands["fprop"][0])
        if task.mode == "pre-quantized":
            gemm = operands.plain_gemm(task.pass_name, precision)
            return Prepared(gemm, 1, operands.error({task.pass_name: gemm()}))
        x, weight = (tensor.to(precision).detach().requires_grad_() for tensor in (operands.x, operands.weights[0]))
        grad = operands.grad.to(precision)
        step = training_step(lambda x: torch.nn.functional.linear(x, weight), x, [weight], grad, task.case.passes)
        return Prepared(step, 1, operands.error(step()))
