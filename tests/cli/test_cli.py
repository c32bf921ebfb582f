"""The command line as people type it, right and wrong."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemmscope.model import presets
from gemmscope.results.shapes import ShapesResult
from support.command import Run, run
from support.refusals import unnamed
from support.workers import forked_workers

__all__ = ["forked_workers", "run"]  # the fixtures

REFERENCE = (
    "shapes --hidden_size 4096 --intermediate_size 16384 --num_attention_heads 32 --num_hidden_layers 24 "
    "--micro_batch_size 31 --sequence_length 512"
)
BATCH = "--micro-batch-size 2 --sequence-length 64"


def test_reference_example(run: Run) -> None:
    outcome = run(REFERENCE)
    assert outcome.code == 0
    assert "15872x4096x12288" in outcome.out
    assert "460.1 TFLOP" in outcome.out
    assert len(outcome.out.splitlines()) <= 40
    detail = run(f"{REFERENCE} --detail")
    assert "Optimizer" in detail.out
    assert "Optimizer" not in outcome.out


def test_json_is_a_valid_run_file(run: Run) -> None:
    outcome = run(f"{REFERENCE} --json -")
    file = ShapesResult.model_validate_json(outcome.out)
    assert len(file.gemms) == 12
    first = json.loads(outcome.out)["gemms"][0]
    wanted = {"op": "QKV Proj", "pass": "fprop", "m": 15872, "k": 4096, "n": 12288, "groups": 1, "count": 24}
    assert {key: first[key] for key in wanted} == wanted
    assert sum(gemm.share for gemm in file.gemms) == pytest.approx(1)


def test_dashes_and_underscores_are_the_same(run: Run) -> None:
    dashed = run(REFERENCE.replace("_", "-") + " --json -")
    underscored = run(f"{REFERENCE} --json -")
    assert json.loads(dashed.out)["gemms"] == json.loads(underscored.out)["gemms"]


def test_csv_and_markdown(run: Run, tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(run(f"{REFERENCE} --csv -").out)))
    assert [row["M x K x N"] for row in rows[:2]] == ["15872x4096x12288", "15872x12288x4096"]
    outcome = run(f"{REFERENCE} --markdown {tmp_path}/t.md --csv {tmp_path}/t.csv --json {tmp_path}/t.json")
    assert "QKV Proj" in outcome.out  # the table is still printed
    table = (tmp_path / "t.md").read_text()
    assert "| QKV Proj | fprop | 15872x4096x12288 |" in table
    assert f"wrote {tmp_path}/t.json" in outcome.err


@pytest.mark.parametrize("name", presets.names())
def test_every_preset(run: Run, name: str) -> None:
    outcome = run(f"shapes --preset {name} {BATCH}")
    assert outcome.code == 0
    assert outcome.err == ""


def test_list_presets(run: Run) -> None:
    outcome = run("shapes --list-presets")
    assert len(presets.names()) >= 21
    assert all(name in outcome.out for name in presets.names())


@pytest.mark.parametrize("name", ["Llama3.1-8B", "llama_3.1_8b", "LLAMA-3.1-8B"])
def test_separators_and_case_of_a_preset_do_not_matter(run: Run, name: str) -> None:
    assert run(f"shapes {name} {BATCH} --csv -").out == run(f"shapes llama-3.1-8b {BATCH} --csv -").out != ""
    assert len({presets.named(name) for name in presets.names()}) == len(presets.names())


def test_sharded(run: Run) -> None:
    outcome = run(f"shapes --preset mixtral-8x7b {BATCH} --tp 2 --ep 4 --pp 2 --cp 2 --sequence-parallel --imbalance 1.5")
    assert outcome.code == 0
    assert "tp 2, cp 2, pp 2, ep 4, sequence parallel, stage 1" in outcome.out
    assert "\ntp 2, etp 1, sequence parallel\n" in run(f"shapes --preset mixtral-8x7b {BATCH} --tp 2 --etp 1").out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("shapes", "no model is named"),
        (f"shapes --preset lama-3.1-8b {BATCH}", "did you mean llama-3.1-8b"),
        (f"shapes --preset gpt2 --config x.json {BATCH}", "the model is named in 2 ways at once: --config and --preset"),
        (f"shapes --preset gpt2 --hidden-size 64 {BATCH}", "--preset and --hidden-size"),
        (f"shapes --hidden-size 64 {BATCH}", "--intermediate-size, --num-attention-heads, --num-hidden-layers missing"),
        (f"shapes --config nowhere.json {BATCH}", "there is no file or folder 'nowhere.json'"),
        (f"shapes --config qwen3-8bb {BATCH}", "did you mean --preset qwen3-8b?"),
        (f"shapes --module nowhere.py {BATCH}", "--module must be FILE.py:FUNCTION"),
        (f"shapes --preset gpt2 {BATCH} --tp 5", "--tp 5 does not divide num_attention_heads = 12"),
        (f"shapes --preset gpt2 {BATCH} --recompute sometimes", "--recompute must be none or selective or full, not 'sometimes'"),
        (f"shapes --preset gpt2 {BATCH} --pp 2 --pp-layers 6,x", "--pp-layers must be a list of whole numbers"),
        (f"shapes --preset gpt2 {BATCH} --imbalance nan", "--imbalance must be at least 1, not nan"),
        (f"shapes --preset gpt2 {BATCH} --json - --csv -", "two outputs go to the same place"),
        (f"shapes --preset gpt2 {BATCH} --json /nowhere/x.json", "cannot be written"),
        (f"shapes --preset codonfm-5b {BATCH} --check", "is not a Hugging Face config"),
        ("shapes --preset gpt2 --micro-batch-size 0 --sequence-length 64", "--micro-batch-size must be at least 1"),
        ("shapes --preset gpt2 --micro-batch-size -4 --sequence-length 64", "must be at least 1"),
        ("shapes --preset gpt2 --micro-batch-size 1 --sequence-length 99999999999", "--sequence-length must be at most"),
        ("shapes --preset gpt2 --micro-batch-size two --sequence-length 64", "'two' is not a whole number"),
        ("shapes --hidden_sise 64", "No such option"),
        ("forms", "No such command"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(run: Run, line: str, message: str) -> None:
    outcome = run(line)
    assert outcome.code == 2
    assert message in " ".join(outcome.err.replace("│", " ").split())
    assert "Traceback" not in outcome.err
    assert outcome.out == ""


@pytest.mark.parametrize("sizes", ["--num-attention-heads 33", "--num-key-value-heads 5", "--hidden-size 0", "--head-dim -1"])
def test_wrong_sizes(run: Run, sizes: str) -> None:
    outcome = run(f"{REFERENCE} {sizes}")
    assert outcome.code == 2
    assert sizes.split()[1] in outcome.err


@pytest.mark.parametrize("command", ["shapes", "forecast --gpu h200", "bench --device cpu", "step"])
def test_a_config_is_not_written_over(run: Run, tmp_path: Path, command: str) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    for named in (config, tmp_path):  # the file, and its folder
        outcome = run(f"{command} --config {named} {BATCH} --json {config}")
        assert outcome.code == 2
        assert unnamed(outcome.err, f"--json {config}") == []
    assert config.read_text() == "{}"


def test_one_file_by_two_names_is_one_place(run: Run, tmp_path: Path) -> None:
    outcome = run(f"shapes --preset gpt2 {BATCH} --json {tmp_path}/a --csv {tmp_path}/../{tmp_path.name}/a")
    assert (outcome.code, list(tmp_path.iterdir())) == (2, [])
    assert unnamed(outcome.err, "--json", "--csv", f"{tmp_path}/a") == []


def test_options_win_over_the_file(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "pretrain.sh"
    script.write_text(
        "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 "
        "--micro-batch-size 2 --tensor-model-parallel-size 2 --vocab-size 1000 --max-position-embeddings 512\n"
    )
    from_file = json.loads(run(f"shapes --config {script} --json -").out)
    assert (from_file["run"]["micro_batch_size"], from_file["run"]["tp"]) == (2, 2)
    typed = json.loads(run(f"shapes --config {script} --tp 4 --micro-batch-size 3 --json -").out)
    assert (typed["run"]["micro_batch_size"], typed["run"]["tp"]) == (3, 4)
    overridden = {
        finding["facts"]["name"]: finding["facts"] for finding in typed["findings"] if finding["code"] == "run-overridden"
    }
    assert (overridden["tp"]["value"], overridden["tp"]["file_value"]) == ("4", "2")
    assert overridden.keys() == {"tp", "micro_batch_size"}


def test_torch_is_not_imported() -> None:
    """Neither help nor shapes imports torch, transformers, numpy, matplotlib or yaml."""
    code = (
        "import sys; sys.argv = ['gemmscope', *sys.argv[1:]]\n"
        "from gemmscope.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    for line in ("--help", "shapes --help", REFERENCE, f"shapes --preset deepseek-v3 {BATCH} --json -"):
        child = subprocess.run([sys.executable, "-c", code, *line.split()], capture_output=True, text=True, check=False)
        assert child.returncode == 0, child.stderr


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m gemmscope shapes --list-presets | head -1; echo ${{PIPESTATUS[0]}}"
    child = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert child.stderr == ""
    assert child.stdout.splitlines()[-1] in ("0", "141")  # finished before the reader closed the pipe, or ended by SIGPIPE


@pytest.mark.parametrize("arguments", ["shapes --list-presets", f"{REFERENCE} --json -"])
def test_a_full_disk_is_one_message(arguments: str) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "gemmscope", *arguments.split()]
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        child = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=buffered, check=False)
    assert child.returncode == 2
    assert "cannot be written" in child.stderr
    assert "Traceback" not in child.stderr


def test_a_terminal_that_lacks_letters() -> None:
    child = subprocess.run(
        [sys.executable, "-m", "gemmscope", *REFERENCE.split()],
        env={"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr


def test_the_files_accumulation_belongs_to_the_files_batch(run: Run, tmp_path: Path) -> None:
    dump = tmp_path / "dump.log"
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "max_position_embeddings": 64}
    batch = {
        "micro_batch_size": 2,
        "global_batch_size": 64,
        "world_size": 4,
        "tensor_model_parallel_size": 2,
        "padded_vocab_size": 256,
    }
    dump.write_text("".join(f"  {name} {'.' * (48 - len(name))} {value}\n" for name, value in (sizes | batch).items()))
    assert json.loads(run(f"shapes --config {dump} --json -").out)["run"]["gradient_accumulation"] == 16
    typed = json.loads(run(f"shapes --config {dump} --micro-batch-size 4 --json -").out)
    assert typed["run"]["gradient_accumulation"] == 8  # the global batch stays
    typed = json.loads(run(f"shapes --config {dump} --micro-batch-size 3 --json -").out)
    assert typed["run"]["gradient_accumulation"] == 1
    assert "accumulation-reset" in [finding["code"] for finding in typed["findings"]]


def test_version_and_module_entry() -> None:
    child = subprocess.run([sys.executable, "-m", "gemmscope", "--version"], capture_output=True, text=True, check=True)
    assert child.stdout.startswith("gemmscope 0.")


# --- with torch ---------------------------------------------------------------------------------------------------------

FACTORY = """
import torch

