"""The parts of a layer that are the same in every framework: their order, attention itself, experts' routing.

What runs GEMMs (projections, MLPs, experts) comes from a kit (`kits/`), which knows one framework. Positions and routing are
fixed beforehand: they take as long as in training, and the GPU never waits for the CPU.

With sequence parallelism, a rank holds its share of the tokens outside the blocks that tensor parallelism splits (`Shards`).
Nothing is exchanged: what other ranks would send, in forward and in backward, lies in memory beforehand, as random numbers. So
every operation has the sizes that it has in training, and communication takes no time.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gemmscope.model.layer_spec import LayerSpec, MlpSpec, MoeSpec
from gemmscope.model.spec import NormSpec
from gemmscope.step.attention_modules import SelfAttention
from gemmscope.step.kits.plain import Kit
from gemmscope.step.marks import mark
from gemmscope.step.mixer_modules import MIXERS
from gemmscope.step.stack_plan import StackPlan, norm_places

GRADIENT = 1e-3  # about what gradients of activations are


class Shards:
    """Goes from this rank's tokens to those of several ranks, and back."""

    def __init__(self, kit: Kit, parts: int) -> None:
        """`parts`: of how many shares this rank has one; 1: it has all tokens."""
        self.parts = parts
        self._device = kit.device
        self._memory: dict[tuple[str, int, int, torch.dtype], torch.Tensor] = {}

    def gathered(self, x: torch.Tensor, parts: int | None = None) -> torch.Tensor:
        """This rank's tokens together with those of the others; of all ranks, or of `parts`."""
        parts = self.parts if parts is None else parts
        if parts == 1:
            return x
        received = self._received("values", x.shape[0] * parts, x, 1.0)
        return _Gathered.apply(x, received)

    def kept(self, x: torch.Tensor, parts: int | None = None) -> torch.Tensor:
        """This rank's tokens of a sum over ranks, as after a reduce-scatter."""
        parts = self.parts if parts is None else parts
        if parts == 1:
            return x
        received = self._received("gradients", x.shape[0], x, GRADIENT)
        return _Kept.apply(x, received, x.shape[0] // parts)

    def _received(self, what: str, rows: int, like: torch.Tensor, scale: float) -> torch.Tensor:
        key = (what, rows, like.shape[1], like.dtype)
        if key not in self._memory:
            self._memory[key] = torch.randn(rows, like.shape[1], device=self._device, dtype=like.dtype) * scale
        return self._memory[key]


class _Gathered(torch.autograd.Function):
    """Forward: what was received. Backward: of the gradient, this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        ctx.rows = x.shape[0]
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient[: ctx.rows], None


class _Kept(torch.autograd.Function):
    """Forward: this rank's tokens. Backward: the gradient that was received."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, received: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(received)
        return x[:rows]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ARG004
        return ctx.saved_tensors[0], None, None


class Experts(nn.Module):
    """The router, the dispatch of tokens to experts, the experts, the combination of their outputs, and a shared expert.

    The router is computed, but where tokens go is fixed: as many to each expert as planned.
    """

    def __init__(self, kit: Kit, plan: StackPlan, spec: MoeSpec, norm: NormSpec | None, shards: Shards) -> None:
        super().__init__()
        hidden, rows = plan.model.hidden_size, plan.expert_rows
        self.shards, self.splits = shards, plan.run.expert_tp if shards.parts > 1 else 1  # ranks that split each expert
        make: dict[str, Any] = {"device": kit.device, "dtype": kit.precision}
        self.spec, self.rows = spec, rows
        self.norm = kit.norm(norm, hidden) if norm is not None else nn.Identity()
        self.router = nn.Linear(hidden, spec.experts, bias=spec.router_bias, **make)
        width = spec.latent or hidden
        self.into = kit.linear(hidden, width, bias=spec.latent_bias) if spec.latent is not None else None
        self.back = kit.linear(width, hidden, bias=spec.latent_bias) if spec.latent is not None else None
        self.experts = kit.experts(width, spec.expert, len(rows))
        self.shared = kit.experts(hidden, spec.shared, 1, "shared expert") if spec.shared is not None else None
        self.shared_gate = nn.Linear(hidden, 1, bias=False, **make) if spec.shared is not None and spec.shared_gate else None
        self.routing = kit.routing(plan.run.tokens * self.splits // shards.parts, rows)

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        normed = mark(self.norm(x), "router")
        weights = torch.softmax(self.router(normed).float(), dim=-1).topk(self.spec.top_k, dim=-1).values
        share = torch.sigmoid(self.shared_gate(normed)) if self.shared_gate is not None else None
        narrow = normed if self.into is None else self.into(mark(normed, "experts"), **how)
        sent, places = self.routing.send(self.shards.gathered(narrow, self.splits))
        outputs = mark(self.experts(mark(sent, "experts"), list(self.rows), **how), "combine")
        weights = self.shards.gathered(weights, self.splits)
        out = self.shards.kept(self.routing.combine(outputs, weights, places), self.splits)
        out = out if self.back is None else self.back(mark(out, "experts"), **how)
        if self.shared is not None:
            every = self.shards.gathered(normed)
            shared = self.shards.kept(self.shared(mark(every, "shared expert"), [every.shape[0]], **how))
            out = out + (shared if share is None else shared * share)
        return out


class LayerInput(nn.Module):
    """A layer's own input (Gemma 4), gated by the layer's output, projected, normed and added. It is fixed."""

    def __init__(self, kit: Kit, plan: StackPlan, width: int) -> None:
        super().__init__()
        self.gating = kit.linear(plan.model.hidden_size, width, bias=False)
        self.projection = kit.linear(width, plan.model.hidden_size, bias=False)
        self.norm = kit.norm(plan.model.norm, plan.model.hidden_size)
        self.fixed = torch.randn(plan.run.tokens // plan.shares, width, device=kit.device, dtype=kit.precision)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = functional.gelu(self.gating(x), approximate="tanh") * self.fixed
        return x + self.norm(self.projection(gated))


class Block(nn.Module):
    """One layer: attention, a mixer or both side by side, then the feed-forward block, each added to what comes in.

    The norm before a block is part of it where it stands alone. Blocks side by side share one (`before`). With sequence
    parallelism, norms stand alone: they run before the tokens of all ranks are gathered.
    """

    def __init__(self, kit: Kit, layer: LayerSpec, plan: StackPlan, shards: Shards, *, kept: bool = False) -> None:
        """`kept`: a mix keeps all of it in a higher precision."""
        super().__init__()
        self.kit, self.shards, self.kept, hidden = kit, shards, kept, plan.model.hidden_size
        sharded = shards.parts > 1
        places = norm_places(layer)
        norm = plan.model.norm
        both = layer.attention is not None and layer.mixer is not None
        self.parallel = places.shared
        own = None if self.parallel or both or sharded or not places.before else norm
        self.attention = SelfAttention(kit, layer.attention, plan, own) if layer.attention is not None else None
        self.mixer = (
            MIXERS[layer.mixer.kind](kit, hidden, layer.mixer, plan.sequence_length, own) if layer.mixer is not None else None
        )
        self.routes = isinstance(layer.mlp, MoeSpec)  # experts take this rank's tokens, and norm them
        alone = sharded and not self.routes
        inside = None if self.parallel or alone or not places.before else norm
        self.feed_forward = _feed_forward(kit, plan, layer.mlp, inside, shards)
        mixes = self.attention is not None or self.mixer is not None
        shared = (self.parallel or both or sharded) and places.before and mixes
        self.before = kit.norm(norm, hidden) if shared else nn.Identity()
        after = alone and not self.parallel and places.before and layer.mlp is not None
        self.before_feed_forward = kit.norm(norm, hidden) if after else nn.Identity()
        self.after_mixing = kit.norm(norm, hidden) if places.after and mixes else nn.Identity()
        self.own_input = LayerInput(kit, plan, layer.input_width) if layer.input_width else nn.Identity()
        self.after_feed_forward = kit.norm(norm, hidden) if places.after and layer.mlp is not None else nn.Identity()

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        with self.kit.autocast(kept=True) if self.kept else nullcontext():
            return self._run(x, **how)

    def _run(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        if self.attention is not None or self.mixer is not None:
            x = mark(x, "qkv" if self.attention is not None else "mixer in")
            normed = self.before(x)
            mixed = self.shards.kept(self._mixed(self.shards.gathered(normed), **how))
            if self.parallel and self.feed_forward is not None:
                return x + mixed + self._fed_forward(mark(normed, "mlp"), **how)
            x = x + self.after_mixing(mixed)
        if self.feed_forward is None:
            return self.own_input(x)
        x = mark(x, "mlp")
        added = self._fed_forward(self.before_feed_forward(x), **how)
        return self.own_input(x + self.after_feed_forward(added))

    def _fed_forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        """What the feed-forward block adds."""
        assert self.feed_forward is not None
        with self.kit.autocast_of("mlp"):
            if self.routes:
                return self.feed_forward(x, **how)
            return self.shards.kept(self.feed_forward(self.shards.gathered(x), **how))

    def _mixed(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        """What attention, the mixer, or both add."""
        if self.mixer is None:
            assert self.attention is not None
            return self.attention(x, **how)
        if self.attention is None:
            return self.mixer(x, **how)
        return self.attention(x, **how) + self.mixer(mark(x, "mixer in"), **how)


class Prediction(nn.Module):
    """A layer of multi-token prediction: the output of the layer before and the embedding of the next token are normed, joined
    and projected; a layer and a norm follow."""

    def __init__(self, kit: Kit, plan: StackPlan, shards: Shards) -> None:
        super().__init__()
        hidden = plan.model.hidden_size
        self.kit, self.tp, self.shards = kit, plan.run.tp, shards
        self.of_state, self.of_token, self.last = (kit.norm(plan.model.norm, hidden) for _ in range(3))
        self.projection = kit.linear(2 * hidden, hidden // plan.run.tp, bias=False)
        self.block = Block(kit, plan.model.predicting, plan, shards)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, **how: Any) -> torch.Tensor:
        joined = torch.cat((self.of_state(mark(x, "prediction")), self.of_token(tokens)), dim=-1)
        projected = self.projection(self.shards.gathered(joined), **how)
        whole = projected.repeat(1, self.tp) if self.tp > 1 else projected  # in place of the gather from other ranks
        return self.last(self.block(self.shards.kept(whole), **how))


def _feed_forward(
    kit: Kit, plan: StackPlan, spec: MlpSpec | MoeSpec | None, norm: NormSpec | None, shards: Shards
) -> nn.Module | None:
    if spec is None:
        return None
    if isinstance(spec, MoeSpec):
        return Experts(kit, plan, spec, norm, shards)
    separate = plan.run.separate_projections and not spec.stored_fused
    return kit.mlp(norm, plan.model.hidden_size, spec, separate=separate)
