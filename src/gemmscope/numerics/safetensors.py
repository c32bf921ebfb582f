"""Reads and writes safetensors files: a length, a header in JSON, then the tensors' bytes. The header is read without torch.

Everything in a header is checked before it is used, so that a damaged or hostile file always ends in a `UserError`.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmscope.errors import UserError, shown
from gemmscope.files import replacing
from gemmscope.reading import LIMITS, called, open_input, parse_json, read_part

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_HEADER = LIMITS["tensors"]["bytes"]
DTYPES = {  # name in the file → PyTorch's name, and bytes of a value
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2), "I64": ("int64", 8),
    "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2),
    "U8": ("uint8", 1), "BOOL": ("bool", 1), "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
}  # fmt: skip
ALIGNMENT = 8  # bytes, that the header is padded to


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """From the start of the file."""
    end: int


@dataclass(frozen=True)
class TensorFile:
    """The header of a safetensors file."""

    path: str
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]

    def load(self, name: str, row: int | None = None, lines: range | None = None) -> Tensor:
        """A tensor, or one row of it, or some lines of either, in memory of its own."""
        import torch

        tensor = self.tensors[name]
        begin, end, shape = tensor.begin, tensor.end, tensor.shape
        if row is not None:
            shape, size = shape[1:], (end - begin) // shape[0]
            begin, end = begin + row * size, begin + (row + 1) * size
        if lines is not None:
            size, shape = (end - begin) // shape[0], (len(lines), *shape[1:])
            begin, end = begin + lines.start * size, begin + lines.stop * size
        dtype = getattr(torch, DTYPES[tensor.dtype][0])
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(read_part(self.path, begin, end - begin), dtype=dtype).reshape(shape)


def read_header(path: str | Path, hint: str = "") -> TensorFile:
    """The header of a safetensors file. A `UserError` if it is not one, truncated or damaged."""
    name = called(path)
    with open_input(path, hint) as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        opening = stream.peek(1)[:1] if len(start) == 8 else b""
        if opening != b"{" or length < 2:
            raise UserError(f"{name} is not a safetensors file", hint)
        if length > LARGEST_HEADER:
            raise UserError(f"{name} is damaged: its header claims {length:,} bytes", hint)
        text = stream.read(length)
    size = _file_size(path, name)
    if len(text) < length:
        raise UserError(f"{name} is truncated: its header is not complete", "copy it again")
    header: dict[str, Any] = parse_json(text, path, hint)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UserError(f"{name} is damaged: its metadata are not texts", hint)
    offset = 8 + length
    tensors = {key: _stored(key, value, offset, name, hint) for key, value in header.items()}
    end = offset
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != end:  # as the safetensors library demands: what overlaps would be read many times
            raise UserError(f"{name} is damaged: its tensors overlap, or there are gaps between them", hint)
        end = tensor.end
    if end > size:
        raise UserError(f"{name} is truncated: it has {size:,} bytes of {end:,}", "copy it again")
    if end < size:
        raise UserError(f"{name} is damaged: {size - end:,} bytes follow its last tensor", hint)
    return TensorFile(str(path), tensors, metadata)


def _file_size(path: str | Path, name: str) -> int:
    """The size of a regular file; a `UserError` for a pipe, because tensors are not read in order."""
    try:
        status = Path(path).stat()
    except (OSError, ValueError):  # standard input
        status = None
    if status is None or not stat.S_ISREG(status.st_mode):
        raise UserError(f"{name} is a pipe, and tensors are not read in order", "write it to a file first")
    return status.st_size


def _stored(key: str, value: Any, offset: int, name: str, hint: str) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        valid = dtype in DTYPES and all(type(size) is int and 0 <= size < 1 << 48 for size in (*shape, begin, end))
        valid = valid and len(shape) <= 8 and end - begin == prod(shape) * DTYPES[dtype][1]
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise UserError(f"{name} is damaged: its entry for {shown(key)} is invalid", hint)
    return StoredTensor(dtype, tuple(shape), offset + begin, offset + end)


def write_metadata(path: str | Path, metadata: Mapping[str, str]) -> None:
    """Write a file without tensors, which replaces an old one atomically. A `UserError` if that fails."""
    text = json.dumps({"__metadata__": dict(metadata)}, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with replacing(path) as out:
        out.write(len(text).to_bytes(8, "little") + text)
