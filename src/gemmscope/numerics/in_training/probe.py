"""Measures, on request, what quantization does to the model's predictions: the user's own forward pass on batches that training
has not seen.

Inside the mode, linears with the weights of some places quantize X and W as a recipe does. Nothing of the model is changed or
replaced. Gradients, the random state, buffers and the mode of every module are as before when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gemmscope.errors import UserError
from gemmscope.numerics.quantizers import operands
from gemmscope.numerics.recording import ProbeFacts
from gemmscope.recipe.recipes import recipes

MOST = 24  # forward passes besides the first one
Run = Callable[[], Tensor]


class QuantizedLinears(TorchFunctionMode):  # type: ignore[misc]
    """Linears whose weights lie at these addresses quantize the operands of fprop."""

    def __init__(self, recipe: str, addresses: set[int]) -> None:
        super().__init__()
        self._operands, self._addresses, self.seen = operands(recipe, "fprop"), addresses, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and args[0].numel() and args[1].data_ptr() in self._addresses:
            self.seen += 1
            x, w = args[0], args[1]
            rows = (w, x.reshape(-1, x.shape[-1]))
            low = (one.quantizer(value).values.to(x.dtype) for one, value in zip(self._operands, rows, strict=True))
            weight, values = low
            args = (values.view(x.shape), weight, *args[2:])
        return func(*args, **(kwargs or {}))


def measured_divergences(model: nn.Module, layers: Mapping[str, int | None], run: Run) -> Iterator[ProbeFacts]:
    """The divergence (KL) of the predictions that `run` returns: with every recipe in all linears of the layers, then one layer
    at a time in the recipe of the fewest bits. `layers`: path of a linear, or of an expert, → its layer."""
    weights = {path: own for path in layers if (own := _weight(model, path)) is not None}
    inside = {path: layer for path, layer in layers.items() if layer is not None and path in weights}
    known = [
        name for name, one in recipes().items() if one.quantizes and "transformer_engine" in one.backends and not one.delayed
    ]
    numbers = sorted({layer for layer in inside.values() if layer is not None})
    sets: list[tuple[str, int | None]] = [(name, None) for name in known]
    sets += [(known[-1], number) for number in numbers[:: -(-len(numbers) // (MOST - len(known))) or 1]]
    with _unchanged(model):
        exact = _predictions(run)
        for name, number in sets:
            chosen = [weights[path] for path, layer in inside.items() if number in (None, layer)]
            with QuantizedLinears(name, {address for own in chosen for address in own}) as mode:
                changed = _predictions(run)
            if not mode.seen:
                raise UserError("none of the recorded weights ran in it: it cannot see sharded, compiled or fused linears")
            divergence = (exact.exp() * (exact - changed)).sum(-1).mean()
            yield ProbeFacts(recipe=name, layer=number, divergence=float(divergence), linears=mode.seen)


def _weight(model: nn.Module, path: str) -> Sequence[int] | None:
    """The addresses of a linear's weight; of experts in one parameter, of all of them."""
    module: Any = model
    for part in path.split("."):
        if isinstance(module, Tensor):
            break
        module = getattr(module, part, None)
    weight = getattr(module, "weight", module)
    if not isinstance(weight, Tensor) or weight.dim() not in (2, 3):
        return None
    return [weight.data_ptr()] if weight.dim() == 2 else [one.data_ptr() for one in weight.detach()]


def _predictions(run: Run) -> Tensor:
    logits = run()
    if not isinstance(logits, Tensor) or logits.dim() < 2:
        raise UserError("probe must return logits, a tensor [..., classes]", "for example lambda: model(batch).logits")
    return torch.log_softmax(logits.detach().float(), -1)


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Without gradients, in the mode for evaluation; what a forward pass may change is restored."""
    training = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = sorted({one.device.index for one in model.parameters() if one.is_cuda})
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            model.eval()
            yield
            for buffer, value in buffers:
                buffer.copy_(value)
    finally:
        for module, mode in training.items():
            module.training = mode
