"""What people are told when Ray cannot be used: one message each, and never a traceback of Ray's."""

from __future__ import annotations

import importlib.util
import platform
import socket
import subprocess
import sys
import threading
from ast import literal_eval
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gemmscope.errors import UserError, in_shell
from gemmscope.pool import ray as ray_module
from gemmscope.pool.gpus import open_pool
from gemmscope.pool.ray import RayPool
from gemmscope.pool.ray_messages import last_useful_line, ray_address, why_no_connection

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install gemmscope[ray]")


@pytest.mark.parametrize(
    "text", ["", "head", "http://head:8265", "ray://", "head:0", "head:99999", "ray://head", "a b:6379", "x" * 999]
)
def test_what_is_not_an_address(text: str) -> None:
    with pytest.raises(UserError, match="must be the address of a Ray cluster") as error:
        open_pool(ray=text)
    assert "ray://HOST:10001" in error.value.hint


def test_addresses() -> None:
    for text in ("auto", "local", "10.0.0.1:6379", "ray://head.cluster.example:10001", "[::1]:6379"):
        assert ray_address(f" {text} ") == text


def test_gpus_of_this_machine_and_of_a_cluster() -> None:
    with pytest.raises(UserError, match="names GPUs of this machine"):
        open_pool(gpus="0,1", ray="auto")


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmscope.pool.ray_messages.find_spec", lambda _: None)
    with pytest.raises(UserError, match="needs Ray, which is not installed") as error, RayPool("auto"):
        pass
    assert error.value.hint == 'pip install "gemmscope[ray]"'


@contextmanager
def listening(answer: bytes | None) -> Iterator[int]:
    """A port at which something accepts connections, and answers with this, or not at all."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            try:
                connection, _ = server.accept()
                with connection:
                    if answer is not None:
                        connection.sendall(answer)
                    connection.recv(1 << 10)
                    over.wait(120 if answer is None else 0)
            except OSError:
                return

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        over.set()


@needs_ray
def test_addresses_that_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bridge asks before it imports Ray, which would try for a minute."""
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")  # of name servers that do not answer
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    cases = {f"127.0.0.1:{closed}": "connection refused", "ray://no-such-host.invalid:10001": "not known|resolution|No address"}
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as dashboard, listening(None) as silent:
        cases |= {f"127.0.0.1:{dashboard}": "something else listens", f"ray://127.0.0.1:{silent}": "no answer in time"}
        for address, why in cases.items():
            monkeypatch.setattr(ray_module, "ANSWER_S", 3.0 if why == "no answer in time" else 120.0)
            with pytest.raises(UserError, match=f"no Ray cluster answers there .*({why})") as error, RayPool(address, cpu=True):
                pass
            assert in_shell(error.value.message).startswith(f"--ray {address}: ")
            assert "ray://HOST:10001" in error.value.hint


@needs_ray
def test_a_cluster_that_was_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray remembers its address, and would try it for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
    with pytest.raises(UserError, match=r"on this machine \(connection refused\)"), RayPool("auto", cpu=True):
        pass


@needs_ray
def test_a_cluster_of_another_version() -> None:
    """With the words of the Ray that is installed."""
    here = platform.python_version()
    script = (
        "from ray._private.utils import check_version_info\n"
        f"for python in ('{here}', '3.7.1'):\n"
        "    there = dict(ray_version='1.2.3', python_version=python)\n"
        "    try: check_version_info(there, 'here', python_version_match_level='minor')\n"
        "    except RuntimeError as error: print(ascii(str(error)))"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    for text, python, hint in zip(said, (here, "3.7.1"), ('pip install "ray==1.2.3"', "Python 3.7 and Ray 1.2.3"), strict=True):
        why, what_to_do = why_no_connection("auto", RuntimeError(literal_eval(text)))
        assert f"that cluster runs Ray 1.2.3 with Python {python}; this machine has Ray " in why
        assert hint in what_to_do


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ImportError("libstdc++ is too old"), "Ray cannot be imported here (ImportError: libstdc++ is too old)"),
        (ValueError("Ray Client requires pip package `ray[client]`. If you"), "needs Ray's client, which is not installed"),
        (ConnectionError("Could not find any running Ray instance. Please specify"), "no Ray cluster answers on this machine"),
        (RuntimeError("a bug\nof Ray"), "(RuntimeError: a bug)"),
        (OSError(28, "No space left on device"), "(No space left on device)"),
    ],
)
def test_other_reasons(error: Exception, why: str) -> None:
    assert why in why_no_connection("auto", error)[0]


def test_the_last_useful_line_of_a_log() -> None:
    log = (
        "2026-11-16 14:00:00,123\tINFO worker.py:1821 -- Connecting to existing Ray cluster at address: 10.0.0.1:6379...\n"
        "[2026-11-16 14:00:01,456 C 12 34] gcs_client.h:179: \x1b[31mFailed to connect to GCS at address 10.0.0.1:6379\x1b[0m\n"
        "*** StackTrace Information ***\n/x/_raylet.so(+0x14) [0x7f] ray::operator<<()\n    @     0x55d5 main\n\n"
    )
    assert last_useful_line(log) == "Failed to connect to GCS at address 10.0.0.1:6379"
    assert last_useful_line(log.splitlines()[0]).startswith("Connecting to existing Ray cluster")
    assert last_useful_line("\n\n") == ""
    sentences = "GCS is gone. " + "It was killed, or it was not. " * 9
    assert (
        last_useful_line(sentences)
        == "GCS is gone. It was killed, or it was not. It was killed, or it was not. It was killed, or it was not"
    )
