"""`gemmscope report`: results of any kind as documents that stand on one page."""

from collections.abc import Sequence
from pathlib import Path

from gemmscope.document import document
from gemmscope.document.combine import check_together, label
from gemmscope.document.common import phrase
from gemmscope.document.model import Document, Message
from gemmscope.errors import UserError
from gemmscope.results.base import Result
from gemmscope.results.read import read_result


def report(runs: Sequence[str | Path | Result]) -> tuple[list[Document], list[Message]]:
    """The documents of run files or results, and findings about all of them.

    A `UserError` if a file cannot be read, or if the runs do not belong on one page.
    """
    names = _names(list(dict.fromkeys(Path(run) for run in runs if not isinstance(run, Result))))
    documents: list[Document] = []
    for number, run in enumerate(runs, start=1):
        if isinstance(run, Result):
            documents.append(document(run, f"run {number}"))
        elif Path(run) in names:  # a file that is given twice is shown once
            documents.append(document(read_result(run), names.pop(Path(run))))
    if not documents:
        raise UserError("no run file is given", "gemmscope report bench.json -o report.html")
    return documents, check_together(documents)


def _names(paths: Sequence[Path]) -> dict[Path, str]:
    """File names, with their folder where two are equal."""
    names = [path.name for path in paths]
    return {path: path.name if names.count(path.name) == 1 else str(path) for path in paths}


def answers(documents: Sequence[Document]) -> list[str]:
    """The answer of each document, with its label if there are several."""
    if len(documents) == 1:
        return [documents[0].answer]
    return [f"{label(documents, one)}: {one.answer.removeprefix(phrase('forecast'))}" for one in documents]
