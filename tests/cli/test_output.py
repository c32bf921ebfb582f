"""Output files never replace a more complete result or an input and have no control characters; streams may be closed or full."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemmscope.cli.main import main
from gemmscope.cli.output import FigureOptions, OutputOptions, check_targets, deliver
from gemmscope.results.base import Result
from gemmscope.results.bench import BenchResult
from gemmscope.results.keep import Keeper
from gemmscope.results.read import read_result
from support.command import Outcome, Run, run
from support.machines import machine
from support.poison import HOSTILE, invisible, poisoned
from support.processes import wait_until
from support.refusals import refused, unnamed
from support.results import RESULTS, TRACES
from support.run_files import recorded_bench
from support.step_files import recorded_step

__all__ = ["run"]  # the fixture
DATA = Path(__file__).parent.parent / "data"
BATCH = "--micro-batch-size 1 --sequence-length 128"
SHAPES = f"shapes --preset llama-3.1-8b {BATCH}"


def cut(result: BenchResult, rounds: int, **changes: Any) -> BenchResult:
    """The same campaign, with fewer rounds."""
    tasks = tuple(replace(task, rounds_ms=task.rounds_ms[:rounds], states=task.states[:rounds]) for task in result.tasks)
    return result.model_copy(update={"tasks": tasks, **changes})


@pytest.fixture
def long() -> BenchResult:
    return recorded_bench("first")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def options(folder: Path, *names: str) -> FigureOptions:
    return FigureOptions(**{name: str(folder / f"out.{ending}") for name, ending in ENDINGS.items() if name in names})


ENDINGS = {"json": "json", "csv": "csv", "markdown": "md", "output": "svg"}
ALL = tuple(ENDINGS)


# --- never replaced by fewer samples ------------------------------------------------------------------------------------


def test_how_much_a_result_holds(long: BenchResult) -> None:
    assert long.sample_count > cut(long, 1).sample_count > cut(long, 0).sample_count == 0
    assert recorded_step("gpt1b").sample_count > 0
    assert RESULTS["sweep"]().sample_count
    assert RESULTS["numerics"]().sample_count
    fleet = RESULTS["fleet"]()
    twice = [gpu.model_copy(update={"repeats": 2}) for gpu in fleet.gpus]
    assert fleet.model_copy(update={"gpus": tuple(twice)}).sample_count == 2 * fleet.sample_count
    assert [RESULTS[name]().sample_count for name in ("shapes", "forecast", "explain", "compare")] == [None] * 4


def test_only_a_path_that_was_decided_on_is_written(long: BenchResult, tmp_path: Path) -> None:
    """And files that this command has begun itself are replaced, whatever they hold."""
    file = tmp_path / "out.json"
    with pytest.raises(ValueError, match="was not decided on"):
        Keeper(long).write(file, "{}")
    file.write_text(long.to_json())
    less = cut(long, 1, interrupted=True)
    assert Keeper(less).place(file, run_file=True).path != file
    own = Keeper(less, own=[file])
    assert own.place(file, run_file=True).path == file
    own.write(file, less.to_json())
    assert read_result(file).sample_count == less.sample_count


def test_a_result_without_samples_replaces_nothing(long: BenchResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deliver(long, options(tmp_path, *ALL))
    before = files(tmp_path)
    capsys.readouterr()
    deliver(cut(long, 0, interrupted=True), options(tmp_path, *ALL))
    assert files(tmp_path) == before
    assert capsys.readouterr().err.splitlines() == [
        f"nothing was measured, so {tmp_path}/out.{ending} is left unchanged" for ending in ENDINGS.values()
    ]


def test_a_result_without_samples_is_written_where_there_is_nothing(long: BenchResult, tmp_path: Path) -> None:
    (tmp_path / "out.csv").touch()  # empty
    deliver(cut(long, 0, interrupted=True), options(tmp_path, "json", "csv", "markdown"))
    assert read_result(tmp_path / "out.json").sample_count == 0
    assert all(files(tmp_path).values())
    assert len(files(tmp_path)) == 3


def test_nothing_to_draw_is_not_an_error_where_nothing_was_measured(
    long: BenchResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code of the command already says that nothing was measured."""
    deliver(cut(long, 0), options(tmp_path, "json", "output"))
    assert list(files(tmp_path)) == ["out.json"]
    assert unnamed(capsys.readouterr().err, f"{tmp_path}/out.svg") == []


