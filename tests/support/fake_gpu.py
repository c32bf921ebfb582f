"""A machine that has a GPU and the packages, for tests of commands that measure: campaigns take recorded kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemmscope.bench.campaign import LinearCampaign
from gemmscope.bench.measurements import Measurements
from gemmscope.gpu.environment import Environment
from support.bench_results import record
from support.machines import machine

SIZES = "--hidden-size 32 --intermediate-size 64 --num-attention-heads 2 --num-hidden-layers 2"
SMALL = f"{SIZES} --micro-batch-size 1 --sequence-length 32"
ON_CPU = f"{SMALL} --device cpu"
REFERENCE = (
    "--hidden_size 4096 --intermediate_size 16384 --num_attention_heads 32 --num_hidden_layers 24 "
    "--micro_batch_size 31 --sequence_length 512"
)


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


Pretend = Callable[..., list[LinearCampaign]]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Simulate a machine with that GPU and those packages. Campaigns get recorded kernels and are returned in a list."""
    real = importlib.util.find_spec

    def prepare(facts: Environment | None = None, packages: str = "torch transformer_engine", **how: Any) -> list[LinearCampaign]:
        known = {"torch", "transformer_engine", "torchao"}
        monkeypatch.setattr("gemmscope.commands.bench.environment", lambda: facts or machine())
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name: (name in packages.split() or None) if name in known else real(name)
        )
        ran: list[LinearCampaign] = []

        def campaign_run(self: LinearCampaign) -> Measurements:
            ran.append(self)
            record(self.results, **how)
            return self.results

        monkeypatch.setattr(LinearCampaign, "run", campaign_run)
        monkeypatch.setattr("gemmscope.commands.bench.LocalWorkers.start_early", lambda *_: None)
        return ran

    return prepare
