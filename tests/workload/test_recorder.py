"""The recorder on small modules whose GEMMs are known."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest

from gemmscope.workload.trace import ModuleTrace, as_workload
from support.reading import codes

torch = pytest.importorskip("torch", reason="tracing needs torch")
trace_worker = pytest.importorskip("gemmscope.workload.trace_worker", reason="tracing needs torch")
factory = pytest.importorskip("gemmscope.workload.factory", reason="tracing needs torch")
prune = pytest.importorskip("torch.nn.utils.prune", reason="tracing needs torch")

nn = torch.nn
Key = tuple[str, int, int, int, int]


def record(module: Any, *inputs: Any) -> ModuleTrace:
    factory.move_to_meta(module)
    return trace_worker.trace_built(factory.Built(module, tuple(value.to("meta") for value in inputs), {}))


def gemms(result: ModuleTrace) -> Counter[Key]:
    counts: Counter[Key] = Counter()
    for gemm in result.gemms:
        counts[(gemm.pass_name, gemm.m, gemm.k, gemm.n, gemm.groups)] += gemm.count
    return counts


def three(tokens: int, inputs: int, outputs: int, groups: int = 1, count: int = 1) -> Counter[Key]:
    return Counter(
        {
            ("fprop", tokens, inputs, outputs, groups): count,
            ("dgrad", tokens, outputs, inputs, groups): count,
            ("wgrad", inputs, tokens, outputs, groups): count,
        }
    )


class Wrapped(nn.Module):
    """An embedding in front, so that inputs of the layer require a gradient as they do in training."""

    def __init__(self, layer: Any, width: int = 8) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(10, width), layer

    def forward(self, tokens: Any) -> Any:
        return self.layer(self.embedding(tokens))


TOKENS = torch.zeros((2, 3), dtype=torch.long)


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias: bool) -> None:
    assert gemms(record(Wrapped(nn.Linear(8, 5, bias=bias)), TOKENS)) == three(6, 8, 5)


def test_module_path_folds_layer_numbers() -> None:
    result = record(Wrapped(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), TOKENS)
    assert {gemm.op for gemm in result.gemms} == {"layer.*"}
    assert gemms(result) == three(6, 8, 8, count=2)


def test_first_layer_of_float_inputs_has_no_dgrad() -> None:
    counts = gemms(record(nn.Linear(8, 5), torch.zeros(6, 8)))
    assert counts == Counter({("fprop", 6, 8, 5, 1): 1, ("wgrad", 8, 6, 5, 1): 1})


def test_frozen_weight_has_no_wgrad() -> None:
    layer = nn.Linear(8, 5)
    layer.weight.requires_grad_(False)
    counts = gemms(record(Wrapped(layer), TOKENS))
    assert counts == Counter({("fprop", 6, 8, 5, 1): 1, ("dgrad", 6, 5, 8, 1): 1})


class Transposed(nn.Module):
    """GPT-2's Conv1D: the weight is stored [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(8, 5)), nn.Parameter(torch.zeros(5))

    def forward(self, x: Any) -> Any:
        return torch.addmm(self.bias, x.view(-1, 8), self.weight)


class WeightOnTheLeft(Transposed):
    def forward(self, x: Any) -> Any:
        return torch.mm(self.weight.t(), x.view(-1, 8).t())


class Cast(Transposed):
    """The router of some MoE models: computed in float32 from a weight in bfloat16."""

    def forward(self, x: Any) -> Any:
        return x.float() @ self.weight.to(torch.float64).float()


