"""Forks of a training, `benchmarks/fork_loop.py`: it goes on bit for bit, forks repeat, bad input is one message; statistics."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fork_loop  # noqa: E402
import fork_state  # noqa: E402
from fork_result import ForkResult, time_to_same_loss  # noqa: E402
from fork_state import SavedState  # noqa: E402
from fork_statistics import is_known, local_slope, loss_gap, luck_of, separated, tokens_and_ratio, widened  # noqa: E402
from gemmscope.interval import Interval  # noqa: E402
from gemmscope.numerics.evaluation.emulate import Emulation  # noqa: E402
from support import training_loops  # noqa: E402

WIDTH, STEPS = 128, 10


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fork_loop, "LEAST_STEPS", STEPS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Blocks(nn.Module):
    """Two layers with a batch norm and dropout, a head, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Everything:
    """A training with everything that a step may change."""

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.AdamW, *, dtype: Any = torch.bfloat16, **how: Any) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = Blocks()
        self.optimizer = optimizer(self.model.parameters(), lr=0.01, **how)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.history: list[float] = []
        self.steps, self.dtype = 0, dtype
        data = torch.Generator().manual_seed(2)
        self.batches = [(torch.randn(16, WIDTH, generator=data), torch.randint(8, (16,), generator=data)) for _ in range(40)]

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype is not torch.float32):
                loss = functional.cross_entropy(self.model(x).float(), y) * (1 + 0.01 * random.random() + 0.01 * np.random.rand())
            self.scaler.scale(loss / 2).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.average.update_parameters(self.model)
        self.history.append(float(loss.detach()))
        self.steps += 1
        return loss

    def fork(self, recipes: Any = "MXFP8", **how: Any) -> ForkResult | None:
        return fork_loop.fork_losses(
            self.model, self.optimizer, self.step, self.batches[20:], recipes=recipes, **{"steps": STEPS, "controls": 1, **how}
        )

    def left(self) -> dict[str, str]:
        """Everything that the training leaves behind."""
        states = [self.model, self.average, self.optimizer, self.scheduler.state_dict(), self.scaler.state_dict(), self.history]
        generators = [random.getstate(), np.random.get_state()[1], torch.get_rng_state()]
        return dict(training_loops._left("kept", [*states, self.steps, *generators]))


def trained(between: Callable[[Everything], object] = lambda loop: None, **how: Any) -> dict[str, str]:
    loop = Everything(**how)
    for number, batch in enumerate(loop.batches[:6]):
        if number == 3:
            between(loop)
        loop.step(batch)
    return loop.left()


def test_the_training_goes_on_as_if_nothing_had_happened() -> None:
    results: list[Any] = []
    assert trained(lambda loop: results.append(loop.fork())) == trained()
    assert [len(fork.losses) for fork in results[0].forks] == [STEPS] * 3
    assert (results[0].base, results[0].warnings) == ("BF16", ())


def test_before_the_first_step_and_between_backward_and_step() -> None:
    """The optimizer has no state yet; gradients are there already."""

    def start(*, forked: bool) -> dict[str, str]:
        loop = Everything()
        loop.fork() if forked else None
        loop.step(loop.batches[0])
        loop.model(loop.batches[1][0]).sum().backward()
        loop.fork() if forked else None
        loop.optimizer.step()
        return loop.left()

    assert start(forked=True) == start(forked=False)


def test_forks_repeat_and_see_all_three_gemms() -> None:
    """A fork computes what a training in `Emulation` computes; two forks of a recipe are equal."""
    loop = Everything()
    results = [loop.fork("NVFP4", validate=lambda: [loop.model(loop.batches[0][0]).sum()]) for _ in range(2)]
    assert results[0] is not None
    first, second = ([(fork.recipe, fork.losses, fork.validation) for fork in one.forks] for one in results if one is not None)
    assert first == second
    assert len({losses for _, losses, _ in first}) == 3
    assert all(len(validation) == 1 for _, _, validation in first)
    with Emulation(loop.model, "NVFP4", seed=0, why_kept=lambda path: "head" if path == "head" else ""):
        losses = [float(loop.step(batch).detach()) for batch in loop.batches[20 : 20 + STEPS]]
    assert tuple(losses) == first[2][1]
    assert [fork.linears for fork in results[0].forks] == [0, 0, 2]


