"""Questions that people asked in public, one command each: no answer is contradicted outside its error bar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemmscope.toml import parse_toml
from support.command import Run, run

__all__ = ["run"]  # the fixture
QUESTIONS = parse_toml((Path(__file__).parents[1] / "data" / "questions.toml").read_text("utf-8"))["question"]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question["url"].removeprefix("github.com/"))
def test_a_question_that_someone_asked(question: dict[str, Any], run: Run) -> None:
    outcome = run(f"forecast {question['command']} --json -")
    if "message" in question:
        assert outcome.code == 2
        assert question["message"] in outcome.err.replace("\n  ", " ")
        return
    assert outcome.code == 0, outcome.err
    for gpu in json.loads(outcome.out)["gpus"]:
        linears = {(one["op"], one["mode"]): one["speedup"] for one in gpu["linears"]["speedups"]}
        assert all(linears[op, "autocast"]["high"] < 1 for op in question.get("slower_linears", ()))
        assert all(linears[op, "autocast"]["low"] > 1 for op in question.get("faster_linears", ()))
        if gpu["step"] is None:
            continue
        recipes = {time["recipe"]: time for time in gpu["step"]["recipes"]}
        assert len(recipes) > 1
        for name, true in question.get("speedup", {}).items():
            assert recipes[name]["speedup"]["low"] <= true <= recipes[name]["speedup"]["high"], name
        assert all(recipes[name]["speedup"]["high"] < 1 for name in question.get("slower", ()))
        over = {f"{one['recipe']} over {one['over']}": one["speedup"] for one in gpu["step"]["speedups"]}
        assert all(over[pair]["low"] <= most for pair, most in question.get("at_most", {}).items())
        memory = {one["recipe"]: one["total_bytes"] for one in gpu["memory"]}
        assert all(memory[name] > memory["BF16"] for name in question.get("more_memory", ()))
        assert all(memory[name] <= memory["BF16"] for name in question.get("no_more_memory", ()))
        for name, true in question.get("tokens_per_s", {}).items():
            time = recipes[name]
            at = time["tokens_per_s"] * time["step_ms"]["value"]
            assert at / time["step_ms"]["high"] <= true <= at / time["step_ms"]["low"], name
