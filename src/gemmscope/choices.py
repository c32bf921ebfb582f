"""Choices by name: options take them, code decides by them, and results hold them."""

from typing import Literal, get_args

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
StatePrecision = Literal["bf16", "fp32"]
"""Of optimizer states, and of the gradients that are kept."""
STATE_PRECISIONS: tuple[StatePrecision, ...] = get_args(StatePrecision)
Mode = Literal["autocast", "pre-quantized"]
MODES: tuple[Mode, ...] = get_args(Mode)
ClockState = Literal["sustained", "burst"]
CLOCK_STATES: tuple[ClockState, ...] = get_args(ClockState)
Timing = Literal["cuda-events", "profiler"]
TIMINGS: tuple[Timing, ...] = get_args(Timing)
Compile = Literal["whole", "layers", "none"]
COMPILES: tuple[Compile, ...] = get_args(Compile)
OptimizerName = Literal["adamw", "adam", "sgd", "none"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
Switch = Literal["hadamard", "stochastic"]
"""Of NVFP4: the Hadamard transform, and stochastic rounding."""
SWITCHES: tuple[Switch, ...] = get_args(Switch)
SyntheticKind = Literal["normal", "heavy", "outliers"]
SYNTHETIC_KINDS: tuple[SyntheticKind, ...] = get_args(SyntheticKind)
