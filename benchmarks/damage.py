"""Checks predicted damage against what quantization does to small language models that are trained here.

    python benchmarks/damage.py OUT [--models llama4 llama8 neox moe qwen3] [--seeds 0 1 2 3 4 5] [--steps 200]
    python benchmarks/damage.py OUT --summary docs/measured/damage.json

Each model is trained on the sources of Python's standard library, as bytes, and eight more batches of the training are recorded
with `gemmscope.record_tensors`. Then one linear at a time, and one layer at a time, runs in NVFP4, and the KL divergence of the
predictions is measured on batches that neither the training nor the recording has seen. Mixes that the tool chooses are compared
with the best ones of the same FLOPs by measured KL. For weight gradients, the backward pass of the quantized model is compared
with its own backward pass in float32, over several batches: what the differences have in common is the bias, the rest is noise. A
bias below two standard errors cannot be told from chance, so that biases are compared once with these and once without.

Quantization here is code of its own: only the quantizers are those of the package. Trained models are kept in OUT; one takes two
to five minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import gemmscope
from gemmscope.numerics.evaluation.error_table import error_table
from gemmscope.numerics.evaluation.mixes import with_mix
from gemmscope.numerics.quantizers import operands
from gemmscope.results.numerics import LinearError, NumericsResult

BATCH, LENGTH, WIDTH = 16, 128, 128
RECIPE = "NVFP4"
MODELS = ("llama4", "llama8", "neox", "moe", "qwen3")
HELD_OUT, GRADIENTS = 4, 16  # batches
BOUNDS = (0.8, 0.6, 0.4)  # of the error of the recipe in all linears
COLUMNS = ("linears", "layers", "relative_error", "noise", "bias")
Cell = tuple[int, str]
"""A layer, and the name of a linear in it."""
Unit = tuple[str, int | None]
"""A parameter, and the expert of a parameter with all experts."""


def build(name: str, seed: int) -> Any:
    """A model of transformers with random weights."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": WIDTH, "num_attention_heads": 4, "max_position_embeddings": LENGTH, "use_cache": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    if name == "neox":
        config = transformers.GPTNeoXConfig(**common, num_hidden_layers=6, intermediate_size=4 * WIDTH)
    elif name == "moe":
        config = transformers.MixtralConfig(
            **common,
            num_hidden_layers=4,
            intermediate_size=WIDTH,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    elif name == "qwen3":
        config = transformers.Qwen3Config(
            **common, num_hidden_layers=6, intermediate_size=3 * WIDTH, num_key_value_heads=2, head_dim=WIDTH // 4
        )
    else:
        layers = int(name.removeprefix("llama"))
        config = transformers.LlamaConfig(**common, num_hidden_layers=layers, intermediate_size=3 * WIDTH, num_key_value_heads=2)
    config._experts_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(config).train()


def text() -> Tensor:
    """The sources of the standard library, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


class Batches:
    """Random pieces of the first nine tenths of the text; held-out ones come from the last tenth."""

    def __init__(self, seed: int, *, held_out: bool = False) -> None:
        data = text()
        cut = len(data) * 9 // 10
        self._data = data[cut:] if held_out else data[:cut]
        self._random = torch.Generator().manual_seed(seed + 1000 * held_out)

    def next(self) -> Tensor:
        starts = torch.randint(len(self._data) - LENGTH, (BATCH,), generator=self._random).tolist()
        return torch.stack([self._data[start : start + LENGTH] for start in starts])


def train(model: Any, batches: Batches, steps: int) -> float:
    """Train, and return the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps + 1, pct_start=0.1)
    loss = torch.zeros(())
    for _ in range(steps):
        batch = batches.next()
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return float(loss.detach())


def record(model: Any, batches: Batches, path: Path, steps: int = 8) -> NumericsResult:
    """Record more batches of the training, without updates, and compute their errors."""
    with gemmscope.record_tensors(model, path, steps=steps, after=0) as recorder:
        for _ in range(steps):
            batch = batches.next()
            model.zero_grad()
            model(input_ids=batch, labels=batch).loss.backward()
            recorder.step()
    return gemmscope.quantization_errors(path, recipes=["BF16", RECIPE])


