"""One file per framework. Each runs every recipe through the same lines; only the recipe object varies."""

from __future__ import annotations

# Backend -> its module and class. The modules import frameworks, so they are loaded by the worker alone.
BACKENDS = {
    "transformer_engine": ("gemmscope.measure.backends.transformer_engine", "TransformerEngineBackend"),
    "torchao": ("gemmscope.measure.backends.torchao", "TorchaoBackend"),
    "torch": ("gemmscope.measure.backends.torch_gemms", "TorchBackend"),
    "cpu": ("gemmscope.measure.backends.cpu", "CpuBackend"),
}
