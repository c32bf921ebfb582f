"""Training loops of many kinds, run with and without observers: everything that they leave behind is compared bit for bit.

`benchmarks/observer_matrix.py` runs the same loops on a GPU, where it adds loops with Transformer Engine and torchao.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import itertools
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import profiler_legacy
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import gemmscope
from gemmscope.numerics.recording import read_recording

WIDTH, STEPS, RECORDED = 16, 5, (1, 3)  # the first recorded step and the first one after them
OBSERVERS = ("record", "trace", "both")


@dataclass
class Training:
    """A loop: what the user passes to the recorder, one step, and what else it leaves behind."""

    model: Any
    step: Callable[[int], Any]
    kept: list[Any] = field(default_factory=list)
    """What the loop keeps: losses, copies, counts."""


@dataclass(frozen=True)
class Loop:
    """One kind of training. `recorded`: whether some linears can be recorded, `complete`: whether all can; `traced`: whether a
    trace can be taken."""

    name: str
    start: Callable[[str], Training]
    recorded: bool = True
    complete: bool = True
    traced: bool = True


class Block(nn.Module):
    """An MLP with dropout; `noise` adds what else its forward depends on."""

    def __init__(self, noise: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.noise = noise
        self.history: list[float] = []
        self.counts: dict[str, int] = {}
        self.running = torch.zeros(())
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 if self.noise is None else self.noise(self)
        return x + scale * functional.dropout(self.down_proj(functional.gelu(self.up_proj(x))), 0.1, self.training)


class Experts(nn.Module):
    """Experts in one parameter [experts, ., .], which run in one of the usual ways."""

    def __init__(self, how: str, noise: Callable[[Any], Any] | None = None, *, compiled: bool = False) -> None:
        super().__init__()
        self.how, self.noise, self.is_transposed = how, noise, how != "loop"
        shapes = [(3, 2 * WIDTH, WIDTH), (3, WIDTH, 2 * WIDTH)]
        if self.is_transposed:
            shapes = [(one, three, two) for one, two, three in shapes]
        self.up_proj, self.down_proj = (nn.Parameter(torch.randn(shape) * 0.2) for shape in shapes)
        self.history: list[float] = []
        self.counts: dict[str, int] = {}
        self.running = torch.zeros(())
        self.generator: torch.Generator | None = None
        self.multiply = torch.compile(_grouped, backend=BACKEND, fullgraph=True) if compiled else _grouped

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH) * (1.0 if self.noise is None else self.noise(self))
        if self.how == "loop":
            parts = [
                functional.linear(functional.linear(one, up).relu_(), down)
                for one, up, down in zip(rows.chunk(3), self.up_proj, self.down_proj, strict=True)
            ]
            output = torch.cat(parts)
        elif self.how == "batched":
            output = torch.bmm(functional.silu(torch.bmm(rows.reshape(3, -1, WIDTH), self.up_proj)), self.down_proj)
        else:
            offsets = torch.tensor([4, 12, 24], dtype=torch.int32, device=x.device)
            output = self.multiply(functional.silu(self.multiply(rows, self.up_proj, offsets)), self.down_proj, offsets)
        return x + output.reshape(x.shape) * 0.1


def _grouped(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    return functional.grouped_mm(x.bfloat16(), weights.bfloat16(), offs=offsets).float()


class Mixture(nn.Module):
    """Experts as modules: some get no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            output[chosen == number] = expert(x[chosen == number])
        return output


class Network(nn.Module):
    """A few layers and a head."""

    def __init__(self, *layers: nn.Module, run: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers or (Block(), Block()))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.run is None else self.run(layer, x)
        return self.head(x)


Step = Callable[[Any, Tensor, Training], Tensor | None]


def plain(model: Any, x: Tensor, _: Training) -> Tensor:
    """Forward, loss and backward."""
    loss: Tensor = (model(x).float() - x.detach().flip(-1)).square().mean()
    loss.backward()
    return loss


def loop_of(
    build: Callable[[], Any] = Network,
    step: Step = plain,
    *,
    observed: Callable[[Any], Any] = lambda model: model,
    tokens: Callable[[int], int] = lambda number: 24,
) -> Callable[[str], Training]:
    """A loop that trains a model with SGD on random inputs."""

    def start(device: str) -> Training:
        with torch.device(device):
            model = build()
        inner = observed(model)
        optimizer = torch.optim.AdamW([one for one in inner.parameters() if one.requires_grad], lr=0.01)
        batches = torch.Generator().manual_seed(1)

        def one_step(number: int) -> Any:
            optimizer.zero_grad()
            x = torch.randn(tokens(number), WIDTH, generator=batches).to(device, torch.get_default_dtype())
            loss = step(model, x.requires_grad_(), training)
            optimizer.step()
            return loss

        training = Training(inner, one_step)
        training.kept.append(optimizer)
        return training

    return start


