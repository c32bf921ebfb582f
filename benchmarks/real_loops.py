"""`gemmscope step --hugging-face` compared with a training loop that is not gemmscope's, on the GPU of this machine.

    python benchmarks/real_loops.py llama layers
    python benchmarks/real_loops.py qwen3_next layers whole --json results.json

The loop is plain PyTorch: the transformers class, torchao's `convert_to_float8_training`, `torch.compile`, fused AdamW with a
learning rate, batches that change from step to step. BF16 and FP8 run in turn, in bursts of more than a second, in one process.
`gemmscope step` then runs the same config in a process of its own, and both are printed side by side: the step in every recipe
and its speedup over BF16. `--tiny` runs toy sizes on the CPU, to try the script itself.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LLAMA = {
    "model_type": "llama", "hidden_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 24, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 8192, "vocab_size": 32000, "max_position_embeddings": 4096, "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_num_value_heads": 32,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "num_experts": 32, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "intermediate_size": 5120, "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
TINY = {
    "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 128, "vocab_size": 256, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
MODELS = {"llama": (LLAMA, 4, 4096), "qwen3_next": (QWEN3_NEXT, 2, 4096)}  # config, micro-batch, sequence
FLOAT8 = {"FP8Tensorwise": "tensorwise", "FP8Rowwise": "rowwise"}
DROP_S, KEEP_S, ROUNDS = 0.4, 1.2, 5
STEP_LIMIT, SPEEDUP_LIMIT = 0.03, 0.02


def build(config: dict[str, Any], recipe: str, compiled: str, device: str) -> Any:
    """The model as a user builds it: weights in BF16, linears converted except the head and routers, compiled."""
    import torch
    import transformers

    settings = dict(config)
    made = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    made.use_cache = False
    precision = torch.float32 if recipe == "FP32" else torch.bfloat16
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="sdpa", dtype=precision)
    if config["model_type"] == "qwen3_next":
        model.set_experts_implementation("grouped_mm")
    model.train()
    if recipe in FLOAT8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        def chosen(module: Any, name: str) -> bool:
            sizes = (module.in_features, module.out_features)
            return name != "lm_head" and not name.endswith(".gate") and all(size % 16 == 0 and size >= 128 for size in sizes)

        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(FLOAT8[recipe]), module_filter_fn=chosen)
    if compiled == "layers":
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = torch.compile(layer)
    return torch.compile(model) if compiled == "whole" else model


def loop(
    config: dict[str, Any], batch: int, sequence: int, recipes: list[str], compiled: str, device: str, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of steps in every recipe, after a warm-up, in the steady state of the GPU."""
    import torch

    on_gpu = device != "cpu"
    torch._dynamo.config.recompile_limit = 64
    tokens = [torch.randint(config["vocab_size"], (batch, sequence), device=device) for _ in range(4)]
    steps, times = {}, {recipe: [] for recipe in recipes}
    for recipe in recipes:
        began = time.monotonic()
        model = build(config, recipe, compiled, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_gpu)

        def step(number: int, model: Any = model, optimizer: Any = optimizer) -> None:
            ids = tokens[number % len(tokens)]
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        for number in range(3):
            step(number)
        if on_gpu:
            torch.cuda.synchronize()
        began_step = time.monotonic()
        step(3)
        if on_gpu:
            torch.cuda.synchronize()
        steps[recipe] = step, time.monotonic() - began_step
        print(f"  loop: {recipe} ready after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    for _ in range(rounds):
        for recipe in random.sample(recipes, len(recipes)):
            step, about_s = steps[recipe]
            for number in range(max(1, round(DROP_S / about_s))):
                step(number)
            kept = max(3, round(KEEP_S / about_s))
            if not on_gpu:
                began = time.monotonic()
                step(0)
                times[recipe].append((time.monotonic() - began) * 1000)
                continue
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for number in range(kept):
                step(number)
            end.record()
            end.synchronize()
            times[recipe].append(begin.elapsed_time(end) / kept)
    return times


def warm_up(arguments: argparse.Namespace, recipes: list[str]) -> None:
    """Compile every recipe and way in a process of its own, side by side: what follows finds the kernels in the cache."""
    began = time.monotonic()
    runs = [again(arguments, compiled, [recipe], "--one-step") for compiled in arguments.compiled for recipe in recipes]
    started = [subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for run in runs]
    for run, process in zip(runs, started, strict=True):
        error = process.communicate()[1]
        if process.returncode:
            print(f"  warm-up failed: {' '.join(run[2:])}: {error.strip().splitlines()[-1:]}", flush=True)
    print(f"warm-up {time.monotonic() - began:.0f} s", flush=True)


def again(arguments: argparse.Namespace, compiled: str, recipes: list[str], *more: str) -> list[str]:
    """The command that runs this file's loop alone."""
    command = [sys.executable, __file__, arguments.model, compiled, "--recipes", ",".join(recipes), *more]
    command += ["--tiny"] if arguments.tiny else []
    return [*command, "--layers", str(arguments.layers)] if arguments.layers else command


def predicted(
    path: Path, batch: int, sequence: int, recipes: list[str], compiled: str, device: str, seconds: float
) -> dict[str, Any]:
    """What `gemmscope step` measures of the same config."""
    output = path.with_suffix(".step.json")
    command = [
        sys.executable, "-m", "gemmscope", "step", "--config", str(path), "--hugging-face", "--compile", compiled,
        "--micro-batch-size", str(batch), "--sequence-length", str(sequence), "--time-limit", str(seconds),
        "--recipes", ",".join(recipes), "--json", str(output),
        *(["--device", "cpu"] if device == "cpu" else ["--backend", "torchao"]),
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if not output.exists():
        raise SystemExit(f"gemmscope step failed: {ran.stderr[-2000:]}")
    return dict(json.loads(output.read_text()))


def table(name: str, compiled: str, real: dict[str, list[float]], result: dict[str, Any]) -> list[dict[str, Any]]:
    """Both sides, recipe by recipe."""
    steps = {each["recipe"]: each for each in result["step"]["recipes"]}
    means = {recipe: sum(times) / len(times) for recipe, times in real.items() if times}
    print(f"\n{name}, --compile {compiled}  (step ms: loop, gemmscope; speedup over BF16: loop, gemmscope)")
    rows = []
    for recipe, mean in means.items():
        step = steps.get(recipe)
        if step is None:
            print(f"  {recipe:15} {mean:9.2f}  not measured by gemmscope: {result['step']['failures'].get(recipe)}")
            continue
        own, speedup = step["step_ms"]["value"], means["BF16"] / mean
        own_speedup = (step.get("speedup") or {"value": 1.0})["value"]
        error, speedup_error = own / mean - 1, own_speedup / speedup - 1
        within = abs(error) <= STEP_LIMIT and abs(speedup_error) <= SPEEDUP_LIMIT
        print(
            f"  {recipe:15} {mean:9.2f} {own:9.2f} {error:+7.1%}   {speedup:6.3f} {own_speedup:6.3f} {speedup_error:+7.1%}"
            f"   {'ok' if within else 'OFF'}   attention {step.get('attention_kernels')}"
        )
        rows.append({
            "model": name, "compile": compiled, "recipe": recipe, "loop_ms": mean, "step_ms": own, "error": error,
            "loop_speedup": speedup, "speedup": own_speedup, "speedup_error": speedup_error, "loop_bursts_ms": real[recipe],
            "attention": step.get("attention_kernels"),
        })  # fmt: skip
    for found in result["findings"]:
        if found["code"] in ("mixer-kernels", "experts-not-converted", "attention-mask-explicit", "linears-kept"):
            print(f"    {found['code']}: {found['facts']}")
    return rows


def main() -> None:
    """Run the loop, then gemmscope, for each way of compiling."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("compiled", nargs="+", choices=["layers", "whole", "none"])
    parser.add_argument("--seconds", type=float, default=12.0, help="time limit of gemmscope step")
    parser.add_argument("--recipes", default="BF16,FP8Tensorwise,FP8Rowwise")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--warm-up", action="store_true", help="compile in parallel processes first, to save time")
    parser.add_argument("--loop-only", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--one-step", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    config, batch, sequence = MODELS[arguments.model]
    recipes, device = arguments.recipes.split(","), "cpu" if arguments.tiny else "cuda"
    if arguments.tiny:
        config, batch, sequence = {**config, **TINY}, 1, 64
    if arguments.layers:
        config = {**config, "num_hidden_layers": arguments.layers}
    if arguments.loop_only or arguments.one_step:  # in a process of its own: its memory is gone when gemmscope runs
        rounds = 0 if arguments.one_step else ROUNDS if device == "cuda" else 2
        times = loop(config, batch, sequence, recipes, arguments.compiled[0], device, rounds)
        if arguments.loop_only:
            arguments.loop_only.write_text(json.dumps(times))
        return
    if arguments.warm_up:
        warm_up(arguments, recipes)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        for compiled in arguments.compiled:
            answer, began = Path(folder) / "loop.json", time.monotonic()
            answer.unlink(missing_ok=True)
            ran = subprocess.run(again(arguments, compiled, recipes, "--loop-only", str(answer)), check=False)
            if ran.returncode:
                print(f"{arguments.model}, --compile {compiled}: the loop failed with {ran.returncode}", flush=True)
            between = time.monotonic()
            result = predicted(path, batch, sequence, recipes, compiled, device, arguments.seconds)
            real = json.loads(answer.read_text()) if answer.exists() else {}
            rows += table(arguments.model, compiled, real, result)
            print(f"  loop {between - began:.0f} s, gemmscope {time.monotonic() - between:.0f} s", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1))
                arguments.json.with_suffix(f".{compiled}.run.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
