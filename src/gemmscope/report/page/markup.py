"""HTML without a template language: `tag` builds elements, and whatever is not markup already is escaped."""

from __future__ import annotations

import html
import json
import re
from typing import Any


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: str | bool | None) -> Markup:
    """An element. A trailing underscore of an attribute's name falls away, others become dashes; None and False leave it out.

    >>> tag("p", "1 < 2", class_="note", hidden=False)
    '<p class="note">1 &lt; 2</p>'
    """
    written = "".join(_attribute(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    return Markup(f"<{name}{written}>{''.join(map(text, children))}</{name}>")


def text(child: str) -> Markup:
    """Markup as it is, anything else escaped."""
    return child if isinstance(child, Markup) else Markup(html.escape(child))


def joined(*children: str) -> Markup:
    """One after another, without an element around them."""
    return Markup("".join(map(text, children)))


def _attribute(name: str, value: str | bool | None) -> str:
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{html.escape(value)}"'


def script_json(data: Any) -> Markup:
    """Data inside a script element: no text in it can end the element or begin a comment.

    >>> script_json({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    written = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return Markup(written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def slug(words: str) -> str:
    """For an id or a file name.

    >>> slug("A · NVIDIA H200")
    'a-nvidia-h200'
    """
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") or "x"