def two_layers(layer: Callable[[], nn.Module], **settings: Any) -> Callable[[], nn.Module]:
    """A network of two such layers."""
    return lambda: Network(layer(), layer(), **settings)


# What forward may depend on


def python_random(_: Any) -> float:
    return random.random()


def numpy_random(_: Any) -> float:
    return float(np.random.rand())


def torch_random(_: Any) -> float:
    return float(torch.rand(()))


def own_generator(module: Any) -> float:
    module.generator = module.generator or torch.Generator().manual_seed(5)
    return float(torch.rand((), generator=module.generator))


def list_attribute(module: Any) -> float:
    module.history.append(0.1)
    return 1.0 / len(module.history)


def dict_attribute(module: Any) -> float:
    module.counts["calls"] = module.counts.get("calls", 0) + 1
    return 1.0 / module.counts["calls"]


def tensor_attribute(module: Any) -> float:
    module.running += 1
    return 1.0 / float(module.running)


NOISES = (python_random, numpy_random, torch_random, own_generator, list_attribute, dict_attribute, tensor_attribute)


def noisy_loops() -> Iterator[Loop]:
    """Modules, and experts in one parameter, whose forward has state of every kind."""
    for noise in NOISES:
        yield Loop(f"{noise.__name__} in a layer", loop_of(two_layers(partial(Block, noise))))
        yield Loop(f"{noise.__name__} in experts", loop_of(two_layers(partial(Experts, "loop", noise))))


# What a step may do


def averaged(model: Any, x: Tensor, training: Training) -> Tensor:
    """An average of the weights by deepcopy, which is used."""
    loss = plain(model, x, training)
    training.kept.append(copy.deepcopy(model))
    with torch.no_grad():
        training.kept.append(training.kept[-1](x))
    return loss


def saved(model: Any, x: Tensor, training: Training) -> Tensor:
    """The whole model as a file, and back; the outputs with their graph."""
    output = model(x)
    buffer = io.BytesIO()
    torch.save([model, output], buffer)
    buffer.seek(0)
    again, _ = torch.load(buffer, weights_only=False)
    training.kept += [again, pickle.loads(pickle.dumps(model))]
    output.square().mean().backward()
    return plain(model, x, training)


def state_round_trip(model: Any, x: Tensor, training: Training) -> Tensor:
    state = copy.deepcopy(model.state_dict())
    loss = plain(model, x, training)
    model.load_state_dict(state)
    return loss


def accumulated(model: Any, x: Tensor, training: Training) -> Tensor:
    return torch.stack([plain(model, part, training).detach() for part in x.detach().chunk(3)]).mean()


def fails_forward(model: Any, x: Tensor, training: Training) -> Tensor:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = model.layers[1].register_forward_pre_hook(fail)
    inside = next(iter(model.layers[0].children()), model.head).register_forward_pre_hook(fail)
    for one in (inside, handle):
        with contextlib.suppress(ZeroDivisionError):
            model(x)
        one.remove()
    return plain(model, x, training)


def fails_backward(model: Any, x: Tensor, training: Training) -> Tensor:
    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    hidden = model.layers[0](x)
    hidden.register_hook(fail)
    with contextlib.suppress(ZeroDivisionError):
        model.head(hidden).sum().backward()
    return plain(model, x, training)


def evaluated(model: Any, x: Tensor, training: Training) -> Tensor:
    model.eval()
    with torch.no_grad():
        training.kept.append(model(x))
    with torch.inference_mode():
        training.kept.append(model(x).sum().item())
    model.train()
    return plain(model, x, training)


def several_losses(model: Any, x: Tensor, _: Training) -> Tensor:
    output = model(x)
    output.mean().backward(retain_graph=True)
    loss: Tensor = output.square().mean()
    loss.backward()
    return loss


def clipped(model: Any, x: Tensor, training: Training) -> Tensor:
    loss = plain(model, x, training)
    training.kept.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    return loss


def autocast(model: Any, x: Tensor, training: Training) -> Tensor:
    """Two forward passes that share one cache of casts, a backward pass between them."""
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        one = model(x).float().square().mean()
        model(x.detach()).float().mean().backward()
        other = model(x * 2).float().square().mean()
        (one + other).backward()
    return plain(model, x, training)


