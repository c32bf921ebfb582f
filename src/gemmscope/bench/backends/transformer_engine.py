"""Transformer Engine: all recipes run through the same code.

Autocast runs `te.Linear` (or `te.GroupedLinear`) forward and backward as training does: X, W and dY are quantized once each.
Pre-quantized quantizes X, W and dY with the recipe's own quantizers and times `general_gemm` on them, with the layouts that the
modules use (fprop TN, dgrad NN, wgrad NT) and the accumulation that the recipe sets for each pass. MXFP8 and NVFP4 differ from
FP8 only in the recipe object.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import transformer_engine
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipes
from transformer_engine.pytorch.cpp_extensions import general_gemm, general_grouped_gemm
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, RecipeState

from gemmscope.bench.backends.base import Backend, Operands, training_step
from gemmscope.engine.timer import Prepared
from gemmscope.recipe.recipes import Recipe, recipe
from gemmscope.workload.cases import Case, Task

LAYOUTS = {"fprop": ("W", "X", "TN"), "dgrad": ("W", "dY", "NN"), "wgrad": ("X", "dY", "NT")}
SPLIT_ACCUMULATION = {"fprop": False, "dgrad": True, "wgrad": True}  # where the recipe does not set it
COMPILING_THREADS = 12


class TransformerEngineBackend(Backend):
    """Transformer Engine as it is installed."""

    name = "transformer_engine"

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

    def why_not_task(self, task: Task) -> str:
        return recipe(task.recipe).misaligned(task.case.sizes())

    def get_ready(self, tasks: Sequence[Task]) -> None:
        """Quantize every tensor once, in parallel: the first cast of each shape is compiled, which takes half a second."""
        jobs = {
            (task.case, name, which): None
            for task in tasks
            for name in (recipe(task.recipe).same_kernels_as or task.recipe,)
            for which in ("X", "W", "dY")
            if recipe(name).quantizes and not task.case.rows
        }

        def quantize(job: tuple[Case, str, str]) -> None:
            case, name, which = job
            with contextlib.suppress(Exception):  # reported when the task is prepared
                self._quantizers(self._recipe(recipe(name)))[which](self._operands.get(case).tensors()[which])

        with ThreadPoolExecutor(COMPILING_THREADS) as threads:
            list(threads.map(quantize, jobs))
        torch.cuda.synchronize()

    def prepare_set(self, task: Task, recipe: Recipe, operands: Operands) -> Prepared:
        make = self._autocast if task.mode == "autocast" else self._grouped_gemm if task.case.rows else self._gemm
        return make(task, recipe, operands)

    def _autocast(self, task: Task, recipe: Recipe, operands: Operands) -> Prepared:
        """Forward and backward of the module. x requires a gradient; else dgrad and the weight's second copy would vanish.

        In Transformer Engine's own script they do.
        """
        kept = _start_afresh()
        x = operands.x.detach().requires_grad_(not self._options.as_te_benchmark)
        call, parameters = _module(task.case, operands)
        precision = self._recipe(recipe)
        first, later = ({"is_first_microbatch": value} if self._options.cache_weights else {} for value in (True, False))

        def forward(x: torch.Tensor, which: dict[str, Any] = later, _kept: Any = kept) -> torch.Tensor:
            with te.autocast(enabled=True, recipe=precision) if precision is not None else contextlib.nullcontext():
                return call(x, **which)

        make = partial(training_step, x=x, weights=parameters, grad=operands.grad, passes=task.case.passes)
        make(partial(forward, which=first))()  # delayed scaling has its scales from the second step on
        step = make(forward)
        return Prepared(step, 1, operands.error(step()))

    def _gemm(self, task: Task, recipe: Recipe, operands: Operands) -> Prepared:
        """The GEMM of one pass on operands that the recipe's quantizers made."""
        precision = self._recipe(recipe)
        quantizers = self._quantizers(precision)
        left, right, _ = LAYOUTS[task.pass_name]
        quantized = {name: quantizers[name](operands.tensors()[name]) for name in (left, right)}
        settings = _gemm_settings(task.pass_name, precision)

        def gemm() -> Any:
            return general_gemm(quantized[left], quantized[right], out_dtype=torch.bfloat16, **settings)

        return Prepared(gemm, 1, operands.error({task.pass_name: gemm()[0]}))

    def _grouped_gemm(self, task: Task, recipe: Recipe, operands: Operands) -> Prepared:
        """The same for experts: one GEMM for each expert that has tokens, as `te.GroupedLinear` runs them."""
        precision = self._recipe(recipe)
        rows = task.case.rows
        busy = [index for index, count in enumerate(rows) if count]
        pieces = {
            "X": [operands.x.split(rows)[index] for index in busy],
            "W": [operands.weights[index] for index in busy],
            "dY": [operands.grad.split(rows)[index] for index in busy],
        }
        quantized = {
            name: [self._quantizers(precision)[name](piece.contiguous()) for piece in tensors] for name, tensors in pieces.items()
        }
        left, right, _ = LAYOUTS[task.pass_name]
        make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        tokens, inputs, outputs = task.case.tokens, task.case.inputs, task.case.outputs
        sizes = {"fprop": [(tokens, outputs)], "dgrad": [(tokens, inputs)], "wgrad": [(outputs, inputs)] * len(busy)}
        out = [torch.empty(*size, **make) for size in sizes[task.pass_name]]
        settings = _gemm_settings(task.pass_name, precision) | {
            "single_output": task.pass_name != "wgrad",
            "m_splits": [rows[index] for index in busy],
        }

        def gemm() -> None:
            general_grouped_gemm(quantized[left], quantized[right], out, [None] * len(busy), torch.bfloat16, **settings)

        gemm()
        return Prepared(gemm, 1, operands.error({task.pass_name: out[0]}) if busy[0] == 0 else float("nan"))

    def _quantizers(self, precision: Any) -> dict[str, Callable[[torch.Tensor], Any]]:
        """The quantizers of X, W and dY, for both directions, with the layout that the GEMMs need."""
        if precision is None:
            return dict.fromkeys(("X", "W", "dY"), lambda tensor: tensor)
        for_x, for_w, _ = RecipeState.create(precision, mode="forward", num_quantizers=3).make_quantizers()
        for_grad, _ = RecipeState.create(precision, mode="backward", num_quantizers=2).make_quantizers()
        for quantizer in (for_x, for_w, for_grad):
            quantizer.set_usage(rowwise=True, columnwise=True)
            quantizer.optimize_for_gemm = True  # otherwise MXFP8 and NVFP4 rearrange their scales inside the timed region
        return {"X": for_x, "W": for_w, "dY": for_grad}

    def _recipe(self, recipe: Recipe) -> Any:
        return getattr(te_recipes, recipe.settings[self.name]["class"])() if recipe.quantizes else None


def _gemm_settings(pass_name: str, precision: Any) -> dict[str, Any]:
    """Layout and accumulation of a pass, as Transformer Engine's modules choose them."""
    of_recipe = getattr(precision, f"fp8_gemm_{pass_name}", None)
    split = of_recipe.use_split_accumulator if of_recipe is not None else SPLIT_ACCUMULATION[pass_name]
    return {"layout": LAYOUTS[pass_name][2], "grad": pass_name != "fprop", "use_split_accumulator": split}


def _start_afresh() -> list[Any]:
    """Clear Transformer Engine's list of delayed-scaling modules; otherwise every step would update the state of all of them.

    Returns the cleared state: steps captured earlier still write to it, so it must be kept alive.
    """
    kept = [dict(value) if isinstance(value, dict) else value for value in vars(FP8GlobalStateManager).values()]
    FP8GlobalStateManager.reset()
    return kept


def _module(case: Case, operands: Operands) -> tuple[Callable[..., torch.Tensor], list[Any]]:
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
    return (lambda x, **which: grouped(x, list(case.rows), **which)), list(grouped.parameters())
