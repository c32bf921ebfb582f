"""Results with any text in every string, through every writer; files of GEMMs with any text in every cell."""

from __future__ import annotations

import ast
import csv
import io
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hypothesis import strategies as st

from fuzz.targets import Target, command_line
from gemmscope.document import document
from gemmscope.errors import UserError
from gemmscope.paste.mix import mix_to_paste
from gemmscope.results.base import Result
from gemmscope.results.numerics import Mix
from gemmscope.text import printable
from gemmscope.toml import parse_toml
from gemmscope.writers import figure, markdown, tables, terminal
from gemmscope.writers import html as html_writer
from support.poison import HOSTILE, poisoned
from support.results import RESULTS

NAMES = ("shapes", "bench", "bench of bare GEMMs", "step", "forecast", "sweep", "sweep of a plane", "explain", "compare")
SPECIAL = "<>&\"'`|\\[](){}$#*_~=+-@!%:/\n\r\t\x00\x07\x08\x1b\x7f\x85\x9b\u200b\u200e\u2028\u202e\u2066\ufeff\ufffe\ud800\udfff"
TEXT = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.sampled_from(SPECIAL), max_size=20),
    st.text(st.characters(), max_size=20),  # including lone surrogates
    st.builds(lambda text, count: text * count, st.text(st.characters(), min_size=1, max_size=3), st.integers(100, 800)),
)


class Evil(NamedTuple):
    """A kind of result, and what its strings are replaced by or begin with."""

    name: str
    texts: list[str]
    keeps: bool


RESULTS_INPUT = st.builds(Evil, st.sampled_from(NAMES), st.lists(TEXT, min_size=1, max_size=6), st.booleans())


@cache
def _clean(name: str) -> Result:
    return RESULTS[name]()


def evil_result(evil: Evil) -> Result:
    """The result with these texts in its strings, one after the other."""

    def poison(text: str) -> str:
        chosen = evil.texts[sum(map(ord, text)) % len(evil.texts)]
        return chosen + text if evil.keeps or not chosen else f"{chosen}{sum(map(ord, text))}"

    return poisoned(_clean(evil.name), poison)[0]


def write_everything(evil: Evil, folder: Path) -> str:
    """Every writer on one result. What is not a terminal's text is checked here."""
    result = evil_result(evil)
    doc = document(result, evil.texts[0])
    rows = list(csv.reader(io.StringIO(tables.csv_text(doc))))
    assert len(rows) == 1 + sum(len(table.rows) for table in doc.tables()), "the CSV file has other rows"
    assert not [cell for row in rows for cell in row if re.match(r"[=@\t\r]|[+-](?![0-9.,]|$)", cell)], "a formula"
    html_writer.page([doc]).encode()
    html_writer.notebook_html(doc).encode()
    if doc.charts():
        (folder / "figure.svg").write_bytes(figure.image(doc, ".svg"))
    for ending in ("json", "html"):
        result.save(folder / f"out.{ending}")
    return "".join(
        [
            result.to_json(),
            terminal.text(doc, detail=True),
            terminal.text(doc, detail=False),
            markdown.markdown([doc]),
            tables.csv_text(doc),
        ]
    )


def report(evil: Evil, folder: Path) -> str:
    """The run file through `gemmscope report`, and through `compare` where that takes it."""
    path = folder / "run.json"
    path.write_text(evil_result(evil).to_json(), encoding="utf-8")
    text = command_line(["report", str(path), "-o", str(folder / "report.html"), "--markdown", "-"])
    if evil.name.startswith(("bench", "step")):
        text += command_line(["compare", str(path), str(path), "--detail"])
    return text


def hostile_arguments(texts: list[str], folder: Path) -> str:
    """Values that scripts fill in: as options, names of files, and commands."""
    clean = [text.replace("\0", "") for text in texts]
    outcome = ""
    for line in (
        ["shapes", "--preset", *clean],
        ["shapes", *clean],
        clean,
        ["shapes", "--preset", "gpt2", "--micro-batch-size", "1", "--sequence-length", "8", "--json", f"{folder}/no/{clean[0]}"],
        ["bench", "--recipes", clean[0], "--shapes", clean[-1]],
        ["report", *(f"{folder}/{text}" for text in clean)],
    ):
        if clean[0] in ("bench", "step", "calibrate", "doctor"):
            continue
        try:
            outcome += command_line(line)
        except UserError as error:
            outcome += str(error)
    return outcome


def gemm_list(cells: list[list[str]], folder: Path) -> str:
    """A file of GEMMs with columns of the user's own."""
    path, out = folder / "gemms.csv", io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    width = max(map(len, cells))
    names = [f"{name}{number}" for number, name in enumerate((cells[0] + [""] * width)[:width])]
    writer.writerow(["m", "k", "n", "format", *names])
    for row in cells:
        writer.writerow(["64", "64", "64", "bf16", *(row + [""] * width)[:width]])
    path.write_text(out.getvalue(), encoding="utf-8", errors="replace")
    text = command_line(["forecast", "--gemms", str(path), "--gpu", "h100", "--csv", str(folder / "out.csv")])
    written = (folder / "out.csv").read_text(encoding="utf-8")
    for row in csv.reader(io.StringIO(written)):
        assert not [cell for cell in row if re.match(r"[=@\t\r]|[+-](?![0-9.,]|$)", cell)], "a formula"
    return text + written


def paste(case: tuple[list[str], str], folder: Path) -> str:
    """Settings with these names of modules, as the frameworks parse them: no name adds a line, a flag or a setting."""
    names, recipe = [name for name in case[0] if name] or ["x"], case[1]
    linears = (*names, "mlp.down_proj")
    texts = mix_to_paste(Mix(recipe=recipe, higher="BF16", last_layers=1, linears=linears, error=0.1), [*linears, "x.y"], 4)
    for framework, text in texts.items():
        if framework == "torchtitan":
            try:
                tables = parse_toml(text)
            except UserError as error:
                raise RuntimeError(text) from error
            assert set(tables) == {"model", "compile", "quantize"}, "another table"
        elif framework == "Megatron-LM":
            flags, _, config = text.partition("\n# mix.yaml\n")
            assert [line for line in flags.splitlines()[1:] if line and not line.startswith("#")] == [], "another line"
            assert not config or set(yaml.safe_load(config)) == {"configs", "matchers"}, "another setting"
        else:
            ast.parse(text)
    return "".join(map(printable, texts.values()))


CELLS: Any = st.lists(st.lists(TEXT, max_size=3), min_size=1, max_size=4)
TARGETS = [
    Target("output-writers", RESULTS_INPUT, write_everything, 9),
    Target("output-report", RESULTS_INPUT, report, 9),
    Target("output-arguments", st.lists(TEXT, min_size=1, max_size=3), hostile_arguments, 25),
    Target("output-paste", st.tuples(st.lists(TEXT, max_size=3), st.sampled_from(["FP8Current", "MXFP8", "NVFP4"])), paste),
    Target("output-gemm-list", CELLS, gemm_list, 25),
]
