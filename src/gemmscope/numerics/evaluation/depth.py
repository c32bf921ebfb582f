"""Error accumulated along depth: a real module with a recipe in all its linears, compared with the same module without.

The module runs forward and backward once as it is and once per recipe (`emulate.py`), on the same batch and with the same random
numbers (dropout). Its parameters, gradients, buffers and random state are left as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import nn

from gemmscope.errors import UserError, in_a_line, option
from gemmscope.numerics.evaluation.emulate import Emulation
from gemmscope.numerics.evaluation.requests import DepthModel, DepthReport, ErrorsRequest
from gemmscope.process import free_memory_bytes
from gemmscope.results.numerics import DepthError
from gemmscope.units import parameters as parameters_text
from gemmscope.workload.factory import Built, load_factory, loss_of, outputs_of
from gemmscope.workload.failures import TraceError
from gemmscope.workload.huggingface import build_huggingface, huggingface_model, training_inputs
from gemmscope.workload.module_parts import expert_weights, find_layers
from gemmscope.workload.ops import why_high_precision

MOST_CPU_FLOPS = 2e13  # about ten minutes on a few cores
RANDOM = ("random weights and random inputs",)
COPIES = 3  # of the weights in float32: the model's own, and what the largest linears need while they run


def depth_report(request: ErrorsRequest, model: DepthModel) -> DepthReport:
    """The errors along depth that a request asks for, or why there are none."""
    recipes = [name for name in request.recipes if name != "FP32"]
    try:
        if model.module is None:
            return compare_depth(_random_model(model, len(recipes), request.device), recipes, request.backend, RANDOM)
        built = load_factory(model.module, model.micro_batch, model.sequence, request.device)
        notes = ("the weights are those of the factory", *(() if built.own_inputs else ("the inputs are random token ids",)))
        return compare_depth(built, recipes, request.backend, notes)
    except Exception as error:  # of the user's code
        return DepthReport(failure=_why(error))


def _random_model(model: DepthModel, recipes: int, device: str) -> Built:
    """A model of a Hugging Face config in float32, with random weights and random inputs, if it is small enough."""
    config, batch = model.config or {}, model.micro_batch or 1
    empty, _ = build_huggingface(config, batch, model.sequence)
    _check_size(sum(parameter.numel() for parameter in empty.parameters()), batch * (model.sequence or 1), recipes, device)
    with torch.random.fork_rng(_devices(device)):
        torch.manual_seed(0)
        module = huggingface_model(config, device, torch.float32)
        return Built(module, (), training_inputs(module, batch, model.sequence, device, torch.float32))


def _check_size(parameters: int, tokens: int, recipes: int, device: str) -> None:
    """Raise a `UserError` if a model does not fit, or would take too long on a CPU."""
    name, needed = f"the model has {parameters_text(parameters)} parameters", COPIES * 4 * parameters
    fewer = f"reduce {option('layers')}, or pass a smaller config"
    if device != "cpu":
        free = torch.cuda.mem_get_info(device)[0]
    elif parameters * tokens * 6 * (recipes + 1) > MOST_CPU_FLOPS:
        raise UserError(f"{name}: running it with every recipe would take too long on a CPU", f"{fewer}, or run it on a GPU")
    else:
        free = free_memory_bytes()
    if needed > free:
        have = f"{needed / 2**30:.0f} GiB are needed to run it in float32, and {free / 2**30:.0f} GiB are free"
        raise UserError(f"{name}: {have}", fewer)


def _why(error: Exception) -> str:
    """Why the module cannot be compared, and what to do about it."""
    hint = ""
    if isinstance(error, (UserError, TraceError)):
        message, hint = error.message if isinstance(error, UserError) else str(error), error.hint
    elif isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        message, hint = "the module does not fit in the remaining memory", "use a smaller batch"
    else:
        message = f"running the module raised {in_a_line(error)}"
        if "incompatible with .grad()" in str(error) or "not compatible with .grad()" in str(error):
            hint = "checkpoint activations with use_reentrant=False"
    return f"{message}; {hint}" if hint else message


def compare_depth(built: Built, recipes: Sequence[str], backend: str = "", about: Sequence[str] = ()) -> DepthReport:
    """Run the module with every recipe in all linears of its layers, and compare every layer's output and gradient with those
    without. Routers and tiny linears stay as they are. Without a loss, gradients start from random values, the same for all."""
    layers = find_layers(built.module)
    if not layers:  # a plain MLP: its linears are its layers
        layers = [path for path, child in built.module.named_modules() if isinstance(child, nn.Linear)]
    emulations = {name: _emulation(built.module, name, backend, layers) for name in recipes}
    with _restored_buffers(built.module):
        reference = _run(built, layers)
        errors, notes = [], list(about)
        for name, emulation in emulations.items():
            with emulation:
                if emulation.delayed:  # the scales come from an earlier step: here from the same batch
                    emulation.observing = True
                    _run(built, layers)
                    emulation.observing = False
                    notes.append(f"{name}: its scales come from the same batch, so they are never stale")
                run = _run(built, layers)
            error = _error(name, run, reference)
            if all(map(isfinite, (*error.forward, *error.backward, error.loss or 0.0))):
                errors.append(error)
            else:
                notes.append(f"{name}: not finite")
    kept = {path: reason for emulation in emulations.values() for path, reason in emulation.kept.items()}
    if kept:
        notes.append(f"{len(kept)} of {len(kept) + len(next(iter(emulations.values())).linears)} linears are not emulated")
    if expert_weights(built.module):
        notes.append("the weights of experts that are not nn.Linear are not emulated")
    return DepthReport(tuple(errors), tuple(notes))


def _emulation(module: nn.Module, recipe: str, backend: str, layers: Sequence[str]) -> Emulation:
    def why_high(path: str) -> str:
        linear: Any = module.get_submodule(path)
        inside = any(path == layer or path.startswith(f"{layer}.") for layer in layers)
        return why_high_precision(path, linear.in_features, linear.out_features) or ("" if inside else "outside of the layers")

    emulation = Emulation(module, recipe, backend=backend, why_kept=why_high)
    if not emulation.linears:
        path, reason = next(iter(emulation.kept.items()))
        raise UserError(f"{type(module).__name__} has no linear to emulate in {recipe}: {path} stays in BF16 ({reason})")
    return emulation


@dataclass(frozen=True)
class _Run:
    """One forward and backward pass: the output of every layer, the gradient of its input, and the loss."""

    layers: tuple[str, ...]
    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor]
    loss: float | None


def _run(built: Built, layers: Sequence[str]) -> _Run:
    """Run the module once. Gradients go to the layers' inputs only: parameters keep theirs, and their hooks do not run."""
    paths: list[str] = []
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    forward = True

    def before(
        path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        values = [*args, *kwargs.values()]
        index = next((i for i, value in enumerate(values) if _is_float(value)), None)
        if index is None or not forward:  # during backward, a layer that is recomputed
            return None
        tensor = values[index] if values[index].requires_grad else values[index].detach().requires_grad_()
        paths.append(path)
        inputs.append(tensor)
        values[index] = tensor.clone()  # the layer may write to its input
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def after(_: nn.Module, __: Any, output: Any) -> None:
        tensor = next((value for value in (output if isinstance(output, (tuple, list)) else [output]) if _is_float(value)), None)
        if tensor is not None and forward:
            outputs.append(_kept(tensor))

    device = next((parameter.device for parameter in built.module.parameters()), torch.device("cpu"))
    with ExitStack() as hooks, torch.enable_grad(), torch.random.fork_rng(_devices(device)):
        for path in layers:
            layer = built.module.get_submodule(path)
            hooks.callback(layer.register_forward_pre_hook(partial(before, path), with_kwargs=True).remove)
            hooks.callback(layer.register_forward_hook(after).remove)
        output = built.module(*built.args, **built.kwargs)
        loss = loss_of(built, output)
        forward = False
        if not inputs or len(outputs) != len(inputs):
            name = type(built.module).__name__
            raise UserError(f"the layers of {name} do not pass on a tensor, so their errors cannot be compared")
        targets = [loss] if loss is not None else outputs_of(output)
        starts = None if loss is not None else [_start(target) for target in targets]
        gradients = torch.autograd.grad(targets, inputs, starts, allow_unused=True)
    pairs = zip(gradients, inputs, strict=True)
    kept = [_kept(torch.zeros_like(tensor) if gradient is None else gradient) for gradient, tensor in pairs]
    return _Run(tuple(paths), outputs, kept, None if loss is None else float(loss.detach()))


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in CPU memory, because GPU memory may be full."""
    return tensor.detach().to("cpu", copy=True)


def _start(target: torch.Tensor) -> torch.Tensor:
    """The gradient to start from if there is no loss: random values, always the same."""
    values = torch.randn(target.shape, generator=torch.Generator().manual_seed(0))
    return values.to(device=target.device, dtype=target.dtype)


def _devices(device: torch.device | str) -> list[torch.device]:
    """The devices whose random state `fork_rng` must save besides the CPU's."""
    return [torch.device(device)] if torch.device(device).type == "cuda" else []


@contextmanager
def _restored_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the buffers (running statistics, caches) that a forward pass writes to."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _error(recipe: str, run: _Run, reference: _Run) -> DepthError:
    if run.layers != reference.layers:
        raise UserError(f"the module ran different layers in {recipe} than without it, so the errors cannot be compared")
    loss = None if run.loss is None or reference.loss is None else run.loss - reference.loss
    pairs = ((run.outputs, reference.outputs), (run.gradients, reference.gradients))
    forward, backward = (tuple(map(_relative, *pair)) for pair in pairs)
    return DepthError(recipe=recipe, forward=forward, backward=backward, loss=loss)


def _relative(tensor: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference over the norm; 0 where both are zero."""
    norm = exact.float().norm()
    difference = (tensor.float() - exact.float()).norm()
    return float(difference / norm) if norm > 0 else float(difference > 0)
