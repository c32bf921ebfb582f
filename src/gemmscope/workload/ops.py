"""The operations of one training step on one rank, each with its FLOPs and bytes, forward and backward.

Conventions, the same for every op:

* FLOPs: a multiply and an add are two. Attention counts only the pairs of positions that its mask allows, and its backward
  pass counts the four gradient GEMMs (kernels that recompute the scores run a fifth).
* Bytes: each operand is read once and each result written once, in bf16, with nothing fused: the minimum traffic of the op alone.
* `count` is how often one micro-batch runs the op (the optimizer: how often one step does). `forward_runs` is 2 where the
  forward pass is recomputed during backward; less where it is in a share of the layers.
* `copies` > 1 marks replicated work: that many ranks of the tensor-parallel group run the same op on the same data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field

from gemmscope import roles

Pass = Literal["fprop", "dgrad", "wgrad"]
TensorName = Literal["X", "W", "dY"]
OPERANDS: Mapping[Pass, tuple[TensorName, TensorName]] = {"fprop": ("W", "X"), "dgrad": ("W", "dY"), "wgrad": ("X", "dY")}
"""The two tensors that each pass multiplies, in the order of a recipe's `operands`."""
COLUMNWISE = {("W", "dgrad"), ("X", "wgrad"), ("dY", "wgrad")}
"""Where the dimension that a pass reduces is the tensor's first one: columns of the tensor are rows of the operand."""
PASSES: tuple[Pass, ...] = ("fprop", "dgrad", "wgrad")

Direction = Literal["forward", "backward"]
Size = TypeVar("Size")  # a number, or an array of them
Counted = TypeVar("Counted", bound="Gemm | Op")

ADAPTERS = ("lora-a", "lora-b")  # their roles
ELEMENT_BYTES = 2  # bf16
FP32_BYTES = 4

# Fused AdamW on bf16 parameters and states: reads and writes the parameter and both moments, reads the gradient.
OPTIMIZER_BYTES_PER_PARAMETER = 7 * ELEMENT_BYTES
OPTIMIZER_FLOPS_PER_PARAMETER = 12


@dataclass(frozen=True)
class Work:
    """FLOPs and bytes. Can be added and scaled."""

    flops: float = 0
    bytes_moved: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes_moved + other.bytes_moved)

    def times(self, factor: float) -> Work:
        return Work(self.flops * factor, self.bytes_moved * factor)


