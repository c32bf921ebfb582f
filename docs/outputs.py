"""Renews the generated blocks of the documentation: `make pictures`. A test fails when one is stale.

A block after a line `<!-- output: NAME -->` is text generated from recorded data. A block between `<!-- made: NAME -->` and
`<!-- /made -->` is Markdown generated from recorded data, forecasts or tables of facts (`worked_example.py` and the like). A
block between `<!-- prints: COMMAND -->` and `<!-- /prints -->` is the current output of the command; with
`<!-- from: WORDS -->` below the first mark, only the table whose title contains these words, or `the answer`.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from unittest.mock import patch

import gemmscope as gs
from gemmscope.cli.help import wrapped
from gemmscope.cli.main import main as main_of_the_command_line
from gemmscope.document import document
from gemmscope.results.read import read_result
from gemmscope.writers import terminal

DOCS = Path(__file__).parent
PAGES = (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md")))
sys.path[:0] = [str(DOCS), str(DOCS.parent / "tests")]
import accuracy_summary  # noqa: E402
import command_reference  # noqa: E402
import example_files  # noqa: E402
import finding_table  # noqa: E402
import fleet_tables  # noqa: E402
import health_table  # noqa: E402
import layout_tables  # noqa: E402
import model_tables  # noqa: E402
import noise  # noqa: E402
import op_tables  # noqa: E402
import paste_texts  # noqa: E402
import published_tables  # noqa: E402
import recipe_tables  # noqa: E402
import reference_tool  # noqa: E402
import training_tables  # noqa: E402
import worked_example  # noqa: E402
from support import sweep_files  # noqa: E402
from support.fleet_files import shown_fleet  # noqa: E402


def step() -> str:
    """The recorded Llama step as the command prints it."""
    return _tidy(terminal.text(document(worked_example.llama_step()), detail=False))


def bench() -> str:
    """The recorded bench as the command prints it."""
    return _tidy(terminal.text(document(worked_example.bench()), detail=False))


def _tidy(text: str) -> str:
    lines = [line.rstrip() for line in text.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def answer() -> str:
    """A step of Llama-3.2-1B that ran on an H200 (its samples are left out of the file): the answer and the compact table."""
    recorded = read_result(DOCS / "measured" / "h200_llama_step.json.gz")
    return "\n\n".join(_tidy(terminal.text(document(recorded), detail=False)).split("\n\n")[1:3])


def explain() -> str:
    """A recorded step whose weights are quantized for every micro-batch, as the command explains it."""
    return _tidy(terminal.text(document(gs.explain_trace(TRACE), "trace.json.gz"), detail=False))


TRACE = DOCS.parent / "tests" / "data" / "traces" / "recast_weights.json.gz"


def numerics() -> str:
    """The errors of a small Llama that was trained and recorded on a CPU (benchmarks/numerics_example.py)."""
    recorded = read_result(DOCS / "measured" / "numerics_small_llama.json.gz")
    return _tidy(terminal.text(document(recorded), detail=False))


def fleet() -> str:
    """A SIMULATED fleet of 64 GPUs, as the command prints it."""
    return _tidy(terminal.text(document(shown_fleet()), detail=False))


def sweep() -> str:
    """The format of a measured sweep. Its numbers are made up (`support/sweep_files.py`), and the page says so above them."""
    return _tidy(terminal.text(document(sweep_files.measured_plane(with_impossible=False)), detail=False))


BLOCKS = {
    "fleet": fleet,
    "sweep": sweep,
    "step": step,
    "bench": bench,
    "explain": explain,
    "answer": answer,
    "numerics": numerics,
}
MADE: dict[str, Callable[[], str]] = {
    "accuracy": accuracy_summary.table,
    "accuracy, in short": accuracy_summary.in_short,
    "published runs, summary": published_tables.runs_summary,
    "other software": published_tables.other_software,
    "published runs": published_tables.fitted_runs,
    "other published runs": published_tables.other_runs,
    "experts on an H200": published_tables.experts_on_h200,
    "exposed shares": layout_tables.exposed_shares,
    "memory of layouts": layout_tables.memory_of_layouts,
    "speedups on Blackwell": worked_example.blackwell_tables,
    "conclusions": worked_example.conclusions,
    "pairs on Blackwell": op_tables.blackwell_pairs,
    "H200 by op": op_tables.h200_by_op,
    "H200 by pass": op_tables.h200_by_pass,
    "why FP8Block loses": op_tables.why_block_loses,
    "passes differ": op_tables.passes_differ,
    "why Attn Out gains least": op_tables.why_attn_out_gains_least,
    "FLOPs per element": op_tables.intensity,
    "B300 by op": op_tables.b300_by_op,
    "FLOP budget": op_tables.flop_budget,
    "waterfall": op_tables.waterfall,
    "Megatron-LM flags": paste_texts.megatron_flags,
    "FP8Delayed in Transformer Engine": paste_texts.text("FP8Delayed", "Transformer Engine"),
    "FP8Tensorwise in torchao": paste_texts.text("FP8Tensorwise", "torchao"),
    "FP8Tensorwise in torchtitan": paste_texts.text("FP8Tensorwise", "torchtitan"),
    "reference tool": reference_tool.table,
    "reference tool, summary": reference_tool.summary,
    "measured beside forecast": worked_example.side_by_side,
    "published": worked_example.published,
    "published, summary": worked_example.published_summary,
    "the step": worked_example.step_table,
    "repeats": noise.repeats,
    "lengths": noise.lengths,
    "recipes by architecture": recipe_tables.where,
    "recipes by backend": recipe_tables.backends,
    "operands": recipe_tables.operands,
    "quantization": recipe_tables.quantized,
    "findings": finding_table.findings,
    "fleet outliers": fleet_tables.outliers,
    "fleet spread": fleet_tables.spread,
    "fleet scale": fleet_tables.scale,
    "health": health_table.figures,
    **example_files.BLOCKS,
    **model_tables.BLOCKS,
    **training_tables.BLOCKS,
    "commands": command_reference.summary,
    "each command": command_reference.each_command,
    "shared options": command_reference.shared_options,
    "exit codes": command_reference.exit_codes,
}
MARKED = re.compile(r"(<!-- made: (?P<name>.*?) -->\n).*?(<!-- /made -->)", flags=re.DOTALL)


def renewed(page: str) -> str:
    """The page with all generated blocks renewed, at the default terminal width."""
    with patch.dict(os.environ):
        os.environ.pop("COLUMNS", None)
        return _renewed(page)


def _renewed(page: str) -> str:
    for name, make in BLOCKS.items():
        pattern = rf"(<!-- output: {name} -->\n```\n).*?(```)"
        match = re.search(pattern, page, flags=re.DOTALL)
        if match is not None:
            page = f"{page[: match.start()]}{match[1]}{make()}\n{match[2]}{page[match.end() :]}"
    page = MARKED.sub(lambda match: f"{match[1]}{MADE[match['name']]()}\n{match[3]}", page)
    return PRINTS.sub(_printed_block, page)


PRINTS = re.compile(
    r"<!-- prints: (?P<command>.*?) -->\n(?:<!-- from: (?P<words>.*?) -->\n)?.*?<!-- /prints -->", flags=re.DOTALL
)


ANSWER = "the answer"


def _printed_block(match: re.Match[str]) -> str:
    command, start = match["command"], match["words"]
    printed = _printed(command)
    shown = printed.split("\n\n")[1] if start == ANSWER else _table(printed, start) if start else printed
    marks = f"<!-- prints: {command} -->\n" + (f"<!-- from: {start} -->\n" if start else "")
    shown_command = "\n".join(wrapped(command, 88, ""))
    return f"{marks}```\n$ {shown_command}\n{shown}\n```\n<!-- /prints -->"


@cache
def _printed(command: str) -> str:
    """What the command prints into a pipe."""
    before, sys.argv = sys.argv, shlex.split(command)
    out, code = io.StringIO(), None
    try:
        with redirect_stdout(out):
            main_of_the_command_line()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv = before
    assert not code, command
    return _tidy(out.getvalue())


def _table(printed: str, start: str) -> str:
    """The last table whose title contains this text, with its title. With `--detail`, the compact table comes first."""
    lines = printed.splitlines()
    first = max(index for index, line in enumerate(lines) if start in line)
    last = next((index for index in range(first + 2, len(lines)) if not lines[index]), len(lines))
    return "\n".join(["…", *lines[first:last]])


def main() -> None:
    """Renew all pages."""
    for path in PAGES:
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
