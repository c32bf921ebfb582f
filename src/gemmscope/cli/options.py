"""Options that every command takes the same way: which model, which batch, how it is split.

`takes(ModelOptions, RunOptions)` spreads the fields of these classes over a command's signature, so that a command names its
own options only and gets the rest as filled-in objects. `options.toml` has the help of every option.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from gemmscope import commands
from gemmscope.cli.complete import completion
from gemmscope.cli.describe import metavar_of, settings_of
from gemmscope.errors import UserError, option, shown
from gemmscope.options import values as sizes

if TYPE_CHECKING:
    from gemmscope.model.spec import ModelSource

Result = TypeVar("Result")


def _parser(read: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    """A parser of option values that reports invalid text as typer does."""

    def parse(text: Any) -> Any:
        try:
            return read(text) if isinstance(text, str) else text  # typer also passes the default
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    parse.__name__ = name  # typer shows it where an option has no metavar
    return parse


def number(text: str) -> float:
    """A number, as it is typed."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{shown(text)} is not a number") from None


PARSERS = {name: _parser(getattr(sizes, name), name) for name in ("size", "token_count", "percentage")}
TYPES: dict[type, tuple[Callable[[str], Any] | None, str]] = {
    bool: (None, ""),  # before int, which it is a subclass of
    int: (PARSERS["size"], "N"),
    float: (_parser(number, "number"), "X"),
}


def takes(*groups: type) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorate a command `f(a: GroupA, b: GroupB, own: …)` so that typer sees the groups' fields as options."""

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        own = list(inspect.signature(command).parameters.values())[len(groups) :]
        parameters = [parameter for group in groups for parameter in inspect.signature(group).parameters.values()] + own
        hints = get_type_hints(command, include_extras=True)
        for group in groups:
            hints |= get_type_hints(group, include_extras=True)
        name = command.__module__.rpartition(".")[2].replace("_", "-")
        annotations = {parameter.name: _described(parameter.name, hints[parameter.name], name) for parameter in parameters}

        @functools.wraps(command)
        def run(**values: Any) -> Result:
            options = [group(**{field.name: values.pop(field.name) for field in fields(group)}) for group in groups]
            return command(*options, **values)

        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotations[parameter.name])
                for parameter in parameters
            ]
        )
        run.__annotations__ = annotations
        del run.__wrapped__  # or the original signature would be read through it
        return run

    return decorate


def _described(name: str, hint: Any, command: str) -> Any:
    """The type of an option, annotated with its settings in `options.toml`."""
    settings = settings_of(name, command)
    types = get_args(hint) or (hint,)
    parse, metavar = next((TYPES[kind] for kind in TYPES if kind in types), (None, None))
    parse = PARSERS[settings["parse"]] if "parse" in settings else parse
    facts = {
        "help": settings["help"],
        "metavar": metavar_of(settings) or metavar,
        "parser": parse,
        "autocompletion": completion(settings),
    }
    if settings.get("argument"):
        return Annotated[hint, typer.Argument(**facts)]
    flags = settings.get("flags", [f"--{name.replace('_', '-')}"])
    return Annotated[hint, typer.Option(*flags, *settings.get("aliases", ()), hidden=settings.get("hidden", False), **facts)]


@dataclass(frozen=True)
class ModelOptions:
    """The ways of naming a model."""

    config: str | None = None
    preset: str | None = None
    module: str | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_hidden_layers: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    gated_mlp: bool = False
    mtp_layers: int | None = None

    def given(self) -> dict[str, Any]:
        """The options that were given."""
        return {name: value for name, value in vars(self).items() if value is not None and value is not False}

    def files(self) -> list[str]:
        """The files that describe the model: never to be overwritten."""
        module = [self.module.rpartition(":")[0]] if self.module is not None else []
        return [*([self.config, f"{self.config}/config.json"] if self.config is not None else []), *module]

    def load(self) -> ModelSource:
        """The model that was named."""
        return commands.load_model(**self.given())


@dataclass(frozen=True)
class RunOptions:
    """Batch and parallelism. Options that are not given come from the model's file, if it has them."""

    micro_batch_size: int | None = None
    sequence_length: int | None = None
    tp: int | None = None
    sequence_parallel: bool | None = None
    cp: int | None = None
    pp: int | None = None
    pp_stage: int | None = None
    pp_layers: str | None = None
    ep: int | None = None
    etp: int | None = None
    imbalance: float | None = None
    gradient_accumulation: int | None = None
    recompute: str | None = None
    separate_projections: bool | None = None

    def given(self) -> dict[str, Any]:
        """The options that were given."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        return values | ({"pp_layers": _numbers(values["pp_layers"])} if "pp_layers" in values else {})

    def of(self, source: ModelSource, **more: Any) -> commands.ModelRun:
        """How this model is run: these options first, then what the model's file says."""
        return commands.model_run(source, **self.given(), **more)


@dataclass(frozen=True)
class ClusterOptions(RunOptions):
    """The options of a run, and what happens between replicas of the model, for commands that know all GPUs."""

    vp: int | None = None
    dp: int | None = None
    zero: int | None = None
    fsdp: int | None = None
    global_batch: int | None = None
    optimizer_state: str | None = None
    tp_overlap: bool | None = None
    dp_overlap: bool | None = None
    ep_overlap: bool | None = None
    cuda_graphs: bool | None = None
    offloaded_layers: int | None = None


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sizes.size(part) for part in text.split(","))
    except ValueError:
        raise UserError(
            f"{option('pp_layers')} must be a list of whole numbers, got {shown(text)}",
            f"for example {option('pp_layers', '16,15,15,15')}",
        ) from None
