"""The products of Mamba-2's scan, counted in a reference whose outputs and gradients are those of the recurrence."""

from __future__ import annotations

from typing import Any

import pytest

from gemmscope.workload.scans import SSD_BLOCK, Scan, seen_positions

torch = pytest.importorskip("torch", reason="the reference runs in torch")
Tensor = Any

CHUNK, CHUNKS, HEADS, GROUPS, KEY, VALUE = 32, 3, 4, 2, 8, 6  # a chunk of one block: nothing to skip


class Counter:
    """Multiplies matrices and counts the FLOPs."""

    def __init__(self) -> None:
        self.flops = 0

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return a @ b


def recurrence(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Position by position: the state decays by exp(a), takes B xᵀ, and C reads it."""
    outputs = []
    for head in range(HEADS):
        group, state, rows = head // (HEADS // GROUPS), torch.zeros(KEY, VALUE, dtype=x.dtype), []
        for t in range(x.shape[0]):
            state = torch.exp(a[t, head]) * state + torch.outer(b[t, group], x[t, head])
            rows.append(c[t, group] @ state)
        outputs.append(torch.stack(rows))
    return torch.stack(outputs, 1)


class Kernels:
    """The kernels of `mamba_chunk_scan_combined` on one sequence."""

    def __init__(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> None:
        self.count = Counter()
        self.x, self.a, self.b, self.c = (value.detach() for value in (x, a, b, c))

    def chunk(self, index: int, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x, B and C of one chunk, the running sum of a, and the decays between its positions."""
        at, group = slice(index * CHUNK, (index + 1) * CHUNK), head // (HEADS // GROUPS)
        sums = self.a[at, head].cumsum(0)
        decays = torch.exp(sums[:, None] - sums[None, :]).tril()
        return self.x[at, head], self.b[at, group], self.c[at, group], sums, decays

    def scores(self) -> dict[tuple[int, int], Tensor]:
        """C·Bᵀ of every chunk and group."""
        first = {group: group * (HEADS // GROUPS) for group in range(GROUPS)}
        parts = {(i, g): self.chunk(i, first[g]) for i in range(CHUNKS) for g in range(GROUPS)}
        return {key: self.count.dot(c, b.T) for key, (_, b, c, _, _) in parts.items()}

    def states(self, head: int) -> list[Tensor]:
        """The state before every chunk."""
        before = [torch.zeros(KEY, VALUE, dtype=self.x.dtype)]
        for index in range(CHUNKS):
            x, b, _, sums, _ = self.chunk(index, head)
            own = self.count.dot((b * torch.exp(sums[-1] - sums)[:, None]).T, x)
            before.append(torch.exp(sums[-1]) * before[-1] + own)
        return before

    def forward(self) -> Tensor:
        scores, output = self.scores(), torch.zeros_like(self.x)
        for head in range(HEADS):
            before = self.states(head)
            for index in range(CHUNKS):
                x, _, c, sums, decays = self.chunk(index, head)
                inside = self.count.dot(scores[index, head // (HEADS // GROUPS)] * decays, x)
                output[index * CHUNK : (index + 1) * CHUNK, head] = inside + self.count.dot(
                    c * torch.exp(sums)[:, None], before[index]
                )
        return output

    def backward(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of x, a, B and C."""
        scores, dx, da = self.scores(), torch.zeros_like(self.x), torch.zeros_like(self.a)
        db, dc = torch.zeros_like(self.b), torch.zeros_like(self.c)
        dscores = {key: torch.zeros_like(value) for key, value in scores.items()}
        for head in range(HEADS):
            group, before, after = head // (HEADS // GROUPS), self.states(head), torch.zeros(KEY, VALUE, dtype=self.x.dtype)
            for index in reversed(range(CHUNKS)):
                at = slice(index * CHUNK, (index + 1) * CHUNK)
                x, b, c, sums, decays = self.chunk(index, head)
                dout, out_decay, in_decay = grad[at, head], torch.exp(sums)[:, None], torch.exp(sums[-1] - sums)[:, None]
                dstates = self.count.dot((c * out_decay).T, dout)
                dx[at, head] = self.count.dot((scores[index, group] * decays).T, dout) + in_decay * self.count.dot(b, after)
                into_b = in_decay * self.count.dot(x, after.T)
                into_c = out_decay * self.count.dot(dout, before[index].T)
                db[at, group] += into_b
                dc[at, group] += into_c
                dscores[index, group] += self.count.dot(dout, x.T) * decays
                pairs = self.count.dot(dout, x.T) * decays * scores[index, group]  # the kernel of the decay computes it again
                da[at, head] = _over(pairs) + (into_c * c).sum(1).flip(0).cumsum(0).flip(0)
                da[at, head] += (
                    (into_b * b).sum(1).cumsum(0) - (into_b * b).sum(1) + (after * before[index]).sum() * torch.exp(sums[-1])
                )
                after = torch.exp(sums[-1]) * after + dstates
        for (index, group), dscore in dscores.items():
            at = slice(index * CHUNK, (index + 1) * CHUNK)
            db[at, group] += self.count.dot(dscore.T, self.c[at, group])
            dc[at, group] += self.count.dot(dscore, self.b[at, group])
        return dx, da, db, dc


def _over(pairs: Tensor) -> Tensor:
    """For each position t, the sum over pairs (i, j) with j < t <= i."""
    return torch.stack([pairs[t:, :t].sum() for t in range(pairs.shape[0])])


def test_products_are_those_of_the_kernels() -> None:
    torch.manual_seed(0)
    length = CHUNK * CHUNKS
    x, b, c = (torch.randn(length, n, size, dtype=torch.float64) for n, size in ((HEADS, VALUE), (GROUPS, KEY), (GROUPS, KEY)))
    a = -torch.rand(length, HEADS, dtype=torch.float64)
    inputs = [tensor.requires_grad_() for tensor in (x, a, b, c)]
    expected = recurrence(*inputs)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, inputs, grad)
    sizes: dict[str, Any] = {"heads": HEADS, "groups": GROUPS, "key_dim": KEY, "value_dim": VALUE, "chunk": CHUNK}
    scan = Scan(role="ssd", rule="ssd", batch=1, sequence=length, **sizes)
    forward, backward = Kernels(*inputs), Kernels(*inputs)
    assert torch.allclose(forward.forward(), expected.detach())
    assert forward.count.flops == scan.forward().flops
    for computed, known in zip(backward.backward(grad), gradients, strict=True):
        assert torch.allclose(computed, known)
    assert backward.count.flops == scan.backward().flops


def test_kernels_skip_blocks_above_the_diagonal() -> None:
    """Of four blocks, a position sees its own and those before: ten of sixteen pairs of blocks."""
    assert seen_positions(4 * SSD_BLOCK) == 4 * SSD_BLOCK * 10 / 16
