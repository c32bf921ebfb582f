"""Remembered shapes of outputs: the same trace as from operators that run every time."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="tracing needs torch")
transformers = pytest.importorskip("transformers", reason="traces models of transformers")

from gemmscope.workload import trace_worker  # noqa: E402
from gemmscope.workload.interception import RememberedShapes  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers
aten = torch.ops.aten


class Counted:
    """An operator that counts its calls."""

    def __init__(self, operator: Any) -> None:
        self.operator, self._schema, self.calls = operator, operator._schema, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.operator(*args, **kwargs)


def meta(*shape: int, **options: Any) -> Any:
    return torch.empty(shape, device="meta", **options)


def facts(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type


@pytest.mark.parametrize(
    ("operator", "args", "kwargs"),
    [
        (aten.add.Tensor, (meta(3, 1, 5), meta(4, 1)), {"alpha": 2}),
        (aten.mul.Tensor, (meta(2, 3, dtype=torch.bfloat16), meta(2, 3)), {}),
        (aten.mm.default, (meta(8, 4).t(), meta(8, 6)), {}),
        (aten.sum.dim_IntList, (meta(2, 3, 4), [0, 2], True), {}),
        (aten.cat.default, ([meta(2, 3), meta(4, 3)],), {}),
        (aten.native_layer_norm.default, (meta(2, 8), [8], meta(8), None, 1e-5), {}),
        (aten._to_copy.default, (meta(2, 4, 3, 3),), {"dtype": torch.float16, "memory_format": torch.channels_last}),
        (aten.arange.default, (7,), {"device": torch.device("meta")}),
    ],
)
def test_outputs_are_those_of_the_operator(operator: Any, args: Any, kwargs: Any) -> None:
    remembered, counted = RememberedShapes(), Counted(operator)
    expected = operator(*args, **kwargs)
    for _ in range(3):
        output = remembered.run(counted, args, kwargs)
        pairs = zip(output, expected, strict=True) if isinstance(expected, tuple) else [(output, expected)]
        assert all(facts(one) == facts(other) for one, other in pairs)
        assert type(output) is type(expected)
    assert counted.calls == 1


def test_types_of_numbers_count() -> None:
    remembered, whole = RememberedShapes(), meta(4, dtype=torch.int64)
    types = [remembered.run(aten.add.Scalar, (whole, number), {}).dtype for number in (1, 1.0, True, 1)]
    assert types == [torch.int64, torch.float32, torch.int64, torch.int64]


def test_every_call_has_a_tensor_of_its_own() -> None:
    remembered, given = RememberedShapes(), meta(4)
    outputs = [remembered.run(aten.neg.default, (given,), {}) for _ in range(3)]
    assert len({output.untyped_storage()._cdata for output in outputs}) == 3


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (aten.view.default, (meta(2, 6), [3, 4])),
        (aten._unsafe_view.default, (meta(2, 6), [3, 4])),  # its schema does not say that it is a view
        (aten.add_.Tensor, (meta(4), meta(4))),
        (aten.neg.default, (torch.ones(4),)),  # has values
        (aten.mul.Tensor, (torch.nn.Buffer(meta(4)).as_subclass(type("Own", (torch.Tensor,), {})), 2)),
    ],
)
def test_what_is_not_remembered(operator: Any, args: Any) -> None:
    remembered, counted = RememberedShapes(), Counted(operator)
    for _ in range(2):
        remembered.run(counted, args, {})
    assert counted.calls == 2


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "mamba2", "gpt2", "bert", "t5"])
@pytest.mark.parametrize("as_trained", [True, False])
def test_traces_are_the_same(model_type: str, as_trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last byte: GEMMs, attention, what runs between them, what is saved for backward."""
    own = {
        "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 2},
        "t5": {"d_model": 64, "d_ff": 96, "num_heads": 4, "num_layers": 2},
    }
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    config = {"model_type": model_type, **sizes, "num_hidden_layers": 3, "n_layer": 3, **own.get(model_type, {})}
    request = {"config": config, "micro_batch": 2, "sequence": 16, "as_trained": as_trained}
    remembered = trace_worker.answer(dict(request))
    monkeypatch.setattr(RememberedShapes, "run", lambda self, operator, args, kwargs: operator(*args, **kwargs))
    assert trace_worker.answer(dict(request)) == remembered