def with_hooks(model: Any, x: Tensor, training: Training) -> Tensor:
    """Hooks of the user, removed in another order."""
    calls: list[Any] = []
    handles = [
        model.head.register_forward_hook(lambda _module, _args, output: output * 1.5),
        model.head.register_full_backward_hook(lambda _module, given, _arriving: calls.append(given[0].sum().item())),
        model.layers[0].register_forward_pre_hook(lambda _module, args: (args[0] * 1.1,)),
        model.head.weight.register_post_accumulate_grad_hook(lambda one: calls.append(one.grad.sum().item())),
    ]
    output = model(x)
    output.register_hook(lambda gradient: gradient * 2)
    loss: Tensor = output.square().mean()
    loss.backward()
    for handle in handles:
        handle.remove()
    training.kept += calls
    return loss


def per_sample(model: Any, x: Tensor, training: Training) -> Tensor:
    """Gradients of every sample with `torch.func`."""
    parameters = {name: one.detach() for name, one in model.named_parameters()}

    def loss_of(weights: dict[str, Tensor], one: Tensor) -> Tensor:
        loss: Tensor = torch.func.functional_call(model, weights, (one.unsqueeze(0),)).square().mean()
        return loss

    gradients = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0), randomness="different")(parameters, x.detach())
    training.kept += gradients.values()
    return plain(model, x, training)


def input_in_place(model: Any, x: Tensor, _: Training) -> Tensor:
    given = x.detach().clone()
    with torch.no_grad():
        training_output = model(given)
        given.mul_(2)
    hidden = model.layers[0](given.requires_grad_(False))
    hidden.add_(training_output)
    given.add_(1)  # no backward pass needs it: the first linear is frozen
    loss: Tensor = model.head(hidden.relu_()).square().mean()
    loss.backward()
    return loss


def penalized(model: Any, x: Tensor, _: Training) -> Tensor:
    """A gradient penalty: backward through backward."""
    loss = model(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    loss = loss + gradient.square().mean()
    loss.backward()
    return loss  # type: ignore[no-any-return]


def sampled(model: Any, x: Tensor, training: Training) -> Tensor:
    own = torch.Generator().manual_seed(len(training.kept))
    loader = torch.utils.data.DataLoader(x.detach().cpu(), batch_size=8, shuffle=True, generator=own)
    for part in itertools.islice(loader, 2):
        plain(model, part.to(x.device), training)
    training.kept.append(torch.multinomial(model(x).detach().cpu().softmax(-1), 1, generator=own))
    training.kept.append(own.get_state())
    return plain(model, x, training)


def counted(model: Any, x: Tensor, training: Training) -> Tensor:
    """A mode of the user, which counts operations."""
    with FlopCounterMode(display=False) as counter:
        loss = plain(model, x, training)
    training.kept.append(counter.get_total_flops())
    return loss


def offloaded(model: Any, x: Tensor, training: Training) -> Tensor:
    packed: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: packed.append(one.numel()) or one.clone(), lambda one: one):
        loss = plain(model, x, training)
    training.kept.append(sum(packed))
    return loss


def graph_kept(model: Any, x: Tensor, training: Training) -> Tensor:
    """The loss is kept with its graph, over several steps."""
    loss: Tensor = model(x).square().mean()
    loss.backward(retain_graph=True)
    training.kept.append(loss)
    return loss


def profiled(model: Any, x: Tensor, training: Training) -> Tensor:
    """The user's own profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss = plain(model, x, training)
    training.kept.append(len(profiler.events() or ()) > 0)
    return loss


def profiled_as_before(model: Any, x: Tensor, training: Training) -> Tensor:
    """PyTorch's earlier profiler."""
    with profiler_legacy.profile() as profiler:
        loss = plain(model, x, training)
    training.kept.append(len(profiler.function_events) > 0)
    return loss


def traced(model: Any, x: Tensor, training: Training) -> Tensor:
    training.kept.append(torch.jit.trace(model.eval(), x.detach(), check_trace=False)(x))
    model.train()
    return plain(model, x, training)


def captured(model: Any, x: Tensor, training: Training) -> Tensor:
    """The graph of the forward pass."""
    graph = make_fx(lambda one: model(one))(x.detach())
    training.kept += [str(graph.code), graph(x.detach())]
    return plain(model, x, training)


