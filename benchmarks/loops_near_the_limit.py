"""Training steps whose launches take about as long as their kernels: `gemmscope step` beside loops that are not gemmscope's.

    python benchmarks/loops_near_the_limit.py OUT esm2 gpt2-medium bert-large qwen3-0.6b --disturb gpt2-medium
    python benchmarks/loops_near_the_limit.py OUT hf-qwen3-1.7b:layers hf-qwen3-1.7b:whole hf-llama-3.2-1b:layers

A loop is plain code: Transformer Engine's linears, norms and MLPs in its autocast around PyTorch's attention, or a transformers
class converted by torchao and compiled, with fused AdamW. All recipes of a case live in one process and run in turn. The loop
runs before and after `gemmscope step`, and is captured as a CUDA graph last. One row per recipe: the loop as launched (median
and quartiles of its steps), the loop as a graph, and what gemmscope says of both. `--disturb` also measures one case on a core
that is busy half of the time. `--tiny` runs toy sizes on the CPU, to try the script. OUT gets results.json and the run files.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
TE_RECIPES = ("BF16", "FP8Current", "FP8Delayed", "FP8Block")
AO_RECIPES = ("BF16", "FP8Tensorwise")
SIZES: dict[str, dict[str, Any]] = {  # and the batch
    "esm2": {
        "type": "esm", "layers": 33, "hidden": 1280, "heads": 20, "ffn": 5120, "vocab": 33, "batch": (16, 1024), "causal": False,
        "rotary": True, "post": False,
    },
    "bert-large": {
        "type": "bert", "layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 30522, "batch": (32, 512),
        "causal": False, "rotary": False, "post": True,
    },
    "gpt2-medium": {
        "type": "gpt2", "layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 50257, "batch": (8, 1024),
        "causal": True, "rotary": False, "post": False,
    },
    "qwen3-0.6b": {
        "type": "qwen3", "layers": 28, "hidden": 1024, "heads": 16, "kv": 8, "head": 128, "ffn": 3072, "vocab": 151936,
        "batch": (4, 2048), "causal": True, "gated": True, "rotary": True, "post": False,
    },
}  # fmt: skip
HF: dict[str, dict[str, Any]] = {
    "hf-qwen3-1.7b": {
        "model_type": "qwen3", "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "tie_word_embeddings": True, "rope_theta": 1000000.0,
    },
    "hf-llama-3.2-1b": {
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True, "rope_theta": 500000.0,
    },
}  # fmt: skip
HF_BATCH = (4, 2048)
DROP_S, KEEP_S, ROUNDS = 0.3, 0.8, 3


def stage(text: str) -> None:
    """One line with the time since the beginning."""
    print(f"{time.monotonic() - BEGAN:6.0f} s  {text}", flush=True)


def te_layer(known: dict[str, Any]) -> Any:
    """One layer of Transformer Engine's modules around PyTorch's attention. `post`: norms follow their block, as in BERT."""
    import torch
    import transformer_engine.pytorch as te
    from torch import nn
    from torch.nn import functional
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    hidden, heads, ffn, (_, sequence) = known["hidden"], known["heads"], known["ffn"], known["batch"]
    kv, head, gated, after = known.get("kv", heads), known.get("head", hidden // heads), known.get("gated", False), known["post"]
    width = (heads + 2 * kv) * head
    make: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda", "bias": not gated}
    norm, kind = (te.RMSNorm, "RMSNorm") if gated else (te.LayerNorm, "LayerNorm")

    def norm_of(size: int) -> Any:
        return norm(size, dtype=torch.bfloat16, device="cuda")

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = (
                te.Linear(hidden, width, **make) if after else te.LayerNormLinear(hidden, width, normalization=kind, **make)
            )
            self.out = te.Linear(heads * head, hidden, **make)
            if after:
                self.up, self.down = te.Linear(hidden, ffn, **make), te.Linear(ffn, hidden, **make)
                self.first, self.second = norm_of(hidden), norm_of(hidden)
            else:
                self.mlp = te.LayerNormMLP(hidden, ffn, normalization=kind, activation="swiglu" if gated else "gelu", **make)
            if gated:
                self.q_norm, self.k_norm = norm_of(head), norm_of(head)

        def forward(self, x: torch.Tensor, angles: torch.Tensor | None) -> torch.Tensor:
            q, k, v = (
                part.view(-1, sequence, part.shape[-1] // head, head)
                for part in self.qkv(x).split([heads * head, kv * head, kv * head], dim=-1)
            )
            if gated:
                q, k = self.q_norm(q), self.k_norm(k)
            if angles is not None:
                q, k = (apply_rotary_pos_emb(one, angles, tensor_format="bshd", fused=True) for one in (q, k))
            q, k, v = (one.transpose(1, 2) for one in (q, k, v))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=known["causal"], enable_gqa=kv != heads)
            y = self.out(y.transpose(1, 2).reshape(-1, heads * head))
            if after:
                x = self.first(x + y)
                return self.second(x + self.down(functional.gelu(self.up(x))))
            x = x + y
            return x + self.mlp(x)

    return Layer()


def te_loop(case: str, recipe: str) -> Any:
    """Layers of Transformer Engine, an embedding, a head and a loss: a function that runs one step."""
    import torch
    import transformer_engine.pytorch as te
    from torch import nn
    from torch.nn import functional
    from transformer_engine.common import recipe as recipes

    known = SIZES[case]
    gated, hidden, vocab, (batch, sequence) = known.get("gated", False), known["hidden"], known["vocab"], known["batch"]
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    layers = nn.ModuleList(te_layer(known) for _ in range(known["layers"]))
    embedding, head = nn.Embedding(vocab, hidden, **make), nn.Linear(hidden, vocab, bias=False, **make)
    head.weight = embedding.weight
    final = te.RMSNorm(hidden, **make) if gated else te.LayerNorm(hidden, **make)
    angles = None
    if known["rotary"]:
        angles = te.RotaryPositionEmbedding(known.get("head", hidden // known["heads"]))(sequence).to("cuda")
    model = nn.ModuleList([embedding, layers, final, head])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    kind = {"FP8Current": "Float8CurrentScaling", "FP8Delayed": "DelayedScaling", "FP8Block": "Float8BlockScaling"}.get(recipe)
    precision = getattr(recipes, kind)() if kind else None
    ids = torch.randint(vocab, (batch * sequence,), device="cuda")

    def step() -> None:
        x = embedding(ids)
        with te.autocast(enabled=True, recipe=precision) if precision is not None else nullcontext():
            for layer in layers:
                x = layer(x, angles)
        functional.cross_entropy(head(x if known["post"] else final(x)), ids).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, optimizer


def hf_loop(case: str, recipe: str, *, tiny: bool) -> Any:
    """A transformers class converted by torchao and compiled: a function that runs one step."""
    import torch
    import transformers

    name, _, compiled = case.partition(":")
    settings = dict(HF[name])
    device, batch, sequence = ("cpu", 1, 32) if tiny else ("cuda", *HF_BATCH)
    if tiny:
        settings |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
        settings |= {"head_dim": 32, "intermediate_size": 128, "vocab_size": 256}
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.use_cache = False
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    model.train()
    if recipe != "BF16":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        chosen = Float8LinearConfig.from_recipe_name("tensorwise")
        convert_to_float8_training(model, config=chosen, module_filter_fn=lambda _, path: path != "lm_head")
    torch._dynamo.config.recompile_limit = 64
    if compiled == "layers":
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = torch.compile(layer)
    elif compiled == "whole":
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=not tiny)
    ids = torch.randint(config.vocab_size, (batch, sequence), device=device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, optimizer


def serve(case: str, recipes: list[str], *, tiny: bool) -> None:
    """The process of a case: for every line of input, a burst of each recipe; after "graphs", bursts of the captured steps."""
    import torch

    loops = {
        recipe: (hf_loop(case, recipe, tiny=tiny) if case.startswith("hf-") else te_loop(case, recipe)) for recipe in recipes
    }
    steps = {recipe: step for recipe, (step, _) in loops.items()}
    about_s = {}
    for recipe, step in steps.items():
        for _ in range(3):
            step()
        began = time.monotonic()
        for _ in range(2):
            step()
        if not tiny:
            torch.cuda.synchronize()
        about_s[recipe] = (time.monotonic() - began) / 2
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "graphs":
            steps = {recipe: captured(*loops[recipe]) for recipe in recipes} if not tiny else steps
        times: dict[str, list[float]] = {}
        for recipe in random.sample(recipes, len(recipes)):
            times[recipe] = burst(steps[recipe], about_s[recipe], tiny=tiny)
        print(json.dumps(times), flush=True)


def captured(step: Any, optimizer: Any) -> Any:
    """The step as one CUDA graph."""
    import torch

    for group in optimizer.param_groups:
        group["capturable"] = True
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def burst(step: Any, about_s: float, *, tiny: bool) -> list[float]:
    """Milliseconds of the steps that count."""
    import torch

    for _ in range(max(1, round(DROP_S / about_s)) if not tiny else 1):
        step()
    count = max(5, round(KEEP_S / about_s)) if not tiny else 2
    if tiny:
        began = time.monotonic()
        for _ in range(count):
            step()
        return [(time.monotonic() - began) * 1000 / count] * count
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    for mark in marks[:-1]:
        mark.record()
        step()
    marks[-1].record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(marks)]


class Loop:
    """The process of a case's loops."""

    def __init__(self, case: str, recipes: tuple[str, ...], *, tiny: bool) -> None:
        command = [sys.executable, __file__, "-", case, "--serve", ",".join(recipes), *(["--tiny"] if tiny else [])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.case, self.times = case, dict[str, list[float]]()

    def ready(self) -> bool:
        """Wait until everything is compiled."""
        assert self.process.stdout is not None
        return any(line.strip() == "ready" for line in iter(self.process.stdout.readline, ""))

    def bursts(self, order: str) -> dict[str, list[float]]:
        """A burst of every recipe."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        for line in iter(self.process.stdout.readline, ""):
            if line.startswith("{"):
                return dict(json.loads(line))
        return {}

    def more(self, order: str, into: dict[str, list[float]], rounds: int) -> None:
        """Several of them."""
        for number in range(rounds):
            for recipe, times in self.bursts(order if not number else "again").items():
                into.setdefault(recipe, []).extend(times)


def step_command(case: str, recipes: tuple[str, ...], folder: Path, output: Path, *, tiny: bool) -> list[str]:
    """What a user types."""
    name, _, compiled = case.partition(":")
    command = [sys.executable, "-m", "gemmscope", "step", "--recipes", ",".join(recipes), "--json", str(output), "--share-gpu"]
    if name in HF:
        config = folder / f"{name}.json"
        small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
        config.write_text(json.dumps(HF[name] | (small | {"intermediate_size": 128, "vocab_size": 256} if tiny else {})))
        batch, sequence = HF_BATCH if not tiny else (1, 32)
        backend = ["--device", "cpu"] if tiny else ["--backend", "torchao"]
        command += ["--config", str(config), "--hugging-face", "--compile", compiled, *backend]
    else:
        known = SIZES[name]
        batch, sequence = known["batch"]
        config = folder / f"{name}.json"
        config.write_text(json.dumps(te_config(known)))
        command += ["--config", str(config), "--backend", "transformer_engine"]
    return [*command, "--micro-batch-size", str(batch), "--sequence-length", str(sequence)]


def te_config(known: dict[str, Any]) -> dict[str, Any]:
    """The same sizes as a config.json."""
    hidden, layers, heads, ffn, vocab = (known[key] for key in ("hidden", "layers", "heads", "ffn", "vocab"))
    if known["type"] == "gpt2":
        sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": ffn, "n_positions": 1024}
        return {"model_type": "gpt2", "vocab_size": vocab, **sizes}
    sizes = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": ffn,
        "vocab_size": vocab, "model_type": known["type"],
    }  # fmt: skip
    more: dict[str, Any] = {
        "esm": {"architectures": ["EsmForMaskedLM"], "max_position_embeddings": 1026, "position_embedding_type": "rotary"},
        "bert": {"architectures": ["BertForMaskedLM"], "max_position_embeddings": 1024},
    }.get(known["type"], {"num_key_value_heads": known.get("kv"), "head_dim": known.get("head"), "tie_word_embeddings": True})
    return {**sizes, "max_position_embeddings": 40960, **more}


def value(interval: dict[str, Any] | None) -> str:
    """An interval in short."""
    if not interval:
        return "-"
    if interval.get("low") is None:
        return f"{interval['value']:.3f}"
    return f"{interval['value']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def report(case: str, loop: dict[str, list[float]], graphs: dict[str, list[float]], result: dict[str, Any]) -> dict[str, Any]:
    """Print one case, and return it."""
    print(f"\n{case}")
    rows = {}
    steps = {time["recipe"]: time for time in result.get("step", {}).get("recipes", ())}
    for recipe, times in loop.items():
        quartiles = statistics.quantiles(times, n=4)
        replayed = statistics.median(graphs[recipe]) if graphs.get(recipe) else float("nan")
        base = statistics.median(loop["BF16"]), statistics.median(graphs["BF16"]) if graphs.get("BF16") else float("nan")
        own = steps.get(recipe, {})
        median_ms = statistics.median(times)
        print(
            f"  {recipe:14} loop {median_ms:8.2f} ({quartiles[0]:.1f} to {quartiles[2]:.1f}) {base[0] / median_ms:5.3f}x"
            f" | graph {replayed:8.2f} {base[1] / replayed:5.3f}x"
            f" | step {value(own.get('step_ms'))} {value(own.get('speedup'))}"
            f" | GPU {value(own.get('gpu_ms'))} {value(own.get('gpu_speedup'))} {own.get('gpu_time_from')}"
            f" | launch {value(own.get('host_ms'))} | late {own.get('late_rounds')} of {own.get('rounds')}"
        )
        rows[recipe] = {"loop_ms": times, "graph_ms": graphs.get(recipe), "step": own}
    for finding in result.get("findings", ()):
        if finding["level"] != "note" or finding["code"].startswith(("step-", "time-limit", "precision")):
            print(f"    {finding['code']}: {json.dumps(finding['facts'])[:300]}")
    return {"case": case, "recipes": rows, "seconds": result.get("seconds")}


def run_case(loop: Loop, recipes: tuple[str, ...], out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The loop, gemmscope, the loop again, and the loop as a graph."""
    times: dict[str, list[float]] = {}
    graphs: dict[str, list[float]] = {}
    rounds = ROUNDS if not arguments.tiny else 1
    loop.more("launched", times, rounds)
    stage(f"{loop.case}: gemmscope step")
    output = out / f"step-{loop.case.replace(':', '-')}.json"
    ran = subprocess.run(
        step_command(loop.case, recipes, out, output, tiny=arguments.tiny), capture_output=True, text=True, check=False
    )
    print("\n".join(line for line in ran.stdout.splitlines()[:14]), ran.stderr.strip()[-400:] if ran.returncode else "")
    stage(f"{loop.case}: loop again, then captured")
    loop.more("launched", times, rounds)
    loop.more("graphs", graphs, rounds)
    loop.process.kill()
    result = json.loads(output.read_text()) if output.exists() else {}
    return report(loop.case, times, graphs, result)


def disturbed(case: str, out: Path) -> None:
    """`gemmscope step` on a core that another process keeps busy half of the time, beside the same on idle cores."""
    core = str(sorted(os.sched_getaffinity(0))[-1])
    busy = "import time\nwhile True:\n t = time.perf_counter()\n while time.perf_counter() - t < 0.01: pass\n time.sleep(0.01)"
    output = out / f"disturbed-{case}.json"
    with subprocess.Popen(["taskset", "-c", core, sys.executable, "-c", busy]) as other:
        command = step_command(case, TE_RECIPES, out, output, tiny=False)
        subprocess.run(["taskset", "-c", core, *command], capture_output=True, check=False)
        other.kill()
    quiet = json.loads((out / f"step-{case}.json").read_text())
    result = json.loads(output.read_text())
    print(f"\n{case}, on a core that is busy half of the time: GPU time and speedup, before and now")
    for before, now in zip(quiet["step"]["recipes"], result["step"]["recipes"], strict=False):
        pairs = [(one.get("gpu_ms"), one.get("gpu_speedup"), one.get("step_ms")) for one in (before, now)]
        print(f"  {now['recipe']:14} " + " | ".join(" ".join(map(value, pair)) for pair in pairs))
    print("  ", [finding for finding in result["findings"] if finding["code"] in ("cpu-disturbed", "step-captured")])


def main() -> None:
    """All loops are compiled side by side, then measured in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--disturb", metavar="CASE")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--serve", metavar="RECIPES", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.cases[0], arguments.serve.split(","), tiny=arguments.tiny)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    recipes = {
        case: ("BF16",) if arguments.tiny else AO_RECIPES if case.startswith("hf-") else TE_RECIPES for case in arguments.cases
    }
    loops = {case: Loop(case, recipes[case], tiny=arguments.tiny) for case in arguments.cases}
    rows = []
    ready = [case for case, loop in loops.items() if loop.ready()]
    stage(f"ready: {', '.join(ready)}")
    for case in ready:
        rows.append(run_case(loops[case], recipes[case], arguments.out, arguments))
        (arguments.out / "results.json").write_text(json.dumps(rows))
    if arguments.disturb:
        disturbed(arguments.disturb, arguments.out)
    stage("done")


if __name__ == "__main__":
    main()
