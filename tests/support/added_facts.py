"""A copy of the package to which facts are added, as CONTRIBUTING.md says, and commands that run there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.command import Outcome
from support.sources import PACKAGE

RUN = """
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


class PackageCopy:
    """A copy of the package in a folder of its own. Paths are relative to `src/gemmscope`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(PACKAGE, folder / "gemmscope")

    def append(self, file: str, text: str) -> None:
        path = self.folder / "gemmscope" / file
        path.write_text(path.read_text() + "\n" + text)

    def replace(self, file: str, old: str, new: str) -> None:
        path = self.folder / "gemmscope" / file
        assert old in path.read_text(), f"{file} has no {old}"
        path.write_text(path.read_text().replace(old, new))

    def python(self, code: str, given: str = "") -> str:
        """What the code prints, in a process that imports the copy."""
        paths = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": paths, "XDG_CONFIG_HOME": str(self.folder), "NO_COLOR": "1", "COLUMNS": "120"}
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(self.folder)!r})\n{code}"]
        child = subprocess.run(
            command, input=given, env=environment, cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert child.returncode == 0, child.stderr
        return child.stdout

    def run(self, *lines: str) -> list[Outcome]:
        """The outcomes of command lines, all in one process."""
        return [Outcome(*outcome) for outcome in json.loads(self.python(RUN, json.dumps(lines)))]
