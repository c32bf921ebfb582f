"""The file of a recording: what is written is read back; anything else is one message."""

from __future__ import annotations

import json
import math
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from safetensors import SafetensorError  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from fuzz.targets_commands import WHOLE  # noqa: E402
from fuzz.targets_tensors import recording_bytes  # noqa: E402
from gemmscope.errors import UserError  # noqa: E402
from gemmscope.numerics.recording import (  # noqa: E402
    GemmNumbers,
    LinearFacts,
    OperandNumbers,
    RecordingFacts,
    StepFacts,
    TensorFacts,
    read_recording,
    write_recording,
)
from gemmscope.numerics.safetensors import DTYPES, read_header  # noqa: E402
from support.tensor_files import write_tensors  # noqa: E402

OPERAND = OperandNumbers(relative=0.1, underflow=0.0, saturated=0.0)
GEMM = GemmNumbers(squared=0.01, variance=0.0, first_share=0.5, parallel=0.0, damage=math.inf, operands=(OPERAND, OPERAND))
STEP = StepFacts(
    step=7,
    tokens=512,
    tensors={"X": TensorFacts(amax=3.0), "W": TensorFacts(amax=0.5), "dY": TensorFacts(amax=math.nan, nonfinite=1)},
    outputs={"fprop": 1.5},
    gemms={"NVFP4/transformer_engine": {"fprop": GEMM}},
)
LINEAR = LinearFacts(name="layers.0.up", linear="up", layer=0, inputs=200, outputs=64, dtype="bfloat16", steps=(STEP,))
FACTS = RecordingFacts(source="recording", model="Net", steps=(6, 7), linears=(LINEAR,))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_recording(tmp_path / "a.safetensors", FACTS)
    recording = read_recording(tmp_path / "a.safetensors")
    (linear,) = recording.linears
    (step,) = linear.measured
    assert math.isnan(step.tensors["dY"].amax)
    assert step.gemms == STEP.gemms
    assert (recording.source, linear.name) == ("recording", "layers.0.up")
    assert not load_file(tmp_path / "a.safetensors")  # the numbers are all that is kept


def test_fuzzing_changes_a_valid_recording(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(recording_bytes(WHOLE))
    linears = read_recording(tmp_path / "a.safetensors").linears
    assert [len(linear.measured) for linear in linears] == [2, 2, 2]


def test_recordings_of_earlier_versions_are_refused(tmp_path: Path) -> None:
    """They have samples of tensors, and no version where it was the first one."""
    text = json.dumps({"source": "recording", "linears": [{"name": "up", "linear": "up", "inputs": 8, "outputs": 8}]})
    write_tensors(tmp_path / "old", {"up/0/fprop.first.rows": torch.zeros(4, 8)}, {"gemmscope": text})
    with pytest.raises(UserError, match="a recording of version 1; this gemmscope reads version 3") as refused:
        read_recording(tmp_path / "old")
    assert "record it again" in refused.value.hint


def test_the_file_is_one_that_the_safetensors_library_reads_and_writes(tmp_path: Path) -> None:
    mixed = {"a": torch.arange(3), "b": torch.randn(2, 3).bfloat16(), "empty": torch.empty(0, 4), "c": torch.tensor(2.0)}
    write_tensors(tmp_path / "ours", mixed, {"key": "value"})
    theirs = load_file(tmp_path / "ours")
    assert all(torch.equal(theirs[name], tensor) for name, tensor in mixed.items())
    save_file(mixed, tmp_path / "theirs", {"key": "value"})
    file = read_header(tmp_path / "theirs")
    assert file.metadata == {"key": "value"}
    assert all(torch.equal(file.load(name), tensor) for name, tensor in mixed.items())
    assert torch.equal(file.load("b", 1), mixed["b"][1])


SHAPES = st.sampled_from(
    [("F32", [2]), ("BF16", [2, 2]), ("U8", [3]), ("F64", []), ("F8_E4M3", [1, 5]), ("BOOL", [0, 4]), ("I64", [1])]
)
WRONG = st.sampled_from(
    [
        *(("shape", value) for value in ([1], [], [0], [-2], ["2"], None, 2, [2**60, 2**60], [2.0], [True])),
        *(("dtype", value) for value in ("F32", "U8", "f32", "", None, 1)),
        *(("data_offsets", value) for value in ([0, 8], [8, 0], [0], [0, 8, 9], [-8, 0], None, [0, 2**70], ["0", "8"], [4, 12])),
        ("unknown", 1),
    ]
)


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict[str, object], int]:
    """A header and the size of the data: valid ones, and what is next to them."""
    header: dict[str, object] = draw(
        st.sampled_from([{}, {}, {"__metadata__": {"a": "b"}}, {"__metadata__": {"a": 1}}, {"x": 1}])
    )
    header, end = dict(header), 0
    for number, (dtype, shape) in enumerate(draw(st.lists(SHAPES, max_size=3))):
        begin, end = end, end + math.prod(shape) * DTYPES[dtype][1]
        header[str(number)] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    if "0" in header and draw(st.booleans()):
        key, value = draw(WRONG)
        header["0"] = {**header["0"], key: value}  # type: ignore[dict-item]
    return header, max(end + draw(st.sampled_from([0, 0, 0, -1, 1])), 0)


