"""The kernels of mixers: state-space scans, delta rules, lightning attention, causal convolutions and gated norms.

On a GPU the first that is installed is used: mamba-ssm and causal-conv1d, flash-linear-attention, then the plain PyTorch code of
transformers, which also runs on the CPU. `MixerKernels.sources` says which one runs each part, for the result.

Tensors are [batch, sequence, heads, head] and [batch, sequence, channels] everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch.nn import functional

from gemmscope.errors import in_a_line

MAMBA, CONV, FLA, TRANSFORMERS, PYTORCH = "mamba-ssm", "causal-conv1d", "flash-linear-attention", "transformers", "PyTorch"
LIGHTNING_CHUNK = 64
GATED = ("state-space scan", "gated delta rule")  # whose backward pass has a gated kernel of flash-linear-attention
# Whether the decay has channels -> the name of the delta rule, and where its kernel may come from.
DELTA_RULES: dict[bool, tuple[Any, ...]] = {
    False: (
        "gated delta rule",
        (FLA, "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
        (TRANSFORMERS, "transformers.models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule"),
    ),
    True: (
        "Kimi delta attention",
        (FLA, "fla.ops.kda", "chunk_kda"),
        (TRANSFORMERS, "transformers.models.kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention"),
    ),
}
WRONG_GRADIENTS = (
    "on this GPU flash-linear-attention needs Triton 3.7.1 or newer, or tilelang: its gated gradients are wrong with this Triton"
)


# What the import of a package raises that is not installed, or not built for this torch, Triton or GPU
DOES_NOT_LOAD = (ImportError, AttributeError, OSError, RuntimeError)


class MissingKernelError(ImportError):
    """No package that is installed has this kernel; the message says what to install."""


@dataclass
class KernelSources:
    """What computes each part of the mixers."""

    sources: dict[str, str] = field(default_factory=dict, kw_only=True)  # the part -> the package that computes it
    refused: dict[str, str] = field(
        default_factory=dict, kw_only=True
    )  # the part -> why an installed package cannot compute it here


@dataclass
class MixerKernels(KernelSources):
    """Chooses kernels for one device, each when it is first needed."""

    device: str
    without: frozenset[str] = frozenset()  # packages that are not used
    _loaded: dict[str, tuple[str, Callable[..., Any]]] = field(default_factory=dict)

    def _first(self, what: str, *choices: tuple[str, str, str]) -> tuple[str, Callable[..., Any]]:
        """The first of (package, module, function) that can be imported. On the CPU and on the meta device, only those of
        transformers run."""
        if what not in self._loaded:
            on_gpu = self.device.startswith("cuda")
            usable = [choice for choice in choices if choice[0] == TRANSFORMERS or (on_gpu and choice[0] not in self.without)]
            if what in GATED and any(choice[0] == FLA for choice in usable) and gated_backward_is_wrong():
                usable = [choice for choice in usable if choice[0] != FLA]
                self.refused[what] = WRONG_GRADIENTS
            kernel = next(filter(None, (self._imported(what, *choice) for choice in usable)), None)
            if kernel is None:
                packages = " or ".join(dict.fromkeys(choice[0] for choice in choices))
                raise MissingKernelError(f"the {what} needs {packages}: install one of them in this environment")
            self._loaded[what], self.sources[what] = kernel, kernel[0]
        return self._loaded[what]

    def _imported(self, what: str, package: str, module: str, name: str) -> tuple[str, Callable[..., Any]] | None:
        """None if it does not load: the next one is used. Of a package that is installed, the result says why."""
        try:
            function = getattr(import_module(module), name)
        except DOES_NOT_LOAD as error:
            if getattr(error, "name", None) != module.partition(".")[0]:
                self.refused.setdefault(what, f"{package} does not load here: {in_a_line(error)}")
            return None
        return (package, function) if function is not None else None

    def ssd(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        *,
        chunk: int,
        skip: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
    ) -> torch.Tensor:
        """The state-space scan of Mamba-2. x is [.., heads, head], dt [.., heads], b and c [.., groups, state], a [heads]."""
        package, scan = self._first(
            "state-space scan",
            (MAMBA, "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"),
            (FLA, "fla.ops.simple_gla", "chunk_simple_gla"),
            (TRANSFORMERS, "transformers.models.mamba2.modeling_mamba2", "mamba2_chunk_scan"),
        )
        if package != FLA:
            softplus = dt_bias is not None
            out = scan(x, dt, a, b, c, chunk, D=skip, dt_bias=dt_bias, dt_softplus=softplus, dt_limit=dt_limit)
            return _output(out).to(x.dtype)
        step = functional.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit) if dt_bias is not None else dt.float()
        repeats = x.shape[2] // b.shape[2]
        b, c = (tensor.repeat_interleave(repeats, dim=2) if repeats > 1 else tensor for tensor in (b, c))
        out = _output(scan(c, b, x * step[..., None].to(x.dtype), step * a.float(), scale=1.0))
        return out + x * skip[:, None].to(x.dtype) if skip is not None else out

    def lightning(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        """Linear attention with a fixed decay for each head (in log space): a state-space scan with a time step of one."""
        package, attend = self._first(
            "lightning attention",
            (FLA, "fla.ops.simple_gla", "chunk_simple_gla"),
            (MAMBA, "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"),
            (TRANSFORMERS, "transformers.models.mamba2.modeling_mamba2", "mamba2_chunk_scan"),
        )
        if package == FLA:
            return _output(attend(q, k, v, g_gamma=decay, scale=1.0))
        ones = torch.ones(v.shape[:3], device=v.device, dtype=v.dtype)
        return _output(attend(v, ones, decay, k, q, LIGHTNING_CHUNK)).to(v.dtype)

    def delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        *,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
    ) -> torch.Tensor:
        """The gated delta rule (Qwen3-Next), on normalized q and k; with a decay for each channel of the key, [.., heads, head]
        instead of [.., heads], it is Kimi delta attention. `decay` and `beta` are given before softplus and sigmoid."""
        name, *choices = DELTA_RULES[decay.dim() == k.dim()]
        package, rule = self._first(name, *choices)
        if package == FLA and "use_beta_sigmoid_in_kernel" in signature(rule).parameters:  # it computes decay and strength, too
            gates = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "A_log": a_log, "dt_bias": dt_bias.flatten()}
            return _output(rule(q, k, v, g=decay, beta=beta, use_qk_l2norm_in_kernel=True, **gates))
        scale = a_log.float().exp().view(-1, *(1,) * (decay.dim() - 3))
        gate = -scale * functional.softplus(decay.float() + dt_bias.float().view(decay.shape[2:]))
        if package == TRANSFORMERS:  # flash-linear-attention knows that several value heads share a key
            q, k = (tensor.repeat_interleave(v.shape[2] // tensor.shape[2], dim=2) for tensor in (q, k))
        return _output(rule(q, k, v, g=gate, beta=beta.sigmoid(), use_qk_l2norm_in_kernel=True))

    def selective_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        *,
        skip: torch.Tensor,
        z: torch.Tensor,
        dt_bias: torch.Tensor,
    ) -> torch.Tensor:
        """The scan of Mamba-1, with its gate. x, dt and z are [batch, sequence, channels], b and c [.., state]."""
        choices = [(MAMBA, "mamba_ssm.ops.selective_scan_interface", "selective_scan_fn")]
        if not self.device.startswith("cuda"):  # transformers has only a loop over all positions, which no step on a GPU uses
            choices.append((TRANSFORMERS, "transformers.models.mamba.modeling_mamba", "mamba_selective_scan"))
        _, scan = self._first("selective scan", *choices)
        x, dt, b, c, z = (tensor.transpose(1, 2) for tensor in (x, dt, b, c, z))
        out = _output(scan(x, dt, a, b, c, D=skip, z=z, delta_bias=dt_bias, delta_softplus=True))
        return out.transpose(1, 2).to(x.dtype)

    def conv(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
        """A causal convolution along the sequence, channel by channel. x is [.., channels], weight [channels, width]."""
        package, convolve = self._first(
            "causal convolution",
            (CONV, "causal_conv1d", "causal_conv1d_fn"),
            (FLA, "fla.modules.causal_conv1d", "causal_conv1d"),
            (TRANSFORMERS, "transformers.models.mamba2.modeling_mamba2", "causal_conv1d_fn"),
        )
        if package == FLA:
            return _output(convolve(x, weight, bias, activation=activation))
        return _output(convolve(x.transpose(1, 2), weight, bias, activation=activation)).transpose(1, 2)

    def gated_norm(
        self,
        x: torch.Tensor,
        z: torch.Tensor,
        weight: torch.Tensor,
        *,
        eps: float,
        group: int,
        gate_first: bool,
        sigmoid: bool = False,
    ) -> torch.Tensor:
        """An RMS norm of every `group` channels with a gate: before the norm (Mamba-2), or after it (delta rules). `weight` is
        as wide as x, or as one group. The gate is SiLU, or a sigmoid."""
        shared = weight.shape[-1] != x.shape[-1]  # one weight for all heads
        if self.device.startswith("cuda") and not (gate_first if shared else sigmoid):
            with suppress(MissingKernelError):  # the same in one kernel
                if shared:
                    _, norm = self._first("gated norm", (FLA, "fla.modules.norm.fused_norm_gate", "rms_norm_gated"))
                    heads = x.reshape(-1, group), z.reshape(-1, group)
                    return _output(norm(*heads, weight, None, activation="sigmoid" if sigmoid else "swish", eps=eps)).view(
                        x.shape
                    )
                _, norm = self._first(
                    "grouped gated norm",
                    (MAMBA, "mamba_ssm.ops.triton.layernorm_gated", "rmsnorm_fn"),
                    (FLA, "fla.modules.norm.layernorm_gated", "rmsnorm_fn"),
                )
                return _output(norm(x, weight, None, z=z, eps=eps, group_size=group, norm_before_gate=not gate_first))
        self.sources.setdefault("gated norm", PYTORCH)
        gate = torch.sigmoid(z.float()) if sigmoid else functional.silu(z.float())
        inner = x.float() * gate if gate_first else x.float()
        grouped = inner.unflatten(-1, (-1, group))
        normed = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
        normed = (normed * weight.float()).flatten(-2) if shared else normed.flatten(-2) * weight.float()
        return (normed if gate_first else normed * gate).to(x.dtype)


def _output(result: Any) -> torch.Tensor:
    """The output of a kernel: what it returns, or the first of several."""
    output: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return output


@cache
def gated_backward_is_wrong() -> bool:
    """Whether flash-linear-attention refuses the backward pass of its gated kernels: on Hopper, Triton 3.4 to 3.7.0 compiles them
    wrongly, and only tilelang replaces them."""
    try:
        facts = import_module("fla.utils")
    except DOES_NOT_LOAD:  # then it is not used either
        return False
    old = getattr(facts, "TRITON_ABOVE_3_4_0", False) and not getattr(facts, "TRITON_ABOVE_3_7_1", True)
    return bool(getattr(facts, "IS_NVIDIA_HOPPER", False) and old and find_spec("tilelang") is None)