def build():
    print("a module may print")
    return torch.nn.Sequential(torch.nn.Embedding(100, 32), torch.nn.Linear(32, 64), torch.nn.Linear(64, 100))

def with_inputs(micro_batch_size, sequence_length):
    return torch.nn.Linear(16, 8), {"input": torch.zeros(micro_batch_size * sequence_length, 16)}

def raises():
    raise RuntimeError("no such layer")

def returns_nothing():
    pass

def looks_at_values():
    class Peeking(torch.nn.Module):
        def forward(self, tokens):
            return tokens.float() if tokens.sum() > 0 else tokens
    return Peeking()

def leaves():
    raise SystemExit(0)
"""


@pytest.fixture
def factory(tmp_path: Path, forked_workers: None) -> Path:
    pytest.importorskip("torch", reason="tracing needs torch")
    path = tmp_path / "mine.py"
    path.write_text(FACTORY)
    return path


def test_module(run: Run, factory: Path) -> None:
    outcome = run(f"shapes --module {factory}:build {BATCH} --json -")
    assert outcome.code == 0
    file = ShapesResult.model_validate_json(outcome.out)
    assert [(gemm.op, gemm.m, gemm.k, gemm.n) for gemm in file.gemms if gemm.pass_name == "fprop"] == [
        ("*", 128, 32, 64),
        ("*", 128, 64, 100),
    ]
    assert file.derived_by == "trace"


def test_module_with_inputs(run: Run, factory: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(run(f"shapes --module {factory}:with_inputs {BATCH} --csv -").out)))
    gemms = [(row["Pass"], row["M x K x N"]) for row in rows if row["Pass"] in ("fprop", "dgrad", "wgrad")]
    assert gemms == [("fprop", "128x16x8"), ("wgrad", "16x128x8")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "raises() raised RuntimeError: no such layer (line 12 of"),
        ("returns_nothing", "returned NoneType; it must return an nn.Module"),
        ("looks_at_values", "the forward pass returned no tensor that requires a gradient"),
        ("leaves", "leaves() raised SystemExit"),
        ("absent", "has no function 'absent'; it defines build"),
    ],
)
def test_modules_that_fail(run: Run, factory: Path, name: str, message: str) -> None:
    outcome = run(f"shapes --module {factory}:{name} {BATCH}")
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err


def test_traced_models_are_not_sharded(run: Run, factory: Path) -> None:
    outcome = run(f"shapes --module {factory}:build {BATCH} --tp 2")
    assert outcome.code == 2
    assert unnamed(outcome.err, "sharded") == []


def config_file(tmp_path: Path, config: dict[str, Any]) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}


@pytest.mark.usefixtures("forked_workers")
def test_check(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the check needs transformers")
    outcome = run(f"shapes --config {config_file(tmp_path, {'model_type': 'llama', **SMALL})} {BATCH} --tp 2 --check")
    assert outcome.code == 0
    assert "Check passed" in outcome.out
    detail = run(f"shapes --config {config_file(tmp_path, {'model_type': 'llama', **SMALL})} {BATCH} --check --json -")
    assert "check-equal" in [finding["code"] for finding in json.loads(detail.out)["findings"]]


@pytest.mark.usefixtures("forked_workers")
def test_a_type_without_closed_form_is_traced(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="building it needs transformers")
    config = {"model_type": "gpt_neo", **SMALL, "attention_types": [[["global"], 2]], "num_layers": 2}
    outcome = run(f"shapes --config {config_file(tmp_path, config)} {BATCH} --separate-projections")
    assert outcome.code == 0
    assert "GPTNeoForCausalLM" in outcome.out


@pytest.mark.usefixtures("forked_workers")
def test_a_type_nobody_knows(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = config_file(tmp_path, {"model_type": "martian", **SMALL})
    pytest.importorskip("transformers", reason="asking transformers needs it")
    outcome = run(f"shapes --config {path} {BATCH}")
    assert outcome.code == 2
    assert unnamed(outcome.err, "'martian'") == []
    assert len(outcome.err) < 600
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    outcome = run(f"shapes --config {path} {BATCH}")
    assert outcome.code == 2
    assert unnamed(outcome.err, "'martian'", "pip install torch") == []


def test_the_architecture_hints_at_a_known_type(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    path = config_file(tmp_path, {"model_type": "moonlight", "architectures": ["DeepseekV3ForCausalLM"], **SMALL})
    outcome = run(f"shapes --config {path} {BATCH}")
    assert outcome.code == 2
    assert 'set "model_type": "deepseek_v3"' in outcome.err


def test_the_keys_hint_at_a_known_type(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is only slightly similar is not suggested: frob is not roberta."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    path = config_file(tmp_path, {"model_type": "frob", "num_key_value_heads": 2, **SMALL})
    assert 'set "model_type": "llama"' in run(f"shapes --config {path} {BATCH}").err
