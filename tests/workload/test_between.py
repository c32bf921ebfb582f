"""What is recorded between GEMMs: kinds, bytes, attention, and what backward needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemmscope.workload.trace import ModuleTrace, as_workload
from gemmscope.workload.traced_ops import Between, OtherWork, TracedAttention
from support.reading import codes

torch = pytest.importorskip("torch", reason="tracing needs torch")
trace_worker = pytest.importorskip("gemmscope.workload.trace_worker", reason="tracing needs torch")
factory = pytest.importorskip("gemmscope.workload.factory", reason="tracing needs torch")

nn, F = torch.nn, torch.nn.functional
ROWS, WIDTH = 6, 8
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
TENSOR = ROWS * WIDTH * 2  # bytes in BF16


def record(module: Any, *shapes: tuple[int, ...], dtype: Any = None, loss: Any = None) -> ModuleTrace:
    factory.move_to_meta(module)
    inputs = tuple(torch.empty(shape, device="meta", dtype=dtype, requires_grad=True) for shape in shapes)
    return trace_worker.trace_built(factory.Built(module, inputs, {}, loss))


def other(trace: ModuleTrace, kind: str) -> OtherWork:
    [work] = [work for work in trace.others if work.kind == kind]
    return work


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_reads_and_writes_its_rows(dtype: Any) -> None:
    """FP32 parameters stand for BF16 ones: a factory need not convert its module."""
    trace = record(nn.LayerNorm(WIDTH, bias=False).to(dtype), (ROWS, WIDTH), dtype=dtype)
    work, statistics = other(trace, "norm"), 2 * ROWS * (2 if dtype == torch.float32 else 4)
    assert work.forward.launches == work.backward.launches == 1
    assert work.forward.bytes_moved == 2 * TENSOR + WIDTH * 2 + statistics
    assert work.forward.flops == 4 * ROWS * WIDTH


def test_activations_and_norms_by_their_module() -> None:
    class Rms(nn.Module):
        """Written out, as many models have it; its name says what it is."""

    class MyNorm(Rms):
        def forward(self, x: Any) -> Any:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    trace = record(nn.Sequential(MyNorm(), nn.Linear(WIDTH, WIDTH), nn.SiLU()), (ROWS, WIDTH))
    assert {(work.path, work.kind) for work in trace.others} >= {("*", "norm"), ("*", "activation")}
    norm = other(trace, "norm")
    assert (norm.forward.launches, norm.forward.kernels) == (5, 1)
    assert norm.forward.fused_bytes < norm.forward.bytes_moved / 2


class Attended(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.qkv = how, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).view(2, -1, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        if self.how == "fused":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = q @ k.transpose(-2, -1)
        weights = torch.softmax(scores * 0.5, dim=-1) if self.how == "softmax" else scores * 0.5
        return weights @ v


@pytest.mark.parametrize(("how", "roles"), [("fused", set()), ("softmax", {"attention-gemm"}), ("recurrence", {"batched-gemm"})])
def test_only_what_goes_through_a_softmax_is_attention(how: str, roles: set[str]) -> None:
    trace = record(Attended(how), (2, 3, WIDTH))
    assert {gemm.role for gemm in trace.batched_gemms} == roles
    assert sum(gemm.count for gemm in trace.batched_gemms) == (0 if how == "fused" else 6)
    attentions = [op for op in as_workload(trace).ops if isinstance(op, TracedAttention)]
    assert len(attentions) == (how == "fused")
    if how == "fused":
        [op] = attentions
        assert (op.batch, op.heads, op.kv_heads, op.queries, op.keys, op.head_dim, op.pairs) == (2, 2, 2, 3, 3, 4, 6.0)


def test_the_loss_of_the_factory_is_traced() -> None:
    head = nn.Linear(WIDTH, 5)
    without = record(head, (ROWS, WIDTH))
    assert "no-loss-traced" in codes(as_workload(without))
    target = torch.zeros(ROWS, dtype=torch.long, device="meta")
    trace = record(nn.Linear(WIDTH, 5), (ROWS, WIDTH), loss=lambda output: F.cross_entropy(output, target))
    assert trace.has_loss
    assert {(work.path, work.kind) for work in trace.others if work.kind == "loss"} == {("(loss)", "loss")}
    assert other(trace, "loss").backward.launches == 2


def test_saved_tensors_are_what_backward_needs() -> None:
    """A linear keeps its input, GELU its own: each once, and no weights."""
    trace = record(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)), (ROWS, WIDTH))
    assert trace.saved_bytes == 3 * TENSOR
    assert trace.largest_saved_bytes == TENSOR
    assert trace.trainable == trace.parameters == 2 * (WIDTH * WIDTH + WIDTH)


def test_which_linears_a_recipe_can_quantize() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.matrix = nn.Linear(128, 128), nn.Parameter(torch.zeros(128, 128))
            self.gate, self.narrow = nn.Linear(128, 128), nn.Linear(128, 64)

        def forward(self, x: Any) -> Any:
            return self.narrow(self.gate(self.linear(x) @ self.matrix))

    linears = [op for op in as_workload(record(Bare(), (ROWS, 128))).ops if op.kind == "linear"]
    quantized = {op.name: op.quantized for op in linears}  # type: ignore[attr-defined]
    assert quantized == {"linear": True, "(root)": False, "gate": False, "narrow": False}


def test_weights_outside_of_linears_alone() -> None:
    """No recipe quantizes them, also if the module has no nn.Linear."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.zeros(128, 256))

        def forward(self, x: Any) -> Any:
            return x @ self.matrix

    [linear] = [op for op in as_workload(record(Bare(), (ROWS, 128))).ops if op.kind == "linear"]
    assert not linear.quantized  # type: ignore[attr-defined]


SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128}


def test_a_model_that_compares_images_with_texts() -> None:
    """CLIP is trained with both towers and their loss, not as a classifier of images."""
    pytest.importorskip("transformers")
    vision = {**SMALL, "image_size": 32, "patch_size": 8}
    config = {"model_type": "clip", "text_config": {**SMALL, "vocab_size": 64}, "vision_config": vision}
    trace = trace_worker.answer({"config": config, "micro_batch": 2, "sequence": 8, "as_trained": True})
    assert (trace.class_name, trace.has_loss) == ("CLIPModel", True)
    assert trace.inputs == "pixel_values 2 x 3 x 32 x 32, input_ids 2 x 8"
    assert {gemm.op.partition(".")[0] for gemm in trace.gemms} >= {"text_model", "vision_model"}


def test_a_config_whose_model_reads_values() -> None:
    """DETR clamps its activations if one of them is infinite. It reads images, although it has a decoder."""
    pytest.importorskip("transformers")
    backbone = {"model_type": "resnet", "out_features": ["stage4"], "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}
    layers = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 1), ("ffn_dim", 32))}
    config = {"model_type": "detr", "backbone_config": {**backbone, "embedding_size": 8}, "d_model": 32, **layers}
    config |= {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "num_queries": 4}
    trace = trace_worker.answer({"config": config, "micro_batch": 2, "sequence": None, "as_trained": True})
    assert trace.with_values
    assert trace.inputs == "pixel_values 2 x 3 x 224 x 224"


def test_convolutions_move_bytes() -> None:
    trace = record(nn.Conv1d(4, 6, 3, bias=False), (2, 4, 10))
    moved = (2 * 4 * 10 + 6 * 4 * 3 + 2 * 6 * 8) * 2
    assert [(op.direction, op.bytes_moved) for op in trace.convolutions] == [("forward", moved), ("backward", 2 * moved)]


@pytest.mark.parametrize("name", ["vit", "dit"])
def test_the_examples_of_the_documentation(name: str) -> None:
    """Fused traffic is never more than eager traffic, module by module; every operator has a kind that is known."""
    built = factory.load_factory(f"{EXAMPLES}/{name}.py:build", 2, None, "meta")
    trace = trace_worker.trace_built(built)
    ops = [op for op in as_workload(trace).ops if isinstance(op, Between)]
    assert sum(op.all_moved.fused_bytes for op in ops) < 0.9 * sum(op.total().bytes_moved for op in ops)
    assert {op.kind for op in ops} >= {"norm", "activation", "elementwise", "loss"}
    assert trace.inputs is not None
    assert trace.inputs.endswith("2 x 3 x 224 x 224" if name == "vit" else "2 x 4 x 32 x 32, 2, 2")
    assert trace.samples == 2
    assert trace.has_loss


@pytest.mark.parametrize(
    ("model_type", "result"), [("deit", "DeiTForImageClassification"), ("speecht5", "whose sizes are not in its config")]
)
def test_configs_of_types_with_several_classes_and_with_inputs_that_are_not_known(model_type: str, result: str) -> None:
    pytest.importorskip("transformers", reason="builds configs")
    request = {"config": {"model_type": model_type}, "micro_batch": 2, "sequence": None, "as_trained": True}
    try:
        answer = trace_worker.answer(request).class_name
    except trace_worker.TraceError as error:
        answer = str(error)
    assert answer.endswith(result)


