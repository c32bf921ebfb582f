"""Documents as Markdown, for pull requests and wikis: the same answers, tables and findings."""

import re
from collections.abc import Iterator, Sequence

from gemmscope.document.combine import common_baselines, label, side_by_side_table
from gemmscope.document.common import first_rows
from gemmscope.document.model import Document, Message
from gemmscope.document.table import Table

MOST_ROWS = 1000  # of a table: nobody reads more in Markdown
SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\`*_<>|#&~$"})
LINK = re.compile(r"\](?=[(\[:])|^\[|!\[|:(?=//)|\.(?<=www\.)|@", re.IGNORECASE)
"""Where a link, an image, an address or a mention begins."""
BLOCK = re.compile(r"^(?:[-+=]|\d{1,9}(?=[.)](?: |$)))")
"""The start of a line that would make it a list or a heading."""


def markdown(documents: Sequence[Document], messages: Sequence[Message] = ()) -> str:
    """The whole file; `messages` are about all runs together."""
    return "\n\n".join(_blocks(documents, messages)) + "\n"


def _blocks(documents: Sequence[Document], messages: Sequence[Message]) -> Iterator[str]:
    several = len(documents) > 1
    if messages:
        yield _messages(messages)
    if several and any(document.speedups for document in documents):
        yield "## Side by side"
        yield from (titled(common.table()) for common in common_baselines(documents))
        yield titled(side_by_side_table(documents))
    for document in documents:
        heading = f"{label(documents, document)}: {document.title}" if several else document.title
        yield f"# {_plain(heading)}"
        yield from _one(document)


def _one(document: Document) -> Iterator[str]:
    yield f"**{_plain(document.answer)}**"
    yield from map(_paragraph, document.because)
    if document.context:
        yield "  \n".join(map(_paragraph, document.context))
    if document.advice is not None:
        yield "## Recommendation"
        yield _paragraph(document.advice.text)
        for framework, text in document.advice.ready_to_paste.items():
            yield f"{_paragraph(framework)}:\n\n{_fenced(text)}"
    if document.messages:
        yield "## Findings"
        yield _messages(document.messages)
    for section in document.sections:
        yield f"## {_plain(section.title)}"
        if section.text:
            yield _paragraph(section.text)
        yield from map(titled, section.tables())
    for heading, facts in document.facts.items():
        yield f"## {_plain(heading)}"
        yield "\n".join(f"- {_paragraph(name)}: {_plain(value)}" for name, value in facts)


def titled(table: Table) -> str:
    """A table below its title; of a long table, only the first rows."""
    table = first_rows(table, MOST_ROWS)
    note = f"\n\n{_paragraph(table.note)}" if table.note else ""
    return f"**{_plain(table.title)}**{note}\n\n{pipe_table(table)}"


def pipe_table(table: Table) -> str:
    """A Markdown table, without the title; what is recommended is bold."""
    heads = f"| {' | '.join(_plain(column.name) for column in table.columns)} |"
    rule = "|" + "|".join(" ---: " if column.numeric else " --- " for column in table.columns) + "|"
    lines = []
    for place, row in enumerate(table.rows):
        texts = [_plain(cell.text) for cell in row]
        lines.append(
            f"| {' | '.join(text and f'**{text}**' for text in texts) if place in table.marked else ' | '.join(texts)} |"
        )
    return "\n".join([heads, rule, *lines])


def _messages(messages: Sequence[Message]) -> str:
    return "\n".join(
        f"- **{_plain(message.text)}**" if message.level == "error" else f"- {_paragraph(message.text)}" for message in messages
    )


def _plain(text: str) -> str:
    """The text on one line, with nothing in it that is markup; brackets of intervals stay, those of links do not."""
    return LINK.sub(lambda match: "\\" + match[0], " ".join(text.split()).translate(SPECIAL))


def _paragraph(text: str) -> str:
    """The same for text at the beginning of a line, where more is markup."""
    plain = _plain(text)
    begin = BLOCK.match(plain)
    return plain if begin is None else f"\\{plain}" if begin[0] in "-+=" else f"{begin[0]}\\{plain[begin.end() :]}"


def _fenced(text: str) -> str:
    """A code block that its own text cannot end."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text}\n{fence}"
