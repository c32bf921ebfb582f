"""Model FLOPs of traced modules: those that PyTorch's own counter counts, or that follow from the sizes."""

from __future__ import annotations

from typing import Any

import pytest

from gemmscope.model.spec import RunSpec
from gemmscope.workload.summary import totals
from gemmscope.workload.trace import as_workload

torch = pytest.importorskip("torch", reason="tracing needs torch")
trace_worker = pytest.importorskip("gemmscope.workload.trace_worker", reason="tracing needs torch")
factory = pytest.importorskip("gemmscope.workload.factory", reason="tracing needs torch")
flop_counter = pytest.importorskip("torch.utils.flop_counter", reason="tracing needs torch")

nn, functional = torch.nn, torch.nn.functional


class SmallUNet(nn.Module):
    """Convolutions down and up, with a connection past them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, 1)
        self.up, self.last = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(32, 3, 1)

    def forward(self, image: Any) -> Any:
        first = functional.silu(self.first(image))
        return self.last(torch.cat([first, self.up(functional.silu(self.down(first)))], 1))


class Compared(nn.Module):
    """Images and texts compared with each other, as in CLIP: a product, an einsum, and a dot product of each pair."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.scale = nn.Linear(32, 64), nn.Linear(16, 64), nn.Parameter(torch.ones([]))

    def forward(self, image: Any, text: Any) -> Any:
        one, other = functional.normalize(self.image(image), dim=-1), functional.normalize(self.text(text), dim=-1)
        return one @ other.T * self.scale.exp(), torch.einsum("id,jd->ij", one, other), torch.einsum("bd,bd->b", one, other)


class Cells(nn.Module):
    """A recurrent cell in the user's own loop."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, steps: Any) -> Any:
        state = None
        for index in range(steps.shape[1]):
            state = self.cell(steps[:, index], state)
        return state


def model_flops(module: Any, *inputs: Any) -> float:
    factory.move_to_meta(module)
    trace = trace_worker.trace_built(factory.Built(module, tuple(value.to("meta") for value in inputs), {}))
    return totals(as_workload(trace), RunSpec(1, 1), None).model_flops


def counted(module: Any, *inputs: Any) -> float:
    """FLOPs of forward and backward, by PyTorch's counter."""
    counter = flop_counter.FlopCounterMode(display=False)
    with counter:
        results = [one for one in torch.utils._pytree.tree_leaves(module(*inputs)) if one.requires_grad]
        torch.autograd.backward(results, [torch.ones_like(one) for one in results])
    return float(counter.get_total_flops())


@pytest.mark.parametrize(
    ("module", "sizes"),
    [
        (SmallUNet(), [(2, 3, 16, 16)]),
        (nn.Sequential(nn.Conv1d(8, 16, 5), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 20, 4)), [(2, 8, 24)]),
        (nn.Conv3d(2, 4, 3, stride=2), [(2, 2, 9, 9, 9)]),
        (Compared(), [(8, 32), (8, 16)]),
        (nn.Sequential(nn.Linear(24, 32), nn.GRU(32, 48, 2, batch_first=True, bidirectional=True)), [(4, 10, 24)]),
        (nn.RNN(24, 48), [(10, 4, 24)]),
        (Cells(nn.LSTMCell(24, 48)), [(4, 5, 24)]),
        (Cells(nn.GRUCell(24, 48)), [(4, 5, 24)]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_as_pytorch_counts_them(module: Any, sizes: list[tuple[int, ...]]) -> None:
    inputs = [torch.randn(size) for size in sizes]
    assert counted(module, *inputs) == model_flops(module, *inputs) > 0


def test_an_lstm() -> None:
    """PyTorch's counter does not see the kernel of an LSTM. The first state needs no gradient, nor does the input."""
    batch, steps, inputs, hidden = 4, 10, 24, 48
    per_step = 2 * batch * 4 * hidden
    expected = 2 * steps * per_step * (inputs + hidden) + (steps - 1) * per_step * hidden
    assert model_flops(nn.LSTM(inputs, hidden), torch.randn(steps, batch, inputs)) == expected


def test_a_convolution_in_groups() -> None:
    """Each gradient is as much work as forward. PyTorch's counter ignores the groups backward."""
    forward = 2 * 2 * 8 * 8 * 16 * (16 // 4) * 9
    module = nn.Sequential(nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=4))
    alone = model_flops(nn.Conv2d(16, 16, 1), torch.randn(2, 16, 8, 8))
    one_by_one = alone / 2  # forward and the gradient of its weight; the input needs none
    assert model_flops(module, torch.randn(2, 16, 8, 8)) == 3 * forward + 2 * one_by_one
