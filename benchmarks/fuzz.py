"""Tries very many hostile inputs on every reader and command: `python benchmarks/fuzz.py --inputs 100000 --seed 1`.

Each input has 10 s of CPU time and 1 GiB. Slow targets get fewer inputs than fast ones. Prints a table and every distinct defect;
the inputs of defects are saved, and `--replay FILE` runs one again. Exit code 1 if there is a defect. Ctrl-C and SIGTERM end it
early, with the table of what was tried.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import zlib
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads would not survive a fork

from fuzz.harness import Defect, Summary, end_with_parent, fuzz, remove_stale_folders, replay, save, warm_up
from fuzz.targets import Target, collect

FIRST_BATCH, BATCH_S, LARGEST_BATCH = 20, 60.0, 400
SAVED_OF_EACH = 3


def main() -> None:
    """Fuzz, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="How many in all.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", action="append", help="Only targets whose name contains this. Can be repeated.")
    parser.add_argument("--jobs", type=int, default=2, help="Processes.")
    parser.add_argument("--save", type=Path, default=Path("build/fuzz"), help="Folder for the inputs of defects.")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="Run one saved input again, without limits.")
    options = parser.parse_args()
    targets = {
        name: target for name, target in collect().items() if not options.target or any(part in name for part in options.target)
    }
    if options.replay is not None:
        print(replay(options.replay, collect()))
        return
    if not targets:
        sys.exit(f"no target has that name; targets: {', '.join(collect())}")
    warm_up()
    begin, code = time.perf_counter(), 0
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell lets its background processes ignore Ctrl-C
        signal.signal(number, signal.default_int_handler)
    summaries = {name: Summary() for name in targets}
    remove_stale_folders()
    try:
        for name, batch in run_batches(targets, options.inputs, options.seed, options.jobs, summaries):
            summaries[name].add(batch)
            show_progress(sum(summary.inputs for summary in summaries.values()), options.inputs, time.perf_counter() - begin)
    except KeyboardInterrupt:
        code = 130
    remove_stale_folders()
    print_table(summaries, time.perf_counter() - begin)
    defects = [defect for summary in summaries.values() for defect in summary.defects]
    report_defects(defects, options.save)
    sys.exit(code or bool(defects))


def show_progress(done: int, inputs: int, seconds: float) -> None:
    """A line on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{done:,} of {inputs:,} inputs, {seconds:.0f} s \x1b[K" if done < inputs else "\r\x1b[K")


def run_batches(
    targets: dict[str, Target], inputs: int, seed: int, jobs: int, summaries: dict[str, Summary]
) -> Iterator[tuple[str, Summary]]:
    """Yield finished batches. The next batch is for the target with the lowest cost so far."""
    context = get_context("fork")
    batches, exhausted, planned = dict.fromkeys(targets, 0), set[str](), dict.fromkeys(targets, 0)
    workers: dict[Connection, str | None] = {}
    processes = []
    try:
        for _ in range(jobs):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(there, here, targets), daemon=False)
            process.start()
            there.close()
            processes.append(process)
            workers[here] = None
        while True:
            for worker in [worker for worker, name in workers.items() if name is None]:
                if sum(planned.values()) >= inputs or len(exhausted) == len(targets):
                    break
                name = min(
                    (name for name in targets if name not in exhausted), key=lambda name: cost(planned[name], summaries[name])
                )
                count = min(batch_size(summaries[name]), inputs - sum(planned.values()))
                worker.send((name, count, zlib.crc32(f"{seed} {name} {batches[name]}".encode())))
                workers[worker], batches[name] = name, batches[name] + 1
                planned[name] += count
            busy = [worker for worker, name in workers.items() if name is not None]
            if not busy:
                return
            for ready in wait(busy):
                assert isinstance(ready, Connection)
                count, summary = ready.recv()
                name = workers[ready]
                assert name is not None
                workers[ready] = None
                planned[name] += summary.inputs - count
                if not summary.inputs:
                    exhausted.add(name)
                yield name, summary
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for worker in workers:
            worker.close()
        for process in processes:
            process.terminate()
            process.join()


def cost(planned: int, summary: Summary) -> float:
    """A compromise between equal counts and equal times: a target that is four times slower gets half as many inputs."""
    seconds = summary.seconds / summary.inputs if summary.inputs else 1e-3
    return planned * max(seconds, 1e-4) ** 0.5


def batch_size(summary: Summary) -> int:
    """The number of inputs for a batch of a few seconds."""
    if not summary.inputs:
        return FIRST_BATCH
    return max(FIRST_BATCH, min(LARGEST_BATCH, int(BATCH_S * summary.inputs / max(summary.seconds, 1e-6))))


def work(requests: Connection, other_end: Connection, targets: dict[str, Target]) -> None:
    """A worker process: a batch for each request."""
    other_end.close()
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        while True:
            name, count, seed = requests.recv()
            requests.send((count, fuzz(targets[name], count, seed)))
    except (EOFError, OSError):
        return


def print_table(summaries: dict[str, Summary], seconds: float) -> None:
    """A row for each target, and the totals."""
    total = Summary()
    for summary in summaries.values():
        total.add(summary)
    rows = []
    for name, summary in [*summaries.items(), ("all", total)]:
        counts = (summary.inputs, summary.values, summary.user_errors, len(summary.defects))
        rows.append(
            (name, *(f"{count:,}" for count in counts), f"{summary.slowest_s:.2f} s", f"{summary.peak_bytes / 2**20:.0f} MiB")
        )
    rows.insert(0, ("target", "inputs", "values", "user errors", "failures", "slowest", "peak memory"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]))
    print(f"{total.inputs:,} inputs in {seconds:.0f} s")
    refused = [name for name, summary in summaries.items() if summary.inputs and not summary.values]
    if refused:
        print(f"every input was refused, so nothing behind the reader was tried: {', '.join(refused)}")


def report_defects(defects: list[Defect], folder: Path) -> None:
    """Defects with the same problem once, with the smallest of their inputs."""
    groups: dict[tuple[str, str], list[Defect]] = {}
    for defect in defects:
        groups.setdefault((defect.target, defect.problem.split(": ")[0]), []).append(defect)
    for same in groups.values():
        same.sort(key=lambda defect: len(repr(defect.value)))
        paths = [save(defect, folder) for defect in same[:SAVED_OF_EACH]]
        print(f"\n{len(same)} x {same[0]}\nsaved: {', '.join(map(str, paths))}")


if __name__ == "__main__":
    main()
