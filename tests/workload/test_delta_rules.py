"""The products of chunked kernels, counted in a reference whose outputs and gradients are those of the recurrence."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gemmscope.model.layer_spec import MixerKind
from gemmscope.workload.scans import DELTA_BLOCK as BLOCK
from gemmscope.workload.scans import Scan

torch = pytest.importorskip("torch", reason="the reference runs in torch")
Tensor = Any

CHUNK, CHUNKS, KEY, VALUE = 64, 2, 24, 40


class Counter:
    """Multiplies matrices and counts the FLOPs; `lower` computes only the blocks on and below the diagonal."""

    def __init__(self) -> None:
        self.flops = 0.0

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return a @ b

    def lower(self, a: Tensor, b: Tensor) -> Tensor:
        result, rows = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype), a.shape[0] // BLOCK
        for i in range(rows):
            for j in range(i + 1):
                at = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
                result[at] = self.dot(a[at[0]], b[:, at[1]])
        return result

    def apply(self, lower: Tensor, b: Tensor) -> Tensor:
        """A product with a lower triangular matrix, block by block."""
        rows = [slice(i * BLOCK, (i + 1) * BLOCK) for i in range(lower.shape[0] // BLOCK)]
        return torch.cat([sum(self.dot(lower[row, at], b[at]) for at in rows[: i + 1]) for i, row in enumerate(rows)])

    def apply_transposed(self, lower: Tensor, b: Tensor) -> Tensor:
        rows = [slice(i * BLOCK, (i + 1) * BLOCK) for i in range(lower.shape[0] // BLOCK)]
        return torch.cat([sum(self.dot(lower[at, row].T, b[at]) for at in rows[i:]) for i, row in enumerate(rows)])

    def inverse(self, a: Tensor) -> Tensor:
        """Of I + A, A strictly lower: blocks on the diagonal by substitution, which has no products, the others from these."""
        n = a.shape[0] // BLOCK
        at = [slice(i * BLOCK, (i + 1) * BLOCK) for i in range(n)]
        result = torch.zeros_like(a)
        for i in range(n):
            result[at[i], at[i]] = torch.linalg.inv(torch.eye(BLOCK, dtype=a.dtype) + a[at[i], at[i]])
        for distance in range(1, n):
            for i in range(distance, n):
                j = i - distance
                inner = sum(self.dot(a[at[i], at[m]], result[at[m], at[j]]) for m in range(j, i))
                result[at[i], at[j]] = -self.dot(result[at[i], at[i]], inner)
        return result


def inputs(rule: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    positions = CHUNK * CHUNKS
    make = {"q": KEY, "k": KEY, "v": VALUE, "g": KEY if rule == "kda" else 1, "beta": 1}
    values = {name: torch.randn(positions, width, dtype=torch.float64) for name, width in make.items()}
    values["k"] = torch.nn.functional.normalize(values["k"], dim=-1)
    return values | {"g": -values["g"].abs() / 20, "beta": values["beta"].sigmoid()}


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Position by position: decay, write what the state did not know, read."""
    state, rows = torch.zeros(KEY, VALUE, dtype=q.dtype), []
    for t in range(len(q)):
        state = state * g[t].exp().unsqueeze(-1)
        state = state + torch.outer(k[t], beta[t] * (v[t] - k[t] @ state))
        rows.append(q[t] @ state)
    return torch.stack(rows)