def test_a_learned_bias_of_attention_has_a_gradient() -> None:
    """As T5's relative positions: the mask is read, its gradient written and summed over the batch."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(1, 2, 3, 3))

        def forward(self, x: Any) -> Any:
            q = self.linear(x).view(2, 3, 2, 4).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q, attn_mask=self.bias.expand(2, -1, -1, -1) * 2)

    trace = record(Biased(), (2, 3, WIDTH))
    [op] = trace.attentions
    assert (op.mask_bytes, op.mask_gradient) == (2 * 2 * 3 * 3 * 2, True)
    assert sum(work.backward.launches for work in trace.others) >= 3  # of the gradients of the bias and of q, k and v


def test_a_bias_that_is_not_contiguous_in_its_last_dimension() -> None:
    """As T5's relative positions in transformers 5.17: no fused kernel accepts it, and backward needs the probabilities."""

    class Biased(nn.Module):
        def __init__(self, order: tuple[int, int, int]) -> None:
            super().__init__()
            self.linear, self.order = nn.Linear(WIDTH, 2 * 8), order
            self.bias = nn.Parameter(torch.zeros([(2, 3, 3)[order.index(place)] for place in range(3)]))

        def forward(self, x: Any) -> Any:
            q = self.linear(x).view(2, 3, 2, 8).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q, attn_mask=self.bias.permute(self.order)[None])

    fused, unfused = (record(Biased(order), (2, 3, WIDTH)) for order in ((0, 1, 2), (2, 0, 1)))
    assert [op.unfused for trace in (fused, unfused) for op in trace.attentions] == [(), ("mask",)]
    assert ["attention-unfused" in codes(as_workload(trace)) for trace in (fused, unfused)] == [False, True]
    scores = 2 * 2 * 3 * 3
    assert unfused.saved_bytes - fused.saved_bytes == scores * 4


@pytest.mark.parametrize("convolution", [nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize("channels_last", [False, True])
def test_channels_last(convolution: Any, channels_last: bool) -> None:
    """A convolution keeps its channels in the last place. Then queries that are made from them are contiguous there."""
    layout = torch.channels_last if convolution is nn.Conv2d else torch.channels_last_3d

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = convolution(WIDTH, WIDTH, 3)

        def forward(self, x: Any) -> Any:
            q = self.project(x.contiguous(memory_format=layout) if channels_last else x).flatten(2).transpose(1, 2)[:, None]
            return F.scaled_dot_product_attention(q, q, q)

    image = (2, WIDTH, *[4] * (2 if convolution is nn.Conv2d else 3))
    [op] = record(Attending(), image).attentions
    assert op.unfused == (() if channels_last else ("query", "key", "value"))


@pytest.mark.parametrize(
    ("query", "key", "masked", "grouped", "expected"),
    [
        ((2, 2, 3, 8), (2, 2, 3, 8), True, False, ()),
        ((2, 2, 3, 4), (2, 2, 3, 4), False, False, ()),  # flash kernels pad the head size
        ((2, 2, 3, 8), (2, 1, 3, 8), False, True, ()),
        ((2, 2, 3, 8), (2, 1, 3, 8), False, False, ("sizes",)),  # one head of keys that is broadcast, as in Falcon-7B
        ((2, 2, 3, 8), (1, 2, 3, 8), False, False, ("sizes",)),
        ((2, 3, 8), (2, 3, 8), False, False, ("sizes",)),
        ((2, 2, 3, 4), (2, 2, 3, 4), True, False, ("sizes",)),
    ],
)
def test_sizes_that_no_fused_kernel_accepts(
    query: tuple[int, ...], key: tuple[int, ...], masked: bool, grouped: bool, expected: tuple[str, ...]
) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Parameter(torch.zeros(query)), nn.Parameter(torch.zeros(key))

        def forward(self, mask: Any) -> Any:
            keys = self.key * 2
            return F.scaled_dot_product_attention(
                self.query * 2, keys, keys, attn_mask=mask if masked else None, enable_gqa=grouped
            )

    trace = record(Attending(), (3, 3))
    assert [op.unfused for op in trace.attentions] == [expected]
    assert ("attention-unfused-sizes" in codes(as_workload(trace))) == bool(expected)