@pytest.mark.parametrize(("error", "at"), [(RuntimeError, 1), (RuntimeError, 20), (KeyboardInterrupt, 20)])
def test_an_error_leaves_the_training_as_it_was(error: type[BaseException], at: int, capsys: pytest.CaptureFixture[str]) -> None:
    """In the first step of all, in the pilots, and in a fork."""

    def interrupted(loop: Everything) -> None:
        count, whole = 0, loop.step

        def step(batch: Any) -> Tensor:
            nonlocal count
            count += 1
            if count == at:
                raise error("of the user")
            return whole(batch)

        try:
            loop.step = step  # type: ignore[method-assign]
            loop.fork()
        except KeyboardInterrupt:
            assert error is KeyboardInterrupt
        finally:
            del loop.step

    assert trained(interrupted) == trained()
    if error is RuntimeError and at < 20:
        assert capsys.readouterr().err.count("the training goes on") <= 1


def refusal(capsys: pytest.CaptureFixture[str], between: Callable[[Everything], object]) -> str:
    """The one line that is said; the training is the same."""
    expected = trained()
    capsys.readouterr()
    assert trained(lambda loop: (between(loop), None)) == expected
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "the training goes on" in line]
    return line.partition("the training goes on: ")[2]


def drive_profiler(loop: Everything) -> None:
    profiler = torch.profiler.profile()

    def step(batch: Any) -> Tensor:
        profiler.step()
        return loop.step(batch)

    fork_loop.fork_losses(loop.model, loop.optimizer, step, loop.batches, recipes="MXFP8", steps=STEPS)


REFUSED: dict[str, tuple[Callable[[Everything], object], str]] = {
    "too few batches": (lambda loop: loop.fork(steps=30), "steps=30 is not possible: batches has 20"),
    "too few steps": (lambda loop: loop.fork(steps=2), "steps=2 is not possible: at least 10 tell a gap from noise"),
    "an unknown recipe": (lambda loop: loop.fork("FP9"), "FP9"),
    "NaN": (
        lambda loop: fork_loop.fork_losses(
            loop.model, loop.optimizer, lambda batch: loop.step(batch) * float("nan"), loop.batches, recipes="MXFP8", steps=STEPS
        ),
        "without any recipe, the loss is nan at step 1",
    ),
    "no linears": (
        lambda loop: fork_loop.fork_losses(nn.GELU(), None, lambda _: 1.0, range(STEPS), recipes="MXFP8", steps=STEPS),
        "no nn.Linear of GELU ran in a step",
    ),
    "a profiler": (lambda loop: drive_profiler(loop), "the training step refers to a profiler"),
    "no time": (lambda loop: loop.fork(minutes=0.0), "minutes=0.0 is too short"),
}


