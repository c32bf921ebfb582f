"""Fits the forecast of GEMMs to measured times, and reports its errors on sites that were held out.

    python benchmarks/fit_forecast.py DATA_FOLDER
    python benchmarks/fit_forecast.py DATA_FOLDER --describe   # only the versions and sizes of the series; the fit stays

DATA_FOLDER contains `gemm_times.parquet` (one row per measured GEMM: system, framework, gemm_dtype, m, n, k, latency_ms,
sustained). Needs torch, pandas and pyarrow; takes about seven minutes on two cores. Writes the coefficients that ship with the
package and the sample of held-out rows that the tests use; forecast_accuracy.py then writes docs/measured/forecasts.md.

Times of fp8, fp8-block and nvfp4 include the quantization of the activations, whose time does not depend on n. The fit separates
the two as launch + passes x bytes, starting from measured times of quantization alone where there are some.
"""

from __future__ import annotations

import base64
import gzip
import json
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from gemmscope.forecast.coefficients import read_coefficients
from gemmscope.forecast.gemm import Basis, GemmModel, quantize_bytes_ms
from gemmscope.forecast.physics import Shapes, features, memory_ms, roofline_ms, tile_work
from gemmscope.gpu.specs import gpu
from gemmscope.recipe.precisions import precisions
from sites import CALIBRATION, HELD_OUT, LARGEST_WEIGHT, part

ROOT = Path(__file__).resolve().parent.parent
COEFFICIENTS = ROOT / "src/gemmscope/forecast/coefficients/gemm.json"
SAMPLE = ROOT / "tests/data/held_out_gemms.csv.gz"
GPUS = {
    "a100_sxm": "a100", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300", "gb200": "gb200",
    "rtx_pro_6000_server": "rtx-pro-6000",
}  # fmt: skip
FORMATS = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8-block", "nvfp4": "nvfp4"}
# Where several libraries were measured, forecasts are by default based on the others: cuBLAS where it has the format.
NOT_DEFAULT = {("b200", "bf16", "sustained", "trtllm"), ("b200", "nvfp4", "sustained", "trtllm"),
               ("gb200", "bf16", "sustained", "vllm"), ("gb200", "fp8", "sustained", "vllm")}  # fmt: skip
HIDDEN, EPOCHS, BATCH, RATE = 104, 220, 2048, 6e-3
SEEDS = (0, 1, 2)
START_LOG_SCALE = -3.5
LEANING_ROWS = 100
SAMPLE_ROWS = 220  # per series
SOURCE = "ai-dynamo/aiconfigurator (Apache-2.0), measured GEMM times, 2026-08-21"


def load(folder: Path) -> pd.DataFrame:
    """The measured rows with their series, without weights that were filled with constants."""
    rows = pd.read_parquet(folder / "gemm_times.parquet")
    rows = rows[rows.n * rows.k < LARGEST_WEIGHT].reset_index(drop=True)
    rows["gpu"] = rows.system.astype(str).map(GPUS)
    rows["fmt"] = rows.gemm_dtype.astype(str).map(FORMATS)
    rows["state"] = np.where(rows.sustained, "sustained", "burst")
    rows["library"] = rows.framework.astype(str)
    rows["part"] = [part(n, k) for n, k in zip(rows.n, rows.k, strict=True)]
    keys = ["gpu", "fmt", "state", "library"]
    rows["series"] = rows.groupby(keys).ngroup()
    return rows


def names_of(rows: pd.DataFrame) -> list[dict[str, str]]:
    """GPU, format, state and library of each series."""
    return rows.groupby("series")[["gpu", "fmt", "state", "library"]].first().to_dict("records")


def describe(rows: pd.DataFrame) -> list[dict[str, object]]:
    """The version of each series' library, and the smallest and largest m, k and n that were measured."""
    result = []
    for _, mine in rows.groupby("series"):
        [version] = mine.fw_version.astype(str).unique()
        result.append({"version": version, "sizes": [[int(mine[side].min()), int(mine[side].max())] for side in "mkn"]})
    return result


