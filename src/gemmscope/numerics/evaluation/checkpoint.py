"""The weights of every linear in a safetensors checkpoint, sampled as in a recording: W alone, X and dY exist only in training.

A checkpoint is one file, a folder, or the index of a sharded one. Its header says where the tensors are; they are read one at a
time, so that memory is bounded by the largest weight.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemmscope.errors import UserError, shown
from gemmscope.numerics.evaluation.requests import ModelLinears
from gemmscope.numerics.measure import tensor_numbers, weight_numbers
from gemmscope.numerics.names import LinearName, few_experts, name_linears
from gemmscope.numerics.recording import METADATA, LinearFacts, RecordingFacts, nonfinite_values, operand_numbers, tensor_facts
from gemmscope.numerics.safetensors import StoredTensor, TensorFile, read_header
from gemmscope.reading import LIMITS, called, parse_json, read_text
from gemmscope.units import counted

HINT = "give a safetensors file, a folder with such files, or a model.safetensors.index.json"
INDEX = "model.safetensors.index.json"
LARGEST_INDEX = LIMITS["checkpoint_index"]["bytes"]
MOST_FILES, MOST_TENSORS, MOST_LINEARS, MOST_SAMPLED = (
    LIMITS["checkpoint"][name] for name in ("files", "entries", "linears", "sampled")
)
NOT_LINEARS = ("embed", "wte", "wpe", "norm", "ln_", "conv", "rotary", "position", "router", "gate.weight", "relative_attention")
FLOATS = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
FP8_SCALES = ("weight_scale_inv", "weight_scale")  # DeepSeek's of 128x128 blocks; one per tensor or row elsewhere
SCALE_BLOCK = 128
SMALLEST, LARGEST = 16, 1 << 19  # features of a linear: vocabularies have up to 262,208
PIECE = 1 << 22  # FP8 values that are dequantized at a time
PART = re.compile(r"-\d+-of-\d+")  # in the name of one of several files
PREDICTION_LAYERS = 3  # at most, which a checkpoint may have beside the layers of the model


@dataclass(frozen=True)
class StoredWeight:
    """A weight in a checkpoint: [outputs, inputs], or one of the experts in a parameter of three dimensions."""

    file: TensorFile
    key: str
    stored: StoredTensor
    expert: int | None = None
    transposed: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs."""
        outputs, inputs = self.stored.shape[-2:]
        return (outputs, inputs) if self.transposed else (inputs, outputs)

    def load(self) -> Tensor:
        """[outputs, inputs]; FP8 weights with their scales applied, in bfloat16."""
        weight = self._dequantized() if self.stored.dtype.startswith("F8") else self.file.load(self.key, self.expert)
        return weight.T if self.transposed else weight

    def _dequantized(self) -> Tensor:
        """In pieces: no more memory than the result."""
        names = [f"{self.key.removesuffix('weight')}{ending}" for ending in FP8_SCALES]
        name = next((name for name in names if name in self.file.tensors), None)
        if name is None:
            raise UserError(f"{self.key} is FP8 without scales ({names[0]} is missing)", "use the checkpoint in BF16")
        (rows, columns), shape = self.stored.shape[-2:], self.file.tensors[name].shape
        expert = self.expert if self.expert is not None and shape[:1] == self.stored.shape[:1] else None
        shape = shape if expert is None else shape[1:]
        blocks = shape == (-(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK))
        if not blocks and shape not in ((rows,), (rows, 1)) and prod(shape) != 1:
            raise UserError(f"the scales of {self.key} have the shape {shape}, which is not known", "use the checkpoint in BF16")
        scales = self.file.load(name, expert).float()
        scales = scales if blocks else scales.reshape(-1, 1).expand(rows, 1)
        weight = torch.empty(rows, columns, dtype=torch.bfloat16)
        for start in range(0, rows, step := max(PIECE // columns, 1)):
            lines = range(start, min(start + step, rows))
            own = scales[torch.tensor(lines) // SCALE_BLOCK] if blocks else scales[start : lines.stop]
            own = own.repeat_interleave(SCALE_BLOCK, 1)[:, :columns] if blocks else own
            weight[start : lines.stop] = self.file.load(self.key, self.expert, lines).float() * own
        return weight


def read_checkpoint(
    path: str | Path, *, seed: int = 0, model: ModelLinears | None = None, device: str = "cpu"
) -> tuple[RecordingFacts, Iterator[LinearFacts]]:
    """The weights of all linears, measured one by one. With `model`, a `UserError` if the checkpoint is that of another model."""
    files = checkpoint_files(path)
    weights, names = find_weights(files)
    if not weights and METADATA in files[0].metadata:
        raise UserError(f"{called(path)} is a recording, not a checkpoint", "give it without the option for checkpoints")
    if not weights:
        raise UserError(f"{called(path)} has no weights of linears", HINT)
    if model is not None:
        check_model(called(path), weights, names, model)
    chosen = few_experts(names, seed)
    if len(chosen) > MOST_SAMPLED:
        raise UserError(
            f"{called(path)} has {len(chosen):,} linears, more than the {MOST_SAMPLED:,} that can be compared",
            "give one of its files",
        )
    low = any(weights[key].stored.dtype.startswith("F8") for key in chosen)
    notes = ("FP8 weights are dequantized: their errors are those of quantizing them once more",) if low else ()
    linears = {key: _described(weights[key], names[key], experts) for key, experts in chosen.items()}
    facts = RecordingFacts(
        source="checkpoint", origin=called(path), steps=(0,), seed=seed, packages={"torch": torch.__version__}, notes=notes,
        linears=tuple(linears.values()),
    )  # fmt: skip
    return facts, (_measured(weights[key], linear, device) for key, linear in linears.items())


def _described(weight: StoredWeight, name: LinearName, experts: int) -> LinearFacts:
    inputs, outputs = weight.sizes
    return LinearFacts(
        name=name.path, linear=name.linear, layer=name.layer, op=name.op, kind="Linear", inputs=inputs, outputs=outputs,
        expert=name.expert, experts=experts,
    )  # fmt: skip


def _measured(weight: StoredWeight, linear: LinearFacts, device: str) -> LinearFacts:
    """The linear with the errors of its weight."""
    values = weight.load().to(device)
    dtype = values.dtype if values.dtype in (torch.float16, torch.bfloat16) else torch.float32
    known: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    whole = tensor_facts(tensor_numbers(values, dtype).tolist())
    if whole.nonfinite:
        known["failure"] = nonfinite_values("W")
    elif not whole.amax:
        known["failure"] = "W is zero, so there is no relative error"
    else:
        known["weights"] = {key: operand_numbers(one.tolist()) for key, one in weight_numbers(values, dtype).items()}
    return linear.model_copy(update=known)


def checkpoint_files(path: str | Path) -> list[TensorFile]:
    """The files of a checkpoint."""
    place = Path(path)
    index, files = (place / INDEX, sorted(place.glob("*.safetensors"))[:MOST_FILES]) if place.is_dir() else (place, [place])
    if index.name.endswith(".json") and index.is_file():
        files = _indexed(index)
    if not files:
        raise UserError(f"{called(path)} is a folder without safetensors files", HINT)
    read, tensors = list[TensorFile](), 0
    for file in files:
        read.append(read_header(file, HINT))
        tensors += len(read[-1].tensors)
        if tensors > MOST_TENSORS:
            raise UserError(f"{called(path)} has more than {MOST_TENSORS:,} tensors", "give one of its files")
    return read


def _indexed(index: Path) -> list[Path]:
    data = parse_json(read_text(index, LARGEST_INDEX, HINT), index, HINT)
    places = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise UserError(f"{called(index)} is not the index of a checkpoint: it has no weight_map", HINT)
    names = list(dict.fromkeys(places.values()))
    if strange := next((name for name in names if Path(name).name != name), None):
        raise UserError(f"{called(index)} names {shown(strange)}, which is not a file beside it", HINT)
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise UserError(
            f"{counted(len(missing), 'file')} that {called(index)} names cannot be found, such as {shown(missing[0])}",
            "download all of them",
        )
    return [index.parent / name for name in names[:MOST_FILES]]


def find_weights(files: Sequence[TensorFile]) -> tuple[dict[str, StoredWeight], dict[str, LinearName]]:
    """The linears of a checkpoint: path → weight, and path → name."""
    conv1d = _has_conv1d(files)
    stored = [(file, key) for file in files for key in file.tensors]
    pairs = (weight for file, key in stored for weight in _weights_of(file, key, conv1d=conv1d))
    weights = _oriented(dict(islice(pairs, MOST_LINEARS + 1)))
    if len(weights) > MOST_LINEARS:
        raise UserError(f"{called(files[0].path)} has more than {MOST_LINEARS:,} linears", HINT)
    names = name_linears({key: weight.sizes for key, weight in weights.items()})
    names = {key: name for key, name in names.items() if name.is_recorded}
    return {key: weights[key] for key in names}, names


def _has_conv1d(files: Sequence[TensorFile]) -> bool:
    """Whether c_attn, c_proj and c_fc are stored as [inputs, outputs], as in GPT-2. In GPT-BigCode and StarCoder2, they are
    linears: the last dimension of c_fc and c_attn is as wide as an embedding."""
    shapes = {key: stored.shape for file in files for key, stored in file.tensors.items() if len(stored.shape) == 2}
    hidden = {shape[1] for key, shape in shapes.items() if key.endswith(("wte.weight", "embed_tokens.weight"))}
    first = [shape for key, shape in shapes.items() if key.endswith(("c_fc.weight", "c_attn.weight")) and shape[0] != shape[1]]
    return not any(shape[1] in hidden and shape[0] not in hidden for shape in first)


def _weights_of(file: TensorFile, key: str, *, conv1d: bool) -> Iterator[tuple[str, StoredWeight]]:
    stored = file.tensors[key]
    if stored.dtype not in FLOATS or len(stored.shape) not in (2, 3) or min(stored.shape[-2:]) < SMALLEST:
        return
    if max(stored.shape[-2:]) > LARGEST:
        return
    path, ending = key.removesuffix(".weight"), ".".join(key.split(".")[-3:])
    if any(part in ending for part in NOT_LINEARS):
        return
    if len(stored.shape) == 2 and key.endswith(".weight"):
        yield path, StoredWeight(file, key, stored, transposed=conv1d and path.endswith((".c_attn", ".c_proj", ".c_fc")))
    elif len(stored.shape) == 3 and "expert" in key:
        for number in range(stored.shape[0]):
            yield f"{path}.{number}", StoredWeight(file, key, stored, number)


def _oriented(weights: dict[str, StoredWeight]) -> dict[str, StoredWeight]:
    """Experts in one parameter are [experts, outputs, inputs], in gpt-oss [experts, inputs, outputs]: their sizes tell which."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for weight in weights.values():
        if weight.expert is not None:
            prefix, _, name = weight.key.rpartition(".")
            shapes[prefix]["down" if "down" in name else "up"] = weight.stored.shape[-2:]
    turned = {
        prefix
        for prefix, of in shapes.items()
        if len(of) == 2 and of["up"][0] == of["down"][1] and of["up"][1] == 2 * of["down"][0]
    }
    return {
        path: replace(weight, transposed=True)
        if weight.expert is not None and weight.key.rpartition(".")[0] in turned
        else weight
        for path, weight in weights.items()
    }


def check_model(
    checkpoint: str, weights: Mapping[str, StoredWeight], names: Mapping[str, LinearName], model: ModelLinears
) -> None:
    """Raise a `UserError` if layers or sizes are those of another model. Linears without a known op are not compared."""
    layers = {name.layer for name in names.values() if name.layer is not None}
    other = f"{checkpoint} is a checkpoint of another model"
    hint = "give the config of this checkpoint, or none"
    least = 0 if PART.search(checkpoint) else model.layers
    if layers and not least <= len(layers) <= model.layers + PREDICTION_LAYERS:
        raise UserError(f"{other}: it has {len(layers)} layers, the model {model.layers}", hint)
    for key, name in names.items():
        inputs, outputs = weights[key].sizes
        known = model.sizes.get(name.role, ())
        ends = name.facts is not None and name.facts.ends_block  # others may be stored in parts
        if known and not any(inputs == wanted[0] and (outputs == wanted[1] or not ends) for wanted in known):
            here, there = (f"is {inputs} x {outputs}", "{} x {}") if ends else (f"has {inputs} inputs", "{}")
            raise UserError(f"{other}: {name.op} {here}, in the model {there.format(*min(known))}", hint)
