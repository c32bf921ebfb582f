"""`gemmscope report` without a browser: what the page, the Markdown and the figures say, and what is refused."""

from __future__ import annotations

import gzip
import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.errors import UserError
from gemmscope.model.spec import RunSpec
from gemmscope.report.page.html import asset, page
from gemmscope.report.page.kinds import KINDS, report_of
from gemmscope.report.page.markdown import markdown
from support.recorded_steps import LLAMA
from support.run_files import derived, explanation, forecast, put, recorded_bench, recorded_step, squares, sweep
from test_cli import Run, run

__all__ = ["run"]  # the fixture

MAKERS: dict[str, Callable[[], dict[str, Any]]] = {
    "bench": recorded_bench,
    "fallback": lambda: recorded_bench("fallback"),
    "step": lambda: recorded_step("gpt1b", verified=True, batches=True),
    "squares": squares,
    "shapes": lambda: derived(LLAMA, RunSpec(micro_batch_size=4, sequence_length=4096)),
    "forecast": forecast,
    "sweep": sweep,
    "explain": explanation,
}
LARGEST_PAGE = 6_000_000
EVIL = "</script><img src=x onerror=alert(1)>"


@pytest.mark.parametrize("name", MAKERS)
def test_every_kind_has_a_page(run: Run, tmp_path: Path, name: str) -> None:
    path = put(tmp_path, "run.json", MAKERS[name]())
    outcome = run(f"report {path} -o {tmp_path}/page.html --markdown {tmp_path}/page.md")
    assert outcome.code == 0, outcome.err
    text = (tmp_path / "page.html").read_text()
    assert len(text) < LARGEST_PAGE
    assert "How it was " in text
    answer = report_of([path]).runs[0].answer
    assert answer in outcome.out
    assert answer in html.unescape(re.sub(r"<[^>]+>", "", text))
    assert (tmp_path / "page.md").read_text().startswith("# ")


def test_kinds_that_are_written_can_be_shown() -> None:
    assert {"shapes", "bench", "step", "forecast", "explain"} <= set(KINDS)


def test_the_answer_comes_first_with_its_interval(tmp_path: Path) -> None:
    text = page(report_of([put(tmp_path, "step.json", recorded_step())]))
    body = text[text.index("<body>") :]
    assert re.search(r"<strong>1\.356x</strong><span class=\"interval\"> \[1\.34\d, 1\.36\d\]</span>", body[:2000])
    for section in ("Where the time goes", "From products to the step", "What to use", "Evidence and warnings", "Environment"):
        assert f"<h2>{section}</h2>" in body


def test_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    file = recorded_bench()
    report = report_of([put(tmp_path, "bench.json", file)])
    [part] = report.runs
    autocast = {bar.label: bar for bar in part.bars[0].bars}
    totals = {one["recipe"]: one["total_ms"]["value"] for one in file["totals"] if one["mode"] == "autocast"}
    for name, bar in autocast.items():
        assert bar.total_ms == pytest.approx(totals[name], rel=0.005)
        assert {one.shade for one in bar.segments} == ({"plain", "light"} if name == "BF16" else {"plain", "light", "hatched"})
    assert {bar.label: bar.note for bar in part.bars[1].bars}["FP8Delayed"] == "same kernels as FP8Current"
    facts = dict(autocast["FP8Current"].segments[0].facts)
    assert "nvjet" in facts["fprop kernel"]
    assert "MHz" in facts["SM clock"]
    assert "bursts" in facts["samples"]
    assert part.modes is not None
    assert [row[0].text for row in part.modes.rows] == ["FP8Current", "FP8Delayed", "FP8Block"]
    assert len(part.ops[0].rows) == len(file["rows"])


def test_the_step_adds_up(tmp_path: Path) -> None:
    file = recorded_step()
    [part] = report_of([put(tmp_path, "step.json", file)]).runs
    for bar, recipe in zip(part.bars[0].bars, file["recipes"], strict=True):
        assert bar.total_ms == pytest.approx(recipe["step_ms"]["value"], rel=0.005)
    for fall in part.waterfalls:
        gain = next(each["speedup"]["value"] for each in file["recipes"] if each["recipe"] == fall.recipe)
        assert fall.falls[-1].speedup == pytest.approx(gain, rel=0.005)
    assert part.recommendation is not None
    assert "DelayedScaling" in part.recommendation.texts["Transformer Engine"]


