"""Takes X, W and dY of a linear while the user's training runs, without changing it, and measures it on their device.

X is what the module is called with, dY the gradient of its output, taken by a hook on the node that made it. Hooks exist only in
recorded steps. Nothing is copied until both are there: X is held by reference, as autograd itself holds it. Where activations are
recomputed, X comes from the recomputation, and each linear is taken once. No hook returns anything, nothing is changed in place,
no random number of the training is used, and no module runs a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from gemmscope.errors import in_a_line
from gemmscope.numerics.in_training.hooks import Hook, unchanged
from gemmscope.numerics.measure import LinearMeasurement, amax_of
from gemmscope.numerics.names import number_of
from gemmscope.numerics.recording import StepFacts, TensorFacts, step_facts
from gemmscope.training import Guard
from gemmscope.workload.ops import OPERANDS, Pass, TensorName

CHANGED = "its input was changed in place before the backward pass"


@dataclass(frozen=True)
class LinearPlace:
    """A linear that is recorded. `key` is its path, of one expert with its number."""

    key: str
    inputs: int
    outputs: int
    expert: int | None = None
    tp: tuple[int, int] = (0, 1)
    """Rank and size of its tensor-parallel group."""
    kind: str = ""
    """Class of its module."""
    experts: int = 1
    """Of its layer, on this rank."""
    parameter: str = ""
    """Of an expert whose weight is part of a parameter [experts, ., .]: the parameter's name in its module."""
    top_k: int = 0
    """Of a router: how many experts it chooses for a token."""


ComputedLinear = tuple[Tensor, Tensor, Tensor, tuple[Pass, ...]]
"""A linear inside a module that does not show it: X [M, K], W [N, K], dY [M, N], and the passes that run."""


@dataclass
class Taken:
    """The tensors and facts of a linear in the current step."""

    place: LinearPlace
    dtype: torch.dtype
    weight: Callable[[], Tensor]
    passes: tuple[Pass, ...] = tuple(OPERANDS)
    x: Tensor | None = None
    version: int = 0
    dy: Tensor | None = None
    waits: bool = False
    """X comes when the layer is recomputed."""
    amax: dict[TensorName, Tensor] = field(default_factory=dict)
    tokens: int | None = None
    numbers: dict[str, Tensor] = field(default_factory=dict)
    """On the tensors' device, once it is measured."""