@dataclass(frozen=True)
class Gemm:
    """One GEMM of a linear layer, M x K x N. Of a grouped GEMM, M (in wgrad K) is the sum over the groups."""

    op: str
    pass_name: Annotated[Pass, Field(alias="pass")]
    m: int
    k: int
    n: int
    groups: int = 1
    count: int = 1

    @property
    def flops(self) -> int:
        """The FLOPs of one execution."""
        return 2 * self.m * self.k * self.n

    @property
    def shape(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


def gemm_size(tokens: Size, inputs: Size, outputs: Size, pass_name: Pass) -> tuple[Size, Size, Size]:
    """M, K and N of one pass of a linear: fprop X·W, dgrad dY·Wᵀ, wgrad Xᵀ·dY. Sizes may be arrays.

    It is its own inverse: from M, K and N of a pass, it gives tokens, input and output features of the linear.

    >>> gemm_size(512, 64, 32, "dgrad"), gemm_size(512, 64, 32, "wgrad"), gemm_size(64, 512, 32, "wgrad")
    ((512, 32, 64), (64, 512, 32), (512, 64, 32))
    """
    if pass_name == "dgrad":
        return tokens, outputs, inputs
    return (inputs, tokens, outputs) if pass_name == "wgrad" else (tokens, inputs, outputs)


ROUTERS = ("router", "gate")  # what modules call the linear that chooses experts
SMALLEST = 128  # features: with fewer, a cast costs more than the GEMM gains


def why_high_precision(path: str, inputs: int, outputs: int) -> str:
    """Why a linear of a live module stays in BF16 whatever the recipe, as in frameworks; empty if it does not.

    >>> why_high_precision("layers.*.mlp.gate", 1024, 512), why_high_precision("layers.*.up_proj", 1024, 4096)
    ('a router', '')
    """
    if path.rpartition(".")[2] in ROUTERS:
        return "a router"
    return f"fewer than {SMALLEST} features" if min(inputs, outputs) < SMALLEST else ""


def with_counts(counts: Mapping[Counted, int]) -> tuple[Counted, ...]:
    """GEMMs or operations that were counted, as a list in which each has its `count`."""
    return tuple(replace(item, count=count) for item, count in counts.items())


@dataclass(frozen=True, kw_only=True)
class Op:
    """The common part of all operations. `role`: what it is, a key of `roles.toml`; one that is not there raises. `section`:
    where in the model it is (the embedding, a kind of layer, the head)."""

    kind: ClassVar[str]
    role: str
    label: str = ""  # what people call it, if not by the name of its role: the path of a traced module
    count: int = 1
    section: str = ""
    forward_runs: float = 1
    copies: int = 1
    parameters: int = 0  # of this rank, for one of the `count` instances
    shares_weights: bool = False  # all instances use the same weights
    frozen: bool = False  # its parameters are not trained

    def __post_init__(self) -> None:
        roles.role(self.role)

    @property
    def facts(self) -> roles.Role:
        """What code needs to know about its role."""
        return roles.role(self.role)

    @property
    def name(self) -> str:
        """What people call it. No code looks at this."""
        return self.label or self.facts.name

    @property
    def key(self) -> str:
        """What identifies it in a mix: its role, or the module that was traced."""
        return self.label or self.role

    def forward(self) -> Work:
        """One forward execution."""
        raise NotImplementedError

    def backward(self) -> Work:
        """One backward execution; most operations have one."""
        return Work()

    def kept_bytes(self) -> float:
        """What one execution keeps for backward. Not asked of linears: their inputs are counted once for all that read them."""
        raise NotImplementedError(f"{type(self).__name__} must say what it keeps for backward: add kept_bytes() to it")

    @property
    def all_parameters(self) -> int:
        """The parameters of this rank for all instances."""
        return self.parameters * (1 if self.shares_weights else self.count)

    @property
    def trained_parameters(self) -> int:
        return 0 if self.frozen else self.all_parameters

    def total(self) -> Work:
        """The work of this op in one micro-batch (the optimizer: in one step)."""
        return (self.forward().times(self.forward_runs) + self.backward()).times(self.count)


@dataclass(frozen=True, kw_only=True)
class Linear(Op):
    """Y = X W: three GEMMs in training. X is [tokens, inputs], W [inputs, outputs], dY [tokens, outputs].

    >>> qkv = Linear(role="qkv-proj", tokens=15872, inputs=4096, outputs=12288)
    >>> [gemm.shape for gemm in qkv.gemms()]
    ['15872x4096x12288', '15872x12288x4096', '4096x15872x12288']
    """

    kind: ClassVar[str] = "linear"
    tokens: int
    inputs: int
    outputs: int
    padding: int = 0  # outputs, over all ranks, that are padding of the vocabulary
    passes: tuple[Pass, ...] = PASSES  # fewer where a gradient is not needed
    beside: str = ""  # of an adapter, the role of the linear that it is added to

    @property
    def groups(self) -> int:
        return 1

    @property
    def block(self) -> str:
        """The block of a layer that it belongs to."""
        return roles.role(self.beside or self.role).block

    @property
    def tensor(self) -> str:
        """The tensor that it reads, which linears that read the same one keep once; an adapter's A reads that of its linear."""
        return self.reader.reads or (self.beside if self.role == ADAPTERS[0] else self.key)

    @property
    def reader(self) -> roles.Role:
        """The facts that say what it reads."""
        return roles.role(self.beside) if self.role == ADAPTERS[0] else self.facts

    def running(self, *passes: Pass) -> Linear:
        """The same, with no other passes than these."""
        return replace(self, passes=tuple(name for name in self.passes if name in passes))

    @property
    def quantized(self) -> bool:
        """Whether recipes quantize it; else frameworks leave it in BF16 whatever the recipe."""
        return not self.facts.stays_high

    def gemms(self) -> Iterator[Gemm]:
        """The three passes; fprop as often as forward runs."""
        for name in self.passes:
            m, k, n = gemm_size(self.tokens, self.inputs, self.outputs, name)
            yield Gemm(self.name, name, m, k, n, self.groups, round(self.count * (self.forward_runs if name == "fprop" else 1)))

    def _one_gemm(self) -> Work:
        """Each of the three reads two of X, W and dY, and writes a third tensor: the same traffic."""
        elements = self.tokens * self.inputs + self.tokens * self.outputs + self.groups * self.inputs * self.outputs
        return Work(2 * self.tokens * self.inputs * self.outputs, elements * ELEMENT_BYTES)

    def forward(self) -> Work:
        return self._one_gemm()

    def backward(self) -> Work:
        return self._one_gemm().times(len(self.passes) - 1)


@dataclass(frozen=True, kw_only=True)
class GroupedLinear(Linear):
    """Several weights, such as the experts of one layer: `rows[i]` tokens go to weight i. `tokens` is their sum."""

    kind: ClassVar[str] = "grouped linear"
    rows: tuple[int, ...] = field(default=())

    @property
    def groups(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, kw_only=True)
class Attention(Op):
    """Scaled-dot-product attention: `batch` sequences, `pairs` (query, key) pairs allowed by the mask in each head of each."""

    kind: ClassVar[str] = "attention"
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    pairs: float
    causal: bool
    window: int | None = None
    values_are_keys: bool = False  # one tensor is read as both
    shares_kv: bool = False  # keys and values are kept for backward by another layer

    def forward(self) -> Work:
        """Scores and context. Flash attention reads Q, K and V once and writes the output."""
        flops = 2 * self.batch * self.heads * self.pairs * (self.head_dim + self.value_dim)
        return Work(flops, self._tensor_elements() * ELEMENT_BYTES)

    def backward(self) -> Work:
        """Gradients of Q, K and V: four GEMMs. Reads Q, K, V, O, dO and writes dQ, dK, dV."""
        output = self.batch * self.queries * self.heads * self.value_dim
        return Work(2 * self.forward().flops, (2 * self._tensor_elements() + output) * ELEMENT_BYTES)

    def _tensor_elements(self) -> int:
        per_query = self.heads * (self.head_dim + self.value_dim)
        per_key = self.kv_heads * (self.head_dim + (0 if self.values_are_keys else self.value_dim))
        return self.batch * (self.queries * per_query + self.keys * per_key)

    def batched_gemms(self) -> Iterator[tuple[Direction, int, int, int, int]]:
        """(direction, m, k, n, batch) of the batched GEMMs of unfused attention, which applies the mask afterwards."""
        q, k, d, v = self.queries, self.keys, self.head_dim, self.value_dim
        yield from (("forward", *shape, self.batch * self.heads) for shape in ((q, d, k), (q, k, v)))
        yield from (("backward", *shape, self.batch * self.heads) for shape in ((q, k, d), (d, q, k), (q, v, k), (k, q, v)))


@dataclass(frozen=True, kw_only=True)
class OneWay(Op):
    """Work that a trace shows in one direction only."""

    direction: Direction

    def work(self) -> Work:
        raise NotImplementedError

    def forward(self) -> Work:
        return self.work() if self.direction == "forward" else Work()

    def backward(self) -> Work:
        return self.work() if self.direction == "backward" else Work()


@dataclass(frozen=True, kw_only=True)
class BatchedGemm(OneWay):
    """A batched GEMM of two activations, as a trace shows it."""

    kind: ClassVar[str] = "batched GEMM"
    m: int
    k: int
    n: int
    batch: int

    def work(self) -> Work:
        elements = self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)
        return Work(2 * self.batch * self.m * self.k * self.n, elements * ELEMENT_BYTES)


