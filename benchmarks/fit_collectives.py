"""Fits the times of collectives inside one node: launch + a term with the square root of the bytes + bytes over bandwidth.

    python benchmarks/fit_collectives.py DATA_FOLDER

DATA_FOLDER contains `nccl_times.parquet`. Needs pandas, pyarrow and scipy. Writes forecast/coefficients/collectives.toml. Every
fourth message size is held out, and gives the error that is written beside the coefficients.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import nnls

OUT = Path(__file__).resolve().parent.parent / "src/gemmscope/forecast/coefficients/collectives.toml"
FILES = {
    "a100": "a100_sxm_comm_nccl_2.27.3", "h100": "h100_sxm_comm_nccl_2.29.2", "h200": "h200_sxm_comm_nccl_2.29.2",
    "b200": "b200_sxm_comm_nccl_2.29.2", "b300": "b300_sxm_comm_nccl_2.29.2", "gb200": "gb200_comm_nccl_2.29.2",
    "gb300": "gb300_comm_nccl_2.29.2", "l40s": "l40s_comm_nccl_2.27.3", "rtx-pro-6000": "rtx_pro_6000_server_comm_nccl_2.29.2",
}  # fmt: skip
HEAD = """# Times of collectives inside one node, by GPU, operation and number of GPUs:
# [launch in ms, ms per root of a byte, ms per byte] of the whole message in bytes (of all ranks together, before reducing).
# Fitted by benchmarks/fit_collectives.py (non-negative least squares of relative errors) to NCCL times of
# ai-dynamo/aiconfigurator (Apache-2.0, 2026-08-21). Every fourth message size was left out: held_out_….
"""


def main() -> None:
    """Fit and write."""
    rows = pd.read_parquet(Path(sys.argv[1]) / "nccl_times.parquet")
    rows = rows[rows.nccl_dtype.astype(str) == "half"].assign(file=rows.file.astype(str), op_name=rows.op_name.astype(str))
    lines, errors = [], []
    for name, file in FILES.items():
        mine = rows[rows.file.str.startswith(file)]
        lines.append(f"\n[{name}]\n")
        for op, of_op in mine.groupby("op_name"):
            parts = []
            for ranks, latencies in of_op.groupby("num_gpus"):
                latencies = latencies.groupby("message_size").latency.median()
                size, time = latencies.index.to_numpy() * 2.0, latencies.to_numpy()
                left = np.arange(len(size)) % 4 == 2
                terms = np.stack([np.ones_like(size), np.sqrt(size), size], axis=1)
                scale = np.array([1.0, 1e-4, 1e-8])
                coefficients, _ = nnls(terms[~left] * scale / time[~left, None], np.ones((~left).sum()))
                coefficients = coefficients * scale
                errors.append(np.abs(terms[left] @ coefficients / time[left] - 1))
                parts.append(f"{ranks} = [{', '.join(f'{value:.4g}' for value in coefficients)}]")
            lines.append(f"{op} = {{ {', '.join(parts)} }}\n")
    error = np.median(np.concatenate(errors))
    p90 = np.quantile(np.concatenate(errors), 0.9)
    OUT.write_text(HEAD + f"\nheld_out_median_error = {error:.3f}\nheld_out_p90_error = {p90:.3f}\n" + "".join(lines))
    print(f"median {error:.1%}, p90 {p90:.1%}")


if __name__ == "__main__":
    main()