class StepCapture:
    """One recorded step: every linear once, from the first forward pass that gets a gradient."""

    def __init__(self, step: int, measured: Mapping[str, Mapping[TensorName, float]], seed: int, guard: Guard) -> None:
        """`measured`: the keys of the linears to measure in this step, each with the maxima of its earlier steps; of others, only
        maxima are recorded."""
        self.step, self.measured, self.seed = step, measured, seed
        self.linears: dict[str, Taken] = {}
        self.problems: dict[str, str] = {}
        self.ended = False
        self._guard = guard
        self._hooks: list[Hook] = []

    def hook(self, action: Callable[..., object], *, quiet: bool = True) -> Hook:
        """A hook that is ended with the step."""
        self._hooks.append(Hook(action, self._guard, quiet=quiet))
        return self._hooks[-1]

    def end(self) -> None:
        """Release everything that the training may still hold hooks of."""
        for hook in self._hooks:
            hook.end()
        self.ended, self._hooks = True, []

    def entered(self, place: LinearPlace, x: Tensor) -> None:
        """Before the module runs: here X arrives where it is recomputed, even if the module's last output is not needed again."""
        taken = self.linears.get(place.key)
        if taken is not None and taken.waits and recomputes():
            taken.waits = False
            self._hold(taken, x)
            if taken.dy is not None:
                self._complete(taken)

    def left(
        self,
        place: LinearPlace,
        x: Tensor,
        output: Tensor,
        weight: Callable[[], Tensor],
        rows: slice | None = None,
        *,
        passes: tuple[Pass, ...] = tuple(OPERANDS),
        hold: bool = False,
    ) -> None:
        """After the module ran: `x` [M, K]; of `output`, `rows` belong to this linear. `passes`: those that run.
        `hold`: X is a part of a tensor, and is copied where others wait until it is recomputed.

        A later call replaces an earlier one without a gradient, which may never get one. A frozen linear whose input needs no
        gradient runs fprop alone: it is captured at once, because nothing else keeps its X until the backward pass.
        """
        frozen = not output.requires_grad or place.top_k > 0  # what a router chooses does not depend on gradients
        if self.is_done(place) or (frozen and not torch.is_grad_enabled()) or not len(x) or recomputes():
            return
        taken = Taken(place, gemm_dtype(x), weight, passes, tokens=len(x))
        self.linears[place.key] = taken
        if place.key not in self.measured:
            with self._one_linear(place):
                taken.amax = {"X": amax_of(x, taken.dtype), "W": amax_of(_usable(weight(), place), taken.dtype)}
        elif will_recompute() and not frozen:
            if hold:
                self._hold(taken, x.detach().clone())
            taken.waits = not hold
        else:
            self._hold(taken, x)
        if frozen:
            if place.key in self.measured:
                self._complete(taken)
            return
        self._on_gradient(output, lambda dy: self.got_gradient(taken, dy[rows] if rows is not None else dy))

    def computed(
        self, places: Sequence[LinearPlace], x: Tensor, output: Tensor, linears: Callable[[Tensor], Iterable[ComputedLinear]]
    ) -> None:
        """After a module ran that hides its linears: their tensors are computed from dY of the module, `linears(dy)`."""
        if recomputes() or not output.requires_grad or all(map(self.is_done, places)):
            return
        dtype, version = gemm_dtype(x), x._version

        def arrived(dy: Tensor) -> None:
            if all(map(self.is_done, places)):
                return
            if x._version != version:
                self.problems |= dict.fromkeys((place.key for place in places), CHANGED)
                return
            for place, (own, weight, gradient, passes) in zip(places, linears(dy), strict=True):
                taken = Taken(place, dtype, partial(weight.view_as, weight), passes, tokens=len(own))
                self.linears[place.key] = taken
                if place.key not in self.measured:
                    taken.amax = {"X": amax_of(own, dtype), "W": amax_of(weight, dtype)}
                self._hold(taken, own)
                self.got_gradient(taken, gradient)

        self._on_gradient(output, arrived)

    def _on_gradient(self, output: Tensor, action: Callable[[Tensor], None]) -> None:
        tensor, width = unchanged(output), output.shape[-1]

        def arrived(gradients: tuple[Tensor | None, ...]) -> None:
            if (gradient := gradients[tensor_number]) is not None:
                action(local(gradient.detach()).reshape(-1, width))

        tensor_number = tensor.output_nr
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(self.hook(arrived))

    def is_done(self, place: LinearPlace) -> bool:
        """Whether a gradient of this linear has arrived."""
        taken = self.linears.get(place.key)
        return taken is not None and (bool(taken.numbers) or taken.dy is not None or "dY" in taken.amax)

    def got_gradient(self, taken: Taken, dy: Tensor) -> None:
        """dY [M, N] of one linear: the first one, if there are several losses or calls."""
        if self.linears[taken.place.key] is not taken or self.is_done(taken.place):
            return
        if taken.place.key not in self.measured:
            taken.amax["dY"] = amax_of(dy, taken.dtype)
        else:
            taken.dy = dy
            if not taken.waits:
                self._complete(taken)

    def _hold(self, taken: Taken, x: Tensor) -> None:
        taken.x, taken.version = x.detach(), x._version

    def _complete(self, taken: Taken) -> None:
        """Measure, and release the tensors."""
        x, dy, key = taken.x, taken.dy, taken.place.key
        taken.x = taken.dy = None
        if x is None or x._version != taken.version:
            self.problems[key] = CHANGED
            return
        # outside of the training's autocast, whose cache `torch.autocast` would clear, and of its autograd
        with torch.no_grad(), torch._C._DisableAutocast(), self._one_linear(taken.place):
            weight = _usable(taken.weight(), taken.place)
            x, dy = _same_tokens(x, dy, *taken.place.tp)
            taken.tokens = len(x)
            taken.numbers = LinearMeasurement(
                x,
                weight,
                dy,
                taken.dtype,
                number_of(self.seed, self.step, key),
                taken.passes,
                self.measured[key],
                taken.place.top_k,
            ).numbers()

    @contextmanager
    def _one_linear(self, place: LinearPlace) -> Iterator[None]:
        """Note an error of one linear in the file, and go on with the others."""
        try:
            yield
        except Exception as error:
            self.problems[place.key] = in_a_line(error)

    def finish(self) -> dict[str, StepFacts]:
        """What was recorded of every linear; without a gradient, of those that need none."""
        for taken in self.linears.values():
            if not taken.numbers and taken.x is not None:
                self._complete(taken)
        known = {
            key: taken.numbers or {name: one[None] for name, one in taken.amax.items()} for key, taken in self.linears.items()
        }
        every = [one for numbers in known.values() for one in numbers.values()]
        values = iter(torch.cat([one.to(every[0].device) for one in every]).tolist() if every else [])  # one synchronization
        recorded = {}
        for key, numbers in known.items():
            taken, read = self.linears[key], {name: [next(values) for _ in one] for name, one in numbers.items()}
            if taken.numbers:
                recorded[key] = step_facts(self.step, taken.tokens or 0, read)
            elif taken.amax:
                tensors = {name: TensorFacts(amax=read[name][0]) for name in taken.amax}
                recorded[key] = StepFacts(step=self.step, tokens=taken.tokens, tensors=tensors)
        return recorded


