"""How long `gemmscope numerics` takes on a recording: 32 layers x 4 linears of Llama 3.1 8B, in six recipes.

    python benchmarks/numerics_speed.py [--layers 32] [--recording FILE]

The recording is made here: the linears of one layer are measured with synthetic tensors of an eighth of the size, and stored
once per layer under other names. A recording has numbers, whose count does not depend on sizes. The target is two minutes on
two cores.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import torch

from gemmscope.numerics.recording import RecordingFacts, write_recording
from support.commands import run_numerics
from support.recorded import measured_linear

LINEARS = {
    "self_attn.qkv_proj": (4096, 6144),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_up_proj": (4096, 28672),
    "mlp.down_proj": (14336, 4096),
}
RECIPES = ["BF16", "FP8Current", "FP8Delayed", "FP8Block", "MXFP8", "NVFP4"]
TOKENS, TARGET_S = 256, 120.0


def make_recording(path: Path, layers: int) -> None:
    """Measure one layer, store it for every layer."""
    facts = []
    for linear, (inputs, outputs) in LINEARS.items():
        inputs, outputs = inputs // 8, outputs // 8
        generator = torch.Generator().manual_seed(inputs + outputs)
        shapes = ((TOKENS, inputs), (outputs, inputs), (TOKENS, outputs))
        x, w, dy = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
        one = measured_linear(linear, x, w, dy)
        names = [(f"model.layers.{layer}.{linear}", layer) for layer in range(layers)]
        facts += [one.model_copy(update={"name": name, "layer": layer}) for name, layer in names]
    write_recording(path, RecordingFacts(source="recording", model="Llama 3.1 8B", steps=(0,), linears=tuple(facts)))


def main() -> None:
    """Make the recording, compute its errors, print both times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--recording", type=Path, help="use this recording instead")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.recording or Path(folder) / "recording.safetensors"
        if arguments.recording is None:
            begin = time.monotonic()
            make_recording(path, arguments.layers)
            print(f"made {path.stat().st_size / 2**20:.0f} MiB in {time.monotonic() - begin:.0f} s")
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        result = run_numerics(path, recipes=RECIPES)
        seconds = time.monotonic() - begin
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    failed = sum(bool(linear.failure) for linear in result.linears)
    print(f"{len(result.linears)} linears x recipes ({failed} without numbers), {len(RECIPES)} recipes")
    print(f"{seconds:.1f} s, {processor:.1f} s of CPU time in the worker; target {TARGET_S:.0f} s")
    raise SystemExit(seconds > TARGET_S or failed > 0)


if __name__ == "__main__":
    main()
