"""Reading a model file: files, pipes and standard input up to a limit, and clear messages for anything else."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gemmscope.errors import UserError
from gemmscope.model import readers
from gemmscope.model.readers import read_config, read_text
from support.refusals import unnamed

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}
PRINTED = "".join(
    f"  {name} {'.' * 20} {value}\n" for name, value in (("num_layers", 4), ("hidden_size", 64), ("num_attention_heads", 4))
)
ITERATION = " [2024-05-01 10:00:00] iteration 100/ 5000 | consumed samples: 1000 | lm loss: 1.234E+00 |\n"
YAML = "model:\n  num_layers: 4\n  hidden_size: 64\n  num_attention_heads: 4\n"
FLAGS = "--num-layers 4 --hidden-size 64 --num-attention-heads 4\n"

posix = pytest.mark.skipif(os.name != "posix", reason="named pipes and devices as POSIX has them")


def hidden_size(reference: str) -> int:
    model = read_config(reference).model
    assert model is not None
    return model.hidden_size


def refused(reference: str) -> str:
    with pytest.raises(UserError) as caught:
        read_config(reference)
    return str(caught.value)


def too_large(path: Path) -> bool:
    """Whether the file is refused for its size, with the limits of the formats."""
    return unnamed(refused(str(path)), path, f"{readers.LARGEST_FILE // 2**20} MiB", "1 MiB") == []


def standard_input(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


# ---- what can be named


def test_file_and_folder(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert hidden_size(str(path)) == hidden_size(str(tmp_path)) == 64
    path.unlink()
    assert unnamed(refused(str(tmp_path)), repr(str(tmp_path)), "config.json", "config='PATH'") == []


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_standard_input(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    standard_input(monkeypatch, json.dumps(CONFIG).encode())
    assert hidden_size(name) == 64
    standard_input(monkeypatch, b"")
    assert refused(name).startswith("standard input is empty")
    monkeypatch.setattr(sys, "stdin", None)
    assert refused(name).startswith("standard input cannot be read: it is closed")


@posix
def test_named_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(json.dumps(CONFIG)))
    writer.start()
    assert hidden_size(str(pipe)) == 64
    writer.join()


@posix
@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="no /dev/fd here")
def test_open_file_of_this_process() -> None:
    """What `--config <(cat config.json)` names."""
    inlet, outlet = os.pipe()
    os.write(outlet, json.dumps(CONFIG).encode())
    os.close(outlet)
    try:
        assert hidden_size(f"/dev/fd/{inlet}") == 64
    finally:
        os.close(inlet)


@posix
def test_substituted_process() -> None:
    script = "import sys; from gemmscope.model.readers import read_config; print(read_config(sys.argv[1]).model.hidden_size)"
    bash = ["bash", "-c", '"$0" -c "$1" <(printf %s "$2")', sys.executable, script, FLAGS]
    try:
        outcome = subprocess.run(bash, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        pytest.skip("no bash here")
    assert outcome.stdout.strip() == "64"


# ---- what cannot


@posix
def test_devices_and_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused("/dev/null").startswith("/dev/null is empty")
    assert unnamed(refused("/dev/zero"), "/dev/zero", "device") == []
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(tmp_path)  # a socket's path must be short
        listening.bind("s")
        assert unnamed(refused("s"), "s", os.strerror(errno.ENXIO)) == []


@posix
def test_endless_streams_are_read_to_a_limit(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def pour() -> None:
        try:
            with pipe.open("wb") as stream:
                while True:
                    stream.write(b" " * 2**20)
        except BrokenPipeError:
            pass

    writer = threading.Thread(target=pour)
    writer.start()
    assert too_large(pipe)
    writer.join()


def test_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config"
    for text in (YAML + "# filler\n" * 2**17, FLAGS + "--x 1 " * 2**18, "[model]\nflavor = '8B'\n" + "# filler\n" * 2**17):
        path.write_text(text)
        assert too_large(path)
    monkeypatch.setattr(readers, "START_OF_LOG", 1000)
    monkeypatch.setattr(readers, "LARGEST_FILE", 2000)
    path.write_text(json.dumps({**CONFIG, "filler": "x" * 1200}))  # JSON may be larger
    assert hidden_size(str(path)) == 64
    path.write_text(json.dumps({**CONFIG, "filler": "x" * 2200}))
    assert too_large(path)
    path.write_text(FLAGS + "x" * 1000)  # the flags would be complete, but what follows is not known
    assert too_large(path)


def test_long_training_log(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("starting …\n" + PRINTED + ITERATION * (42 * 10**6 // len(ITERATION)))
    assert path.stat().st_size > readers.LARGEST_FILE
    assert hidden_size(str(path)) == 64
    path.write_text(PRINTED + ITERATION * (2 * 2**20 // len(ITERATION)))  # beyond other texts, within the start
    assert hidden_size(str(path)) == 64


def test_a_log_is_cut_between_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.log"
    path.write_text(PRINTED + "  seq_length ........ 4096\n" + ITERATION * 10)
    for start in range(len(PRINTED), len(PRINTED) + 30):
        monkeypatch.setattr(readers, "START_OF_LOG", start)
        assert read_config(str(path)).run_settings.get("sequence_length") in (None, 4096)
    path.write_text(PRINTED + "é" * 100)  # not in the middle of a character
    for start in range(len(PRINTED) + 1, len(PRINTED) + 5):
        monkeypatch.setattr(readers, "START_OF_LOG", start)
        assert hidden_size(str(path)) == 64


def test_not_a_text(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\x80\x02" * 100)
    assert unnamed(refused(str(path)), path, "byte 0", "UTF-8") == []


@pytest.mark.parametrize(
    "text",
    [
        FLAGS.replace("64", "x"),
        YAML.replace("64", "x"),
        "[model]\nname = 'llama3'\nflavor = '9B'\n",
        json.dumps({**CONFIG, "hidden_size": "x"}),
        json.dumps({**CONFIG, "num_attention_heads": 0}),
    ],
)
def test_every_message_names_the_file_once(text: str) -> None:
    with pytest.raises(UserError) as caught:
        read_text(text, "some-file")
    assert caught.value.message.count("some-file") == 1


def test_a_hub_id_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub ID is resolved by transformers, from its cache where there is no way to the hub."""
    pytest.importorskip("transformers", reason="resolving a hub ID needs transformers")
    model = tmp_path / "hub" / "models--acme--tiny"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    (model / "snapshots" / "abc").mkdir(parents=True)
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}
    (model / "snapshots" / "abc" / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source = read_config("acme/tiny")
    assert source.model is not None
    assert source.model.hidden_size == 64
    assert unnamed(refused("acme/absent"), "'acme/absent'", "hub ID", "config='PATH'") == []
