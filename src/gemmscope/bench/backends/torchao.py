"""torchao: a compiled `torch.nn.Linear` that torchao has converted, and its GEMMs alone.

Autocast is what its users train with: the layer converted to the recipe (`convert_to_float8_training`, or `quantize_` for newer
recipes), compiled, forward and backward. BF16 is the same without conversion. torchao keeps layers in BF16 that would not gain or
cannot run in FP8; this backend does the same, and reports it.

Pre-quantized casts the two operands of a pass as the recipe's own configuration says, with torchao's functions, and times
torchao's GEMM on them. That is compiled, too: with row scales and exact accumulation, torchao multiplies first and scales the
output afterwards, which only compiled code does in one kernel.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch._dynamo
import torchao
from torch.profiler import ProfilerActivity, profile
from torchao import float8
from torchao.float8.float8_ops import addmm_float8_unwrapped, preprocess_addmm
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole, choose_scaled_mm_config

from gemmscope.bench.backends.base import Backend, BackendOptions, Operands, OperandStore, training_step
from gemmscope.engine.timer import Prepared
from gemmscope.errors import in_a_line
from gemmscope.recipe.recipes import Recipe, recipe
from gemmscope.recipe.support import support
from gemmscope.workload.cases import Case, Task

COMPILED = {"dynamic": False, "fullgraph": True}
MOST_COMPILED = 10_000  # every case is compiled for its own sizes; dynamo would stop after eight
FLOAT8_MULTIPLE_OF = 16
GEMM_OPS = ("aten::mm", "aten::_scaled_mm", "aten::_scaled_mm_v2")
LAYER = "linear"  # its name in the model that is converted

# What torchao's configuration calls the cast of each operand of a pass.
CASTS = {
    "fprop": ("cast_config_input", "cast_config_weight"),
    "dgrad": ("cast_config_grad_output", "cast_config_weight_for_grad_input"),
    "wgrad": ("cast_config_grad_output_for_grad_weight", "cast_config_input_for_grad_weight"),
}
ROLES = {"X": GemmInputRole.INPUT, "W": GemmInputRole.WEIGHT, "dY": GemmInputRole.GRAD_OUTPUT}


class TorchaoBackend(Backend):
    """torchao as it is installed."""

    name = "torchao"

    def __init__(self, operands: OperandStore, options: BackendOptions) -> None:
        super().__init__(operands, options)
        torch._dynamo.config.recompile_limit = MOST_COMPILED
        torch._dynamo.config.accumulated_recompile_limit = MOST_COMPILED

    def why_not(self, recipe: Recipe) -> str:
        if self.name not in recipe.backends:
            return "torchao has no such recipe"
        if not torch.cuda.is_available():
            return "no GPU"
        known = support(recipe.name, torch.cuda.get_device_capability())
        if not known.runs or not recipe.quantizes:
            return "" if known.runs else known.note
        try:  # converting a small layer shows whether torchao's version and PyTorch's support the recipe
            _convert(_model(torch.empty(128, 128, dtype=torch.bfloat16)), recipe.settings[self.name])
        except Exception as error:
            return f"torchao {torchao.__version__} cannot convert a layer to it: {in_a_line(error)}"
        return ""

    def why_not_task(self, task: Task) -> str:
        chosen = recipe(task.recipe)
        if task.case.rows:
            return "torchao's grouped GEMMs are a prototype; the torch backend measures them"
        if not chosen.quantizes:
            return ""
        settings = chosen.settings[self.name]
        if self._options.cache_weights and task.mode == "autocast":
            return "torchao casts the weight in every pass, so there is nothing to cache"
        if task.mode == "pre-quantized" and not {"float8", "tensor"} & set(settings):
            return f"torchao has no tensors in {chosen.name} for training; the torch backend measures these GEMMs"
        return replace(chosen, multiple_of=settings.get("multiple_of", 1)).misaligned(task.case.sizes())

    def get_ready(self, tasks: Sequence[Task]) -> None:  # noqa: ARG002
        """Load the compiler and start its processes. Nothing is compiled yet: it times kernels, and the GPU is busy now."""
        importlib.import_module("torch._inductor.compile_fx")
        start = getattr(importlib.import_module("torch._inductor.async_compile"), "maybe_warm_pool", None)
        if start is not None:
            start()

    def prepare_set(self, task: Task, recipe: Recipe, operands: Operands) -> Prepared:
        note = self._left_in_bf16(task.case, recipe)
        settings = recipe.settings[self.name] if recipe.quantizes and not note else {}
        return replace((_autocast if task.mode == "autocast" else _gemm)(task, settings, operands), note=note)

    def _left_in_bf16(self, case: Case, recipe: Recipe) -> str:
        """Why torchao would not convert this layer; empty if it would."""
        name = recipe.settings.get(self.name, {}).get("float8")
        if name is None:
            return ""
        multiple, sizes = FLOAT8_MULTIPLE_OF, (case.inputs, case.outputs)
        if any(size % multiple for size in sizes):
            return f"torchao leaves this layer in BF16: {sizes[0]} x {sizes[1]} features are not multiples of {multiple}"
        linear = torch.nn.Linear(case.inputs, case.outputs, bias=False, device="meta")
        gains = not self._options.filter_layers or _filter(name)(linear, LAYER)
        return "" if gains else "torchao's filter leaves this layer in BF16 (too small to gain)"


def _filter(name: str) -> Callable[[torch.nn.Module, str], bool]:
    """torchao's own filter for layers that gain. Some recipes have none: then all layers are converted."""
    choose = getattr(float8, "_auto_filter_for_recipe", None)
    if choose is not None:
        with contextlib.suppress(NotImplementedError):
            layer_filter: Callable[[torch.nn.Module, str], bool] = choose(name, [])
            return layer_filter
    return lambda module, name: True  # noqa: ARG005