@pytest.mark.parametrize(("between", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_message(between: Any, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(capsys, between)


def test_several_processes_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert Everything().fork() is None
    assert "the training has 2 processes" in capsys.readouterr().err


def test_a_recipe_that_diverges_is_a_result() -> None:
    loop = Everything()
    whole = loop.step

    def step(batch: Any) -> Any:
        loss = whole(batch)
        return loss * float("inf") if "forward" in vars(loop.model.layers[0][0]) and loop.steps > 6 else loss

    result = fork_loop.fork_losses(loop.model, loop.optimizer, step, loop.batches, recipes="MXFP8", steps=STEPS)
    assert result is not None
    assert result.warnings[0].startswith("MXFP8 has no gap: the loss is inf at step")
    assert [gap.recipe for gap in result.gaps] == ["control 1", "control 2"]


def test_state_on_disk_and_state_that_fits_nowhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fork_state, "free_memory_bytes", lambda: 1000)
    assert trained(lambda loop: loop.fork()) == trained()
    assert "is kept on disk" in capsys.readouterr().err
    monkeypatch.setattr(fork_state, "USED_SHARE", 0.0)
    assert "the state of the training has 0.0 GiB" in refusal(capsys, lambda loop: loop.fork())


def test_numbers_of_generators_and_arrays_are_put_back() -> None:
    own = [random.Random(1), np.random.RandomState(1), np.random.default_rng(1), np.zeros(3), torch.Generator().manual_seed(1)]

    def draw() -> list[Any]:
        own[3][0] += 1  # type: ignore[index]
        drawn = (own[0].random(), own[1].rand(), own[2].random(), own[3].sum())  # type: ignore[attr-defined]
        return [*drawn, float(torch.rand((), generator=own[4])), random.random(), np.random.rand(), float(torch.rand(()))]  # type: ignore[call-overload]

    with SavedState(draw) as saved:
        first = draw()
        saved.restore()
        assert draw() == first
    assert draw() == first


def covers(interval: Interval, truth: float) -> bool:
    return interval.low is not None and interval.high is not None and interval.low <= truth <= interval.high


def test_the_interval_of_a_gap_covers_the_truth() -> None:
    """In 90% of made trainings; benchmarks/loss_coverage.py has the table."""
    rng = np.random.default_rng(0)
    gaps = [loss_gap("", np.zeros(100), 0.004 + 0.02 * rng.standard_normal(100)) for _ in range(40)]
    assert 0.82 <= np.mean([covers(gap.gap, 0.004) for gap in gaps]) <= 0.98


def test_a_gap_that_grows() -> None:
    """The gap is the mean over the second half; the trend is per 100 steps."""
    base = np.zeros(400)
    gap = loss_gap("", base, 1e-4 * np.arange(400) + 1e-9 * np.random.default_rng(0).standard_normal(400))
    assert gap.gap.value == pytest.approx(0.02995, rel=0.01)
    assert gap.trend.value == pytest.approx(0.01, rel=1e-3)
    assert separated(gap.trend)


def curve() -> tuple[list[float], list[float]]:
    """Every tenth step of a training whose loss is a power law."""
    rng, steps = np.random.default_rng(4), np.arange(10.0, 20_001, 10)
    return list(steps), list(1.7 + 15.6 * steps**-0.3 + 0.01 * rng.standard_normal(len(steps)))


def test_slope_tokens_and_ratio_of_a_known_curve() -> None:
    slope, true = local_slope(*curve(), 20_000), 0.3 * 15.6 * 20_000**-0.3 / 100
    assert covers(slope, true)
    assert slope.value == pytest.approx(true, rel=0.05)
    tokens, ratio = tokens_and_ratio(Interval(0.02, 0.015, 0.025), slope, Interval(1.5, 1.48, 1.52), 1.96)
    assert tokens.value == pytest.approx(np.exp(0.02 / true / 100), rel=0.01)
    assert ratio is not None
    assert ratio.value == pytest.approx(1.5 / tokens.value)
    assert (ratio.low or 0.0) < ratio.value < (ratio.high or 0.0) < 1.5
    rng = np.random.default_rng(0)
    assert not is_known(local_slope(range(1, 2001), list(2.5 + 0.05 * rng.standard_normal(2000)), 2000))
    assert not is_known(local_slope(range(1, 2001), [2.0 + step / 2000 for step in range(2000)], 2000))  # the loss rises


def test_luck_of_the_controls() -> None:
    """Nothing where their intervals include zero; else the more, the fewer there are."""
    quiet = [loss_gap("control 1", np.zeros(100), 0.001 * np.random.default_rng(0).standard_normal(100))]
    loud = [loss_gap("control 1", np.zeros(100), sign * 0.005 + 1e-5 * (np.arange(100) % 7)) for sign in (1, -1)]
    assert luck_of(quiet) == 0
    assert luck_of(loud[:1]) == pytest.approx(6.314 * 0.005, rel=0.1)
    assert luck_of(loud) == pytest.approx(2.92 * 0.005, rel=0.1)
    assert widened(Interval(0.0, -0.003, 0.003), 0.004) == Interval(0.0, -0.005, 0.005)


def test_the_table() -> None:
    result = Everything().fork()
    assert result is not None
    complete = time_to_same_loss(result, *curve(), {"MXFP8": Interval(1.5, 1.48, 1.52)})
    assert complete.gaps[0].tokens is complete.gaps[0].ratio is None
    assert complete.gaps[1].ratio is not None
    assert [line.split()[0] for line in str(complete).splitlines()[3:6]] == ["recipe", "control", "MXFP8"]
    assert "1.50x [1.48, 1.52]" in str(complete)
    assert "there is no ratio" in str(result)
    flat = time_to_same_loss(result, range(1, 101), [2.0 + step / 100 for step in range(100)])
    assert flat.gaps[1].tokens is None
    assert "The slope of the loss is not known well enough" in str(flat)
