"""Measures the points of a sweep that the journal does not have yet, spread over the GPUs that were asked for.

While it measures, the points so far go to whoever writes them: soon after each outcome, and not too often.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from gemmscope.bench.choose import check_for_step, choose, chosen_modes, named_recipes
from gemmscope.engine.journal import fingerprint
from gemmscope.errors import UserError, option
from gemmscope.gpu.environment import environment
from gemmscope.job.load import identity
from gemmscope.options.measuring import BenchOptions, StepOptions, SweepOptions
from gemmscope.options.values import Shape
from gemmscope.pool.gpus import launched, local_gpus, open_pool
from gemmscope.pool.measure_unit import MeasureUnit
from gemmscope.pool.pool import Outcomes, Unit
from gemmscope.pool.schedule import Schedule
from gemmscope.progress import PoolProgress, Reporter
from gemmscope.results.sweep import SweepResult
from gemmscope.run_context import RunContext
from gemmscope.signals import DeferredSignals, defer_signals
from gemmscope.sweep.assembly import Assembly, point_key
from gemmscope.sweep.axes import Axes, swept_model
from gemmscope.units import counted

LEAST_S, SHARE = 3.0, 0.05  # least seconds between two writes, and the largest share of time for writing


class SweepStream(Reporter):
    """The reporter of a sweep, which also calls `write` when there is something new. `reporter`: what shows the progress."""

    def __init__(self, reporter: Reporter, write: Callable[[], None]) -> None:
        self._reporter, self._write = reporter, write
        self._pending, self._again = False, 0.0

    def on_outcome(self, *_: Any) -> None:
        """A point was measured."""
        self._pending = True
        self._flush()

    def say(self, text: str) -> None:
        self._reporter.say(text)

    @contextmanager
    def spreading(self, what: str) -> Iterator[Callable[[PoolProgress], None]]:
        """Show the progress as the reporter does, and write points that are not written yet."""
        with self._reporter.spreading(what) as show:

            def on_progress(state: PoolProgress) -> None:
                show(state)
                if state.done + state.failed < state.total:  # else the result itself follows at once
                    self._flush()

            yield on_progress

    def _flush(self) -> None:
        began = time.monotonic()
        if self._pending and began >= self._again:
            self._pending = False
            self._write()
            now = time.monotonic()
            self._again = now + max(LEAST_S, (now - began) / SHARE)


PRECISION, TIME_LIMIT_S = 0.02, 20.0  # of one point: a sweep shows trends, so single points can be less precise
Points = Callable[[DeferredSignals], tuple[list[tuple[dict[str, int], MeasureUnit]], list[tuple[dict[str, int], str]]]]


@dataclass(frozen=True)
class MeasuredSweepRun:
    """One measured sweep."""

    options: BenchOptions | StepOptions
    sweep: SweepOptions
    context: RunContext

    @property
    def of(self) -> Literal["bench", "step"]:
        return "step" if isinstance(self.options, StepOptions) else "bench"

    def run(self, points: Points, *, shape: Shape | None = None) -> SweepResult:
        """Measure all points that the journal does not have yet."""
        options, context, axes = self.options, self.context, self.sweep.sweep or {}
        self._check_choices()
        pool = open_pool(gpus=self.sweep.gpus, ray=self.sweep.ray, on_cpu=options.on_cpu, share_gpu=options.share_gpu)
        with defer_signals() as signals:
            possible, impossible = points(signals)
            if signals.first is not None:
                raise signals.interruption()
            units = [Unit(point_key(values), unit) for values, unit in possible]
            assembly = Assembly(
                of=self.of,
                sizes=tuple(axes),
                possible=[values for values, _ in possible],
                impossible=impossible,
                about={**_about(possible, axes), "shape": shape},
                settings={"command": context.command, "precision": options.precision, "time_limit_s": options.time_limit},
            )
            with context.recording(_mark(self.of, possible), resume=options.resume) as recording:
                context.reporter.say(self._plan(len(units), len(recording.outcomes())))
                with pool:
                    stream = SweepStream(context.reporter, lambda: self._stream(assembly, schedule.outcomes))
                    schedule = Schedule(pool, units, recording, stream.on_outcome, stream, what="point")
                    outcomes = schedule.run()
                result = assembly.result(outcomes, interrupted=outcomes.interrupted)
                if not outcomes.done and outcomes.interrupted:
                    raise signals.interruption()
                if not outcomes.done and outcomes.refused:
                    refused = outcomes.refused[0]
                    raise UserError(f"nothing can be measured: {refused.name}: {refused.why}", refused.hint)
                context.finish(recording, result, complete=not outcomes.interrupted and not outcomes.failed)
                signals.answered = True
        return result

    def _stream(self, assembly: Assembly, outcomes: Outcomes) -> None:
        if self.context.stream is not None and len(outcomes.done) + len(outcomes.failed) < len(assembly.possible):
            self.context.stream(assembly.result(outcomes, interrupted=True))

    def _plan(self, points: int, earlier: int) -> str:
        """What will be done, in one line."""
        if earlier and earlier == points:
            return f"all {counted(points, 'point')} were measured earlier"
        if earlier:
            were = "was" if earlier == 1 else "were"
            return f"{earlier} of {counted(points, 'point')} {were} measured earlier; measuring the rest …"
        prefix = "each " if points > 1 else ""
        limit = f", {prefix}for at most {self.options.time_limit:g} s" if self.options.time_limit is not None else ""
        return f"measuring {counted(points, 'point')}{limit} …"

    def _check_choices(self) -> None:
        """A `UserError` for recipes that do not exist, or that this machine cannot measure; nodes of a cluster say so later."""
        options, gpus = self.options, self.sweep.gpus
        named_recipes(options)
        self._check_alone()
        chosen_modes(options)
        if isinstance(options, StepOptions):
            check_for_step(options)
        if self.sweep.ray is None:
            machine = environment()
            if gpus is not None and not options.on_cpu:
                machine = replace(machine, gpus=tuple(local_gpus(gpus, machine)[:1]), visible_devices=None)
            choose(options.but(share_gpu=True), machine)

    def _check_alone(self) -> None:
        """A `UserError` in one of many processes that srun or torchrun started: each would measure every point."""
        rank = launched() if self.sweep.gpus is None and self.sweep.ray is None else None
        if rank is not None and (rank.rank or rank.world is not None):
            count = "several" if rank.world is None else rank.world
            raise UserError(
                f"{rank.by} started {count} processes, and each of them would measure every point of {option('sweep')}",
                f"start one process with {option('gpus', 'all')}, or with Ray inside the job and {option('ray', 'auto')}",
            )


def _about(possible: Sequence[tuple[dict[str, int], MeasureUnit]], axes: Axes) -> dict[str, Any]:
    """The fields of the result that name the model; without the sizes that vary."""
    job = possible[0][1].job
    if job is None:
        return {"origin": "shapes"}
    source = job.source
    return {
        "origin": source.origin,
        "model": swept_model(source.model, source.origin, axes),
        "run": job.run if source.model is not None else None,
    }


def _mark(of: str, possible: Sequence[tuple[dict[str, int], MeasureUnit]]) -> str:
    """A key that is equal for sweeps of the same points, on any GPUs and at any precision."""
    same = {"precision": 0, "time_limit": 0, "resume": False}
    content = [[values, identity(unit.job), repr(sorted({**unit.options.given(), **same}.items()))] for values, unit in possible]
    return fingerprint("sweep", of, content)
