"""Workers that need not import torch anew: forked from a process that has imported it, and otherwise as `subprocess` starts them.

For tests of what workers say. Tests of how they are started, and of what is left behind when they end, start real ones: they are
marked with `real_process`.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemmscope.workload.confine import OFFLINE

SERVER = """
import fcntl, importlib, json, os, socket, sys, traceback, warnings
import torch, torch._dynamo  # tracing imports both
os.setpgid(0, 0)  # Ctrl-C ends the tests, and these end this process
asking = socket.socket(fileno=int(sys.argv[1]))

def run(request, descriptors):
    os.setsid()
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, 200) for each in descriptors]
    for number, each in zip([0, 1, 2, *request["passed"]], high):
        os.dup2(each, number, inheritable=False if number > 2 else True)
        os.close(each)
    os.environ.clear()
    os.environ |= request["environment"]
    os.chdir(request["folder"])
    warnings.simplefilter("ignore")  # that the module is imported already
    root, _, *arguments = request["arguments"]
    sys.argv = ["-c", root, str(os.getppid()), *arguments]
    exec(request["code"], {"__name__": "__main__"})

while True:
    text, descriptors, _, _ = socket.recv_fds(asking, 1 << 20, 16)
    if not text:
        os._exit(0)
    request = json.loads(text)
    if "code" not in request:
        answer = os.waitpid(request["process"], os.WNOHANG)
        asking.send(json.dumps(os.waitstatus_to_exitcode(answer[1]) if answer[0] else None).encode())
        continue
    for name in request["imports"]:
        importlib.import_module(name)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            asking.close()
            run(request, descriptors)
            code = 0
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
            if isinstance(ending.code, str):
                sys.stderr.write(ending.code + "\\n")
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    for each in descriptors:
        os.close(each)
    asking.send(json.dumps(child).encode())
"""
WARM = {
    "gemmscope.bench.worker": ("gemmscope.bench.worker", "gemmscope.bench.backends.cpu"),
    "gemmscope.step.worker": ("gemmscope.step.worker",),
    "gemmscope.numerics.evaluation.worker": ("gemmscope.numerics.evaluation.worker",),
    "gemmscope.workload.trace_worker": ("gemmscope.workload.trace_worker",),
}
"""Worker → modules that are imported once for all."""


def _warm(module: str, *arguments: str) -> tuple[str, ...]:
    """Import transformers only if a config's model is built, because the answer contains the versions of imported packages."""
    builds = module == "gemmscope.workload.trace_worker" and "config" in json.loads(Path(arguments[0]).read_text())
    return (*WARM[module], *(("transformers.modeling_utils",) if builds else ()))


@cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": os.pathsep.join(sys.path), "TRANSFORMERS_VERBOSITY": "error"}
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment)
    theirs.close()
    atexit.register(lambda: (ours.close(), server.wait()))
    return ours


def _ask(request: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
    socket.send_fds(_server(), [json.dumps(request).encode()], descriptors)
    return json.loads(_server().recv(1 << 20))


class ForkedProcess:
    """What `subprocess.Popen` is for the command of a worker."""

    def __init__(
        self,
        command: list[str],
        *,
        env: dict[str, str],
        stdin: Any,
        stdout: Any,
        stderr: Any,
        start_new_session: bool,
        cwd: None,
        pass_fds: Sequence[int] = (),
        bufsize: int = -1,
    ) -> None:
        assert start_new_session
        _, _, code, *arguments = command
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr, theirs = None, None, None, []
        if stdin == subprocess.PIPE:
            reading, writing = os.pipe()
            self.stdin = os.fdopen(writing, "wb", bufsize)
            theirs.append(reading)
        else:
            theirs.append(os.open(os.devnull, os.O_RDONLY))
        for name, wanted in (("stdout", stdout), ("stderr", stderr)):
            if wanted == subprocess.PIPE:
                reading, writing = os.pipe()
                setattr(self, name, os.fdopen(reading, "rb", bufsize))
                theirs.append(writing)
            else:
                theirs.append(os.open(os.devnull, os.O_WRONLY) if wanted == subprocess.DEVNULL else os.dup(wanted.fileno()))
        request = {
            "code": code, "arguments": arguments, "imports": _warm(*arguments[3:]), "environment": env, "folder": str(Path.cwd()),
            "passed": list(pass_fds),
        }  # fmt: skip
        self.pid: int = _ask(request, [*theirs, *pass_fds])
        for descriptor in theirs:
            os.close(descriptor)

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _ask({"process": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        while self.poll() is None:
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode


def _start(command: list[str], **options: Any) -> Any:
    """Fork workers; start anything else."""
    return ForkedProcess(command, **options) if WARM.keys() & {*command} else subprocess.Popen(command, **options)


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Workers that trace, measure and compute errors are forked, except in tests that are marked with `real_process`."""
    if request.node.get_closest_marker("real_process") is not None:
        return
    same = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL", "TimeoutExpired")}
    replaced = SimpleNamespace(Popen=_start, **same)
    monkeypatch.setattr("gemmscope.process.subprocess", replaced)
