"""What every function of the Python API does with its keywords: rejects unknown ones, reads them, and writes the call as text.

The keywords of a function are the options of the classes that `takes` names. They are written out in its signature, so that
editors complete them and mypy checks them: `make api` writes them, below the comment `# options`, and their help into the
docstring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from gemmscope import commands
from gemmscope.errors import UserError, no_option
from gemmscope.model.spec import RUN_SETTINGS
from gemmscope.options.declare import Declared, Options, from_python, options_of, read_value
from gemmscope.options.job import ModelOptions, RunOptions
from gemmscope.results.base import Result

PathOrResult = str | Path | Result
Names = str | Sequence[str]
Axis = Sequence[int | str] | None
"""The values of a size that a sweep varies; None: it does not vary."""

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")
Group = TypeVar("Group", bound=Options)

OF_A_RUN = (*RUN_SETTINGS, "global_batch", "fsdp")
NOT_IN_CALL = ("self", "deliver", "stream")
SPECS: dict[str, Keywords] = {}
"""The keywords of every function, for `make api` and for the tests."""


class Keywords:
    """The options that a function takes. `without`: those of its classes that it does not take; `axes`: sizes that can vary;
    `one_run`: False for a sweep, which does not take options of a single run."""

    def __init__(self, groups: Sequence[type[Options]], without: Sequence[str], axes: Sequence[str], *, one_run: bool) -> None:
        self.groups, self.without, self.axes, self.one_run = groups, without, axes, one_run

    def options(self) -> dict[str, Declared]:
        """The options by their names in Python."""
        return {
            declared.keyword: declared
            for declared in (declared for declared in options_of(*self.groups).values() if declared.option.in_python)
            if declared.keyword not in self.without and (self.one_run or declared.option.in_sweeps)
        }


def takes(
    *groups: type[Options], without: Sequence[str] = (), axes: Sequence[str] = (), one_run: bool = True
) -> Callable[[Callable[Arguments, Returned]], Callable[Arguments, Returned]]:
    """For a function whose keywords are the options of these classes: any other keyword is one `UserError` that lists them."""

    def decorate(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
        known = [
            one.name
            for one in signature(function).parameters.values()
            if one.name != "self" and one.kind is not one.VAR_POSITIONAL
        ]
        SPECS[function.__qualname__] = Keywords(groups, without, axes, one_run=one_run)

        @wraps(function)
        def call(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Returned:
            for name in keywords:
                if name not in known:
                    raise _unknown(function.__name__, name, known)
            try:
                return function(*arguments, **keywords)
            except UserError as error:
                error.name_keywords(
                    {declared.name: keyword for keyword, declared in SPECS[function.__qualname__].options().items()}
                )
                raise

        return call

    return decorate


def _unknown(function: str, name: str, known: Sequence[str]) -> UserError:
    """The error for a keyword that a function does not have."""
    if name == "gpus" and "gpu" in known:
        return UserError(
            f"{function} takes the names of GPUs without a keyword", f'{function}("h200"); gpu_count=8 for their number'
        )
    if name in OF_A_RUN:
        return UserError(f"{name} is a run setting, not an option of {function}", f"on(..., {name}=...).{function}(...)")
    return no_option(function, name, known)


def prepared(
    call: str, given: Mapping[str, Any], group: type[Group], positional: Sequence[str] = (), **more: Any
) -> tuple[Group, commands.RunContext]:
    """The options that were given, and what the command is run with. `call`: the name of the function; `positional`: arguments
    that are written without their names; `more`: options that are given in another way."""
    return from_python(group, {**given, **more}), context(call, given, options_of(group), positional)


def context(
    call: str, given: Mapping[str, Any], options: Mapping[str, Declared] = {}, positional: Sequence[str] = ()
) -> commands.RunContext:
    """What the command is run with: the call as text, progress on standard error."""
    defaults = {declared.keyword: declared.default for declared in options.values()}
    return commands.RunContext(
        as_text(call, given, defaults, positional), commands.Console(), given.get("deliver"), given.get("stream")
    )


def as_text(call: str, given: Mapping[str, Any], defaults: Mapping[str, Any] = {}, positional: Sequence[str] = ()) -> str:
    """A Python call as text, for the `command` of a result: options that were not given are left out.

    >>> as_text("job.forecast", {"gpus": ("b300", "h200"), "mix": None, "state": "burst"}, {"state": "sustained"}, ["gpus"])
    "job.forecast('b300', 'h200', state='burst')"
    """
    first = [value for name in positional for value in (given[name] if isinstance(given[name], tuple) else [given[name]])]
    texts = [repr(str(value) if isinstance(value, Path) else value) for value in first if value is not None]
    named = {name: value for name, value in given.items() if name not in (*positional, *NOT_IN_CALL)}
    written = [
        f"{name}={value!r}" for name, value in named.items() if value not in (None, False, ()) and value != defaults.get(name)
    ]
    return f"{call}({', '.join([*texts, *written])})"


def axes_of(given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """What a sweep varies, with its values.

    >>> axes_of({"tp": None, "cp": [1, 2], "sequence_length": ["2k", "4k"], "gpus": "all"}, ["tp", "cp", "sequence_length"])
    {'cp': [1, 2], 'sequence_length': [2048, 4096]}
    """
    size = options_of(RunOptions, ModelOptions)["tp"]
    return {
        name: [read_value(size, value) for value in values] if isinstance(values, (list, tuple)) else values
        for name in names
        if (values := given[name]) is not None
    }
