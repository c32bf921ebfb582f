"""Records linears that no hook reaches: inside `torch.compile`, and experts whose weights are one 3-D parameter.

A hook inside a compiled module would make it compile again, and may change its results. So the compiled call stays as it is. Its
inputs and the gradients of its outputs are taken from outside, and the original module runs once more on them, eagerly, during
the backward pass: on aliases of its parameters and copies of its buffers, with the random state of the first run, which is
restored after it. Gradients are those of the linears' outputs alone, so that nothing accumulates. Communication between ranks is
refused, because the other ranks do not take part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from gemmscope.numerics.in_training.capture import (
    NORM_MLP,
    LinearHooks,
    LinearPlace,
    StepCapture,
    captures_graph,
    kind_of,
    local,
    normalized,
    running_passes,
    unchanged,
)
from gemmscope.workload.module_parts import tensors_in

RandomState = tuple[Tensor, dict[int, Tensor]]
Autocast = tuple[tuple[str, bool, torch.dtype], ...]


class RerunModule:
    """A module that is run a second time in one recorded step, with the linears in it."""

    def __init__(self, module: nn.Module, linears: list[tuple[nn.Module, list[LinearPlace]]], capture: StepCapture) -> None:
        self._module, self._linears, self._capture = module, linears, capture
        self._taken = False
        self._again: Callable[[list[Tensor | None]], None] | None = None
        """Repeats the last call."""
        self._gradients: OutputGradients | None = None
        self._undo = self._intercept()

    def remove(self) -> None:
        self._undo()
        self._again = None
        if self._gradients is not None:
            self._gradients.remove()

    def _intercept(self) -> Callable[[], None]:
        """Watch every call of the module from outside, even if it is compiled. Returns a function that undoes this."""
        module: Any = self._module
        before, after = self._capture.guarded(self._before), self._capture.guarded(self._after)
        outside = is_wrapper(module) or _has_compiled_forward(module)
        attribute = "forward" if outside else "_compiled_call_impl" if is_compiled(module) else ""
        if not attribute:
            handles = [
                module.register_forward_pre_hook(lambda _module, args, kwargs: before(args, kwargs), with_kwargs=True),
                module.register_forward_hook(lambda _module, _args, output: after(output)),
            ]
            return partial(_remove_all, handles)
        if not isinstance(getattr(module, attribute), WatchedCall):  # else a second recording of the same module
            setattr(module, attribute, WatchedCall(getattr(module, attribute)))
        watched, watcher = getattr(module, attribute), (before, after)
        watched.watchers.append(watcher)

        def undo() -> None:
            watched.watchers.remove(watcher)
            if not watched.watchers:
                setattr(module, attribute, watched.call)

        return undo

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._again = None
        if not (self._taken or not torch.is_grad_enabled() or captures_graph()):
            own_args, own_kwargs = tree_map(_same_values, (args, kwargs))
            versions = _versions(args, kwargs)
            self._again = partial(self._rerun, own_args, own_kwargs, versions, _random_state(), _autocast_state())

    def _after(self, output: Any) -> None:
        again, self._again, outputs = self._again, None, _gradient_outputs(output)
        if again is None or not outputs:
            return
        if self._gradients is not None:
            self._gradients.remove()  # of an earlier call, that no gradient has arrived for
        self._gradients = OutputGradients(outputs, self._capture.guarded(again))

    def _rerun(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        versions: list[int],
        random: RandomState,
        autocast: Autocast,
        gradients: list[Tensor | None],
    ) -> None:
        self._taken = True
        original, linears = original_module(self._module), self._linears
        if _versions(args, kwargs) != versions:
            raise RuntimeError(f"an input of {type(original).__name__} was changed in place before the backward pass")
        if kind_of(self._module) == NORM_MLP:
            original = NormMlp(original)
            linears = [(original.fc1, self._linears[0][1][:1]), (original.fc2, self._linears[0][1][1:])]
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(list(random[1])))
            _set_random(random)
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # nothing is compiled again
            for context in (_state_kept(original), _NoCommunication(), torch.enable_grad()):
                stack.enter_context(context)
            for kind, enabled, dtype in autocast:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
            ends: list[GradientEdge] = []  # not tensors: an output may be changed in place
            hooked = [(module, places) for module, places in linears if kind_of(module)]
            for module, places in hooked:  # they stay until the end: layers may be recomputed
                stack.callback(LinearHooks(module, places, self._capture).remove)
                stack.callback(_collecting(module, ends).remove)
            with _ExpertCalls(linears, self._capture, ends) if len(hooked) < len(linears) else ExitStack():
                output = original.forward(*args, **kwargs)
            outputs = _gradient_outputs(output)
            pairs = [(one, gradient) for one, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
            if pairs and ends:
                torch.autograd.grad([one for one, _ in pairs], ends, [gradient for _, gradient in pairs], allow_unused=True)


@dataclass(frozen=True, eq=False)
class WatchedCall:
    """A compiled call, and the functions to call before and after it."""

    call: Callable[..., Any]
    watchers: list[tuple[Callable[..., None], Callable[..., None]]] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watchers = tuple(self.watchers)
        for before, _ in watchers:
            before(args, kwargs)
        output = self.call(*args, **kwargs)
        for _, after in watchers:
            after(output)
        return output


class OutputGradients:
    """Calls a function once with the gradients of all outputs, None where an output gets none, before the backward pass goes on.

    The hooks are on the nodes of the graph: one that makes several outputs, as a compiled one does, runs when any of them has a
    gradient, and hooks on the tensors of the others would never be called.
    """

    def __init__(self, outputs: list[Tensor], action: Callable[[list[Tensor | None]], None]) -> None:
        nodes: list[Any] = list(dict.fromkeys(tensor.grad_fn for tensor in outputs))
        self._places = [(nodes.index(tensor.grad_fn), tensor.output_nr) for tensor in outputs]
        self._nodes, self._action = nodes, action
        self._received: dict[int, tuple[Tensor | None, ...]] = {}
        self._handles = [node.register_prehook(partial(self._arrived, number)) for number, node in enumerate(nodes)]

    def remove(self) -> None:
        """Remove the hooks, and the references to the graph, which would keep each other alive."""
        _remove_all(self._handles)
        self._handles, self._nodes, self._received = [], [], {}

    def _arrived(self, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        self._received[number] = tuple(gradients)
        runs = torch._C._will_engine_execute_node
        if all(other in self._received or not runs(node) for other, node in enumerate(self._nodes)):
            received = self._received
            self.remove()
            self._action([received[node][output] if node in received else None for node, output in self._places])


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is the wrapper that `torch.compile(module)` returns."""
    return type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod")


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled: by a wrapper, `module.compile()`, or `module.forward = torch.compile(module.forward)`."""
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return is_wrapper(module) or in_place or _has_compiled_forward(module)


def _has_compiled_forward(module: nn.Module) -> bool:
    return hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")


def original_module(module: nn.Module, *wrappers: str) -> nn.Module:
    """The module inside the wrappers of `torch.compile` and of data parallelism, and inside those that are named."""
    while is_wrapper(module) or type(module).__name__ in ("DistributedDataParallel", *wrappers):
        module = module._orig_mod if is_wrapper(module) else module.module
    return module


def _versions(*arguments: Any) -> list[int]:
    return [tensor._version for tensor in tensors_in(arguments)]


def _same_values(value: Any) -> Any:
    """An argument for the second call: the same values, not part of the training's graph."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _gradient_outputs(output: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]


