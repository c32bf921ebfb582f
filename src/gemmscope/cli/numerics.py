"""`gemmscope numerics`."""

from dataclasses import dataclass
from pathlib import Path

import typer

from gemmscope import commands
from gemmscope.cli.codes import NOTHING_MEASURED
from gemmscope.cli.options import ModelOptions, RunOptions, takes
from gemmscope.cli.output import FigureOptions, check_targets, deliver, typed_command
from gemmscope.errors import UserError, option


@dataclass(frozen=True)
class NumericsOptions:
    """The tensors, the recipes, the speeds to show with the errors, and the largest error allowed."""

    recording: str | None = None
    checkpoint: str | None = None
    synthetic: str | None = None
    speed: str | None = None
    gpu: str | None = None
    bound: float | None = None
    depth: bool = False
    recipes: str | None = None
    backend: str | None = None
    device: str | None = None
    seed: int = 0


def files_of(checkpoint: str | None) -> list[str]:
    """The files of a checkpoint: an index names safetensors files beside it, a folder has them with their index and config."""
    if checkpoint is None:
        return []
    path = Path(checkpoint)
    folder = path if path.is_dir() else path.parent if path.suffix == ".json" else None
    beside = [file for pattern in ("*.safetensors", "*.json") for file in folder.glob(pattern)] if folder is not None else []
    return [checkpoint, *map(str, beside)]


@takes(NumericsOptions, ModelOptions, RunOptions, FigureOptions)
def command(options: NumericsOptions, model_options: ModelOptions, run_options: RunOptions, outputs: FigureOptions) -> None:
    """Compute the quantization error of every linear in every recipe."""
    reads = [path for path in (options.recording, options.speed) if path is not None]
    check_targets(outputs.targets(), [*reads, *files_of(options.checkpoint), *model_options.files()])
    if run_options.given() and not model_options.given():
        listed = ", ".join(map(option, run_options.given()))
        raise UserError(
            f"{listed}: these options need a model, but none is given",
            f"add {option('config', 'PATH')} or {option('preset', 'NAME')}, or remove them",
        )
    chosen = {name: value for name, value in vars(options).items() if name not in ("recording", "recipes", "device")}
    result = commands.numerics.run_numerics(
        options.recording,
        **chosen,
        recipes=[part.strip() for part in options.recipes.split(",") if part.strip()] if options.recipes is not None else None,
        device=options.device or "cpu",
        job=run_options.of(model_options.load()) if model_options.given() else None,
        command=typed_command(),
        reporter=commands.Console(),
        deliver=lambda result: deliver(result, outputs),
    )
    if not result.recipes:
        raise typer.Exit(NOTHING_MEASURED)