class Quantized(torch.autograd.Function):
    """A linear whose forward GEMM, and whose backward GEMMs if `backward`, have quantized operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, backward: bool, random: torch.Generator) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.backward, ctx.random = backward, random
        return gemm("fprop", {"W": w, "X": x}, random).T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        if not ctx.backward:
            return dy @ w, dy.T @ x, None, None
        tensors = {"X": x, "W": w, "dY": dy}
        return gemm("dgrad", tensors, ctx.random).T, gemm("wgrad", tensors, ctx.random).T, None, None


def gemm(pass_name: Any, tensors: Mapping[str, Tensor], random: torch.Generator) -> Tensor:
    """The GEMM of a pass with quantized operands: the first one times the second one transposed."""
    values = []
    for operand in operands(RECIPE, pass_name):
        rows = tensors[operand.tensor]
        rows = (rows.T if operand.columnwise else rows).contiguous()
        extra = -rows.shape[1] % 16
        quantized = operand.quantizer(nn.functional.pad(rows, (0, extra)), generator=random)
        values.append(quantized.values[:, : rows.shape[1]])
    return values[0] @ values[1].T


@dataclass
class Quantize(TorchFunctionMode):
    """Runs the linears with these weights in the recipe: `nn.Linear`, and experts that are slices of one parameter."""

    model: nn.Module
    units: set[Unit]
    backward: bool = False
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __post_init__(self) -> None:
        super().__init__()
        parameters = dict(self.model.named_parameters())
        self._places = {}
        for name, expert in self.units:
            parameter = parameters[name] if expert is None else parameters[name][expert]
            self._places[parameter.data_ptr()] = (name, expert)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and args[1].data_ptr() in self._places:
            x, w, *bias = args
            bias = bias or [(kwargs or {}).get("bias")]
            if not x.numel():
                return func(*args, **(kwargs or {}))
            output = Quantized.apply(x.reshape(-1, x.shape[-1]), w, self.backward, self.random).view(*x.shape[:-1], len(w))
            return output if bias[0] is None else output + bias[0]
        return func(*args, **(kwargs or {}))


def units_of(model: nn.Module) -> dict[str, list[Unit]]:
    """The linears inside the layers: path → their weights; the experts of a layer count together."""
    units: dict[str, list[Unit]] = {}
    for name, parameter in model.named_parameters():
        if ".layers." not in name or parameter.dim() < 2 or "norm" in name or ".gate.weight" in name:
            continue
        if parameter.dim() == 3:
            units[name] = [(name, expert) for expert in range(len(parameter))]
        else:
            units[name.removesuffix(".weight")] = [(name, None)]
    return units


def layer_of(path: str) -> int:
    """The number of the layer."""
    return int(path.partition(".layers.")[2].partition(".")[0])


def logits(model: Any, batch: Tensor) -> Tensor:
    """The logarithms of the predicted probabilities."""
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=batch).logits.flatten(0, 1), -1)


def divergences(model: Any, sets: Mapping[str, Sequence[Unit]], batches: Sequence[Tensor]) -> dict[str, float]:
    """KL divergence per token of the model with these linears quantized, from the model as it is."""
    exact = [logits(model, batch) for batch in batches]
    measured = {}
    for name, units in sets.items():
        total = 0.0
        for batch, reference in zip(batches, exact, strict=True):
            with Quantize(model, set(units)):
                changed = logits(model, batch)
            total += float((reference.exp() * (reference - changed)).sum(1).mean())
        measured[name] = total / len(batches)
    return measured


def gradient_errors(model: Any, units: Mapping[str, Sequence[Unit]], batches: Sequence[Tensor]) -> dict[str, dict[str, float]]:
    """Of every weight gradient, in the model with all linears quantized: squared bias (with its standard error, from batches left
    out in turn) and noise of the backward pass against its own backward pass in float32, and the noise of the gradient from batch
    to batch."""
    every = {unit for own in units.values() for unit in own}
    parameters = dict(model.named_parameters())
    names = list(dict.fromkeys(name for name, _ in every))
    exact: dict[str, list[Tensor]] = {name: [] for name in names}
    errors: dict[str, list[Tensor]] = {name: [] for name in names}
    random = torch.Generator().manual_seed(1)
    for batch in batches:
        gradients = []
        for backward in (False, True):
            with Quantize(model, every, backward, random):
                loss = model(input_ids=batch, labels=batch).loss
            gradients.append(torch.autograd.grad(loss, [parameters[name] for name in names]))
        for name, own, low in zip(names, *gradients, strict=True):
            exact[name].append(own.flatten())
            errors[name].append((low - own).flatten())
    measured = {}
    for path, own_units in units.items():
        error, own = (torch.stack(one[own_units[0][0]]) for one in (errors, exact))
        bias, bias_error, noise = common_part((error @ error.T).double().numpy())
        gradient, _, own_noise = common_part((own @ own.T).double().numpy())
        measured[path] = {"bias": bias, "bias_error": bias_error, "noise": noise, "own_noise": own_noise, "gradient": gradient}
    return measured


def common_part(products: Any) -> tuple[float, float, float]:
    """Of vectors with these inner products: the squared norm of what they have in common, its standard error, and the variance of
    the rest."""
    count = len(products)
    across = products.sum(1) - products.diagonal()
    common = across.sum() / count / (count - 1)
    left_out = (across.sum() - 2 * across) / (count - 1) / (count - 2)
    error = np.sqrt((count - 1) * left_out.var())
    return float(common), float(error), float(products.trace() / count - common)


def cells_of(path: str) -> Cell:
    """Layer and linear of a path."""
    layer, _, linear = path.partition(".layers.")[2].partition(".")
    return int(layer), linear


def predicted(result: NumericsResult) -> dict[Cell, dict[str, float]]:
    """Damage, relative error, and the errors of weight gradients, of every cell; recorded experts stand for all of their
    layer."""
    own: dict[Cell, list[LinearError]] = {}
    for linear in result.linears:
        if linear.recipe == RECIPE and linear.layer is not None:
            own.setdefault((linear.layer, linear.linear), []).append(linear)
    return {
        cell: {
            "damage": sum(one.damage or 0.0 for one in ones) * ones[0].experts / len(ones),
            "error": sum((one.error or 0.0) ** 2 for one in ones) / len(ones),
            **{
                name: sum(getattr(one.gradient, name) for one in ones if one.gradient) * ones[0].experts / len(ones)
                for name in ("bias", "noise", "own_noise")
            },
        }
        for cell, ones in own.items()
    }


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's; equal values have their mean rank."""

    def ranks(values: Sequence[float]) -> Any:
        _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - counts / 2)[places]

    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def best_kept(measured: Mapping[Cell, float], flops: Mapping[Cell, float], share: float) -> set[Cell]:
    """The first layers, last layers and linears to keep, of at most this share of the FLOPs, whose measured divergences add up to
    the most."""
    layers, linears = sorted({layer for layer, _ in measured}), sorted({linear for _, linear in measured})
    best: tuple[float, set[Cell]] = (-1.0, set())
    for first, last in [(one, other) for one in range(len(layers)) for other in range(len(layers) - one)]:
        ends = {*layers[:first], *layers[len(layers) - last :]}
        for number in range(2 ** len(linears)):
            names = {name for place, name in enumerate(linears) if number >> place & 1}
            kept = {cell for cell in measured if cell[0] in ends or cell[1] in names}
            if sum(flops[cell] for cell in kept) <= share * (1 + 1e-9):
                best = max(best, (sum(measured[cell] for cell in kept), kept), key=lambda pair: pair[0])
    return best[1]


