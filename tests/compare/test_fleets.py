"""Two fleets: the same GPUs before and after a change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemmscope.compare.fleets import compare_fleets
from gemmscope.errors import UserError
from gemmscope.fleet.gather import fleet_result
from gemmscope.results.compare import ComparedRow, CompareResult
from gemmscope.results.fleet import FleetResult
from support.fleets import TIMES, VERSIONS, run_of, simulated_runs

CHIPS = 0.01 * np.random.default_rng(0).standard_normal(64)


def fleet(seed: int, *, factor: float = 0.0, gpus: int = 64, slow: dict[int, float] | None = None, **how: Any) -> FleetResult:
    """The same chips, measured again; `factor`: all of them slower."""
    return fleet_result(simulated_runs(gpus, chips=(CHIPS + factor).tolist(), seed=seed, slow=slow, noise=0.002, **how))


def compared(*fleets: FleetResult, **how: Any) -> CompareResult:
    return compare_fleets(fleets, [f"{number}.json" for number in range(len(fleets))], **how)


def of_all(result: CompareResult) -> list[ComparedRow]:
    return [row for row in result.rows if row.what == "NVIDIA H200, all GPUs"]


def test_the_same_fleet_twice() -> None:
    result = compared(fleet(1), fleet(2))
    assert len(result.rows) == 3
    assert {row.changes[0].verdict for row in result.rows} == {"too close to call"}
    assert [finding.code for finding in result.findings] == ["compare-equal", "fleets-compared"]


def test_a_small_change_of_all_gpus_is_seen_although_chips_differ_more() -> None:
    """A change of 0.3% is detected although chips vary by 1%, because each GPU is compared with itself."""
    result = compared(fleet(1), fleet(2, factor=0.003, versions=VERSIONS | {"driver": "575.51.03"}), limit=0.001)
    rows = of_all(result)
    assert [row.recipe for row in rows] == list(TIMES)
    assert {row.changes[0].verdict for row in rows} == {"slower"}
    ratio = rows[0].changes[0].ratio
    assert ratio is not None
    assert ratio.value == pytest.approx(1.003, abs=0.001)
    assert [(difference.name, difference.values) for difference in result.differences] == [("driver", ("570.86.15", "575.51.03"))]
    assert result.failing()


def test_a_gpu_that_became_slow_has_its_own_row() -> None:
    result = compared(fleet(1), fleet(2, slow={9: 0.07}))
    own = [row for row in result.rows if row.what == "node0001 GPU 1"]
    assert [row.changes[0].verdict for row in own] == ["slower"] * 3
    assert own[0].times_ms[1] == pytest.approx((own[0].times_ms[0] or 0) * 1.07, rel=0.01)
    became = next(finding for finding in result.findings if finding.code == "fleets-became-slow")
    assert became.facts["places"] == ["node0001 GPU 1"]
    back = compared(fleet(2, slow={9: 0.07}), fleet(1))
    assert {row.changes[0].verdict for row in back.rows if row.what == "node0001 GPU 1"} == {"faster"}
    assert "fleets-no-longer-slow" in {finding.code for finding in back.findings}


def test_missing_and_new_gpus() -> None:
    before, after = fleet(1), fleet(2)
    fewer = after.model_copy(update={"gpus": after.gpus[3:]})
    said = {finding.code: finding.facts for finding in compared(before, fewer).findings}
    assert said["fleets-missing"]["gpus"] == 3
    assert said["fleets-compared"]["gpus"] == 61
    said = {finding.code: finding.facts for finding in compared(fewer, before).findings}
    assert said["fleets-new"]["places"] == ["node0000 GPU 0", "node0000 GPU 1", "node0000 GPU 2"]


def test_gpus_without_uuid_are_matched_by_their_place() -> None:
    fleets = [
        result.model_copy(update={"gpus": tuple(gpu.model_copy(update={"uuid": ""}) for gpu in result.gpus)})
        for result in (fleet(1), fleet(2))
    ]
    assert compared(*fleets).findings[1].facts["gpus"] == 64


def test_three_fleets() -> None:
    result = compared(fleet(1), fleet(2), fleet(3, factor=0.01))
    row = of_all(result)[0]
    assert [change.verdict for change in row.changes] == ["too close to call", "slower"]
    assert len(row.times_ms) == 3


def test_few_gpus_have_their_own_rows() -> None:
    """Too few for the rule: each is compared by the uncertainty of its own runs."""
    same = compared(fleet(1, gpus=4), fleet(2, gpus=4), limit=0.03)
    assert {row.changes[0].verdict for row in same.rows} == {"too close to call"}
    assert not same.unresolved()
    assert len(same.rows) == 3 * (1 + 4)
    slower = compared(fleet(1, gpus=4), fleet(2, gpus=4, factor=0.05))
    assert {row.changes[0].verdict for row in slower.rows} == {"slower"}
    one = compared(fleet(1, gpus=4), fleet(2, gpus=4, slow={2: 0.1}))
    assert {row.what for row in one.rows if row.changes[0].verdict == "slower"} == {"node0000 GPU 2"}
    assert one.rows[3].times_ms[1] == pytest.approx((one.rows[3].times_ms[0] or 0) * 1.1, rel=0.01)
    single = compared(fleet(1, gpus=1), fleet(2, gpus=1, factor=0.05))
    assert [row.what for row in single.rows] == ["NVIDIA H200, all GPUs"] * 3
    assert {row.changes[0].verdict for row in single.rows} == {"slower"}


def test_a_gpu_of_a_small_fleet_that_one_of_three_fleets_lacks() -> None:
    fewer = fleet(2, gpus=3).model_copy(update={"gpus": fleet(2, gpus=3).gpus[1:]})
    result = compared(fleet(1, gpus=3), fewer, fleet(3, gpus=3))
    first = next(row for row in result.rows if row.what == "node0000 GPU 0")
    assert [change.verdict for change in first.changes] == ["missing", "too close to call"]
    assert first.times_ms[1] is None


def test_equal_fleets_rarely_differ() -> None:
    """The intervals of all recipes hold together: of 100 pairs of equal fleets, about five have any verdict."""
    wrong = sum(
        any(
            row.changes[0].verdict != "too close to call" for row in compared(fleet(seed, gpus=16), fleet(seed + 1, gpus=16)).rows
        )
        for seed in range(1000, 1200, 2)
    )
    assert wrong <= 8


def test_a_replaced_gpu_is_neither_missing_nor_new() -> None:
    after = fleet(2)
    other = after.gpus[10].model_copy(update={"uuid": "GPU-other"})
    result = compared(fleet(1), after.model_copy(update={"gpus": (*after.gpus[:10], other, *after.gpus[11:])}))
    assert {finding.code: finding.facts.get("places") for finding in result.findings} == {
        "compare-equal": None,
        "fleets-compared": None,
        "fleets-replaced": [other.place],
    }


def test_many_missing_gpus_are_all_counted() -> None:
    after = fleet(2)
    result = compared(fleet(1), after.model_copy(update={"gpus": after.gpus[:32]}))
    missing = next(finding for finding in result.findings if finding.code == "fleets-missing")
    assert "32 GPUs" in missing.text
    assert missing.text.endswith("node0004 GPU 7 and 24 more).")


def test_fleets_that_are_not_comparable() -> None:
    other = fleet_result([run_of(0, {}, measured={"command": "bench", "linears": "other"})])
    with pytest.raises(UserError, match=r"0\.json and 1\.json did not measure the same"):
        compared(fleet(1), other)
    elsewhere = fleet_result([run_of(99, {})])
    with pytest.raises(UserError, match="no GPU in common"):
        compared(fleet(1), elsewhere)


def test_fleets_of_other_gpu_types_have_nothing_to_compare() -> None:
    """Nothing compared must not pass as no difference."""
    with pytest.raises(UserError, match=r"no time in common: NVIDIA H200 \(BF16, .*\) and NVIDIA H100 \(BF16"):
        compared(fleet(1), fleet(2, product="NVIDIA H100"), limit=0.03)
    with pytest.raises(UserError, match=r"0\.json and 2\.json have no time in common"):
        compared(fleet(1), fleet(2), fleet(2, product="NVIDIA H100"))
