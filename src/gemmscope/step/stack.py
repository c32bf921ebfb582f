"""The real training computation, from embedding to optimizer, at any depth, with the weights of a few layers.

Layers beyond the first few reuse the memory of their weights (`plan.slots`), each through its own parameters, and every gradient
is dropped as soon as it is complete: no gradient is added to another, so a layer runs exactly the kernels that it runs in the
whole model. The optimizer also updates one parameter for every layer, some of which share memory: it moves as many bytes as for
the whole model. Its learning rate is zero.

A step may be captured as one CUDA graph (forward, backward and optimizer together): the CPU launches one graph instead of
thousands of kernels. All captured steps use the same memory: one runs at a time, and nothing outlives a step.
"""

import gc
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gemmscope.step.attention_modules import drop_gradient
from gemmscope.step.blocks import Block, Prediction, Shards
from gemmscope.step.kits.plain import Kit
from gemmscope.step.live_module import ModuleStep
from gemmscope.step.marks import mark, mark_step
from gemmscope.step.mixer_kernels import MixerKernels
from gemmscope.step.stack_plan import StackPlan, kept_layers

WARM_UP = 3  # steps: kernels are compiled and tuned, scales of delayed scaling are known


class Weights:
    """The memory that layers of one slot share, in all recipes."""

    def __init__(self) -> None:
        self._memory: dict[tuple[int, str, torch.dtype], torch.Tensor] = {}
        self._beside: dict[tuple[int, str], torch.Tensor] = {}  # gradients and moments

    def adopt(self, module: nn.Module, slot: int) -> list[nn.Parameter]:
        """Move a module's parameters into the slot's memory. Parameters that are new there keep their values."""
        adopted = []
        for name, parameter in list(module.named_parameters()):
            owner, _, own_name = name.rpartition(".")
            shared = nn.Parameter(self._memory.setdefault((slot, name, parameter.dtype), parameter.data))
            setattr(module.get_submodule(owner), own_name, shared)
            adopted.append(shared)
        return adopted

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """The memory of a gradient, shared by all parameters that share memory."""
        return self._shared(parameter, "gradient", lambda like: torch.randn_like(like) * 1e-3)

    def moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The state of AdamW, shared by all parameters that share memory."""
        return {name: self._shared(parameter, name, torch.zeros_like) for name in ("exp_avg", "exp_avg_sq")}

    def _shared(self, parameter: nn.Parameter, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        key = parameter.data_ptr(), name
        if key not in self._beside:
            self._beside[key] = make(parameter)
        return self._beside[key]


class Stack(nn.Module):
    """Embedding, layers, final norm, head and loss in one recipe."""

    def __init__(self, plan: StackPlan, kit: Kit, weights: Weights, device: str) -> None:
        super().__init__()
        self.plan, self.kit = plan, kit
        make: dict[str, Any] = {"device": device, "dtype": kit.precision}
        vocabulary, hidden = plan.model.vocab_size, plan.model.hidden_size
        self.embedding = nn.Embedding(vocabulary, hidden, **make) if vocabulary and plan.embeds else None
        self.head = nn.Linear(hidden, vocabulary, bias=plan.model.head_bias, **make) if vocabulary and plan.heads else None
        self.final_norm = kit.norm(plan.model.norm, hidden) if plan.heads else nn.Identity()
        tied = self.head if plan.model.tied_embeddings else None
        if tied is not None:
            tied.weight = None
        self.ends = weights.adopt(self, -1)
        if tied is not None and self.embedding is not None:
            tied.weight = self.embedding.weight
        self.shards = Shards(kit, plan.shares)
        blocks, self.inner = [], []
        for layer, slot, kept in zip(plan.model.layers, plan.slots, kept_layers(plan, kit.recipe.kept), strict=True):
            block = Block(kit, layer, plan, self.shards, kept=kept)
            self.inner += weights.adopt(block, slot)
            blocks.append(kit.finish(block, kept=kept))
        self.blocks = nn.ModuleList(blocks)
        count = plan.model.prediction_layers
        predictions = [
            Prediction(kit, plan, self.shards) for _ in range(min(count, 1) if plan.model.prediction_shared else count)
        ]
        for number, prediction in enumerate(predictions):
            self.inner += weights.adopt(prediction, -2 - number)
        self.predictions = nn.ModuleList(kit.finish(prediction) for prediction in predictions)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, *, first: bool | None = None) -> torch.Tensor:
        """The loss. `x` are token ids, or hidden states where there is no vocabulary."""
        tokens = x = self.shards.kept(self.embedding(x) if self.embedding is not None else x)
        how = self.kit.arguments(first=first)
        with self.kit.autocast():
            for block in self.blocks:
                run = partial(block, **how)
                x = self.kit.checkpoint(run, x) if self.plan.run.recompute == "full" else run(x)
            predicted, further = x, []
            for number in range(self.plan.model.prediction_layers):  # each goes on where the one before ended
                run = partial(self.predictions[number % len(self.predictions)], **how)
                full = self.plan.run.recompute == "full"
                predicted = self.kit.checkpoint(run, predicted, tokens) if full else run(predicted, tokens)
                further.append(predicted)
        loss = self._loss(self.final_norm(mark(x, "head")), labels)
        for predicted in further:
            loss = loss + self._loss(mark(predicted, "head"), labels)
        return loss

    def _loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.head is None:
            return x.float().square().mean()
        x = self.shards.gathered(x)
        logits = mark(self.head(x), "loss")
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels)


class Step:
    """One optimizer step, to `run` repeatedly.

    `real`: every layer has its own weights, and gradients are kept until the optimizer has used them, as in training. Otherwise
    layers share memory, gradients are dropped as soon as they are complete, and the optimizer uses buffers in their place.
    """

    def __init__(self, plan: StackPlan, kit: Kit, weights: Weights, device: str, *, real: bool = False) -> None:
        self.plan, self.device = plan, device
        self.stack = Stack(plan, kit, weights, device)
        self._model = kit.compile(self.stack, "whole")
        self._first_part = "model" if kit.compiled == "whole" else "embedding"  # marks inside would split what is compiled
        self._weights, self._real = weights, real
        self._every = updated = [*self.stack.inner, *self.stack.ends]
        if not real:
            for parameter in self._every:
                parameter.register_post_accumulate_grad_hook(drop_gradient)
            updated = [_with_gradient(parameter, weights) for parameter in self._every]
        self.optimizer = _optimizer(updated, weights)
        self._x, self._labels = _batch(plan, device, kit.precision)
        if self._x.requires_grad:
            self._x.register_post_accumulate_grad_hook(drop_gradient)

    def run(self) -> None:
        """All micro-batches, forward and backward, then the optimizer."""
        for phase in self.phases():
            phase()

    def phases(self) -> Iterator[Callable[[], object]]:
        """What a step does, one after the other: forward and backward of every micro-batch, and the optimizer."""
        losses: list[torch.Tensor] = []
        for number in range(self.plan.accumulation):
            yield partial(self._forward, number, losses)
            yield lambda: losses.pop().backward()
        yield self._update

    def _forward(self, number: int, losses: list[torch.Tensor]) -> None:
        if number and not self._real:  # later micro-batches add to the gradients of earlier ones
            for parameter in self._every:
                parameter.grad = self._weights.gradient(parameter)
        mark_step(self._first_part, "forward")
        first = None if self.plan.accumulation == 1 else number == 0
        losses.append(self._model(self._x, self._labels, first=first))

    def _update(self) -> None:
        mark_step("optimizer")
        self.optimizer.step()
        if self._real:
            self.optimizer.zero_grad(set_to_none=True)

    @property
    def mixer_kernels(self) -> MixerKernels:
        """What runs the mixers."""
        return self.stack.kit.kernels

    def loss(self) -> float:
        """One forward pass, to check that the loss is finite. With gradients: without, it would be compiled again."""
        loss = float(self._model(self._x, self._labels).detach())
        if not math.isfinite(loss):
            raise ArithmeticError(f"the loss is {loss}")
        return loss


def _with_gradient(parameter: nn.Parameter, weights: Weights) -> nn.Parameter:
    """Another parameter on the same memory that always has a gradient, for the optimizer."""
    updated = nn.Parameter(parameter.data)
    updated.grad = weights.gradient(parameter)
    return updated


def _optimizer(parameters: list[nn.Parameter], weights: Weights) -> torch.optim.Optimizer:
    """AdamW with a learning rate of zero. Parameters that share memory also share its state."""
    fused = parameters[0].is_cuda
    optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, fused=fused)
    for parameter in parameters:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu")
        optimizer.state[parameter] = {"step": step, **weights.moments(parameter)}
    return optimizer


def _batch(plan: StackPlan, device: str, precision: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    vocabulary = plan.model.vocab_size
    labels = torch.randint(vocabulary, (plan.run.tokens,), device=device) if vocabulary else torch.zeros(0, device=device)
    if vocabulary and plan.embeds:
        return torch.randint(vocabulary, (plan.run.tokens,), device=device), labels
    return torch.randn(plan.run.tokens, plan.model.hidden_size, device=device, dtype=precision, requires_grad=True), labels


class GraphMemory:
    """Memory that captured steps share. It must never be without a graph, so it has one of its own."""

    def __init__(self) -> None:
        self.pool: Any = torch.cuda.graph_pool_handle()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=self.pool):
            self._tensor = torch.zeros(1, device="cuda")


class CapturedStep:
    """Captures a step when it is made; `run` replays it.

    After a failed capture, the process cannot be used any more: PyTorch's allocator and random generator still expect its end.
    """

    def __init__(self, step: Step | ModuleStep, memory: GraphMemory) -> None:
        for group in step.optimizer.param_groups if step.optimizer is not None else ():
            group["capturable"] = True
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # as the stream of a capture, it must not be the default one
            for _ in range(WARM_UP):
                step.run()
            self._loss = step.loss()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # the memory of launched steps: a captured one has its own
        self._step, self._graph, self.mixer_kernels = step, torch.cuda.CUDAGraph(), step.mixer_kernels
        try:
            with torch.cuda.graph(self._graph, pool=memory.pool, capture_error_mode="thread_local"):
                step.run()
        except Exception as error:
            raise _first(error) from error

    def run(self) -> None:
        """One step."""
        self._graph.replay()

    def phases(self) -> Iterator[Callable[[], object]]:
        """All of the step at once."""
        yield self.run

    def loss(self) -> float:
        """The loss before it was captured."""
        return self._loss


def _first(error: BaseException) -> BaseException:
    """What went wrong first: that the capture could not be ended is only its consequence.

    >>> try:
    ...     try:
    ...         raise ValueError("synchronizes")
    ...     finally:
    ...         raise RuntimeError("capture failed")
    ... except RuntimeError as error:
    ...     _first(error)
    ValueError('synchronizes')
    """
    while error.__context__ is not None:
        error = error.__context__
    return error
