"""Kills nodes of a real Ray cluster on this machine while `gemmscope bench --sweep --ray` measures on it: what is lost?

`python benchmarks/ray_kills.py --points 200 --moments 20 --seed 1`. Four nodes measure points on the CPU. At random moments a
node is killed (every fourth time half of them at once), and another one is added after a random time. Every result that arrived
must be in the run file exactly once and stay there as it is, the rest must be measured again, the exit code must be 0, nothing
that Ray prints may reach the command's output, and no process may remain. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.processes import MARKER, left_running
from support.ray_cluster import RayCluster
from support.ray_kills import sweep_with_kills


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    choice = random.Random(chosen.seed)
    moments = [choice.randrange(chosen.points - chosen.nodes) for _ in range(chosen.moments)]
    with tempfile.TemporaryDirectory(prefix="gemmscope-kills-") as name:
        folder = Path(name)
        with RayCluster(chosen.nodes, {MARKER: str(folder)}) as cluster:
            report = sweep_with_kills(cluster, folder, chosen.points, moments, choice)
        left = left_running(str(folder))
    if left:
        report.problems.append(f"{len(left)} processes left")
    print(f"{report.measured} of {report.points} points in the file, exit code {report.code}, {report.seconds:.0f} s")
    print(f"{report.kills} nodes killed at {chosen.moments} moments, {report.added} added")
    print(f"{report.repeated} measurements lost with their nodes and repeated")
    for code, facts in report.findings.items():
        print(f"finding {code}: {facts}")
    print(report.stderr if report.problems else "", end="")
    print("\n".join(f"PROBLEM: {problem}" for problem in report.problems) or "no problem")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
