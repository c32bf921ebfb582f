"""From the runs of many GPUs, or their run files, to the fleet's result.

Run files are a folder that `srun` or `torchrun` filled, or files that are named one by one. Only what a fleet needs is read
of each, which takes a twentieth of the time. A damaged file among many is reported and left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import exp
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from gemmscope.errors import UserError, shown
from gemmscope.findings import Finding, finding, sentence
from gemmscope.fleet.chips import Chip, FigureColumn, columns, gpu_order, label_groups
from gemmscope.fleet.evidence import Reference, common, different, evidence, fleet_differences
from gemmscope.fleet.rule import GroupCalls, OutlierCall, RuleOutcome, call_group, rule_data, typical_error
from gemmscope.fleet.spread import another_gpu, chip_spread, median_interval
from gemmscope.fleet.summaries import RunSummary, RunView, digest, rounded, summary_of
from gemmscope.grouping import grouped
from gemmscope.interval import Interval
from gemmscope.reading import called, enough_memory, read_bytes
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.fleet import FleetFigure, FleetGpu, FleetNode, FleetResult, Outlier, OutlierRule
from gemmscope.results.keep import BESIDE
from gemmscope.results.read import EXPECTED, LARGEST, MOST_VALUES, read_result

MOST_DIFFERENCES_NAMED = 4
MANY_FAST, SHARE_OF_FAST = 3, 0.1  # fast outliers from which on the others may be slow


NOWHERE = FleetGpu(place="", node="")  # where a run was made, if only the run itself may say it


@dataclass(frozen=True)
class Run:
    """One run on one GPU: its summary (or its plain data), and where it ran, as far as that is known beside it."""

    summary: RunSummary | Mapping[str, Any]
    gpu: FleetGpu = NOWHERE


def fleet_result(
    runs: Iterable[Run],
    *,
    failed: Sequence[FleetGpu] = (),
    tolerance: float | None = None,
    command: str = "",
    interrupted: bool = False,
    findings: Sequence[Finding] = (),
    of: Literal["bench", "step"] = "bench",
    origin: str = "",
) -> FleetResult:
    """Everything that follows from these runs. Runs of the same GPU are repeats. `of` and `origin` count only if there is no run.

    A `UserError` if the runs did not measure the same.
    """
    tolerance = rule_data()["tolerance"] if tolerance is None else tolerance
    chips, first, unreadable = _chips(runs)
    measured = [chip for chip in chips if any(not run.failure for run in chip.runs)]
    unmeasured = [
        chip.gpu.model_copy(update={"failure": chip.runs[-1].failure}) for chip in chips if all(run.failure for run in chip.runs)
    ]
    label_groups(measured)
    versions, health = common([chip.versions for chip in measured]), common([chip.runs[-1].condition.health for chip in measured])
    groups = _groups(measured, tolerance)
    about: dict[str, Any] = {"of": of, "origin": origin}
    if first is not None:
        about = {"of": first.of, "origin": first.origin, "model": first.model, "run": first.run, "stage": first.stage}
        about["fingerprint"] = digest(sorted(first.measured.items()))
    gpus = [gpu for group in groups for gpu in group.gpus(versions, health)]
    everywhere, gpus = _findings_of_all(gpus)
    places = {gpu.place for gpu in gpus}
    gpus += [*unreadable, *unmeasured, *(gpu for gpu in failed if gpu.place not in places)]
    gpus.sort(key=gpu_order)
    outliers = [outlier for group in groups for outlier in group.outliers()]
    tested = dict.fromkeys(name for group in groups for name in group.calls.figures)
    return FleetResult(
        command=command,
        **about,
        versions=versions,
        health=health,
        differences=tuple(fleet_differences(measured)),
        outliers=tuple(sorted(outliers, key=lambda outlier: outlier.ratio.value)),
        rule=OutlierRule(
            false_alarms=rule_data()["false_alarms"],
            tolerance=tolerance,
            least_gpus=rule_data()["least_gpus"],
            figures=tuple(tested),
        ),
        figures=tuple(figure for group in groups for figure in group.figures()),
        nodes=tuple(_nodes(gpus, groups, list(tested))),
        gpus=tuple(gpus),
        interrupted=interrupted,
        findings=(*findings, *everywhere, *_notes(groups)),
    )


def _chips(runs: Iterable[Run]) -> tuple[list[Chip], RunSummary | None, list[FleetGpu]]:
    """The GPUs with their runs; the first run; and places whose data cannot be read."""
    chips: dict[str, Chip] = {}
    first: RunSummary | None = None
    first_name, unreadable = "", []
    for run in runs:
        try:
            own = run.summary if isinstance(run.summary, RunSummary) else RunSummary.model_validate(run.summary)
        except ValidationError as error:
            where = ".".join(str(part) for part in error.errors(include_url=False, include_context=False)[0]["loc"])
            failure = f"its result cannot be read ({shown(where)})"
            unreadable.append(
                run.gpu.model_copy(update={"place": (run.gpu.place or run.gpu.file or "?"), "failure": failure, "file": ""})
            )
            continue
        gpu = _gpu(run.gpu, own.device)
        name = gpu.file or gpu.place
        if first is None:
            first, first_name = own, name
        elif own.measured != first.measured:
            _refuse_mixture(first_name, first.measured, name, own.measured)
        known = chips.setdefault(gpu.uuid or gpu.place, Chip(gpu))
        known.runs.append(own)
        known.learn(file=known.gpu.file or gpu.file)
    _tell_apart(list(chips.values()))
    return list(chips.values()), first, unreadable


def _tell_apart(chips: Sequence[Chip]) -> None:
    """Give every GPU a place of its own: processes that see only their own GPU all call it number 0."""
    for name in ("pci_bus", "uuid"):
        counts = Counter(chip.gpu.place for chip in chips)
        for chip in chips:
            if counts[chip.gpu.place] > 1 and (mark := chip.runs[0].device.get(name) or chip.gpu.uuid):
                chip.learn(place=f"{chip.gpu.place} ({mark})")


def _gpu(known: FleetGpu, device: Mapping[str, str]) -> FleetGpu:
    """The GPU of a run, by what its driver said and by what is in its data."""
    node, uuid = known.node or device.get("node", ""), known.uuid or device.get("uuid", "")
    index = known.index if known.index is not None else int(device["index"]) if device.get("index", "").isdecimal() else None
    place = known.place or (f"{node} GPU {index}" if index is not None else f"{node} CPU" if device.get("name") == "CPU" else "")
    if not node and not known.place:  # a run file of an older version does not say where it was measured
        place = known.file or uuid or "this machine"
    return known.model_copy(update={"place": place or f"{node} {uuid}", "node": node, "index": index, "uuid": uuid})


def _refuse_mixture(first: str, before: Mapping[str, str], name: str, after: Mapping[str, str]) -> None:
    names = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    if "command" in names:  # everything else differs with it
        names = ["command"]
    texts = [
        f"{key}: {' and '.join(_plain(side.get(key)) for side in (before, after))}" for key in names[:MOST_DIFFERENCES_NAMED]
    ]
    more = f" and {len(names) - len(texts)} more differences" if len(names) > len(texts) else ""
    raise UserError(
        f"{first} and {name} did not measure the same: {'; '.join(texts)}{more}",
        "gather the run files of one measurement, with the same model, batch and options on every GPU",
    )


def _plain(value: str | None) -> str:
    """What was measured, for people: without the digest of a long list, and a bare GEMM, whose name is its size, once.

    >>> _plain("QKV Proj 8192x4096x6144 and 3 more (0b15f4e6960f2f5e)"), _plain("8x8x8 8x8x8 (0b15f4e6960f2f5e)"), _plain(None)
    ('QKV Proj 8192x4096x6144 and 3 more', '8x8x8', 'not given')
    """
    return re.sub(r" \([0-9a-f]{16}\)$|^(\S+) (?=\1\b)", "", value) if value is not None else "not given"


class _Group:
    """The GPUs of one product at one power limit."""

    def __init__(self, name: str, chips: Sequence[Chip]) -> None:
        self.name, self.chips = name, chips
        self.columns = columns(chips)
        self.calls = GroupCalls({}, ())
        self._on_node = np.array([chip.gpu.node for chip in chips])

    def tested_columns(self) -> list[FigureColumn]:
        """The times of every recipe, and the speedups, in the first mode: the same chip is slow in the other mode, too."""
        mode = next((column.figure.mode for column in self.columns), "")
        return [column for column in self.columns if column.figure.mode == mode]

    @property
    def baseline(self) -> str:
        times = [column.figure for column in self.columns if column.figure.unit == "ms"]
        return next((figure.name for figure in sorted(times, key=lambda figure: figure.recipe != BASELINE)), "")

    @property
    def testable(self) -> bool:
        least = rule_data()["least_gpus"]
        return any(np.isfinite(column.values).sum() >= least for column in self.tested_columns())

    def call(self, alarms: float, tolerance: float) -> None:
        """Apply the rule."""
        nodes, least = [chip.gpu.node for chip in self.chips], rule_data()["least_gpus"]
        self.calls = call_group(self.tested_columns(), self.baseline, nodes, alarms=alarms, tolerance=tolerance, least=least)

    def fast(self) -> int:
        """How many chips the rule calls fast, alone or with their node."""
        calls = [call for call in self.calls.calls if call.ratio.value > 1]
        nodes = {call.node for call in calls if call.gpu < 0}
        return sum(chip.gpu.node in nodes for chip in self.chips) + sum(
            call.gpu >= 0 and call.node not in nodes for call in calls
        )

    def outside(self, name: str) -> NDArray[np.bool_]:
        """The chips that the rule calls in this figure, alone or with their node. A chip that is called in one time counts in all
        times: with few GPUs, only the baseline may reach its limit. For untested figures, the chips called in any figure."""
        called = np.zeros(len(self.chips), dtype=bool)
        tests, units = self.calls.figures, {column.figure.name: column.figure.unit for column in self.columns}
        for call in self.calls.calls:
            if name in tests and not any(units[own] == units[name] == "ms" or own == name for own in (call.figure, *call.also)):
                continue
            if call.gpu >= 0:
                called[call.gpu] = True
            else:
                called |= self._on_node == call.node
        return called

    def figures(self) -> Iterable[FleetFigure]:
        """Every figure of the group."""
        for column in self.columns:
            figure, known = column.figure, np.isfinite(column.speeds)
            outside = self.outside(figure.name)[known]
            speeds, errors = column.speeds[known], column.errors[known]
            healthy = errors[~outside & np.isfinite(errors)]
            spread = chip_spread(speeds[~outside], (float(np.sqrt(np.mean(healthy**2))) if len(healthy) else 0.0), column.freedom)
            test: RuleOutcome | None = self.calls.figures.get(figure.name)
            center, another = self._center(column, speeds), another_gpu(speeds, outside)
            yield FleetFigure(
                name=figure.name,
                unit=figure.unit,
                group=self.name,
                recipe=figure.recipe,
                mode=figure.mode,
                flops=figure.flops,
                gpus=int(known.sum()),
                center=center,
                lowest=float(column.values[known].min()),
                highest=float(column.values[known].max()),
                spread=rounded(spread) if spread is not None else None,
                another=column.between(center.value, another) if another is not None else None,
                noise=float(f"{typical_error(errors):.4g}") if np.isfinite(errors).any() else None,
                noise_from=column.noise_from,
                limit=float(f"{test.limit:.4g}") if test is not None else None,
            )

    def _center(self, column: FigureColumn, speeds: NDArray[np.float64]) -> Interval:
        """The median; with fewer than six GPUs without an interval, and for a single GPU with its own."""
        if len(speeds) == 1 and (own := column.interval(int(np.flatnonzero(np.isfinite(column.values))[0]))) is not None:
            return own
        return column.between(exp(column.sign * float(np.median(speeds))), median_interval(speeds))

    def gpus(self, versions: Mapping[str, str], health: Mapping[str, int | str]) -> Iterable[FleetGpu]:
        """Every GPU, with what differs from the most common values."""
        for row, chip in enumerate(self.chips):
            figures = {column.name: own for column in self.columns if (own := column.interval(row)) is not None}
            findings = {repr((entry.code, entry.facts)): entry for run in chip.runs for entry in run.findings}
            own_health = different(chip.condition.health, health)
            yield chip.gpu.model_copy(
                update={
                    "versions": different(chip.versions, versions),
                    "figures": figures,
                    "repeats": len(chip.runs),
                    "condition": chip.condition.model_copy(update={"health": own_health}),
                    "findings": tuple(findings.values()),
                }
            )

    def outliers(self) -> Iterable[Outlier]:
        """What the rule calls, with what else differs there."""
        rows = [[call.gpu] if call.gpu >= 0 else np.flatnonzero(self._on_node == call.node).tolist() for call in self.calls.calls]
        called = {row for own in rows for row in own}
        others = Reference([chip for row, chip in enumerate(self.chips) if row not in called])
        for call, own in zip(self.calls.calls, rows, strict=True):
            yield self._outlier(call, evidence([self.chips[row] for row in own], others))

    def _outlier(self, call: OutlierCall, differs: tuple[Finding, ...]) -> Outlier:
        whole = call.gpu < 0
        return Outlier(
            where=call.node if whole else self.chips[call.gpu].gpu.place,
            node=call.node,
            whole_node=whole,
            gpus=tuple(self.chips[row].gpu.place for row in call.members),
            group=self.name,
            figure=call.figure,
            side="slow" if call.ratio.value < 1 else "fast",
            ratio=rounded(call.ratio),
            score=round(call.score, 2),
            also={name: float(f"{ratio:.6g}") for name, ratio in call.also.items()},
            evidence=differs,
        )


def _groups(chips: Sequence[Chip], tolerance: float) -> list[_Group]:
    """The groups, each with its outliers: the allowed false alarms are divided among those that can be tested."""
    groups = [_Group(name, own) for name, own in grouped((chip.gpu.group, chip) for chip in chips).items()]
    testable = [group for group in groups if group.testable]
    for group in testable:
        group.call(rule_data()["false_alarms"] / len(testable), tolerance)
    return groups


def _findings_of_all(gpus: list[FleetGpu]) -> tuple[list[Finding], list[FleetGpu]]:
    """Findings that every GPU has, once; and the GPUs without them."""
    codes = set.intersection(*({entry.code for entry in gpu.findings} for gpu in gpus)) if len(gpus) > 1 else set()
    if not codes:
        return [], gpus
    shared = [
        finding("fleet-everywhere", place=gpus[0].place, text=sentence(entry).removesuffix("."))
        for entry in gpus[0].findings
        if entry.code in codes
    ]
    kept = [
        gpu.model_copy(update={"findings": tuple(entry for entry in gpu.findings if entry.code not in codes)}) for gpu in gpus
    ]
    return shared, kept


def _nodes(gpus: Sequence[FleetGpu], groups: Sequence[_Group], tested: Sequence[str]) -> Iterable[FleetNode]:
    """Every machine, with the median speed of its GPUs relative to their groups' centers."""
    names = tested or [column.figure.name for group in groups for column in group.tested_columns()]
    speeds = grouped(
        (chip.gpu.node, (column.name, float(np.exp(speed - center))))
        for group in groups
        for column in group.columns
        if column.name in names
        for center in [np.nanmedian(column.speeds)]
        for chip, speed in zip(group.chips, column.speeds, strict=True)
        if np.isfinite(speed)
    )
    for node, own in grouped((gpu.node, gpu) for gpu in gpus).items():
        if node:
            medians = {name: float(f"{np.median(values):.6g}") for name, values in grouped(speeds.get(node, ())).items()}
            yield FleetNode(node=node, gpus=len(own), measured=sum(not gpu.failure for gpu in own), speed=medians)


