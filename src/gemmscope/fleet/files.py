"""Reads the run files of many GPUs: a folder that `srun` or `torchrun` filled, or files that are named one by one.

Only what a fleet needs is read of each, which takes a twentieth of the time. A damaged file among many is reported and left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from pydantic import ValidationError

from gemmscope.errors import UserError
from gemmscope.findings import Finding, finding
from gemmscope.fleet.gather import Run
from gemmscope.fleet.summaries import RunView, summary_of
from gemmscope.reading import called, enough_memory, read_bytes
from gemmscope.results.read import EXPECTED, LARGEST, MOST_VALUES, read_result

SUFFIXES = (".json", ".json.gz")
GATHERED = re.compile(rb'"kind"\s*:\s*"(?:fleet|compare)"')
HEAD = 4096  # bytes in which a run file says what it is
MOST_NAMED = 5


def read_runs(paths: Sequence[str | Path]) -> tuple[list[Run], list[Finding]]:
    """The runs in these files and folders, and what was left out. A `UserError` if no file is left.

    Results of `fleet` and `compare` in a folder are what was made of the run files: they are skipped.
    """
    runs, problems = [], []
    skipped = 0
    contents: dict[bytes, Path] = {}
    for path in _files(paths):
        try:
            run = _run(path, contents)
        except UserError as error:
            problems.append(error)
            continue
        if run is None:
            skipped += 1
        else:
            runs.append(run)
    if not runs:
        if problems:
            raise problems[0]
        problem = "no run files of single GPUs, only results of fleet or compare" if skipped else "no run files"
        raise UserError(f"{', '.join(called(path) for path in paths[:MOST_NAMED])}: {problem}", NOTHING)
    findings = []
    if problems:
        reasons = [problem.message for problem in problems]
        findings = [finding("fleet-files-left-out", files=len(problems), reasons=reasons)]
    return runs, findings


NOTHING = "name a folder with the run files of bench or step (NAME.json or NAME.json.gz), or the files"


def _files(paths: Sequence[str | Path]) -> Iterator[Path]:
    """Every file once, in the order of their names inside a folder."""
    seen = set()
    for path in map(Path, paths):
        try:
            is_folder = path.is_dir()
            files = (
                sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES) and file.is_file())
                if is_folder
                else [path]
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{called(path)} cannot be read: {reason}", NOTHING) from None
        if is_folder and not files:
            raise UserError(f"the folder {called(path)} has no run files", NOTHING)
        for file in files:
            if file not in seen:
                seen.add(file)
                yield file


def _run(path: Path, contents: dict[bytes, Path]) -> Run | None:
    """The run of one file; None for a result that was made of run files. `contents`: digests of the files before it, since a copy
    of a file is not a second measurement."""
    with enough_memory(called(path)):
        raw = read_bytes(path, LARGEST, EXPECTED, unpack=True)
        if GATHERED.search(raw, 0, HEAD):
            return None
        if (original := contents.setdefault(sha256(raw).digest(), path)) != path:
            raise UserError(f"{called(path)} is a copy of {called(original)}", "remove one of them")
        if raw.count(b",") > MOST_VALUES:
            raise UserError(f"{called(path)} is too large: it has more than {MOST_VALUES:,} values", EXPECTED)
        try:
            view = RunView.model_validate_json(raw)
        except ValidationError as error:  # the full reader names the error; it may also accept what this one does not
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            read_result(path, ("bench", "step"))
            where = ".".join(str(part) for part in first["loc"])
            raise UserError(f"{called(path)} is damaged: {where}: {first['msg']}", EXPECTED) from None
        try:
            return Run(summary_of(view), file=called(path))
        except (ValueError, ArithmeticError, KeyError) as error:
            raise UserError(f"{called(path)} is damaged: its values are not valid ({type(error).__name__})", EXPECTED) from None