def test_a_fallback_is_loud_and_no_speedup(tmp_path: Path) -> None:
    report = report_of([put(tmp_path, "bench.json", recorded_bench("fallback"))])
    [part] = report.runs
    assert "FALLBACK" in part.answer
    assert [bar.alarm for bar in part.bars[0].bars] == ["", "FALLBACK"]
    assert part.gains == ()
    assert part.recommendation is None
    text = page(report)
    assert '<li class="alarm">FALLBACK: ' in text
    assert '<td class="num alarm" data-value="0.0">FALLBACK</td>' in text


def test_a_step_that_fell_back_is_no_speedup_either(tmp_path: Path) -> None:
    file = recorded_step()
    file["recipes"][1]["verdict"] = "not running in low precision: mlp forward: ran bf16 x bf16, asked for e4m3 x e4m3"
    [part] = report_of([put(tmp_path, "step.json", file)]).runs
    assert [bar.alarm for bar in part.bars[0].bars] == ["", "FALLBACK", "", ""]
    assert [gain.recipe for gain in part.gains] == ["FP8Delayed", "FP8Block"]
    assert not any("FP8Current" in line for line in part.because)


def test_forecasts_never_pass_for_measurements(tmp_path: Path) -> None:
    report = report_of([put(tmp_path, "forecast.json", forecast())])
    text = re.sub(r"<script.*?</script>", "", page(report), flags=re.DOTALL)
    assert all("FORECAST" in caption for caption in re.findall(r"<figcaption>.*?</figcaption>", text, flags=re.DOTALL))
    assert "FORECAST: nothing here was measured" in text
    assert "FORECAST" in markdown(report)


def test_a_sweep_counts_no_gain_that_is_not_to_be_had(tmp_path: Path) -> None:
    file = sweep()
    for point in file["sweeps"][1]["points"]:
        point |= {"certain": True, "best": "FP8Delayed", "host_bound": []}
    file["sweeps"][1]["points"][0]["speedups"]["FP8Delayed"] = {"value": 9.0, "low": 8.9, "high": 9.1}
    file["sweeps"][1]["points"][0]["host_bound"] = ["FP8Delayed"]
    file["sweeps"][1]["points"][1] |= {"best": "BF16", "speedups": {}}  # as where a chip runs nothing else
    _, part = report_of([put(tmp_path, "sweep.json", file)]).runs
    assert "FP8Delayed gains most at micro batch size 16" in part.answer
    assert part.because == ("1 of 3 points have a precision that is faster beyond its error bar.",)
    assert [row[-1].text for row in part.ops[0].rows] == ["FP8Delayed (HOST-BOUND)", "BF16", "FP8Delayed"]


def test_a_forecast_says_what_stands_in_its_way(run: Run, tmp_path: Path) -> None:
    line = "forecast --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 512 --gpu a100"
    assert run(f"{line} --json {tmp_path}/a100.json").code == 0
    report = report_of([tmp_path / "a100.json"])
    [part] = report.runs
    assert part.answer == "FORECAST: Only BF16 was forecast on A100 SXM4 80 GB: there is nothing to compare."
    assert run(f"{line.replace('a100', 'l40s')} --json {tmp_path}/l40s.json").code == 0
    [part] = report_of([tmp_path / "l40s.json"]).runs
    loud = [each.words for each in part.findings if each.level == "warning"]
    assert any(words.startswith("does not fit: l40s: BF16") for words in loud), loud
    assert run(f"{line.replace('a100', 'b200')} --json {tmp_path}/b200.json").code == 0
    [part] = report_of([tmp_path / "b200.json"]).runs
    assert any(each.words.startswith("HOST-BOUND: b200: the GPU needs") for each in part.findings if each.level == "warning")


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    paths = [put(tmp_path, "a.json", recorded_bench()), put(tmp_path, "b.json", recorded_bench("again"))]
    report = report_of([*paths, put(tmp_path, "c.json", forecast())])
    text = page(report)
    assert "<h2>Side by side</h2>" in text
    assert [report.letter(part) for part in report.runs] == ["A", "B", "C"]
    assert "C · B300 SXM6 288 GB, FORECAST" in text
    two = markdown(report_of(paths))
    assert re.search(r"linears, autocast \| FP8Delayed \| 1\.710x .* \| 1\.70\dx .* \| −0\.\d%, intervals meet", two)