def _notes(groups: Sequence[_Group]) -> Iterable[Finding]:
    """What could not be compared."""
    least = rule_data()["least_gpus"]
    for group in groups:
        if not group.testable:
            yield finding("fleet-too-few", group=group.name, gpus=len(group.chips), least=least)
        if (fast := group.fast()) >= max(MANY_FAST, SHARE_OF_FAST * len(group.chips)):
            yield finding("fleet-many-fast", group=group.name, fast=fast, gpus=len(group.chips))
        for column in group.columns:
            missing = [chip.gpu.place for chip, value in zip(group.chips, column.values, strict=True) if not np.isfinite(value)]
            if missing:
                yield finding("fleet-figure-missing", figure=column.figure.name, gpus=len(missing), places=missing)
        if unknown := sum(not chip.gpu.node for chip in group.chips):
            yield finding("fleet-place-unknown", runs=unknown)


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
    reasons = [problem.message for problem in problems]
    return runs, [finding("fleet-files-left-out", files=len(reasons), reasons=reasons)] if reasons else []


NOTHING = "name a folder with the run files of bench or step (NAME.json or NAME.json.gz), or the files"


def _is_run_file(file: Path) -> bool:
    """Whether a file of a folder may be the run file of a GPU: what lies beside one that holds more is not."""
    return file.name.endswith(SUFFIXES) and BESIDE not in file.name and file.is_file()


def _files(paths: Sequence[str | Path]) -> Iterator[Path]:
    """Every file once, in the order of their names inside a folder."""
    seen = set()
    for path in map(Path, paths):
        try:
            is_folder = path.is_dir()
            files = sorted(file for file in path.iterdir() if _is_run_file(file)) if is_folder else [path]
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
            return Run(summary_of(view), NOWHERE.model_copy(update={"file": called(path)}))
        except (ValueError, ArithmeticError, KeyError) as error:
            raise UserError(f"{called(path)} is damaged: its values are not valid ({type(error).__name__})", EXPECTED) from None