def _model(weight: torch.Tensor) -> torch.nn.Module:
    """A model with one linear without bias. Conversion replaces child modules, so the linear needs a parent."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight)
    return torch.nn.Sequential(OrderedDict({LAYER: linear}))


def _convert(model: torch.nn.Module, settings: Mapping[str, Any]) -> torch.nn.Module:
    """The model converted to the recipe of the settings; unchanged if they have none."""
    if "float8" in settings:
        return float8.convert_to_float8_training(model, config=float8.Float8LinearConfig.from_recipe_name(settings["float8"]))
    if "config" in settings:
        torchao.quantization.quantize_(model, _named(settings["config"])(), filter_fn=lambda module, name: name == LAYER)  # noqa: ARG005
    return model


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _autocast(task: Task, settings: Mapping[str, Any], operands: Operands) -> Prepared:
    """Forward and backward of the compiled layer. x requires a gradient, because otherwise there would be no dgrad."""
    model = _convert(_model(operands.weights[0]), settings)
    weight = model.get_submodule(LAYER).weight
    x = operands.x.detach().requires_grad_()
    step = training_step(torch.compile(model, **COMPILED), x, [weight], operands.grad, task.case.passes)
    error = operands.error(step())
    return Prepared(step, 1, error, order=_order(step, task.case))


def _order(step: Callable[[], Any], case: Case) -> tuple[str, ...]:
    """The order of the passes: fprop first; the compiler may put wgrad before dgrad, which their sizes show.

    Empty if it cannot be told: both have the same size, or another profiler is running.
    """
    try:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
            step()
    except RuntimeError:  # another profiler is running
        return ()
    calls = sorted((event for event in recorded.events() if event.name in GEMM_OPS), key=lambda event: event.time_range.start)
    sizes = [(*call.input_shapes[0], call.input_shapes[1][1]) for call in calls if not _inside_gemm(call)]
    wgrad = (case.outputs, case.tokens, case.inputs)
    order = ("fprop", *("wgrad" if size == wgrad else "dgrad" for size in sizes[1:]))
    return order if sorted(order) == sorted(case.passes) else ()


def _inside_gemm(call: Any) -> bool:
    """Whether another GEMM operator calls this one."""
    above = call.cpu_parent
    return above is not None and (above.name in GEMM_OPS or _inside_gemm(above))


def _gemm(task: Task, settings: Mapping[str, Any], operands: Operands) -> Prepared:
    """The GEMM of one pass, on operands that are cast as the recipe says."""
    make = _float8_gemm if "float8" in settings else _tensor_gemm if "tensor" in settings else None
    step = make(task.pass_name, settings, operands) if make else operands.plain_gemm(task.pass_name)
    return Prepared(step, 1, operands.error({task.pass_name: step()}))


def _float8_gemm(pass_name: str, settings: Mapping[str, Any], operands: Operands) -> Callable[[], torch.Tensor]:
    """Like `matmul_with_hp_or_float8_args`, but the operands are cast beforehand."""
    layer = _convert(_model(operands.weights[0]), settings).get_submodule(LAYER)
    casts = [getattr(layer.config, name) for name in CASTS[pass_name]]
    if casts[0].scaling_type is float8.ScalingType.DISABLED:
        return operands.plain_gemm(pass_name)
    cast = []
    for factor, how, second in zip(operands.factors(pass_name), casts, (False, True), strict=True):
        values = factor.values.contiguous()
        cast.append(
            hp_tensor_to_float8_dynamic(
                values.t() if second else values,
                how.target_dtype,
                layer.linear_mm_config,
                gemm_input_role=ROLES[factor.tensor],
                scaling_granularity=how.scaling_granularity,
                axiswise_dim=get_maybe_axiswise_dim(0 if second else -1, how.scaling_granularity),
                round_scales_to_power_of_2=layer.config.round_scales_to_power_of_2,
            )
        )
    a, b = cast
    chosen = choose_scaled_mm_config(a._gemm_input_role, a._linear_mm_config, b._gemm_input_role, b._linear_mm_config)
    a_data, a_scale, b_data, b_scale = preprocess_addmm(a, b)
    arguments = a_data, a_scale.reciprocal(), b_data, b_scale.reciprocal(), chosen.use_fast_accum
    call = torch.compile(_multiply, **COMPILED)
    return lambda: call(*arguments)


class _Inverted:
    """A scale whose inverse is already known: compiled layers compute it while they cast, so it is not part of the GEMM."""

    def __init__(self, inverse: torch.Tensor) -> None:
        self.inverse, self.shape = inverse, inverse.shape

    def reciprocal(self) -> torch.Tensor:
        return self.inverse


def _multiply(a: torch.Tensor, a_inverse: torch.Tensor, b: torch.Tensor, b_inverse: torch.Tensor, fast: bool) -> torch.Tensor:
    return addmm_float8_unwrapped(a, _Inverted(a_inverse), b, _Inverted(b_inverse), torch.bfloat16, use_fast_accum=fast)


def _tensor_gemm(pass_name: str, settings: Mapping[str, Any], operands: Operands) -> Callable[[], torch.Tensor]:
    """A GEMM of torchao's quantized tensors, which implement it. Their scales are swizzled when they are cast."""
    config, tensor = _named(settings["config"])(), _named(settings["tensor"])
    a, b = (
        tensor.to_mx(
            factor.values.contiguous(),
            torch.float8_e4m3fn,
            scaling_mode=config.scale_calculation_mode,
            kernel_preference=config.kernel_preference,
            is_swizzled_scales=True,
        )
        for factor in operands.factors(pass_name)
    )
    return lambda: torch.mm(a, b.t())