@dataclass(frozen=True, kw_only=True)
class Convolution(OneWay):
    """One convolution, as a trace shows it. It reads two of input, filters and output, and writes the third."""

    kind: ClassVar[str] = "convolution"
    flops: int
    bytes_moved: int = 0

    def work(self) -> Work:
        return Work(self.flops, self.bytes_moved)


@dataclass(frozen=True, kw_only=True)
class Elementwise(Op):
    """Memory-bound work: norms, activations, residual adds, rotary positions, moving tokens to experts.

    `forward_tensors` and `backward_tensors` are how many tensors of rows x width are read or written, `kept_tensors` how many are
    kept for backward that no other op keeps.
    """

    kind: ClassVar[str] = "elementwise"
    rows: int
    width: int
    forward_tensors: float
    backward_tensors: float
    forward_flops: float = 1
    backward_flops: float = 1
    kept_tensors: float = 0

    def forward(self) -> Work:
        """Reads the inputs, writes the output."""
        elements = self.rows * self.width
        return Work(self.forward_flops * elements, self.forward_tensors * elements * ELEMENT_BYTES)

    def backward(self) -> Work:
        """Reads the saved tensors and the output's gradient, writes the input's gradient."""
        elements = self.rows * self.width
        return Work(self.backward_flops * elements, self.backward_tensors * elements * ELEMENT_BYTES)

    def kept_bytes(self) -> float:
        return self.kept_tensors * self.rows * self.width * ELEMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class Norm(Elementwise):
    """RMSNorm or LayerNorm over `width`: forward reads x, writes y; backward reads x and dy, writes dx."""

    kind: ClassVar[str] = "norm"
    forward_tensors: float = 2
    backward_tensors: float = 3
    forward_flops: float = 4
    backward_flops: float = 8
    kept_tensors: float = 1


