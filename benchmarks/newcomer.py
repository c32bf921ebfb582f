"""Tries the first commands of a new user with an installed gemmscope: `python benchmarks/newcomer.py .venv/bin/gemmscope`.

Runs shapes, a forecast and its report in an empty folder, prints how long each took, and checks that torch was not installed.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = "--preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8192"
COMMANDS = (
    f"shapes {MODEL}",
    f"forecast {MODEL} --gpu b300,h200 --json forecast.json",
    "report forecast.json -o report.html --markdown report.md",
)


def main() -> None:
    """Run every command; any failure ends the script."""
    program = str(Path(sys.argv[1]).absolute())
    python = Path(program).parent / "python"
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            start = time.monotonic()
            subprocess.run([program, *shlex.split(command)], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            print(f"{time.monotonic() - start:5.1f} s  gemmscope {command}")
        size = Path(folder, "report.html").stat().st_size
        print(f"the page: {size / 1e6:.1f} MB")
    found = subprocess.run([str(python), "-c", "import torch"], capture_output=True, check=False)
    if found.returncode == 0:
        sys.exit("torch was installed beside gemmscope")
    print("torch was not installed")


if __name__ == "__main__":
    main()