def gemm_dtype(x: Tensor) -> torch.dtype:
    """The type in which the GEMM reads its operands without quantization."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        dtype: torch.dtype = torch.get_autocast_dtype(kind)
        return dtype
    return x.dtype if x.dtype in (torch.bfloat16, torch.float16) else torch.float32


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor, and the values of a quantized one."""
    for method in ("to_local", "dequantize"):
        if type(tensor) not in (Tensor, nn.Parameter) and hasattr(type(tensor), method) and not tensor.is_quantized:
            tensor = getattr(tensor, method)()
    inner = getattr(tensor, "_tensor", None)  # torchao's weights that FSDP gathers in FP8
    return inner if isinstance(inner, Tensor) else tensor


def running_passes(*, dgrad: bool, wgrad: bool) -> tuple[Pass, ...]:
    """The GEMMs that run: dgrad where X needs a gradient, wgrad where the weight is not frozen."""
    return tuple(name for name, runs in zip(OPERANDS, (True, dgrad, wgrad), strict=True) if runs)


def _usable(weight: Tensor, place: LinearPlace) -> Tensor:
    """W, if its values are there: FSDP frees them between uses."""
    weight = local(weight.detach())
    if tuple(weight.shape) != (place.outputs, place.inputs):
        raise RuntimeError(f"the weight of {place.key} is {tuple(weight.shape)}, not {(place.outputs, place.inputs)}")
    if weight.untyped_storage().nbytes() < weight.numel() * weight.element_size():
        raise RuntimeError(f"the weight of {place.key} is not in memory")
    return weight


def _same_tokens(x: Tensor, dy: Tensor | None, rank: int, size: int) -> tuple[Tensor, Tensor | None]:
    """The tokens that both have: with sequence parallelism, one of them has only those of this rank."""
    if dy is None or len(x) == len(dy):
        return x, dy
    tokens = min(len(x), len(dy))
    own = slice(rank * tokens, (rank + 1) * tokens)
    if tokens * size != max(len(x), len(dy)):
        return x, None
    return (x, dy[own]) if tokens == len(x) else (x[own], dy)


def _saving_hook() -> str:
    """The name of the hook that packs the tensors that autograd saves; empty if there is none. In `torch.utils.checkpoint` it
    is "_checkpoint_hook" in the pass that will be recomputed, and "_recomputation_hook" in the one that recomputes it."""
    try:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(*(True,))
    except (AttributeError, TypeError):  # an older torch
        return ""
    return str(getattr(hooks[0], "__qualname__", "")) if hooks else ""


def recomputes() -> bool:
    """Whether `torch.utils.checkpoint` runs a part of the model again, in the backward pass."""
    return "_recomputation_hook" in _saving_hook()


def will_recompute() -> bool:
    """Whether `torch.utils.checkpoint` will run this part of the model again."""
    return "_checkpoint_hook" in _saving_hook()
