"""What is done with any result: read it, turn it into a Document."""

from gemmscope.document.build import document
from gemmscope.results.base import Result
from gemmscope.results.read import looks_like_run, read_result

__all__ = ["Result", "document", "looks_like_run", "read_result"]
