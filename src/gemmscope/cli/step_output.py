"""What becomes of steps that were run: files first, then the tables."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from gemmscope.cli.output import write
from gemmscope.cli.workload import Subject

if TYPE_CHECKING:
    from gemmscope.gpu.environment import Environment
    from gemmscope.report.shapes import Table
    from gemmscope.step.answer import StepAnswer
    from gemmscope.step.breakeven import AtBatch
    from gemmscope.step.cost import Cost
    from gemmscope.step.predict import StepRun, StepSettings
    from gemmscope.step.recommend import Recommendation
    from gemmscope.store.stepfile import StepFile


@dataclass(frozen=True)
class Stepped:
    """A prediction with all that was asked for beside it. `runs`: the prediction's first, then verifying and mixed plans."""

    subject: Subject
    machine: Environment
    settings: StepSettings
    runs: list[StepRun]
    found: StepAnswer
    costs: dict[str, Cost]
    recommended: Recommendation | None
    batches: list[AtBatch]
    notes: list[str]
    observed_speedup: float | None = None
    interrupted: bool = False

    @property
    def ended(self) -> str:
        why = self.runs[0].rule.why or "all that could be measured was"
        return f"{why}; interrupted after that" if self.interrupted and "interrupted" not in why else why

    def pasted(self) -> dict[str, str]:
        """The recommendation in the words of frameworks."""
        from gemmscope.step.emit import ready_to_paste

        return ready_to_paste(self.recommended.plan) if self.recommended is not None else {}

    def tables(self) -> list[Table]:
        """The step, the way to it, the truth, the cost, smaller batches: what there is."""
        from gemmscope.report.step import break_even_table, cost_table, tables

        if not self.found.recipes:
            return []
        made = tables(self.found)
        made += [cost_table(self.costs)] if self.costs else []
        return made + ([break_even_table(self.batches)] if self.batches else [])

    def above(self) -> list[str]:
        """What it is, and how it ended."""
        device = self.runs[0].results.hello.get("device", {}).get("name", "this machine")
        return [f"{self.subject.name} on {device}", self.ended]

    def below(self) -> list[str]:
        """What to know beside the numbers."""
        from gemmscope.report.step import observed, sentences
        from gemmscope.step.breakeven import words

        nothing = [] if self.found.recipes else ["nothing could be measured"]
        lines = (
            nothing + [f"warning: {warning}" for each in self.runs for warning in each.results.warnings] + sentences(self.found)
        )
        if self.observed_speedup is not None:
            lines += observed(self.found, self.observed_speedup)
        if self.batches:
            lines += [words(self.batches, name) for name in self.batches[-1].speedups]
        if self.recommended is not None:
            lines.append(f"recommended: {self.recommended.words}")
        lines += [f"{framework}:\n{text}" for framework, text in self.pasted().items()]
        return lines + [f"note: {note}" for note in self.notes]

    def file(self) -> StepFile:
        """The run file."""
        from gemmscope.store.runfile import model_record, run_record
        from gemmscope.store.stepfile import step_file

        subject = self.subject
        return step_file(
            command=[argument.encode("utf-8", "replace").decode() for argument in sys.argv[1:]],
            origin=subject.source.origin,
            model=model_record(subject.source.model, subject.trace, subject.source.origin),
            run=run_record(subject.run, subject.workload),
            environment=asdict(self.machine),
            settings=self.settings,
            results=[each.results for each in self.runs],
            found=self.found,
            costs=self.costs,
            recommended=self.recommended,
            batches=self.batches,
            pasted=self.pasted(),
            ended=self.ended,
            seconds=self._seconds(),
            notes=self.notes,
        )

    def _seconds(self) -> dict[str, float]:
        """What each purpose took, all its runs together."""
        sums: dict[str, float] = {}
        for each in self.runs:
            sums[_purpose(each)] = sums.get(_purpose(each), 0.0) + each.seconds
        return {purpose: round(seconds, 1) for purpose, seconds in sums.items()}

    def deliver(self, json: str | None, markdown: str | None) -> None:
        """Files first, then the tables."""
        from gemmscope.report import formats

        made, above, below = self.tables(), self.above(), self.below()
        if json is not None:
            write(json, self.file().to_json())
        if markdown is not None:
            write(markdown, formats.markdown(made, above, below))
        if "-" not in (json, markdown):
            formats.print_tables(made, above, below)


def _purpose(run: StepRun) -> str:
    return "verifying" if run.real else "trying mixed plans" if run.mixed else "predicting"
