"""Loads the user's module: `file.py:factory`, with its inputs and its loss.

Only worker processes import this file, because it imports torch. The trace (`trace_worker.py`) and the measured step both call
`load_factory`, so a factory means the same to both.

The factory returns one of

* `module`: it is called with token ids of shape (micro-batch, sequence);
* `(module, inputs)`: a tensor, a tuple of positional arguments, or a dict of arguments by name;
* `(module, inputs, loss)`: `loss(output)` turns what the module returns into a scalar.

It may take `micro_batch_size` and `sequence_length`, and gets each one that the user gave.
"""

import contextlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode

from gemmscope.errors import option
from gemmscope.workload.confine import limited_time
from gemmscope.workload.failures import TraceError, naming
from gemmscope.workload.module_parts import named_tensors, tensors_in, with_tensors

SIZES = ("micro_batch_size", "sequence_length")
RETURNS = "it must return an nn.Module, (module, inputs) or (module, inputs, loss)"
EXAMPLE = "for example: return MyModel(), (torch.zeros(8, 3, 224, 224),)"
PACKAGE = "gemmscope_module_folder"  # what the folder of a file with relative imports is imported as
MOST_INPUTS = 4  # that are written out


_RELATIVE = re.compile(r"^\s*from\s+\.", re.MULTILINE)


@dataclass(frozen=True)
class Built:
    """What a factory built, on the requested device. Call it as `module(*args, **kwargs)`.

    `own_inputs`: the factory brought its inputs; else they are token ids. `taken`: which of `SIZES` were given and accepted;
    `ignored`: which were given although it brings its inputs, and not accepted.
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Any] | None = None
    own_inputs: bool = False
    taken: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()

    @property
    def inputs(self) -> list[tuple[str, torch.Tensor]]:
        """The input tensors, the first one first, each with its name ("" for positional ones), also those inside other inputs."""
        return [*named_tensors(self.args), *named_tensors(self.kwargs)]

    @property
    def samples(self) -> int | None:
        """Samples of a batch: the first size of the first input. None without a tensor that has sizes."""
        return next((value.shape[0] for _, value in self.inputs if value.dim()), None)

    def described_inputs(self) -> str:
        """The sizes of the inputs: "8 x 3 x 224 x 224", "input_ids 8 x 512, decoder_input_ids 8 x 128"."""
        texts = [(name, " x ".join(map(str, value.shape)) or "scalar") for name, value in self.inputs if name != "labels"]
        named = [f"{name} {text}" if name else text for name, text in texts]
        return ", ".join(named[:MOST_INPUTS]) + (", …" if len(named) > MOST_INPUTS else "") or "no tensors"


@limited_time()
def load_factory(
    reference: str, micro_batch: int | None, sequence: int | None, device: str, built_on: str | None = None
) -> Built:
    """Call `factory` of `file.py:factory` under this device, or under `built_on`, and move what it returns to the device.

    A `TraceError` says why that failed, and what to do.
    """
    path_text, _, name = reference.rpartition(":")
    path = Path(path_text)
    if not path.is_file():
        raise TraceError(f"there is no file {path_text!r}")
    folder, python_module = path.resolve().parent, _import(path)
    factory = getattr(python_module, name, None)
    if not callable(factory):
        own = {key for key, value in vars(python_module).items() if getattr(value, "__module__", None) == python_module.__name__}
        callables = ", ".join(sorted(key for key in own if callable(getattr(python_module, key))))
        raise TraceError(f"{path} has no function {name!r}; it defines {callables or 'no function'}")
    given = {key: value for key, value in zip(SIZES, (micro_batch, sequence), strict=True) if value is not None}
    accepted = _accepted(factory, name, given)
    stay = _OnMeta() if (built_on or device) == "meta" else contextlib.nullcontext()
    with naming(f"{name}()", folder), torch.device(built_on or device), stay:
        result = factory(**accepted)
    module, inputs, loss = _unpacked(result, name)
    with naming(f"moving what {name}() returned to the device {device}", folder):
        module = _moved(module, device).train()
        args, kwargs = _arguments(inputs, device)
    if inputs is not None:
        ignored = tuple(size for size in given if size not in accepted)
        return Built(module, args, kwargs, loss, own_inputs=True, taken=frozenset(accepted), ignored=ignored)
    if micro_batch is None or sequence is None:
        missing = " and ".join(option(key) for key in SIZES if key not in given)
        raise TraceError(
            f"{name}() returned no inputs, so its module would be called with token ids, and {missing} is not given",
            f"return (module, inputs), or add {' '.join(option(key, 'N') for key in SIZES if key not in given)}",
        )
    return Built(module, (_token_ids(module, micro_batch, sequence, device),), {}, loss, taken=frozenset(accepted))


def loss_of(built: Built, output: Any) -> torch.Tensor | None:
    """The factory's own loss of an output, or the one that the module itself computed; None where there is neither.

    A `TraceError` where the loss is not a scalar that backward can start from.
    """
    if built.loss is None:
        own = own_loss(output)
        return own if isinstance(own, torch.Tensor) and own.requires_grad and own.numel() == 1 else None
    value = scalar(built.loss(output))
    if not value.requires_grad:
        raise TraceError(
            "the loss does not depend on a parameter that requires a gradient",
            "compute it from the module's output, without .detach(), .item() or torch.no_grad()",
        )
    return value


def scalar(loss: Any) -> torch.Tensor:
    """The loss, or a `TraceError` where it is not one number."""
    if not isinstance(loss, torch.Tensor):
        raise TraceError(f"the loss is of type {type(loss).__name__}, not a tensor", "return a scalar tensor from the loss")
    if loss.numel() != 1:
        shape = " x ".join(map(str, loss.shape))
        raise TraceError(f"the loss is a tensor of shape {shape}, not a scalar", "end it with .mean() or .sum()")
    return loss


def own_loss(output: Any) -> Any:
    """The loss that a module computed itself: its output's `loss`, or the only scalar that it returns; None without one."""
    if isinstance(output, Mapping):
        return output.get("loss")
    if (named := getattr(output, "loss", None)) is not None:
        return named
    returned = output if isinstance(output, (tuple, list)) else (output,)
    scalars = [value for value in returned if isinstance(value, torch.Tensor) and not value.dim() and value.is_floating_point()]
    return scalars[0] if len(scalars) == 1 else None


