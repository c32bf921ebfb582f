"""Options that every command takes the same way: which model, which batch, how it is split.

`takes(ModelOptions, RunOptions)` spreads the fields of these classes over a command's signature, so that a command names its
own options only and gets the rest as filled-in objects.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from gemmscope import app
from gemmscope.errors import UserError, option

if TYPE_CHECKING:
    from gemmscope.app.model import ModelRun
    from gemmscope.model.source import ModelSource

Result = TypeVar("Result")


def whole_number(text: str) -> int:
    """The value of an option that counts something."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """The value of an option that measures something."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def size(text: str) -> Any:
    """An option that takes a whole number."""
    return typer.Option(help=text, parser=whole_number, metavar="N")


# The cost of a full run, of a step that is measured or forecast.
TOKENS = typer.Option(parser=number, metavar="N", help="Training tokens, to estimate the cost of the full run.")
GPUS = size("GPUs of the full run, for its cost.")


def takes(*groups: type) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorate a command `f(a: GroupA, b: GroupB, own: …)` so that typer sees the groups' fields as options."""

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        parameters: list[inspect.Parameter] = []
        for group in groups:
            hints = get_type_hints(group, include_extras=True)
            for field in fields(group):
                default = inspect.Parameter.empty if field.default is MISSING else field.default
                parameters.append(
                    inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])
                )
        own_hints = get_type_hints(command, include_extras=True)
        own = list(inspect.signature(command).parameters.values())[len(groups) :]
        parameters += [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=own_hints[parameter.name]) for parameter in own
        ]

        @functools.wraps(command)
        def run(**values: Any) -> Result:
            made = [group(**{field.name: values.pop(field.name) for field in fields(group)}) for group in groups]
            return command(*made, **values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        del run.__wrapped__  # or the original signature would be read through it
        return run

    return decorate


@dataclass(frozen=True)
class ModelOptions:
    """The ways of naming a model."""

    config: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|ID",
            help="Hugging Face config.json (file, folder, hub id), Megatron-LM arguments, torchtitan TOML, Megatron-Bridge YAML.",
        ),
    ] = None
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A well-known model; gemmscope shapes --list-presets names them."),
    ] = None
    module: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FACTORY",
            help="Your own nn.Module: a function that returns it, or (module, inputs). Traced with torch.",
        ),
    ] = None
    hidden_size: Annotated[int | None, size("Plain hyperparameters: these four sizes describe the layers.")] = None
    intermediate_size: Annotated[int | None, size("MLP width.")] = None
    num_attention_heads: Annotated[int | None, size("Query heads.")] = None
    num_hidden_layers: Annotated[int | None, size("Layers.")] = None
    num_key_value_heads: Annotated[int | None, size("With the sizes: grouped-query attention. (default: as many as heads)")] = (
        None
    )
    head_dim: Annotated[int | None, size("With the sizes: a head's size. (default: hidden / heads)")] = None
    vocab_size: Annotated[int | None, size("With the sizes: adds embedding, head and loss.")] = None
    gated_mlp: Annotated[
        bool,
        typer.Option("--gated-mlp", help="With the sizes: a gated MLP (SwiGLU) instead of a plain one."),
    ] = False

    def given(self) -> dict[str, Any]:
        """The options that were given."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    def files(self) -> list[str]:
        """The files that describe the model: never to be overwritten."""
        module = [self.module.rpartition(":")[0]] if self.module is not None else []
        return [*([self.config, f"{self.config}/config.json"] if self.config is not None else []), *module]

    def load(self) -> ModelSource:
        """The model that was named."""
        return app.model.load_model(**self.given())


@dataclass(frozen=True)
class RunOptions:
    """Batch and parallelism. What is not typed comes from the model's file, where it says."""

    micro_batch_size: Annotated[int | None, size("Sequences per micro-batch.")] = None
    sequence_length: Annotated[int | None, size("Tokens per sequence.")] = None
    tp: Annotated[int | None, size("Tensor parallel size.")] = None
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel",
            help="Split what stands between blocks over tp too.",
        ),
    ] = None
    cp: Annotated[int | None, size("Context parallel size.")] = None
    pp: Annotated[int | None, size("Pipeline parallel size.")] = None
    pp_stage: Annotated[int | None, size("Stage to show, from 0. (default: the one with most FLOPs)")] = None
    pp_layers: Annotated[str | None, typer.Option(metavar="N,N,…", help="Layers of each stage, where they differ.")] = None
    ep: Annotated[int | None, size("Expert parallel size: ranks that share the experts.")] = None
    etp: Annotated[int | None, size("Tensor parallel size inside experts. (default: tp)")] = None
    imbalance: Annotated[
        float | None,
        typer.Option(help="Busiest expert's load over the average; 1 is balanced.", parser=number, metavar="X"),
    ] = None
    gradient_accumulation: Annotated[int | None, size("Micro-batches per step.")] = None
    recompute: Annotated[
        str | None,
        typer.Option(metavar="none|selective|full", help="Activations computed again in backward."),
    ] = None
    separate_projections: Annotated[
        bool | None,
        typer.Option(
            "--separate-projections/--fused-projections",
            help="Q, K, V (and gate, up) as GEMMs of their own, as Hugging Face runs them; or fused, as Transformer Engine does.",
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """The options that were given."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) is not None}
        return values | ({"pp_layers": _numbers(values["pp_layers"])} if "pp_layers" in values else {})

    def of(self, source: ModelSource) -> ModelRun:
        """How this model is run: these options first, then what the model's file says."""
        return app.model.model_run(source, **self.given())


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(
            f"{option('pp_layers')} must be a list of whole numbers, got {text!r}",
            f"for example {option('pp_layers', '16,15,15,15')}",
        ) from None
