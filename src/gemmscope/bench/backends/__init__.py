"""One file per framework. Each runs all recipes through the same code; only the recipe object varies."""

# Backend -> its module and class. The modules import frameworks, so only the worker loads them.
BACKENDS = {
    "transformer_engine": ("gemmscope.bench.backends.transformer_engine", "TransformerEngineBackend"),
    "torchao": ("gemmscope.bench.backends.torchao", "TorchaoBackend"),
    "torch": ("gemmscope.bench.backends.torch_gemms", "TorchBackend"),
    "cpu": ("gemmscope.bench.backends.cpu", "CpuBackend"),
}
