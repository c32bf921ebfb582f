"""Facts about the user's own training process, for files that are written from inside it: its rank and its packages."""

import os
from contextlib import suppress
from importlib import metadata
from pathlib import Path

PACKAGES = ("transformer_engine", "torchao", "megatron-core", "torchtitan", "transformers", "accelerate")


def own_rank() -> int:
    """The rank of this process in a distributed job, as torchrun and others set it; 0 without one."""
    text = os.environ.get("RANK", "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def with_rank(path: Path, rank: int) -> Path:
    """The file of one rank.

    >>> with_rank(Path("step.json.gz"), 3).name
    'step.rank3.json.gz'
    """
    stem, dot, endings = path.name.partition(".")
    return path.with_name(f"{stem}.rank{rank}{dot}{endings}")


def why_not_writable(path: Path) -> str:
    """Why this file cannot be written now; empty if it can."""
    try:
        if path.is_dir():
            return f"{path} is a folder, not a file"
        if not path.parent.is_dir():
            return f"the folder {path.parent} does not exist"
    except OSError as error:  # the name is too long, or a parent folder is not readable
        return f"{path}: {error.strerror}"
    return "" if os.access(path.parent, os.W_OK) else f"the folder {path.parent} is not writable"


def package_versions() -> dict[str, str]:
    """The versions of the packages that matter to the training, of those that are installed."""
    versions = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