def interrupted(model: Any, x: Tensor, training: Training) -> Tensor:
    """KeyboardInterrupt in experts, inside of a mode of the user, who goes on."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.layers[1].register_forward_hook(interrupt, prepend=True)
    with contextlib.suppress(KeyboardInterrupt), FlopCounterMode(display=False):
        model(x)
    handle.remove()
    loss = plain(model, x, training)
    training.kept.append(len(_get_current_dispatch_mode_stack()))
    return loss


def in_threads(model: Any, x: Tensor, training: Training) -> Tensor:
    """Other threads use a layer while this one does."""
    results: list[Any] = [None, None]

    def gradients(number: int) -> None:
        loss = model.layers[1](x.detach() * (number + 1)).square().sum()
        results[number] = torch.autograd.grad(loss, list(model.layers[1].parameters()))

    threads = [threading.Thread(target=gradients, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    loss = plain(model, x, training)
    for thread in threads:
        thread.join()
    training.kept += results
    return loss


def profiled_from_the_start(device: str) -> Training:
    """A profiler with a schedule, which began before the observers."""
    schedule = torch.profiler.schedule(wait=0, warmup=2, active=2, repeat=1)
    profiler = profile(activities=[ProfilerActivity.CPU], schedule=schedule)
    profiler.__enter__()

    def step(model: Any, x: Tensor, training: Training) -> Tensor:
        loss = plain(model, x, training)
        profiler.step()
        training.kept.append(profiler.step_num)
        if profiler.step_num == STEPS:
            profiler.__exit__(None, None, None)
        return loss

    return loop_of(step=step)(device)


# What a model may be


def tied() -> nn.Module:
    model = Network()
    model.layers[1].up_proj.weight = model.layers[0].up_proj.weight
    return model


class Noise(nn.Module):
    """A weight that is computed when it is read, with a random number and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.reads += 1
        return functional.dropout(weight, 0.1) * (1 + 0.01 * self.reads)


def computed_weights() -> nn.Module:
    model = Network()
    parametrizations.spectral_norm(model.head)
    parametrize.register_parametrization(model.layers[0].up_proj, "weight", Noise())
    nn.utils.spectral_norm(model.layers[1].down_proj)
    return model


class Lora(nn.Module):
    """A frozen linear and a trained pair beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def frozen_first() -> nn.Module:
    model = Network(Block())
    model.layers[0].requires_grad_(False)
    return model


def normed() -> nn.Module:
    model = Network()
    parametrizations.weight_norm(model.head)
    return model


def attention() -> nn.Module:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(WIDTH, 2, dropout=0.1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x, x, x, need_weights=False)[0]

    return Network(Attention(), Block())


class DoublePrecision:
    """The default type of new tensors is float64 while this loop runs."""

    def __call__(self, device: str) -> Training:
        torch.set_default_dtype(torch.float64)
        return loop_of(two_layers(lambda: nn.Sequential(Block(), Experts("loop"))))(device)


def selective(layer: nn.Module, x: Tensor) -> Tensor:
    gemms = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)

    def policy(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in gemms else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


CHECKPOINTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "selective": selective,
}


def checkpoint_loops() -> Iterator[Loop]:
    layers: dict[str, Callable[[], nn.Module]] = {"layers": Block, "experts": partial(Experts, "batched")}
    for (how, run), (what, layer) in itertools.product(CHECKPOINTS.items(), layers.items()):
        yield Loop(f"{how} checkpoints of {what}", loop_of(two_layers(layer, run=run)))


# Compilation: `aot_eager` takes no C++ compiler, and hooks, modes and guards are the same in all backends

BACKEND = "aot_eager"


def by_layer() -> nn.Module:
    model = Network()
    for layer in model.layers:
        layer.compile(backend=BACKEND)
    return model


class Around(nn.Module):
    """A compiled function around a model that the recorder sees as a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Network(Block(), Experts("batched"))
        self.call = torch.compile(self.inside.forward, backend=BACKEND, fullgraph=True, dynamic=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)  # type: ignore[no-any-return]


def growing(number: int) -> int:
    """Tokens: another number in a recorded step, so that it is compiled again."""
    return 24 if number in (0, 3) else 24 * (number + 1)


def compiled_autograd(model: Any, x: Tensor, _: Training) -> Tensor:
    loss: Tensor = model(x).square().mean()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    return loss


