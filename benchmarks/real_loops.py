"""`gemmscope step --hugging-face` compared with a training loop that is not gemmscope's, on the GPU of this machine.

    python benchmarks/real_loops.py llama:layers llama:whole qwen3_next:layers --json results.json

The loop is plain PyTorch: the transformers class, torchao's `convert_to_float8_training`, `torch.compile`, fused AdamW with a
learning rate, batches that change from step to step. Each recipe has a process of its own, all compile side by side, and then
BF16 and FP8 run in turn, in bursts of more than a second. When they have ended, `gemmscope step` runs the same configs, and both
are printed side by side: the step in every recipe and its speedup over BF16. `--tiny` runs toy sizes on the CPU, to try it.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

LLAMA = {
    "model_type": "llama", "hidden_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 24, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 8192, "vocab_size": 32000, "max_position_embeddings": 4096, "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_num_value_heads": 32,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "intermediate_size": 5120, "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
TINY = {
    "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 128, "vocab_size": 256, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
MODELS = {
    "llama": (LLAMA, 4, 4096),
    "qwen3_next": (QWEN3_NEXT, 12, 1024),
}  # config, micro-batch, sequence: enough tokens to keep the GPU busy
FLOAT8 = {"FP8Tensorwise": "tensorwise", "FP8Rowwise": "rowwise"}
DROP_S, KEEP_S, ROUNDS = 0.4, 1.2, 4
STEP_LIMIT, SPEEDUP_LIMIT = 0.03, 0.02
TOLD = ("mixer-kernels", "experts-not-converted", "attention-mask-explicit", "linears-kept", "step-not-measured")


BEGAN = time.monotonic()


def stage(text: str) -> None:
    """One line with the time since the beginning."""
    print(f"{time.monotonic() - BEGAN:6.0f} s  {text}", flush=True)


def sizes(model: str, *, tiny: bool) -> tuple[dict[str, Any], int, int]:
    """Config, micro-batch and sequence."""
    config, batch, sequence = MODELS[model]
    return ({**config, **TINY}, 1, 64) if tiny else (dict(config), batch, sequence)


def build(config: dict[str, Any], recipe: str, compiled: str, device: str) -> Any:
    """The model as a user builds it: weights in BF16, linears converted except the head and routers, compiled."""
    import torch
    import transformers

    settings = dict(config)
    model_config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model_config.use_cache = False
    precision = torch.float32 if recipe == "FP32" else torch.bfloat16
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(model_config, attn_implementation="sdpa", dtype=precision)
    if config["model_type"] == "qwen3_next":
        model.set_experts_implementation("grouped_mm")
    model.train()
    if recipe in FLOAT8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        def chosen(module: Any, name: str) -> bool:
            features = (module.in_features, module.out_features)
            return name != "lm_head" and not name.endswith(".gate") and all(size % 16 == 0 and size >= 128 for size in features)

        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(FLOAT8[recipe]), module_filter_fn=chosen)
    if compiled == "layers":
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = torch.compile(layer)
    return torch.compile(model) if compiled == "whole" else model


def train(model_name: str, compiled: str, recipe: str, *, tiny: bool) -> None:
    """One recipe's loop: says that it is ready, then runs a burst whenever a line comes in."""
    import torch

    device = "cpu" if tiny else "cuda"
    config, batch, sequence = sizes(model_name, tiny=tiny)
    torch._dynamo.config.recompile_limit = 64
    tokens = [torch.randint(config["vocab_size"], (batch, sequence), device=device) for _ in range(4)]
    model = build(config, recipe, compiled, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=not tiny)
    synchronize = torch.cuda.synchronize if not tiny else lambda: None

    def run(count: int) -> float:
        """Milliseconds per step, from the first launch to the end of the last kernel."""
        if not tiny:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
        began = time.monotonic()
        for number in range(count):
            ids = tokens[number % len(tokens)]
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if tiny:
            return (time.monotonic() - began) * 1000 / count
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / count

    print("model built", flush=True)
    run(1)
    print("first step", flush=True)
    run(2)
    synchronize()
    about_s = run(2) / 1000
    print("ready", flush=True)
    for _ in sys.stdin:
        run(max(1, round(DROP_S / about_s)))
        print(run(max(3, round(KEEP_S / about_s)) if not tiny else 2), flush=True)


