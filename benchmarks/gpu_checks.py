"""Runs the checks that need a GPU, one after another, each with a time limit, and keeps their output.

    python benchmarks/gpu_checks.py OUT                         # all of gpu_checks.toml
    python benchmarks/gpu_checks.py OUT hybrid-whole t5 training --archive results.tar.gz --seconds 540
    python benchmarks/gpu_checks.py --list

Every check writes OUT/NAME.log and its results next to it. A check that fails or exceeds its time limit does not stop the others.
With `--archive`, everything in OUT is packed after every check, so that nothing is lost if the machine goes away. With
`--seconds`, no check starts that might not end in time. Exit code 1 if a check did not succeed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

from gemmscope.toml import parse_toml

FOLDER = Path(__file__).resolve().parent
LAST_LINES = 40  # of a check's output that are printed
GRACE_S = 10.0  # between the request to end and the kill


@dataclass(frozen=True)
class Check:
    """One command with its time limit."""

    name: str
    what: str
    command: str
    limit_s: float

    def command_line(self, out: Path) -> list[str]:
        """The command line, run with this Python."""
        program, *arguments = shlex.split(self.command.replace("{out}", shlex.quote(str(out))))
        start = {"python": [sys.executable], "gemmscope": [sys.executable, "-m", "gemmscope"]}.get(program, [program])
        return [*start, *arguments]


def checks() -> dict[str, Check]:
    """All checks by name."""
    content = parse_toml((FOLDER / "gpu_checks.toml").read_text())
    return {name: Check(name, facts["what"], facts["command"], facts["limit_s"]) for name, facts in content.items()}


def run(check: Check, out: Path) -> str:
    """Run one check, with its output in a log file. Returns how it ended."""
    with (out / f"{check.name}.log").open("w") as log:
        process = subprocess.Popen(
            check.command_line(out), cwd=FOLDER.parent, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            return "ok" if process.wait(check.limit_s) == 0 else f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            return f"ended after its time limit of {check.limit_s:.0f} s"
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a check and everything that it started: first politely, so that it writes what it has measured."""
    for number, wait_s in ((signal.SIGINT, GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            pass


def pack(out: Path, archive: Path) -> None:
    """Everything in `out`, in one file that replaces the last one."""
    part = archive.with_name(f".{archive.name}.part")
    with tarfile.open(part, "w:gz") as packed:
        packed.add(out, arcname=out.name)
    part.replace(archive)


def main() -> int:
    """Run the named checks; 1 if one of them did not succeed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", help="folder for logs and results")
    parser.add_argument("names", nargs="*", metavar="CHECK", help="default: all")
    parser.add_argument("--archive", type=Path, help="pack the folder into this file after every check")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit for all checks")
    parser.add_argument("--list", action="store_true", help="list the checks and exit")
    chosen = parser.parse_args()
    known = checks()
    if chosen.list:
        print("\n".join(f"{check.name:15} {check.limit_s:4.0f} s  {check.what}" for check in known.values()))
        return 0
    if chosen.out is None:
        parser.error("give a folder for the results")
    if unknown := [name for name in chosen.names if name not in known]:
        parser.error(f"unknown check {unknown[0]}; --list lists them")
    chosen.out.mkdir(parents=True, exist_ok=True)
    began, endings = time.monotonic(), dict[str, str]()
    for check in [known[name] for name in chosen.names or known]:
        if time.monotonic() - began + check.limit_s > chosen.seconds:
            endings[check.name] = "not started: it might not end in time"
            continue
        print(f"--- {check.name}: {check.what}", flush=True)
        started = time.monotonic()
        endings[check.name] = run(check, chosen.out)
        lines = (chosen.out / f"{check.name}.log").read_text(errors="replace").splitlines()
        print("\n".join(lines[-LAST_LINES:]))
        print(f"--- {check.name}: {endings[check.name]}, {time.monotonic() - started:.0f} s", flush=True)
        if chosen.archive is not None:
            pack(chosen.out, chosen.archive)
    print("\n".join(f"{name:15} {ending}" for name, ending in endings.items()))
    return 0 if set(endings.values()) == {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main())