def chunks(values: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    cut = {name: tensor.split(CHUNK) for name, tensor in values.items()}
    return [{name: parts[i] for name, parts in cut.items()} for i in range(CHUNKS)]


def intra(count: Counter, part: dict[str, Tensor], rule: str) -> dict[str, Tensor]:
    """What does not depend on the state: decayed keys, the triangular inverse, w, u, and q·Kᵀ."""
    q, k, v, beta, total = part["q"], part["k"], part["v"], part["beta"], part["g"].cumsum(0)
    decays = {"total": total, "in": total.exp(), "out": (total[-1] - total).exp()}
    strict = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril(-1)
    if rule == "kda":
        system = count.lower(beta * k * total.exp(), (k * (-total).exp()).T) * strict
        scores = count.lower(q * total.exp(), (k * (-total).exp()).T).tril()
    else:
        pairwise = (total - total.T).exp()
        system = (beta * count.lower(k, k.T) * pairwise) * strict
        scores = (count.dot(q, k.T) * pairwise).tril()
    inverse = count.inverse(system)
    return decays | {"inverse": inverse, "scores": scores} | w_and_u(count, inverse, k, v, beta, decays["in"])


def w_and_u(count: Counter, inverse: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> dict[str, Tensor]:
    return {"u": count.dot(inverse, beta * v), "w": count.dot(inverse, beta * k * decay)}


def step(count: Counter, part: dict[str, Tensor], inside: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The new values of a chunk, and the state after it."""
    new = inside["u"] - count.dot(inside["w"], state)
    return new, state * inside["total"][-1].exp().unsqueeze(-1) + count.dot((part["k"] * inside["out"]).T, new)


def forward(count: Counter, values: dict[str, Tensor], rule: str) -> Tensor:
    state, outputs = torch.zeros(KEY, VALUE, dtype=torch.float64), []
    for part in chunks(values):
        inside = intra(count, part, rule)
        new, after = step(count, part, inside, state)
        outputs.append(count.dot(part["q"] * inside["in"], state) + count.dot(inside["scores"], new))
        state = after
    return torch.cat(outputs)


def scan(rule: MixerKind) -> Scan:
    return Scan(role="kda", rule=rule, batch=1, sequence=CHUNK * CHUNKS, heads=1, groups=1, key_dim=KEY, value_dim=VALUE)


@pytest.mark.parametrize("rule", ["gated delta rule", "kda"])
def test_forward(rule: MixerKind) -> None:
    values, count = inputs(rule), Counter()
    torch.testing.assert_close(forward(count, values, rule), recurrence(**values))
    assert math.isclose(count.flops, scan(rule).forward().flops)


def backward(values: dict[str, Tensor], gradient: Tensor, rule: str) -> tuple[Counter, dict[str, Tensor]]:
    """In the order of flash-linear-attention's kernels. What forward keeps is not counted."""
    parts, insides = chunks(values), [intra(Counter(), part, rule) for part in chunks(values)]
    count, outputs = Counter(), gradient.split(CHUNK)
    states, news = [torch.zeros(KEY, VALUE, dtype=torch.float64)], []
    for part, one in zip(parts, insides, strict=True):  # w, u and the states again
        one |= w_and_u(count, one["inverse"], part["k"], part["v"], part["beta"], one["in"])
        new, after = step(count, part, one, states[-1])
        news.append(new)
        states.append(after)
    gradients: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
    dstate = torch.zeros(KEY, VALUE, dtype=torch.float64)
    for part, one, do, state, new in reversed(list(zip(parts, insides, outputs, states, news, strict=False))):
        q, k, v, beta, inverse = part["q"], part["k"], part["v"], part["beta"], one["inverse"]
        pairwise = (one["total"] - one["total"].T).exp() if rule != "kda" else 1.0
        scores = one["scores"] if rule == "kda" else (count.dot(q, k.T) * pairwise).tril()
        dnew = count.dot(scores.T, do) + count.dot(k * one["out"], dstate)
        after = dstate  # of the state behind this chunk
        dstate = dstate * one["total"][-1].exp().unsqueeze(-1)
        dstate = dstate + count.dot((q * one["in"]).T, do) - count.dot(one["w"].T, dnew)
        ds = (count.dot(do, new.T) * pairwise).tril()
        dq, dk = count.dot(do, state.T) * one["in"], count.dot(new, after.T) * one["out"]
        dw = -count.dot(dnew, state.T)
        key, value = beta * k * one["in"], beta * v
        da = count.dot(dw, key.T) + count.dot(dnew, value.T)
        dkey, dvalue = count.dot(inverse.T, dw), count.dot(inverse.T, dnew)
        dsystem = -count.dot(count.dot(inverse.T, da), inverse.T).tril(-1) * pairwise
        dk = dk + dkey * beta * one["in"]
        if rule == "kda":
            left, right = one["in"], (-one["total"]).exp()
            dq = dq + count.apply(ds, k * right) * left
            dk = dk + count.apply(dsystem, k * right) * left * beta
            dk = dk + (count.apply_transposed(ds, q * left) + count.apply_transposed(dsystem, beta * k * left)) * right
        else:
            count.dot(k, k.T)  # the gradients of the write strength and the decay need it
            dq, dk = dq + count.dot(ds, k), dk + count.dot(ds.T, q)
            dk = dk + beta * count.dot(dsystem, k) + count.dot(dsystem.T, beta * k)
        for name, tensor in (("q", dq), ("k", dk), ("v", dvalue * beta)):
            gradients[name].insert(0, tensor)
    return count, {name: torch.cat(tensors) for name, tensors in gradients.items()}


@pytest.mark.parametrize("rule", ["gated delta rule", "kda"])
def test_backward(rule: MixerKind) -> None:
    values = inputs(rule)
    needed = {name: tensor.clone().requires_grad_() for name, tensor in values.items()}
    result = recurrence(**needed)
    gradient = torch.randn_like(result)
    result.backward(gradient)
    count, gradients = backward(values, gradient, rule)
    for name, tensor in gradients.items():
        torch.testing.assert_close(tensor, needed[name].grad)
    assert math.isclose(count.flops, scan(rule).backward().flops)


def test_lightning_attention() -> None:
    """Linear attention whose decay is a constant of the head: forward, and the gradients by hand."""
    values = {name: tensor for name, tensor in inputs("gated delta rule").items() if name in "qkv"}
    needed = {name: tensor.clone().requires_grad_() for name, tensor in values.items()}
    decay, state, rows = 0.95, torch.zeros(KEY, VALUE, dtype=torch.float64), []
    for q, k, v in zip(needed["q"], needed["k"], needed["v"], strict=True):
        state = state * decay + torch.outer(k, v)
        rows.append(q @ state)
    expected = torch.stack(rows)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    place = torch.arange(CHUNK, dtype=torch.float64)[:, None]
    pairwise, entry, leave = (decay ** (place - place.T)).tril(), decay ** (place + 1), decay ** (CHUNK - 1 - place)
    count, parts, states, outputs = Counter(), chunks(values), [torch.zeros(KEY, VALUE, dtype=torch.float64)], []
    for part in parts:
        inside = count.dot(count.dot(part["q"], part["k"].T) * pairwise, part["v"])
        outputs.append(count.dot(part["q"] * entry, states[-1]) + inside)
        states.append(states[-1] * decay**CHUNK + count.dot((part["k"] * leave).T, part["v"]))
    torch.testing.assert_close(torch.cat(outputs), expected.detach())
    assert math.isclose(count.flops, scan("lightning attention").forward().flops)
    count, gradients = Counter(), dict[str, list[Tensor]](q=[], k=[], v=[])
    dstate = torch.zeros(KEY, VALUE, dtype=torch.float64)
    for part, do, state in reversed(list(zip(parts, gradient.split(CHUNK), states, strict=False))):
        q, k, v = part["q"], part["k"], part["v"]
        count.dot((k * leave).T, v)  # the states again
        ds = count.dot(do, v.T) * pairwise
        gradients["q"].insert(0, count.dot(do, state.T) * entry + count.dot(ds, k))
        gradients["k"].insert(0, count.dot(v, dstate.T) * leave + count.dot(ds.T, q))
        gradients["v"].insert(0, count.dot(k * leave, dstate) + count.dot((count.dot(q, k.T) * pairwise).T, do))
        dstate = dstate * decay**CHUNK + count.dot((q * entry).T, do)
    for name, tensors in gradients.items():
        torch.testing.assert_close(torch.cat(tensors), needed[name].grad)
    assert math.isclose(count.flops, scan("lightning attention").backward().flops)
