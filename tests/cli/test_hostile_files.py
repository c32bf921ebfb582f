"""Files that would take all memory or all time: the command ends with one message or a value, within 1 GiB.

The time limit is generous, and ends the command: what is quadratic takes minutes or more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.refusals import unnamed

GIB = 2**30
LONGEST_S = 300
RUN = ["--micro-batch-size", "1", "--sequence-length", "64"]
MOE: dict[str, Any] = {
    "model_type": "qwen2_moe", "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 8,
    "shared_expert_intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 10_000,
    "vocab_size": 100, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
}  # fmt: skip
YAML = "model:\n  num_layers: 4\n  hidden_size: 64\n  num_attention_heads: 4\n"
TOML = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 64\n'
FLAGS = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 "

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of processes as Linux has them")


SERVER = f"""
import json, os, resource, signal, sys
import gemmscope.__main__, gemmscope.commands.forecast, gemmscope.commands.shapes, gemmscope.cli.build, gemmscope.cli.output
import gemmscope.document, gemmscope.forecast.gemm
import gemmscope.writers.tables, gemmscope.writers.markdown, gemmscope.writers.terminal
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, path in enumerate((os.devnull, os.devnull, request["messages"])):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
        os.environ |= request["environment"]
        resource.setrlimit(resource.RLIMIT_AS, ({GIB}, {GIB}))
        signal.alarm({LONGEST_S})
        sys.argv = ["gemmscope", *request["arguments"]]
        try:
            gemmscope.__main__.run()
        except SystemExit as ending:
            code = ending.code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """A process that forks for every command, because importing takes longer than most commands."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process


@pytest.fixture
def run(server: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Exit code and messages of a command in 1 GiB."""

    def call(*arguments: str) -> tuple[int, str]:
        assert server.stdin is not None
        assert server.stdout is not None
        messages = tmp_path / "messages"
        messages.unlink(missing_ok=True)
        home = {"XDG_CONFIG_HOME": os.environ["XDG_CONFIG_HOME"]}
        server.stdin.write(json.dumps({"arguments": arguments, "messages": str(messages), "environment": home}) + "\n")
        server.stdin.flush()
        code, message = int(server.stdout.readline()), messages.read_text()
        assert "Traceback" not in message, message
        return code, message

    return call


def laughs(values: str) -> str:
    """Nested lists that would be enormous if they were expanded."""
    return f"a0: &a0 {values}\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))


