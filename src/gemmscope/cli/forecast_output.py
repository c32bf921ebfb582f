"""What becomes of a forecast: files where they were asked for, else tables."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gemmscope.cli.bench_options import FileOptions
from gemmscope.cli.bench_output import Target
from gemmscope.cli.forecast_options import Axis
from gemmscope.cli.output import say, write

if TYPE_CHECKING:
    from gemmscope.forecast.findings import ForecastFindings
    from gemmscope.forecast.sweep import Point
    from gemmscope.report.shapes import Table
    from gemmscope.step.answer import StepAnswer
    from gemmscope.step.cost import Cost
    from gemmscope.store.forecastfile import ForecastFile

SWEEP_COLUMNS = ("speedup", "speedup_low", "speedup_high", "baseline_step_ms", "best", "verdict")
STATES = {
    "sustained": "in the power-limited state that training runs in",
    "burst": "in the first moments after a rest: training is slower",
}


def _command() -> list[str]:
    return [argument.encode("utf-8", "replace").decode() for argument in sys.argv[1:]]


def _deliver(
    outputs: FileOptions,
    texts: dict[str, Callable[[], str]],
    draw: Callable[[str], None],
    shown: tuple[list[Table], list[str], list[str]],
) -> None:
    """Write what was asked for; the tables are printed unless a file went to standard output."""
    from gemmscope.report import formats

    tables, above, below = shown
    texts["--markdown"] = lambda: formats.markdown(tables, above, below)
    places = outputs.named()
    for option, text in texts.items():
        if option in places:
            write(places[option], text())
    if "--output" in places:
        draw(places["--output"])
        say(f"wrote {places['--output']}")
    if "-" not in places.values():
        formats.print_tables(tables, above, below)


def _said(notes: Sequence[str]) -> list[str]:
    """Notes as they are printed; some say themselves what they are."""
    return [note if note.startswith(("emulated: ", "left out: ")) else f"note: {note}" for note in notes]


@dataclass(frozen=True)
class Forecast:
    """A model (or bare products) on one or more GPUs."""

    target: Target
    reports: Sequence[ForecastFindings]
    answers: dict[str, StepAnswer]
    state: str
    dp: int
    notes: Sequence[str]
    costs: Mapping[str, Mapping[str, Cost]] = field(default_factory=dict)  # by GPU and recipe

    def tables(self) -> list[Table]:
        """All GPUs side by side, what a run costs on them, then each."""
        from gemmscope.report.forecast import cost_table, gpu_tables, side_by_side

        tables = [] if self.reports[0].bare else [side_by_side(self.reports, self.answers)]
        tables += [cost_table(self.costs)] if self.costs else []
        for report in self.reports:
            tables += gpu_tables(report, self.answers.get(report.chip.name))
        return tables

    def deliver(self, outputs: FileOptions) -> None:
        """Files and tables."""
        texts: dict[str, Callable[[], str]] = {"--json": lambda: self.file().to_json(), "--csv": self._csv}
        _deliver(outputs, texts, self.draw, (self.tables(), self.above(), self.below()))

    def title(self) -> str:
        chips = ", ".join(report.chip.title for report in self.reports)
        return f"FORECAST, not measured: {self.target.name} on {chips}"

    def above(self) -> list[str]:
        """What it is, and what it stands on."""
        from gemmscope.report.shapes import headline

        lines, subject = [self.title()], self.target.subject
        if subject is not None:
            lines += headline(subject.name, subject.source.model, subject.run, subject.workload)[1:]
        replicas = f", {self.dp} data-parallel replicas" if self.dp > 1 else ""
        return [*lines, f"{self.state}: {STATES[self.state]}{replicas}; every number with a 90% error bar"]

    def below(self) -> list[str]:
        """What to know beside the numbers."""
        from gemmscope.report.forecast import verdicts
        from gemmscope.store.forecastfile import basis_of

        lines = [*self._head(), *verdicts(self.reports, self.answers), *self._too_large()]
        lines += [f"{report.chip.name}: {'; '.join(basis_of(report))}" for report in self.reports]
        return [*lines, *_said(self.notes)]

    def _head(self) -> list[str]:
        """The tables differ in it."""
        from gemmscope.recipe.recipes import recipe
        from gemmscope.workload.derive import HEAD
        from gemmscope.workload.ops import Linear

        low = any(recipe(each.recipe).quantizes for answer in self.answers.values() for each in answer.recipes)
        ops = self.target.subject.workload.ops if self.target.subject is not None and low else ()
        heads = dict.fromkeys(op.name for op in ops if isinstance(op, Linear) and op.section == HEAD)
        words = "in low precision in the linears' tables, and in BF16 in the step, where frameworks leave it so"
        return [f"{', '.join(heads)}: {words}"] if heads else []

    def _too_large(self) -> list[str]:
        """Which GPUs cannot hold it."""
        from gemmscope.forecast.memory import does_not_fit

        subject, lines = self.target.subject, []
        if subject is not None and subject.source.model is not None:
            for report in self.reports:
                lines += does_not_fit(report, subject.source.model, subject.run, subject.workload.parameters)
        return lines

    def _host_bound(self) -> list[str]:
        """Which steps a CPU takes longer to launch."""
        from gemmscope.report.forecast import host_bound

        return [line for chip, answer in self.answers.items() for line in host_bound(chip, answer.recipes)]

    def draw(self, path: str) -> None:
        """The stacked bars of every GPU."""
        from gemmscope.report.plot import save_plots

        headings = [f"FORECAST: {self.target.name} on {report.chip.title}, {self.state}" for report in self.reports]
        save_plots(list(zip(headings, self.reports, strict=True)), "", path)

    def file(self) -> ForecastFile:
        """The run file."""
        from gemmscope.store.forecastfile import ForecastFile, coefficients_source, gpu_record
        from gemmscope.store.runfile import model_record, run_record

        subject, layer = self.target.subject, self.reports[0].layer
        return ForecastFile(
            command=_command(),
            origin=self.target.origin,
            coefficients=coefficients_source(),
            state=self.state,
            model=model_record(subject.source.model, subject.trace, subject.source.origin) if subject else None,
            run=run_record(subject.run, subject.workload) if subject else None,
            dp=self.dp,
            layers=layer.layers if layer else None,
            gpus=[
                gpu_record(report, self.answers.get(report.chip.name), self.costs.get(report.chip.name, {}))
                for report in self.reports
            ],
            sweeps=[],
            notes=[*self._too_large(), *self._host_bound(), *self.notes],
        )

    def _csv(self) -> str:
        """The lines of bench with the GPU before each; then the step's, whole and by part."""
        from gemmscope.report.bench_csv import COLUMNS, bench_csv

        out = io.StringIO()
        writer = csv.DictWriter(out, ("gpu", *COLUMNS), lineterminator="\n", restval="")
        writer.writeheader()
        for report in self.reports:
            for line in csv.DictReader(io.StringIO(bench_csv(report))):
                writer.writerow({"gpu": report.chip.name, **line})
            writer.writerows(self._step_lines(report.chip.name))
        return out.getvalue()

    def _step_lines(self, chip: str) -> list[dict[str, object]]:
        lines: list[dict[str, object]] = []
        for each in self.answers[chip].recipes if chip in self.answers else ():
            same: dict[str, object] = {"gpu": chip, "recipe": each.recipe, "mode": "step", "pass": "all", "verdict": "FORECAST"}
            lines += [{**same, "op": row, "time_ms": time_ms} for row, time_ms in each.rows.items()]
            gain = each.speedup
            faster = {"speedup": gain.value, "speedup_low": gain.low, "speedup_high": gain.high} if gain else {}
            step = {"time_ms": each.step.value, "low_ms": each.step.low, "high_ms": each.step.high, "tflops": each.model_tflops}
            lines.append({**same, "op": "training step", **step, **faster})
        return lines


