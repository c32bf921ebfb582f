"""Errors of the user's module: one line that says where it failed, and what to do. Imports torch: for workers only."""

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from gemmscope.workload.confine import NetworkError

LONGEST_REASON = 300


class TraceError(Exception):
    """A problem that the user can solve; its text and its hint are shown unchanged."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@contextlib.contextmanager
def naming(what: str, folder: Path | None = None) -> Iterator[None]:
    """Turn any exception into one line that says where it came from: the user's own line, if there is one."""
    try:
        yield
    except TraceError:
        raise
    except (Exception, SystemExit) as error:
        if _needed_network(error):
            problem = "the config refers to a file of the hub (a backbone, for example), and configs are traced without network"
            raise TraceError(f"{what}: {problem}") from error
        raise TraceError(
            f"{what} raised {type(error).__name__}: {reason(error)}{_place(error, folder)}", advice(error)
        ) from error


# Phrases in the error messages of modules that run without values; `advice` says what to do about each.
_NEEDS_VALUES = (
    "meta tensor", "_local_scalar_dense", "nonzero", "register_meta", "aten::equal", "aten::is_nonzero", "aten::masked_select",
    "aten::unique", "data-dependent", "Could not run 'aten::", "not supported on meta",
    "CPU int64 tensor",
)  # fmt: skip


_OTHER_ARGUMENTS = ("positional argument", "unexpected keyword argument")
_NO_META_KERNEL = ("no fake impl", "Meta kernel")
_OTHER_DEVICE = ("is not on the expected device", "to be on the same device")
_NEEDS_CUDA = ("compiled with CUDA", "_cuda_", "No CUDA GPUs", "NVIDIA driver", "CUDA-capable")


def advice(error: BaseException) -> str:
    """What to do about an exception of the user's module; empty where there is nothing to say."""
    if isinstance(error, ImportError) and (missing := getattr(error, "name", None)):
        return f"pip install {missing.split('.')[0]}, or build the module without it"
    text = str(error)
    if isinstance(error, TypeError) and any(phrase in text for phrase in _OTHER_ARGUMENTS):
        return (
            "the module is called as module(*inputs), or module(**inputs) if they are a dict, and a loss as loss(output); "
            "to pass a list as one argument, return (module, ([...],))"
        )
    if "relative import" in text:
        return "import what is above the folder of the file by its full name, and add where it is to PYTHONPATH"
    if isinstance(error, ImportError) or "pip install" in text or "not installed" in text:
        return "install what it needs in gemmscope's environment, or build the module without it"
    if any(phrase in text for phrase in _NEEDS_CUDA):
        return "build the module without naming a device: it is moved to the one that it runs on"
    if any(phrase in text for phrase in _OTHER_DEVICE):
        return (
            "a tensor that the module or the loss creates is on another device than the inputs: create it there, "
            "for example with device=x.device, or in the function that returns the inputs"
        )
    if any(phrase in text for phrase in _NO_META_KERNEL):
        return (
            "the module is traced on the meta device, where this operator cannot run: register a fake implementation "
            "(torch.library.register_fake), or call another operator of the same sizes where `tensor.is_meta`"
        )
    if fails_on_meta(error):
        return (
            "the module is run without values, on the meta device: this line reads one (.item(), nonzero, a mask as an index, "
            "an if on a tensor); move the decision into the module's settings, or skip it with `if tensor.is_meta`"
        )
    return ""


def fails_on_meta(error: BaseException) -> bool:
    """Whether an operator failed because tensors on the meta device have no values, or because it has no kernel for them."""
    return any(phrase in str(error) for phrase in (*_NEEDS_VALUES, *_NO_META_KERNEL))


def _needed_network(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, NetworkError) or type(error).__name__ == "OfflineModeIsEnabled":
            return True
        error = error.__cause__ or error.__context__
    return False


def _place(error: BaseException, folder: Path | None) -> str:
    """Where an exception came from: the last line that ran in `folder`, else in another package's modules."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" (line {error.lineno} of {error.filename})"
    ran = list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in ran if folder is not None and _is_in(Path(frame.filename), folder)]
    frames = own or [frame for frame in ran if not _is_internal(Path(frame.filename))]
    if not frames and any(frame.filename.endswith("autograd/graph.py") for frame in ran):
        return " (in the backward pass)"
    return f" (line {frames[-1].lineno} of {frames[-1].filename})" if frames else ""


def _is_internal(path: Path) -> bool:
    """Whether a file is a part of PyTorch that users do not call by name, or of gemmscope."""
    torch_folder, own_folder = Path(torch.__file__).parent, Path(__file__).parents[1]
    inside = torch_folder in path.parents and ("modules" not in path.parts or path.name == "module.py")
    return inside or own_folder in path.parents


def _is_in(path: Path, folder: Path) -> bool:
    """Whether a file is in a folder or below it, but not in a Python environment inside it."""
    try:
        below = path.resolve().relative_to(folder)
    except (ValueError, OSError):
        return False
    return not {"site-packages", "dist-packages"} & set(below.parts)


def reason(error: BaseException) -> str:
    """The first line of an exception's text, and the next one where the first ends in a colon; never too long."""
    message = str(error.msg if isinstance(error, SyntaxError) else error)
    if "torch.nonzero()" in message:  # PyTorch's message is about its settings
        return "nonzero needs the values of a tensor"
    if "no fake impl" in message:  # what follows is about torch.compile
        message = message.partition(". ")[0]
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [type(error).__name__]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"