def _outside_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def test_nothing_in_a_file_becomes_markup(tmp_path: Path) -> None:
    file = recorded_step()
    file["model"]["name"] = EVIL
    file["device"]["name"] = EVIL
    file["notes"] = [EVIL]
    file["recipes"][1]["verdict"] = EVIL
    file["recommendation"]["ready_to_paste"] = {EVIL: EVIL}
    report = report_of([put(tmp_path, "step.json", file)])
    text = page(report)
    assert "<img src=x" not in text
    assert text.count("<script") == text.count("</script>") == 3
    assert "<img" not in _outside_code(markdown(report)).replace("\\<img", "")


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    text = page(report_of([put(tmp_path, "bench.json", recorded_bench())]))
    own = text.replace(asset("echarts.min.js"), "")
    assert not re.findall(r"(?:src|href)=[\"'](?!#|data:)", own)
    assert "default-src 'none'" in own
    assert "@import" not in own
    assert "url(" not in own


def test_figures(run: Run, tmp_path: Path) -> None:
    paths = [put(tmp_path, "a.json", recorded_bench()), put(tmp_path, "b.json", recorded_bench("again"))]
    outcome = run(f"report {paths[0]} {paths[1]} --figures {tmp_path}/new/figures")
    assert outcome.code == 0, outcome.err
    names = {path.name for path in (tmp_path / "new" / "figures").iterdir()}
    assert names == {
        f"{name}.{ending}" for name in ("a-time-micro-batch", "b-time-micro-batch", "side-by-side") for ending in ("png", "svg")
    }
    assert (tmp_path / "new" / "figures" / "side-by-side.png").read_bytes()[:4] == b"\x89PNG"
    step = put(tmp_path, "step.json", recorded_step("gpt1b", batches=True))
    assert run(f"report {step} --figures {tmp_path}/step").code == 0
    assert {path.stem for path in (tmp_path / "step").iterdir()} == {"time-step", "waterfall", "speedup-on-smaller-batches"}
    assert not (tmp_path / "report.html").exists()


def test_gzipped_and_to_standard_output(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bench.json.gz"
    path.write_bytes(gzip.compress(json.dumps(recorded_bench()).encode()))
    outcome = run(f"report {path} --markdown -")
    assert outcome.code == 0
    assert outcome.out.startswith("# transformer: 24 dense layers")
    assert "1.710x [1.697, 1.722]" in outcome.out


def _changed(**changes: Any) -> dict[str, Any]:
    return {**recorded_bench("fallback"), **changes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "not a run file"),
        ("{}", "without a kind"),
        ('{"kind": "weather"}', "of kind 'weather'"),
        ('{"kind": ["bench"]}', "of kind"),
        ('{"traceEvents": []}', "a profiler trace"),
        (json.dumps(_changed(schema_version=2)), "schema version 2; this gemmscope reads version 1"),
        (json.dumps(_changed(schema_version=None)), "schema version None"),
        (json.dumps(_changed(rows=[{}])), "not a whole run file: rows.0.op"),
        (json.dumps(_changed(surprise=1)), "not a whole run file: surprise"),
        (json.dumps(_changed(device={"memory_bytes": "much"})), "its numbers make no sense"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_damaged_files(run: Run, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "run.json").write_text(content)
    outcome = run(f"report {tmp_path}/run.json -o {tmp_path}/page.html")
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "page.html").exists()


def test_a_file_cut_short(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run.json.gz").write_bytes(gzip.compress(json.dumps(recorded_bench("fallback")).encode())[:-20])
    outcome = run(f"report {tmp_path}/run.json.gz")
    assert outcome.code == 2
    assert "cut short" in outcome.err


def test_no_such_file(run: Run, tmp_path: Path) -> None:
    outcome = run(f"report {tmp_path}/nothing.json")
    assert outcome.code == 2
    assert "cannot be read: No such file" in outcome.err


def _other_mlp() -> dict[str, Any]:
    file = recorded_bench()
    for row in file["rows"]:
        if row["op"] == "MLP Up":
            row["outputs"] = 14336
    return file


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda: recorded_step(), "are of different models: layers 24 dense against 8 dense"),
        (squares, "a.json is about a model, b.json about bare products"),
        (_other_mlp, "MLP Up of 4096 to 16384 against 4096 to 14336"),
    ],
)
def test_runs_that_do_not_belong_together(run: Run, tmp_path: Path, second: Callable[[], dict[str, Any]], message: str) -> None:
    paths = [put(tmp_path, "a.json", recorded_bench()), put(tmp_path, "b.json", second())]
    outcome = run(f"report {paths[0]} {paths[1]} -o {tmp_path}/page.html")
    assert outcome.code == 2
    assert message in " ".join(outcome.err.split())
    assert "make a report of each" in outcome.err


