"""Mixers of hybrids as modules: Mamba-2, Mamba, gated delta rule, KDA, lightning attention, short convolution.

Projections come from the kit, in its recipe, with the norm before them fused where the framework does so; the recurrence comes
from `mixer_kernels.py`. The columns of the input projection are in the order of the models' own code.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gemmscope.model.layer_spec import MixerSpec
from gemmscope.model.spec import NormSpec
from gemmscope.step.kits.plain import EPS, Kit
from gemmscope.step.marks import mark
from gemmscope.workload.mixers import input_widths


class Mixer(nn.Module):
    """Input projection, causal convolution, recurrence, gated norm, output projection. `norm`: before the input projection; None:
    the input is normed already."""

    convolved: tuple[str, ...] = ("q", "k", "v")
    gate_first = False  # the gate is applied before the norm
    gate = "silu"
    normed_apart = False  # the input is normed by a module of its own, because several projections read it
    norms_itself = False  # the output, in a way of its own

    def __init__(self, kit: Kit, hidden: int, spec: MixerSpec, sequence: int, norm: NormSpec | None) -> None:
        super().__init__()
        self.kit, self.spec, self.sequence = kit, spec, sequence
        self.columns = input_widths(spec)
        width = sum(self.columns.values())
        self.prepare(hidden, norm)
        self.projection = kit.norm_linear(None if self.normed_apart else norm, hidden, width, bias=spec.in_bias)
        channels, kernel = sum(self.columns[name] for name in self.convolved), spec.conv_kernel
        self.conv_weight = self.parameter(channels, kernel, scale=kernel**-0.5) if kernel else None
        self.conv_bias = self.parameter(channels) if kernel and spec.conv_bias else None
        self.norm_weight = None
        if spec.norm and not self.norms_itself:
            self.norm_weight = nn.Parameter(self.parameter(spec.value_dim if spec.norm == "head" else spec.inner).data.fill_(1.0))
        self.out = kit.linear(spec.inner, hidden, bias=spec.out_bias)

    def prepare(self, hidden: int, norm: NormSpec | None) -> None:
        """Create what this kind has besides projections and convolution."""

    def recurrence(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """[batch, sequence, inner] from the convolved and the plain columns."""
        raise NotImplementedError

    def parameter(self, *shape: int, scale: float = 0.02, exact: bool = False) -> nn.Parameter:
        """Random weights in the kit's precision; `exact`: in FP32, as frameworks keep those of a recurrence."""
        precision = torch.float32 if exact else self.kit.precision
        return nn.Parameter(torch.randn(*shape, device=self.kit.device, dtype=torch.float32).mul_(scale).to(precision))

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        projected = mark(self.projection(x, **how), "linear attention").unflatten(0, (-1, self.sequence))
        return self.mix(projected, **how)

    def mix(self, projected: torch.Tensor, **how: Any) -> torch.Tensor:
        """What follows the input projection."""
        parts = self.split(projected)
        inner = mark(self.recurrence(parts), "mixer out")
        inner = self.gated(inner, parts.get("z"))
        return self.out(inner.flatten(0, 1), **how)

    def split(self, projected: torch.Tensor) -> dict[str, torch.Tensor]:
        """The columns by name; those that are convolved stand side by side, and are convolved as one."""
        if self.conv_weight is None:
            return dict(zip(self.columns, projected.split(list(self.columns.values()), dim=-1), strict=True))
        names = list(self.columns)
        first, last = names.index(self.convolved[0]), names.index(self.convolved[-1]) + 1
        channels = sum(self.columns[name] for name in self.convolved)
        widths = [*(self.columns[name] for name in names[:first]), channels, *(self.columns[name] for name in names[last:])]
        pieces = list(projected.split(widths, dim=-1))
        convolved = self.kit.kernels.conv(pieces[first], self.conv_weight, self.conv_bias, "silu")
        pieces[first : first + 1] = convolved.split([self.columns[name] for name in self.convolved], dim=-1)
        return dict(zip(names, pieces, strict=True))

    def gated(self, inner: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
        """Norm and gate of the output."""
        if self.norm_weight is None:
            return inner if z is None else inner * (functional.silu(z) if self.gate == "silu" else torch.sigmoid(z))
        assert z is not None
        spec = self.spec
        group = {"head": spec.value_dim, "group": spec.inner // spec.groups, "full": spec.inner}[spec.norm]
        return self.kit.kernels.gated_norm(
            inner, z, self.norm_weight, eps=EPS, group=group, gate_first=self.gate_first, sigmoid=self.gate == "sigmoid"
        )


class Mamba2(Mixer):
    """A state-space scan with one decay for each head: z, x, B, C and the time step come from one projection."""

    convolved = ("v", "k", "q")
    gate_first = True

    def prepare(self, hidden: int, norm: NormSpec | None) -> None:  # noqa: ARG002
        heads = self.spec.heads
        self.a_log, self.skip, self.dt_bias = (self.parameter(heads, exact=True) for _ in range(3))

    def recurrence(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        spec = self.spec
        x = parts["v"].unflatten(-1, (spec.heads, spec.value_dim))
        b, c = (parts[name].unflatten(-1, (spec.groups, spec.key_dim)) for name in ("k", "q"))
        a = -torch.exp(self.a_log)
        out = self.kit.kernels.ssd(x, parts["a"], a, b, c, chunk=spec.chunk, skip=self.skip, dt_bias=self.dt_bias)
        return out.flatten(2)


class Mamba(Mixer):
    """The selective scan of Mamba-1: time step, B and C come from the convolved values."""

    convolved = ("v",)

    def prepare(self, hidden: int, norm: NormSpec | None) -> None:  # noqa: ARG002
        spec = self.spec
        make: dict[str, Any] = {"device": self.kit.device, "dtype": self.kit.precision}
        self.states = nn.Linear(spec.inner, spec.rank + 2 * spec.key_dim, bias=False, **make)  # in BF16, as frameworks keep them
        self.time_step = nn.Linear(spec.rank, spec.inner, bias=True, **make)
        self.a_log = self.parameter(spec.inner, spec.key_dim, exact=True)
        self.skip = self.parameter(spec.inner, exact=True)
        weighted = (spec.rank, spec.key_dim, spec.key_dim) if spec.state_norm == "weighted" else ()
        self.state_weights = nn.ParameterList(self.parameter(width) for width in weighted)

    def recurrence(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        spec, x = self.spec, parts["v"]
        states = self.states(x).split([spec.rank, spec.key_dim, spec.key_dim], dim=-1)
        if spec.state_norm:
            weights = list(self.state_weights) or [None] * len(states)
            states = [
                functional.rms_norm(state, state.shape[-1:], weight, EPS) for state, weight in zip(states, weights, strict=True)
            ]
        low, b, c = states
        dt = functional.linear(low, self.time_step.weight)
        a, bias = -torch.exp(self.a_log), self.time_step.bias.float()
        return self.kit.kernels.selective_scan(x, dt, a, b, c, skip=self.skip, z=parts["z"], dt_bias=bias)

    def gated(self, inner: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG002
        """The scan applied the gate."""
        return inner


class GatedDelta(Mixer):
    """The gated delta rule: queries, keys, values, output gate, write strength and decay come from one projection."""

    def prepare(self, hidden: int, norm: NormSpec | None) -> None:  # noqa: ARG002
        self.a_log, self.dt_bias = (self.parameter(self.spec.heads, exact=True) for _ in range(2))

    def recurrence(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        spec = self.spec
        q, k = (parts[name].unflatten(-1, (spec.groups, spec.key_dim)) for name in ("q", "k"))
        v = parts["v"].unflatten(-1, (spec.heads, spec.value_dim))
        a_log, dt_bias = self.a_log, self.dt_bias
        return self.kit.kernels.delta_rule(q, k, v, parts["a"], parts["b"], a_log=a_log, dt_bias=dt_bias).flatten(2)


class Kda(GatedDelta):
    """Kimi delta attention: the decay of every channel and the output gate go through a bottleneck each."""

    gate = "sigmoid"
    normed_apart = True

    def prepare(self, hidden: int, norm: NormSpec | None) -> None:
        kit, spec = self.kit, self.spec
        self.norm = kit.norm(norm, hidden) if norm is not None else nn.Identity()
        widths = (spec.heads * spec.key_dim, spec.inner)
        self.downs = nn.ModuleList(kit.linear(hidden, spec.rank, bias=False) for _ in widths)
        self.ups = nn.ModuleList(kit.linear(spec.rank, width, bias=False) for width in widths)
        self.a_log = self.parameter(spec.heads, exact=True)
        self.dt_bias = self.parameter(spec.heads * spec.key_dim, exact=True)

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        x = self.norm(x)
        gates = [up(down(x, **how), **how) for down, up in zip(self.downs, self.ups, strict=True)]
        projected = mark(self.projection(x, **how), "linear attention")
        parts = self.split(projected.unflatten(0, (-1, self.sequence)))
        decay, z = (gate.unflatten(0, (-1, self.sequence)) for gate in gates)
        parts["a"] = decay.unflatten(-1, (self.spec.heads, self.spec.key_dim))
        inner = self.gated(mark(self.recurrence(parts), "mixer out"), z)
        return self.out(inner.flatten(0, 1), **how)


class Lightning(Mixer):
    """Lightning attention (MiniMax): SiLU on queries, keys and values, a fixed decay for each head."""

    gate = "sigmoid"
    norms_itself = True

    def prepare(self, hidden: int, norm: NormSpec | None) -> None:  # noqa: ARG002
        heads = self.spec.heads
        rates = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, device=self.kit.device, dtype=torch.float32))
        self.decay = -rates
        self.out_norm = self.kit.norm(NormSpec(), self.spec.inner) if self.spec.norm else nn.Identity()

    def recurrence(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        spec = self.spec
        sizes = {"q": spec.key_dim, "k": spec.key_dim, "v": spec.value_dim}
        q, k, v = (functional.silu(parts[name]).unflatten(-1, (-1, size)) for name, size in sizes.items())
        return self.kit.kernels.lightning(q, k, v, self.decay).flatten(2)

    def gated(self, inner: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
        return super().gated(self.out_norm(inner), z)


class ShortConvolution(Mixer):
    """A gated short convolution (LFM2): the product of two parts of the projection is convolved, and multiplied by the third."""

    convolved = ("v",)

    def mix(self, projected: torch.Tensor, **how: Any) -> torch.Tensor:
        assert self.conv_weight is not None
        before, after, x = projected.chunk(3, dim=-1)
        convolved = self.kit.kernels.conv(before * x, self.conv_weight, self.conv_bias, None)
        inner = mark(after * convolved, "mixer out")
        return self.out(inner.flatten(0, 1), **how)


MIXERS: dict[str, Callable[..., Mixer]] = {
    "ssd": Mamba2,
    "selective scan": Mamba,
    "gated delta rule": GatedDelta,
    "kda": Kda,
    "lightning attention": Lightning,
    "short convolution": ShortConvolution,
}
