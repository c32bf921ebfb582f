"""Transformer Engine: every recipe through the same lines.

Autocast runs `te.Linear` (or `te.GroupedLinear`) forward and backward as training does: X, W and dY are quantized once each.
Pre-quantized asks the recipe's own quantizers for X, W and dY and times `general_gemm` on them, with the layouts that the
modules use: fprop TN, dgrad NN, wgrad NT. MXFP8 and NVFP4 differ from FP8 in the recipe object and nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformer_engine
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipes
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, RecipeState

from gemmscope.measure.backends.base import Prepared
from gemmscope.measure.backends.reference import Operands, OperandStore
from gemmscope.measure.task import Case, Task
from gemmscope.recipe.recipes import Recipe

LAYOUTS = {"fprop": ("W", "X", "TN"), "dgrad": ("W", "dY", "NN"), "wgrad": ("X", "dY", "NT")}


class TransformerEngineBackend:
    """Transformer Engine as it is installed."""

    name = "transformer_engine"

    def __init__(self) -> None:
        self._operands = OperandStore("cuda")

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__, "transformer_engine": transformer_engine.__version__}

    def why_not(self, recipe: Recipe) -> str:
        if self.name not in recipe.backends:
            return "Transformer Engine has no such recipe"
        if not recipe.quantizes:
            return ""
        facts = recipe.settings[self.name]
        if not hasattr(te_recipes, facts["class"]):
            return f"Transformer Engine {transformer_engine.__version__} has no {facts['class']}"
        available, reason = getattr(te, facts["available"])(return_reason=True)
        return "" if available else reason

    def prepare(self, task: Task, recipe: Recipe, copies: int) -> Prepared:
        made = self._autocast if task.mode == "autocast" else self._product
        sets = [made(task, recipe, self._operands.get(task.case, copy)) for copy in range(copies)]
        steps, errors = zip(*sets, strict=True)

        def run() -> None:
            for step in steps:
                step()

        return Prepared(run, copies, max(errors))

    def _autocast(self, task: Task, recipe: Recipe, operands: Operands) -> tuple[Callable[[], None], float]:
        """Forward and backward of the module. x requires grad, or dgrad and the weight's second copy would vanish."""
        kept = _start_afresh()
        x, grad = operands.x.detach().requires_grad_(), operands.grad
        call, parameters = _module(task.case, operands)
        precision = self._recipe(recipe)

        def forward() -> torch.Tensor:
            with te.autocast(enabled=True, recipe=precision) if precision is not None else contextlib.nullcontext():
                return call(x)

        def forget() -> None:
            x.grad = None
            for parameter in parameters:
                parameter.grad = None

        def step(_kept: Any = kept) -> None:
            forward().backward(grad)
            forget()

        step()  # delayed scaling knows its scales from the second step on
        y = forward()
        y.backward(grad)
        rows = operands.rows
        error = operands.error({"fprop": y.detach()[:rows], "dgrad": x.grad[:rows], "wgrad": parameters[0].grad})
        forget()
        return step, error

    def _product(self, task: Task, recipe: Recipe, operands: Operands) -> tuple[Callable[[], None], float]:
        """One pass's product on operands that the recipe's quantizers made."""
        if task.case.rows:
            raise NotImplementedError("grouped products are measured in autocast mode only")
        quantized = self._quantize(recipe, {"X": operands.x, "W": operands.weights[0], "dY": operands.grad})
        left, right, layout = LAYOUTS[task.pass_name]
        backward = {} if task.pass_name == "fprop" else {"grad": True}

        def product() -> Any:
            return general_gemm(quantized[left], quantized[right], out_dtype=torch.bfloat16, layout=layout, **backward)

        error = operands.error({task.pass_name: product()[0]})
        return lambda: (product(), None)[1], error

    def _quantize(self, recipe: Recipe, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """X, W and dY in the recipe's format, for both directions, laid out as the products want them."""
        precision = self._recipe(recipe)
        if precision is None:
            return dict(tensors)
        for_x, for_w, _ = RecipeState.create(precision, mode="forward", num_quantizers=3).make_quantizers()
        for_grad, _ = RecipeState.create(precision, mode="backward", num_quantizers=2).make_quantizers()
        quantized = {}
        for name, quantizer in (("X", for_x), ("W", for_w), ("dY", for_grad)):
            quantizer.set_usage(rowwise=True, columnwise=True)
            quantizer.optimize_for_gemm = True  # or MXFP8 and NVFP4 would rearrange their scales inside the timed region
            quantized[name] = quantizer(tensors[name])
        return quantized

    def _recipe(self, recipe: Recipe) -> Any:
        return getattr(te_recipes, recipe.settings[self.name]["class"])() if recipe.quantizes else None


def _start_afresh() -> list[Any]:
    """Clear Transformer Engine's list of delayed-scaling modules, or the bookkeeping of all would run in every one's step.

    Returns what was cleared: steps captured earlier still write there, so it has to stay alive.
    """
    kept = [dict(value) if isinstance(value, dict) else value for value in vars(FP8GlobalStateManager).values()]
    FP8GlobalStateManager.reset()
    return kept


def _module(case: Case, operands: Operands) -> tuple[Callable[[torch.Tensor], torch.Tensor], list[Any]]:
    """The Transformer Engine module on these weights, as a function of x, and its parameters."""
    make = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
    if not case.rows:
        linear = te.Linear(case.inputs, case.outputs, **make)
        linear.weight = torch.nn.Parameter(operands.weights[0])
        return linear, [linear.weight]
    grouped = te.GroupedLinear(len(case.rows), case.inputs, case.outputs, **make)
    with torch.no_grad():
        for parameter, values in zip(grouped.parameters(), operands.weights, strict=True):
            parameter.copy_(values)
    return (lambda x: grouped(x, list(case.rows))), list(grouped.parameters())
