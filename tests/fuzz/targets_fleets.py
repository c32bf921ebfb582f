"""Folders of run files of many GPUs, some of them damaged: gathered, shown and compared."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz.hostile import OUTPUTS
from fuzz.targets import Target, command_line
from fuzz.targets_runs import OF_KIND, damaged, damages, recorded

SAME = ("bench", "bench again", "bench, third run", "bench, fourth run")
FILES = st.sampled_from(
    ["gpu{}.json", "gpu{}.json", "gpu{}.json.gz", "‮{}.json", "{}\x1b[2J.json", ".json", "{}.txt", "=1+{}.json"]
)


@st.composite
def folders(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "whole": draw(st.lists(st.sampled_from(SAME), max_size=3)),
        "damaged": draw(st.lists(damages((*SAME * 3, *OF_KIND["step"], *OF_KIND["fleet"], "compare")), min_size=1, max_size=4)),
        "names": draw(st.lists(FILES, min_size=7, max_size=7)),
        "inside": draw(st.none() | st.none() | st.sampled_from(["a folder.json", "fleet.json"])),
        "arguments": draw(OUTPUTS) + draw(st.sampled_from([[], ["--tolerance", "3%"], ["--fail-if-outlier"]])),
    }


def write_folder(value: dict[str, Any], folder: Path) -> None:
    """The folder that an input describes."""
    contents = [recorded(name).encode() for name in value["whole"]]
    contents += [damaged(one, recorded(one["result"])) for one in value["damaged"]]
    for number, (name, content) in enumerate(zip(value["names"], contents, strict=False)):
        (folder / name.format(number)).write_bytes(gzip.compress(content, 1, mtime=0) if name.endswith(".gz") else content)
    if value["inside"] is not None:
        (folder / value["inside"]).mkdir()


def run_folder(value: dict[str, Any], folder: Path) -> str:
    """Gather, write, and read back what was written."""
    runs, out = folder / "runs", folder / "out.json"
    runs.mkdir()
    write_folder(value, runs)
    shown = command_line(["fleet", str(runs), "--json", str(out), *value["arguments"]])
    return shown + (command_line(["compare", str(out), str(out)]) if out.exists() else "")


TARGETS = [Target("fleet folders", folders(), run_folder, in_suite=6)]
