"""How long `gemmscope numerics` takes on a recording of 64 MB: 32 layers x 4 linears of Llama 3.1 8B, in six recipes.

    python benchmarks/numerics_speed.py [--layers 32] [--recording FILE]

The recording is made here: the linears of one layer are sampled and probed from synthetic tensors, and stored once per layer
under other names, so that all 64 MB are read and computed. Making it takes longer than reading it. The target is two minutes on
two cores.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import torch

from gemmscope.numerics.probes import compute_probes
from gemmscope.numerics.recording import LinearFacts, RecordingFacts, tensor_key, write_recording
from gemmscope.numerics.sample import random_for, sample_linear
from support.commands import run_numerics

LINEARS = {
    "self_attn.qkv_proj": (4096, 6144),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_up_proj": (4096, 28672),
    "mlp.down_proj": (14336, 4096),
}
RECIPES = ["BF16", "FP8Current", "FP8Delayed", "FP8Block", "MXFP8", "NVFP4"]
TOKENS, MEGABYTES, TARGET_S = 256, 64, 120.0


def make_recording(path: Path, layers: int) -> None:
    """Sample and probe one layer, store it for every layer."""
    budget = MEGABYTES * 2**20 // (layers * len(LINEARS))
    facts: list[LinearFacts] = []
    tensors: dict[str, torch.Tensor] = {}
    for linear, (inputs, outputs) in LINEARS.items():
        generator = torch.Generator().manual_seed(inputs + outputs)
        x, w, dy = (
            torch.randn(shape, generator=generator).bfloat16()
            for shape in ((TOKENS, inputs), (outputs, inputs), (TOKENS, outputs))
        )
        step, kept = sample_linear(x, w, dy, dtype=torch.bfloat16, budget=budget, random=random_for(0, linear))
        step = step.model_copy(update={"probes": compute_probes(x, w, dy, random=random_for(1, linear))})
        for layer in range(layers):
            name = f"model.layers.{layer}.{linear}"
            facts.append(LinearFacts(name=name, linear=linear, layer=layer, inputs=inputs, outputs=outputs, steps=(step,)))
            tensors |= {tensor_key(name, step.step, key): values.clone() for key, values in kept.items()}
    write_recording(path, RecordingFacts(source="synthetic", model="Llama 3.1 8B", steps=(0,), linears=tuple(facts)), tensors)


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
