"""Files are replaced as a whole or not at all: written to a temporary file beside the old one, flushed to disk, then renamed.

Whatever happens on the way (a full disk, Ctrl-C, a crash), the old file stays as it was. A link stays a link: the file that it
points to is replaced. Pipes, devices and open descriptors (`/dev/stdout`) cannot be replaced: they are written to.
"""

import errno
import gzip
import io
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, cast

from gemmscope.errors import UserError

NO_SUCH_CALL = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # some file systems have no such call
CANNOT_REPLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV)  # the file itself may be writable
TEMPORARY, LOST_S = ".gemmscope-{}.tmp", 3600.0
DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}


@contextmanager
def replacing(path: str | Path, hint: str = "") -> Iterator[IO[bytes]]:
    """A file to write to that takes the place of `path` at the end. A `UserError` if that fails."""
    try:
        if "\0" in str(path):
            raise OSError(errno.EINVAL, "its name has a zero byte")  # noqa: TRY301
        if (number := descriptor(path)) is not None:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
            with os.fdopen(os.dup(number), "wb") as out:
                yield out
        elif is_special(path):
            with Path(path).open("wb") as out:
                yield out
        else:
            yield from _replacing(Path(os.path.realpath(path)))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}", hint) from error


def write_text(path: str | Path, text: str, hint: str = "") -> None:
    """Write the whole content of a file."""
    with replacing(path, hint) as out:
        out.write(text.encode("utf-8", "replace"))


@contextmanager
def text_into(out: IO[bytes], *, packed: bool) -> Iterator[IO[str]]:
    """A text stream into `out`, gzipped if `packed`, for content that need not be in memory as a whole."""
    with gzip.GzipFile(fileobj=out, mode="wb", filename="") if packed else nullcontext(out) as raw:
        text = io.TextIOWrapper(cast(IO[bytes], raw), encoding="utf-8", errors="replace", write_through=True)
        try:
            yield text
        finally:
            text.detach()


def _replacing(target: Path) -> Iterator[IO[bytes]]:
    beside = target.with_name(TEMPORARY.format(secrets.token_hex(8)))
    _remove_lost(target.parent)
    try:
        try:
            out: IO[bytes] = beside.open("xb")
        except OSError as error:
            if error.errno not in CANNOT_REPLACE or not target.exists():
                raise
            with tempfile.TemporaryFile() as out:  # only the file is writable, not its folder
                yield out
                _overwrite(target, out)
            return
        with out:
            if target.exists():  # the new file gets the owner and the permissions of the old one
                with suppress(OSError):
                    os.chown(beside, target.stat().st_uid, target.stat().st_gid)
                beside.chmod(stat.S_IMODE(target.stat().st_mode))
            yield out
            out.flush()
            _if_possible(os.fsync, out.fileno())
        _put(beside, target)
    finally:
        with suppress(OSError):
            beside.unlink()


def _put(beside: Path, target: Path) -> None:
    """Rename the new file to the target; copy it where renaming is not possible, as for a file mounted into a container."""
    try:
        beside.replace(target)
    except OSError as error:
        if error.errno not in CANNOT_REPLACE or not target.is_file():
            raise
        with beside.open("rb") as content:
            _overwrite(target, content)
        return
    with suppress(OSError):
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name
        finally:
            os.close(folder)


def _overwrite(target: Path, content: IO[bytes]) -> None:
    """Overwrite the file in place, after reserving disk space for all of it."""
    size = content.seek(0, os.SEEK_END)
    content.seek(0)
    with target.open("r+b") as out:
        if size and hasattr(os, "posix_fallocate"):
            _if_possible(os.posix_fallocate, out.fileno(), 0, size)
        shutil.copyfileobj(content, out)
        out.truncate()
        out.flush()
        _if_possible(os.fsync, out.fileno())


def _if_possible(call: Callable[..., object], *arguments: int) -> None:
    try:
        call(*arguments)
    except OSError as error:
        if error.errno not in NO_SUCH_CALL:
            raise


def _remove_lost(folder: Path) -> None:
    """Remove temporary files that killed processes left behind."""
    with suppress(OSError):
        for path in folder.glob(TEMPORARY.format("*")):
            if time.time() - path.stat().st_mtime > LOST_S:
                path.unlink()


def descriptor(path: str | Path) -> int | None:
    """The number of an open descriptor that a path names.

    >>> descriptor("/dev/stdout"), descriptor("/dev/fd/63"), descriptor("out.json")
    (1, 63, None)
    """
    match = DESCRIPTOR.fullmatch(str(path))
    return int(match[1]) if match else STREAMS.get(str(path))


def is_special(path: str | Path) -> bool:
    """Whether a path names something that is not a file and not a folder: a pipe, a device, an open descriptor."""
    if descriptor(path) is not None:
        return True
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def same_file(one: str | Path, other: str | Path) -> bool:
    """Whether two paths lead to the same file, also through links; `-` is standard output. Never true for /dev/null."""
    try:
        first, second = (os.path.realpath("/dev/stdout" if str(path) == "-" else path) for path in (one, other))
        return first != os.path.realpath(os.devnull) and (first == second or Path(first).samefile(second))
    except (OSError, ValueError):  # one of them does not exist
        return False