class Loop:
    """The process of one recipe's loop."""

    def __init__(self, case: str, recipe: str, *, tiny: bool) -> None:
        self.case, self.recipe, self.began, self.times, self.ready_s = case, recipe, time.monotonic(), list[float](), 0.0
        command = [sys.executable, __file__, case, "--train", recipe, *(["--tiny"] if tiny else [])]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        self.waiting = threading.Thread(target=self._wait, daemon=True)
        self.waiting.start()

    def _wait(self) -> None:
        assert self.process.stdout is not None
        for line in iter(self.process.stdout.readline, ""):
            stage(f"{self.case} {self.recipe}: {line.strip()}")
            if line.strip() == "ready":
                self.ready_s = time.monotonic() - self.began
                return

    def is_ready(self, until: float) -> bool:
        """Whether it is compiled before the deadline."""
        self.waiting.join(max(until - time.monotonic(), 0.1))
        return self.ready_s > 0

    def burst(self) -> None:
        """Run steps, and keep the time of one."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.times.append(float(self.process.stdout.readline()))

    def end(self) -> None:
        """Release its memory, and print its error if there was one."""
        self.process.kill()
        self.process.wait()
        if not self.ready_s:
            self.errors.seek(0)
            stage(f"{self.case} {self.recipe}: not ready; {self.errors.read().strip().splitlines()[-1:]}")


def predicted(case: str, recipes: list[str], seconds: float, folder: Path, *, tiny: bool) -> dict[str, Any]:
    """What `gemmscope step` measures of the same config."""
    model_name, _, compiled = case.partition(":")
    config, batch, sequence = sizes(model_name, tiny=tiny)
    path, output = folder / f"{model_name}.json", folder / f"{model_name}-{compiled}.json"
    path.write_text(json.dumps(config))
    command = [
        sys.executable, "-m", "gemmscope", "step", "--config", str(path), "--hugging-face", "--compile", compiled,
        "--micro-batch-size", str(batch), "--sequence-length", str(sequence), "--time-limit", str(seconds),
        "--recipes", ",".join(recipes), "--json", str(output),
        *(["--device", "cpu"] if tiny else ["--backend", "torchao", "--share-gpu"]),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ran:
        assert ran.stdout is not None
        for line in ran.stdout:
            if "Warning" not in line and line.strip():
                stage(f"  {line.rstrip()[:160]}")
    if not output.exists():
        return {}
    return dict(json.loads(output.read_text()))


def table(case: str, real: dict[str, list[float]], result: dict[str, Any]) -> list[dict[str, Any]]:
    """Both sides, recipe by recipe."""
    steps = {recipe["recipe"]: recipe for recipe in result["step"]["recipes"]} if result else {}
    means = {recipe: sum(times) / len(times) for recipe, times in real.items() if times}
    print(f"\n{case}  (step ms: loop, gemmscope; speedup over BF16: loop, gemmscope)")
    rows = []
    for recipe in dict.fromkeys([*means, *steps]):
        if recipe not in steps or recipe not in means:
            own = steps[recipe]["step_ms"]["value"] if recipe in steps else None
            print(f"  {recipe:15} loop {means.get(recipe)}, gemmscope {own}")
            continue
        step, mean = steps[recipe], means[recipe]
        own, speedup = step["step_ms"]["value"], means.get("BF16", mean) / mean
        own_speedup = (step.get("speedup") or {"value": 1.0})["value"]
        error, speedup_error = own / mean - 1, own_speedup / speedup - 1
        within = abs(error) <= STEP_LIMIT and abs(speedup_error) <= SPEEDUP_LIMIT
        print(
            f"  {recipe:15} {mean:9.2f} {own:9.2f} {error:+7.1%}   {speedup:6.3f} {own_speedup:6.3f} {speedup_error:+7.1%}"
            f"   {'ok' if within else 'OFF'}   attention {step.get('attention_kernels')}"
        )
        rows.append({
            "case": case, "recipe": recipe, "loop_ms": mean, "step_ms": own, "error": error, "loop_speedup": speedup,
            "speedup": own_speedup, "speedup_error": speedup_error, "loop_bursts_ms": real[recipe],
            "attention": step.get("attention_kernels"), "parts_ms": step.get("parts_ms"),
        })  # fmt: skip
    for finding in result.get("findings", ()):
        if finding["code"] in TOLD:
            print(f"    {finding['code']}: {finding['facts']}")
    return rows


def main() -> None:
    """Compile all loops side by side, run them in turn, then gemmscope."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="MODEL:COMPILE[:RECIPES]", help="llama:whole, qwen3_next:layers:BF16")
    parser.add_argument("--recipes", default="BF16,FP8Tensorwise,FP8Rowwise")
    parser.add_argument("--seconds", type=float, default=12.0, help="time limit of gemmscope step")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds to wait for the loops to be compiled")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--train", metavar="RECIPE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        model_name, _, compiled = arguments.cases[0].partition(":")
        train(model_name, compiled, arguments.train, tiny=arguments.tiny)
        return
    began, cases = time.monotonic(), {}
    for named in arguments.cases:
        case, _, own = named.rpartition(":") if named.count(":") > 1 else (named, "", "")
        cases[case] = (own or arguments.recipes).split(",")
    loops = {case: [Loop(case, recipe, tiny=arguments.tiny) for recipe in recipes] for case, recipes in cases.items()}
    ready_loops = {
        case: [loop for loop in processes if loop.is_ready(began + arguments.patience)] for case, processes in loops.items()
    }
    for processes in loops.values():  # those that are not ready would compile while others are timed
        for loop in processes:
            if not loop.ready_s:
                loop.end()
    for case, ready in ready_loops.items():
        for _ in range(2 if arguments.tiny else ROUNDS):
            for loop in random.sample(ready, len(ready)):
                loop.burst()
        stage(f"{case}: loops timed, { ({loop.recipe: [round(ms, 2) for ms in loop.times] for loop in ready}) }")
    for processes in loops.values():
        for loop in processes:
            loop.end()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for case, processes in loops.items():
            stage(f"{case}: gemmscope step")
            result = predicted(case, cases[case], arguments.seconds, Path(folder), tiny=arguments.tiny)
            rows += table(case, {loop.recipe: loop.times for loop in processes}, result)
            stage(f"{case}: done")
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
