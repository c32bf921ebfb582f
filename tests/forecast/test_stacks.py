"""The software that runs a step: factors on its parts, and which one is assumed."""

from __future__ import annotations

import pytest

from gemmscope.errors import UserError
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.stacks import stack, stacks
from gemmscope.forecast.step import StepForecast
from gemmscope.forecast.step_estimate import StepEstimate
from gemmscope.forecast.step_findings import software_finding
from gemmscope.gpu.specs import gpu
from gemmscope.model import presets
from gemmscope.model.spec import RunSpec
from gemmscope.parts import STEP_PARTS
from gemmscope.workload.derive import derive

RUN = RunSpec(1, 8192, tp=2, sequence_parallel=True, dp=8)


def forecast(name: str | None, chip: str = "h100") -> StepForecast:
    model = presets.load("llama-3.1-8b").model
    assert model is not None
    return StepForecast(Forecaster(gpu(chip), "sustained", software=stack(name)), model, RUN, derive(model, RUN))


def step(name: str | None, chip: str = "h100") -> StepEstimate:
    return forecast(name, chip).step("BF16")


def test_every_stack_names_parts_and_attention_that_exist() -> None:
    for known in stacks().values():
        assert set(known.parts) <= set(STEP_PARTS)
        for chip in ("a100", "h100", "b300", "rtx-5090"):
            assert step(known.name, chip).time_ms > 0


def test_the_software_of_a_file_is_assumed_unless_another_one_is_named() -> None:
    assert (stack(None).name, stack(None, "torchtitan").name, stack(None, "unknown").name) == ("nvidia", "torchtitan", "nvidia")
    assert stack("jax", "torchtitan").name == "jax"
    with pytest.raises(UserError, match="torchtitan"):
        stack("torchtitn")


def test_factors_apply_to_their_parts_and_widen_the_bar() -> None:
    usual, eager = step("nvidia"), step("pytorch")
    known, whole = stacks()["pytorch"], stacks()["pytorch"].slower(RUN.gpus)
    for part in ("GEMMs", "norms and activations", "head and loss"):
        assert eager.parts[part].value == pytest.approx(usual.parts[part].value * known.parts.get(part, 1.0) * whole)
    assert eager.parts["attention"].value > 2 * usual.parts["attention"].value
    assert eager.parts["exposed communication"].value < usual.parts["exposed communication"].value
    assert eager.interval.half_width > usual.interval.half_width


def test_the_software_that_changes_most_is_named() -> None:
    told = software_finding(forecast(None)).facts
    times = {name: step(name).time_ms for name in stacks()}
    furthest = max(times, key=lambda name: abs(times[name] / times["nvidia"] - 1))
    assert (told["name"], told["title"]) == (furthest, stacks()["nvidia"].title)
    assert told["changed"] == pytest.approx(times[furthest] / times["nvidia"] - 1)