def describe_shipped(rows: pd.DataFrame) -> None:
    """Write versions and sizes into the coefficients that ship, and leave the rest as it is."""
    document = json.loads(COEFFICIENTS.read_text())
    for number, (name, facts) in enumerate(zip(names_of(rows), describe(rows), strict=True)):
        old = document["series"][number]
        assert name == {key: old[key] for key in name}, "the data has other series than the coefficients"
        head = {"index": number, **name, **facts}
        document["series"][number] = {**head, **{key: value for key, value in old.items() if key not in head}}
    write(document)


def write(document: dict) -> None:
    """The coefficients, one series on a line."""
    COEFFICIENTS.write_text(json.dumps(document, separators=(",", ":")).replace('{"index"', '\n{"index"') + "\n")


class Data:
    """The inputs of the fit, row by row."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self.rows = rows
        self.x = np.zeros((len(rows), 0), dtype=np.float32)
        self.base, self.quantize_bytes, self.roofline = np.zeros(len(rows)), np.zeros(len(rows)), np.zeros(len(rows))
        computed: list[tuple[np.ndarray, np.ndarray]] = []
        for (name, fmt), chosen in rows.groupby(["gpu", "fmt"]):
            chip, shapes = gpu(name), Shapes.of(chosen.m, chosen.k, chosen.n)
            work = tile_work(shapes, chip.sms)
            rates = {"tflops": chip.tflops[precisions()[fmt].rate], "bandwidth_tbps": chip.bandwidth_tbps}
            self.base[chosen.index] = np.log(roofline_ms(shapes, fmt, sms=chip.sms, work=work, **rates))
            plain = np.maximum(
                shapes.flops / chip.tflops[precisions()[fmt].rate] / 1e9, memory_ms(shapes, fmt, chip.bandwidth_tbps)
            )
            if fmt != "bf16":
                self.quantize_bytes[chosen.index] = quantize_bytes_ms(shapes.m * shapes.k, chip.bandwidth_tbps)
                plain = plain + self.quantize_bytes[chosen.index]
            self.roofline[chosen.index] = plain
            computed.append((chosen.index.to_numpy(), features(shapes, chip.sms, work)))
        self.x = np.zeros((len(rows), computed[0][1].shape[1]), dtype=np.float32)
        for index, values in computed:
            self.x[index] = values
        self.y = np.log(rows.latency_ms.to_numpy())
        self.names = names_of(rows)


def quantize_prior(folder: Path, names: list[dict[str, str]]) -> np.ndarray:
    """Per series: log passes over the bytes, from times of quantization alone; a plain guess where only the sum is known."""
    times = pd.read_parquet(folder / "quantize_times.parquet")
    times = times[times.m * times.k > 3e7]
    times["gpu"] = times.system.astype(str).map(GPUS)
    prior = []
    for series in names:
        passes = 1.3
        if series["fmt"] == "fp8":
            mine = times[(times.gpu == series["gpu"]) & (times.framework.astype(str) == series["library"])]
            mine = mine[
                mine.fw_version.astype(str)
                == sorted(mine.fw_version.astype(str).unique())[-1 if series["library"] == "trtllm" else 0]
            ]
            ideal = quantize_bytes_ms((mine.m * mine.k).to_numpy(dtype=float), gpu(series["gpu"]).bandwidth_tbps)
            ratio = (mine.latency_ms / ideal).groupby(mine.op_name.astype(str)).median()
            passes = float(ratio.sum())
        prior.append(np.log(passes))
    return np.array(prior)


class Network(torch.nn.Module):
    """Features and series → correction and log scale; and the quantization of each series."""

    def __init__(self, data: Data, prior: np.ndarray) -> None:
        super().__init__()
        series = len(data.names)
        self.w1 = torch.nn.Linear(data.x.shape[1], HIDDEN)
        self.w2 = torch.nn.Linear(HIDDEN, HIDDEN)
        self.w3 = torch.nn.Linear(HIDDEN, 2)
        self.s1 = torch.nn.Parameter(torch.randn(series, HIDDEN) * 0.1)
        self.s2 = torch.nn.Parameter(torch.randn(series, HIDDEN) * 0.1)
        self.launch = torch.nn.Parameter(torch.full((series,), -5.5))
        self.passes = torch.nn.Parameter(torch.tensor(prior, dtype=torch.float32))
        torch.nn.init.zeros_(self.w3.bias)
        self.w3.bias.data[1] = START_LOG_SCALE

    def forward(self, x, series, base, bytes_ms):
        hidden = torch.tanh(self.w1(x) + self.s1[series])
        hidden = torch.nn.functional.silu(self.w2(hidden) + self.s2[series])
        out = self.w3(hidden)
        gemm = torch.exp(base + out[:, 0])
        quantize = torch.exp(self.launch[series]) + torch.exp(self.passes[series]) * bytes_ms
        return torch.log(gemm + (bytes_ms > 0) * quantize), out[:, 1]


def fit(data: Data, chosen: np.ndarray, prior: np.ndarray, known: np.ndarray, seed: int) -> Network:
    """Fit the Laplace likelihood: the median of the errors, and their size."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    network = Network(data, prior)
    tensors = [torch.tensor(column, dtype=torch.float32) for column in (data.x, data.base, data.quantize_bytes, data.y)]
    series = torch.tensor(data.rows.series.to_numpy())
    prior_t, known_t = torch.tensor(prior, dtype=torch.float32), torch.tensor(known, dtype=torch.float32)
    steps = EPOCHS * len(chosen) // BATCH
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        index = torch.tensor(random.choice(chosen, BATCH))
        x, base, bytes_ms, y = (tensor[index] for tensor in tensors)
        predicted, scale = network(x, series[index], base, bytes_ms)
        loss = ((predicted - y).abs() * torch.exp(-scale) + scale).mean()
        loss = loss + (known_t * (network.passes - prior_t) ** 2).mean()  # quantization alone was measured: stay near it
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return network


