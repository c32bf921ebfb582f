"""Records traces of real training steps, each with one problem on purpose, for `gemmscope explain` to find.

    python benchmarks/record_traces.py FOLDER            # on a GPU with Transformer Engine and torchao
    python benchmarks/record_traces.py FOLDER --dry      # on a CPU, with plain PyTorch and tiny sizes, to test the script itself

Cases run one after the other in a separate process, which is started again when a case ends it.
"""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ALARM_SECONDS = 150  # no case begins later


@dataclass(frozen=True)
class Case:
    """One training setup. `kit`: te, torch, torchao (eager) or torchao-compiled; `recipe` None is BF16."""

    kit: str = "te"
    recipe: str | None = "Float8CurrentScaling"
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 14336
    layers: int = 4
    vocab: int = 16384
    batch: int = 2
    sequence: int = 4096
    micro_batches: int = 1
    cached_weights: bool = False
    recompute: bool = False
    mlp_left_out: bool = False
    split_mlp: bool = False
    experts: int = 0
    sleep_s: float = 0.0
    syncs: bool = False
    low_clock: bool = False
    graphs: bool = False
    recipe_options: dict[str, Any] = field(default_factory=dict)


LLAMA = Case()
SMALL = replace(
    LLAMA, hidden=1024, heads=16, kv_heads=16, head_dim=64, intermediate=2816, layers=10, batch=1, sequence=512, vocab=4096
)
LONG = replace(LLAMA, hidden=2048, heads=16, kv_heads=16, intermediate=5632, layers=3, batch=1, sequence=32768, vocab=4096)
HEAD = replace(LLAMA, hidden=1024, heads=8, kv_heads=8, intermediate=2816, layers=4, vocab=262144, batch=2)
ACCUMULATE = replace(LLAMA, hidden=8192, heads=64, intermediate=28672, batch=1, sequence=1024, micro_batches=4, layers=2)
WAITING = replace(LLAMA, batch=1, sequence=1024, micro_batches=4, layers=3)  # micro-batches too small for the host to keep up
SHARDED = replace(LLAMA, heads=4, kv_heads=1, intermediate=1792, layers=6, batch=4)  # one rank of eight
CASES = {
    "healthy_te_current": LLAMA,
    "healthy_te_bf16": replace(LLAMA, recipe=None),
    "eager_torchao": replace(LLAMA, kit="torchao", recipe="tensorwise"),
    "eager_torch_bf16": replace(LLAMA, kit="torch", recipe=None),
    "host_bound": SMALL,
    "host_bound_bf16": replace(SMALL, recipe=None),
    "backward_in_bf16": replace(LLAMA, split_mlp=True, recipe_options={"backward_override": "high_precision"}),
    "unaligned_mlp": replace(LLAMA, intermediate=14328, mlp_left_out=True),
    "recast_weights": ACCUMULATE,
    "cached_weights": replace(ACCUMULATE, cached_weights=True),
    "recast_weights_bf16": replace(ACCUMULATE, recipe=None),
    "accumulation_host_bound": WAITING,
    "accumulation_host_bound_bf16": replace(WAITING, recipe=None),
    "recompute": replace(LLAMA, recompute=True),
    "recompute_torch": replace(LLAMA, kit="torchao-compiled", recipe="tensorwise", recompute=True, layers=2),
    "unaligned_torchao": replace(LLAMA, kit="torchao-compiled", recipe="tensorwise", intermediate=14328, layers=3),
    "recompute_bf16": replace(LLAMA, recompute=True, recipe=None),
    "long_sequence": LONG,
    "long_sequence_bf16": replace(LONG, recipe=None),
    "large_head": HEAD,
    "large_head_bf16": replace(HEAD, recipe=None),
    "idle_loader": replace(LLAMA, sleep_s=0.1),
    "low_clock": replace(LLAMA, low_clock=True),
    "sharded_small": SHARDED,
    "sharded_small_bf16": replace(SHARDED, recipe=None),
    "healthy_te_delayed": replace(LLAMA, recipe="DelayedScaling"),
    "healthy_te_block": replace(LLAMA, recipe="Float8BlockScaling"),
    "experts": replace(LLAMA, hidden=2048, heads=16, kv_heads=16, experts=32, intermediate=1024, layers=3),
    "syncs": replace(SMALL, hidden=2048, heads=16, intermediate=5632, sequence=4096, layers=6, syncs=True),
    "healthy_torchao_compiled": replace(LLAMA, kit="torchao-compiled", recipe="tensorwise", layers=3),
    "healthy_torch_compiled_bf16": replace(LLAMA, kit="torchao-compiled", recipe=None, layers=3),
    "healthy_torchao_rowwise": replace(LLAMA, kit="torchao-compiled", recipe="rowwise", layers=3),
    # Pairs whose fix `explain` predicts: CUDA graphs, compilation at the same depth, one micro-batch instead of four
    "graphs_off": replace(SMALL, kit="torch", recipe=None),
    "graphs_on": replace(SMALL, kit="torch", recipe=None, graphs=True),
    "graphs_off_large": replace(LLAMA, kit="torch", recipe=None, layers=3),
    "graphs_on_large": replace(LLAMA, kit="torch", recipe=None, layers=3, graphs=True),
    "eager_torchao_as_compiled": replace(LLAMA, kit="torchao", recipe="tensorwise", layers=3),
    "eager_torch_bf16_as_compiled": replace(LLAMA, kit="torch", recipe=None, layers=3),
    "accumulation_one_micro_batch": replace(WAITING, batch=4, micro_batches=1),
}  # fmt: skip


