"""Checks the errors that are estimated from samples against those of the whole tensors, on layers of trained small models.

    python benchmarks/numerics_sampling.py [--model llama|wide|moe|neox|nemotron] [--seed 0] [--steps 120] [--draws 3]

A small model is trained on the sources of Python's standard library, as bytes. X, W and dY of its linears are taken
from one more step, as they are and in two variants that large models are known for: outlier channels, and massive activations of
the first token with a few large gradients. Each is sampled several times; every estimate is compared with the error of the whole
tensors.

Stochastic rounding: the estimate is an expectation, so it is compared with the root mean square of several roundings of the whole
tensors. One of them varies by 3 to 8% in these small layers, so fewer than about a hundred are no reference.
"""

import argparse
import csv
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gemmscope.numerics import recording
from gemmscope.numerics.evaluation.linear_errors import LinearErrors
from gemmscope.numerics.probes import compute_probes
from gemmscope.numerics.quantizers import operands
from gemmscope.numerics.recording import LinearFacts, LinearStep, RecordedLinear, StepFacts, TensorFacts
from gemmscope.numerics.sample import random_for, sample_linear

RECIPES = ("FP8Current", "FP8Delayed", "FP8Block", "MXFP8", "NVFP4", "FP8Rowwise")
STALE = {"X": 0.8, "W": 1.0, "dY": 1.2}  # maxima of the history over those of the step, for delayed scaling
LENGTH, BATCH, SEQUENCES, ROUNDINGS, BUDGET = 256, 4, 8, 96, 200_000
FEWEST_TOKENS = 64  # an expert may get fewer, or none
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
recording.HISTORY = 1  # one earlier step is the whole history here, so that delayed scaling saturates


SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 6},
    "wide": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2, "num_attention_heads": 16},
    "moe": {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4},
    "neox": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 6},
    "nemotron": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 6},
}


def model_named(name: str) -> torch.nn.Module:
    """A small model: a Llama, a wider one, a Mixtral, a GPT-NeoX (GELU, biases), or a Nemotron (squared ReLU)."""
    import transformers

    settings = {**SIZES[name], "vocab_size": 256, "max_position_embeddings": 512}
    if name == "neox":
        return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**settings, tie_word_embeddings=True))
    settings["num_key_value_heads"] = 2
    if name == "nemotron":
        return transformers.NemotronForCausalLM(transformers.NemotronConfig(**settings))
    if name == "moe":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}  # as linears, one by one
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings, **experts))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))


