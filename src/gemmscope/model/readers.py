"""Reads a model file of any format; the text itself tells which reader it needs.

Input is read only up to a limit, so that neither a wrong path nor an endless stream can use all memory or hang. Configurations
are small, except a Hugging Face JSON with long lists, and the log of a training, of which only the start is needed.
"""

import codecs
from pathlib import Path

from gemmscope.errors import UserError, option, shown
from gemmscope.model import bridge, bridge_recipe, hf, hub, megatron, torchtitan, torchtitan_command, torchtitan_registry
from gemmscope.model.spec import ModelSource
from gemmscope.reading import LIMITS, LONGEST_NAME, STANDARD_INPUT, called, open_input

READERS = (hf, torchtitan, torchtitan_registry, bridge_recipe, bridge, torchtitan_command, megatron)
"""The first one that recognizes a text reads it."""
OF_PYTHON = (torchtitan_registry, bridge_recipe)
"""Those that read Python files: FILE.py, or FILE.py:NAME."""
FORMATS = (
    f"{option('config')} takes a Hugging Face config.json, Megatron-LM arguments, a torchtitan TOML or command, "
    "a Megatron-Bridge YAML or recipe (FILE.py:FUNCTION), a torchtitan registry with a job (config_registry.py:NAME)"
)
LARGEST_FILE, LARGEST_TEXT, START_OF_LOG = (LIMITS[kind]["bytes"] for kind in ("config", "config_text", "log"))


def read_config(reference: str) -> ModelSource:
    """The model of a file, a folder with a config.json, standard input (-), or a hub ID."""
    if not reference:
        raise UserError(f"{option('config')} is empty", FORMATS)
    path, _, name = reference.rpartition(":")
    if not path.endswith(".py") or Path(reference).exists():
        path, name = reference, ""
    if names_file(path):
        return read_text(_text(path), called(path), Path(path) if path.endswith(".py") else None, name)
    if Path(reference).is_dir():
        config = Path(reference) / "config.json"
        if not names_file(str(config)):
            raise UserError(f"the folder {_quoted(reference)} has no config.json", f"give a file: {option('config', 'PATH')}")
        return read_text(_text(str(config)), called(config))
    if hub.looks_like_hub_id(reference):
        return read_text(hub.resolve(reference), reference)
    raise UserError(f"there is no file or folder {_quoted(reference)}", f"{FORMATS}, or a hub ID")


def names_file(reference: str) -> bool:
    """Whether something can be read under that name: a file, a pipe, standard input."""
    if reference in STANDARD_INPUT:
        return True
    try:
        return Path(reference).exists() and not Path(reference).is_dir()
    except (OSError, ValueError):  # no permission to look, a name too long, a NUL character: reading it says which
        return True


def _quoted(reference: str) -> str:
    return repr(reference) if len(reference) <= LONGEST_NAME else shown(reference)


def read_text(text: str, origin: str, path: Path | None = None, name: str = "") -> ModelSource:
    """The model that a file's text describes, in any of the formats. Python has a `path`, whose folders have what it imports, and
    the `name` of the function that is read; empty: the file has only one model."""
    if len(text) > LARGEST_TEXT and not hf.recognises(text) and not megatron.prints_arguments(text):
        raise _too_large(origin)
    for reader in READERS:
        if reader.recognises(text):
            try:
                source: ModelSource = reader.read(text, origin, *((path, name) if reader in OF_PYTHON else ()))
            except UserError as error:
                raise UserError(f"{origin}: {error.message}", error.hint) from error
            if name and reader not in OF_PYTHON:
                raise UserError(
                    f"{origin} has no functions, but {shown(name)} names one", f"give only the file: {option('config', origin)}"
                )
            return source
    raise UserError(f"{origin} {'is empty' if not text.strip() else 'has an unknown format'}", FORMATS)


def _too_large(origin: str) -> UserError:
    return UserError(
        f"{origin} is too large for a config",
        f"JSON can have up to {LARGEST_FILE // 2**20} MiB, other formats {LARGEST_TEXT // 2**20} MiB; the log of a Megatron"
        f" training can have any size if its arguments are in the first {START_OF_LOG // 2**20} MiB",
    )


def _text(reference: str) -> str:
    """As much of a file or stream as any format needs: all of it, or the start of a long log."""
    origin = called(reference)
    with open_input(reference, FORMATS) as stream:
        data = stream.read(START_OF_LOG)
        cut = len(data) == START_OF_LOG
        if cut and hf.recognises(data[:1000].decode("utf-8", "replace")):
            data += stream.read(LARGEST_FILE + 1 - START_OF_LOG)
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