def predict(data: Data, networks: list[Network], index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log time and log scale, means over networks."""
    with torch.no_grad():
        inputs = [torch.tensor(column[index], dtype=torch.float32) for column in (data.x, data.base, data.quantize_bytes)]
        series = torch.tensor(data.rows.series.to_numpy()[index])
        outputs = [network(inputs[0], series, inputs[1], inputs[2]) for network in networks]
    return np.mean([output[0].numpy() for output in outputs], axis=0), np.mean([output[1].numpy() for output in outputs], axis=0)


def errors_of(data: Data, network: Network, which: int) -> tuple[np.ndarray, np.ndarray]:
    """Errors on a part that was not used to fit this network, in units of its scale, and the series of each."""
    index = np.flatnonzero((data.rows.part == which).to_numpy())
    predicted, scale = predict(data, [network], index)
    return (data.y[index] - predicted) / np.exp(scale), data.rows.series.to_numpy()[index]


def quantiles(errors: np.ndarray, series: np.ndarray) -> dict[int, tuple[float, float]]:
    """Per series: the interval that contains 90% of the errors. Series with few rows are shrunk towards all series together."""
    everyone = np.quantile(errors, [0.05, 0.95])
    limits = {}
    for number in np.unique(series):
        mine = errors[series == number]
        trust = len(mine) / (len(mine) + LEANING_ROWS)
        low, high = trust * np.quantile(mine, [0.05, 0.95]) + (1 - trust) * everyone
        limits[int(number)] = (float(low), float(high))
    return limits


def pack(values: np.ndarray) -> dict[str, object]:
    """An array as JSON."""
    array = np.asarray(values, dtype="<f2")
    return {"shape": list(array.shape), "float16": base64.b64encode(array.tobytes()).decode()}


def stored(network: Network) -> dict[str, dict[str, object]]:
    """The coefficients in the format that the package reads."""
    arrays = {
        "w1": network.w1.weight.T, "b1": network.w1.bias, "s1": network.s1, "w2": network.w2.weight.T, "b2": network.w2.bias,
        "s2": network.s2, "w3": network.w3.weight.T, "b3": network.w3.bias,
    }  # fmt: skip
    return {name: pack(array.detach().numpy()) for name, array in arrays.items()}


def main() -> None:
    """Fit, calibrate, write, and check on the held-out rows."""
    folder, began = Path(sys.argv[1]), time.time()
    if "--describe" in sys.argv:
        describe_shipped(load(folder))
        return
    torch.set_num_threads(2)
    data = Data(load(folder))
    described = describe(data.rows)
    prior = quantize_prior(folder, data.names)
    known = np.array([series["fmt"] == "fp8" for series in data.names], dtype=float)
    parts = data.rows.part.to_numpy()
    seen = []
    for which in CALIBRATION:
        others = np.flatnonzero((parts != HELD_OUT) & (parts != which))
        seen.append(errors_of(data, fit(data, others, prior, known, seed=100 + which), which))
    limits = quantiles(*(np.concatenate(parts) for parts in zip(*seen, strict=True)))
    print(f"calibrated after {time.time() - began:.0f} s", flush=True)
    networks = [fit(data, np.flatnonzero(parts != HELD_OUT), prior, known, seed) for seed in SEEDS]
    print(f"fitted after {time.time() - began:.0f} s", flush=True)
    series = []
    for number, name in enumerate(data.names):
        launch = np.mean([float(torch.exp(network.launch[number].detach())) for network in networks])
        passes = np.mean([float(torch.exp(network.passes[number].detach())) for network in networks])
        quantize = [0.0, 0.0] if name["fmt"] == "bf16" else [round(launch, 5), round(passes, 3)]
        low, high = (round(float(limit), 3) for limit in limits[number])
        default = tuple(name.values()) not in NOT_DEFAULT
        series.append(
            {
                "index": number,
                **name,
                **described[number],
                "quantize": quantize,
                "low": low,
                "high": high,
                "default": default,
                "held_out": {},
            }
        )
    fitted = data.x[parts != HELD_OUT]
    document = {
        "version": 1, "features_version": 1, "source": SOURCE,
        "fitted": "benchmarks/fit_forecast.py: Laplace likelihood of log times, AdamW, mean of "
        f"{len(SEEDS)} networks; sites of part {HELD_OUT} never seen; error bars from parts {CALIBRATION}, each left out once",
        "ranges": {end: [round(float(v), 4) for v in edge] for end, edge in (("low", fitted.min(0)), ("high", fitted.max(0)))},
        "series": series, "networks": [stored(network) for network in networks],
    }  # fmt: skip
    evaluate(data, document)
    write(document)
    sample(data)
    print("now run: python benchmarks/forecast_accuracy.py")
    print(f"done after {time.time() - began:.0f} s; {COEFFICIENTS.stat().st_size / 1e3:.0f} kB", flush=True)


def evaluate(data: Data, document: dict) -> None:
    """Held-out error of every series, with the code of the package; fills in `held_out`."""
    model = GemmModel(read_coefficients(json.dumps(document), "what was just fitted"))
    left = data.rows[data.rows.part == HELD_OUT]
    for number, facts in enumerate(document["series"]):
        mine = left[left.series == number]
        fitted, shapes = model.coefficients.series[number], Shapes.of(mine.m, mine.k, mine.n)
        chip = gpu(fitted.gpu)
        basis = Basis(chip, fitted.fmt, fitted.state, fitted, factor=1.0, uncertainty=0.0)  # with this series' own measurements
        estimate = model._time(basis, shapes, "tn", tile_work(shapes, chip.sms), {})
        measured, total = mine.latency_ms.to_numpy(), estimate.total_ms
        error = np.abs(total / measured - 1)
        covered = float(((measured >= estimate.low_ms) & (measured <= estimate.high_ms)).mean())
        plain = np.abs(data.roofline[mine.index] / measured - 1)
        facts["held_out"] = {
            "rows": len(mine), "median": round(float(np.median(error)), 4), "p90": round(float(np.quantile(error, 0.9)), 4),
            "covered": round(covered, 3), "roofline_median": round(float(np.median(plain)), 4),
        }  # fmt: skip
        held_out = facts["held_out"]
        name = " ".join(facts[key] for key in ("gpu", "fmt", "state", "library"))
        print(f"{name}: median {held_out['median']:.1%}, p90 {held_out['p90']:.1%}, covered {covered:.0%}", flush=True)


def sample(data: Data) -> None:
    """Some held-out rows of each series, for the tests."""
    left = data.rows[data.rows.part == HELD_OUT]
    chosen = pd.concat(
        mine.sample(min(SAMPLE_ROWS, len(mine)), random_state=0).sort_values(["n", "k", "m"])
        for _, mine in left.groupby("series")
    )
    columns = ["gpu", "fmt", "state", "library", "m", "k", "n", "latency_ms"]
    text = chosen[columns].to_csv(index=False, float_format="%.5g", lineterminator="\n")
    SAMPLE.parent.mkdir(exist_ok=True)
    SAMPLE.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