CONFIGS: dict[str, tuple[Callable[[], str], str]] = {
    "long list": (lambda: json.dumps({**MOE, "mlp_only_layers": list(range(3_000_000))}), ""),
    "long list to be traced": (
        lambda: json.dumps({**MOE, "layer_types": ["x"] * 2_000_000}),
        "'layer_types' has 2000000 entries",
    ),
    "many keys": (
        lambda: json.dumps({"model_type": "llama"} | {f"hidden_siz{n}": 1 for n in range(1_000_000)}),
        "has no hidden_size",
    ),
    "long name": (lambda: json.dumps({"model_type": "llama" * 6_000_000}), "too large to be traced"),
    "deep": (lambda: '{"model_type": "llama", "x": ' + "[" * 200_000, "nested too deeply"),
    "rather deep": (lambda: '{"model_type": "frob", "x": ' + "[" * 900 + "]" * 900 + "}", "nested more than 100 deep"),
    "many lists": (lambda: '{"model_type": "llama", "x": [' + "[]," * 9_000_000 + "1]}", "lists and objects"),
    "many layers": (lambda: json.dumps({"model_type": "frob", "num_hidden_layers": 10**9}), "must be at most 10000"),
    "aliases": (lambda: laughs("[x]") + YAML.replace("64", "*a29"), "must be a single value, not a list"),
    "aliases in a pattern": (lambda: laughs("[1]") + YAML + "  num_moe_experts: 4\n  moe_layer_freq: *a29\n", "not a list of 9"),
    "many values": (lambda: YAML + "x: [" + "[]," * 300_000 + "]", "more than 50000 keys and values"),
    "sexagesimal number": (lambda: YAML.replace("64", "1" + ":59" * 300_000), "a number with too many digits"),
    "dotted keys": (lambda: TOML + "".join(f"b{n}" + ".a" * 900 + " = 1\n" for n in range(500)), "too many dots"),
    "pipeline layout": (
        lambda: f"{FLAGS} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout '{'(t*9999|)*9999' * 100}'",
        "0 parts with 0 layers",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_enormous_configs(run: Run, tmp_path: Path, name: str) -> None:
    make, says = CONFIGS[name]
    (tmp_path / "config").write_text(make())
    code, message = run("shapes", "--config", str(tmp_path / "config"), *RUN)
    assert (code, message) == (0, "") if not says else code == 2 and says in message


GEMMS = "m,k,n,format\n"
LISTS: dict[str, tuple[Callable[[], str], str]] = {
    "rows": (lambda: GEMMS + "64,64,64,bf16\n" * 2_000_000, "more than 1000000 cells"),
    "columns": (lambda: GEMMS.strip() + ",c" * 3_000_000, "columns, more than 1000"),
    "formats": (lambda: GEMMS + "".join(f"64,64,64,x{n}\n" for n in range(100_000)), "more than 100 formats"),
    "one line": (lambda: GEMMS + "1" * 30_000_000, "field larger than field limit"),
    "size": (lambda: GEMMS + "\n" * 40_000_000, "is too large"),
}


@pytest.mark.parametrize("name", LISTS)
def test_enormous_lists_of_gemms(run: Run, tmp_path: Path, name: str) -> None:
    make, says = LISTS[name]
    (tmp_path / "gemms.csv").write_text(make())
    code, message = run("forecast", "--gpu", "h200", "--gemms", str(tmp_path / "gemms.csv"))
    assert code == 2
    assert says in message


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/tty", "/proc/kmsg", "/proc/self/mem"])
@pytest.mark.parametrize("command", ["shapes --config", "forecast --gpu h200 --gemms"])
def test_devices(run: Run, command: str, name: str) -> None:
    code, message = run(*command.split(), name)
    assert code == 2
    assert name in message


def test_a_file_of_many_gigabytes(run: Run, tmp_path: Path) -> None:
    for start in ("{", "x"):
        (tmp_path / "config").write_text(start)
        os.truncate(tmp_path / "config", 40 * GIB)  # it takes no space
        code, message = run("shapes", "--config", str(tmp_path / "config"), *RUN)
        assert code == 2
        assert unnamed(message, tmp_path / "config", "MiB") == []


def test_a_calibration_that_is_no_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    place = tmp_path / "gemmscope" / "calibration" / "h200.json"
    place.parent.mkdir(parents=True)
    place.symlink_to("/dev/zero")
    code, message = run("forecast", "--gpu", "h200", "--shapes", "64")
    assert code == 2
    assert unnamed(message, place, "device") == []
    place.unlink()
    place.write_text("{" * 2**21)
    assert unnamed(run("forecast", "--gpu", "h200", "--shapes", "64")[1], place) == []


def test_names_that_are_no_text(run: Run, tmp_path: Path) -> None:
    """A file name may contain invalid UTF-8 and control characters."""
    name = os.fsdecode(bytes(tmp_path) + b"/caf\xe9\x1b[31m.json")
    Path(name).write_text(json.dumps({**MOE, "num_hidden_layers": 2}))
    for output in ("--json", "--csv", "--markdown"):
        assert run("shapes", "--config", name, *RUN, output, "-") == (0, "")
    code, message = run("shapes", "--config", name[:-5], *RUN)
    assert code == 2
    assert "\\udce9\\x1b[31m" in message


def test_an_empty_name(run: Run) -> None:
    assert unnamed(run("shapes", "--config", "", *RUN)[1], "--config", "empty") == []
    assert unnamed(run("forecast", "--gpu", "h200", "--gemms", "")[1], "--gemms", "empty") == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--shapes " + ",".join(map(str, range(1, 20_000))), "names 19999 shapes, more than 1000"),
        ("--shapes 64 --recipes " + "x" * 100_000, "unknown recipe 'xxx"),
        ("--preset " + "x" * 100_000, "unknown preset 'xxx"),
        (
            "--preset gpt2 --micro-batch-size 1 --sequence-length 64 --pp 2 --pp-layers " + "1," * 50_000 + "1",
            "not a tuple of 50001",
        ),
    ],
)
def test_long_options(run: Run, arguments: str, says: str) -> None:
    code, message = run("forecast", "--gpu", "h200", *arguments.split())
    assert code == 2
    assert says in message
    assert len(message) < 2000


def test_thousands_of_pipeline_stages_and_points(run: Run) -> None:
    sizes = "--hidden-size 64 --intermediate-size 128 --num-attention-heads 8 --num-hidden-layers 10000".split()
    assert run("shapes", *sizes, *RUN, "--pp", "10000") == (0, "")
    small = "--hidden-size 64 --intermediate-size 128 --num-attention-heads 8 --num-hidden-layers 4".split()
    code, message = run("forecast", "--gpu", "h200", *small, *RUN, "--sweep", "tp=1:20000:1")
    assert code == 0, message
