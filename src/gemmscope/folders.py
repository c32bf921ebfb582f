"""The folders in which gemmscope keeps its own files.

On Linux they are the XDG folders: `$XDG_STATE_HOME`, `$XDG_CACHE_HOME` and `$XDG_CONFIG_HOME`, or the defaults for these.
"""

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from platformdirs import PlatformDirs

TEMPORARY = "gemmscope-work-"  # followed by eight random characters: never the name of a user's own folder
LONGEST_WAIT_S = 2.0
_DIRS = PlatformDirs("gemmscope", appauthor=False)


def state_folder() -> Path:
    """Journals of measurements: $XDG_STATE_HOME/gemmscope or ~/.local/state/gemmscope."""
    return _DIRS.user_state_path


def cache_folder() -> Path:
    """Files that can be made again: $XDG_CACHE_HOME/gemmscope or ~/.cache/gemmscope."""
    return _DIRS.user_cache_path


def config_folder() -> Path:
    """Calibrations: $XDG_CONFIG_HOME/gemmscope or ~/.config/gemmscope."""
    return _DIRS.user_config_path


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder for this process alone, removed at the end.

    A process that is killed leaves its folder behind, and the next one removes it. It recognizes such a folder by its lock, which
    the system releases however a process ends. (Process numbers would not do: containers may share folders, but not numbers.)
    """
    parent = Path(tempfile.gettempdir())
    making = _lock(parent, wait_s=LONGEST_WAIT_S)  # so that nobody removes the new folder before it is locked
    try:
        folder = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=parent))
        own = _lock(folder)
        if making is not None and own is not None:
            _remove_abandoned(parent)
    finally:
        _unlock(making)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _unlock(own)


def _remove_abandoned(parent: Path) -> None:
    """Remove the temporary folders of this user that no process has locked."""
    for path in parent.glob(f"{TEMPORARY}*"):
        with suppress(OSError):  # another process may remove it at the same time
            if not re.fullmatch(f"{TEMPORARY}[a-z0-9_]{{8}}", path.name) or path.lstat().st_uid != os.getuid():
                continue
            if (lock := _lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                _unlock(lock)


def _lock(folder: Path, wait_s: float = 0.0) -> int | None:
    """Lock a folder for this process; None where another process has locked it, or where folders cannot be locked."""
    until = time.monotonic() + wait_s
    try:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    while True:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not isinstance(error, BlockingIOError) or time.monotonic() >= until:
                os.close(number)
                return None
            time.sleep(0.01)
        else:
            return number


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)
