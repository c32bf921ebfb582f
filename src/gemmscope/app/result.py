"""What is done with any result: read it, turn it into a Document, decide where its files go."""

from gemmscope.document.build import document
from gemmscope.results.base import Result
from gemmscope.results.keep import Keeper
from gemmscope.results.read import read_result

__all__ = ["Keeper", "Result", "document", "read_result"]
