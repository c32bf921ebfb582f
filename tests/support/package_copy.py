"""A temporary copy of the package, to add something to it as CONTRIBUTING.md says, and to run commands with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.command import Outcome
from support.sources import PACKAGE

OUTCOMES = """
import contextlib, io, json, sys
from gemmscope.cli.main import main
outcomes = []
for line in json.load(sys.stdin):
    sys.argv, out, err, code = ["gemmscope", *line.split()], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    outcomes.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(outcomes))
"""


@dataclass(frozen=True)
class PackageCopy:
    """A copy of the package in a folder. `package` is where its modules are."""

    folder: Path

    @property
    def package(self) -> Path:
        return self.folder / "gemmscope"

    def add(self, file: str, text: str) -> None:
        """Add a file, or append to one."""
        path = self.package / file
        path.write_text((path.read_text() if path.exists() else "") + text)

    def change(self, file: str, old: str, new: str) -> None:
        """Replace the only occurrence of a text."""
        text = (self.package / file).read_text()
        assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
        (self.package / file).write_text(text.replace(old, new))

    def run(self, command: str, code: int = 0) -> str:
        """What a command prints with the copy. `code`: the exit code that it must have."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        ended = subprocess.run(
            [sys.executable, "-m", "gemmscope", *command.split()], capture_output=True, text=True, env=environment, timeout=120
        )
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    def python(self, code: str, given: str = "") -> str:
        """What Python code prints that imports the copy."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(self.folder)!r})\n{code}"]
        ended = subprocess.run(
            command, input=given, capture_output=True, text=True, env=environment, cwd=self.folder, timeout=120, check=False
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def outcomes(self, *lines: str) -> list[Outcome]:
        """What command lines do with the copy, all in one process."""
        return [Outcome(*outcome) for outcome in json.loads(self.python(OUTCOMES, json.dumps(lines)))]


def package_copy(folder: Path) -> PackageCopy:
    """Copy the package into a folder."""
    shutil.copytree(PACKAGE, folder / "gemmscope")  # with what Python has compiled, which is valid for copies
    return PackageCopy(folder)
