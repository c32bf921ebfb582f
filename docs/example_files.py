"""The files of `examples/fleet`, as the how-to pages show them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
LANGUAGES = {".sbatch": "sh", ".sh": "sh", ".yaml": "yaml", "": "docker"}
FILES = sorted((ROOT / "examples" / "fleet").iterdir())


def block(path: Path) -> str:
    """The whole file as a block of code."""
    return f"```{LANGUAGES[path.suffix]}\n{path.read_text().rstrip()}\n```"


BLOCKS: dict[str, Callable[[], str]] = {
    f"file {path.relative_to(ROOT)}": lambda path=path: block(path)  # type: ignore[misc]
    for path in FILES
}
