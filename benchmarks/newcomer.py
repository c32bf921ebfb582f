"""Walks the path of a new user, from an empty folder to a decision with a report, and prints how long each step took.

`python benchmarks/newcomer.py CLONE` makes an environment, installs the clone into it and runs the commands of its README; it
fails if that takes more than three minutes. `python benchmarks/newcomer.py .venv/bin/gemmscope` runs the commands alone. Both
check that torch was not installed.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = "--preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8k"
COMMANDS = (
    "doctor",
    f"shapes {MODEL}",
    f"forecast {MODEL} --gpu b300,b200,h200 --json forecast.json",
    "report forecast.json -o report.html --markdown report.md",
)
MOST_S = 180.0


def main() -> None:
    """Run every command; any failure ends the script."""
    given = Path(sys.argv[1]).absolute()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if given.is_dir():
            timed([sys.executable, "-m", "venv", "env"], folder)
            timed(
                [f"{folder}/env/bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", str(given)], folder
            )
        program = Path(folder, "env", "bin", "gemmscope") if given.is_dir() else given
        for command in COMMANDS:
            timed([str(program), *shlex.split(command)], folder)
        taken = time.monotonic() - begin
        print(f"{taken:5.1f} s  in all; the page has {Path(folder, 'report.html').stat().st_size / 1e6:.1f} MB")
        imported = subprocess.run([str(program.parent / "python"), "-c", "import torch"], capture_output=True, check=False)
    if imported.returncode == 0:
        sys.exit("torch was installed beside gemmscope")
    if given.is_dir() and taken > MOST_S:
        sys.exit(f"this took more than {MOST_S:.0f} s")


def timed(command: list[str], folder: str) -> None:
    """Run it, and print how long it took."""
    start = time.monotonic()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    print(f"{time.monotonic() - start:5.1f} s  {shlex.join([Path(command[0]).name, *command[1:]])}", flush=True)


if __name__ == "__main__":
    main()
