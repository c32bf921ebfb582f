"""Reads a model file of any format; the text itself tells which reader it needs.

Input is read only up to a limit, so that neither a wrong path nor an endless stream can use all memory or hang. Configurations
are small, except a Hugging Face JSON with long lists, and the log of a training, of which only the start is needed.
"""

import codecs
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from gemmscope.errors import UserError, option
from gemmscope.model import bridge, hf, hub, megatron, torchtitan
from gemmscope.model.source import ModelSource

Reader = tuple[Callable[[str], bool], Callable[[str, str], ModelSource]]
READERS: tuple[Reader, ...] = tuple((reader.recognises, reader.read) for reader in (hf, torchtitan, bridge, megatron))
FORMATS = (
    f"{option('config')} takes a Hugging Face config.json, Megatron-LM arguments, a torchtitan TOML or a Megatron-Bridge YAML"
)
LARGEST_FILE = 32 * 2**20
LARGEST_TEXT = 2**20  # characters of anything but JSON: scripts and YAML take long to parse, and real ones are far smaller
START_OF_LOG = 4 * 2**20  # bytes of a training log that are read: Megatron prints its arguments first
STDIN = "/dev/stdin"
OPEN_FILES = ("/dev/fd/", "/proc/self/fd/")  # a shell's <(command)


def read_config(reference: str) -> ModelSource:
    """The model of a file, a folder with a config.json, standard input (-), or a hub id."""
    if reference in ("-", STDIN):
        return read_text(_standard_input(), "standard input")
    path = Path(reference)
    try:
        if path.is_dir():
            path = path / "config.json"
            if not path.exists():
                raise UserError(f"the folder {reference!r} has no config.json", f"give a file: {option('config', 'PATH')}")
        exists = path.exists()
    except (OSError, ValueError) as error:  # a name too long, a NUL character
        raise UserError(f"{reference[:80]!r} is not a valid path: {error}", FORMATS) from error
    if exists:
        return read_text(_file(path), str(path))
    if hub.looks_like_hub_id(reference):
        return read_text(hub.resolve(reference), reference)
    raise UserError(f"there is no file or folder {reference!r}", f"{FORMATS}, or a hub id")


def read_text(text: str, origin: str) -> ModelSource:
    """The model that a file's text describes, in any of the formats."""
    if len(text) > LARGEST_TEXT and not hf.recognises(text) and not megatron.prints_arguments(text):
        raise _too_large(origin)
    for recognises, read in READERS:
        if recognises(text):
            try:
                return read(text, origin)
            except UserError as error:
                raise UserError(f"{origin}: {error.message}", error.hint) from error
    raise UserError(f"{origin} {'is empty' if not text.strip() else 'has an unknown format'}", FORMATS)


def _too_large(origin: str) -> UserError:
    return UserError(
        f"{origin} is too large for a config",
        f"JSON can have up to {LARGEST_FILE // 2**20} MiB, other formats {LARGEST_TEXT // 2**20} MiB; the log of a Megatron"
        f" training can have any size if its arguments are in the first {START_OF_LOG // 2**20} MiB",
    )


def _standard_input() -> str:
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise UserError("there is no standard input to read", f"give a file: {option('config', 'PATH')}")
    try:
        return _text(stream, "standard input")
    except OSError as error:
        raise UserError(f"standard input cannot be read: {error.strerror or error}") from error


def _file(path: Path) -> str:
    """The text of a file, a pipe, or an open file of this process. Other devices may never end, or block forever."""
    try:
        kind = path.stat().st_mode
        is_file = stat.S_ISREG(kind)
        if not (is_file or stat.S_ISFIFO(kind) or str(path).startswith(OPEN_FILES) or str(path) == os.devnull):
            what = "a folder" if stat.S_ISDIR(kind) else "a socket" if stat.S_ISSOCK(kind) else "a device"
            raise UserError(f"{path} is {what}, not a file", FORMATS)

        def non_blocking(name: str, flags: int) -> int:  # some files of the kernel block where others end
            return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

        with open(path, "rb", opener=non_blocking if is_file else None) as stream:
            return _text(stream, str(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _text(stream: BinaryIO, origin: str) -> str:
    """As much of a stream as any format needs: all of it, or the start of a long log."""
    data = stream.read(START_OF_LOG) or b""  # None where nothing has arrived yet
    cut = len(data) == START_OF_LOG
    if cut and hf.recognises(data[:1000].decode("utf-8", "replace")):
        data += stream.read(LARGEST_FILE + 1 - START_OF_LOG) or b""
        cut = False
        if len(data) > LARGEST_FILE:
            raise _too_large(origin)
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=not cut)
    except UnicodeDecodeError as error:
        raise UserError(f"{origin} is not a text file (byte {error.start} is not UTF-8)", FORMATS) from error
    if not cut:
        return text
    text = text[: text.rfind("\n") + 1]  # the last line may be incomplete
    if not megatron.prints_arguments(text):
        raise _too_large(origin)
    return text
