"""The actor that Ray runs on a node, one for each GPU: it starts a place worker there and passes lines on.

Nodes need Ray and the frameworks, and not gemmscope: this class travels by value, so it uses the standard library, and what
it imports from the bundle (`ray_bridge.py`) that all actors of a node share; the place worker runs from there, too.
"""

from __future__ import annotations

import fcntl
import importlib
import io
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = "gemmscope-bundle-"
SIGNS_OF_LIFE = ("alive", "progress")  # types of lines that can wait, and of which only the last one counts


class PlaceActor:
    """One place worker and the lines to and from it. Its methods are called at the same time, by different threads."""

    def __init__(self, bundle: bytes, digest: str, module: str, begin: str) -> None:
        """`module`: what the place worker runs; `begin`: the first line to send to it."""
        self._folder, self._lock = unpack(bundle, digest)
        self._own = (
            self._folder / "workers" / str(os.getpid())
        )  # what a place worker that is killed leaves there goes with the bundle
        self._polling = threading.Lock()
        self._ended: str | None = None
        process = process_of(self._folder)
        self._ended_error: type[Any] = process.ProcessEndedError
        self._process = process.WorkerProcess(module, environment=worker_variables(self._folder), folder=tempfile.gettempdir())
        self.send(json.dumps({**json.loads(begin), "folder": str(self._own)}))

    def send(self, line: str) -> None:
        """Pass a line to the place worker."""
        self._process.send(line.encode().rstrip(b"\n") + b"\n")

    def poll(self, wait_s: float) -> tuple[list[str], str | None]:
        """The lines of the place worker since the last call, and how it ended, None as long as it runs.

        Waits for a line that matters, at most `wait_s`. Signs of life do not end the waiting, and only the last one is returned.
        """
        until, lines, sign_of_life = time.monotonic() + wait_s, list[str](), list[str]()
        with self._polling:
            while self._ended is None:
                left = until - time.monotonic()
                self._process.wait(left)
                try:
                    texts = [line.decode(errors="replace").strip() for line in self._process.lines()]
                except self._ended_error as end:
                    self._ended = f"{end.ending.how}{end.ending.detail}"
                    break
                lines += [text for text in texts if type_of(text) not in SIGNS_OF_LIFE]
                sign_of_life = [text for text in texts if type_of(text) in SIGNS_OF_LIFE][-1:] or sign_of_life
                if lines or left <= 0:
                    break
            return lines + sign_of_life, self._ended

    def stop(self) -> None:
        """End the place worker and what it started; remove the bundle, if no other actor uses it."""
        self._process.kill()
        with self._polling:
            lock, self._lock = self._lock, -1
            if lock >= 0:
                self._ended = self._ended or self._process.ending().how
                self._process.close()
                shutil.rmtree(self._own, ignore_errors=True)
                remove_unused(self._folder, lock)


def process_of(folder: Path) -> Any:
    """The module of the bundle that starts processes."""
    roots = [str(folder / "code"), str(folder / "packages")]
    before = list(sys.path)
    sys.path[:] = [roots[0], *before, roots[1]]
    try:
        return importlib.import_module("gemmscope.process")
    finally:
        sys.path[:] = before


def type_of(line: str) -> str:
    """The type of a line; empty if it is not a line of a place worker, which the driver will report."""
    try:
        return str(json.loads(line)["type"])
    except (ValueError, TypeError, KeyError):
        return ""


def worker_variables(folder: Path) -> dict[str, str]:
    """The environment of the place worker: the node's own, without what Ray sets for its actors, and with the bundle.

    Ray limits OpenMP to the CPUs that an actor asks for, which would slow down what is measured.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    if "OMP_NUM_THREADS" not in parent_environment():
        own.pop("OMP_NUM_THREADS", None)
    gpus = visible_gpus()
    if gpus:
        own["CUDA_VISIBLE_DEVICES"] = gpus[0]
        own.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as the driver counts
    before = own.get("PYTHONPATH")
    own["PYTHONPATH"] = os.pathsep.join([str(folder / "code"), *([before] if before else [])])
    own["GEMMSCOPE_PACKAGES"] = str(folder / "packages")
    return own


def parent_environment() -> set[str]:
    """The names of the variables with which this node's Ray was started; nothing where they cannot be read."""
    try:
        content = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return set()
    return {entry.partition(b"=")[0].decode(errors="replace") for entry in content.split(b"\0")}


def visible_gpus() -> list[str]:
    """The GPUs that Ray gave to this actor, as CUDA_VISIBLE_DEVICES names them."""
    ray: Any = sys.modules.get("ray")
    return [str(gpu) for gpu in ray.get_gpu_ids()] if ray is not None and ray.is_initialized() else []


def unpack(bundle: bytes, digest: str) -> tuple[Path, int]:
    """The folder with the unpacked bundle, which the first actor of a node makes, and a shared lock on it.

    Only a folder that this user owns, and nobody else can write to, is used: code is run from it.
    """
    parent = Path(tempfile.gettempdir())
    remove_abandoned(parent, digest)
    folder = parent / f"{FOLDER}{os.getuid()}-{digest}"
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        facts = os.fstat(lock)
        if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o022:
            os.close(lock)
            raise PermissionError(f"{folder} belongs to another user, or others can write to it")
        fcntl.flock(lock, fcntl.LOCK_SH)
        complete = folder / "complete"
        if same_folder(folder, facts) and not complete.exists():
            fcntl.flock(lock, fcntl.LOCK_EX)
            if same_folder(folder, facts) and not complete.exists():
                with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
                    archive.extractall(folder)
                complete.touch()
            fcntl.flock(lock, fcntl.LOCK_SH)
        if same_folder(folder, facts):
            break
        os.close(lock)  # it was removed before it could be locked
    return folder, lock


def same_folder(folder: Path, facts: os.stat_result) -> bool:
    """Whether a path still leads to the folder that was opened."""
    with suppress(FileNotFoundError):
        return folder.lstat().st_ino == facts.st_ino
    return False


def remove_unused(folder: Path, lock: int) -> None:
    """Release the lock; remove the folder if nobody else has one."""
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def remove_abandoned(parent: Path, keep: str = "none") -> None:
    """Remove bundles that actors of this user have left: those that nobody has locked. `keep`: the digest of one that stays."""
    for path in parent.glob(f"{FOLDER}{os.getuid()}-*"):
        if path.name.endswith(keep) or not re.fullmatch(rf"{FOLDER}\d+-[0-9a-f]{{16}}", path.name):
            continue
        with suppress(OSError):
            remove_unused(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))


def free_gpus() -> dict[str, float] | None:
    """The number of free GPUs of each node, by the node's id; None where this version of Ray does not report it."""
    try:
        from ray._private.state import available_resources_per_node  # Ray has no public function for it
    except ImportError:
        return None
    return {node: float(resources.get("GPU", 0.0)) for node, resources in available_resources_per_node().items()}
