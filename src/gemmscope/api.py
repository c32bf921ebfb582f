"""The Python API: the same answers as the command line gives, as typed objects that notebooks show as tables.

>>> import gemmscope as gs
>>> job = gs.load("llama-3.1-8b").on(micro_batch_size=1, sequence_length=8192)
>>> forecast = job.forecast("b300", "h200")
>>> [gpu.gpu for gpu in forecast.file.gpus]
['b300', 'h200']

`file` is the run file as an object (the schema of `--json`); `save` writes it, or a Markdown page, or a figure. What cannot be
done raises `UserError` with a message that says what to do instead.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from gemmscope.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from gemmscope.model.source import ModelSource
    from gemmscope.model.spec import ModelSpec, RunSpec
    from gemmscope.report.shapes import Table
    from gemmscope.store.benchfile import BenchFile
    from gemmscope.store.forecastfile import ForecastFile
    from gemmscope.store.runfile import ShapesFile
    from gemmscope.store.stepfile import StepFile

    State = Literal["sustained", "burst"]


class _Written(Protocol):
    def to_json(self) -> str:
        """As it is written to disk."""


File = TypeVar("File", bound=_Written)


@dataclass(frozen=True)
class Result(Generic[File]):
    """An answer: its run file, and the tables and sentences that the command would print."""

    file: File
    tables: list[Table]
    above: list[str]
    below: list[str]
    _draw: Callable[[str], None] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        from rich.console import Console

        from gemmscope.report import formats

        out = io.StringIO()
        formats.print_tables(self.tables, self.above, self.below, Console(file=out, width=200, highlight=False, soft_wrap=True))
        return out.getvalue()

    def _repr_html_(self) -> str:
        """How a notebook shows it: the tables, and the figure where there is one."""
        parts = [f"<p>{'<br>'.join(map(html.escape, self.above))}</p>"]
        for table in self.tables:
            head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
            rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
            parts.append(f"<table><caption>{html.escape(table.title)}</caption><tr>{head}</tr>{rows}</table>")
        parts += [f"<p>{html.escape(line)}</p>" for line in self.below]
        if self._draw is not None:
            parts.append(f'<img alt="the figure" src="data:image/png;base64,{base64.b64encode(self._png()).decode()}">')
        return "".join(parts)

    def _png(self) -> bytes:
        """The figure."""
        assert self._draw is not None
        with TemporaryDirectory() as folder:
            path = Path(folder) / "figure.png"
            self._draw(str(path))
            return path.read_bytes()

    def save(self, path: str | Path) -> None:
        """Write it: .json the run file, .md the tables, .png, .svg or .pdf the figure."""
        from gemmscope.report import formats

        target = Path(path)
        ending = target.suffix.lower()
        if ending not in (".json", ".md", *((".png", ".svg", ".pdf") if self._draw is not None else ())):
            drawn = ", .png, .svg or .pdf" if self._draw is not None else ""
            raise UserError(f"{target.name} does not say what to write", f"name it .json or .md{drawn}")
        if self._draw is not None and ending not in (".json", ".md"):
            self._draw(str(target))
            return
        text = self.file.to_json() if ending == ".json" else formats.markdown(self.tables, self.above, self.below)
        try:
            target.write_text(text, encoding="utf-8", errors="replace")
        except OSError as error:
            raise UserError(
                f"{target} cannot be written: {error.strerror or error}", "name a file in a folder that is there"
            ) from error


@dataclass(frozen=True)
class Model:
    """A model that was read. `on` says how it is run."""

    source: ModelSource

    @property
    def spec(self) -> ModelSpec | None:
        """Its layers; None where only tracing can tell."""
        return self.source.model

    def on(self, micro_batch_size: int | None = None, sequence_length: int | None = None, **run: Any) -> Job:
        """The batch, and any field of `RunSpec`: tp, sequence_parallel, cp, pp, ep, recompute, …; else as its file says."""
        from gemmscope.cli.options import RunOptions

        if isinstance(run.get("pp_layers"), (list, tuple)):
            run["pp_layers"] = ",".join(map(str, run["pp_layers"]))
        known = RunOptions.__dataclass_fields__
        strangers = [name for name in run if name not in known]
        if strangers:
            raise UserError(f"a run has no {', '.join(strangers)}", f"it has {', '.join(known)}")
        options = RunOptions(micro_batch_size=micro_batch_size, sequence_length=sequence_length, **run)
        spec, notes = options.run_spec(self.source)
        return Job(self.source, spec, notes)


@dataclass(frozen=True)
class Job:
    """A model and how it is run: what can be asked about it."""

    source: ModelSource
    run: RunSpec
    notes: list[str]

    def shapes(self, *, check: bool = False) -> Result[ShapesFile]:
        """Every product of a step. `check`: hold them against the live model (needs torch and transformers).

        >>> load("llama-3.2-1b").on(1, 512).shapes().file.kind
        'shapes'
        """
        from gemmscope.cli.shapes import answer_of

        found = answer_of(self.source, self.run, self.notes, check=check)
        return Result(found.file(), found.tables(), found.above(), found.below())

    def forecast(
        self,
        *gpus: str,
        state: State = "sustained",
        recipes: Iterable[str] | None = None,
        dp: int | None = None,
        cache_weights: bool = False,
        tokens: float | None = None,
        gpu_count: int | None = None,
        price: float | Mapping[str, float] | None = None,
    ) -> Result[ForecastFile]:
        """Linears and the step on GPUs that need not be here, with 90% error bars.

        `state`: as in training, or a rested chip's first moments; `dp`: replicas that exchange gradients; `cache_weights`: these
        are quantized once per step, and left out of the linears' times. A GPU that was calibrated stands on that. `tokens` on
        `gpu_count` GPUs: what a run costs, at a `price` for one GPU and hour, of all or of each by its name.
        """
        from gemmscope.cli.bench import model_target
        from gemmscope.cli.bench_options import RecipeOptions
        from gemmscope.cli.forecast import forecast_of
        from gemmscope.cli.forecast_options import ForecastOptions, recipes_for

        each = ",".join(f"{name}={one}" for name, one in price.items()) if isinstance(price, Mapping) else None
        asked = each or (str(price) if price is not None else None)
        options = ForecastOptions(gpu=",".join(gpus), state=state, dp=dp, tokens=tokens, gpus=gpu_count, price=asked)
        chips, choices = options.chips(), RecipeOptions(recipes=_joined(recipes))
        chosen, left_out = recipes_for(choices, chips)
        target = model_target(self.source, self.run, self.notes)
        found = forecast_of(
            target,
            chips,
            chosen,
            choices.modes(),
            state=options.known_state(),
            dp=options.replicas(self.run),
            notes=left_out,
            cache_weights=cache_weights,
            budgets=options.budgets(chips),
        )
        return Result(found.file(), found.tables(), found.above(), found.below(), found.draw)

    def bench(self, *, recipes: Iterable[str] | None = None, **options: Any) -> Result[BenchFile]:
        """Time the linears on this GPU. `options`: device, backend, share_gpu, pre_quantize, precision, longest, …

        As on the command line, with underscores: `gemmscope bench --help`.
        """
        from gemmscope.cli.bench import campaign_of, measured_of, model_target
        from gemmscope.cli.bench_options import ChoiceOptions, TimingOptions
        from gemmscope.cli.choose import choose
        from gemmscope.gpu.environment import environment
        from gemmscope.measure.link import Link

        choices, timing = _options(options, ChoiceOptions(recipes=_joined(recipes)), TimingOptions())
        timing.check()
        machine = environment()
        choice = choose(choices, machine, cache_weights=timing.cache_weights)
        with Link() as started:
            target = model_target(self.source, self.run, self.notes)
            campaign, journal = campaign_of(target, choice, timing, started, for_nsight=False)
            found = measured_of(target, choice, campaign, journal, machine, resume=timing.resume, named=recipes is not None)
        return Result(found.file(), found.tables(), found.above(), found.below(), found.draw)

    def step(self, *, recipes: Iterable[str] | None = None, **options: Any) -> Result[StepFile]:
        """Predict the training step on this GPU. `options`: verify, break_even, precision, longest, backend, device, …"""
        from gemmscope.cli.bench_options import ChoiceOptions
        from gemmscope.cli.step import StepOptions, run_steps

        choices, asked = _options(options, ChoiceOptions(recipes=_joined(recipes)), StepOptions())
        asked.check()
        found = run_steps(self.source, self.run, self.notes, choices, asked)
        return Result(found.file(), found.tables(), found.above(), found.below())


def load(model: str | Path | Mapping[str, Any] | None = None, **sizes: Any) -> Model:
    """A model: a preset's name, a config (file, folder, hub id, or a dictionary), `file.py:factory`, or sizes by name.

    >>> load("qwen3-8b").spec.hidden_size
    4096
    >>> load(hidden_size=64, intermediate_size=128, num_attention_heads=2, num_hidden_layers=3).spec.pattern()
    '3 dense'
    """
    import json

    from gemmscope.cli.options import ModelOptions
    from gemmscope.model import presets
    from gemmscope.model.read import read_text

    if isinstance(model, Mapping):
        return Model(read_text(json.dumps(model), "the dictionary"))
    if isinstance(model, Path):
        model = str(model)
    known = ModelOptions.__dataclass_fields__
    strangers = [name for name in sizes if name not in known]
    if strangers:
        raise UserError(f"a model has no {', '.join(strangers)}", f"it is named by {', '.join(known)}")
    if model is None:
        return Model(ModelOptions(**sizes).source())
    if sizes:
        raise UserError(f"the model is named twice: {model} and {', '.join(sizes)}", "keep one of them")
    if model in presets.names():
        return Model(ModelOptions(preset=model).source())
    options = ModelOptions(module=model) if ".py:" in model else ModelOptions(config=model)
    return Model(options.source())


def _joined(recipes: Iterable[str] | None) -> str | None:
    if recipes is None or isinstance(recipes, str):
        return recipes
    return ",".join(recipes)


WRITTEN = {"json", "csv", "markdown"}  # options that write files: here, `Result.save` does
First = TypeVar("First", bound="DataclassInstance")
Second = TypeVar("Second", bound="DataclassInstance")


def _options(given: Mapping[str, Any], first: First, second: Second) -> tuple[First, Second]:
    """Give each option to the group that has it."""
    names = (_names(first), _names(second))
    strangers = [name for name in given if not any(name in group for group in names)]
    if strangers:
        files = ", and the result's save() writes files" if set(strangers) & WRITTEN else ""
        raise UserError(f"there is no option {', '.join(strangers)}", f"options: {', '.join(sorted(names[0] | names[1]))}{files}")
    own = [{name: value for name, value in given.items() if name in group} for group in names]
    return replace(first, **own[0]), replace(second, **own[1])


def _names(group: DataclassInstance) -> set[str]:
    return {each.name for each in fields(group)} - WRITTEN
