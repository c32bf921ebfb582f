"""Kills nodes of a Ray cluster while a real command measures a sweep on it, and checks the result."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.processes import MARKER
from support.ray_cluster import RayCluster

TINY = "bench --device cpu --shapes 64x64x64 --recipes BF16 --autocast-only --num-iters 2 --num-warmup 0"
HANGS_AFTER_S = 1800.0
RAYS_OWN = re.compile(
    r"raylet|\(pid=|\(PlaceActor|autoscaler|gcs|worker\.py|core_worker|ray\.init|ActorDied|Traceback|\[\d{4}-\d\d-\d\d ", re.I
)
"""What only Ray, or Python, would print."""


@dataclass
class KillReport:
    """What happened. `problems` are sentences; none: everything is as it should be."""

    code: int = -999
    points: int = 0
    measured: int = 0
    kills: int = 0
    repeated: int = 0
    """Units that were lost with their nodes and begun again."""
    added: int = 0
    seconds: float = 0.0
    stdout: str = ""
    stderr: str = ""
    findings: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def sweep_with_kills(
    cluster: RayCluster, folder: Path, points: int, moments: list[int], choice: random.Random, *, resume: bool = False
) -> KillReport:
    """Measure so many points on the cluster. When as many points are finished as `moments` says, a node is killed, a random time
    later; then one is added. Every fourth time, half of the nodes are killed at once."""
    file, state = folder / "sweep.json", folder / "state"
    report, seen = KillReport(points=points), dict[str, Any]()
    nodes = len(cluster.nodes)
    command = f"{TINY} --sweep m={','.join(str(8 * (index + 1)) for index in range(points))} --json {file}"
    arguments = [*command.split(), "--ray", cluster.address, *(["--resume"] if resume else [])]
    environment = {**os.environ, "XDG_STATE_HOME": str(state), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    begin = time.monotonic()
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        driver = subprocess.Popen(
            [sys.executable, "-m", "gemmscope", *arguments], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            env={**environment, MARKER: str(folder)}, cwd=folder, start_new_session=True,
        )  # fmt: skip
        try:
            waiting = sorted(moments)
            while driver.poll() is None and time.monotonic() - begin < HANGS_AFTER_S:
                if waiting and len(outcomes(state)) >= waiting[0]:
                    waiting.pop(0)
                    time.sleep(choice.uniform(0.0, 2.0))
                    for _ in range(nodes // 2 if report.kills % 4 == 3 else 1):
                        cluster.kill(choice.choice(cluster.nodes))
                        report.kills += 1
                    _note(seen, file, report)
                    time.sleep(choice.uniform(0.0, 3.0))
                    while len(cluster.nodes) < nodes:
                        cluster.add()
                        report.added += 1
                time.sleep(0.1)
        finally:
            if driver.poll() is None:
                driver.kill()
                report.problems.append("the command did not end")
            driver.wait()
    _note(seen, file, report)
    report.code, report.seconds = driver.returncode, time.monotonic() - begin
    report.stdout = (folder / "stdout").read_text()
    report.stderr = (folder / "stderr").read_text()
    _check(report, seen, file, state)
    return report


def outcomes(state: Path) -> list[tuple[str, Any]]:
    """The units that the driver has in its journal, as often as they are there."""
    path = next((state / "gemmscope").glob("journal*.sqlite3"), None)
    if path is None:
        return []
    with suppress(sqlite3.OperationalError), closing(sqlite3.connect(path, timeout=30)) as database:
        return [(unit, json.loads(text)) for unit, text in database.execute("SELECT unit, content FROM outcome ORDER BY rowid")]
    return []


def points_of(file: Path) -> list[dict[str, Any]]:
    """The points in a run file that have been measured."""
    if not file.exists():
        return []
    points = [point for sweep in json.loads(file.read_text())["sweeps"] for point in sweep["points"]]
    return [point for point in points if point["times_ms"]]


def _note(seen: dict[str, Any], file: Path, report: KillReport) -> None:
    """Entries of the streamed file never change."""
    now = {json.dumps(point["values"]): point["times_ms"] for point in points_of(file)}
    for name, times in seen.items():
        if now.get(name) != times:
            report.problems.append(f"the point {name} was in the file, and was lost or measured again")
    seen.update(now)


def _check(report: KillReport, seen: dict[str, Any], file: Path, state: Path) -> None:
    """Every outcome of the journal is in the file, once; the exit code and the streams are as they should be."""
    say = report.problems.append
    journaled, points = outcomes(state), points_of(file)
    report.measured = len(points)
    if len({unit for unit, _ in journaled}) != len(journaled):
        say("the journal has a unit twice")
    if len(points) != len(seen):
        say("the file has a point twice")
    if len(journaled) != len(points):
        say(f"{len(journaled)} outcomes arrived, and {len(points)} points are in the file")
    kept = {value for _, data in journaled for value in numbers(data)}
    for point in points:
        if not set(numbers(point["times_ms"])) <= kept:
            say(f"the point {point['values']} is not what arrived")
    if report.code != 0:
        say(f"exit code {report.code}")
    if len(points) != report.points:
        say(f"{len(points)} of {report.points} points measured")
    for name, text in (("standard output", report.stdout), ("standard error", report.stderr)):
        if strange := [line for line in text.splitlines() if RAYS_OWN.search(line) and "pool" not in line][:3]:
            say(f"on {name}: {strange}")
    if file.exists():
        report.findings = {finding["code"]: finding["facts"] for finding in json.loads(file.read_text())["findings"]}
        report.repeated = int(report.findings.get("pool-units-repeated", {}).get("units", 0))


def numbers(data: Any) -> list[float]:
    """Every number in plain data."""
    if isinstance(data, bool) or data is None or isinstance(data, str):
        return []
    if isinstance(data, (int, float)):
        return [float(data)]
    return [number for value in (data.values() if isinstance(data, dict) else data) for number in numbers(value)]


def fresh(folder: Path) -> Path:
    """An empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