def outputs_of(output: Any) -> list[torch.Tensor]:
    """The tensors from which a loss would be computed: the logits if there are any, else every float tensor with a gradient.

    A `TraceError` where there is none.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    results = [logits] if isinstance(logits, torch.Tensor) else tensors_in(output)
    targets = [tensor for tensor in results if tensor.is_floating_point() and tensor.requires_grad]
    if not targets:
        raise TraceError(
            "nothing to trace backward: the forward pass returned no tensor that requires a gradient",
            f"it returned {type(output).__name__}; return a tensor that depends on a parameter with requires_grad=True",
        )
    return targets


def move_to_meta(module: torch.nn.Module) -> None:
    """Drop the storage of a module that was built on another device. Unlike `module.to`, this keeps tied parameters tied."""
    moved: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in moved:
                    empty = tensor.to("meta")
                    is_parameter = tensors is part._parameters
                    moved[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                tensors[name] = moved.get(id(tensor))


def know_meta_tensors() -> None:
    """Make transformers treat meta tensors like fake tensors, whose values it does not read.

    Without this, its mask builders call `mask.all()` on a meta tensor, which raises. Positions on the meta device are those of
    whole sequences, not of packed ones: so attention is called as in training, with `is_causal` where possible.
    """
    from transformers.utils import import_utils

    _on_meta(import_utils, "is_fake_tensor", answer=True)
    with contextlib.suppress(ImportError):  # older versions have no such file
        from transformers import masking_utils

        _on_meta(masking_utils, "find_packed_sequence_indices", answer=None)


def _on_meta(module: Any, name: str, answer: Any) -> None:
    """Make a function of one tensor return this answer for a meta tensor."""
    original = getattr(module, name, None)
    if original is None or hasattr(original, "before_gemmscope"):
        return

    def replaced(tensor: Any) -> Any:
        is_meta = isinstance(tensor, torch.Tensor) and tensor.device.type == "meta"
        return answer if is_meta else original(tensor)

    replaced.before_gemmscope = original  # type: ignore[attr-defined]
    setattr(module, name, replaced)


class _OnMeta(TorchFunctionMode):  # type: ignore[misc]
    """A factory that moves its module or its inputs to another device keeps them on the meta device."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0]
        if function is torch.Tensor.to:
            args = (args[0], *("meta" if isinstance(value, (str, torch.device)) else value for value in args[1:]))
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def _import(path: Path) -> ModuleType:
    """The user's file as a module, which can import what lies beside it, by name or relative to it (`from .layers import`)."""
    folder = path.resolve().parent
    sys.path.append(str(folder))  # last, because a file there may have the name of a module that torch imports
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    module_name = f"{path.stem}_traced" if taken else path.stem
    with naming(f"importing {path}", folder):
        if _RELATIVE.search(path.read_text(encoding="utf-8", errors="replace")):
            _imported(PACKAGE, folder / "__init__.py", [str(folder)])
            module_name = f"{PACKAGE}.{module_name}"
        return _imported(module_name, path)


