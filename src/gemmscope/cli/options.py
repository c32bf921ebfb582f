"""Options that every command takes the same way: which model, which batch, how it is split.

`takes(ModelOptions, RunOptions)` spreads the fields of these classes over a command's signature, so that a command names its
own options only and gets the rest as filled-in objects.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from gemmscope.errors import UserError, closest
from gemmscope.model.source import ModelSource
from gemmscope.model.spec import RunSpec

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


# What a whole run's cost is asked with, of a step that is measured or forecast.
TOKENS = typer.Option(parser=number, metavar="N", help="Of the whole run, for its cost.")
GPUS = size("That it will run on.")


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

    _REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")

    def sizes(self) -> dict[str, int]:
        """The plain hyperparameters that were typed."""
        names = (*self._REQUIRED, "num_key_value_heads", "head_dim", "vocab_size")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def ways(self) -> list[str]:
        """How the model is named: one way is right."""
        sizes = self.sizes()
        ways = [f"--{name}" for name in ("config", "preset", "module") if getattr(self, name) is not None]
        if sizes or self.gated_mlp:
            ways.append(", ".join(f"--{name.replace('_', '-')}" for name in sizes) or "--gated-mlp")
        return ways

    def files(self) -> list[str]:
        """What is read to know the model: never to be written over."""
        module = [self.module.rpartition(":")[0]] if self.module is not None else []
        return [*([self.config, f"{self.config}/config.json"] if self.config is not None else []), *module]

    def source(self) -> ModelSource:
        """The model that was named; a `UserError` if none was, or more than one."""
        ways = self.ways()
        if not ways:
            raise UserError(
                "no model is named",
                "give --preset NAME, --config PATH, --module FILE.py:FACTORY, or the sizes: "
                + " ".join(f"--{name.replace('_', '-')} N" for name in self._REQUIRED),
            )
        if len(ways) > 1:
            raise UserError(f"the model is named in {len(ways)} ways at once: {' and '.join(ways)}", "keep one of them")
        if self.module is not None:
            return ModelSource(origin=self.module, model=None, module=self.module)
        if self.preset is not None:
            from gemmscope.model import presets

            return presets.load(self.preset)
        if self.config is not None:
            return _from_config(self.config)
        return self._from_sizes(self.sizes())

    def _from_sizes(self, sizes: dict[str, int]) -> ModelSource:
        from gemmscope.model.flags import from_hyperparameters

        missing = [f"--{name.replace('_', '-')}" for name in self._REQUIRED if name not in sizes]
        if missing:
            raise UserError(f"the sizes are not complete: {', '.join(missing)} missing", f"add {' N '.join(missing)} N")
        model = from_hyperparameters(
            hidden_size=sizes["hidden_size"],
            intermediate_size=sizes["intermediate_size"],
            num_attention_heads=sizes["num_attention_heads"],
            num_hidden_layers=sizes["num_hidden_layers"],
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            gated=self.gated_mlp,
        )
        return ModelSource(origin="command line", model=model)


def _from_config(config: str) -> ModelSource:
    """What --config names; if that is nothing, perhaps a preset was meant."""
    from gemmscope.model import presets
    from gemmscope.model.read import read_config

    try:
        return read_config(config)
    except UserError as error:
        similar = closest(config, presets.names(), 1) if len(config) < 100 and not Path(config).exists() else []
        if not similar:
            raise
        raise UserError(error.message, f"did you mean --preset {similar[0]}? {error.hint}") from error


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

    def typed(self) -> dict[str, Any]:
        """The options that were given."""
        return {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) is not None}

    def run_spec(self, source: ModelSource) -> tuple[RunSpec, list[str]]:
        """The run: options first, then what the model's file says. Also notes on what was overridden."""
        typed = self.typed()
        if "pp_layers" in typed:
            typed["pp_layers"] = _numbers(typed["pp_layers"])
        notes = [
            f"{name} = {value} as typed; {source.origin} says {source.run_settings[name]}"
            for name, value in typed.items()
            if name in source.run_settings and source.run_settings[name] != value
        ]
        settings = {**source.run_settings, **typed}
        missing = [name for name in ("micro_batch_size", "sequence_length") if name not in settings]
        if missing:
            options = [f"--{name.replace('_', '-')}" for name in missing]
            raise UserError(
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given, and {source.origin} does not say",
                f"add {' N '.join(options)} N",
            )
        of_file = {"tp": 1, "cp": 1, "pp": 1, **source.run_settings}
        changed = {name for name in typed if of_file.get(name, typed[name]) != typed[name]}
        if "pp" in changed and "pp_layers" not in typed:
            settings.pop("pp_layers", None)  # the file's split belongs to the file's number of stages
        belongs_to_file = {"micro_batch_size", "tp", "cp", "pp"} & changed and "gradient_accumulation" not in typed
        if belongs_to_file and settings.pop("gradient_accumulation", 1) != 1:
            notes.append(
                "micro-batches per step are counted as 1: the file's number belongs to the file's batch and parallel sizes; "
                "give yours with --gradient-accumulation"
            )
        return RunSpec(**settings), notes


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--pp-layers {text!r} is not a list of whole numbers", "for example --pp-layers 16,15,15,15") from None
