"""How long the CPU takes to launch a step, and how long a step takes given the time of the CPU and of the GPU."""

from gemmscope.forecast.overlap import cluster
from gemmscope.model.spec import RunSpec


def launch_ms(recipe: str, dense_layers: float, moe_layers: int, run: RunSpec) -> float:
    """Milliseconds that the CPU needs to launch one micro-batch; few with CUDA graphs."""
    facts = cluster()["host"]
    dense, moe = (table.get(recipe, table["other"]) for table in (facts["layer_ms"], facts["moe_layer_ms"]))
    every = dense * dense_layers + moe * moe_layers
    return float(every * (facts["graphs"] if run.cuda_graphs else 1.0))


def at_least(gpu_ms: float, host_ms: float, ahead_ms: float = 0.0, *, experts: bool) -> float:
    """The time of a micro-batch, given its GPU time and launch time. `ahead_ms`: its share of what the GPU runs once per step.

    The CPU launches ahead of the GPU, so a step takes the longer of both. With experts it does not get far ahead: the CPU
    waits for routing, and in every layer some phases are host-bound and others GPU-bound.

    >>> at_least(10.0, 5.0, experts=False), at_least(10.0, 15.0, 2.0, experts=False), round(at_least(10.0, 8.0, experts=True), 1)
    (10.0, 13.0, 10.9)
    """
    if not experts or not host_ms or not gpu_ms:
        return max(gpu_ms, host_ms - ahead_ms)
    order = float(cluster()["host"]["sharpness"])
    return float((gpu_ms**order + host_ms**order) ** (1 / order))
