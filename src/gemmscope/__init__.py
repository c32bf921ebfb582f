"""gemmscope: what FP8, MXFP8 and NVFP4 will do for your model on your GPU, before you pay for the run."""

__version__ = "0.1.0"

from gemmscope.api import Job, Model, Result, load
from gemmscope.errors import UserError
from gemmscope.explain.record import trace_me

__all__ = ["Job", "Model", "Result", "UserError", "__version__", "load", "trace_me"]
