"""Fits how much slower quantization is on other architectures than the H200's share of bandwidth implies.

    python benchmarks/fit_quantizing.py DATA_FOLDER

DATA_FOLDER contains `quantize_times.parquet` (times of FP8 casts by GPU, library and size). The quantization kernels of training
were measured on an H200 only (`training.toml`), so the fit needs a ratio: the time of the same kernel and size on another GPU,
corrected for bandwidth. Three kernels come near the memory bandwidth on an H200, as those of training do: the cast of torch's
operators, vLLM's cast, and vLLM's cast with scales by row. torch's maximum reaches a quarter of the bandwidth and is left out.

Prints one line per architecture for `[quantize.slower]`: slower = 1 + excess / (1 + elements / half_at), fitted to the mean of
the three kernels, and their distance from it. Needs pandas, pyarrow and scipy.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import curve_fit

from fit_forecast import GPUS
from gemmscope.forecast.training import facts
from gemmscope.gpu.specs import gpu

CHIPS = {**GPUS, "gb300": "gb300"}
NEWEST = {"trtllm": "1.3.0rc20", "vllm": "0.24.0"}
KERNELS = (("trtllm", "scale_matrix"), ("vllm", "scale_matrix"), ("vllm", "whole"))
ARCHITECTURES = ("10.0", "10.3")
LEAST_ELEMENTS = 1e7  # smaller tensors are launches and caches


def load(folder: Path) -> pd.DataFrame:
    """Milliseconds of the cast and of maximum and cast together, by GPU, library and size, without the launch."""
    times = pd.read_parquet(folder / "quantize_times.parquet").astype({"system": str, "framework": str, "fw_version": str})
    times = times[times.fw_version == times.framework.map(NEWEST)]
    times["gpu"] = times.system.map(CHIPS)
    table = times.pivot_table(index=["gpu", "framework", "m", "k"], columns="op_name", values="latency_ms", observed=True)
    table["whole"] = table.compute_scale + table.scale_matrix
    return table[["scale_matrix", "whole"]] - facts()["launch_ms"]


def slower(elements: np.ndarray, excess: float, half_at: float) -> np.ndarray:
    """The function that is fitted: long tensors reach the same share of bandwidth as on an H200."""
    return 1 + excess / (1 + elements / half_at)


def ratios(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """By size (the middle of its octave): the time of each kernel over that on the H200, as if both had the same bandwidth."""
    measured_on = facts()["measured_on"]
    bandwidth = gpu(name).bandwidth_tbps / gpu(measured_on).bandwidth_tbps
    columns = {}
    for library, column in KERNELS:
        ratio = (table.loc[name, library][column] / table.loc[measured_on, library][column] * bandwidth).dropna()
        elements = ratio.index.get_level_values("m") * ratio.index.get_level_values("k")
        long = elements >= LEAST_ELEMENTS
        columns[f"{library} {column}"] = ratio[long].groupby(np.floor(np.log2(elements[long]))).median()
    by_size = pd.DataFrame(columns)
    by_size.index = 2 ** (by_size.index + 0.5)
    return by_size


def main() -> None:
    """Fit each architecture over its GPUs."""
    table = load(Path(sys.argv[1]))
    for architecture in ARCHITECTURES:
        chips = [name for name in CHIPS.values() if gpu(name).architecture == architecture]
        by_size = pd.concat([ratios(table, name) for name in chips])
        mean = np.exp(np.log(by_size).mean(axis=1))
        (excess, half_at), _ = curve_fit(slower, mean.index.to_numpy(), mean.to_numpy(), p0=(0.5, 5e7))
        fitted = slower(by_size.index.to_numpy(), excess, half_at)
        spread = np.quantile(np.abs(np.log(by_size.to_numpy() / fitted[:, None])), 0.9)
        print(f'"{architecture}" = {{ excess = {excess:.2f}, half_at = {half_at:.1e} }}')
        print(f"# {', '.join(chips)}: nine of ten medians within {spread:.2f} (logarithmic) of it")
        print(
            "#",
            by_size.assign(mean=mean, fitted=fitted).round(2).groupby(level=0).mean().round(2).to_string().replace("\n", "\n# "),
        )


if __name__ == "__main__":
    main()
