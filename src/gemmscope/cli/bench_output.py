"""What becomes of a measurement: files first, then the tables, whatever happens to the files."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from gemmscope.cli.bench_options import OutputOptions
from gemmscope.cli.choose import Choice
from gemmscope.cli.output import say, write
from gemmscope.errors import UserError

if TYPE_CHECKING:
    from gemmscope.cli.workload import Subject
    from gemmscope.gpu.environment import Environment
    from gemmscope.measure.campaign import Campaign
    from gemmscope.measure.findings import Findings, Layer
    from gemmscope.report.shapes import Table
    from gemmscope.store.benchfile import BenchFile
    from gemmscope.store.journal import Journal
    from gemmscope.workload.cases import Case


def load_reporting() -> None:
    """Import what the answer will be written with. It takes a moment, which a measuring process may use too."""
    for module in ("rich.table", "gemmscope.report.bench_csv", "gemmscope.report.bench_notes", "gemmscope.store.benchfile"):
        importlib.import_module(module)


@dataclass(frozen=True)
class Target:
    """What is measured: cases, and the model they belong to (None: bare products)."""

    name: str
    origin: str
    cases: list[Case]
    notes: list[str] = field(default_factory=list)
    subject: Subject | None = None
    layer: Layer | None = None


@dataclass(frozen=True)
class Measured:
    """A campaign that came to its end. `named`: the reader chose the recipes, so each has its column, measured or not."""

    target: Target
    choice: Choice
    campaign: Campaign
    journal: Journal
    machine: Environment
    ended: str
    named: bool
    interrupted: bool = False

    @cached_property
    def findings(self) -> Findings:
        from gemmscope.measure.findings import Findings

        results, modes = self.campaign.results, self.choice.modes
        seen = {result.task.recipe for result in results.tasks.values() if result.measured}
        shown = self.choice.recipes if self.named else [name for name in self.choice.recipes if name in seen]
        settings = self.campaign.settings
        layer, caches = self.target.layer, settings.cache_weights
        return Findings(results, shown, modes, layer=layer, backend=settings.backend, cache_weights=caches)

    def fell_back(self) -> bool:
        """Whether anything ran in another precision than asked for."""
        return any(self.findings.falls_back(name, mode) for mode in self.choice.modes for name in self.findings.columns(mode))

    def tables(self) -> list[Table]:
        """All of them; none if nothing was measured."""
        from gemmscope.report.bench import tables

        return tables(self.findings) if self.findings.cells() else []

    def deliver(self, outputs: OutputOptions) -> None:
        """Write what was asked for and print the tables; a file that fails costs neither the others nor the tables."""
        from gemmscope.report import formats
        from gemmscope.report.bench_csv import bench_csv

        made, above, below = self.tables(), self.above(), self.below()
        texts: list[tuple[str | None, Callable[[], str]]] = [
            (outputs.json, lambda: self.file().to_json()),
            (outputs.csv, lambda: bench_csv(self.findings)),
            (outputs.markdown, lambda: formats.markdown(made, above, below)),
        ]
        failed = [_why_not_written(path, text) for path, text in texts if path is not None]
        if outputs.output is not None:
            failed.append(self._why_not_drawn(outputs.output))
        if "-" not in (path for path, _ in texts):
            formats.print_tables(made, above, below)
        for message in filter(None, failed):
            self.journal.reopen(self.campaign.fingerprint)
            raise UserError(
                message,
                f"nothing is lost: all samples are in the journal {self.journal.path}; the same command with --resume and "
                "another place to write to takes them from there",
            )

    def _why_not_drawn(self, path: str) -> str:
        """Draw the picture; empty if that went well."""
        try:
            self.draw(path)
        except UserError as error:
            return error.message
        say(f"wrote {path}")
        return ""

    def draw(self, path: str) -> None:
        """The stacked bars, or those of bare products."""
        from gemmscope.report.plot import save_plot

        save_plot(self.findings, self.above()[0], path)

    def file(self) -> BenchFile:
        """The run file."""
        from gemmscope.store.benchfile import bench_file
        from gemmscope.store.runfile import model_record, run_record

        subject = self.target.subject
        return bench_file(
            command=[argument.encode("utf-8", "replace").decode() for argument in sys.argv[1:]],
            origin=self.target.origin,
            model=model_record(subject.source.model, subject.trace, subject.source.origin) if subject else None,
            run=run_record(subject.run, subject.workload) if subject else None,
            settings=self.campaign.settings,
            rule=self.campaign.rule,
            environment=asdict(self.machine),
            findings=self.findings,
            ended=self.ended,
            notes=self.target.notes + list(self.choice.notes),
        )

    def above(self) -> list[str]:
        """What was measured, on what, with what, and for how long."""
        from gemmscope.report.shapes import headline

        results, subject, settings = self.campaign.results, self.target.subject, self.campaign.settings
        lines = [f"{self.target.name} on {results.hello.get('device', {}).get('name', 'this machine')}"]
        if subject is not None:
            lines += headline(subject.name, subject.source.model, subject.run, subject.workload)[1:]
        known = ", ".join(f"{name} {version}" for name, version in results.hello.get("versions", {}).items())
        versions = f" ({known})" if known else ""
        by = ", timed by the kernels' own timestamps" if settings.timing == "profiler" else ""
        return [*lines, f"{settings.backend} backend{versions}{by}", f"{results.complete_rounds} rounds: {self.ended}"]

    def below(self) -> list[str]:
        """What to know beside the numbers."""
        from gemmscope.report.bench_notes import sentences

        lines = [*sentences(self.findings), *(f"note: {note}" for note in (*self.target.notes, *self.choice.notes))]
        return lines if self.findings.cells() else ["nothing could be measured", *lines]


def _why_not_written(path: str, text: Callable[[], str]) -> str:
    """Write it; empty if that went well."""
    try:
        write(path, text())
    except UserError as error:
        return error.message
    return ""
