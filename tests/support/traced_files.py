"""A traced module as its worker would answer: blocks of two linears and attention, a scan, a convolution, a head."""

from gemmscope.workload.ops import PASSES, BatchedGemm, Convolution, Gemm, gemm_size
from gemmscope.workload.trace import ModuleTrace
from gemmscope.workload.traced_ops import Moved, OtherWork, TracedAttention

LAYERS, ROWS, WIDTH = 24, 16384, 1024


def linear(op: str, rows: int, inputs: int, outputs: int, count: int = LAYERS) -> tuple[Gemm, ...]:
    return tuple(Gemm(op, name, *gemm_size(rows, inputs, outputs, name), count=count) for name in PASSES)


def moved(tensors: int, launches: int, kernels: int) -> Moved:
    size = ROWS * WIDTH * 2 * LAYERS
    return Moved(size, tensors * size, launches * LAYERS, size, kernels * LAYERS)


ATTENTION = TracedAttention(
    label="blocks.*.attn", batch=64, heads=16, kv_heads=16, queries=256, keys=256, head_dim=64, value_dim=64, pairs=65536.0,
    causal=False, count=LAYERS,
)  # fmt: skip
SCAN = BatchedGemm(role="batched-gemm", label="blocks.*.scan", direction="forward", m=64, k=64, n=64, batch=4096, count=LAYERS)
TRACE = ModuleTrace(
    "Tower",
    parameters=300_000_000,
    gemms=(
        *linear("blocks.*.up", ROWS, WIDTH, 4 * WIDTH),
        *linear("blocks.*.down", ROWS, 4 * WIDTH, WIDTH),
        *linear("blocks.*.mix", ROWS, WIDTH, WIDTH),
        *linear("head", 64, WIDTH, 1000, 1),
    ),
    batched_gemms=(SCAN,),
    convolutions=(Convolution(role="convolution", label="patches", direction="forward", flops=10**10, bytes_moved=10**8),),
    masks={},
    attentions=(ATTENTION,),
    others=(
        OtherWork("blocks.*.norm", "norm", moved(4, 5, 1), moved(6, 8, 2)),
        OtherWork("(loss)", "loss", Moved(1, 1e6, 2, 1e6, 1), Moved(1, 1e6, 2, 1e6, 1)),
    ),
    linear_paths=("blocks.*.up", "blocks.*.down", "head"),
    trainable=300_000_000,
    saved_bytes=8 * 10**9,
    largest_saved_bytes=10**8,
    has_loss=True,
    inputs="64 x 3 x 224 x 224",
    samples=64,
)