def build(case: Case, device: str) -> Any:
    """A decoder with embedding and head: [tokens] to logits."""
    import torch
    from torch import nn
    from torch.nn import functional

    make: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    te_make: dict[str, Any] = {"device": device, "params_dtype": torch.bfloat16, "bias": False}
    if case.kit == "te":
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

        angles = te.RotaryPositionEmbedding(case.head_dim)(case.sequence).to(device)

        def rotate(x: Any) -> Any:
            return apply_rotary_pos_emb(x, angles, tensor_format="bshd", fused=True)
    else:
        steps = torch.arange(0, case.head_dim, 2, device=device).float() / case.head_dim
        turns = torch.outer(torch.arange(case.sequence, device=device).float(), 10000.0**-steps).repeat(1, 2)[:, None, :]
        cos, sin = turns.cos().to(torch.bfloat16), turns.sin().to(torch.bfloat16)

        def rotate(x: Any) -> Any:
            half = x.shape[-1] // 2
            return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin

    q_width, kv_width = case.heads * case.head_dim, case.kv_heads * case.head_dim

    class PlainMlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(case.hidden, **make)
            self.gate = nn.Linear(case.hidden, case.intermediate, bias=False, **make)
            self.up = nn.Linear(case.hidden, case.intermediate, bias=False, **make)
            self.down = nn.Linear(case.intermediate, case.hidden, bias=False, **make)

        def forward(self, x: Any) -> Any:
            x = self.norm(x)
            return self.down(functional.silu(self.gate(x)) * self.up(x))

    class SplitMlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = te.LayerNormLinear(case.hidden, 2 * case.intermediate, normalization="RMSNorm", **te_make)
            self.down = te.Linear(case.intermediate, case.hidden, **te_make)

        def forward(self, x: Any, **how: Any) -> Any:
            gate, up = self.up(x, **how).chunk(2, dim=-1)
            return self.down(functional.silu(gate) * up, **how)

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = te.RMSNorm(case.hidden, dtype=torch.bfloat16, device=device)
            self.up = te.GroupedLinear(case.experts, case.hidden, 2 * case.intermediate, **te_make)
            self.down = te.GroupedLinear(case.experts, case.intermediate, case.hidden, **te_make)

        def forward(self, x: Any, **how: Any) -> Any:
            rows = [x.shape[0] // case.experts] * case.experts
            gate, up = self.up(self.norm(x), rows, **how).chunk(2, dim=-1)
            return self.down((functional.silu(gate) * up), rows, **how)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = q_width + 2 * kv_width
            if case.kit == "te":
                self.qkv = te.LayerNormLinear(case.hidden, width, normalization="RMSNorm", **te_make)
                self.out = te.Linear(q_width, case.hidden, **te_make)
                if case.experts:
                    self.mlp: nn.Module = Experts()
                elif case.split_mlp:
                    self.mlp = SplitMlp()
                else:
                    self.mlp = te.LayerNormMLP(
                        case.hidden, case.intermediate, normalization="RMSNorm", activation="swiglu", **te_make
                    )
            else:
                self.norm = nn.RMSNorm(case.hidden, **make)
                self.qkv = nn.Linear(case.hidden, width, bias=False, **make)
                self.out = nn.Linear(q_width, case.hidden, bias=False, **make)
                self.mlp = PlainMlp()

        def forward(self, x: Any, how: dict[str, Any]) -> Any:
            inner = self.qkv(x, **how) if case.kit == "te" else self.qkv(self.norm(x))
            q, k, v = inner.view(-1, case.sequence, inner.shape[-1]).split([q_width, kv_width, kv_width], dim=-1)
            q, k, v = (tensor.unflatten(-1, (-1, case.head_dim)) for tensor in (q, k, v))
            q, k, v = (tensor.transpose(1, 2) for tensor in (rotate(q), rotate(k), v))
            grouped = case.heads != case.kv_heads
            inner = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            x = x + self.out(inner.transpose(1, 2).flatten(2).flatten(0, 1), **how)
            if case.mlp_left_out:
                with te.autocast(enabled=False):
                    return x + self.mlp(x, **how)
            return x + self.mlp(x, **how)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(case.vocab, case.hidden, **make)
            self.layers = nn.ModuleList(Layer() for _ in range(case.layers))
            self.norm = nn.RMSNorm(case.hidden, **make)
            self.head = nn.Linear(case.hidden, case.vocab, bias=False, **make)

        def forward(self, tokens: Any, how: dict[str, Any]) -> Any:
            x = self.embedding(tokens)
            for layer in self.layers:
                if case.recompute and case.kit == "te":
                    x = te.checkpoint(lambda states, layer=layer: layer(states, how), x, use_reentrant=False)
                elif case.recompute:
                    from torch.utils.checkpoint import checkpoint

                    x = checkpoint(layer, x, how, use_reentrant=False)
                else:
                    x = layer(x, how)
                if case.syncs:
                    float(x.detach().flatten()[0])  # as a router or a logger does
            return self.head(self.norm(x))

    model = Model()
    if case.kit.startswith("torchao"):
        if case.recipe is not None:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig.from_recipe_name(case.recipe)

            def aligned(module: Any, name: str) -> bool:  # noqa: ARG001
                return isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0

            convert_to_float8_training(model.layers, config=config, module_filter_fn=aligned)
        if case.kit == "torchao-compiled":
            for number, layer in enumerate(model.layers):
                model.layers[number] = torch.compile(layer, dynamic=False)
    return model


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as one CUDA graph, captured after a warm-up on a stream of its own (https://pytorch.org/docs/stable/notes/cuda.html)."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def record(name: str, case: Case, target: Path, device: str) -> None:
    """Train a few steps and record two of them."""
    import torch
    from torch.nn import functional

    from gemmscope.explain.record_trace import trace_me

    torch.manual_seed(0)
    model = build(case, device)
    on_gpu = device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_gpu, capturable=on_gpu and case.graphs)
    shape = (case.micro_batches, case.batch * case.sequence)
    tokens = torch.randint(case.vocab, shape, device=device)
    recipe = None
    if case.kit == "te":
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as recipes

        recipe = getattr(recipes, case.recipe)(**case.recipe_options) if case.recipe else None

    def step() -> None:
        for number in range(case.micro_batches):
            how = {}
            if case.kit == "te":
                how = {"is_first_microbatch": (number == 0) if case.cached_weights else None}
            with te.autocast(enabled=True, recipe=recipe) if recipe is not None else nullcontext():
                logits = model(tokens[number], how)
            functional.cross_entropy(logits, tokens[number].roll(-1)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not case.graphs)
        if case.sleep_s:
            time.sleep(case.sleep_s)

    run = captured(step) if case.graphs and on_gpu else step
    steps = 2
    with trace_me(target, steps=steps, after=5) as trace:
        for _ in range(5 + steps):
            run()
            trace.step()
    if on_gpu:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            run()
        torch.cuda.synchronize()
        wall_ms = (time.perf_counter() - begin) * 200
        print(f"  {name}: {wall_ms:.2f} ms a step unprofiled, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
        walls = target.parent / "walls.json"
        known = json.loads(walls.read_text()) if walls.exists() else {}
        walls.write_text(json.dumps({**known, name: round(wall_ms, 3)}, indent=1))
    if name == "healthy_te_current":  # one as the profiler writes it, to read what people have
        with torch.profiler.profile(record_shapes=True, with_stack=True) as profiler:
            step()
            profiler.step()
        profiler.export_chrome_trace(str(target.parent / "raw_healthy.json.gz"))


def work(names: list[str], folder: Path, dry: bool) -> None:
    """Run the cases one after the other in this process; a failure ends only its own case."""
    import torch

    device = "cpu" if dry else "cuda"
    for name in names:
        case, target = CASES[name], folder / f"{name}.json.gz"
        if dry:
            tiny = {"hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate": 128, "layers": 2, "vocab": 256}
            case = replace(case, kit="torch", mlp_left_out=False, low_clock=False, batch=1, sequence=32, sleep_s=0.0, **tiny)
        print(f"BEGIN {name}", flush=True)
        begin = time.perf_counter()
        try:
            if case.low_clock:
                _clock("-lgc", "600,600")
            record(name, case, target, device)
            size = target.stat().st_size / 1024
            print(f"END {name}: {size:.0f} KB, {time.perf_counter() - begin:.1f} s", flush=True)
        except Exception as error:
            traceback.print_exc()
            print(f"END {name}: FAILED: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
            if "CUDA error" in str(error) or "illegal" in str(error):
                sys.exit(70)
        finally:
            if case.low_clock:
                subprocess.run(["nvidia-smi", "-rgc"], check=False, capture_output=True)
        gc.collect()
        if case.kit == "te":
            from transformer_engine.pytorch.quantization import FP8GlobalStateManager

            FP8GlobalStateManager.reset()
        if not dry:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _clock(*arguments: str) -> None:
    ended = subprocess.run(["nvidia-smi", *arguments], check=False, capture_output=True, text=True)
    if ended.returncode or "permission" in (ended.stdout + ended.stderr).lower():
        raise PermissionError(f"the clock cannot be set here: {(ended.stdout + ended.stderr).strip()[:200]}")


def main() -> None:
    """Start the worker process, and start it again after a case that ended it."""
    folder, dry = Path(sys.argv[1]), "--dry" in sys.argv
    chosen = [name for name in sys.argv[2:] if name in CASES]
    if "--work" in sys.argv:
        work(json.loads(sys.argv[sys.argv.index("--work") + 1]), folder, dry)
        return
    folder.mkdir(parents=True, exist_ok=True)
    left, begin = chosen or list(CASES), time.perf_counter()
    while left and time.perf_counter() - begin < ALARM_SECONDS:
        command = [sys.executable, __file__, str(folder), "--work", json.dumps(left), *(["--dry"] if dry else [])]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert child.stdout is not None
        for line in child.stdout:
            print(f"{time.perf_counter() - begin:6.1f} {line.rstrip()}", flush=True)
            if line.startswith("END "):
                left.remove(line.split()[1].rstrip(":"))
                if time.perf_counter() - begin > ALARM_SECONDS:
                    child.kill()
        child.wait()
        if child.returncode and left and child.returncode > 0:
            print(f"the process ended with {child.returncode} at {left.pop(0)}", flush=True)
    print(f"{time.perf_counter() - begin:.1f} s in all; not recorded: {left}", flush=True)
    total = sum(path.stat().st_size for path in folder.glob("*.gz"))
    print(f"{total / 1024:.0f} KB; free disk {shutil.disk_usage(folder).free >> 30} GiB", flush=True)


if __name__ == "__main__":
    main()
