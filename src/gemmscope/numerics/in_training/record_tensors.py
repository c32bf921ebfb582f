"""Records tensors from a training loop for `gemmscope numerics`: three lines in the user's own code.

    import gemmscope

    with gemmscope.record_tensors(model, "tensors.safetensors") as recording:      # 1
        for batch in loader:
            train(batch)
            recording.step()                                                       # 2: after every optimizer step

It skips `after` steps and records `steps` steps: the maxima of X, W and dY of every linear, and, of another part of the linears
in every step, what each recipe does to their GEMMs, measured where the tensors are. It writes one file with numbers. Before and
after that, it costs one comparison per step. It never changes the training: the losses are bit-identical. Errors are reported
on standard error and never raised once the training runs, so the training continues. No module runs a second time for it, so
what compiled modules do not show is not recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gemmscope.errors import UserError
from gemmscope.say import say
from gemmscope.training import Guard, known_keywords, own_rank, package_versions, why_not_writable, with_rank
from gemmscope.units import counted

if TYPE_CHECKING:
    from torch import nn

    from gemmscope.numerics.in_training.model_recorder import ModelRecorder

MOST_STEPS = 10_000


class record_tensors:  # noqa: N801 (it reads as a verb where it is used)
    """Skip `after` training steps, then record `steps` of them, in a file of numbers.

    `model`: the module that your training loop calls, such as the one that `torch.compile` or a wrapper returned; or a list of
    modules, as Megatron has for a pipeline stage. `seed`: of the tokens that are drawn. `samples`: in how many of the recorded
    steps each linear is measured, at least; the work of a step grows with it. `ranks`: the processes of a distributed job that
    write a file; with more than one, each file name includes the rank.
    `probe`: a function that runs the model on batches that training has not seen, and returns the logits. After the recorded
    steps, it runs with every recipe in all layers, and with the coarsest one in one layer at a time, without gradients: the
    measured damage."""

    @known_keywords
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        path: str | Path,
        *,
        steps: int = 8,
        after: int = 10,
        seed: int = 0,
        samples: int = 1,
        ranks: tuple[int, ...] = (0,),
        probe: Callable[[], Any] | None = None,
    ) -> None:
        if not all(hasattr(one, "named_modules") for one in (model if isinstance(model, (list, tuple)) else [model])):
            raise ValueError(f"model must be a torch.nn.Module or a list of them, got {type(model).__name__}")
        steps, after, samples, seed = map(index, (steps, after, samples, seed))
        if not 1 <= steps <= MOST_STEPS or after < 0:
            limits = f"steps must be between 1 and {MOST_STEPS}, and after at least 0"
            raise ValueError(f"{limits}, got steps={steps}, after={after}")
        if not 1 <= samples <= steps:
            raise ValueError(f"samples must be between 1 and steps={steps}, got samples={samples}")
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        rank = own_rank()
        self.path = Path(path) if len(ranks) < 2 else with_rank(Path(path), rank)
        self.steps, self.after = steps, after
        self.recorded = self._entered = False
        self._guard = Guard("no tensors are recorded", self._release)
        self._settings: dict[str, Any] = {
            "steps": steps, "samples": samples, "seed": seed, "probe": probe, "rank": rank, "packages": package_versions()
        }  # fmt: skip
        self._model = model
        self._wanted = rank in ranks
        self._passed = 0
        self._next = 1 if self._wanted else -1  # the step at which something begins or ends; 1: it was not entered
        self._recorder: ModelRecorder | None = None

    def __enter__(self) -> record_tensors:
        if self._entered:
            say("gemmscope: this recording has ended, nothing more is recorded: call gemmscope.record_tensors again")
        elif self._wanted:
            self._next, self._entered = self.after, True
            if problem := why_not_writable(self.path):
                last = self.after + self.steps
                say(f"gemmscope: {problem}: the tensors cannot be written, unless this changes before step {last}")
            if self._passed == self._next:
                self._guard.run(self._advance)
        return self

    def step(self) -> None:
        """Count one training step: call it after `optimizer.step()`."""
        self._passed += 1
        if self._passed == self._next:
            self._guard.run(self._advance)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        if not self._wanted or self._guard.failed or self.recorded:
            return
        if self._recorder is not None:
            self._guard.run(self._finish)
        elif kind is None:
            say(
                f"gemmscope: nothing was recorded: the loop ran {counted(self._passed, 'step')}, "
                f"{self.after + self.steps} are needed; "
                f"call recording.step() after every step, or use an after= smaller than {self.after}"
            )

    def _advance(self) -> None:
        """End a recorded step, begin the next one."""
        if not self._entered:
            raise UserError(
                "the recording was not begun: write `with gemmscope.record_tensors(...) as recording:` around the loop"
            )
        if self._recorder is None:
            from gemmscope.numerics.in_training.model_recorder import ModelRecorder

            self._recorder = ModelRecorder(self._model, self._settings, self._guard)
        else:
            self._recorder.end_step()
        if self._passed == self.after + self.steps:
            self._finish()
        else:
            self._next = self._passed + 1
            self._recorder.begin_step(self._passed, self._passed - self.after)

    def _finish(self) -> None:
        """Write what was recorded. The running step counts as far as it came."""
        recorder = self._recorder
        assert recorder is not None
        recorder.end_step()
        problem = recorder.write(self.path)
        if problem and self._passed <= self.after:  # the loop ended before one recorded step did
            problem = f"the loop ran {counted(self._passed, 'step')}, {self.after + self.steps} are needed; {problem}"
        if problem:
            self._guard.give_up(problem)
            return
        self._release()
        self.recorded = True
        say(f"gemmscope: wrote {self.path}; now: gemmscope numerics {self.path}")

    def _release(self) -> None:
        """Remove everything from the model, and forget it."""
        recorder, self._recorder, self._model, self._next = self._recorder, None, None, -1
        self._settings["probe"] = None
        if recorder is not None:
            recorder.remove()
