"""Short paired trainings from one state of the user's own training: in BF16, in BF16 with one bit changed, and in every recipe.

A prototype that has not run on a GPU; it is no part of the package, and may change.

    from fork_loop import fork_losses

    result = fork_losses(model, optimizer, step, batches, recipes=["FP8Current", "NVFP4"])
    print(result)

`step(batch)` is one complete training step of the user's loop, which returns its loss. Every fork starts from the same weights,
optimizer state and random numbers and runs the same batches; its linears compute as the recipe does (gemmscope's `Emulation`).
Afterwards everything is as it was, also after an error or Ctrl-C, and the training continues as if nothing had happened. An error
is reported in one line and never raised. `fork_result.py` turns gaps into time to the same loss.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fork_result import CONTROL, FAILED, LUCKY, NOT_REPEATABLE, Fork, ForkResult
from fork_state import SavedState
from fork_statistics import LEAST_STEPS, loss_gap, luck_of, widened
from gemmscope.errors import UserError, in_a_line
from gemmscope.numerics.evaluation.emulate import Emulation
from gemmscope.numerics.evaluation.requested_mix import priced_mixes, requested_mix
from gemmscope.numerics.in_training.hooks import Hook
from gemmscope.numerics.names import LinearName, name_linears
from gemmscope.recipe.kept import KeptHigher, split_name
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.results.numerics import NumericsResult
from gemmscope.say import say
from gemmscope.training import Guard, package_versions
from gemmscope.units import memory, names
from gemmscope.workload.ops import why_high_precision

PILOT = 3  # steps of every fork that are run beforehand: whether it works, and how long a step takes
CHECKS = (0.5, 0.75)  # of the steps, after which a fork may end because its interval is narrow enough
DTYPES = {torch.bfloat16: BASELINE, torch.float16: "FP16", torch.float32: "FP32"}
SIZES = ("in_features", "out_features")
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Step = Callable[[Any], Any]


def fork_losses(
    model: nn.Module,
    optimizer: object,
    step: Step,
    batches: Iterable[Any],
    *,
    recipes: str | Sequence[str],
    steps: int = 300,
    mix: NumericsResult | str | Path | None = None,
    keep_higher: str | None = None,
    controls: int = 2,
    validate: Callable[[], Iterable[Any]] | None = None,
    precision: float | None = None,
    minutes: float | None = None,
    training_step: int | None = None,
    state: Iterable[object] = (),
    backend: str = "",
    seed: int = 0,
) -> ForkResult | None:
    """Train BF16, controls and every recipe for `steps` steps on the same batches, from the present state of the training.

    `step`: a function of a batch that runs one complete training step and returns its loss. `batches`: those that the forks
    train on, at least `steps`; the training itself need not see them. `mix`, `keep_higher`: also fork a mix, as `forecast` takes
    it. `controls`: the number of forks in BF16 with one bit changed: how they differ is luck. `validate`: a function that
    returns the losses of held-out batches, called at the end of every fork. `precision`: end a fork early when its gap is known
    to within this. `minutes`: time limit for all forks; they get fewer steps if they would take longer. `training_step`: the
    number of the step that the training has reached. `state`: further objects that a step changes, but does not refer to itself.
    `backend`: whose variant of a recipe to emulate. `seed`: of stochastic rounding. Returns None if nothing could be compared.
    """
    results = list[ForkResult]()
    wanted = [recipes] if isinstance(recipes, str) else list(recipes)

    def run() -> None:
        _check(model)
        given = list(islice(batches, steps))
        if not LEAST_STEPS <= steps == len(given):
            few = f"batches has {len(given)}" if len(given) < steps else f"at least {LEAST_STEPS} tell a gap from noise"
            raise UserError(f"steps={steps} is not possible: {few}")
        changed = [f"{CONTROL} {number}" for number in range(1, controls + 1)]
        forked = list(_names(model, wanted, mix, keep_higher))
        with _uncompiled(), SavedState(model, optimizer, step, given, validate, *state) as saved:
            forks = _Forks(model, step, given, saved, validate, {"backend": backend, "seed": seed})
            result = forks.result(changed, forked, precision, minutes)
        results.append(replace(result, training_step=training_step))

    Guard("the losses of the recipes are not compared", lambda: None).run(run)
    return results[0] if results else None


def _uncompiled() -> Any:
    """Compiled code runs uncompiled meanwhile, because it does not show its linears. What was compiled stays so."""
    is_used = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
    return torch.compiler.set_stance("force_eager") if is_used else nullcontext()


def _check(model: nn.Module) -> None:
    """A `UserError` for models whose forks would not be exact."""
    distributed = torch.distributed
    processes = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    if any(hasattr(one, "device_mesh") or hasattr(one, "_sharded_size") for one in model.parameters()):
        raise UserError("the weights are sharded (FSDP or tensor parallelism), and forks need all of them in one process")
    if processes > 1:
        raise UserError(f"the training has {processes} processes, and their forks could end at different steps")
    if any(type(module).__module__.startswith("transformer_engine") for module in model.modules()):
        raise UserError("the model has modules of Transformer Engine, and forks emulate recipes in nn.Linear only")


def _linears(model: nn.Module) -> dict[str, LinearName]:
    sizes = {path: (one.in_features, one.out_features) for path, one in model.named_modules() if isinstance(one, nn.Linear)}
    return name_linears(sizes)


def _names(model: nn.Module, wanted: Sequence[str], mix: Any, keep_higher: str | None) -> Iterator[str]:
    """The recipes by their names, then the mixes."""
    known = list(dict.fromkeys(recipe(name).name for name in wanted))
    yield from known
    if (request := requested_mix(mix, keep_higher)) is not None:
        ops = tuple(dict.fromkeys(one.role or one.linear for one in _linears(model).values() if one.layer is not None))
        yield from priced_mixes(request, known, ops, None).names


@dataclass
class _Forks:
    """The forks of one state."""

    model: nn.Module
    step: Step
    batches: list[Any]
    saved: SavedState
    validate: Callable[[], Iterable[Any]] | None
    how: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16
    ran: set[str] = field(default_factory=set)
    """The linears that ran as modules."""

    def result(self, controls: list[str], recipes: list[str], precision: float | None, minutes: float | None) -> ForkResult:
        """Train every fork, and compare it with the base."""
        warnings = list[str]()
        pilots = {name: self._fork(name, PILOT) for name in (BASELINE, *controls, *recipes)}
        base = pilots[BASELINE]
        if not self.ran:
            raise UserError(f"no nn.Linear of {type(self.model).__name__} ran in a step: there is nothing to emulate")
        if self._fork(BASELINE, PILOT).losses != base.losses:
            warnings.append(NOT_REPEATABLE)
        for name in recipes:
            if pilots[name].losses == base.losses and recipe((split_name(name) or (name,))[0]).quantizes:
                pilots[name] = Fork(recipe=name, failure="its losses equal those of the base: its linears did not run as modules")
        running = [name for name, fork in pilots.items() if not fork.failure]
        if not set(recipes) & set(running):
            raise UserError(f"no recipe runs: {names((fork.failure for fork in pilots.values() if fork.failure), 2)}")
        self._announce(running, sum(pilots[name].seconds for name in running), minutes)
        base = self._fork(BASELINE, len(self.batches))
        stop = partial(self._is_enough, base.losses, precision)
        runs = {name: base if name == BASELINE else self._fork(name, len(self.batches)) for name in (BASELINE, *controls)}
        runs |= {name: self._fork(name, len(self.batches), stop) if name in running else pilots[name] for name in recipes}
        gaps = [
            loss_gap(name, base.losses, fork.losses, (base.validation, fork.validation))
            for name, fork in runs.items()
            if name != BASELINE and not fork.failure
        ]
        warnings += [FAILED.format(recipe=name, why=fork.failure) for name, fork in runs.items() if fork.failure]
        if luck := luck_of([gap for gap in gaps if gap.recipe in controls]):
            warnings.append(LUCKY.format(luck=luck))
            gaps = [gap if gap.recipe in controls else replace(gap, gap=widened(gap.gap, luck)) for gap in gaps]
        device = next(self.model.parameters()).device
        return ForkResult(
            warnings=tuple(warnings),
            model_name=type(self.model).__name__,
            base=DTYPES.get(self.dtype, str(self.dtype)),
            steps=len(self.batches),
            forks=tuple(runs.values()),
            gaps=tuple(gaps),
            linears=len(_linears(self.model)),
            device=str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type.upper(),
            versions={"torch": torch.__version__, **package_versions()},
        )

    def _announce(self, running: list[str], per_step: float, minutes: float | None) -> None:
        """State the cost, and keep to the time limit."""
        fit = int(60 * minutes / per_step) if minutes is not None else len(self.batches)
        if fit < LEAST_STEPS:
            needed = f"{LEAST_STEPS} steps of every fork take {LEAST_STEPS * per_step / 60:.1f} minutes"
            raise UserError(f"minutes={minutes} is too short: {needed}")
        self.batches = self.batches[:fit]
        steps = len(self.batches)
        say(
            f"gemmscope: {len(running)} forks of {steps} steps ({names(running)}): {len(running) * steps:,} steps, about "
            f"{steps * per_step / 60:.1f} minutes; the state of the training, {memory(self.saved.bytes)}, is kept "
            f"{'on disk' if self.saved.on_disk else 'in memory'}"
        )

    def _fork(self, name: str, steps: int, stop: Callable[[list[float]], bool] = lambda _: False) -> Fork:
        """Train from the saved state, until a loss is not finite."""
        losses, validation, failure, begin, linears = list[float](), tuple[float, ...](), "", time.perf_counter(), 0
        try:
            self.saved.restore()
            with ExitStack() as stack:
                for path, module in self.model.named_modules() if not self.ran else ():
                    if isinstance(module, nn.Linear):
                        hook = Hook(partial(self._note, path), Guard("a linear is not seen", lambda: None))
                        stack.callback(module.register_forward_pre_hook(hook).remove)
                if name.startswith(CONTROL):
                    self._change_one_bit(int(name.removeprefix(CONTROL)))
                elif name != BASELINE:
                    linears = sum(len(stack.enter_context(one).linears) for one in list(self._emulations(name)))
                for batch in self.batches[:steps]:
                    losses.append(_number(self.step(batch)))
                    begin = time.perf_counter() if len(losses) == 1 else begin
                    if not isfinite(losses[-1]) or stop(losses):
                        break
                if not isfinite(losses[-1]):
                    failure = f"the loss is {losses.pop()} at step {len(losses) + 1}"
                elif self.validate is not None and steps > PILOT:
                    validation = tuple(map(_number, self.validate()))
        except Exception as error:
            failure = error.message if isinstance(error, UserError) else in_a_line(error)
        if failure and name == BASELINE:
            raise UserError(f"without any recipe, {failure}")
        seconds = (time.perf_counter() - begin) / max(len(losses) - 1, 1)
        return Fork(recipe=name, losses=tuple(losses), validation=validation, seconds=seconds, linears=linears, failure=failure)

    def _is_enough(self, base: Sequence[float], precision: float | None, losses: list[float]) -> bool:
        """Whether the gap is known well enough to end a fork early."""
        if precision is None or len(losses) not in [max(int(share * len(self.batches)), LEAST_STEPS) for share in CHECKS]:
            return False
        gap = loss_gap("", base, losses).gap
        return (gap.high or 0.0) - (gap.low or 0.0) <= 2 * precision

    def _note(self, path: str, linear: Any, _: tuple[Any, ...]) -> None:
        kind = linear.weight.device.type
        self.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else linear.weight.dtype
        self.ran.add(path)

    def _emulations(self, name: str) -> Iterator[Emulation]:
        """The linears of the layers in a recipe; for a mix, those that it keeps in theirs."""
        low, kept = split_name(name) or (name, KeptHigher(BASELINE))
        linears = _linears(self.model)
        layers = 1 + max((one.layer for one in linears.values() if one.layer is not None), default=-1)
        why_high = {
            path: "it did not run as a module"
            if path not in self.ran
            else "outside of the layers"
            if layers and one.layer is None
            else why_high_precision(path, *(getattr(self.model.get_submodule(path), size) for size in SIZES))
            for path, one in linears.items()
        }
        higher = {
            path
            for path, one in linears.items()
            if (one.layer is not None and kept.keeps_layer(one.layer, layers)) or (one.role or one.linear) in kept.ops
        }
        emulation = Emulation(self.model, low, why_kept=lambda path: why_high[path] or "kept" * (path in higher), **self.how)
        if not emulation.linears:
            path, reason = next(iter(emulation.kept.items()))
            raise UserError(f"there is no linear to emulate: {path or 'it'} stays in {BASELINE} ({reason})")
        yield emulation
        if higher and recipe(kept.recipe).quantizes:
            yield Emulation(
                self.model, kept.recipe, why_kept=lambda path: why_high[path] or "low" * (path not in higher), **self.how
            )

    def _change_one_bit(self, number: int) -> None:
        """Change the last bit, in the precision of the GEMMs, of one of the largest weights of the first linear that ran."""
        weight: Any = self.model.get_submodule(min(self.ran)).weight
        with torch.no_grad():
            flat = weight.detach().view(-1)
            place = flat.abs().topk(number).indices[-1]
            value = flat[place].to(self.dtype).reshape(1)
            value.view(BITS[value.element_size()]).bitwise_xor_(1)
            flat[place] = value[0]


def _number(loss: Any) -> float:
    return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
