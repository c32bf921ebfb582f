"""Stand-ins for the commands of a cluster, in a folder for PATH: `srun` starts real processes with the variables of Slurm.

`gemmscope` is the real one, or (`recorded`) writes down how it was called.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import gemmscope

SOURCE = Path(gemmscope.__file__).parent.parent
NODES, PER_NODE = 2, 1

SRUN = f"""#!{sys.executable}
import os, subprocess, sys

words = sys.argv[1:]
while words and words[0].startswith("-"):
    words.pop(0)
tasks = []
for rank in range({NODES * PER_NODE}):
    step = {{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "{NODES * PER_NODE}", "SLURM_PROCID": str(rank)}}
    node = {{"SLURM_LOCALID": str(rank % {PER_NODE}), "SLURMD_NODENAME": f"node{{rank // {PER_NODE}:02}}"}}
    tasks.append(subprocess.Popen(words, env=os.environ | step | node))
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = f"""#!{sys.executable}
print("node00\\nnode01")
"""
AFTER_DASHES = f"""#!{sys.executable}
import os, subprocess, sys

words = sys.argv[1:]
sys.exit(subprocess.call(words[words.index("--") + 1 :]))
"""
TORCHRUN = f"""#!{sys.executable}
import os, subprocess, sys

words = sys.argv[sys.argv.index("--no-python") + 1 :]
ranks = {{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}}
sys.exit(subprocess.call(words, env=os.environ | ranks))
"""
REAL = f"""#!{sys.executable}
import sys

sys.path.insert(0, {str(SOURCE)!r})
sys.argv[0] = "gemmscope"
from gemmscope.__main__ import run

run()
"""
RECORDED = f"""#!{sys.executable}
import json, os, sys

with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([sys.argv[1:], os.environ.get("SLURM_PROCID"), os.environ.get("RANK")]) + "\\n")
if "--folder" in sys.argv:
    folder = sys.argv[sys.argv.index("--folder") + 1]
    os.makedirs(folder, exist_ok=True)
    open(os.path.join(folder, os.environ.get("SLURMD_NODENAME", "node") + ".json"), "w").close()
sys.exit(int(os.environ.get("GATHERED", "0")) if "--folder" not in sys.argv else 0)
"""
JOB = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[00-01]",
       "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}  # fmt: skip
"""What a batch script has."""


class Cluster:
    """A folder with the stand-ins, in which scripts are run."""

    def __init__(self, folder: Path, *, recorded: bool) -> None:
        self.folder, self._calls = folder, folder / "calls"
        programs = {"srun": SRUN, "scontrol": SCONTROL, "ray": AFTER_DASHES, "torchrun": TORCHRUN}
        for name, text in {**programs, "gemmscope": RECORDED if recorded else REAL}.items():
            path = folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run(self, script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a script to its end."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        where = {"PATH": path, "PYTHONPATH": str(SOURCE), "TMPDIR": str(self.folder), "CALLS": str(self._calls)}
        env = {**os.environ, **where, **variables}
        command = ["bash", str(script), *arguments]
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=300, check=False)

    def calls(self) -> list[list[str]]:
        """How gemmscope was called, one call after another; those of `srun` in the order of their ranks."""
        lines = [json.loads(line) for line in self._calls.read_text().splitlines()]
        return [arguments for arguments, *_ in lines]
