"""Compares emulated linears with those of Transformer Engine and torchao on this GPU: outputs and both gradients.

    python benchmarks/emulation_on_gpu.py [--tokens 4096] [--device cuda]

Every recipe that the GPU has runs one linear forward and backward, with the library and emulated, on the same tensors. The table
has the relative difference between the two, beside the error that the recipe makes: an emulation is right where the first is far
below the second. `compiled` compares the emulation with and without compiled quantizers; `changed` is the share of quantized
values that differ between the two. Then the time of one linear, forward and backward, in BF16 and emulated.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn

from compiled_quantizers import compiled as compiled_quantizers
from gemmscope.numerics.evaluation.emulate import Emulation, quantized_factors
from gemmscope.numerics.quantizers import operands
from gemmscope.recipe.recipes import recipe
from train_recipes import REAL

Run = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
EMULATED_ONLY = ("MXFP8", "NVFP4")
COMPILED = ("FP8Current", *EMULATED_ONLY)  # only the recipes that are trained, because compiling takes long


class Holder(nn.Module):
    """A module around the linear, so that it can be replaced."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def tensors(tokens: int, device: str) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """A linear, its input with a few large channels, and a small gradient."""
    torch.manual_seed(0)
    linear = nn.Linear(640, 1792, bias=False).to(device, torch.bfloat16)
    channels = torch.where(torch.rand(640) < 0.02, 30.0, 1.0)
    x, dy = torch.randn(tokens, 640) * channels, 1e-4 * torch.randn(tokens, 1792) * torch.rand(tokens, 1) ** 4
    return linear, x.to(device, torch.bfloat16), dy.to(device, torch.bfloat16)


def run(module: nn.Module, x: torch.Tensor, dy: torch.Tensor, context: Any, times: int) -> Run:
    """Output and gradients of the last call: delayed scaling needs one before it."""
    weight = next(module.parameters())
    for _ in range(times):
        weight.grad, own = None, x.clone().requires_grad_()
        with context():
            y = module(own)
        y.backward(dy)
    return y.detach(), own.grad, weight.grad


def real(name: str, x: torch.Tensor, dy: torch.Tensor, linear: nn.Linear) -> Run:
    """Run the linear with the recipe's library."""
    if REAL[name] == "torchao":
        from gemmscope.step.kits.torchao import TorchaoKit as Kit
    else:
        from gemmscope.step.kits.transformer_engine import TransformerEngineKit as Kit
    kit, holder = Kit(recipe(name), device=str(x.device), compiled="none"), Holder(linear)
    kit.convert(holder, ["linear"])
    return run(holder, x, dy, kit.low_precision, 2)


def emulated(name: str, x: torch.Tensor, dy: torch.Tensor, linear: nn.Linear, *, compiled: bool) -> Run:
    """Run the emulated linear."""
    emulation = Emulation(Holder(linear), name, **(compiled_quantizers() if compiled else {}))
    return run(linear, x, dy, lambda: emulation, 2)


def relative(first: Run, second: Run) -> str:
    """Relative differences of output, input gradient and weight gradient."""
    shares = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(first, second, strict=True)]
    return " ".join(f"{share:9.2e}" for share in shares)


def changed_by_compiling(name: str, x: torch.Tensor) -> float:
    """The largest share of quantized values, over all operands, that differ when the quantizer is compiled."""
    compiled, shares = compiled_quantizers()["quantize"], []
    for pass_name in ("fprop", "dgrad", "wgrad"):
        for operand in operands(name, pass_name):
            if not operand.quantizer.stochastic:
                arguments = (operand.quantizer, x.t() if operand.columnwise else x, None, None)
                shares.append(float((compiled(*arguments)[0] != quantized_factors(*arguments)[0]).float().mean()))
    return max(shares)


def wait(x: torch.Tensor) -> None:
    """Wait for the GPU if the tensor is on one."""
    if x.is_cuda:
        torch.cuda.synchronize()


def milliseconds(module: nn.Module, x: torch.Tensor, dy: torch.Tensor, context: Any) -> float:
    """The time of one forward and backward pass."""
    run(module, x, dy, context, 5)
    wait(x)
    begin = time.perf_counter()
    run(module, x, dy, context, 50)
    wait(x)
    return (time.perf_counter() - begin) * 20


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    linear, x, dy = tensors(given.tokens, given.device)
    exact = run(linear, x, dy, torch.enable_grad, 1)
    titles = ("library to emulation", "compiled", "error of the recipe")
    print(f"{'relative: y, dx, dw':<25}  {'  '.join(f'{title:<31}' for title in titles)}  changed")
    for name in (*REAL, *EMULATED_ONLY):
        try:
            plain = emulated(name, x, dy, linear, compiled=False)
            library = relative(real(name, x, dy, linear), plain) if name in REAL else ""
            compiled = changed = ""
            if name in COMPILED:
                compiled = relative(emulated(name, x, dy, linear, compiled=True), plain)
                changed = f"{changed_by_compiling(name, x):.1e}"
            print(f"{name:<25}  {library:<31}  {compiled:<31}  {relative(plain, exact):<31}  {changed}", flush=True)
        except Exception as error:
            print(f"{name:<25}  {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
    print("\nms, forward and backward: BF16", round(milliseconds(linear, x, dy, torch.enable_grad), 3), flush=True)
    for name in COMPILED:
        for compiled in (False, True):
            emulation = Emulation(Holder(linear), name, **(compiled_quantizers() if compiled else {}))
            took = milliseconds(linear, x, dy, lambda emulation=emulation: emulation)
            print(f"{name}, {'compiled' if compiled else 'not compiled'}: {took:.3f}", flush=True)


if __name__ == "__main__":
    main()
