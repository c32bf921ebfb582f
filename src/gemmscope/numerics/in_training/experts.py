"""Linears that are slices of one parameter [experts, ., .]: the GEMMs with them are seen where PyTorch dispatches its operators.

The mode is active only while the module itself runs, in recorded steps. It calls every operator once, with its own arguments, and
is no reason for `torch.compile` to compile again or to run eagerly (`ignore_compile_internals`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from gemmscope.numerics.in_training.capture import LinearPlace, StepCapture, local, recomputes, running_passes
from gemmscope.numerics.in_training.hooks import Hook, unseen
from gemmscope.training import Guard

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
        self._modes: list[GemmMode] = []  # that are active
        # runs even if the recording ends while the module runs
        self._last = Hook(self._after, Guard("no experts are recorded", lambda: None), quiet=False)
        self._handles = [
            module.register_forward_pre_hook(capture.hook(self._before, quiet=False)),
            module.register_forward_hook(self._last, always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks; while the module runs an operator, once it has run."""
        self._leave()
        if not self._modes:
            self._last.end()
            for handle in self._handles:
                handle.remove()

    def _before(self, *_: Any) -> None:
        self._forget_interrupted()
        if torch.is_grad_enabled() and not recomputes() and not all(map(self._capture.is_done, self._places)):
            self._modes.append(GemmMode(self._module, self._places, self._capture).__enter__())

    def _after(self, *_: Any) -> None:
        self._leave()
        self._forget_interrupted()
        if self._capture.ended:
            self.remove()

    def _forget_interrupted(self) -> None:
        """After a KeyboardInterrupt, the end of another mode has removed ours from the top: remove that one in its place."""
        active = _get_current_dispatch_mode_stack()
        for mode in [one for one in self._modes if one.thread == get_ident() and one not in active]:
            self._modes.remove(mode)
            if kept := [one for one in active if one in mode.below]:
                take_off(kept[-1], _pop_mode)

    def _leave(self) -> None:
        for mode in _get_current_dispatch_mode_stack():
            if mode in self._modes:
                mode.leave()
                self._modes.remove(mode)


def take_off(mode: TorchDispatchMode, remove: Callable[[], object]) -> None:
    """Remove a mode, wherever it is among the modes. `remove`: does so where it is the last one."""
    modes = _get_current_dispatch_mode_stack()
    above = modes[modes.index(mode) + 1 :]
    for _ in above:
        _pop_mode()
    remove()
    for one in above:
        _push_mode(one)


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


class GemmMode(TorchDispatchMode):  # type: ignore[misc]
    """Sees every GEMM with the weights of an expert. The node that its output gets exists when the next operator is called."""

    supports_higher_order_operators = True

    def __init__(self, module: nn.Module, places: list[LinearPlace], capture: StepCapture) -> None:
        super().__init__()
        self.thread, self._places, self._capture = get_ident(), places, capture
        self.below = [mode for mode in _get_current_dispatch_mode_stack() if getattr(mode, "_mode_key", None) is None]
        self._see, self._take = capture.hook(self._seen), capture.hook(self._taken)
        self._waiting: list[Callable[[], None]] = []
        names = dict.fromkeys(place.parameter for place in places)
        with unseen():
            self._weights = [Stacked(name, local(getattr(module, name).detach())) for name in names]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as it does without this mode."""
        return True

    is_infra_mode = ignore_compile_internals  # what it is part of in earlier versions of PyTorch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._waiting:
            self._take()
        output = func(*args, **(kwargs or {}))
        name = str(getattr(func, "_overloadpacket", ""))
        if (name in GEMMS or name in COPIES) and type(output) is Tensor:
            self._see(name, args, kwargs or {}, output)
        return output

    def leave(self) -> None:
        """The module has run: remove this mode, wherever it is among the modes, and keep no tensor."""
        take_off(self, partial(self.__exit__, None, None, None))
        self._take()
        self._weights, self._waiting = [], []

    def _seen(self, name: str, args: Any, kwargs: Any, output: Tensor) -> None:
        """After an operator ran: remember copies of weights, and GEMMs with weights."""
        position = GEMMS.get(name, -1)
        weight = args[position + 1]
        if type(weight) not in (Tensor, nn.Parameter) or weight.dim() not in (2, 3):
            return
        for stacked in self._weights:
            if (first := stacked.expert_of(weight)) is None:
                continue
            if name in COPIES:
                self._weights.append(Stacked(stacked.parameter, output.detach().reshape(-1, *output.shape[-2:]), first))
                return
            offsets = kwargs.get("offs", args[2] if "grouped" in name and len(args) > 2 else None)
            ends = offsets.tolist() if offsets is not None else None
            for place in self._places:
                if place.parameter == stacked.parameter:
                    self._part(place, (place.expert or 0) - first, args[position], weight, output, ends)
            return

    def _part(
        self, place: LinearPlace, index: int, x: Tensor, weight: Tensor, output: Tensor, ends: Sequence[int] | None
    ) -> None:
        """What of a GEMM belongs to one expert; `weight` is [inputs, outputs] of expert 0, or [., ., .] from it on."""
        passes, rows = running_passes(dgrad=x.requires_grad, wgrad=weight.requires_grad), None
        if not 0 <= index < (len(weight) if weight.dim() == 3 else 1):
            return
        if weight.dim() == 3:
            tokens = output.shape[-2]
            rows = slice(index * tokens, (index + 1) * tokens) if ends is None else slice(([0, *ends])[index], ends[index])
            x, weight = x[index if ends is None else rows], weight[index]
        x, weight = x.detach().reshape(-1, x.shape[-1]), weight.detach().T
        place = replace(place, inputs=weight.shape[1], outputs=weight.shape[0])
        given = partial(weight.view_as, weight)
        self._waiting.append(partial(self._capture.left, place, x, output, given, rows, passes=passes, hold=True))

    def _taken(self) -> None:
        """The outputs have their nodes: take X, and wait for dY."""
        while self._waiting:
            self._waiting.pop(0)()
