"""A config never reaches the network, however it asks for it, and never all memory."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemmscope.errors import UserError
from gemmscope.workload.confine import NetworkError, offline
from gemmscope.workload.trace import trace_huggingface
from support.refusals import refused

RECORDS = """
import os, sys
def record(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.connect"):
        with open(os.environ["NETWORK_USES"], "a") as notes:
            notes.write(f"{event} {arguments!r}\\n")
sys.addaudithook(record)
"""
BACKBONES = {
    "detr": "microsoft/resnet-50",
    "upernet": "facebook/convnext-tiny-224",
    "maskformer": "microsoft/swin-tiny-patch4-window7-224",
    "dpt": "facebook/dinov2-small",
    "depth_anything": "facebook/dinov2-small",
}
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 20, "state_size": 4}
FROM_HUB = {
    **{kind: {"model_type": kind, "backbone": name, "use_timm_backbone": False} for kind, name in BACKBONES.items()},
    "timm": {"model_type": "detr", "backbone": "resnet50", "use_timm_backbone": True, "use_pretrained_backbone": True},
}
TRACED = {
    "mamba": {
        "model_type": "mamba",
        "auto_map": {"AutoConfig": "acme/x--c.X"},
        "_name_or_path": "acme/x",
        "state_size": 4,
        **TINY,
    },
    "kernel": {"model_type": "mamba", "_attn_implementation": "kernels-community/flash-attn", **TINY},
}


@pytest.fixture
def uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which every use of the network by a worker is noted, whether it succeeds or not."""
    pytest.importorskip("transformers", reason="builds models of transformers")
    (tmp_path / "sitecustomize.py").write_text(RECORDS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("NETWORK_USES", str(tmp_path / "uses"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "uses"


def test_the_record_works(uses: Path) -> None:
    subprocess.run([sys.executable, "-c", "import socket; socket.getaddrinfo('localhost', 80)"], check=False)
    assert "localhost" in uses.read_text()


def test_what_a_config_names_on_the_hub_is_not_looked_up(uses: Path) -> None:
    with refused("config", "hub") as error:
        trace_huggingface(FROM_HUB["detr"], 1, 32)
    assert "\n" not in error.value.message
    assert not uses.exists()


ONE_BY_ONE = """
import json, sys
from gemmscope.workload import trace_worker
for config in json.loads(sys.argv[1]):
    try:
        trace_worker.answer({"config": config, "micro_batch": 1, "sequence": 32})
    except trace_worker.TraceError as error:
        print(json.dumps(str(error)))
    else:
        print(json.dumps(""))
"""


def test_whatever_a_config_names_on_the_hub_is_not_looked_up(uses: Path) -> None:
    """What the worker answers to each of them, all in one process: importing transformers takes longer than the rest."""
    arguments = [sys.executable, "-W", "ignore", "-c", ONE_BY_ONE, json.dumps(list(FROM_HUB.values()))]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    answers = dict(zip(FROM_HUB, map(json.loads, ended.stdout.splitlines()), strict=True))
    assert {name for name, answer in answers.items() if not re.search(r"refers to a file of the hub|timm", answer)} == set()
    assert not uses.exists()


@pytest.mark.parametrize("name", TRACED)
def test_a_config_that_needs_nothing_is_traced(uses: Path, name: str) -> None:
    assert trace_huggingface(TRACED[name], 1, 32).gemms
    assert not uses.exists()


@pytest.mark.parametrize(
    "use",
    [
        lambda: socket.getaddrinfo("localhost", 80),
        lambda: socket.create_connection(("127.0.0.1", 9)),
        lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"", ("127.0.0.1", 9)),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_whatever_uses_the_network_fails(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with offline(), pytest.raises(NetworkError):
        use()
    socket.getaddrinfo("127.0.0.1", 80)  # and works again afterwards


def test_enormous_configs_are_one_message(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="builds models of transformers")
    config = {"model_type": "mamba", "num_labels": 10**10, **TINY}
    with pytest.raises(UserError, match="num_labels"):
        trace_huggingface(json.loads(json.dumps(config)), 1, 32)