def mixes(
    model: Any, result: NumericsResult, truth: Mapping[str, Any], units: Mapping[str, list[Unit]], batches: Sequence[Tensor]
) -> list[dict[str, float]]:
    """For several bounds: the divergence of the mix that the tool chooses, and that of the best one of the same FLOPs."""
    table = error_table(result.linears)
    assert table is not None
    flops = {
        (layer, linear): float(table.flops[row, column])
        for row, layer in enumerate(table.layers)
        for column, linear in enumerate(table.linears)
    }
    whole = next(row.error for row in result.recipes if row.recipe == RECIPE)
    measured = {cells_of(path): value for path, value in truth["kl"].items()}
    compared = []
    for share in BOUNDS:
        mixed = with_mix(result, bound=share * whole).mixed
        chosen = mixed.chosen if mixed is not None else None
        if chosen is None or chosen.recipe != RECIPE or not chosen.is_mixed:
            continue
        end = len(table.layers) - chosen.last_layers
        kept = {cell for cell in flops if cell[1] in chosen.linears or not chosen.first_layers <= cell[0] < end}
        best = best_kept(measured, flops, sum(flops[cell] for cell in kept))
        sets = {
            name: [unit for path, own in units.items() if cells_of(path) not in cells for unit in own]
            for name, cells in (("chosen", kept), ("best", best))
        }
        kl = divergences(model, sets, batches)
        compared.append({"bound": share, "kept": sum(flops[cell] for cell in kept), "chosen": kl["chosen"], "best": kl["best"]})
    return compared