def trained_tensors(name: str, steps: int, seed: int) -> dict[str, Tensors]:
    """X, W and dY of every linear of layers after some training, bfloat16. Experts run as plain functions: of each call."""
    torch.manual_seed(seed)
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))[:200])
    data, random = torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), torch.Generator().manual_seed(seed + 1)
    model = model_named(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    taken: dict[str, Tensors] = {}
    for step in range(steps + 1):
        if step == steps:
            _watch(model, taken)
        starts = torch.randint(len(data) - LENGTH, (SEQUENCES if step == steps else BATCH,), generator=random)
        batch = torch.stack([data[start : start + LENGTH] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return taken


def _watch(model: torch.nn.Module, taken: dict[str, Tensors]) -> None:
    """Take the tensors of every linear, and of the experts, which call torch.nn.functional.linear themselves."""
    names = {id(module.weight): name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    plain: Callable[..., torch.Tensor] = torch.nn.functional.linear

    def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        output = plain(x, w, bias)
        name = names.get(id(w), f"experts.{len(taken)}")
        if output.requires_grad and "lm_head" not in name and w.shape[0] > 16:
            kept = [tensor.detach().flatten(0, -2).bfloat16() for tensor in (x, w)]
            taken[name] = (kept[0], kept[1], torch.empty(0))
            output.register_hook(lambda grad: taken.__setitem__(name, (kept[0], kept[1], grad.flatten(0, -2).bfloat16())))
        return output

    torch.nn.functional.linear = linear


def variants(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> Iterator[tuple[str, Tensors]]:
    """As they are; with four outlier channels; with massive activations of first tokens and a few large gradients."""
    random = torch.Generator().manual_seed(0)
    tokens = len(x) // 32 * 32
    x, dy = x[:tokens], dy[:tokens]
    yield "as trained", (x, w, dy)
    channels = torch.randperm(x.shape[1], generator=random)[:4]
    wide, narrow = x.clone(), w.clone()
    wide[:, channels] *= 40
    narrow[:, channels] /= 10
    yield "outliers", (wide, narrow, dy)
    massive, spiky, first = x.clone(), dy.clone(), torch.arange(0, tokens, LENGTH)
    massive[first] *= 0.1
    noise = 1 + 0.02 * torch.randn(len(first), 2, generator=random)
    massive[first[:, None], channels[None, :2]] = (x.float().abs().max() * 100 * noise).bfloat16()
    spiky[first] *= 0.01
    spiky[torch.randperm(tokens, generator=random)[:8]] *= 10
    yield "massive", (massive, w, spiky)


def full_error(whole: Tensors, recipe: str, pass_name: str) -> float:
    """Of the whole tensors; with stochastic rounding, the root mean square of several roundings."""
    by_name = dict(zip(("X", "W", "dY"), whole, strict=True))
    pair = operands(recipe, pass_name)
    exact = [(by_name[one.tensor].T if one.columnwise else by_name[one.tensor]).float().contiguous() for one in pair]
    output = exact[0] @ exact[1].T
    squares = []
    for seed in range(ROUNDINGS if any(one.quantizer.stochastic for one in pair) else 1):
        generator, quantized = torch.Generator().manual_seed(1000 + seed), []
        for one, values in zip(pair, exact, strict=True):
            amax = values.abs().max() * STALE[one.tensor] if one.quantizer.delayed else None
            quantized.append(one.quantizer(values, amax=amax, generator=generator).values)
        squares.append(float((quantized[0] @ quantized[1].T - output).square().sum() / output.square().sum()))
    return (sum(squares) / len(squares)) ** 0.5


def recorded(whole: Tensors, seed: int) -> RecordedLinear:
    """As the recorder keeps it, with one earlier step."""
    maxima = {name: float(tensor.float().abs().max() * STALE[name]) for name, tensor in zip(("X", "W", "dY"), whole, strict=True)}
    facts, kept = sample_linear(*whole, dtype=torch.bfloat16, budget=BUDGET, random=random_for(seed), step=1)
    probes = compute_probes(*whole, random=random_for(seed, "probes"), history=maxima)
    earlier = StepFacts(step=0, tensors={name: TensorFacts(amax=amax) for name, amax in maxima.items()})
    steps = (earlier, facts.model_copy(update={"probes": probes}))
    outputs, inputs = whole[1].shape
    linear = LinearFacts(name="linear", linear="linear", inputs=inputs, outputs=outputs, steps=steps)
    return RecordedLinear(linear, tuple(LinearStep(step, kept.__getitem__) for step in steps))


def checked(name: str, whole: Tensors, draws: int) -> Iterator[tuple[str, str, str, float, float, bool]]:
    """Linear, recipe, pass, the true error, the deviation of an estimate from it, whether its interval holds it."""
    truths = {(recipe, one): full_error(whole, recipe, one) for recipe in RECIPES for one in ("fprop", "dgrad", "wgrad")}
    for seed in range(draws):
        errors = LinearErrors(recorded(whole, seed))
        for recipe in RECIPES:
            for one in errors.of(recipe).passes:
                truth, low, high = truths[recipe, one.pass_name], one.relative.low or 0.0, one.relative.high or 0.0
                yield name, recipe, one.pass_name, truth, one.relative.value / truth - 1, low <= truth <= high


def table(rows: list[tuple[str, str, str, str, float, float, bool]]) -> str:
    """By variant, recipe and pass: root mean square and largest deviation, share within 5%, share of intervals that hold."""
    lines = [
        "| tensors | recipe | pass | estimates | rms | largest | within 5% | in interval |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, str], list[tuple[float, bool]]] = {}
    for variant, _, recipe, pass_name, _, deviation, inside in rows:
        for key in ((variant, recipe, pass_name), ("all", "all", "all")):
            groups.setdefault(key, []).append((deviation, inside))
    for key, values in groups.items():
        deviations = [abs(deviation) for deviation, _ in values]
        rms = (sum(one**2 for one in deviations) / len(values)) ** 0.5
        near, covered = sum(one < 0.05 for one in deviations) / len(values), sum(inside for _, inside in values) / len(values)
        lines.append(f"| {' | '.join(key)} | {len(values)} | {rms:.1%} | {max(deviations):.1%} | {near:.1%} | {covered:.0%} |")
    return "\n".join(lines)


def main() -> None:
    """Train, take, sample, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--every", type=int, default=1, help="check every so many linears")
    parser.add_argument("--only", default="", help="check linears with this in their name")
    parser.add_argument("--tensors", type=Path, help="a file of torch.save with {name: (X, W, dY)}, instead of training")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(min(torch.get_num_threads(), 2))
    loaded = (
        torch.load(arguments.tensors) if arguments.tensors else trained_tensors(arguments.model, arguments.steps, arguments.seed)
    )
    rows = []
    print(f"{len(loaded)} linears")
    chosen = [item for item in loaded.items() if arguments.only in item[0] and len(item[1][0]) >= FEWEST_TOKENS]
    for name, taken in chosen[:: arguments.every]:
        x, w, dy = (tensor.bfloat16() for tensor in taken)
        for variant, whole in variants(x[: SEQUENCES * LENGTH], w, dy[: SEQUENCES * LENGTH]):
            rows += [(variant, *row) for row in checked(name, whole, arguments.draws)]
        print(f"{name}: {sum(abs(row[5]) < 0.05 for row in rows)} of {len(rows)} within 5%", flush=True)
        if arguments.csv:
            with arguments.csv.open("w", newline="") as file:
                csv.writer(file).writerows([("tensors", "linear", "recipe", "pass", "error", "deviation", "inside"), *rows])
    print(table(rows))


if __name__ == "__main__":
    main()
