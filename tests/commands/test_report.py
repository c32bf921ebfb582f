"""`gemmscope report` without a browser: pages of every kind of run, several runs together, and what is refused."""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import escape

import gemmscope as gs
from gemmscope.commands.report import report
from gemmscope.document import document
from gemmscope.document.combine import common_baselines, letter
from gemmscope.errors import UserError
from gemmscope.writers.html import asset, page
from gemmscope.writers.markdown import markdown
from support.command import Run, run
from support.explain_files import explanation
from support.forecast_files import several_gpus
from support.report_files import RunData, put, run_data
from support.results import RESULTS

__all__ = ["run"]  # the fixture

LARGEST_PAGE = 6_000_000
EVIL = "</script><img src=x onerror=alert(1)>"


@pytest.mark.parametrize("name", RESULTS)
def test_every_kind_has_a_page(run: Run, tmp_path: Path, name: str) -> None:
    path = put(tmp_path, "run.json", name)
    outcome = run(f"report {path} -o {tmp_path}/page.html --markdown {tmp_path}/page.md")
    assert outcome.code == 0, outcome.err
    text = (tmp_path / "page.html").read_text()
    assert len(text) < LARGEST_PAGE
    [told], _ = report([path])
    assert told.answer in outcome.out
    assert told.answer in html.unescape(re.sub(r"<[^>]+>", "", text))
    assert (tmp_path / "page.md").read_text().startswith("# ")


@pytest.mark.parametrize("ending", ["pdf", "PNG", "json", "md"])
def test_a_page_is_not_called_otherwise(run: Run, tmp_path: Path, ending: str) -> None:
    outcome = run(f"report {put(tmp_path, 'run.json', 'step')} -o {tmp_path}/page.{ending}")
    assert outcome.code == 2
    assert f"the page is HTML, not .{ending.lower()}" in outcome.err
    assert "--output page.html" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_results_are_reported_as_their_files_are(tmp_path: Path) -> None:
    result = explanation()
    (tmp_path / "run.json").write_text(result.to_json())
    [from_file], _ = report([tmp_path / "run.json"])
    [from_result], _ = report([result])
    assert from_result.sections == from_file.sections
    assert from_result.messages == from_file.messages


def test_the_answer_comes_first_with_its_interval(tmp_path: Path) -> None:
    text = page(*report([put(tmp_path, "step.json", "step")]))
    body = text[text.index("<body>") :]
    assert re.search(r"<strong>1\.3\d\dx</strong><span class=\"interval\"> \[1\.3\d\d, 1\.3\d\d\]</span>", body[:2500])


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    paths = [put(tmp_path, "a.json", "bench"), put(tmp_path, "b.json", "bench again")]
    documents, messages = report([*paths, put(tmp_path, "c.json", "forecast"), paths[0]])
    text = page(documents, messages)
    assert "<h2>Side by side</h2>" in text
    assert [letter(documents, document) for document in documents] == ["A", "B", "C"]
    assert documents[2].forecast
    two = markdown(*report(paths))
    assert re.search(r"linears, autocast \| FP8Delayed \| 1\.710x .* \| 1\.70\dx .* \|", two)
    assert re.search(r"\| B · NVIDIA H200 \| FP8Delayed \| [\d.]+ \| 1\.7\d\d?x \[", two)


def test_runs_are_compared_over_one_baseline_and_never_by_their_own_gains() -> None:
    """A GPU with a smaller low-precision speedup can still be faster: its speedup over the other GPU's BF16 shows it."""
    result = several_gpus()
    told = document(result)
    [step, *others] = common_baselines([told])
    assert (step.what, step.baseline) == ("training step", "B300 SXM6 288 GB, FORECAST")
    assert all("linears" in common.what or "GEMMs" in common.what for common in others)
    rates = {(time.run, time.recipe): time for time in step.times}
    b300, h200 = (gpu.step for gpu in result.gpus[:2])
    assert b300 is not None
    assert h200 is not None
    assert rates["B300 SXM6 288 GB, FORECAST", "NVFP4"].over == b300.speedup("NVFP4")
    slower = rates["H200 SXM 141 GB, FORECAST", "FP8Delayed"]
    assert slower.over.value == pytest.approx(h200.recipes[2].tokens_per_s / b300.recipes[0].tokens_per_s)
    assert slower.over.low is not None
    assert slower.over.low < slower.over.value < 1 < h200.recipes[2].speedup.value  # type: ignore[union-attr]
    text = page([told])
    assert "All bars share one baseline" in text
    assert "intervals overlap" not in text


def test_linears_of_other_batches_have_no_common_baseline(tmp_path: Path) -> None:
    second = run_data("bench again")
    second["run"]["micro_batch_size"] = 8
    documents, _ = report([put(tmp_path, "a.json", "bench"), put(tmp_path, "b.json", second)])
    assert common_baselines(documents) == []


