"""Commands on traced models whose sizes are unusual."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmscope.errors import UserError
from gemmscope.job.rank_workload import linear_cases
from gemmscope.workload.ops import Gemm
from gemmscope.workload.trace import ModuleTrace, as_workload
from support.command import Run, run  # noqa: F401 (a fixture)

COMMAND = "forecast --gpu h200 --micro-batch-size 1 --sequence-length 8 --config"


def traced(monkeypatch: pytest.MonkeyPatch, folder: Path, *gemms: Gemm) -> str:
    """A config whose tracing gives these GEMMs."""
    trace = ModuleTrace("Odd", 1, gemms, (), (), {})
    monkeypatch.setattr("gemmscope.job.rank_workload.trace_huggingface", lambda *_, **__: trace)
    (folder / "config.json").write_text('{"model_type": "unheard-of"}')
    return f"{COMMAND} {folder}"


def test_linears_that_fit_no_low_precision(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    line = traced(monkeypatch, tmp_path, Gemm("up", "fprop", 7, 7, 7), Gemm("up", "dgrad", 7, 7, 7), Gemm("up", "wgrad", 7, 7, 7))
    outcome = run(line)
    assert outcome.code == 0
    assert "Only BF16 was forecast on H200 SXM 141 GB." in outcome.out
    assert "--hugging-face" in outcome.out.rpartition("next: ")[2]
    assert "warning: No recipe except BF16 can run: the model has no linears to quantize" in outcome.out


def test_more_weights_than_any_model_has_experts(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    outcome = run(traced(monkeypatch, tmp_path, Gemm("up", "fprop", 2**40, 64, 64, groups=10**9)))
    assert outcome.code == 2
    assert "the number of weights of 'up' must be at most 65536, not 1000000000" in outcome.err


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        ('{"model_type": "gemma9"}', 'if it is built like gemma, set "model_type": "gemma"; '),
        (
            '{"model_type": "gemma9", "text_config": {}}',
            'language part is built like gemma, set "model_type": "gemma" in text_config',
        ),
    ],
)
def test_where_to_write_a_similar_type(
    run: Run,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    hint: str,
) -> None:
    def fails(*_: object, **__: object) -> ModuleTrace:
        raise UserError("torch is needed")

    monkeypatch.setattr("gemmscope.job.rank_workload.trace_huggingface", fails)
    (tmp_path / "config.json").write_text(config)
    outcome = run(f"{COMMAND} {tmp_path}")
    assert outcome.code == 2
    assert hint in outcome.err


def test_a_note_about_linears_with_the_same_name_is_given_once() -> None:
    """Experts that run on different numbers of rows, for example: all passes of each are measured, and forecast as they run."""
    gemms = Gemm("expert", "fprop", 128, 256, 256), Gemm("expert", "fprop", 144, 256, 256)
    workload = as_workload(ModuleTrace("Odd", 1, gemms, (), (), {}))
    measured, forecast = linear_cases(workload), linear_cases(workload, as_run=True)
    assert [(entry.code, entry.facts["op"]) for entry in measured.findings] == [("all-passes-measured", "expert")]
    assert (forecast.findings, {case.passes for case in forecast.cases}) == ((), {("fprop",)})