def test_an_interrupted_result_goes_beside_one_with_more_samples(
    long: BenchResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deliver(long, options(tmp_path, *ALL))
    before = files(tmp_path)
    short = cut(long, 1, interrupted=True)
    capsys.readouterr()
    deliver(short, options(tmp_path, *ALL))
    beside = {f"out.interrupted.{ending}" for ending in ENDINGS.values()}
    assert set(files(tmp_path)) == set(before) | beside
    assert {name: content for name, content in files(tmp_path).items() if name in before} == before
    assert read_result(tmp_path / "out.interrupted.json").sample_count == short.sample_count
    err = capsys.readouterr().err
    assert unnamed(err, f"{tmp_path}/out.json") == []
    assert f"wrote {tmp_path}/out.interrupted.json" in err
    deliver(short, options(tmp_path, "json"))
    assert (tmp_path / "out.interrupted-2.json").exists()


@pytest.mark.parametrize("old", ["less", "other", "damaged", "empty"])
def test_an_interrupted_result_replaces_less(long: BenchResult, tmp_path: Path, old: str) -> None:
    texts = {"less": cut(long, 1).to_json(), "other": RESULTS["shapes"]().to_json(), "damaged": "{", "empty": ""}
    (tmp_path / "out.json").write_text(texts[old])
    (tmp_path / "out.csv").write_text("old")
    deliver(cut(long, 2, interrupted=True), options(tmp_path, "json", "csv"))
    assert read_result(tmp_path / "out.json").sample_count == cut(long, 2).sample_count
    follows = old != "empty"  # the run file was replaced, and so are its tables
    assert ((tmp_path / "out.csv").read_text() != "old") is follows
    assert (tmp_path / "out.interrupted.csv").exists() is not follows


def test_tables_of_an_interrupted_result_go_beside(long: BenchResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("out.csv", "out.svg"):
        (tmp_path / name).write_text("old")
    deliver(cut(long, 1, interrupted=True), options(tmp_path, "json", "csv", "output"))
    assert sorted(files(tmp_path)) == ["out.csv", "out.interrupted.csv", "out.interrupted.svg", "out.json", "out.svg"]
    assert (tmp_path / "out.csv").read_text() == (tmp_path / "out.svg").read_text() == "old"
    assert unnamed(capsys.readouterr().err, f"{tmp_path}/out.csv") == []


def test_a_complete_result_replaces_everything(long: BenchResult, tmp_path: Path) -> None:
    deliver(long, options(tmp_path, "json", "csv"))
    deliver(cut(long, 1), options(tmp_path, "json", "csv"))
    assert sorted(files(tmp_path)) == ["out.csv", "out.json"]
    assert read_result(tmp_path / "out.json").sample_count == cut(long, 1).sample_count


def test_python_keeps_files_too(long: BenchResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long.save(tmp_path / "out.json")
    cut(long, 0, interrupted=True).save(tmp_path / "out.json")
    assert "nothing was measured" in capsys.readouterr().err
    cut(long, 1, interrupted=True).save(tmp_path / "out.json")
    assert "out.interrupted.json" in capsys.readouterr().err
    assert sorted(files(tmp_path)) == ["out.interrupted.json", "out.json"]
    assert read_result(tmp_path / "out.json").sample_count == long.sample_count


# --- one file that cannot be written --------------------------------------------------------------------------------------


def test_all_other_outputs_are_written(long: BenchResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = options(tmp_path, "csv", "markdown").but(json=str(tmp_path / "no" / "out.json"), output="/no/figure.png")
    with refused(f"{tmp_path}/no/out.json"):
        deliver(long, outputs)
    assert sorted(files(tmp_path)) == ["out.csv", "out.md"]
    assert "All linears" in capsys.readouterr().out


def test_the_run_file_is_written_before_anything_can_fail(
    long: BenchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("gemmscope.commands.document", broken)
    with pytest.raises(ZeroDivisionError):
        deliver(long, options(tmp_path, *ALL))
    assert read_result(tmp_path / "out.json").sample_count == long.sample_count


def test_files_are_written_before_standard_output_that_nobody_reads(tmp_path: Path) -> None:
    line = f"{sys.executable} -m gemmscope {SHAPES} --json - --csv {tmp_path}/out.csv | true; exit ${{PIPESTATUS[0]}}"
    child = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (child.returncode, child.stderr) in [(141, f"wrote {tmp_path}/out.csv\n"), (0, f"wrote {tmp_path}/out.csv\n")]
    assert (tmp_path / "out.csv").exists()


# --- the same file by another name ----------------------------------------------------------------------------------------


def test_hard_links_are_the_same_file(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}))
    content = config.read_bytes()
    (tmp_path / "hard.json").hardlink_to(config)
    outcome = run(f"shapes --config {config} {BATCH} --json {tmp_path}/hard.json")
    assert outcome.code == 2
    assert unnamed(outcome.err, f"--json {tmp_path}/hard.json") == []
    assert config.read_bytes() == content
    (tmp_path / "a.json").touch()
    (tmp_path / "b.csv").hardlink_to(tmp_path / "a.json")
    outcome = run(f"{SHAPES} --json {tmp_path}/a.json --csv {tmp_path}/b.csv")
    assert (outcome.code, unnamed(outcome.err, f"{tmp_path}/a.json", f"{tmp_path}/b.csv")) == (2, [])
    assert run(f"{SHAPES} --json - --csv /dev/stdout").code == 2
    assert run(f"{SHAPES} --json /dev/null --csv /dev/null").code == 0


@pytest.mark.parametrize("command", ["report", "compare", "explain"])
def test_hard_links_of_inputs(run: Run, tmp_path: Path, command: str) -> None:
    given, link = tmp_path / "in.json", tmp_path / "link.html"
    given.write_text(recorded_bench("first").to_json() if command != "explain" else "{}")
    link.hardlink_to(given)
    output = {"report": f"-o {link}", "compare": f"{given} --csv {link}", "explain": f"--perfetto {link}"}[command]
    before = given.read_bytes()
    outcome = run(f"{command} {given} {output}")
    assert (outcome.code, unnamed(outcome.err, link)) == (2, [])
    assert given.read_bytes() == before


def test_standard_input_and_output_are_not_the_same_file() -> None:
    check_targets({"json": "-"}, ["-", "/dev/stdin"])


def test_dev_stdout_is_standard_output(run: Run) -> None:
    assert json.loads(run(f"{SHAPES} --json /dev/stdout").out)["kind"] == "shapes"


def test_descriptors_are_written_to(tmp_path: Path) -> None:
    places = f"--json /dev/fd/5 --csv >(cat > {tmp_path}/a.csv) 5> {tmp_path}/out.json"
    line = f"{sys.executable} -m gemmscope {SHAPES} {places}"
    subprocess.run(["bash", "-c", line], stdout=subprocess.DEVNULL, check=True)
    assert json.loads((tmp_path / "out.json").read_text())["kind"] == "shapes"
    assert wait_until(lambda: (tmp_path / "a.csv").read_text().startswith("table,"))  # bash does not wait for `cat`


# --- streams that are closed or full --------------------------------------------------------------------------------------

STEP = DATA / "h200_bench_first.json.gz"
COMMANDS = {
    "help": "--help",
    "version": "--version",
    "shapes": SHAPES,
    "forecast": f"forecast --preset llama-3.1-8b {BATCH} --gpu h100",
    "explain": f"explain {DATA}/traces/recompute.json.gz",
    "compare": f"compare {STEP} {STEP}",
    "report": f"report {STEP} -o /dev/null",
    "doctor": "doctor",
    "trace-me": "trace-me",
    "presets": "shapes --list-presets",
    "json": f"{SHAPES} --json -",
}
FAILING = {
    "usage": "shapes --nonsense",
    "bad input": "shapes --preset nonsense",
    "step": "step --nonsense",
    "bench": "bench --shapes x",
}


ASKS_NO_TORCH = """
from gemmscope.commands import doctor
from gemmscope.process import run_worker
doctor.run_worker = lambda _, **options: run_worker("gemmscope", "--version", **options)  # importing torch takes seconds
"""


@pytest.mark.parametrize("name", [*COMMANDS, *FAILING])
def test_closed_streams(name: str) -> None:
    """All cases run in one process, because none of them depends on the shell."""
    line = shlex.split({**COMMANDS, **FAILING}[name])
    code = f"""
import os, sys
from gemmscope.__main__ import run
{ASKS_NO_TORCH if name == "doctor" else ""}
sys.argv = ["gemmscope", *{line!r}]
run()
"""

    def closed(*numbers: int) -> subprocess.CompletedProcess[str]:
        def close() -> None:
            for number in numbers:
                os.close(number)

        return subprocess.run(
            [sys.executable, "-c", code], preexec_fn=close, capture_output=True, text=True, check=False, timeout=300
        )

    if name in ("shapes", "usage"):
        assert closed(0, 1, 2).returncode == 2
    no_output = closed(1)
    assert no_output.returncode == 2
    if name in COMMANDS:
        assert no_output.stderr.splitlines()[-1] == "gemmscope: the output cannot be written: standard output is closed"
    no_errors = closed(0, 2)
    assert no_errors.returncode == (0 if name in COMMANDS else 2)
    assert bool(no_errors.stdout) is (name in COMMANDS)


@pytest.mark.parametrize(
    "line", ["forecast --gemms - --gpu h100", f"shapes --config /dev/stdin {BATCH}", f"shapes --config - {BATCH}"]
)
def test_closed_standard_input(line: str) -> None:
    command = ["bash", "-c", f"{sys.executable} -m gemmscope {line} <&-"]
    child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert child.returncode == 2
    assert child.stderr.startswith("gemmscope: ")
    assert "Traceback" not in child.stderr


@pytest.mark.parametrize(
    ("redirection", "line", "code", "message"),
    [
        (">/dev/full", SHAPES, 2, "the output cannot be written: No space left on device"),
        (">/dev/full", f"{SHAPES} --json -", 2, "the output cannot be written: No space left on device"),
        (">/dev/full", "--help", 2, "the output cannot be written: No space left on device"),
        ("2>/dev/full", f"{SHAPES} --json /dev/null", 0, ""),
        ("2>/dev/full", "shapes --preset nonsense", 2, ""),
        ("2>/dev/full", "shapes --nonsense", 2, ""),
        (">/dev/full 2>/dev/full", SHAPES, 2, ""),
        ("2> >(true)", f"{SHAPES} --json /dev/null", 0, ""),
        ("", f"{SHAPES} --json /dev/full", 2, "/dev/full cannot be written: No space left on device"),
        (">/dev/full", f"{SHAPES} --csv /dev/full", 2, "/dev/full cannot be written: No space left on device"),
        ("| true; exit ${PIPESTATUS[0]}", f"{SHAPES} --csv /dev/full", 2, "/dev/full cannot be written: No space left on device"),
    ],
)
def test_full_streams(redirection: str, line: str, code: int, message: str) -> None:
    command = ["bash", "-c", f"{sys.executable} -m gemmscope {line} {redirection}"]
    child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert child.returncode == code
    assert message in child.stderr
    assert "Traceback" not in child.stderr


# --- control characters ---------------------------------------------------------------------------------------------------

Call = Callable[..., Outcome]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """A command with an argument that may contain anything."""

    def called(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["gemmscope", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        for text in captured:
            assert not invisible(text, allowed="\n"), arguments
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return called


EVIL = "\x1b[31m\x1b]0;title\x07\u202e[bold]x[/]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["shapes", "--tp", EVIL],
        ["shapes", f"--{EVIL}"],
        ["shapes", EVIL],
        [EVIL],
        ["shapes", "--preset", EVIL],
        ["shapes", "--config", EVIL],
        ["shapes", "--module", f"{EVIL}:{EVIL}"],
        ["shapes", "--preset", "llama-3.1-8b", "--recompute", EVIL],
        ["bench", "--recipes", EVIL, "--shapes", "64"],
        ["bench", "--shapes", EVIL],
        ["bench", "--device", EVIL],
        ["bench", "--backend", EVIL],
        ["forecast", "--gpu", EVIL, *SHAPES.split()[1:]],
        ["forecast", "--sweep", EVIL, *SHAPES.split()[1:]],
        ["forecast", "--gemms", EVIL],
        ["explain", EVIL],
        ["compare", EVIL, EVIL],
        ["compare", EVIL, EVIL, "--fail-if-slower", EVIL],
        ["report", EVIL],
        ["report", str(STEP), "--figures", f"/dev/null/{EVIL}"],
        ["trace-me", "--kind", EVIL],
        ["doctor", "--json", f"/no/{EVIL}"],
        [*SHAPES.split(), "--json", f"/no/{EVIL}.json"],
        ["step", *SHAPES.split()[1:], "-o", EVIL],
    ],
    ids=lambda arguments: " ".join(arguments[:2]).replace(EVIL, "EVIL"),
)
def test_arguments_are_quoted(call: Call, arguments: list[str]) -> None:
    assert call(*arguments).code == 2


def test_file_names_are_quoted(call: Call, tmp_path: Path) -> None:
    path = tmp_path / f"{EVIL.replace('/', '')}.json"
    outcome = call(*SHAPES.split(), "--json", str(path))
    assert (outcome.code, "\\x1b[31m" in outcome.err) == (0, True)
    assert call("report", str(path), "-o", f"{path}.html", "--markdown", f"{path}.md").code == 0
    assert not invisible(Path(f"{path}.md").read_text(), allowed="\n")
    assert call("explain", str(path)).code == 2


@pytest.fixture(scope="module")
def hostile_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run files of every kind with a hostile text in every string."""
    folder = tmp_path_factory.mktemp("hostile")
    written = {}
    for number, name in enumerate(name for name in RESULTS if not name.startswith("explain ")):
        result, _ = poisoned(RESULTS[name](), lambda text: HOSTILE[len(text) % len(HOSTILE)] + text)
        written[name] = folder / f"{number}.json"
        written[name].write_text(result.to_json())
    return written


def test_hostile_run_files(call: Call, hostile_files: dict[str, Path], tmp_path: Path) -> None:
    for name, path in hostile_files.items():
        outcome = call("report", str(path), "-o", str(tmp_path / "report.html"), "--markdown", "-")
        assert outcome.code == 0, (name, outcome.err)
    bench, again = (str(hostile_files[name]) for name in ("bench", "bench again"))
    assert call("compare", bench, again, "--detail").code == 0
    assert call("compare", bench, again, "--csv", "-").code == 0
    assert call("compare", bench, again, "--json", "-").code == 0
    assert call("report", bench, again, "-o", "-").code == 0
    for name in ("bench", "step"):
        trace = DATA / "traces" / "recompute.json.gz"
        assert call("explain", str(trace), "--against", str(hostile_files[name]), "--detail").code in (0, 2)


@pytest.mark.parametrize("name", ["recompute", "syncs", "experts"])
def test_hostile_traces(call: Call, tmp_path: Path, name: str) -> None:
    """Names of kernels, operators, annotations, processes and GPUs."""
    assert name in TRACES
    trace = json.loads(gzip.decompress((DATA / "traces" / f"{name}.json.gz").read_bytes()))
    for number, event in enumerate(trace["traceEvents"]):
        event["name"] = event["name"] + HOSTILE[number % len(HOSTILE)]
    for device in trace.get("deviceProperties", ()):
        device["name"] = f"{device['name']}{EVIL}\ud800"
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    for arguments in (["--detail"], ["--json", "-"], ["--csv", "-"], ["--markdown", "-"], ["--against", str(STEP)]):
        assert call("explain", str(path), *arguments).code in (0, 2), arguments
    assert call("explain", str(path), "--perfetto", str(tmp_path / "out.json.gz"), "--detail").code in (0, 2)


def test_a_hostile_driver(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = machine()
    evil = replace(evil, driver=EVIL, packages={EVIL: EVIL}, gpus=tuple(replace(gpu, name=EVIL) for gpu in evil.gpus))
    monkeypatch.setattr("gemmscope.commands.doctor.environment", lambda: evil)
    monkeypatch.setattr(
        "gemmscope.commands.doctor._ask_frameworks", lambda: {"torch": {"broken": EVIL}, "transformer_engine": {"broken": EVIL}}
    )
    assert "[bold]x[/]" in call("doctor").out
    assert json.loads(call("doctor", "--json", "-").out)["environment"]["driver"] == EVIL


def test_gemm_lists_have_no_formulas(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "gemms.csv"
    path.write_text(f"m,k,n,format,=note,name\n64,64,64,bf16,=1+1,{EVIL}\n64,64,64,bf16,-1.5,plain\n")
    outcome = call("forecast", "--gemms", str(path), "--gpu", "h100")
    assert outcome.code == 0
    head, first, second = outcome.out.splitlines()
    assert head.startswith("m,k,n,format,'=note,name,")
    assert "'=1+1," in first
    assert "-1.5,plain" in second


def test_halves_of_characters_in_results(tmp_path: Path) -> None:
    result: Result = recorded_bench("first").model_copy(
        update={"command": "\ud800", "device": {"name": "\udfff\x9b"}, "precision": float("nan")}
    )
    data = json.loads(result.to_json())
    assert (data["command"], data["device"], data["precision"]) == ("?", {"name": "?\x9b"}, None)
    assert "\\u009b" in result.to_json()
    for ending in ("json", "csv", "md", "html", "svg"):
        result.save(tmp_path / f"out.{ending}")
        (tmp_path / f"out.{ending}").read_text(encoding="utf-8")
    assert "\\ud800" in str(result) or "\\udfff" in str(result)
    result._repr_html_().encode()


def test_outputs_without_options() -> None:
    assert OutputOptions().targets() == {}