def _imported(name: str, path: Path, folders: list[str] | None = None) -> ModuleType:
    """A file as a module of this name, or a package whose modules are in these folders; without the file, it is empty."""
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise TraceError(f"{str(path)!r} is not a Python file")
    sys.modules[name] = python_module = importlib.util.module_from_spec(spec)
    if path.is_file():
        spec.loader.exec_module(python_module)
    return python_module


def _unpacked(result: Any, name: str) -> tuple[torch.nn.Module, Any, Callable[[Any], Any] | None]:
    """Module, inputs (None: none) and loss (None: none) of what a factory returned."""
    parts = result if isinstance(result, tuple) else (result,)
    if len(parts) > 3:
        raise TraceError(f"{name}() returned a tuple of {len(parts)}; {RETURNS}", EXAMPLE)
    module, inputs, loss = (*parts, None, None)[:3]
    if isinstance(module, type) and issubclass(module, torch.nn.Module):
        raise TraceError(
            f"{name}() returned the class {module.__name__}, not a module; {RETURNS}", f"return {module.__name__}(…)"
        )
    if not isinstance(module, torch.nn.Module):
        raise TraceError(f"{name}() returned {type(module).__name__}; {RETURNS}", EXAMPLE)
    if any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters()):
        raise TraceError(
            f"{name}() returned a module with lazy parameters, whose sizes are not known yet",
            "call the module once with its inputs before you return it",
        )
    if loss is not None and not callable(loss):
        raise TraceError(
            f"the loss that {name}() returned is {type(loss).__name__}, not a function",
            "it is called as loss(output), with the output of the module",
        )
    return module, inputs, loss


def _moved(module: torch.nn.Module, device: str) -> torch.nn.Module:
    if device != "meta":
        return module.to(device)
    if "transformers" in sys.modules:
        know_meta_tensors()
    move_to_meta(module)
    return module


def _arguments(inputs: Any, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    moved = partial(with_tensors, change=lambda tensor: tensor.to(device))
    if isinstance(inputs, Mapping):
        return (), {str(key): moved(value) for key, value in inputs.items()}
    positional = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    return tuple(map(moved, positional)), {}


def _token_ids(module: torch.nn.Module, micro_batch: int, sequence: int, device: str) -> torch.Tensor:
    """Random ids that the first embedding of the module knows."""
    known = next((part.num_embeddings for part in module.modules() if isinstance(part, torch.nn.Embedding)), 1)
    return torch.randint(known, (micro_batch, sequence), device=device)


def _accepted(factory: Any, name: str, offered: dict[str, int]) -> dict[str, int]:
    """The sizes that a factory takes. A `TraceError` where it needs an argument that it does not get."""
    try:
        wanted = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {}
    kinds = [parameter.kind for parameter in wanted.values()]
    accepted = {key: value for key, value in offered.items() if key in wanted or inspect.Parameter.VAR_KEYWORD in kinds}
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = [key for key, of in wanted.items() if of.default is of.empty and of.kind not in optional]
    if missing := [key for key in required if key not in accepted]:
        sizes = " ".join(option(key, "N") for key in missing if key in SIZES)
        others = f"only {' and '.join(SIZES)} are passed: give the others a default value" if {*missing} - {*SIZES} else ""
        raise TraceError(
            f"{name}() needs {' and '.join(missing)}", "; ".join(filter(None, (others, f"add {sizes}" if sizes else "")))
        )
    return accepted
