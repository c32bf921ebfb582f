"""Errors of the user's module: one line that says where it failed, and what to do. Imports torch: for workers only."""

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gemmscope.toml import load_data
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


@cache
def _known() -> list[dict[str, Any]]:
    """The table of what to do."""
    return list(load_data("gemmscope.workload", "failures.toml")["advice"])


def advice(error: BaseException) -> str:
    """What to do about an exception of the user's module; empty where there is nothing to say."""
    if isinstance(error, ImportError) and (missing := getattr(error, "name", None)):
        return f"pip install {missing.split('.')[0]}, or build the module without it"
    kinds = {kind.__name__ for kind in type(error).__mro__}
    possible = [one for one in _known() if one.get("only", "Exception") in kinds]
    fitting = (one["text"] for one in possible if kinds & {*one.get("errors", ())} or _says(error, one))
    return str(next(fitting, ""))


def fails_on_meta(error: TraceError) -> bool:
    """Whether an operator failed because tensors on the meta device have no values, or because it has no kernel for them."""
    cause = error.__cause__
    return cause is not None and any(one.get("on_meta") and _says(cause, one) for one in _known())


def _says(error: BaseException, known: Mapping[str, Any]) -> bool:
    return any(phrase in str(error) for phrase in known["phrases"])


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