def test_findings_of_a_gpu_stand_under_that_gpu() -> None:
    told = document(several_gpus())
    text = page([told])
    begins = {gpu: text.index(f'id="{gpu}" class="gpu"') for gpu in ("b300", "h200", "l40s", "a100")}
    ends = dict(zip(begins, [*list(begins.values())[1:], text.index('id="method"')], strict=True))
    own = [message for message in told.messages if message.gpu]
    assert {message.gpu for message in own} == set(begins)
    for message in own:
        place = text.index(f'data-code="{message.code}">{str(escape(message.text))[:40]}')
        assert begins[message.gpu] < place < ends[message.gpu]


def test_nothing_in_a_file_becomes_markup(tmp_path: Path) -> None:
    file = run_data("step")
    file["model"]["name"] = file["device"]["name"] = file["command"] = EVIL
    file["findings"].append({"code": "converters-ignored", "level": "note", "facts": {"value": EVIL}})
    file["recommendation"]["ready_to_paste"] = {EVIL: EVIL}
    documents, messages = report([put(tmp_path, "step.json", file)])
    text = page(documents, messages)
    assert "<img src=x" not in text
    assert text.count("<script") == text.count("</script>") == 3
    outside_code = re.sub(r"^```.*?^```", "", markdown(documents, messages), flags=re.DOTALL | re.MULTILINE)
    assert "<img" not in outside_code.replace("\\<img", "")


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    text = page(*report([put(tmp_path, "bench.json", "bench")]))
    own = text.replace(asset("echarts.min.js"), "")
    assert not re.findall(r"(?:src|href)=[\"'](?!#|data:)", own)
    assert "default-src 'none'" in own
    assert "@import" not in own
    assert "url(" not in own


def test_figures(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [put(tmp_path, "a.json", "bench"), put(tmp_path, "b.json", "bench again")]
    outcome = run(f"report {paths[0]} {paths[1]} --figures {tmp_path}/new/figures")
    assert outcome.code == 0, outcome.err
    names = {path.name for path in (tmp_path / "new" / "figures").iterdir()}
    assert {f"side-by-side.{ending}" for ending in ("png", "svg")} < names
    assert {name.split("-")[0] for name in names} == {"a", "b", "common", "side"}
    assert (tmp_path / "new" / "figures" / "side-by-side.png").read_bytes()[:4] == b"\x89PNG"
    path = put(tmp_path, "step.json", "verified step")
    assert run(f"report {path} --figures {tmp_path}/step").code == 0
    assert {"time-step", "waterfall"} < {path.stem for path in (tmp_path / "step").iterdir()}
    assert not (tmp_path / "report.html").exists()


def test_gzipped_and_to_standard_output(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bench.json.gz"
    path.write_bytes(gzip.compress(json.dumps(run_data("bench")).encode()))
    outcome = run(f"report {path} --markdown -")
    assert outcome.code == 0
    assert outcome.out.startswith("# ")
    assert "1.710x [1.69" in outcome.out


def _changed(**changes: Any) -> str:
    return json.dumps({**run_data("bench with a fallback"), **changes})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: "{", "not valid JSON"),
        (lambda: "[1]", "not a run file"),
        (lambda: "{}", "it has no kind"),
        (lambda: '{"kind": "weather"}', "its kind is 'weather'"),
        (lambda: '{"kind": ["bench"]}', "its kind is"),
        (lambda: '{"traceEvents": []}', "a profiler trace"),
        (lambda: _changed(schema_version=1), "schema version 1; this gemmscope reads version 2"),
        (lambda: _changed(schema_version=None), "schema version None"),
        (lambda: _changed(linears={}), "is damaged: linears."),
        (lambda: _changed(surprise=1), "is damaged: surprise"),
        (lambda: _changed(device={"memory_bytes": "much"}), "is damaged: its values are not valid"),
        (lambda: _changed(findings=[{"code": "weather", "level": "note"}]), "is damaged: its values are not valid"),
        (lambda: "[" * 100_000, "not valid JSON"),
    ],
)
def test_damaged_files(run: Run, tmp_path: Path, content: Callable[[], str], message: str) -> None:
    (tmp_path / "run.json").write_text(content())
    outcome = run(f"report {tmp_path}/run.json -o {tmp_path}/page.html")
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "page.html").exists()


def test_a_truncated_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run.json.gz").write_bytes(gzip.compress(_changed().encode())[:-20])
    outcome = run(f"report {tmp_path}/run.json.gz")
    assert outcome.code == 2
    assert "truncated" in outcome.err


def test_no_such_file(run: Run, tmp_path: Path) -> None:
    outcome = run(f"report {tmp_path}/nothing.json")
    assert outcome.code == 2
    assert "cannot be read: No such file" in outcome.err