def test_other_batches_are_named(tmp_path: Path) -> None:
    second = recorded_bench("again")
    second["run"]["micro_batch_size"] = 8
    report = report_of([put(tmp_path, "a.json", recorded_bench()), put(tmp_path, "b.json", second)])
    assert "a.json: micro-batch 31; b.json: micro-batch 8" in report.findings[0].words


def test_too_many_runs(tmp_path: Path) -> None:
    paths = [put(tmp_path, f"{index}.json", recorded_bench("fallback")) for index in range(9)]
    with pytest.raises(UserError, match="9 runs are too many"):
        report_of(paths)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-o /no/such/folder/page.html", "there is no folder /no/such/folder"),
        ("--markdown /no/such/folder/page.md", "there is no folder"),
        ("--figures {}/run.json", "is a file, not a folder"),
        ("--figures /proc/no/figures", "cannot be written"),
        ("-o {}/run.json", "would write over the run file"),
        ("-o {0}/x --markdown {0}/x", "two outputs to one place"),
    ],
)
def test_places_that_cannot_be_written(run: Run, tmp_path: Path, options: str, message: str) -> None:
    path = put(tmp_path, "run.json", recorded_bench("fallback"))
    outcome = run(f"report {path} {options.format(tmp_path)}")
    assert outcome.code == 2
    assert message in " ".join(outcome.err.split())


def test_the_library_is_what_it_says() -> None:
    """Apache ECharts 6.1.0 as published, with its licence beside it."""
    import hashlib

    text = asset("echarts.min.js")
    assert hashlib.sha256(text.encode()).hexdigest() == "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"
    assert "</script" not in text.lower()
    assert "Apache License" in asset("echarts.LICENSE")


STRANGE = st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=8), st.just([]), st.just({}), st.booleans())


def _leaves(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to some of the places of a file: of long lists the first ones."""
    if isinstance(value, dict):
        return [way, *(leaf for key, each in value.items() for leaf in _leaves(each, (*way, key)))]
    if isinstance(value, list):
        return [way, *(leaf for index, each in enumerate(value[:3]) for leaf in _leaves(each, (*way, index)))]
    return [way]


@pytest.mark.parametrize("name", ["fallback", "step", "forecast", "explain"])
def test_nonsense_is_a_message_or_a_page(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever stands at some place of a file: a page is made of it, or it is refused, and nothing else."""
    original = json.dumps(MAKERS[name]())
    ways = [way for way in _leaves(json.loads(original)) if way]
    folder = tmp_path_factory.mktemp("nonsense")

    @settings(max_examples=60, deadline=None)
    @given(st.sampled_from(ways), STRANGE)
    def hold(way: tuple[Any, ...], strange: Any) -> None:
        file = json.loads(original)
        place = file
        for key in way[:-1]:
            place = place[key]
        place[way[-1]] = strange
        try:
            report = report_of([put(folder, "run.json", file)])
        except UserError:
            return
        page(report)
        markdown(report)

    hold()
