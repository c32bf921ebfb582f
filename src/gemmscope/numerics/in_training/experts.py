"""Linears that are slices of one parameter [experts, ., .]: the GEMMs with them are seen where PyTorch dispatches its operators.

The mode is active only while the module itself runs, in recorded steps. It calls every operator once, with its own arguments, and
is no reason for `torch.compile` to compile again or to run eagerly (`ignore_compile_internals`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from threading import local as thread_local
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from gemmscope.numerics.in_training.capture import LinearPlace, StepCapture, local, recomputes, running_passes
from gemmscope.numerics.in_training.hooks import Hook
from gemmscope.training import Guard
from gemmscope.workload.ops import Pass

GEMMS = {
    "aten.mm": 0,
    "aten.bmm": 0,
    "aten.addmm": 1,
    "aten.baddbmm": 1,
    "aten._grouped_mm": 0,
    "transformers.grouped_mm_fallback": 0,
}
"""Operators, and where X is among their arguments; W [., inputs, outputs] follows it."""
COPIES = ("aten._to_copy", "aten.clone")  # as autocast makes them


class ExpertHooks:
    """Watches the GEMMs of a module's experts while it runs."""

    def __init__(self, module: nn.Module, places: list[LinearPlace], capture: StepCapture) -> None:
        self._module, self._places, self._capture = module, places, capture
        self._running = thread_local()
        # runs even if the recording ends while the module runs
        self._last = Hook(self._after, Guard("no experts are recorded", lambda: None), quiet=False)
        self._handles = [
            module.register_forward_pre_hook(capture.hook(self._before, quiet=False)),
            module.register_forward_hook(self._last, always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks; while the module runs, once it has run."""
        while self._modes and (self._modes[-1] is None or self._modes[-1].is_active()):
            self._leave()
        if not self._modes:
            self._last.end()
            for handle in self._handles:
                handle.remove()

    @property
    def _modes(self) -> list[GemmMode | None]:
        """Of the calls that run in this thread, the innermost last."""
        modes: list[GemmMode | None] = self._running.__dict__.setdefault("modes", [])
        return modes

    def _before(self, *_: Any) -> None:
        wanted = torch.is_grad_enabled() and not recomputes() and not all(map(self._capture.is_done, self._places))
        mode = GemmMode(self._module, self._places, self._capture) if wanted else None
        if mode is not None:
            mode.__enter__()
        self._modes.append(mode)

    def _leave(self) -> None:
        mode = self._modes.pop() if self._modes else None
        if mode is not None:
            mode.leave()

    def _after(self, *_: Any) -> None:
        self._leave()
        if self._capture.ended and not self._modes:
            self.remove()


@dataclass(frozen=True)
class Stacked:
    """The weights of experts, from the number `first` on, as they lie in memory: those of a parameter, or a copy of them."""

    parameter: str
    tensor: Tensor
    first: int = 0

    def expert_of(self, tensor: Tensor) -> int | None:
        """The number of the first expert that a tensor has; None if it lies elsewhere."""
        own, step = self.tensor, self.tensor.stride(0) * self.tensor.element_size()
        distance = tensor.data_ptr() - own.data_ptr()
        inside = tensor.dtype == own.dtype and tensor.device == own.device and 0 <= distance < len(own) * step
        return self.first + distance // step if inside else None


@dataclass(frozen=True)
class ExpertGemm:
    """One GEMM of an expert: X, W [outputs, inputs], and its rows of the output."""

    place: LinearPlace
    x: Tensor
    weight: Tensor
    output: Tensor
    rows: slice | None
    passes: tuple[Pass, ...]


class GemmMode(TorchDispatchMode):  # type: ignore[misc]
    """Sees every GEMM with the weights of an expert. The node that its output gets exists when the next operator is called."""

    supports_higher_order_operators = True

    def __init__(self, module: nn.Module, places: list[LinearPlace], capture: StepCapture) -> None:
        super().__init__()
        self._places, self._capture = places, capture
        self._see, self._take = capture.hook(self._seen), capture.hook(self._taken)
        self._waiting: list[ExpertGemm] = []
        names = dict.fromkeys(place.parameter for place in places)
        self._weights = [Stacked(name, local(getattr(module, name).detach())) for name in names]

    @classmethod
    def is_infra_mode(cls) -> bool:
        """What `ignore_compile_internals` is part of in earlier versions of PyTorch."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as it does without this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._waiting:
            self._take()
        output = func(*args, **(kwargs or {}))
        name = str(getattr(func, "_overloadpacket", ""))
        if (name in GEMMS or name in COPIES) and type(output) is Tensor:
            self._see(name, args, kwargs or {}, output)
        return output

    def is_active(self) -> bool:
        """Whether it is among the modes now: not while it handles an operator."""
        return any(mode is self for mode in _get_current_dispatch_mode_stack())

    def leave(self) -> None:
        """The module has run: remove this mode, wherever it is among the modes, and keep no tensor."""
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        _push_mode(self)
        self.__exit__(None, None, None)
        for mode in reversed(above):
            _push_mode(mode)
        self._take()
        self._weights, self._waiting = [], []

    def _seen(self, name: str, args: Any, kwargs: Any, output: Tensor) -> None:
        """After an operator ran: remember copies of weights, and GEMMs with weights."""
        position = GEMMS.get(name, 0)
        weight = args[position + 1] if name in GEMMS else args[0]
        if not isinstance(weight, Tensor) or type(weight) not in (Tensor, nn.Parameter) or weight.dim() not in (2, 3):
            return
        for stacked in self._weights:
            if (first := stacked.expert_of(weight)) is not None:
                if name in COPIES:
                    copied = output if output.dim() == 3 else output.unsqueeze(0)  # noqa: PLR2004
                    self._weights.append(Stacked(stacked.parameter, copied.detach(), first))
                else:
                    grouped = "grouped" in name
                    offsets = kwargs.get("offs", args[2] if grouped and len(args) > 2 else None)  # noqa: PLR2004
                    places = [place for place in self._places if place.parameter == stacked.parameter]
                    self._waiting += _gemms(places, first, args[position], weight, output, offsets)
                return

    def _taken(self) -> None:
        """The outputs have their nodes: take X, and wait for dY."""
        waiting, self._waiting = self._waiting, []
        for gemm in waiting:
            place = replace(gemm.place, inputs=gemm.weight.shape[1], outputs=gemm.weight.shape[0])
            x = gemm.x.reshape(-1, gemm.x.shape[-1])
            self._capture.left(place, x, gemm.output, partial(_same, gemm.weight), gemm.rows, passes=gemm.passes, hold=True)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _gemms(
    places: list[LinearPlace], first: int, x: Tensor, weight: Tensor, output: Tensor, offsets: Tensor | None
) -> Iterator[ExpertGemm]:
    """What of a GEMM belongs to the recorded experts; `weight` [inputs, outputs] is that of expert `first`, or [., ., .] from it on."""
    passes = running_passes(dgrad=x.requires_grad, wgrad=weight.requires_grad)
    x, weight, ends = x.detach(), weight.detach(), offsets.tolist() if offsets is not None else None
    for place in places:
        index = (place.expert or 0) - first
        if weight.dim() == 2 and index == 0:  # noqa: PLR2004
            yield ExpertGemm(place, x, weight.T, output, None, passes)
        elif weight.dim() == 3 and 0 <= index < len(weight):  # noqa: PLR2004
            tokens = output.shape[-2]
            start, end = (
                (index * tokens, (index + 1) * tokens) if ends is None else (ends[index - 1] if index else 0, ends[index])
            )
            own = x[start:end] if ends is not None else x[index]
            yield ExpertGemm(place, own, weight[index].T, output, slice(start, end), passes)
