"""Plain PyTorch: norms and linears as they are. The CPU's kit, what torchao converts, and the interface of every kit."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils import checkpoint

from gemmscope.bench.backends.base import dtype_of
from gemmscope.model.layer_spec import AttentionSpec, MlpSpec
from gemmscope.model.spec import NormSpec
from gemmscope.recipe.recipes import Recipe
from gemmscope.step.mixer_kernels import MixerKernels
from gemmscope.step.module_plan import ModulePlan
from gemmscope.step.stack_plan import StackPlan, activation_kind, kept_parts

EPS = 1e-5
MOST_GRAPHS = 256  # that may be compiled of one function: layers of several kinds, in several recipes, at several depths
ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "gelu": functional.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def activation_of(spec: MlpSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    """Its activation as PyTorch and Hugging Face have it: `gelu` is the exact one, all others of its kind are the tanh one.

    It matters where compiled casts compute it anew: in a rowwise step of torchao on an H200 the kernel that does so took 26 of
    227 ms with the tanh one, 21 with the exact one.
    """
    return ACTIVATIONS.get(activation_kind(spec.activation), lambda x: functional.gelu(x, approximate="tanh"))


class Kit:
    """One framework's layers in one recipe: here PyTorch's own, in BF16 or FP32. `left_out` parts run in BF16, or in the
    precision that a mix keeps them in."""

    name = "cpu"

    def __init__(
        self, recipe: Recipe, left_out: frozenset[str] = frozenset(), device: str = "cpu", compiled: str = "none"
    ) -> None:
        self.recipe, self.left_out, self.device, self.compiled = recipe, left_out | kept_parts(recipe.kept), device, compiled
        self.kernels = MixerKernels(device)  # of mixers
        if compiled != "none":
            torch._dynamo.config.recompile_limit = MOST_GRAPHS
            torch._dynamo.config.accumulated_recompile_limit = 8 * MOST_GRAPHS

    @cached_property
    def precision(self) -> torch.dtype:
        return torch.bfloat16 if self.recipe.quantizes else dtype_of(self.recipe.operands["fprop"][0])

    def why_not(self, plan: StackPlan | ModulePlan) -> str:  # noqa: ARG002
        """Why this recipe cannot run these layers; empty if it can."""
        return ""

    def norm(self, norm: NormSpec, width: int) -> nn.Module:
        make: dict[str, Any] = {"eps": EPS, "device": self.device, "dtype": self.precision}
        return nn.RMSNorm(width, **make) if norm.kind == "rmsnorm" else nn.LayerNorm(width, bias=norm.bias, **make)

    def rotary(self, head_dim: int, sequence: int) -> nn.Module:
        """Rotates heads by their positions: [batch, sequence, heads, head] to the same."""
        return Rotary(head_dim, sequence, self.device, self.precision)

    def masked_attention(self, spec: AttentionSpec, sequence: int) -> nn.Module:
        """Attention with a window, with sinks, or with both: [batch, sequence, heads, head] to [tokens, output width]."""
        return FlexAttention(spec, sequence, self.device, self.precision)

    def linear(self, inputs: int, outputs: int, *, bias: bool) -> nn.Module:
        return PlainLinear(inputs, outputs, bias=bias, device=self.device, dtype=self.precision)

    def norm_linear(self, norm: NormSpec | None, inputs: int, outputs: int, *, bias: bool) -> nn.Module:
        """A linear, and the norm before it; None: its input is normed already."""
        linear = self.linear(inputs, outputs, bias=bias)
        return Chain(self.norm(norm, inputs), linear) if norm is not None else linear

    def mlp(self, norm: NormSpec | None, hidden: int, spec: MlpSpec, *, separate: bool = False) -> nn.Module:
        """A feed-forward block; `norm`: before it. `separate`: gate and up are a GEMM each."""
        block = self._feed_forward(hidden, spec, separate=separate and spec.gated)
        return Chain(self.norm(norm, hidden), block) if norm is not None else block

    def _feed_forward(
        self, hidden: int, spec: MlpSpec, name: str = "mlp", norm: NormSpec | None = None, *, separate: bool = False
    ) -> nn.Module:
        """A feed-forward block of linears that each have their own precision; `norm`: before the first."""
        width = spec.intermediate_size
        gate = self.part(f"{name} up", self.linear(hidden, width, bias=spec.up_bias)) if separate else None
        up = self.norm_linear(norm, hidden, 2 * width if spec.gated and not separate else width, bias=spec.up_bias)
        down = self.linear(width, hidden, bias=spec.down_bias)
        return FeedForward(spec, self.part(f"{name} up", up), self.part(f"{name} down", down), gate)

    def part(self, name: str, module: nn.Module) -> nn.Module:
        """A part of a layer, in a higher precision if it is kept so."""
        return HigherPart(self, name, module) if name in self.left_out else module

    def experts(self, hidden: int, spec: MlpSpec, count: int, name: str = "experts") -> nn.Module:
        """Feed-forward blocks side by side: called with tokens and how many of them each gets."""
        return PlainExperts([self._feed_forward(hidden, spec, name) for _ in range(count)])

    def routing(self, tokens: int, rows: tuple[int, ...]) -> "Routing":
        """Dispatches tokens to experts, `rows` of them to each, and combines the outputs."""
        return Routing(tokens, rows, self.device)

    def finish(self, block: nn.Module, *, kept: bool = False) -> nn.Module:  # noqa: ARG002
        """Convert a layer of the stack, where the framework does, and compile it, if layers are compiled one by one. `kept`: a
        mix keeps all of it in a higher precision."""
        return self.compile(block)

    def compile(self, module: nn.Module, what: str = "layers") -> nn.Module:
        """One of the layers, or the whole model from its inputs to the loss, if that is what is compiled."""
        return compiled_module(module) if self.compiled == what else module

    def why_not_linear(self, rows: int, inputs: int, outputs: int) -> str:
        """Why a linear of a live module, called with so many rows, cannot run in this recipe; empty if it can."""
        misaligned = self.recipe.misalignment({"input features": inputs, "output features": outputs, "rows": rows})
        if misaligned is None:
            return ""
        return f"{misaligned[0]} = {misaligned[1]} is not a multiple of {self.recipe.multiple_of}"

    def convert(self, module: nn.Module, paths: Sequence[str]) -> None:
        """Replace the linears at these paths of a live module by the framework's, with the same parameters."""
        for path in paths:
            owner, _, name = path.rpartition(".")
            linear = module.get_submodule(path)
            assert isinstance(linear, nn.Linear)
            converted = self._like(linear)
            for parameter, value in linear.named_parameters(recurse=False):
                setattr(converted, parameter, value)
            setattr(module.get_submodule(owner), name, converted.train(linear.training))

    def _like(self, linear: nn.Linear) -> nn.Module:
        """The framework's linear of this size; here one in a class of its own."""
        return PlainLinear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")

    def autocast(self, *, kept: bool = False) -> AbstractContextManager[Any]:  # noqa: ARG002
        """The context in which all layers run. `kept`: that of a layer, or a part, that a mix keeps in a higher precision."""
        return nullcontext()

    def autocast_of(self, part: str) -> AbstractContextManager[Any]:
        """The context of a part that may be left out of low precision."""
        return self.autocast(kept=True) if part in self.left_out else nullcontext()

    def arguments(self, *, first: bool | None) -> dict[str, Any]:  # noqa: ARG002
        """Arguments of its modules that depend on the micro-batch: whether it is the step's first (None: the only one)."""
        return {}

    def checkpoint(self, function: Any, *x: torch.Tensor) -> torch.Tensor:
        """Run it without keeping activations, and again in backward."""
        return checkpoint.checkpoint(function, *x, use_reentrant=False)