@dataclass(frozen=True, kw_only=True)
class Activation(Elementwise):
    """The MLP's non-linearity. Plain: x → y. Gated: (gate, up) → y."""

    kind: ClassVar[str] = "activation"
    forward_tensors: float = 2
    backward_tensors: float = 3
    forward_flops: float = 8
    backward_flops: float = 12

    def kept_bytes(self) -> float:
        """All that it reads."""
        return (self.forward_tensors - 1) * self.rows * self.width * ELEMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class Embedding(Op):
    """Looks up one row per token; the backward pass adds the rows into a gradient of the whole table."""

    kind: ClassVar[str] = "embedding"
    tokens: int
    vocab: int
    width: int

    def forward(self) -> Work:
        """Reads one row per token and writes it."""
        return Work(0, 2 * self.tokens * self.width * ELEMENT_BYTES)

    def backward(self) -> Work:
        """Reads the gradient rows, writes the table's gradient."""
        if self.frozen:
            return Work()
        elements = self.tokens * self.width + self.vocab * self.width
        return Work(self.tokens * self.width, elements * ELEMENT_BYTES)

    def kept_bytes(self) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Loss(Elementwise):
    """Cross entropy over the vocabulary: forward reads the logits; backward reads them again and writes their gradient."""

    kind: ClassVar[str] = "loss"
    forward_tensors: float = 1
    backward_tensors: float = 2
    forward_flops: float = 5
    backward_flops: float = 3


@dataclass(frozen=True, kw_only=True)
class Optimizer(Op):
    """Fused AdamW over this rank's parameters, once per step."""

    kind: ClassVar[str] = "optimizer"
    updated: int

    def forward(self) -> Work:
        return Work(OPTIMIZER_FLOPS_PER_PARAMETER * self.updated, OPTIMIZER_BYTES_PER_PARAMETER * self.updated)