@dataclass(frozen=True)
class Swept:
    """A sweep on one or more GPUs."""

    axes: Sequence[Axis]
    points: dict[str, list[Point]]
    recipes: dict[str, list[str]]
    state: str
    notes: Sequence[str]

    @property
    def names(self) -> list[str]:
        return [axis.name for axis in self.axes]

    def deliver(self, outputs: FileOptions) -> None:
        """Files and tables."""
        from gemmscope.report.forecast import sweep_sentences, sweep_table

        tables, below = [], []
        for gpu, points in self.points.items():
            tables.append(sweep_table(points, self.names, self.recipes[gpu], gpu))
            below += sweep_sentences(points, self.names, self.recipes[gpu], gpu)
        count = sum(map(len, self.points.values()))
        above = [
            f"FORECAST, not measured: {count} configurations, the training step of one rank",
            f"{self.state}: {STATES[self.state]}",
        ]
        below += _said(self.notes)
        _deliver(outputs, {"--json": self._json, "--csv": self._csv}, self._draw, (tables, above, below))

    def _draw(self, path: str) -> None:
        from gemmscope.report.heatmap import save_sweep

        longest = max(self.recipes.values(), key=len)
        save_sweep(list(self.points.items()), self.names, longest, path)

    def _json(self) -> str:
        from gemmscope.store.forecastfile import ForecastFile, coefficients_source, sweep_records

        return ForecastFile(
            command=_command(),
            origin="sweep",
            coefficients=coefficients_source(),
            state=self.state,
            layers=None,
            gpus=[],
            sweeps=sweep_records(self.points, self.names),
            notes=list(self.notes),
        ).to_json()

    def _csv(self) -> str:
        """A line for every point and recipe."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["gpu", *self.names, "recipe", *SWEEP_COLUMNS])
        for gpu, points in self.points.items():
            for point in points:
                if point.why_not:
                    writer.writerow([gpu, *point.values, "", "", "", "", "", "", point.why_not])
                for name, found in point.speedups:
                    best = int(point.best[0] == name)
                    said = ["FORECAST", *(["too close to call"] if best and not point.certain else [])]
                    said += ["HOST-BOUND"] if name in point.host_bound else []
                    times = [found.value, found.low, found.high, point.step_ms]
                    writer.writerow([gpu, *point.values, name, *times, best, ", ".join(said)])
        return out.getvalue()