def compiled_loops() -> Iterator[Loop]:
    whole = partial(torch.compile, backend=BACKEND)
    yield Loop("compiled as a whole", loop_of(lambda: whole(Network())), recorded=False)
    yield Loop("compiled by layer", loop_of(by_layer))
    yield Loop("compiled by layer, copied", loop_of(by_layer, averaged))
    yield Loop("a compiled function in experts", loop_of(two_layers(partial(Experts, "grouped", compiled=True))), complete=False)
    again = loop_of(Around, observed=lambda model: model.inside, tokens=growing)
    yield Loop("fullgraph, compiled again in a recorded step", again, recorded=False)


def slow_loops() -> list[Loop]:
    """They take half a minute."""
    return [Loop("compiled autograd", loop_of(lambda: Network(Block()), compiled_autograd))]


def parallel_loops() -> Iterator[Loop]:
    """They need a process group."""

    def sharded() -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        model = Network(Block(), Experts("batched"))
        for layer in model.layers:
            fully_shard(layer)
        return fully_shard(model)  # type: ignore[no-any-return]

    yield Loop("DistributedDataParallel", loop_of(lambda: nn.parallel.DistributedDataParallel(Network(Block(), Experts("loop")))))
    yield Loop("fully_shard", loop_of(sharded))


def loops() -> list[Loop]:
    """All kinds that need nothing but PyTorch and one process."""
    return [
        Loop("plain", loop_of()),
        *noisy_loops(),
        Loop("batched experts", loop_of(two_layers(partial(Experts, "batched")))),
        Loop("grouped experts", loop_of(two_layers(partial(Experts, "grouped")))),
        Loop("experts as modules", loop_of(Mixture)),
        Loop("autocast", loop_of(two_layers(lambda: nn.Sequential(Block(), Experts("loop"))), autocast)),
        *checkpoint_loops(),
        Loop("average by deepcopy", loop_of(two_layers(lambda: nn.Sequential(Block(), Experts("loop"))), averaged)),
        Loop("torch.save and pickle", loop_of(two_layers(lambda: nn.Sequential(Block(), Experts("loop"))), saved)),
        Loop("state_dict and back", loop_of(step=state_round_trip)),
        Loop("gradient accumulation", loop_of(step=accumulated)),
        Loop("exception in forward", loop_of(two_layers(partial(Experts, "loop")), fails_forward)),
        Loop("exception in a layer's forward", loop_of(step=fails_forward)),
        Loop("exception in backward", loop_of(step=fails_backward)),
        Loop("evaluation", loop_of(two_layers(lambda: nn.Sequential(Block(), Experts("loop"))), evaluated)),
        Loop("several losses", loop_of(step=several_losses)),
        Loop("gradient clipping", loop_of(step=clipped)),
        Loop("hooks of the user", loop_of(step=with_hooks)),
        Loop("torch.func", loop_of(step=per_sample)),
        Loop("inputs changed in place", loop_of(frozen_first, input_in_place)),
        Loop("gradient penalty", loop_of(lambda: Network(Block()), penalized)),
        Loop("samples from a generator", loop_of(step=sampled)),
        Loop("a FLOP counter", loop_of(two_layers(lambda: nn.Sequential(Block(), Experts("loop"))), counted)),
        Loop("saved tensors are packed", loop_of(two_layers(lambda: nn.Sequential(Block(), Experts("loop"))), offloaded)),
        Loop("graphs are kept", loop_of(step=graph_kept)),
        Loop("torch.jit.trace", loop_of(lambda: Network(Block()), traced)),
        Loop("profiler of the user", loop_of(step=profiled), traced=False),
        Loop("earlier profiler of the user", loop_of(step=profiled_as_before), traced=False),
        Loop("profiler of the user, before", profiled_from_the_start, traced=False),
        Loop("tied weights", loop_of(tied)),
        Loop("LoRA", loop_of(two_layers(Lora))),
        Loop("weight norm", loop_of(normed)),
        Loop("weights that are computed", loop_of(computed_weights)),
        Loop("make_fx", loop_of(lambda: Network(Block(), Experts("batched")), captured)),
        Loop("KeyboardInterrupt", loop_of(two_layers(partial(Experts, "loop")), interrupted)),
        Loop("threads", loop_of(two_layers(partial(Experts, "loop")), in_threads)),
        Loop("attention", loop_of(attention)),
        Loop("default type float64", DoublePrecision()),
    ]


@dataclass(frozen=True)
class Outcome:
    """What a run left behind, by name, and what the observers say of it."""

    left: dict[str, str]
    recorded: bool = True
    missing: tuple[str, ...] = ()
    """Linears that were not recorded."""
    traced: bool = True


