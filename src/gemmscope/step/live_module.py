"""The training step of a live module: the user's own, or a Hugging Face model.

The module is built once, with the weights, gradients and optimizer state that every recipe uses. A recipe runs a copy of it that
shares all parameters, with its linears converted by the kit, compiled as requested.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemmscope.errors import option
from gemmscope.grouping import grouped
from gemmscope.step.conversion import LinearUse, decide, record_linears, summary
from gemmscope.step.kits.plain import Kit, compiled_module
from gemmscope.step.marks import mark_step
from gemmscope.step.mixer_kernels import CONV, FLA, MAMBA, TRANSFORMERS, WRONG_GRADIENTS, KernelSources, gated_backward_is_wrong
from gemmscope.step.module_plan import ModulePlan, truncated
from gemmscope.workload.factory import Built, load_factory, own_loss, scalar
from gemmscope.workload.failures import TraceError, naming
from gemmscope.workload.huggingface import BUILDING, as_built, huggingface_model, training_inputs
from gemmscope.workload.module_parts import expert_weights, find_layers, output_head, tensors_in, with_tensors

OPTIMIZERS: dict[str, Any] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.0, "weight_decay": 0.0}),
    "adam": (torch.optim.Adam, {"lr": 0.0}),
    "sgd": (torch.optim.SGD, {"lr": 0.0, "momentum": 0.9}),
}  # the learning rate is zero: the weights stay as they are, and so does the time of a step


EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
HALF = "; optimizers overflow in FP16: return the module in FP32 or BF16, or add --optimizer none"


Note = tuple[str, dict[str, Any]]


# Functions of mixers that transformers takes from other packages where they are installed: the first words of their names.
MIXERS = ("chunk_gated_delta_rule", "fused_recurrent_gated", "causal_conv1d", "mamba_", "selective_", "chunk_kda", "lightning")
DECODING = ("update", "recurrent", "single")  # in the names of those that run one token at a time
WRAPPED = ("implementation", "func", "fn")  # what wrappers call the function inside
PACKAGES = {"fla": FLA, "mamba_ssm": MAMBA, "causal_conv1d": CONV, "transformers": TRANSFORMERS}
NOT_WHEN_EXPORTED = "is_new_implementation"  # in a wrapper (5.17) that takes transformers' own code while a model is exported
EXPORTED = (
    "this PyTorch tells compiled code that it is being exported, and transformers then runs its own; use --compile none, "
    "or PyTorch 2.13 or newer"
)


@dataclass
class LiveModule:
    """A module on the device, its inputs, and what all its copies share."""

    built: Built
    objective: Objective
    linears: dict[str, LinearUse]
    layers: list[str]
    head: str | None
    optimizer: torch.optim.Optimizer | None
    cast: bool  # its FP32 parameters were made BF16
    masked: bool | None  # whether its attention has an explicit mask, when it is not compiled; None: it has no attention

    @classmethod
    def build(cls, plan: ModulePlan, device: str, precision: torch.dtype, optimizer: str) -> LiveModule:
        """The module of a plan, run forward once: it has linears, and a loss that is a number."""
        if plan.module is not None:
            built = load_factory(plan.module, plan.micro_batch_size or None, plan.sequence_length or None, device)
            built, cast = _in_precision(built, precision)
        else:
            built, cast = live_huggingface(plan, device, precision), False
        folder = Path(plan.module.rpartition(":")[0]).resolve().parent if plan.module is not None else None
        objective = Objective(built)
        with naming("running the module", folder):
            linears, masked = record_linears(built.module, partial(objective.try_once, built))
        name = type(built.module).__name__
        if not any(use.rows for use in linears.values()):
            raise TraceError(
                f"{name} runs no nn.Linear: there is nothing to convert to low precision",
                "only matrix multiplications in nn.Linear layers can be converted",
            )
        trained = [parameter for parameter in built.module.parameters() if parameter.requires_grad]
        if not trained:
            raise TraceError(f"{name} has no parameter that requires a gradient: there is nothing to train")
        sparse = [path for path, part in built.module.named_modules() if isinstance(part, EMBEDDINGS) and part.sparse]
        if sparse and optimizer != "none" and not (optimizer == "sgd" and device == "cpu"):  # fused, SGD does not support them
            raise TraceError(
                f"the gradients of {sparse[0]} are sparse, and {optimizer} does not support them on {device}",
                f"add {option('optimizer', 'none')}, or build it with sparse=False",
            )
        layers = find_layers(built.module)
        return cls(
            built=built,
            objective=objective,
            linears=linears,
            layers=layers,
            head=output_head(built.module, {path: use.last_call for path, use in linears.items() if use.rows}, layers),
            optimizer=_optimizer(trained, optimizer),
            cast=cast,
            masked=any(masked) if masked else None,
        )

    def copied(self) -> Objective:
        """Another module with the same parameters and buffers."""
        tensors = [*self.objective.parameters(), *self.objective.buffers()]
        try:
            return copy.deepcopy(self.objective, {id(tensor): tensor for tensor in tensors})
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the user's own classes
            raise TraceError(
                f"{type(self.built.module).__name__} cannot be copied: {error}",
                "each recipe runs a copy of the module, so copy.deepcopy must be able to copy it",
            ) from error

    def held_bytes(self) -> int:
        """Parameters, buffers and the state of the optimizer."""
        states = [one for one in self.optimizer.state.values() if isinstance(one, Mapping)] if self.optimizer is not None else []
        moments = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        tensors = chain(self.objective.parameters(), self.objective.buffers(), moments)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Objective(nn.Module):
    """A module and its loss: the factory's own, the module's own, or the mean of the squares of all float outputs."""

    def __init__(self, built: Built) -> None:
        super().__init__()
        self.module, self.given = built.module, built.loss
        self.squares = False

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = self.module(*args, **kwargs)
        loss = self.given(output) if self.given is not None else _squares(output) if self.squares else own_loss(output)
        return scalar(loss).reshape(())

    def compiled(self) -> nn.Module:
        """Compiled as users do it: a module that computes its own loss is compiled alone, any other together with its loss."""
        if self.given is not None or self.squares:
            return compiled_module(self)
        self.module = compiled_module(self.module)
        return self

    def try_once(self, built: Built) -> None:
        """A first call, which shows whether the module has a loss of its own."""
        output = built.module(*built.args, **built.kwargs)
        self.squares = self.given is None and own_loss(output) is None


def _squares(output: Any) -> torch.Tensor:
    learns = torch.is_grad_enabled()
    floats = [tensor for tensor in tensors_in(output) if tensor.is_floating_point() and (tensor.requires_grad or not learns)]
    if not floats:
        raise TraceError(
            "the module returns no float tensor to compute a loss from",
            "return (module, inputs, loss) from the function, where loss(output) takes the output of the module",
        )
    return torch.stack([tensor.float().square().mean() for tensor in floats]).sum()


def _in_precision(built: Built, precision: torch.dtype) -> tuple[Built, bool]:
    """A module whose parameters are all FP32 is trained in `precision`, and its FP32 inputs with it; any other stays as it is."""
    formats = {parameter.dtype for parameter in built.module.parameters() if parameter.is_floating_point()}
    if formats != {torch.float32} or precision == torch.float32:
        return built, False

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(precision) if tensor.dtype == torch.float32 else tensor

    inputs = {"args": with_tensors(built.args, cast), "kwargs": with_tensors(built.kwargs, cast)}
    module = built.module._apply(lambda tensor: tensor.to(precision) if tensor.is_floating_point() else tensor)
    return replace(built, module=module, **inputs), True  # unlike module.to, this keeps complex tensors


def _optimizer(trained: list[nn.Parameter], name: str) -> torch.optim.Optimizer | None:
    if name == "none":
        return None
    optimizer_class, settings = OPTIMIZERS[name]
    optimizer: torch.optim.Optimizer = optimizer_class(trained, **settings, fused=trained[0].is_cuda)
    return optimizer


class ModuleStep:
    """One optimizer step of a live module in one recipe, to `run` repeatedly."""

    def __init__(self, live: LiveModule, kit: Kit, accumulation: int = 1) -> None:
        self.live, self.kit, self._accumulation = live, kit, accumulation
        self.optimizer = live.optimizer  # which all recipes share
        objective = live.copied()
        self.conversion = decide(live.linears, live.head, kit) if kit.recipe.quantizes else {}  # why not, by path
        converted = [path for path, reason in self.conversion.items() if not reason]
        if converted:
            kit.convert(objective, [f"module.{path}" for path in converted])
        elif kit.recipe.quantizes:
            reason = next(iter(self.conversion.values()))
            raise TraceError(f"none of its {len(self.conversion)} linears can run in {kit.recipe.name}: {reason}")
        for path in live.layers:
            parent, _, name = path.rpartition(".")
            holder = objective.module.get_submodule(parent)
            setattr(holder, name, kit.compile(holder.get_submodule(name)))
        self._parameters = [parameter for parameter in objective.parameters() if parameter.requires_grad]
        whole = kit.compiled == "whole" or (kit.compiled == "layers" and not live.layers)
        self._objective = objective.compiled() if whole else objective

    @property
    def mixer_kernels(self) -> KernelSources | None:
        """Where the functions of its mixers come from; None if it has none."""
        kernels = mixers(self.live.built.module, compiled=self.kit.compiled != "none")
        return kernels if kernels.sources else None

    def _forward(self) -> torch.Tensor:
        with self.kit.autocast():
            loss: torch.Tensor = self._objective(*self.live.built.args, **self.live.built.kwargs)
        return loss

    def run(self) -> None:
        """All micro-batches, forward and backward, then the optimizer."""
        for phase in self.phases():
            phase()

    def phases(self) -> Iterator[Callable[[], object]]:
        """What a step does, one after the other: forward and backward of every micro-batch, and the optimizer."""
        losses: list[torch.Tensor] = []
        for _ in range(self._accumulation):
            yield lambda: losses.append(self._trained_loss())
            yield lambda: losses.pop().backward()
        yield self._update

    def _trained_loss(self) -> torch.Tensor:
        mark_step("model", "forward")
        loss = self._forward()
        if not loss.requires_grad:
            raise TraceError(
                "the loss does not require a gradient: backward has nothing to compute",
                "compute it from the outputs, without torch.no_grad() and .detach()",
            )
        return loss

    def _update(self) -> None:
        mark_step("optimizer")
        if self.optimizer is not None:
            self.optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def loss(self) -> float:
        """One forward pass, to check that the loss is finite. With gradients: without, it would be compiled again."""
        loss = float(self._forward().detach())
        if not math.isfinite(loss):
            half = any(parameter.dtype == torch.float16 for parameter in self._parameters)
            raise ArithmeticError(f"the loss is {loss}" + (HALF if half else ""))
        return loss


def built_notes(live: LiveModule, compiled: str) -> list[Note]:
    """Notes on the module itself, before any recipe."""
    weights, name = expert_weights(live.built.module), type(live.built.module).__name__
    notes: dict[str, tuple[bool, dict[str, Any]]] = {
        "loss-of-squares": (live.objective.squares, {}),
        "module-cast": (live.cast, {}),
        "no-layers-to-compile": (compiled == "layers" and not live.layers, {"module": name}),
        "experts-not-converted": (weights > 0, {"count": weights}),
        "attention-mask-explicit": (compiled == "whole" and live.masked is False and _masks_when_compiled(live), {}),
    }
    return [(code, facts) for code, (applies, facts) in notes.items() if applies]


def _masks_when_compiled(live: LiveModule) -> bool:
    """Whether transformers builds masks while it is compiled: older versions always do, newer ones with PyTorch before 2.14.

    Source: `_ignore_causal_mask_sdpa` of transformers/masking_utils.py in 5.17 and 5.22, which refers to pytorch#176499.
    """
    if not any(type(part).__module__.startswith("transformers.models.") for part in live.built.module.modules()):
        return False
    version = tuple(int(number) for number in torch.__version__.split(".")[:2])
    decides = getattr(sys.modules.get("transformers.masking_utils"), "_ignore_causal_mask_sdpa", None)
    newer = decides is not None and "is_torchdynamo_exporting" in decides.__code__.co_names
    return version < (2, 14) or not newer


def linear_notes(steps: Iterable[object]) -> Iterator[Note]:
    """Which linears run in low precision: once for all recipes that convert the same ones."""
    quantizing = (step for step in steps if isinstance(step, ModuleStep) and step.kit.recipe.quantizes)
    of_recipe = grouped((step.kit.recipe.name, step) for step in quantizing)
    alike = grouped((tuple(map(tuple, summary(deepest.conversion))), name) for name, (deepest, *_) in of_recipe.items())
    for (converted, kept), recipes in alike.items():
        yield "linears-converted", {"recipes": recipes, "converted": list(converted)}
        if kept:
            yield "linears-kept", {"recipes": recipes, "kept": list(kept)}


def live_huggingface(plan: ModulePlan, device: str, precision: torch.dtype) -> Built:
    """The model of a config with its first `plan.depth` layers (0: all), and random inputs with labels."""
    assert plan.config is not None
    config = truncated(plan.config, plan.depth) if plan.depth else dict(plan.config)
    hide_wrong_kernels()
    with naming(BUILDING):
        model = huggingface_model(config, device, precision)
    if plan.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = training_inputs(model, plan.micro_batch_size, plan.sequence_length or None, device, precision)
    return as_built(model, inputs)


def hide_wrong_kernels() -> None:
    """Where flash-linear-attention would refuse the backward pass, make transformers fall back to its own code."""
    if gated_backward_is_wrong():
        sys.modules["fla"] = None  # type: ignore[assignment]


@cache
def compiled_as_exported() -> bool:
    """Whether code that is compiled is told that it is being exported: PyTorch 2.11 does so, 2.13 does not."""

    def asked(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if torch.compiler.is_exporting() else x

    return bool(torch.compile(asked, backend="eager")(torch.zeros(1)))


def mixers(model: nn.Module, *, compiled: bool = False) -> KernelSources:
    """Which implementation each function of its mixers has: the package that it comes from, or PyTorch code of transformers.

    transformers looks for flash-linear-attention, mamba-ssm and causal-conv1d when it imports a model, and falls back to
    functions of its own. Kernels of the hub are used only on request. Older versions keep the chosen function as an attribute of
    the mixer, newer ones (5.22) inside a wrapper.
    """
    files = {type(part).__module__ for part in model.modules()}
    functions: dict[str, Any] = {}
    for file in sorted(name for name in files if name.startswith("transformers.models.")):
        own = {name: value for name, value in vars(sys.modules[file]).items() if inspect.isfunction(value)}
        functions |= {str(_inside(value).get("func_name", name)).removeprefix("torch_"): value for name, value in own.items()}
    for part in model.modules():
        functions |= {name: value for name, value in vars(part).items() if inspect.isfunction(value)}
    names = [name for name in sorted(functions) if name.startswith(MIXERS) and not any(word in name for word in DECODING)]
    sources = {name: _package(functions[name]) for name in names}
    hidden = sys.modules.get("fla", sys) is None
    refused = {name: WRONG_GRADIENTS for name in sources if hidden and sources[name] == TRANSFORMERS}
    # those where transformers decides at every call which implementation runs
    wrapped = [name for name in names if any(NOT_WHEN_EXPORTED in _inside(one) for one in _unwrapped(functions[name]))]
    unused = [name for name in wrapped if compiled and sources[name] != TRANSFORMERS]
    if unused and compiled_as_exported():
        sources |= dict.fromkeys(unused, TRANSFORMERS)
        refused |= dict.fromkeys(unused, EXPORTED)
    return KernelSources(sources=sources, refused=refused)


def _unwrapped(function: Any) -> Iterator[Any]:
    """A function and, if it is a wrapper, what is inside of it, down to the implementation."""
    while callable(function):
        yield function
        inside = (value for name, value in _inside(function).items() if name in WRAPPED and value is not function)
        function = next(inside, None)


def _inside(function: Any) -> dict[str, Any]:
    """What a wrapper holds."""
    if not inspect.isfunction(function):
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def _package(function: Any) -> str:
    """Where a function comes from; of a wrapper of transformers, the implementation inside it."""
    *_, implementation = _unwrapped(function)
    package = str(getattr(implementation, "__module__", None)).partition(".")[0]
    return PACKAGES.get(package, package)
