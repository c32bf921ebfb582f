"""Compares gemmscope's quantizers with those of Transformer Engine and torchao, bit by bit, and records the libraries' outputs.

    python benchmarks/record_quantizers.py [tests/data/numerics/quantizers_h200.npz [all-codes.npz]]

Runs what the machine has: on a Hopper GPU Transformer Engine's own kernels (FP8Current, FP8Delayed, FP8Block), its reference of
NVFP4 and torchao; on a CPU the last two (with torchao installed, and Transformer Engine's wheel unpacked on PYTHONPATH). Prints
one line per input and quantizer, then those that differ. The first file has every output in short, for tests on machines
without the libraries: all scales, a hash of all codes and every few codes.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from gemmscope.numerics.formats import E2M1, E4M3, E5M2, AmaxHistory, NumberFormat, round_nearest, te
from gemmscope.numerics.quantizers import operands
from gemmscope.workload.ops import OPERANDS
from support.quantizer_cases import (
    QUANTIZERS,
    cases,
    codes_of,
    comparable,
    encode,
    quantized_values,
    recorded_quantizer,
    tensor_amax,
)

try:
    import triton
    import triton.language as tl
    from torchao.prototype.moe_training.nvfp4_training.hadamard_utils import _nvfp4_quantize
    from torchao.prototype.moe_training.nvfp4_training.quantize_2d_triton import _nvfp4_2d_quantize

    @triton.jit
    def torchao_training(x, amax, scaled, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr):  # noqa: N803
        """What torchao's training kernels compute before they pack: scales, and scaled values in float32."""
        offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        blocks = tl.arange(0, COLUMNS // 16)[None, :]
        if TILES:
            scale, result = _nvfp4_2d_quantize(tl.load(x + offsets), tl.load(amax), ROWS, COLUMNS)
            tl.store(scales + tl.arange(0, ROWS // 16)[:, None] * (COLUMNS // 16) + blocks, scale)
        else:
            scale, result = _nvfp4_quantize(tl.load(x + offsets), tl.load(amax), ROWS, COLUMNS)
            tl.store(scales + tl.arange(0, ROWS)[:, None] * (COLUMNS // 16) + blocks, scale)
        tl.store(scaled + offsets, result)
except Exception as problem:
    torchao_training = None
    print(f"torchao's training kernels are not compared: {problem!r}"[:300])

SAMPLES = 500  # codes kept of each output
Output = tuple[Tensor, Tensor]
DIRECTIONS: tuple[Literal["rows", "columns"], ...] = ("rows", "columns")


@dataclass(frozen=True)
class Check:
    """One quantizer of a library. `run` gives codes [rows, columns] and scales [rows, blocks]; columns: of the transpose."""

    library: str
    quantizer: str  # of quantizers.toml, with the format where several are possible
    tensor: str
    direction: Literal["rows", "columns"]
    run: Callable[[Tensor], Output]
    history: float = 0.0  # with delayed scaling, the maximum of earlier steps over the tensor's own
    square: bool = False  # only 128 x 128 values
    zeros_lose_their_sign: bool = False

    @property
    def output(self) -> tuple[str, str, str, float]:
        """The same for checks with the same output: the direction does not matter with one scale, and the tensor never does."""
        per_tensor = recorded_quantizer(self.quantizer).per_tensor
        return self.library, self.quantizer, "rows" if per_tensor else self.direction, self.history

    @property
    def name(self) -> str:
        return " ".join(
            [self.library, self.quantizer, self.tensor, self.direction] + [f"history {self.history}"] * (self.history > 0)
        )

    @property
    def facts(self) -> dict[str, Any]:
        """What a test needs to compute the same."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "run"}


@dataclass
class Recorder:
    """What goes into the file: per check, the outputs for all inputs."""

    outputs: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    recorded: dict[tuple[str, str, str, float], str] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, check: Check, codes: Tensor, scales: Tensor) -> None:
        if self.recorded.setdefault(check.output, check.name) != check.name:
            return
        flat = comparable(codes).contiguous().cpu().numpy().reshape(-1)
        digest = np.frombuffer(hashlib.sha256(flat.tobytes()).digest(), np.uint8)
        self.outputs.setdefault(check.name, []).append((digest, flat, comparable(scales).contiguous().cpu().numpy()))
        self.facts[check.name] = check.facts

    def save(self, count: int) -> None:
        """Into the files that the command line names. Checks that failed for one input are left out."""
        for path, samples in zip(map(Path, sys.argv[1:]), (SAMPLES, sys.maxsize), strict=False):
            arrays, complete = (
                dict(self.arrays),
                {check: outputs for check, outputs in self.outputs.items() if len(outputs) == count},
            )
            for check, outputs in complete.items():
                digests, codes, scales = zip(*outputs, strict=True)
                arrays[f"{check}|hash"], arrays[f"{check}|scales"] = np.stack(digests), np.stack(scales)
                arrays[f"{check}|codes"] = np.stack(codes)[:, :: max(1, len(codes[0]) // samples)]
            arrays["checks"] = np.array(json.dumps({check: self.facts[check] for check in complete}))
            (np.savez_compressed if samples == SAMPLES else np.savez)(path, **arrays)
            print(f"{path}: {path.stat().st_size} bytes, {len(complete)} checks", flush=True)


def transformer_engine_checks() -> Iterator[Check]:
    """Real quantizers, as modules make them. Scales of 1x128 blocks are stored transposed and padded."""
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch.quantization import RecipeState

    def quantizers(recipe: Any) -> dict[str, Any]:
        forward = RecipeState.create(recipe, mode="forward", num_quantizers=3).make_quantizers()
        grad = RecipeState.create(recipe, mode="backward", num_quantizers=2).make_quantizers()
        by_tensor = {"X": forward[0], "W": forward[1], "dY": grad[0]}
        for one in by_tensor.values():
            one.set_usage(rowwise=True, columnwise=True)
        return by_tensor

    def per_tensor(quantizer: Any, columnwise: bool, dtype: torch.dtype, history: float = 0.0) -> Callable[[Tensor], Output]:
        def run(x: Tensor) -> Output:
            if history:
                amax = tensor_amax(x) * history
                quantizer.scale.copy_(te(amax, E4M3 if dtype == torch.float8_e4m3fn else E5M2, amax).encode)
            quantized = quantizer(x)
            return (quantized._transpose if columnwise else quantized._data).view(dtype), quantized._scale_inv.reshape(())

        return run

    def blocks(quantizer: Any, columnwise: bool, tiles: bool) -> Callable[[Tensor], Output]:
        def run(x: Tensor) -> Output:
            quantized = quantizer(x)
            codes = (quantized._columnwise_data if columnwise else quantized._rowwise_data).view(torch.float8_e4m3fn)
            scales = quantized._columnwise_scale_inv if columnwise else quantized._rowwise_scale_inv
            rows, count = codes.shape[0], -(-codes.shape[1] // 128)
            if tiles:
                return codes, scales[: -(-rows // 128), :count].repeat_interleave(128, 0)[:rows]
            return codes, scales[:count, :rows].T

        return run

    for tensor, quantizer in quantizers(recipes.Float8CurrentScaling()).items():
        name, dtype = ("te_tensor_e5m2", torch.float8_e5m2) if tensor == "dY" else ("te_tensor_e4m3", torch.float8_e4m3fn)
        for direction in DIRECTIONS:
            yield Check("TE", name, tensor, direction, per_tensor(quantizer, direction == "columns", dtype))
    for history in (0.25, 1.0, 3.0):
        for tensor, quantizer in quantizers(recipes.DelayedScaling()).items():
            name, dtype = ("te_delayed_e5m2", torch.float8_e5m2) if tensor == "dY" else ("te_delayed_e4m3", torch.float8_e4m3fn)
            for direction in DIRECTIONS:
                run = per_tensor(quantizer, direction == "columns", dtype, history)
                yield Check("TE", name, tensor, direction, run, history)
    for tensor, quantizer in quantizers(recipes.Float8BlockScaling()).items():
        for direction in DIRECTIONS:
            name = "te_128x128" if tensor == "W" else "te_1x128"
            yield Check("TE", name, tensor, direction, blocks(quantizer, direction == "columns", tensor == "W"))


def load_reference() -> ModuleType:
    """Transformer Engine's reference of NVFP4. Its package needs a GPU's libraries; this file of it needs PyTorch alone."""
    package = "transformer_engine.pytorch.custom_recipes"
    try:
        return import_module(f"{package}.reference_nvfp4")
    except Exception as problem:
        print(f"Transformer Engine does not import here, its reference is loaded alone: {problem!r}"[:300])
    spec = find_spec("transformer_engine")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("put the unpacked wheel of Transformer Engine on PYTHONPATH")
    folder = Path(spec.submodule_search_locations[0]) / "pytorch" / "custom_recipes"
    for name in [one for one in sys.modules if one.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    quantized = {"Quantizer": StandInQuantizer, "QuantizedTensorStorage": object}
    gemm = {"MMParams": object, "GEMMType": SimpleNamespace(FPROP=None)}
    for name, contents in (
        ("transformer_engine", {}),
        ("transformer_engine.pytorch", {}),
        (package, {}),
        ("transformer_engine.pytorch.quantized_tensor", quantized),
        (f"{package}.gemm", gemm),
    ):
        sys.modules[name] = module = ModuleType(name)
        vars(module).update(contents, __path__=[str(folder)] if name == package else [])
    sys.modules[package].gemm = sys.modules[f"{package}.gemm"]
    return import_module(f"{package}.reference_nvfp4")


class StandInQuantizer:
    """What the reference needs of Transformer Engine's class."""

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


def reference_checks() -> Iterator[Check]:
    """Transformer Engine's own reference of NVFP4, in PyTorch. It has no stochastic rounding, and -0 becomes 0 in it."""
    reference_nvfp4 = load_reference()

    def quantize(tile: tuple[int, int], direction: str, *, hadamard: bool) -> Callable[[Tensor], Output]:
        reference = reference_nvfp4.NVFP4QuantizerRef(
            dtype=reference_nvfp4.reference_utils.Fp4Formats.E2M1, quant_tile_shape=tile, pow_2_scales=False, with_rht=hadamard
        )

        def run(x: Tensor) -> Output:
            with nullcontext() if x.is_cuda else torch.backends.mkldnn.flags(enabled=False):  # that takes subnormal values for 0
                rows, row_scales, columns, column_scales, *_ = reference._quantize(x)
            packed, scales = (columns, column_scales) if direction == "columns" else (rows, row_scales)
            return torch.stack([packed & 15, packed >> 4], -1).flatten(1), scales

        return run

    for direction in DIRECTIONS:
        for tensor, name, rows in (("X", "te_nvfp4", 1), ("W", "te_nvfp4_2d", 16)):
            run = quantize((rows, 16), direction, hadamard=False)
            yield Check("reference", name, tensor, direction, run, zeros_lose_their_sign=True)
    run = quantize((1, 16), "columns", hadamard=True)
    yield Check("reference", "te_nvfp4_hadamard", "X", "columns", run, zeros_lose_their_sign=True)


def torchao_checks() -> Iterator[Check]:
    """The casts of torchao's float8 recipes, its MX cast and nvfp4_quantize."""
    from support import torchao_casts

    for recipe in torchao_casts.RECIPES:
        for pass_name in OPERANDS:
            for operand in operands(recipe, pass_name):
                if operand.quantizer.format == "bf16":
                    continue
                names = ("ao_tensor_e4m3", "ao_tensor_e5m2", *QUANTIZERS)
                name, tensor = next(key for key in names if recorded_quantizer(key) == operand.quantizer), operand.tensor
                run = partial(torchao_casts.float8, recipe=recipe, pass_name=pass_name, tensor=tensor)
                yield Check(f"torchao {recipe}", name, tensor, "columns" if operand.columnwise else "rows", run)
    for name, run in torchao_casts.BLOCK_CASTS.items():
        yield Check("torchao", name, "X", "rows", run)
        yield Check("torchao", name, "X", "columns", run, square=True)


def torchao_training_checks() -> Iterator[Check]:
    """The arithmetic of torchao's training kernels for NVFP4. Their packing runs on Blackwell alone."""
    if torchao_training is None or not torch.cuda.is_available():
        return

    def training(*, tiles: bool) -> Callable[[Tensor], Output]:
        def run(x: Tensor) -> Output:
            rows, columns = x.shape
            scaled, amax = torch.empty(rows, columns, device=x.device), x.float().abs().amax()
            scales = torch.empty(rows // (16 if tiles else 1), columns // 16, device=x.device, dtype=torch.float8_e4m3fn)
            torchao_training[(1,)](x, amax, scaled, scales, rows, columns, tiles, num_warps=8)
            scales = scales.view(torch.uint8).repeat_interleave(16, 0).view(torch.float8_e4m3fn) if tiles else scales
            return encode(round_nearest(scaled, E2M1), E2M1), scales

        return run

    yield Check("torchao training", "ao_nvfp4", "X", "rows", training(tiles=False), square=True)
    yield Check("torchao training", "ao_nvfp4_2d", "W", "rows", training(tiles=True), square=True)


def difference(check: Check, given: Tensor, output: Output, device: str) -> str:
    """Empty where our codes and scales are theirs, else the first difference. NaN has no code in E2M1, so it is not compared."""
    x = given.to(device)
    x = x.T.contiguous() if check.direction == "columns" else x
    quantizer = recorded_quantizer(check.quantizer)
    quantized = quantizer(x, amax=tensor_amax(x) * check.history if check.history else None)
    codes = codes_of(quantized, quantizer.format)
    if quantizer.format == "e2m1":
        codes = torch.where(quantized.rounded.isnan(), output[0].to(device), codes)
    if check.zeros_lose_their_sign:
        codes = torch.where(quantized_values(quantizer, x) == 0, 0, codes)
    for what, own, theirs in (("scale", quantized.scales, output[1]), ("code", codes, output[0])):
        own, theirs = comparable(own).cpu(), comparable(theirs).cpu()
        if own.shape != theirs.shape:
            return f"{what} shapes: ours {tuple(own.shape)}, theirs {tuple(theirs.shape)}"
        if not torch.equal(own, theirs):
            where = (own != theirs).nonzero()
            at = tuple(where[0].tolist())
            return f"{what} {at} of {len(where)}/{own.numel()}: ours {own[at].item()}, theirs {theirs[at].item()}"
    return ""


def delayed_scales(recorder: Recorder, device: str) -> Iterator[str]:
    """The scales of a Transformer Engine linear over several steps, and ours from the same maxima."""
    import transformer_engine.pytorch as te_pytorch
    from transformer_engine.common import recipe as recipes

    length, inputs = 3, dict(cases())
    linear = te_pytorch.Linear(160, 144, bias=False, params_dtype=torch.bfloat16)
    recipe = recipes.DelayedScaling(amax_history_len=length)
    formats: dict[str, NumberFormat] = {"X": E4M3, "W": E4M3, "dY": E5M2}
    histories = {name: AmaxHistory(target, length, device) for name, target in formats.items()}
    steps, seen, maxima = [1.0, 8.0, 0.25, 0.5, 0.125, 0.0, 0.0, 0.0, 3.0, 1e-37, 1e-37, 1e-37, 1e30], [], []
    for factor in steps:
        x = (inputs["random"].to(device) * factor).requires_grad_()
        gradient = inputs["outlier channels"].to(device).T[:144, :144].contiguous() * factor
        with te_pytorch.autocast(enabled=True, recipe=recipe):
            y = linear(x)
        y.backward(gradient)
        maxima.append([tensor_amax(one.detach()) for one in (x, linear.weight, gradient)])
        for history, amax in zip(histories.values(), maxima[-1], strict=True):
            history.push(amax)
        forward, backward = (linear.fp8_meta[key].scale.detach().clone() for key in ("scaling_fwd", "scaling_bwd"))
        seen.append([forward[0], forward[1], backward[0]])
        ours = [
            te(history.amax, target, history.amax).encode
            for history, target in zip(histories.values(), formats.values(), strict=True)
        ]
        equal = [torch.equal(own, theirs) for own, theirs in zip(ours, seen[-1], strict=True)]
        shown = ", ".join(f"{own.item():.9g} and {theirs.item():.9g}" for own, theirs in zip(ours, seen[-1], strict=True))
        yield f"delayed scales after a step x{factor} (ours and theirs): {shown}: {'equal' if all(equal) else 'differ'}"
    recorder.arrays["delayed|maxima"] = torch.tensor(maxima).numpy()
    recorder.arrays["delayed|scales"] = torch.tensor(seen).numpy()


def compare(check: Check, given: Tensor, device: str, recorder: Recorder) -> str:
    """Equal, or what differs: the library's output against ours on the same device and on the CPU."""
    x = (given[:128, :128] if check.square else given).contiguous()
    try:
        own = x.to(device)
        transposes = check.direction == "columns" and check.library.startswith(
            "torchao"
        )  # Transformer Engine makes both directions itself
        output = check.run(own.T.contiguous() if transposes else own)
        texts = {where: difference(check, x, output, where) for where in dict.fromkeys((device, "cpu"))}
        recorder.add(check, *output)
    except Exception as problem:
        texts = {device: f"failed: {problem!r}"[:300]}
    return "; ".join(f"on {where}: {text}" for where, text in texts.items() if text) or "equal"


def main() -> None:
    """Compare everything. What is known is saved after each library, so that a time limit costs the rest alone."""
    device, recorder = "cuda" if torch.cuda.is_available() else "cpu", Recorder()
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name() if device == 'cuda' else device}")
    lines, inputs = [], list(cases())
    for source in (transformer_engine_checks, delayed_scales, reference_checks, torchao_checks, torchao_training_checks):
        try:
            if source is delayed_scales:
                lines += delayed_scales(recorder, device)
            else:
                checks = list(source())
                lines += [
                    f"{name:<17}{check.name:<62}{compare(check, x, device, recorder)}" for check in checks for name, x in inputs
                ]
            recorder.save(len(inputs))
        except Exception as problem:
            lines.append(f"{source.__name__}: {problem!r}"[:400])
        print(f"{source.__name__}: {len(lines)} comparisons so far", flush=True)
    differing = [line for line in lines if not line.endswith("equal")]
    print(*lines, sep="\n")
    print(f"{len(differing)} of {len(lines)} comparisons differ:", *differing, sep="\n")


if __name__ == "__main__":
    main()
