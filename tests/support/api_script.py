"""A user's script with every function of the Python API and every kind of keyword. It is checked by mypy, never run."""

from __future__ import annotations

from pathlib import Path

import gemmscope as gs


def report(*results: object) -> None:
    """Shows results."""


def every_function() -> None:
    model: gs.Model = gs.load("llama-3.1-8b", mtp_layers=1)
    gs.load(Path("config.json"))
    gs.load({"model_type": "llama"})
    gs.load(hidden_size="4k", intermediate_size=16384, num_attention_heads=32, num_hidden_layers=24, gated_mlp=True)
    job: gs.Job = model.on(1, "8k", tp=2, sequence_parallel=True, pp_layers=[16, 16], recompute="full", gpus=64, fsdp=8)
    model.on(micro_batch_size=1, sequence_length=8192, optimizer_state="fp32", dp_overlap=False)
    plan = model.plan(
        "h100", 64, 256, "8k", recipes="fp8current,mxfp8", left_out=["NVFP4"], tp=[1, 2], pp=1, zero=3, recompute="none",
        vary={"hidden": [5120, 6144]}, tokens="2T", price=2.5, cuda_graphs=True, network="infiniband-ndr", nvlink_domain=8,
    )  # fmt: skip
    report(plan.best, model.spec)
    model.explore(
        "h200", ["b200"], output=Path("page.html"), gpu_count=16, stack="nvidia", micro_batch_size=[1, 2], sequence_length="4k",
        tokens="2T", price=2.5, recipes="mxfp8", left_out="NVFP4",
    )  # fmt: skip
    shapes = job.shapes(check=False)
    forecast = job.forecast("b300", ["h200"], gpu_count=8, price={"h200": 2.5}, mix=Path("mix.json"), modes=["autocast"])
    job.forecast(gpu="b300,h200", state="burst", keep_higher="first=1", cache_weights=True, tokens=1e12, price=2)
    job.sweep("b200", micro_batch_size=[1, 2], sequence_length=["2k", "4k"], recipes=["mxfp8"], left_out="NVFP4")
    fleet = job.fleet(step=True, gpus=[0, 1], repeat=2, tolerance="3%", folder=Path("runs"), at_once=1, resume=True)
    bench = job.bench(recipes=["mxfp8"], precision="1%", time_limit=60, device="cpu", timing="profiler", fleet=fleet)
    step = job.step(
        verify=True, break_even=True, compile="layers", optimizer="adamw", tokens="15T", gpu_count=256, price=2.5,
        fleet="fleet.json", deliver=report,
    )  # fmt: skip
    job.bench_sweep(micro_batch_size=[1, 2, 4], gpus="all", num_iters=10, stream=report)
    sweep = job.step_sweep(sequence_length=["2k", "8k"], ray="auto", hugging_face=True)
    job.numerics(synthetic="outliers", gpu="b200", bound="5%")
    gs.bench_gemms([(8192, 4096, 14336)], share_gpu=True)
    gs.bench_gemm_sweep((8192, 4096, 14336), m=[1024, "2k"], precision=0.02)
    gs.fleet_gemms([(8192, 8192, 8192)], ray="auto")
    gs.gather_fleet("runs", tolerance=0.03)
    gs.forecast_gemms("h200", shapes=[(1024, 1024, 1024)], recipes=["fp8current"])
    errors = gs.quantization_errors("recording.safetensors", speed=step, bound=0.05, seed=1)
    explained = gs.explain_trace("a.json", Path("b.json"), baseline="bf16.json.gz", against=bench, steps=3, job=job)
    compared = gs.compare_runs([bench, "again.json", sweep, fleet], fail_if_slower="3%")
    gs.write_report([shapes, forecast, errors, explained, compared, "run.json"], "report.html")
    gs.read("run.json").save("copy.json")
    calibrated = gs.calibrate(recipes=["mxfp8"], time_limit=60)
    report(calibrated, gs.doctor(), gs.__version__)
    try:
        gs.load("no such model")
    except gs.UserError as error:
        report(error.message, error.hint)
