"""Folders of run files: read quickly, damaged ones reported, foreign ones refused with a message."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from gemmscope.errors import UserError
from gemmscope.fleet.gather import fleet_result, read_runs
from gemmscope.fleet.summaries import RunSummary, summary
from gemmscope.results import read
from gemmscope.results.fleet import FleetResult
from gemmscope.results.read import read_result
from support.fleets import simulated_fleet
from support.report_files import run_data
from support.run_files import recorded_bench


def write(folder: Path, name: str, data: Any, **device: Any) -> Path:
    """A run file of a GPU."""
    data = json.loads(json.dumps(data))
    data["device"] |= device
    path = folder / name
    path.write_text(json.dumps(data))
    return path


def folder_of(folder: Path, count: int) -> Path:
    data = run_data("bench")
    for gpu in range(count):
        write(folder, f"node{gpu // 2}-{gpu % 2}.json", data, node=f"node{gpu // 2}", index=gpu % 2, uuid=f"GPU-{gpu}")
    return folder


def test_a_folder_gives_what_the_results_give(tmp_path: Path) -> None:
    folder_of(tmp_path, 4)
    runs, findings = read_runs([tmp_path])
    assert findings == []
    fleet = fleet_result(runs)
    assert [gpu.place for gpu in fleet.gpus] == ["node0 GPU 0", "node0 GPU 1", "node1 GPU 0", "node1 GPU 1"]
    assert fleet.gpus[2].file == str(tmp_path / "node1-0.json")
    data = read_result(tmp_path / "node1-0.json")
    assert RunSummary.model_validate(summary(data)) == runs[2].summary  # type: ignore[arg-type]


def test_a_gpu_on_which_nothing_was_measured_has_the_reason(tmp_path: Path) -> None:
    folder_of(tmp_path, 2)
    data = run_data("bench")
    data["linears"] |= {"ops": [], "totals": [], "speedups": []}
    for task in data["tasks"]:
        task["failure"] = "out of memory"
    write(tmp_path, "z.json", data, node="node9", index=0, uuid="GPU-9")
    fleet = fleet_result(read_runs([tmp_path])[0])
    assert [gpu.failure for gpu in fleet.gpus] == ["", "", "nothing was measured (out of memory)"]


def test_a_copy_is_not_a_second_measurement(tmp_path: Path) -> None:
    folder_of(tmp_path, 2)
    content = (tmp_path / "node0-0.json").read_bytes()
    (tmp_path / "old.json.gz").write_bytes(gzip.compress(content))
    runs, [finding] = read_runs([tmp_path])
    assert len(runs) == 2
    assert finding.facts["reasons"] == [f"{tmp_path}/old.json.gz is a copy of {tmp_path}/node0-0.json"]


def test_gzipped_files_and_files_by_name(tmp_path: Path) -> None:
    data = run_data("bench") | {"device": {"name": "NVIDIA H200"}}
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(data).encode()))
    (tmp_path / "notes.txt").write_text("not read")
    runs, _ = read_runs([tmp_path, tmp_path / "a.json.gz"])
    assert len(runs) == 1
    fleet = fleet_result(runs)
    assert [finding.code for finding in fleet.findings] == ["fleet-too-few", "fleet-place-unknown"]
    assert fleet.gpus[0].place == str(tmp_path / "a.json.gz")


DAMAGE: dict[str, Any] = {
    "half of it": lambda data: json.dumps(data)[: len(json.dumps(data)) // 2],
    "not JSON": lambda _: "hello",
    "a list": lambda _: "[]",
    "a time as text": lambda data: json.dumps(data).replace('"total_ms": {"value": ', '"total_ms": {"value": "x", "was": ', 1),
    "another kind": lambda _: json.dumps(run_data("forecast")),
    "a newer version": lambda data: json.dumps(data | {"schema_version": 99}),
    "no device": lambda data: json.dumps({name: value for name, value in data.items() if name != "device"}),
    "deep": lambda data: json.dumps(data).replace('"versions": {', '"versions": {"x": ' + "[" * 300 + "]" * 300 + ",", 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_one_damaged_file_is_reported_and_left_out(damage: str, tmp_path: Path) -> None:
    folder_of(tmp_path, 2)
    (tmp_path / "broken.json").write_text(DAMAGE[damage](run_data("bench")))
    runs, [left_out] = read_runs([tmp_path])
    assert len(runs) == 2
    assert left_out.code == "fleet-files-left-out"
    assert left_out.facts["files"] == 1
    assert "broken.json" in left_out.text
    with pytest.raises(UserError, match=r"broken\.json"):
        read_runs([tmp_path / "broken.json"])


def test_many_damaged_files_are_all_counted(tmp_path: Path) -> None:
    folder_of(tmp_path, 2)
    for number in range(12):
        (tmp_path / f"broken{number:02}.json").write_text("[]" + " " * number)
    _, [left_out] = read_runs([tmp_path])
    assert (left_out.facts["files"], len(left_out.facts["reasons"])) == (12, 12)
    assert len(left_out.text) < sum(map(len, left_out.facts["reasons"]))  # not all are listed


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1.0", "0.0", "1e300"])
def test_times_that_are_none(number: str, tmp_path: Path) -> None:
    """They are not among the figures, so this GPU lacks them."""
    data = run_data("bench")
    data["linears"]["totals"][0]["total_ms"]["value"] = "NUMBER"
    (tmp_path / "a.json").write_text(json.dumps(data).replace('"NUMBER"', number))
    runs, _ = read_runs([tmp_path])
    assert "BF16 linears" not in fleet_result(runs).gpus[0].figures


def test_the_fleets_own_result_in_its_folder_is_skipped(tmp_path: Path) -> None:
    folder_of(tmp_path, 2)
    (tmp_path / "fleet.json").write_text(simulated_fleet(3).to_json())
    runs, findings = read_runs([tmp_path])
    assert (len(runs), findings) == (2, [])
    with pytest.raises(UserError, match="only results of fleet or compare"):
        read_runs([tmp_path / "fleet.json"])


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no run files"):
        read_runs([tmp_path])
    with pytest.raises(UserError, match=r"missing\.json cannot be read"):
        read_runs([tmp_path / "missing.json"])


def test_another_model_is_refused(tmp_path: Path) -> None:
    folder_of(tmp_path, 1)
    data = run_data("bench")
    data["run"]["sequence_length"] = 1024
    write(tmp_path, "other.json", data, node="node7", index=0, uuid="GPU-7")
    runs, _ = read_runs([tmp_path])
    with pytest.raises(
        UserError, match=r"node0-0\.json and .*other\.json did not measure the same: sequence_length: 512 and 1024"
    ):
        fleet_result(runs)


def fleet_file(path: Path, **changes: Any) -> Path:
    data = json.loads(simulated_fleet(8).to_json())
    path.write_text(json.dumps(data | changes))
    return path


def test_a_fleet_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    fleet = simulated_fleet(40, slow={3: 0.2})
    path.write_text(fleet.to_json())
    assert read_result(path).to_json() == fleet.to_json()
    path.write_text(json.dumps(json.loads(fleet.to_json()), sort_keys=True))  # "kind" comes after the GPUs
    assert read_result(path).model_dump() == fleet.model_dump()


def test_large_fleets_have_larger_limits_and_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    liar = json.loads(recorded_bench("first").to_json()) | {"command": {"kind": "fleet"}}
    monkeypatch.setattr(read, "MOST_VALUES", 1500)
    monkeypatch.setattr(read, "LARGEST", 20_000)
    path = tmp_path / "fleet.json"
    fleet = simulated_fleet(100)
    path.write_text(fleet.to_json())
    assert isinstance(read_result(path), FleetResult)
    path.write_text(json.dumps(liar))
    with pytest.raises(UserError, match=r"too large: it has more than 1,500 values"):
        read_result(path)
    fleet_file(path, versions={f"v{number}": "1" for number in range(1600)})
    with pytest.raises(UserError, match=r"too large: it has more than 1,500 values"):
        read_result(path)


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ("none", "gpus is not a list"),
        ([{"place": 1}] * 20_000, r"gpus\.0\.place"),
        ([[[1] * 6000]], r"gpus\.0 has more than 5,000 values"),
        (["x"], r"gpus\.0"),
    ],
)
def test_damaged_gpus_cost_one_message(gpus: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read_result(fleet_file(tmp_path / "fleet.json", gpus=gpus))
