"""The torchtitan reader on what is wrong: every text ends in settings that make a run, or in a UserError that explains."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.errors import UserError
from gemmscope.model import torchtitan
from gemmscope.model.spec import RUN_SETTINGS
from support.refusals import unnamed
from support.torchtitan_files import DEEPSEEK_671B, LLAMA_8B, config, read, run_of


def error_of(text: str) -> UserError:
    with pytest.raises(UserError) as caught:
        read(text)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "[model] name is missing"),
        ("[model]", "[model] name is missing"),
        ('[model]\nname = "llama3"', "[model] flavor is missing"),
        ('model = "llama3"', "model must be a table"),
        ("[[model]]\nname = 1", "model must be a table"),
        ('[model]\nname = 3\nflavor = "8B"', "must be text, not 3"),
        (config("lama3"), "llama3"),
        (config("llama3", "9B"), "8B"),
        (config("llama3", "\\u0000\\ud7ff"), "known: debugmodel"),
        (config("transformers_modeling_backend"), "config.json"),
        (config(training='seq_len = "abc"'), "[training] seq_len must be a whole number"),
        (config(training="seq_len = 0"), "at least 1"),
        (config(training="seq_len = -5"), "at least 1"),
        (config(training="seq_len = true"), "whole number"),
        (config(training="seq_len = 8192.0"), "whole number"),
        (config(training="seq_len = [1, [2]]"), "whole number"),
        (config(training="seq_len = 99999999999"), "must be at most"),
        (config(training=f"seq_len = 0x{'f' * 6000}"), "too large to show"),
        (config(training=f"seq_len = {'9' * 6000}"), "TOML"),
        (config(training="seq_len = nan"), "whole number"),
        (config(training="seq_len = 1979-05-27"), "whole number"),
        (config(training="seq_len." + "a." * 900 + "b = 1"), "whole number"),
        (config(training="local_batch_size = 0"), "local_batch_size = 1"),
        (config(training="local_batch_size = 1; global_batch_size = -2"), "global_batch_size = -1"),
        (config(parallelism="tensor_parallel_degree = -1"), "tensor_parallel_degree = 1"),
        (config(parallelism='enable_sequence_parallel = "no"; tensor_parallel_degree = 2'), "true or false"),
        (config(parallelism="pipeline_parallel_degree = 64"), "cannot be split into 64"),
        (config(parallelism="pipeline_parallel_degree = 131072"), "cannot be split"),
        (config(parallelism="pipeline_parallel_degree = 2; pipeline_parallel_schedule = 7"), "1F1B"),
        (config(parallelism="pipeline_parallel_degree = 3; pipeline_parallel_layers_per_stage = 9"), "cannot run"),
        (config(activation_checkpoint='mode = "some"'), "memory_budget"),
        (config(activation_checkpoint="mode = {}"), "memory_budget"),
        (config(activation_checkpoint='mode = "selective"; selective_ac_option = "٣"'), "neither a number"),
        (config(activation_checkpoint='mode = "selective"; selective_ac_option = -1'), "neither a number"),
        ("activation_checkpoint = 1\n" + config(), "must be a table"),
        ("[model", "the TOML is not valid"),
        ("[model]\nname = \n", "line 2"),
        ("x = " + "[" * 100_000, "TOML"),
        ("a." * 400_000 + "b = 1", "too many dots"),
        (("a." * 500 + "b = 1\n") * 100, "too many dots"),
        ("\ud800", "TOML"),
        (
            config(
                training="local_batch_size = 3; global_batch_size = 64",
                parallelism="data_parallel_shard_degree = 4; data_parallel_replicate_degree = 1",
            ),
            "global_batch_size = 12",
        ),
        (
            config(
                training="local_batch_size = 3",
                parallelism="pipeline_parallel_degree = 2; pipeline_parallel_microbatch_size = 2",
            ),
            "not a multiple",
        ),
    ],
)
def test_wrong_input_is_explained(text: str, expected: str) -> None:
    assert expected in str(error_of(text))


def suggested(text: str, name: str) -> bool:
    """Whether the message asks first of all whether this name is meant."""
    question, mark, _ = error_of(text).hint.partition("?")
    return bool(mark) and unnamed(question, name) == []


def test_unknown_names_suggest_the_closest() -> None:
    assert suggested(config("deepseekv3"), "deepseek_v3")
    assert suggested(config("qwen3", "30B-A3"), "30B-A3B")
    assert "?" not in error_of(config("llama3", "§")).hint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LLAMA_8B, True),
        (DEEPSEEK_671B, True),
        (LLAMA_8B.replace('"8B"', '"8B'), True),  # broken, and still clearly one
        ("[model]\nname = 1\n[training]\n[parallelism]", True),
        ("", False),
        ('{"hidden_size": 1}', False),
        ("--num-layers 32 --hidden-size 4096", False),
        ("model:\n  flavor: 8B\n", False),
        ("[project]\nname = 'x'\n[tool.ruff]\nline-length = 100", False),
        ("[model]\nhidden_size = 4096", False),
    ],
)
def test_recognises(text: str, expected: bool) -> None:
    assert torchtitan.recognises(text) is expected


# ---------------------------------------------------------------------------------------------------------------- fuzz

KEYS = sorted(
    {
        "name",
        "flavor",
        "seq_len",
        "local_batch_size",
        "batch_size",
        "global_batch_size",
        "tensor_parallel_degree",
        "context_parallel_degree",
        "pipeline_parallel_degree",
        "pipeline_parallel_schedule",
        "pipeline_parallel_microbatch_size",
        "pipeline_parallel_layers_per_stage",
        "pipeline_parallel_first_stage_less_layers",
        "module_fqns_per_model_part",
        "expert_parallel_degree",
        "expert_tensor_parallel_degree",
        "data_parallel_shard_degree",
        "data_parallel_replicate_degree",
        "enable_async_tensor_parallel",
        "mode",
        "selective_ac_option",
        "converters",
    }
)
SCALARS = st.one_of(
    st.integers(-2, 16).map(str),
    st.sampled_from(["64", "8192", "99999999999999999999999", "0x" + "f" * 5000, "true", "nan", "1e400", "1979-05-27"]),
    st.sampled_from(['"8B"', '"llama3"', '"16B"', '"deepseek_v3"', '"selective"', '"op"', '"2"', '"full"', '"DualPipeV"']),
    st.text(st.characters(exclude_characters="'\\"), max_size=8).map(lambda text: f"'{text}'"),
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3).map(lambda parts: "[" + ", ".join(parts) + "]"),
    SCALARS.map(lambda value: "{ a = " + value + " }"),
    st.integers(1, 2000).map(lambda depth: "[" * depth + "]" * depth),
)
TABLE = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6)
VALID = st.sampled_from([{"name": '"llama3"', "flavor": '"8B"'}, {"name": '"deepseek_v3"', "flavor": '"16B"'}])


def check_any_text(text: str) -> None:
    """A text is either read into settings that make a run, or explained."""
    assert torchtitan.recognises(text) in (True, False)
    try:
        source = read(text)
    except UserError as error:
        str(error).encode()  # it can be printed
        return
    assert set(source.run_settings) <= set(RUN_SETTINGS)
    run = run_of(text)
    assert source.model is not None
    assert run.pp_layers is None or (len(run.pp_layers), sum(run.pp_layers)) == (run.pp, len(source.model.layers))


@settings(max_examples=150, deadline=None)
@given(st.text())
def test_any_text(text: str) -> None:
    check_any_text(text)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_file(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([LLAMA_8B, DEEPSEEK_671B]))
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 20)))
    check_any_text(text[:start] + data.draw(st.text(max_size=5)) + text[end:])


@settings(max_examples=400, deadline=None)
@given(st.one_of(VALID, TABLE), TABLE, TABLE, TABLE)
def test_any_values(
    model: dict[str, str], training: dict[str, str], parallelism: dict[str, str], checkpoint: dict[str, str]
) -> None:
    tables = {
        "model": model,
        "training": training,
        "parallelism": parallelism,
        "activation_checkpoint": checkpoint,
    }
    lines = [f"[{name}]\n" + "\n".join(f"{key} = {value}" for key, value in table.items()) for name, table in tables.items()]
    check_any_text("\n".join(lines))


@settings(max_examples=300, deadline=None)
@given(VALID, st.dictionaries(st.sampled_from(KEYS[4:]), st.integers(-1, 9).map(str), max_size=9))
def test_any_sizes(model: dict[str, str], run: dict[str, str]) -> None:
    lines = [f"{key} = {value}" for key, value in run.items() if key not in ("name", "flavor")]
    check_any_text(config(*(value.strip('"') for value in model.values()), parallelism="; ".join(lines)))
