"""gemmscope: what FP8, MXFP8 and NVFP4 will do for your model on your GPU, before you pay for the run."""

__version__ = "0.1.0"

from gemmscope.explain.record import trace_me

__all__ = ["__version__", "trace_me"]
