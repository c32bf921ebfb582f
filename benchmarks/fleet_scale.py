"""Time and memory to gather and show the results of 10,000 GPUs (simulated), in a process of its own.

    python benchmarks/fleet_scale.py [--gpus 10000] [--files 200]

The summaries are made first and written as JSON lines, as a driver's journal holds them. Then a fresh process reads them, gathers
the fleet, writes the run file, the terminal's text, the page and the table, and reads the run file back. Exit code 1 above 30 s
of CPU time or 1 GiB. `--files`: also times how long it takes to gather that many ordinary run files from a folder.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_SECONDS, MOST_BYTES = 30.0, 1 << 30
TESTS = Path(__file__).parent.parent / "tests"
DATA = TESTS / "data" / "h200_bench_first.json.gz"
sys.path.append(str(TESTS))


def write_summaries(path: Path, gpus: int) -> None:
    """Simulated runs with 5% of slow GPUs, one slow node and another driver on one node."""
    from support.fleets import VERSIONS, simulated_runs  # so that the measured process does not import it

    slow = dict.fromkeys(range(0, gpus, 20), 0.08) | dict.fromkeys(range(16, 24), 0.1)
    runs = simulated_runs(gpus, spread=0.01, slow=slow, modes=("autocast", "pre-quantized"))
    with path.open("w") as file:
        for number, run in enumerate(runs):
            own = run.summary
            if number // 8 == 5:
                own = own.model_copy(update={"versions": VERSIONS | {"driver": "565.57.01"}})  # type: ignore[union-attr]
            file.write(json.dumps(own.model_dump(mode="json")) + "\n")  # type: ignore[union-attr]


class Watch:
    """Times what it is asked to do."""

    def __init__(self) -> None:
        self.began, self.rows = time.perf_counter(), list[tuple[str, float, float]]()

    def do(self, name: str, action: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = action()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.rows.append((name, time.perf_counter() - began, peak))
        return result


def measured(folder: Path) -> None:
    """Run and time every step that a user waits for, in this process."""
    watch = Watch()

    def gather() -> Any:
        from gemmscope.fleet.gather import Run, fleet_result

        with (folder / "summaries.jsonl").open() as file:
            return fleet_result((Run(json.loads(line)) for line in file), command="gemmscope fleet --preset llama-3.1-8b")

    def read() -> Any:
        from gemmscope.results.read import read_result

        return read_result(folder / "fleet.json")

    fleet = watch.do("gather", gather)
    watch.do("run file", lambda: fleet.save(folder / "fleet.json"))
    watch.do("terminal", lambda: (folder / "fleet.txt").write_text(str(fleet)))
    watch.do("page", lambda: fleet.save(folder / "fleet.html"))
    watch.do("table (CSV)", lambda: fleet.save(folder / "fleet.csv"))
    watch.do("run file read back", read)
    total, peak = time.perf_counter() - watch.began, watch.rows[-1][2]
    processor = time.process_time()
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    outliers = len(fleet.outliers)
    print(json.dumps({"rows": watch.rows, "total": total, "cpu": processor, "peak": peak, "sizes": sizes, "outliers": outliers}))


def files(count: int) -> None:
    """The same run file many times, as if of many GPUs."""
    import gzip

    from gemmscope.fleet.gather import fleet_result, read_runs

    data = json.loads(gzip.decompress(DATA.read_bytes()))
    with tempfile.TemporaryDirectory() as name:
        for gpu in range(count):
            data["device"] |= {"node": f"node{gpu // 8}", "index": gpu % 8, "uuid": f"GPU-{gpu}"}
            (Path(name) / f"{gpu}.json").write_text(json.dumps(data))
        began = time.process_time()
        fleet_result(read_runs([name])[0])
        print(f"{count} run files of 250 kB: {(time.process_time() - began) / count * 1000:.1f} ms of CPU time each")


def main() -> int:
    """Print a Markdown table; 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=10_000)
    parser.add_argument("--files", type=int, default=0)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measured(Path(arguments.measure))
        return 0
    if arguments.files:
        files(arguments.files)
    with tempfile.TemporaryDirectory() as name:
        write_summaries(Path(name) / "summaries.jsonl", arguments.gpus)
        output = subprocess.run([sys.executable, __file__, "--measure", name], check=True, capture_output=True, text=True).stdout
    report = json.loads(output)
    print(f"{arguments.gpus:,} GPUs, {report['outliers']} outliers\n\n| | seconds | peak memory |\n| --- | ---: | ---: |")
    for what, seconds, peak in report["rows"]:
        print(f"| {what} | {seconds:.1f} | {peak:.0f} MiB |")
    print(f"| **all** | **{report['total']:.1f}** ({report['cpu']:.1f} of CPU time) | **{report['peak']:.0f} MiB** |\n")
    print(", ".join(f"{file} {size / 1e6:.1f} MB" for file, size in report["sizes"].items()))
    return int(report["cpu"] > MOST_SECONDS or report["peak"] * (1 << 20) > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