def _other_mlp() -> RunData:
    file = run_data("bench")
    for case in file["linears"]["cases"]:
        case["outputs"] = 14336 if case["op"] == "MLP Up" else case["outputs"]
    return file


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda: run_data("step"), "are for different models: "),
        (lambda: run_data("bench of bare GEMMs"), "a.json is for a model, b.json for bare GEMMs"),
        (_other_mlp, "MLP Up of 4096x16384 and 4096x14336"),
    ],
)
def test_runs_that_do_not_belong_together(run: Run, tmp_path: Path, second: Callable[[], RunData], message: str) -> None:
    paths = [put(tmp_path, "a.json", "bench"), put(tmp_path, "b.json", second())]
    outcome = run(f"report {paths[0]} {paths[1]} -o {tmp_path}/page.html")
    assert outcome.code == 2
    assert message in " ".join(outcome.err.split())
    assert "run gemmscope report for each of them" in outcome.err


@pytest.mark.parametrize("kind", ["forecast", "plan"])
def test_forecasts_and_plans_of_two_models_are_refused_alike(tmp_path: Path, kind: str) -> None:
    """Whatever stands beside a forecast: two models do not belong on one page."""
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    gs.load("llama-3.2-1b").on(1, 2048).forecast("h200").save(one)
    model = gs.load("qwen3-0.6b")
    (model.on(1, 2048).forecast("h200") if kind == "forecast" else model.plan("h200", 1, global_batch=1)).save(other)
    with pytest.raises(UserError, match="are for different models"):
        report([one, other])


def test_other_batches_are_named(tmp_path: Path) -> None:
    second = run_data("bench again")
    second["run"]["micro_batch_size"] = 8
    _, [message] = report([put(tmp_path, "a.json", "bench"), put(tmp_path, "b.json", second)])
    assert message.code == "runs-differ"
    assert "a.json: micro-batch 31; b.json: micro-batch 8" in message.text


def test_a_trace_does_not_name_its_model(run: Run, tmp_path: Path) -> None:
    """Beside a run of a model, one warning; beside another trace or bare GEMMs there is nothing to mistake."""
    trace, forecast = put(tmp_path, "trace.json", "explain"), put(tmp_path, "forecast.json", "forecast")
    assert run(f"report {forecast} {trace} -o {tmp_path}/page.html").code == 0
    said = "Nothing on this page shows that trace.json and forecast.json belong together: a trace does not name its model."
    assert (tmp_path / "page.html").read_text().count(said) == 1
    _, [message] = report([forecast, trace])
    assert (message.level, message.text) == ("warning", said)
    for other in (put(tmp_path, "other.json", "explain syncs"), put(tmp_path, "bare.json", "bench of bare GEMMs")):
        assert report([other, trace])[1] == []
    assert report([forecast])[1] == []


def test_too_many_runs(tmp_path: Path) -> None:
    paths = [put(tmp_path, f"{index}.json", "bench with a fallback") for index in range(9)]
    with pytest.raises(UserError, match="9 runs are too many"):
        report(paths)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-o /no/such/folder/page.html", "there is no folder /no/such/folder"),
        ("--markdown /no/such/folder/page.md", "there is no folder"),
        ("--figures {}/run.json", "is a file, not a folder"),
        ("--figures /proc/no/figures", "cannot be written"),
        ("-o {}/run.json", "would overwrite an input file"),
        ("-o {0}/x --markdown {0}/x", "two outputs go to the same place"),
    ],
)
def test_outputs_that_cannot_be_written(run: Run, tmp_path: Path, options: str, message: str) -> None:
    path = put(tmp_path, "run.json", "bench with a fallback")
    outcome = run(f"report {path} {options.format(tmp_path)}")
    assert outcome.code == 2
    assert message in " ".join(outcome.err.split())


def test_the_library_is_what_it_says() -> None:
    """Apache ECharts 6.1.0 as published, with its license."""
    text = asset("echarts.min.js")
    assert hashlib.sha256(text.encode()).hexdigest() == "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"
    assert "</script" not in text.lower()
    assert "Apache License" in asset("echarts.LICENSE")


STRANGE = st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=8), st.just([]), st.just({}), st.booleans())


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to values in a file. Only the first items of long lists are included."""
    children = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    return [path, *(place for key, child in children for place in _places(child, (*path, key)))]


@pytest.mark.parametrize("name", ["bench with a fallback", "step", "forecast", "explain", "compare"])
def test_any_value_gives_a_message_or_a_page(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With any value at any place, a file is rejected with a message or becomes a page."""
    original = json.dumps(run_data(name))
    places = [place for place in _places(json.loads(original)) if place]
    folder = tmp_path_factory.mktemp("strange")

    @settings(max_examples=60, deadline=None)
    @given(st.sampled_from(places), STRANGE)
    def check(place: tuple[Any, ...], strange: Any) -> None:
        file = json.loads(original)
        parent = file
        for key in place[:-1]:
            parent = parent[key]
        parent[place[-1]] = strange
        try:
            documents, messages = report([put(folder, "run.json", file)])
        except UserError:
            return
        page(documents, messages)
        markdown(documents, messages)

    check()
