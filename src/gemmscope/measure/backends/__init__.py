"""One file per framework. Each runs all recipes through the same code; only the recipe object varies."""

# Backend -> its module and class. The modules import frameworks, so only the worker loads them.
BACKENDS = {
    "transformer_engine": ("gemmscope.measure.backends.transformer_engine", "TransformerEngineBackend"),
    "torchao": ("gemmscope.measure.backends.torchao", "TorchaoBackend"),
    "torch": ("gemmscope.measure.backends.torch_gemms", "TorchBackend"),
    "cpu": ("gemmscope.measure.backends.cpu", "CpuBackend"),
}
