"""One door for every format: the text itself says which reader it is for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gemmscope.errors import UserError
from gemmscope.model import bridge, hf, hub, megatron, torchtitan
from gemmscope.model.source import ModelSource

Reader = tuple[Callable[[str], bool], Callable[[str, str], ModelSource]]
READERS: tuple[Reader, ...] = tuple((reader.recognises, reader.read) for reader in (hf, torchtitan, bridge, megatron))
FORMATS = "a Hugging Face config.json, Megatron-LM arguments, a torchtitan TOML, a Megatron-Bridge YAML"
LARGEST_FILE = 32 * 2**20


def read_config(reference: str) -> ModelSource:
    """The model that `--config` names: a file, a folder with a config.json, or a hub id."""
    path = Path(reference)
    try:
        if path.is_dir():
            path = path / "config.json"
            if not path.is_file():
                raise UserError(f"the folder {reference!r} has no config.json", "give the file itself: --config PATH")
        exists = path.is_file()
    except (OSError, ValueError) as error:  # a name too long, a NUL character
        raise UserError(f"{reference[:80]!r} is not a path: {error}") from error
    if exists:
        return read_text(_text(path), str(path))
    if hub.looks_like_hub_id(reference):
        return hf.from_config(hub.resolve(reference), reference)
    raise UserError(f"there is no file or folder {reference!r}", f"--config takes {FORMATS}, or a hub id")


def read_text(text: str, origin: str) -> ModelSource:
    """The model that a file's text describes, in whichever format it is written."""
    for recognises, read in READERS:
        if recognises(text):
            return read(text, origin)
    what = "is empty" if not text.strip() else "is in no format that is known here"
    raise UserError(f"{origin} {what}", f"--config takes {FORMATS}")


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise UserError(f"{path} has {path.stat().st_size:,} bytes: too large for a config", f"--config takes {FORMATS}")
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file (byte {error.start} is not UTF-8)", f"--config takes {FORMATS}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
