"""One file per framework: how it builds the parts of a layer, in any recipe."""

# Backend -> its module and class. The modules import frameworks, so only the worker loads them.
KITS = {
    "transformer_engine": ("gemmscope.step.kits.transformer_engine", "TransformerEngineKit"),
    "torchao": ("gemmscope.step.kits.torchao", "TorchaoKit"),
    "cpu": ("gemmscope.step.kits.plain", "Kit"),
}