def compiled_module(module: nn.Module) -> nn.Module:
    """The module compiled with `torch.compile`, for the sizes of the run."""
    return torch.compile(module, dynamic=False)


class Rotary(nn.Module):
    """Positions enter by rotating halves of queries and keys."""

    def __init__(self, head_dim: int, sequence: int, device: str, precision: torch.dtype) -> None:
        super().__init__()
        frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device).float() / head_dim)
        angles = torch.outer(torch.arange(sequence, device=device).float(), frequencies).repeat(1, 2)[:, None, :]
        self.cos, self.sin = angles.cos().to(precision), angles.sin().to(precision)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * self.cos + turned * self.sin


class PlainLinear(nn.Linear):
    """A linear that ignores the arguments of the micro-batch."""

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class HigherPart(nn.Module):
    """A part of a layer that runs in a higher precision."""

    def __init__(self, kit: Kit, name: str, module: nn.Module) -> None:
        super().__init__()
        self.kit, self.name, self.module = kit, name, module

    def forward(self, x: torch.Tensor, *rows: list[int], **how: Any) -> torch.Tensor:
        with self.kit.autocast_of(self.name):
            return self.module(x, *rows, **how)


class Chain(nn.Module):
    """Modules that run one after the other."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        return self.second(self.first(x), **how)


class FeedForward(nn.Module):
    """Up, activation, down; gate and up are one GEMM, or two. `rows`: the tokens of each expert, where they are grouped."""

    def __init__(self, spec: MlpSpec, up: nn.Module, down: nn.Module, gate: nn.Module | None = None) -> None:
        super().__init__()
        self.gated, self.activation, self.up, self.down, self.gate_up = spec.gated, activation_of(spec), up, down, gate

    def forward(self, x: torch.Tensor, *rows: list[int], **how: Any) -> torch.Tensor:
        inner = self.up(x, *rows, **how)
        if self.gate_up is not None:
            inner = self.activation(self.gate_up(x, **how)) * inner
        elif self.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = self.activation(gate) * up
        else:
            inner = self.activation(inner)
        return self.down(inner, *rows, **how)


class Routing:
    """Copies tokens to the experts, sorted by expert, and adds up what comes back. Where they go is fixed."""

    def __init__(self, tokens: int, rows: tuple[int, ...], device: str) -> None:
        self.tokens, self.rows = tokens, sum(rows)
        self.slots = -(-self.rows // tokens)  # experts of one token, on this rank
        counts = torch.tensor([*rows, tokens * self.slots - self.rows])  # what is left over goes to no expert
        experts = torch.arange(len(counts)).repeat_interleave(counts)
        experts = experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(0))]
        self.experts = experts.view(tokens, self.slots).int().to(device)
        self.places = experts.argsort(stable=True)[: self.rows].to(device)
        self.order = self.places // self.slots  # the token of each row

    def send(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """[tokens, hidden] to [rows, hidden], and what `combine` needs."""
        return x.index_select(0, self.order), None

    def combine(self, outputs: torch.Tensor, weights: torch.Tensor, places: Any) -> torch.Tensor:  # noqa: ARG002
        """The outputs of the experts of each token, summed with `weights`, [tokens, the router's choices]."""
        weighted = outputs * self.by_slot(weights).to(outputs.dtype).flatten().index_select(0, self.places)[:, None]
        sums = torch.zeros(self.tokens, outputs.shape[1], device=outputs.device, dtype=outputs.dtype)
        return sums.index_add(0, self.order, weighted)

    def by_slot(self, weights: torch.Tensor) -> torch.Tensor:
        """A weight for every slot: the rank may hold fewer experts of a token than it has, or more."""
        return weights.repeat(1, -(-self.slots // weights.shape[1]))[:, : self.slots]


class PlainExperts(nn.Module):
    """Experts that run one after the other, each on its own tokens."""

    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(self, x: torch.Tensor, rows: list[int], **how: Any) -> torch.Tensor:
        return torch.cat([expert(piece, **how) for expert, piece in zip(self.experts, x.split(rows), strict=True)])


@cache
def _compiled() -> Any:
    """One compiled function for all layers; in layers that are compiled, it is compiled with them."""
    return torch.compile(flex_attention, dynamic=False)


class FlexAttention(nn.Module):
    """Attention where a query sees the positions of its window, and where a learned logit of each head takes a share (sinks)."""

    def __init__(self, spec: AttentionSpec, sequence: int, device: str, precision: torch.dtype) -> None:
        super().__init__()
        self.flex = device.startswith("cuda")
        self.sinks = nn.Parameter(torch.zeros(spec.heads, device=device, dtype=precision)) if spec.sinks else None
        reach = spec.window or (sequence if spec.causal else 2 * sequence)

        def sees(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
            back = query - key
            near = (back >= 0) & (back < reach) if spec.causal else back.abs() <= reach // 2
            return near if spec.chunk is None else near & (query // spec.chunk == key // spec.chunk)

        if self.flex:
            self.mask: Any = create_block_mask(sees, None, None, sequence, sequence, device=device)
        else:
            positions = torch.arange(sequence, device=device)
            self.mask = sees(None, None, positions[:, None], positions)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = self._with_flex(q, k, v) if self.flex else self._with_mask(q, k, v)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    def _with_flex(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        grouped = q.shape[1] != k.shape[1]
        out: torch.Tensor
        if self.sinks is None:
            out = _compiled()(q, k, v, block_mask=self.mask, enable_gqa=grouped)
            return out
        out, logs = _compiled()(q, k, v, block_mask=self.mask, enable_gqa=grouped, return_lse=True)
        return out * torch.sigmoid(logs - self.sinks[:, None])[..., None].to(out.dtype)

    def _with_mask(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        repeats = q.shape[1] // k.shape[1]
        k, v = (tensor.repeat_interleave(repeats, dim=1) for tensor in (k, v))
        if self.sinks is None:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~self.mask, float("-inf"))
        sinks = self.sinks[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1] @ v
