"""What is done with any result: read it, turn it into a Document."""

from gemmscope.document.build import document
from gemmscope.results.base import Result
from gemmscope.results.read import read_result

__all__ = ["Result", "document", "read_result"]
