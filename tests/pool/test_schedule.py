"""The schedule in simulated time: whatever places do, every unit ends with one outcome or one failure."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.engine.journal import Journal
from gemmscope.errors import UserError
from gemmscope.pool.pool import Event, Outcomes, Place, PlaceFound, PoolEnded, Unit, UnitDone
from gemmscope.pool.schedule import MOST_TRIES, Limits, Schedule
from gemmscope.progress import PoolProgress, Reporter
from support.fake_pool import FOREVER, FakePool, Fate

LIMITS = Limits(silence_s=30, return_s=40, start_s=100, copy_after=(3, 20), leave_after=(4, 40), longest=(20, 300))


def gpus(count: int, per_node: int = 4, shared: int = 1, cores: int = 64) -> list[Place]:
    """So many places; `shared` of them on every GPU."""
    return [
        Place(f"p{n}", f"node{n // per_node}", n // shared % per_node, f"GPU-{n // shared}", {"cores": cores})
        for n in range(count)
    ]


def run(pool: FakePool, units: list[Unit] | None = None, **options: Any) -> tuple[Outcomes, Counter[str]]:
    seen: Counter[str] = Counter()
    schedule = Schedule(
        pool,
        units if units is not None else [],
        on_outcome=lambda unit, *_: seen.update([unit.key]),
        limits=LIMITS,
        clock=pool.clock,
        **options,
    )
    outcomes = schedule.run()
    assert not pool.problems
    assert set(seen) == set(outcomes.done)
    assert set(seen.values()) <= {1}
    assert not set(outcomes.done) & set(outcomes.failed)
    return outcomes, seen


def units(count: int, places: list[Place] | None = None) -> list[Unit]:
    return [Unit(f"u{n}", n, places[n % len(places)].key if places else "") for n in range(count)]


fates = st.builds(
    Fate,
    kind=st.sampled_from(["done", "done", "done", "fails", "dies", "refuses", "silent", "slow", "twice", "late"]),
    seconds=st.sampled_from([0.1, 1.0, 7.0, 25.0, 100.0]),
    away_s=st.sampled_from([None, 0.5, 20.0, 500.0]),
)


@settings(max_examples=60 * int(os.environ.get("GEMMSCOPE_SEEDS", "1")), deadline=None)
@given(
    st.integers(1, 7),
    st.integers(0, 12),
    st.lists(fates, min_size=1, max_size=12),
    st.booleans(),
    st.booleans(),
    st.integers(1, 2),
    st.sampled_from([None, 1, 2]),
    st.booleans(),
    st.sampled_from([(0.0,), (0.0, 3.0, 50.0)]),
)
def test_every_unit_ends_once(
    count: int,
    total: int,
    drawn: list[Fate],
    bound: bool,
    deaf: bool,
    shared: int,
    at_once: int | None,
    always_expecting: bool,
    found_after_s: tuple[float, ...],
) -> None:
    places = gpus(count, shared=shared)
    pool = FakePool(places, drawn, deaf=deaf, always_expecting=always_expecting, found_after_s=found_after_s)
    outcomes, _ = run(pool, units(total, places if bound else None), at_once=at_once)
    assert set(outcomes.done) | set(outcomes.failed) == {f"u{n}" for n in range(total)}
    assert pool.now < FOREVER
    tries = Counter(unit for _, unit in pool.assigned)
    assert all(number <= MOST_TRIES + 2 + len(outcomes.refused) for number in tries.values())  # and two copies
    if at_once is not None and not deaf:
        assert pool.most_busy <= at_once


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.lists(fates, min_size=1, max_size=8), st.integers(1, 3))
def test_units_of_places_that_are_found(count: int, drawn: list[Fate], repeat: int) -> None:
    places = gpus(count)
    pool = FakePool(places, drawn, found_after_s=(0.0, 2.0, 30.0))
    outcomes, _ = run(pool, units_of=lambda place: [Unit(f"{place.key} {n}", n, place.key) for n in range(repeat)])
    assert set(outcomes.done) | set(outcomes.failed) == {f"{place.key} {n}" for place in places for n in range(repeat)}
    assert all(key.startswith(done.place.key) for key, done in outcomes.done.items())


def test_what_no_place_disturbs_is_all_done() -> None:
    pool = FakePool(gpus(8), (Fate(seconds=10.0),))
    outcomes, _ = run(pool, units(40))
    assert len(outcomes.done) == 40
    assert len(pool.assigned) == 40
    assert pool.now == pytest.approx(50, abs=5)  # eight at a time
    assert [finding.code for finding in outcomes.findings] == ["pool-shares-host"]


def test_a_lost_unit_is_repeated_elsewhere_before_the_others() -> None:
    pool = FakePool(gpus(2), (Fate("dies", 3.0), *[Fate(seconds=10.0)] * 20))
    outcomes, _ = run(pool, units(6))
    assert len(outcomes.done) == 6
    at = [place for place, unit in pool.assigned if unit == "u0"]
    assert len(at) == 2
    assert at[0] != at[1]
    assert [unit for _, unit in pool.assigned].index("u0", 1) <= 4
    assert outcomes.repeated == len(outcomes.lost)
    assert "pool-places-lost" in [finding.code for finding in outcomes.findings]


def test_a_unit_that_kills_every_place_fails_after_three() -> None:
    outcomes, _ = run(FakePool(gpus(4), (Fate("dies", 1.0),)), units(1))
    [failure] = outcomes.failed.values()
    assert failure.why == "lost 3 times; the last reason: signal 9"
    assert len(outcomes.lost) == 3


def test_places_that_refuse_cost_the_unit_nothing() -> None:
    pool = FakePool(gpus(8), (*[Fate("refuses", 1.0)] * 5, *[Fate()] * 20))
    outcomes, _ = run(pool, units(2))
    assert len(outcomes.done) == 2
    assert len(outcomes.refused) == 5


def test_a_place_that_refuses_fails_what_only_it_could_measure() -> None:
    places = gpus(2)
    outcomes, _ = run(FakePool(places, (Fate("refuses", 1.0), *[Fate()] * 20)), units(4, places))
    assert [(failure.place, failure.why) for failure in outcomes.failed.values()] == [("p0", "in use")] * 2
    assert len(outcomes.done) == 2


def test_a_silent_place_is_reported_and_its_unit_measured_elsewhere() -> None:
    outcomes, _ = run(FakePool(gpus(2), (Fate("silent"), *[Fate(seconds=50.0)] * 20)), units(3))
    assert len(outcomes.done) == 3
    assert [(loss.place, loss.why) for loss in outcomes.lost] == [("p0", "no sign of life for 30 s")]


def test_a_driver_that_was_stopped_does_not_call_the_others_silent() -> None:
    """Ctrl-Z for some minutes: signs of life and outcomes are in its pipes when it continues, and it reads them one by one."""

    class Stopped(FakePool):
        def events(self, wait_s: float) -> Iterable[Event]:
            if 10 < self.now < 200:
                self.now += 1000
            return super().events(wait_s)

    places = gpus(3)
    for bound in (None, places):
        outcomes, _ = run(Stopped(places, [Fate(seconds=50.0)]), units(6, bound))
        assert len(outcomes.done) == 6
        assert not outcomes.lost


def test_a_slow_unit_runs_twice_and_counts_once() -> None:
    pool = FakePool(gpus(3), (Fate("slow"), *[Fate(seconds=5.0)] * 20))
    outcomes, _ = run(pool, units(5))
    assert len(outcomes.done) == 5
    assert [unit for _, unit in pool.assigned].count("u0") == 2
    assert outcomes.done["u0"].place.key != "p0"
    assert not outcomes.lost  # nothing died: it was ended because it was not needed
    assert pool.now < 60


def test_a_slow_place_is_not_waited_for() -> None:
    places = gpus(4)
    outcomes, _ = run(FakePool(places, (Fate("slow"), *[Fate(seconds=8.0)] * 20)), units(4, places))
    assert set(outcomes.failed) == {"u0"}
    assert outcomes.failed["u0"].place == "node0 GPU 0"
    assert "the others took 8 s" in outcomes.failed["u0"].why


def test_a_bound_unit_waits_for_its_place() -> None:
    places = gpus(2)
    outcomes, _ = run(FakePool(places, (Fate("dies", 1.0, away_s=30.0), *[Fate()] * 20)), units(2, places))
    assert len(outcomes.done) == 2
    assert outcomes.done["u0"].place.key == "p0"


def test_a_bound_unit_fails_if_its_place_stays_away() -> None:
    places = gpus(2)
    outcomes, _ = run(FakePool(places, (Fate("dies", 1.0, away_s=None), Fate())), units(2, places))
    assert outcomes.failed["u0"].why == "node0 GPU 0 was lost and did not come back"


def test_places_that_share_a_gpu_are_one_gpu_of_the_progress() -> None:
    seen = []

    class Progress(Reporter):
        @contextmanager
        def spreading(self, what: str) -> Iterator[Callable[[PoolProgress], None]]:
            yield seen.append

    run(FakePool(gpus(2, shared=2), (Fate(seconds=10.0),)), units(2), reporter=Progress())
    assert max(state.places for state in seen) == 1


def test_two_places_of_one_gpu_take_turns() -> None:
    pool = FakePool(gpus(2, shared=2), (Fate(seconds=10.0),))
    outcomes, _ = run(pool, units(6))
    assert len(outcomes.done) == 6
    assert [place for place, _ in pool.assigned] == ["p0", "p1"] * 3


def test_few_cores_limit_how_many_measure_at_the_same_time() -> None:
    pool = FakePool(gpus(4, cores=5), (Fate(seconds=10.0),))
    outcomes, _ = run(pool, units(8))
    assert pool.most_busy == 2
    few = next(finding for finding in outcomes.findings if finding.code == "pool-few-cores")
    assert few.facts == {"nodes": "node0", "cores": 5, "gpus": 4, "at_once": 2}


def test_no_place_at_all() -> None:
    outcomes, _ = run(FakePool([]), units(2))
    assert [failure.why for failure in outcomes.failed.values()] == ["no GPU is left that can measure it"] * 2


def test_the_end_of_the_pool_fails_the_rest() -> None:
    class Ending(FakePool):
        def events(self, wait_s: float) -> list[Event]:
            return [PoolEnded("the head node is gone", "start it")] if self.now > 10 else list(super().events(wait_s))

    outcomes, _ = run(Ending(gpus(2), (Fate(seconds=4.0),)), units(10))
    assert len(outcomes.done) == 4
    assert {(failure.why, failure.hint) for failure in outcomes.failed.values()} == {("the head node is gone", "start it")}


def test_a_limit_of_none_is_invalid() -> None:
    with pytest.raises(UserError, match="must be at least 1"):
        Schedule(FakePool([]), at_once=0)


def test_what_an_earlier_run_has_is_not_measured_again(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal")) as journal:
        with journal.recording("mark", "") as recording:
            run(FakePool(gpus(1)), units(3), recording=recording)
        with journal.recording("mark", "", resume=True) as recording:
            pool = FakePool(gpus(2))
            schedule = Schedule(pool, units(5), recording, clock=pool.clock)
            assert set(schedule.outcomes.done) == {"u0", "u1", "u2"}
            outcomes = schedule.run()
            assert len(outcomes.done) == 5
            assert sorted(unit for _, unit in pool.assigned) == ["u3", "u4"]
            assert outcomes.resumed == 3
            assert outcomes.done["u0"] == (gpus(1)[0], {"by": "p0"})
            assert set(recording.outcomes()) == {f"u{n}" for n in range(5)}


def test_an_outcome_that_cannot_be_written_is_kept_and_said(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal")) as journal, journal.recording("mark", "") as recording:
        journal.ask("DROP TABLE outcome")
        pool = FakePool(gpus(1))
        with pytest.raises(UserError):
            recording.outcomes()
        schedule = Schedule(pool, units(2), clock=pool.clock)
        schedule._recording = recording
        outcomes = schedule.run()
    assert len(outcomes.done) == 2
    assert [finding.code for finding in outcomes.findings] == ["journal-incomplete"]


def test_a_thousand_places() -> None:
    pool = FakePool(gpus(1000, per_node=8), (Fate(seconds=10.0), Fate("dies", 3.0), *[Fate(seconds=9.0)] * 20))
    outcomes, _ = run(pool, units(1500))
    assert len(outcomes.done) + len(outcomes.failed) == 1500
    assert outcomes.repeated > 50
    assert max(len(finding.text) for finding in outcomes.findings) < 400


def test_events_of_unknown_places_and_units_change_nothing() -> None:
    class Confused(FakePool):
        def events(self, wait_s: float) -> list[Event]:
            strange = [UnitDone("nowhere", "u0", 1), UnitDone("p0", "nothing", 1)] if self.assigned else []
            return [*strange, *super().events(wait_s), PlaceFound(self.places[0])][: None if not self.assigned else -1]

    outcomes, _ = run(Confused(gpus(1)), units(2))
    assert len(outcomes.done) == 2
