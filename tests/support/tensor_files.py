"""Safetensors files with tensors, as checkpoints have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemmscope.numerics.safetensors import ALIGNMENT, DTYPES


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write all tensors to one file."""
    names = {torch_name: name for name, (torch_name, _) in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    # as the safetensors library does: wide types first, so that every tensor is aligned
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name, end in zip(order, accumulate(tensors[name].nbytes for name in order), strict=True):
        tensor = tensors[name]
        header[name] = {
            "dtype": names[str(tensor.dtype).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [end - tensor.nbytes, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with Path(path).open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for name in order:
            out.write(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
