"""What is done with any result: read it, turn it into a Document, name the command that made it."""

from __future__ import annotations

from gemmscope.document.build import document
from gemmscope.results.base import Result, command_line
from gemmscope.results.read import looks_like_run, read_result

__all__ = ["Result", "command_line", "document", "looks_like_run", "read_result"]