def _random_state() -> RandomState:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return torch.get_rng_state(), {device: torch.cuda.get_rng_state(device) for device in devices}


def _set_random(state: RandomState) -> None:
    torch.set_rng_state(state[0])
    for device, one in state[1].items():
        torch.cuda.set_rng_state(one, device)


def _autocast_state() -> Autocast:
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


@contextmanager
def _state_kept(module: nn.Module) -> Iterator[None]:
    """Run the module on aliases of its parameters and copies of its buffers, and restore its attributes afterwards."""
    aliases: dict[int, Tensor] = {}

    def alias(tensor: Tensor, *, copied: bool) -> Tensor:
        if id(tensor) not in aliases:
            other = tensor.detach().clone() if copied else tensor.detach()
            aliases[id(tensor)] = other.requires_grad_(tensor.requires_grad)
        return aliases[id(tensor)]

    saved = [(one, dict(one.__dict__), dict(one._parameters), dict(one._buffers)) for one in module.modules()]
    try:
        for one, _, parameters, buffers in saved:
            one._parameters.update({name: alias(value, copied=False) for name, value in parameters.items() if value is not None})
            one._buffers.update({name: alias(value, copied=True) for name, value in buffers.items() if value is not None})
        yield
    finally:
        for one, attributes, parameters, buffers in saved:
            one.__dict__.clear()
            one.__dict__.update(attributes)
            one._parameters.update(parameters)
            one._buffers.update(buffers)


