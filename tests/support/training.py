"""A small simulation of training, for traces of frameworks and GPUs that were never recorded here.

A host of two threads (its own and autograd's) launches kernels one after the other; each stream of the GPU runs
its own in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gemmscope.explain.diagnose import TraceDiagnosis
from support.traces import ADAM, Builder

HIDDEN, INNER, TOKENS, VOCABULARY = 4096, 14336, 8192, 32000
LINEARS = (
    ("_LayerNormLinear", HIDDEN, 6144),
    ("_Linear", HIDDEN, HIDDEN),
    ("_LayerNormLinear", HIDDEN, 2 * INNER),
    ("_Linear", INNER, HIDDEN),
)
Low = Callable[[int, str], bool]  # layer, pass


class Chip:
    """Names of its kernels, and how many TFLOP/s it multiplies with."""

    def __init__(self, name: str, high: str, low: str, cast: str, rates: tuple[float, float]) -> None:
        self.name, self.high, self.low, self.cast = name, high, low, cast
        self.high_rate, self.low_rate = rates


H100 = Chip(
    "NVIDIA H100 80GB HBM3", "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT",
    "nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_TNT",
    "void transformer_engine::detail::cast_transpose_optimized_kernel<__nv_bfloat16>", (600, 1100),
)  # fmt: skip
B200_MXFP8 = Chip(
    "NVIDIA B200", "nvjet_sm100_tst_256x256_64x4_2x1_2cta_h_bz_TNT",
    "nvjet_sm100_qqtst_128x256_128x6_2x1_2cta_v_bz_Avec32UE8M0_Bvec32UE8M0_TNT",
    "void transformer_engine::dispatch::mxfp8::quantize_kernel::quantize_mxfp8_kernel<false>", (1500, 2700),
)  # fmt: skip
B200_NVFP4 = Chip(
    "NVIDIA B200", B200_MXFP8.high,
    "cutlass3x_sm100_bstensorop_s256x256x64gemm_block_scaled_ue4m3xf4_ue4m3xf4_f32_bf16_bf16_256x256x256_0_tnn_align32_o_vs16_2sm",
    "void transformer_engine::dispatch::nvfp4::quantize_transpose_nvfp4_kernel<true>", (1500, 4500),
)  # fmt: skip


class Job(Builder):
    """`layers`: of four linears each; `low`: which of their products run low; `cast`: microseconds of casting one tensor."""

    def __init__(self, chip: Chip = H100, low: Low = lambda layer, part: True, layers: int = 4, cast: float = 20.0) -> None:
        super().__init__()
        self.chip, self.low, self.layers, self.cast = chip, low, layers, cast
        self.now, self.thread, self.sequence = 1000.0, 1, 0
        self.free: dict[Any, float] = {}

    def launch(self, name: str, time: float, stream: Any = 7, after: Any = None, **more: Any) -> None:
        start = max(self.now + 5, self.free.get(stream, 0.0) + 1, self.free.get(after, 0.0) + 1)
        self.kernel(name, start, time, stream=stream, launched=self.now, **more)
        self.events[-1]["tid"] = self.thread
        self.free[stream] = start + time
        self.now += 4

    @contextmanager
    def inside(self, name: str, category: str = "cpu_op", **arguments: Any) -> Iterator[None]:
        begin, thread = self.now, self.thread
        self.now += 0.5
        yield
        self.now += 0.5
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 1,
                "tid": thread,
                "ts": begin,
                "dur": self.now - begin,
                "args": arguments,
            }
        )

    @contextmanager
    def node(self, name: str, **arguments: Any) -> Iterator[None]:
        """Of backward, which runs on autograd's thread."""
        before, self.thread = self.thread, 2
        with self.inside(f"autograd::engine::evaluate_function: {name}", **arguments), self.inside(name, **arguments):
            yield
        self.thread = before

    def product(self, low: bool, inputs: int, outputs: int) -> None:
        rate = self.chip.low_rate if low else self.chip.high_rate
        self.launch(self.chip.low if low else self.chip.high, 2.0 * TOKENS * inputs * outputs / rate / 1e6)

    def forward(self) -> list[tuple[int, str, int, int, int]]:
        """What backward has to go through, in its order."""
        done = []
        for layer in range(self.layers):
            for name, inputs, outputs in LINEARS:
                self.sequence += 1
                shapes = [[TOKENS, inputs], [outputs, inputs]]
                shapes = shapes if name == "_LayerNormLinear" else shapes[::-1]
                with self.inside(name, **{"Input Dims": shapes, "Sequence number": self.sequence}):
                    for _ in range(2 if self.low(layer, "fprop") else 0):
                        self.launch(self.chip.cast, self.cast)
                    self.product(self.low(layer, "fprop"), inputs, outputs)
                done.append((layer, name, self.sequence, inputs, outputs))
            with self.inside("FusedAttnFunc"):
                self.launch(
                    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_kernel0_0", 240_000 / self.chip.high_rate
                )
        return done[::-1]

    def backward(self, done: list[tuple[int, str, int, int, int]]) -> None:
        for number, (layer, name, sequence, inputs, outputs) in enumerate(done):
            if number % len(LINEARS) == 0:
                with self.node("FusedAttnFuncBackward"):
                    self.launch(
                        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_kernel0_0",
                        540_000 / self.chip.high_rate,
                    )
            with self.node(f"{name}Backward", **{"Sequence number": sequence}):
                if self.low(layer, "dgrad"):
                    self.launch(self.chip.cast, self.cast)
                self.product(self.low(layer, "dgrad"), inputs, outputs)
                self.product(self.low(layer, "wgrad"), inputs, outputs)

    def optimize(self) -> None:
        for _ in range(4):
            self.launch(ADAM, 200.0)

    def steps(self, count: int = 3, *, marked: bool = True) -> Job:
        """The usual loop."""
        for number in range(count):
            with self.inside(f"ProfilerStep#{number}" if marked else "my step", "user_annotation"):
                self.backward(self.forward())
                with self.inside("Optimizer.step#AdamW.step", "user_annotation"):
                    self.optimize()
        return self

    def explained(self, path: Path, **head: Any) -> TraceDiagnosis:
        return self.diagnose(path / "trace.json", **{"deviceProperties": [{"name": self.chip.name}], **head})
