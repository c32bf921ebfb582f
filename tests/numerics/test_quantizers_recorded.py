"""Our quantizers against outputs of Transformer Engine and torchao, as benchmarks/record_quantizers.py recorded them.

`quantizers_cpu.npz`: torchao 0.18.0 and the NVFP4 reference of Transformer Engine 2.20.2, on a CPU with torch 2.13.0.
`quantizers_h200.npz`: the same and Transformer Engine's kernels, on an H200.
"""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gemmscope.numerics.formats import E4M3, E5M2, AmaxHistory, te
from support.quantizer_cases import cases, codes_of, comparable, quantized_values, recorded_quantizer, tensor_amax

FOLDER = Path(__file__).parent.parent / "data" / "numerics"
MACHINES = ("cpu", "h200")


@cache
def recorded(machine: str) -> dict[str, np.ndarray]:
    path = FOLDER / f"quantizers_{machine}.npz"
    if not path.exists():
        pytest.skip(f"{path.name} is not recorded yet: benchmarks/record_quantizers.py on an H200")
    return dict(np.load(path))


def checks(machine: str) -> dict[str, dict[str, Any]]:
    """The recorded checks of quantizers that a recipe uses."""
    every = json.loads(str(recorded(machine)["checks"]))
    return {name: facts for name, facts in every.items() if not facts["quantizer"].startswith(("ao_mx_floor", "ao_nvfp4_tensor"))}


# What a GPU divides with another last bit: PyTorch by a number (it multiplies by the reciprocal), Triton always. Where a value is
# then on the other side of a tie, its scale or code is the next one.
DIVIDED_OTHERWISE = "torchao training"
CHECKS = [(one, check) for one in MACHINES if (FOLDER / f"quantizers_{one}.npz").exists() for check in checks(one)]


def assert_few_differ_by_one(ours: np.ndarray, theirs: np.ndarray) -> None:
    distances = np.abs(ours.astype(int) - theirs.astype(int))
    assert distances.max(initial=0) <= 1
    assert distances.sum() <= 0.021 * len(distances.reshape(-1))


@pytest.mark.parametrize(("machine", "check"), CHECKS)
def test_codes_and_scales_are_the_librarys(machine: str, check: str) -> None:
    facts, arrays = checks(machine)[check], recorded(machine)
    quantizer = recorded_quantizer(facts["quantizer"])
    for index, (name, given) in enumerate(cases()):
        x = given[:128, :128] if facts["square"] else given
        x = (x.T if facts["direction"] == "columns" else x).contiguous()
        quantized = quantizer(x, amax=tensor_amax(x) * facts["history"] if facts["history"] else None)
        if machine == "h200" and check.startswith(DIVIDED_OTHERWISE):
            if not ("NaN" in name and check.startswith("torchao training")):  # its maxima on a GPU ignore NaN
                assert_few_differ_by_one(comparable(quantized.scales).numpy(), arrays[f"{check}|scales"][index])
                flat, rounded = (
                    comparable(codes_of(quantized, quantizer.format)).numpy().reshape(-1),
                    quantized.rounded.reshape(-1).numpy(),
                )
                step = max(1, len(flat) // 500)
                has_code = ~np.isnan(rounded[::step])
                assert_few_differ_by_one(flat[::step][has_code], arrays[f"{check}|codes"][index][has_code])
            continue
        assert np.array_equal(comparable(quantized.scales).numpy(), arrays[f"{check}|scales"][index]), name
        codes = codes_of(quantized, quantizer.format)
        if facts["zeros_lose_their_sign"]:
            codes = torch.where(quantized_values(quantizer, x) == 0, 0, codes)
        flat = comparable(codes).numpy().reshape(-1)
        step = max(1, len(flat) // 500)
        undefined = (quantized.rounded.isnan() & (quantizer.format == "e2m1")).numpy().reshape(-1)  # NaN has no code in E2M1
        assert np.array_equal(flat[::step][~undefined[::step]], arrays[f"{check}|codes"][index][~undefined[::step]]), name
        if not undefined.any():
            assert hashlib.sha256(flat.tobytes()).digest() == arrays[f"{check}|hash"][index].tobytes(), name


@pytest.mark.parametrize("machine", MACHINES)
def test_every_quantizer_that_runs_there_was_recorded(machine: str) -> None:
    seen = {(facts["library"].split()[0], facts["quantizer"], facts["direction"]) for facts in checks(machine).values()}
    both = {("reference", "te_nvfp4"), ("reference", "te_nvfp4_2d"), ("torchao", "ao_mx")}
    either = {
        ("reference", "te_nvfp4_hadamard"),
        ("torchao", "ao_tensor_e4m3"),
        ("torchao", "ao_tensor_e5m2"),
        ("torchao", "ao_row"),
    }
    if machine == "h200":
        both |= {("TE", "te_1x128"), ("TE", "te_128x128")}
        either |= {("TE", f"te_{kind}_{target}") for kind in ("tensor", "delayed") for target in ("e4m3", "e5m2")}
    assert {(*one, direction) for one in both for direction in ("rows", "columns")} <= seen
    assert either <= {(library, quantizer) for library, quantizer, _ in seen}


def test_scales_over_steps_are_those_of_a_transformer_engine_linear() -> None:
    maxima, scales = torch.from_numpy(recorded("h200")["delayed|maxima"]), recorded("h200")["delayed|scales"]
    for column, target in enumerate((E4M3, E4M3, E5M2)):  # X, W, dY
        history, ours = AmaxHistory(target, length=3), []
        for amax in maxima[:, column]:
            history.push(amax)
            ours.append(te(history.amax, target, history.amax).encode.item())
        assert ours == scales[:, column].tolist()