class _NoCommunication(TorchDispatchMode):  # type: ignore[misc]
    """Refuses operations that wait for other ranks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"):
            raise RuntimeError("a compiled module that communicates with other ranks cannot be recorded")
        return func(*args, **(kwargs or {}))


def _collecting(module: nn.Module, ends: list[GradientEdge]) -> Any:
    """A hook that collects the outputs whose gradients are asked for."""
    return module.register_forward_hook(
        lambda _module, _args, output: ends.extend(get_gradient_edge(unchanged(one)) for one in _gradient_outputs(output))
    )


class _ExpertCalls(TorchFunctionMode):  # type: ignore[misc]
    """Sees every GEMM with the weights of an expert."""

    def __init__(
        self, linears: list[tuple[nn.Module, list[LinearPlace]]], capture: StepCapture, ends: list[GradientEdge]
    ) -> None:
        super().__init__()
        self._capture, self._ends = capture, ends
        experts = [(module, place) for module, places in linears for place in places if place.parameter]
        self._weights = [(place, getattr(module, place.parameter)) for module, place in experts]
        functions = [torch.nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm]
        grouped = [getattr(torch, "_grouped_mm", None), getattr(torch.nn.functional, "grouped_mm", None)]
        self._products = set(functions) | {function for function in grouped if function is not None}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func in self._products and len(args) >= 2 and isinstance(output, Tensor) and output.requires_grad:
            for place, parameter in self._weights:
                if _is_part(args[1], parameter):
                    self._take(place, parameter, func, args, kwargs, output)
        return output

    def _take(self, place: LinearPlace, parameter: Tensor, func: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        x, weight, number, rows = args[0].detach(), args[1].detach(), place.expert or 0, None
        if weight.dim() == 2:
            step = parameter.stride(0) * parameter.element_size()
            if (weight.data_ptr() - parameter.data_ptr()) // step != number:
                return
            weight = weight if func is torch.nn.functional.linear else weight.T  # [outputs, inputs]; else [inputs, outputs]
        else:
            offsets = kwargs.get("offs", args[2] if len(args) > 2 else None)
            tokens = output.shape[-2]
            ends = offsets.tolist() if offsets is not None else [(expert + 1) * tokens for expert in range(len(weight))]
            rows = slice(ends[number - 1] if number else 0, ends[number])
            x = x[rows] if offsets is not None else x[number] if x.dim() == 3 and len(x) == len(weight) else x
            weight = weight[number].T
        self._ends.append(get_gradient_edge(unchanged(output)))
        passes = running_passes(dgrad=args[0].requires_grad, wgrad=args[1].requires_grad)
        place = replace(place, inputs=weight.shape[1], outputs=weight.shape[0])
        self._capture.left(place, x.reshape(-1, x.shape[-1]), output, lambda: weight, rows, passes=passes, hold=True)


def _is_part(weight: Any, parameter: Tensor) -> bool:
    if not isinstance(weight, Tensor) or weight.dim() not in (2, 3) or weight.device != parameter.device:
        return False
    start, size = parameter.data_ptr(), parameter.numel() * parameter.element_size()
    return bool(start <= weight.data_ptr() < start + size and weight.dtype == parameter.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "srelu": lambda x: functional.relu(x).square(),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
}
GATED = {"geglu": "gelu", "reglu": "relu", "swiglu": "silu", "sreglu": "srelu", "qgeglu": "qgelu", "glu": "sigmoid"}


class NormMlp(nn.Module):  # type: ignore[misc]
    """The computation of a LayerNormMLP, in the type of its input, with each linear as a module of its own."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._source = [module]  # in a list, so that it is not a submodule
        self.fc1, self.fc2 = (_linear(module, name) for name in ("fc1", "fc2"))

    def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        module = self._source[0]
        hidden = self.fc1(normalized(module, x))
        if module.activation in GATED:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = ACTIVATIONS[GATED[module.activation]](gate) * up
        else:
            hidden = ACTIVATIONS[module.activation](hidden)
        output: Tensor = self.fc2(hidden)
        return output


def _linear(module: Any, name: str) -> nn.Linear:
    weight, bias = local(getattr(module, f"{name}_weight").detach()), getattr(module, f"{name}_bias", None)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias is not None and bias.numel():
        linear.bias = nn.Parameter(bias.detach())
    return linear
