"""Takes X, W and dY of a linear while the user's training runs, without changing it.

X is what the module is called with, dY the gradient of its output, taken by a hook on that tensor. Hooks exist only in recorded
steps. Nothing is copied until both are there: X is held by reference, as autograd itself holds it. Where activations are
recomputed, X comes from the recomputation, and each linear is taken once. No hook returns anything, nothing is changed in place,
no random number of the training is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from gemmscope.errors import in_a_line
from gemmscope.numerics.probes import sample_with_probes
from gemmscope.numerics.recording import StepFacts, TensorFacts
from gemmscope.numerics.sample import amax_of, random_for
from gemmscope.workload.module_parts import tensors_in
from gemmscope.workload.ops import OPERANDS, Pass, TensorName

Guard = Callable[[Callable[..., None]], Callable[..., None]]
"""Makes a function safe to call in the training: it does not raise."""


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
    facts: StepFacts | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)


class StepCapture:
    """One recorded step: every linear once, from the first forward pass that gets a gradient."""

    def __init__(
        self, step: int, budget: int | None, seed: int, guarded: Guard, histories: Mapping[str, Sequence[StepFacts]]
    ) -> None:
        """`budget`: bytes for the samples of each linear; None where only maxima are recorded. `histories`: the steps before, of
        every linear."""
        self.step, self.budget, self.seed, self.guarded, self.histories = step, budget, seed, guarded, histories
        self.linears: dict[str, Taken] = {}
        self.problems: dict[str, str] = {}

    def entered(self, place: LinearPlace, x: Tensor) -> None:
        """Before the module runs: here X arrives where it is recomputed, even if the module's last output is not needed again."""
        taken = self.linears.get(place.key)
        if taken is not None and taken.waits and _recomputes():
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
        `hold`: X will not be recomputed.

        A later call replaces an earlier one without a gradient, which may never get one. A frozen linear whose input needs no
        gradient runs fprop alone: it is captured at once, because nothing else keeps its X until the backward pass.
        """
        frozen = not output.requires_grad
        if self.is_done(place) or (frozen and not torch.is_grad_enabled()) or not len(x) or _recomputes() or captures_graph():
            return
        taken = Taken(place, gemm_dtype(x), weight, passes, tokens=len(x))
        self.linears[place.key] = taken
        if self.budget is None:
            with self._one_linear(place):
                taken.amax = {"X": amax_of(x, taken.dtype), "W": amax_of(_usable(weight(), place), taken.dtype)}
        elif "_checkpoint_hook" in _saving_hook() and not hold and not frozen:
            taken.waits = True
        else:
            self._hold(taken, x)
        if frozen:
            if self.budget is not None:
                self._complete(taken)
            return
        width = output.shape[-1]

        def arrived(gradient: Tensor) -> None:
            dy = local(gradient.detach()).reshape(-1, width)
            self.got_gradient(taken, dy[rows] if rows is not None else dy)

        unchanged(output).register_hook(self.guarded(arrived))

    def is_done(self, place: LinearPlace) -> bool:
        """Whether a gradient of this linear has arrived."""
        taken = self.linears.get(place.key)
        return taken is not None and (taken.facts is not None or taken.dy is not None or "dY" in taken.amax)

    def got_gradient(self, taken: Taken, dy: Tensor) -> None:
        """dY [M, N] of one linear: the first one, if there are several losses or calls."""
        if self.linears[taken.place.key] is not taken or self.is_done(taken.place):
            return
        if self.budget is None:
            taken.amax["dY"] = amax_of(dy, taken.dtype)
        else:
            taken.dy = dy
            if not taken.waits:
                self._complete(taken)

    def _hold(self, taken: Taken, x: Tensor) -> None:
        taken.x, taken.version = x.detach(), x._version

    def _complete(self, taken: Taken) -> None:
        """Draw the sample, and release the tensors."""
        x, dy, key = taken.x, taken.dy, taken.place.key
        taken.x = taken.dy = None
        if x is not None and x._version != taken.version:
            self.problems[key] = "its input was changed in place before the backward pass"
            x = None
        on_gpu = torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else nullcontext()
        # outside of the training's autocast and autograd
        with torch.no_grad(), torch.autocast("cpu", enabled=False), on_gpu, self._one_linear(taken.place):
            weight = _usable(taken.weight(), taken.place)
            x, dy = _same_tokens(x, dy, *taken.place.tp)
            taken.facts, taken.kept = sample_with_probes(
                x, weight, dy, dtype=taken.dtype, budget=self.budget or 0, random=random_for(self.seed, self.step, key),
                step=self.step, history=self.histories.get(key, ()), passes=taken.passes,
            )  # fmt: skip

    @contextmanager
    def _one_linear(self, place: LinearPlace) -> Iterator[None]:
        """Note an error of one linear in the file, and go on with the others."""
        try:
            yield
        except Exception as error:
            self.problems[place.key] = in_a_line(error)

    def finish(self) -> dict[str, tuple[StepFacts, dict[str, Tensor]]]:
        """The recorded facts and tensors of every linear; without a gradient, those that need none."""
        maxima = [amax for taken in self.linears.values() for amax in taken.amax.values()]
        on_one_device = torch.stack([one.to(maxima[0].device) for one in maxima]) if maxima else torch.empty(0)
        values = iter(on_one_device.tolist())  # with one synchronization
        recorded = {}
        for key, taken in self.linears.items():
            if self.budget is None:
                tensors = {name: TensorFacts(amax=next(values)) for name in taken.amax}
                taken.facts = StepFacts(step=self.step, tokens=taken.tokens, tensors=tensors)
            elif taken.facts is None and taken.x is not None:
                self._complete(taken)
            if taken.facts is not None:
                recorded[key] = (taken.facts, taken.kept)
        return recorded


def captures_graph() -> bool:
    """Whether a CUDA graph is being captured, which allows no synchronization."""
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


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


def unchanged(output: Tensor) -> Tensor:
    """The tensor that receives the gradient of an output even if the output is changed in place, for example by an activation.

    That is the base of the output, if the output is a view of all of it.
    """
    base = output._base
    whole = base is not None and base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous()
    return base if whole and base.requires_grad else output


def _usable(weight: Tensor, place: LinearPlace) -> Tensor:
    """W, if its values are there: FSDP frees them between uses."""
    weight = local(weight.detach())
    if tuple(weight.shape) != (place.outputs, place.inputs):
        raise RuntimeError(f"the weight of {place.key} is {tuple(weight.shape)}, not {(place.outputs, place.inputs)}")
    if weight.untyped_storage().nbytes() < weight.numel() * weight.element_size():
        raise RuntimeError(f"the weight of {place.key} is not in memory")
    return weight


def _same_tokens(x: Tensor | None, dy: Tensor | None, rank: int, size: int) -> tuple[Tensor | None, Tensor | None]:
    """The tokens that both have: with sequence parallelism, one of them has only those of this rank."""
    if x is None or dy is None or len(x) == len(dy):
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


def _recomputes() -> bool:
    return "_recomputation_hook" in _saving_hook()


def first_tensor(*groups: Any) -> Tensor | None:
    """The first tensor among arguments or outputs."""
    return next(iter(tensors_in(groups)), None)


PLAIN = {"Linear", "ColumnParallelLinear", "RowParallelLinear", "Conv1D"}
NORM_LINEAR, NORM_MLP, GROUPED = "LayerNormLinear", "LayerNormMLP", "GroupedLinear"
OURS = {*PLAIN, NORM_LINEAR, NORM_MLP, GROUPED}
PACKAGES = ("transformer_engine", "megatron", "transformers")


def kind_of(module: nn.Module) -> str:
    """The linear that a module is, by the first of its classes that is known; empty if it is not one."""
    if isinstance(module, NonDynamicallyQuantizableLinear):  # of nn.MultiheadAttention, which does not call it
        return ""
    for base in type(module).__mro__:
        if base is nn.Linear or (base.__name__ in OURS and base.__module__.partition(".")[0] in PACKAGES):
            return base.__name__
    return ""


def module_weights(module: nn.Module) -> list[Tensor]:
    """One weight, or several that one GEMM reads, as Q, K and V in Transformer Engine."""
    names = getattr(module, "weight_names", None) or ["weight"]
    return [weight for name in names if isinstance(weight := getattr(module, name, None), Tensor)]


class LinearHooks:
    """The hooks on one linear module in one recorded step."""

    def __init__(self, module: nn.Module, places: list[LinearPlace], capture: StepCapture) -> None:
        self._module, self._places, self._capture = module, places, capture
        self._kind = kind_of(module)
        self._handles = [
            module.register_forward_pre_hook(capture.guarded(self._before), with_kwargs=True),
            module.register_forward_hook(capture.guarded(self._after), with_kwargs=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken = [self._capture.linears.get(place.key) for place in self._places]
        if any(one is not None and one.waits for one in taken):
            for place, x, _ in self._inputs(args, kwargs):
                self._capture.entered(place, x)

    def _after(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        result = first_tensor(output)
        if result is None or all(map(self._capture.is_done, self._places)):
            return
        needs_dgrad = self._kind == NORM_LINEAR or any(tensor.requires_grad for tensor in tensors_in((args, kwargs))[:1])
        for place, x, rows in self._inputs(args, kwargs):
            passes = running_passes(dgrad=needs_dgrad, wgrad=any(one.requires_grad for one in self._weights(place)))
            self._capture.left(place, x, result, partial(self._weight, place), rows, passes=passes)

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[LinearPlace, Tensor, slice | None]]:
        """X of every place, and the rows of the call that it has."""
        given = first_tensor(args, kwargs)
        if given is None:
            return
        x = local(given.detach())
        x = x.reshape(-1, x.shape[-1])
        if self._kind == NORM_LINEAR:
            x = normalized(self._module, x)
        if self._kind != GROUPED:
            yield self._places[0], x, None
            return
        splits = args[1] if len(args) > 1 else kwargs["m_splits"]
        ends = torch.as_tensor(splits).cumsum(0).tolist()
        for place in self._places:
            number = place.expert or 0
            rows = slice(ends[number - 1] if number else 0, ends[number])
            yield place, x[rows], rows

    def _weights(self, place: LinearPlace) -> list[Tensor]:
        return module_weights(self._module) if place.expert is None else [getattr(self._module, f"weight{place.expert}")]

    def _weight(self, place: LinearPlace) -> Tensor:
        weights = self._weights(place)
        weight = weights[0] if len(weights) == 1 else torch.cat([local(one.detach()) for one in weights])
        return weight.detach().T if self._kind == "Conv1D" else weight


def normalized(module: Any, x: Tensor) -> Tensor:
    """The input of Transformer Engine's LayerNormLinear and LayerNormMLP after their norm, in the type of x."""
    values, weight = x.float(), local(module.layer_norm_weight.detach()).float()
    if getattr(module, "zero_centered_gamma", False):
        weight = weight + 1
    if getattr(module, "normalization", "LayerNorm") != "RMSNorm":
        values = values - values.mean(-1, keepdim=True)
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + module.eps) * weight
    bias = getattr(module, "layer_norm_bias", None)
    return (values if bias is None else values + local(bias.detach()).float()).to(x.dtype)