def trained(name: str, seed: int, steps: int, folder: Path) -> tuple[Any, dict[str, Any]]:
    """A trained model, and what quantization does to it; both are kept in the folder."""
    model, path = build(name, seed), folder / f"{name}-{seed}.pt"
    if not path.exists():
        loss = train(model, Batches(seed), steps)
        unseen, units = Batches(seed, held_out=True), units_of(model)
        batches = [unseen.next() for _ in range(HELD_OUT)]
        layers = {
            str(one): [unit for path, own in units.items() if layer_of(path) == one for unit in own] for one in layers_of(units)
        }
        truth = {
            "state": model.state_dict(),
            "loss": loss,
            "kl": divergences(model, units, batches),
            "kll": divergences(model, layers, batches),
            "g": gradient_errors(model, units, [unseen.next() for _ in range(GRADIENTS)]),
        }
        torch.save(truth, path)
    truth = torch.load(path)
    model.load_state_dict(truth["state"])
    return model, truth


def layers_of(units: Mapping[str, list[Unit]]) -> list[int]:
    """The numbers of the layers."""
    return sorted({layer_of(path) for path in units})


def check(name: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """One model: rank correlations of predicted and measured values, and the mixes."""
    model, truth = trained(name, seed, steps, folder)
    units = units_of(model)
    result = record(model, Batches(seed + 500), folder / f"{name}-{seed}.safetensors")
    known = predicted(result)
    paths = list(truth["kl"])
    kl = [truth["kl"][path] for path in paths]
    damage = [known[cells_of(path)]["damage"] for path in paths]
    by_layer = [sum(one["damage"] for cell, one in known.items() if cell[0] == layer) for layer in layers_of(units)]
    unseen = Batches(seed, held_out=True)
    batches = [unseen.next() for _ in range(HELD_OUT)]
    certain = [path for path in paths if truth["g"][path]["bias"] > 2 * truth["g"][path]["bias_error"]]
    return {
        "model": name,
        "seed": seed,
        "steps": steps,
        "loss": truth["loss"],
        "linears": rank_correlation(damage, kl),
        "layers": rank_correlation(by_layer, [truth["kll"][str(layer)] for layer in layers_of(units)]),
        "relative_error": rank_correlation([known[cells_of(path)]["error"] for path in paths], kl),
        "ratio": float(np.exp(np.median(np.log(np.array(damage) / np.array(kl))))),
        "spread": max(kl) / min(kl),
        **{
            name: rank_correlation([known[cells_of(path)][name] for path in paths], [truth["g"][path][name] for path in paths])
            for name in ("bias", "noise", "own_noise")
        },
        "certain": len(certain),
        "certain_bias": rank_correlation(
            [known[cells_of(path)]["bias"] for path in certain], [truth["g"][path]["bias"] for path in certain]
        ),
        "mixes": mixes(model, result, truth, units, batches),
    }


def summary(checked: Sequence[Mapping[str, Any]]) -> str:
    """The results as a table: median and least of the seeds."""
    lines = [
        "| model | seeds | linears | layers | relative error | noise | bias | mixes: KL over best |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name in dict.fromkeys(one["model"] for one in checked):
        own = [one for one in checked if one["model"] == name]
        cells = [f"{np.median([one[key] for one in own]):.2f} ({min(one[key] for one in own):.2f})" for key in COLUMNS]
        ratios = [mix["chosen"] / mix["best"] for one in own for mix in one["mixes"]]
        mixed = f"{np.median(ratios):.2f} ({max(ratios):.2f})" if ratios else ""
        lines.append(f"| {name} | {len(own)} | {' | '.join(cells)} | {mixed} |")
    return "\n".join(lines)


def main() -> None:
    """Train, record, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--seeds", nargs="+", type=int, default=range(6))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--summary", type=Path, help="write the results of all finished models to this file")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for seed in given.seeds if given.summary is None else ():
        for name in given.models:
            path = given.out / f"{name}-{seed}.json"
            if not path.exists():
                path.write_text(json.dumps(check(name, seed, given.steps, given.out), indent=1))
                print(path.read_text(), flush=True)
    checked = [json.loads(path.read_text()) for path in sorted(given.out.glob("*-*.json"))]
    if given.summary is not None:
        given.summary.write_text(json.dumps(rounded(checked), indent=1) + "\n")
    print(summary(checked))


def rounded(value: Any) -> Any:
    """Numbers with four digits."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