class Scaled(Transposed):
    """A weight that a buffer masks and a number scales."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones_like(self.weight))

    def forward(self, x: Any) -> Any:
        return x @ (self.weight * self.mask / self.weight.norm())


@pytest.mark.parametrize("layer", [Transposed, WeightOnTheLeft, Cast, Scaled])
def test_any_side_any_storage(layer: Any) -> None:
    assert gemms(record(Wrapped(layer()), TOKENS)) == three(6, 8, 5)


PARTLY_COMPUTED: list[tuple[Any, set[str]]] = [
    (nn.utils.parametrizations.spectral_norm(nn.Linear(8, 5)), set()),
    (nn.utils.parametrizations.weight_norm(nn.Linear(8, 5)), set()),
    (prune.identity(nn.Linear(8, 5), "weight"), set()),
    (nn.Linear(8, 5), {"layer"}),
]


@pytest.mark.parametrize(("layer", "low"), PARTLY_COMPUTED, ids=["spectral norm", "weight norm", "pruned", "plain"])
def test_a_weight_that_is_computed_is_a_weight_that_stays_in_high_precision(layer: Any, low: set[str]) -> None:
    """A framework that swaps the linear for another one would lose how its weight is computed."""
    result = record(Wrapped(layer), TOKENS)
    assert three(6, 8, 5) <= gemms(result)
    assert not [gemm for gemm in result.batched_gemms if gemm.name == "layer"]
    assert set(result.linear_paths) == low


class BatchedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8, 5))

    def forward(self, x: Any) -> Any:
        return torch.bmm(x.view(1, -1, 8).expand(4, -1, -1), self.weight)


class GroupedExperts(BatchedExperts):
    def forward(self, x: Any) -> Any:
        offsets = torch.zeros(4, dtype=torch.int32, device=x.device)
        return torch.nn.functional.grouped_mm(x.view(-1, 8), self.weight, offs=offsets)


@pytest.mark.parametrize(("layer", "tokens"), [(BatchedExperts, 24), (GroupedExperts, 6)])
def test_experts(layer: Any, tokens: int) -> None:
    """Rows are summed over the groups."""
    assert gemms(record(Wrapped(layer()), TOKENS)) == three(tokens, 8, 5, groups=4)


class SelfAttention(nn.Module):
    """Q, K and V are the same tensor cut in three, so they share a storage."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv, self.fused = nn.Linear(8, 24, bias=False), fused

    def forward(self, x: Any) -> Any:
        q, k, v = (part.view(2, 3, 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        if self.fused:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


@pytest.mark.parametrize("fused", [True, False])
def test_attention_is_the_same_fused_or_not(fused: bool) -> None:
    result = record(Wrapped(SelfAttention(fused)), TOKENS)
    assert gemms(result) == three(6, 8, 24)
    batched: Counter[Key] = Counter()
    for gemm in result.batched_gemms:
        batched[(gemm.direction, gemm.m, gemm.k, gemm.n, gemm.batch)] += gemm.count
    batched.update(gemm for op in result.attentions for gemm in op.batched_gemms())
    assert batched == Counter(
        {
            ("forward", 3, 4, 3, 4): 1,
            ("forward", 3, 3, 4, 4): 1,
            ("backward", 3, 3, 4, 4): 2,
            ("backward", 4, 3, 3, 4): 1,
            ("backward", 3, 4, 3, 4): 1,
        }
    )


class Masked(nn.Module):
    """Attention of 3 queries over 3 (or 5) keys, called in different ways."""

    def __init__(self, keys: int = 3, **how: Any) -> None:
        super().__init__()
        self.keys, self.how = keys, how

    def forward(self, x: Any) -> Any:
        q = x.view(2, 3, 2, 4).transpose(1, 2)
        k = q[:, :, :1].expand(-1, -1, self.keys, -1)
        how = {key: torch.ones(3, self.keys, device=x.device) if value == "tensor" else value for key, value in self.how.items()}
        return torch.nn.functional.scaled_dot_product_attention(q, k, k, **how)


class TorchsOwn(nn.Module):
    """nn.MultiheadAttention, which calls the fused attention somewhere inside."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.attention, self.causal = nn.MultiheadAttention(8, 2, batch_first=True), causal

    def forward(self, x: Any) -> Any:
        mask = torch.ones(3, 3, device=x.device) if self.causal else None
        return self.attention(x, x, x, need_weights=False, attn_mask=mask, is_causal=self.causal)[0]


@pytest.mark.parametrize(
    ("layer", "visible", "mask"),
    [
        (Masked(), "1", "none"),
        (Masked(is_causal=True), "2/3", "causal"),  # 6 of 9 pairs
        (Masked(keys=5, is_causal=True), "2/5", "causal"),  # 6 of 15: the first query sees the first key
        (Masked(keys=2, is_causal=True), "5/6", "causal"),
        (Masked(attn_mask="tensor"), "1", "explicit"),
        (TorchsOwn(causal=True), "2/3", "causal"),
        (TorchsOwn(causal=False), "1", "none"),
    ],
)
def test_masks_of_attention(layer: Any, visible: str, mask: str) -> None:
    result = record(Wrapped(layer), TOKENS)
    [op] = result.attentions
    assert (op.count, op.forward_runs, op.backward_runs) == (1, 1, 1)
    assert op.pairs == float(Fraction(visible) * op.queries * op.keys)
    assert not result.batched_gemms
    assert result.masks == {mask: 1}


def test_causal_attention_counts_what_the_mask_lets_through() -> None:
    causal, full, explicit = (
        as_workload(record(Wrapped(Masked(**how)), TOKENS)) for how in ({"is_causal": True}, {}, {"attn_mask": "tensor"})
    )
    pairs = 3 * 4 // 2
    flops = [sum(op.total().flops for op in workload.ops if op.kind == "attention") for workload in (causal, full, explicit)]
    assert flops[0] == 6 * 2 * 2 * 2 * pairs * 4  # GEMMs, FLOPs, batch, heads, ., head size
    assert flops[1] == flops[2] == 6 * 2 * 2 * 2 * 9 * 4
    assert ["explicit-masks" in codes(workload) for workload in (causal, full, explicit)] == [False, False, True]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU()), reentrant

    def forward(self, x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_forward_again(reentrant: bool) -> None:
    counts = gemms(record(Wrapped(Checkpointed(reentrant)), TOKENS))
    assert counts == three(6, 8, 8, count=2) + Counter({("fprop", 6, 8, 8, 1): 2})


class CheckpointedAttention(Checkpointed):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.inner = nn.Sequential(SelfAttention(fused=True), nn.Linear(4, 4), nn.GELU())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_attention_is_attention(reentrant: bool) -> None:
    """Also inside the backward pass, attention is one call of a fused kernel."""
    result = record(Wrapped(CheckpointedAttention(reentrant)), TOKENS)
    assert [(op.count, op.forward_runs, op.backward_runs) for op in result.attentions] == [(1, 2, 1)]
    assert not result.batched_gemms


class Fused(torch.autograd.Function):
    """A linear written by hand, as kernels of one's own are."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class HandWritten(Transposed):
    def forward(self, x: Any) -> Any:
        return Fused.apply(x.view(-1, 8), self.weight)


def test_custom_autograd_function() -> None:
    assert gemms(record(Wrapped(HandWritten()), TOKENS)) == three(6, 8, 5)


def test_convolutions_have_the_name_of_their_module() -> None:
    result = record(nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.Conv1d(6, 2, 1)), torch.zeros(2, 4, 10))
    assert result.gemms == ()
    flops = {(op.name, op.direction): op.flops * op.count for op in result.convolutions}
    first, second = 2 * (2 * 6 * 10) * (4 * 3), 2 * (2 * 2 * 10) * 6
    assert flops[("*", "forward")] in (first, second)  # both map to one path, and differ in their FLOPs
    assert sum(op.flops for op in result.convolutions if op.direction == "forward") == first + second
    assert sum(op.flops for op in result.convolutions if op.direction == "backward") == first + 2 * second


def test_tied_weights_count_once_as_parameters() -> None:
    module = Wrapped(nn.Linear(8, 10, bias=False))
    module.layer.weight = module.embedding.weight
    result = record(module, TOKENS)
    assert result.parameters == 80
    assert gemms(result) == three(6, 8, 10)


def test_nothing_to_differentiate() -> None:
    class Constant(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.float()

    with pytest.raises(trace_worker.TraceError, match="no tensor that requires a gradient"):
        record(Constant(), TOKENS)


class Heads(nn.Module):
    """Attention with these sizes of queries and of keys, which are its values too."""

    def __init__(self, queries: tuple[int, ...], keys: tuple[int, ...], *, grouped: bool) -> None:
        super().__init__()
        self.sizes, self.grouped = (queries, keys), grouped

    def forward(self, x: Any) -> Any:
        query, key = (x.sum() * torch.ones(sizes, device=x.device) for sizes in self.sizes)
        return torch.nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=self.grouped)


@pytest.mark.parametrize(
    ("queries", "keys", "grouped"),
    [
        ((1, 4, 3, 8), (1, 4, 5, 8), False),
        ((1, 4, 3, 8), (1, 1, 5, 8), False),
        ((1, 4, 3, 8), (1, 2, 5, 8), True),
        ((1, 4, 3, 8), (1, 2, 5, 8), False),
        ((1, 4, 3, 8), (1, 3, 5, 8), True),
        ((1, 4, 3, 8), (1, 4, 5, 6), False),
    ],
)
def test_attention_that_torch_refuses_is_refused(queries: tuple[int, ...], keys: tuple[int, ...], grouped: bool) -> None:
    """The function that stands for the fused kernel accepts what the real one accepts on the CPU."""
    module = Heads(queries, keys, grouped=grouped)
    try:
        module(torch.ones(2))
    except RuntimeError:
        with pytest.raises(RuntimeError, match="do not fit each other"):
            record(Wrapped(module), TOKENS)
    else:
        assert record(Wrapped(module), TOKENS).attentions