def run(loop: Loop, observers: str, folder: Path, device: str = "cpu") -> Outcome:
    """Run a loop from the same state: without observers (an empty string), with one of them, or with both."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    losses: list[Any] = []
    recording = trace = None
    begin, end = RECORDED
    try:
        training = loop.start(device)
        with contextlib.ExitStack() as stack:
            if observers in ("record", "both"):
                path = folder / "recording.safetensors"
                recording = stack.enter_context(gemmscope.record_tensors(training.model, path, after=begin, steps=end - begin))
            if observers in ("trace", "both"):
                trace = stack.enter_context(gemmscope.trace_me(folder / "trace.json.gz", after=begin, steps=end - begin))
            for number in range(STEPS):
                losses.append(training.step(number))
                for observer in (recording, trace):
                    if observer is not None:
                        observer.step()
    finally:
        torch.set_default_dtype(default)
        torch._dynamo.reset()
    left = dict(_left("losses", losses)) | dict(_left("model", training.model)) | dict(_left("kept", training.kept))
    states = {"random": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    left |= dict(_left("state", states))
    recorded = recording is not None and recording.recorded
    linears = read_recording(folder / "recording.safetensors").linears if recorded else []
    missing = tuple(f"{one.name}: {one.failure}" for one in linears if one.failure)
    return Outcome(left, recording is None or recorded, missing, trace is None or trace.recorded)


def differences(one: Outcome, other: Outcome) -> list[str]:
    """The names of what differs."""
    return [name for name in dict.fromkeys((*one.left, *other.left)) if one.left.get(name) != other.left.get(name)]


def check(loop: Loop, folder: Path, *observers: str) -> None:
    """The same outcome without and with observers, and everything recorded that can be."""
    expected = run(loop, "", folder)
    for observer in observers:
        outcome = run(loop, observer, folder)
        assert differences(expected, outcome) == [], observer
        if observer != "trace":
            assert outcome.recorded == loop.recorded
            assert not outcome.missing or not loop.complete
        if observer != "record":
            assert outcome.traced == loop.traced


def in_two_processes(rank: int, folder: str) -> None:
    """One of two processes of a training; it is here because a process that is started anew imports no test."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    own = Path(folder) / str(rank)
    own.mkdir()
    for loop in parallel_loops():
        check(loop, own, "record")
    torch.distributed.destroy_process_group()


def _left(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every value inside of a value, as text or as the digest of its bytes."""
    if isinstance(value, nn.Module):
        for place, module in value.named_modules():
            own = {key: one for key, one in vars(module).items() if not key.startswith("_") or key in ("_parameters", "_buffers")}
            yield from _left(f"{name}.{place}", {key: one for key, one in own.items() if not callable(one)})
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            kinds = [str(getattr(hook, "__qualname__", type(hook))) for hook in hooks]
            # copies of observers' hooks do nothing: `contextlib.nullcontext().__exit__`
            yield f"{name}.{place}.hooks", str([kind for kind in kinds if "nullcontext" not in kind])
        yield f"{name}.class", type(value).__name__
    elif isinstance(value, torch.optim.Optimizer):
        yield from _left(name, [one for state in value.state.values() for one in state.values()])
    elif isinstance(value, torch.Generator):
        yield from _left(name, value.get_state())
    elif isinstance(value, Tensor):
        whole = value.detach().full_tensor() if hasattr(value, "full_tensor") else value.detach()  # type: ignore[operator]
        yield name, f"{whole.dtype} {tuple(whole.shape)} {_digest(whole)}"
        yield from _left(f"{name}.grad", value.grad if value.is_leaf else None)
    elif isinstance(value, np.ndarray):
        yield name, hashlib.sha256(value.tobytes()).hexdigest()
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _left(f"{name}.{key}", one)
    elif isinstance(value, (list, tuple)) and len(value) < 100:
        for number, one in enumerate(value):
            yield from _left(f"{name}.{number}", one)
    else:
        yield name, repr(value) if isinstance(value, (bool, int, float, str, bytes, tuple, type(None))) else type(value).__name__
        inside = getattr(value, "__dict__", {})  # such as scales and maxima of a library
        yield from _left(name, {key: one for key, one in inside.items() if isinstance(one, Tensor)})


def _digest(tensor: Tensor) -> str:
    if hasattr(tensor, "_quantizer"):  # FP8 weights of Transformer Engine
        tensor = tensor.dequantize()
    return hashlib.sha256(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
