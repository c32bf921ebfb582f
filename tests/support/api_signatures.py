"""Writes the keywords of the Python API: into the signatures and docstrings of `api/`, from the options that are declared once.

    python tests/support/api_signatures.py [FOLDER]

A function decorated with `@takes(...)` has the comment `# options` in its signature and the line `Options:` in its docstring:
what follows them is written here.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import gemmscope.api as api
from gemmscope.api.calls import SPECS, Keywords
from gemmscope.options.declare import Declared

API = Path(api.__file__).parent
WIDTH = 130


def python_type(declared: Declared) -> str:
    """The type of a keyword: numbers can also be written as on the command line, such as "8k"."""
    if declared.option.accepts:
        return declared.option.accepts
    parts = [_name(kind) for kind in (declared.types or (declared.hint,))]
    if any(kind in (int, float) for kind in declared.types) and str not in declared.types:
        parts.insert(parts.index("None") if "None" in parts else len(parts), "str")
    return " | ".join(parts)


def _name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(json.dumps(value) for value in get_args(kind))}]"
    return "None" if kind is type(None) else str(kind.__name__)


def parameters(keywords: Keywords) -> list[str]:
    """The keywords as lines of a signature."""
    lines = [f"{name}: Axis = None," for name in keywords.axes]
    for name, declared in keywords.options().items():
        default = None if declared.default == () and "None" in python_type(declared) else declared.default
        value = json.dumps(default) if isinstance(default, str) else repr(default)
        lines.append(f"{name}: {python_type(declared)} = {value},")
    return lines


def option_lines(keywords: Keywords, indent: str) -> list[str]:
    """The keywords with their help, as lines of a docstring."""
    lines = []
    if keywords.axes:
        lines += _filled(f"{', '.join(keywords.axes)}: The values of one or two sizes to vary.", indent)
    for name, declared in keywords.options().items():
        default = f" [default: {declared.option.default}]" if declared.option.default else ""
        text = re.sub(r"--([a-z][a-z-]+)", lambda match: match[1].replace("-", "_"), declared.option.help + default)
        lines += _filled(f"{name}: {text}", indent)
    return lines


def _filled(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text.replace("\\", "\\\\"), WIDTH - 2, initial_indent=indent, subsequent_indent=indent + "    ", break_on_hyphens=False
    )


def written(source: str) -> str:
    """The module with the keywords of all its functions."""
    lines = source.splitlines()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.decorator_list]
    owners = {
        (method.lineno, method.name): owner.name
        for owner in ast.walk(ast.parse(source))
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, ast.FunctionDef)
    }
    for function in sorted(functions, key=lambda function: -function.lineno):
        owner = owners.get((function.lineno, function.name))
        keywords = SPECS.get(f"{owner}.{function.name}" if owner else function.name)
        if keywords is None:
            continue
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        start, end = function.lineno - 1, docstring.end_lineno - 1
        head = lines[: next(at for at in range(start, end) if lines[at].strip() == "# options") + 1]
        close = next(at for at in range(len(head), end + 1) if lines[at].lstrip().startswith(") ->"))
        indent = head[-1][: -len("# options")]
        inner = lines[close][: len(lines[close]) - len(lines[close].lstrip())] + "    "
        told = next(at for at in range(close, end + 1) if lines[at].strip() == "Options:")
        body = [*lines[close : told + 1], *option_lines(keywords, inner + "    "), f'{inner}"""']
        lines = [*head, *(indent + line for line in parameters(keywords)), *body, *lines[end + 1 :]]
    return "\n".join(lines) + "\n"


def main(folder: Path = API) -> None:
    """Write every module of the API."""
    for path in sorted(folder.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "@takes(" in source and path.name != "calls.py":
            path.write_text(written(source), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
