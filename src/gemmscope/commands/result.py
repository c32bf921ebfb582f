"""What is done with any result: turn it into a Document, decide where its files go."""

from gemmscope.document import document
from gemmscope.results.base import Result
from gemmscope.results.keep import Keeper

__all__ = ["Keeper", "Result", "document"]