@given(headers())
@settings(max_examples=150, deadline=None)
def test_every_file_is_read_or_refused_as_by_the_safetensors_library(given: tuple[dict[str, object], int]) -> None:
    """Without its memory map, which ends a process whose file becomes shorter, and its gigabyte for 100 MB of names."""
    header, size = given
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.write_bytes(container(header, b"\1" * size))
        theirs: dict[str, torch.Tensor] | None = None
        with suppress(SafetensorError, OSError):
            theirs = load_file(path)
        try:
            file = read_header(path)
        except UserError:
            assert theirs is None
            return
        assert theirs is not None
        assert set(file.tensors) == set(theirs)
        for name, tensor in theirs.items():
            own = file.load(name)
            assert (own.dtype, own.shape, own.tolist()) == (tensor.dtype, tensor.shape, tensor.tolist())


def container(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(**changes: object) -> dict[str, object]:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a safetensors file"),
        (b"PK\x03\x04 something else", "is not a safetensors file"),
        ((1 << 60).to_bytes(8, "little") + b"{", "its header claims"),
        ((50).to_bytes(8, "little") + b'{"a":', "its header is not complete"),
        ((7).to_bytes(8, "little") + b"{broken", "is not valid JSON"),
        (container(entry(), b"1234"), "is truncated"),
        (container(entry(), b"123456789"), "1 bytes follow its last tensor"),
        (container({**entry(), "u": entry()["t"]}, b"12345678"), "overlap"),
        (container({"t": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678"), "gaps"),
        (container(entry(shape=[3]), b"12345678"), "its entry for 't' is invalid"),
        (container(entry(shape=[-2]), b"12345678"), "its entry for 't' is invalid"),
        (container(entry(shape=["2"]), b"12345678"), "its entry for 't' is invalid"),
        (container(entry(dtype="F7"), b"12345678"), "its entry for 't' is invalid"),
        (container(entry(dtype=["F32"]), b"12345678"), "its entry for 't' is invalid"),
        (container(entry(data_offsets=[-8, 0]), b"12345678"), "its entry for 't' is invalid"),
        (container(entry(data_offsets=[0, 8, 9]), b"12345678"), "its entry for 't' is invalid"),
        (container({"t": 1}), "its entry for 't' is invalid"),
        (container({"__metadata__": {"gemmscope": 1}}), "its metadata are not texts"),
        (container(entry(), b"12345678"), "is a safetensors file, but not a recording"),
        (container({"__metadata__": {"gemmscope": "["}}), "is not valid JSON"),
        (container({"__metadata__": {"gemmscope": "[]"}}), "version None"),
        (container({"__metadata__": {"gemmscope": '{"version": 3, "rank": ' + "9" * 400 + "}"}}), "is not a valid number"),
        (container({"__metadata__": {"gemmscope": '{"version": 99}'}}), "version 99"),
        (container({"__metadata__": {"gemmscope": '{"version": 3, "source": "elsewhere"}'}}), "is damaged: source"),
    ],
)
def test_any_other_file_is_one_message(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_recording(tmp_path / "file")


def test_missing_files_and_folders_are_one_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_recording(tmp_path / "none")
    with pytest.raises(UserError, match="is a folder"):
        read_recording(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linears": (LINEAR, LINEAR)}, "a linear occurs twice"),
        ({"linears": (LINEAR.model_copy(update={"steps": (STEP, STEP)}),)}, "has a step twice"),
        ({"linears": (LINEAR.model_copy(update={"steps": (STEP.model_copy(update={"outputs": {}}),)}),)}, "no output of fprop"),
    ],
)
def test_facts_that_contradict_each_other_are_damage(tmp_path: Path, change: dict[str, object], message: str) -> None:
    write_recording(tmp_path / "a", FACTS.model_copy(update=change))
    with pytest.raises(UserError, match=f"is damaged: .*{message}|is damaged: {message}"):
        read_recording(tmp_path / "a")
