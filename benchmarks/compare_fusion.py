"""Compare the fused traffic of a trace with that of TorchInductor, on blocks of three models. Needs a C++ compiler, no GPU.

    python benchmarks/compare_fusion.py

Prints the bytes that the kernels between GEMMs read and write, and how many there are: as Inductor's scheduler fused them, as
`workload/traffic.py` does, and as launched one by one.
"""

import sys
from pathlib import Path

import torch
import torch._inductor.config
import torch._inductor.graph
import transformers
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from gemmscope.workload.factory import Built, move_to_meta
from gemmscope.workload.trace_worker import trace_built

sys.path.append(str(Path(__file__).parents[1] / "docs" / "examples"))
from dit import Block

WIDTH, BF16 = 256, torch.bfloat16


class Llama(torch.nn.Module):
    """One layer of Llama with its rotary positions."""

    def __init__(self):
        super().__init__()
        config = transformers.LlamaConfig(hidden_size=WIDTH, intermediate_size=688, num_attention_heads=4, num_hidden_layers=1)
        config._attn_implementation = "sdpa"
        self.layer, self.rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)

    def forward(self, x):
        """The output of the layer."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        output = self.layer(x, position_embeddings=self.rotary(x, positions))
        return output[0] if isinstance(output, tuple) else output


def mlp():
    """Norm, linear, GELU, linear, norm."""
    linears = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
    return torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), linears[0], torch.nn.GELU(), linears[1], torch.nn.LayerNorm(WIDTH))


def inductor(module, inputs):
    """Bytes and kernels of what Inductor's scheduler has left after fusing, GEMMs and attention apart."""
    sizes, codegen = [], torch._inductor.graph.GraphLowering.codegen

    def counting(graph, *args, **kwargs):
        result = codegen(graph, *args, **kwargs)
        sizes.extend(node.get_read_write_buffers_sizes() for node in graph.scheduler.nodes if "Extern" not in type(node).__name__)
        return result

    torch._inductor.graph.GraphLowering.codegen = counting
    try:
        torch.compile(module)(*inputs).float().pow(2).mean().backward()
    finally:
        torch._inductor.graph.GraphLowering.codegen = codegen
    return sum(sizes), len(sizes)


def main():
    """A line for each block."""
    torch._inductor.config.fx_graph_cache = False
    blocks = {
        "MLP": (mlp(), [(512, WIDTH)]),
        "DiT block": (Block(WIDTH, 4), [(4, 64, WIDTH), (4, WIDTH)]),
        "Llama layer": (Llama(), [(4, 64, WIDTH)]),
    }
    for name, (module, shapes) in blocks.items():
        module = module.to(BF16)
        inputs = [torch.randn(shape, dtype=BF16, requires_grad=True) for shape in shapes]
        moved, kernels = inductor(module, inputs)
        move_to_meta(module)
        on_meta = tuple(value.detach().to("meta").requires_grad_() for value in inputs)
        sides = [side for work in trace_built(Built(module, on_meta, {})).others for side in (work.forward, work.backward)]
        fused, alone = sum(side.fused_bytes for side in sides), sum(side.bytes_moved for side in sides)
        print(
            f"{name}: Inductor {moved / 1e6:.1f} MB in {kernels} kernels; here {fused / 1e6:.1f} MB in "
            f"{sum(side.kernels for side in sides)}; one by one {alone / 1e6:.1f} MB in {sum(side.launches for side in sides)}"
        )


if __name__ == "__main__":
    main()
