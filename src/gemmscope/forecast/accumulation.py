"""What more micro-batches per step would change: the optimizer, gradients and the pipeline's bubble come once per step."""

from collections.abc import Sequence
from dataclasses import replace

from gemmscope.findings import Fact, Finding, finding
from gemmscope.forecast.step import StepForecast
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.forecast import GpuForecast
from gemmscope.results.step import StepTimes

MORE = 16  # times as many micro-batches
NOTICEABLE = 0.1  # share of the step


def accumulation_finding(forecast: StepForecast, step: StepTimes) -> Finding | None:
    """A finding if work done once per step takes a large part of it: what more micro-batches would change."""
    run, names = forecast.run, [time.recipe for time in step.recipes if time.recipe not in step.unfit]
    if step.winner is None or BASELINE not in [time.recipe for time in step.recipes]:
        return None
    now, many = run.gradient_accumulation, MORE * run.gradient_accumulation
    longer = forecast.again(replace(run, gradient_accumulation=many))
    times = {name: (forecast.step(name).total.value, longer.step(name).total.value) for name in {*names, BASELINE}}

    def once(name: str) -> float:
        """Milliseconds that do not grow with the number of micro-batches."""
        short, long = times[name]
        return max(short - now * (long - short) / (many - now), 0.0)

    best = step.winner.best
    share = once(best) / times[best][0]
    if share < NOTICEABLE:
        return None
    later = min(names, key=lambda name: times[name][1])
    about: dict[str, Fact] = {"recipe": best, "share": share, "later_share": once(best) / times[best][1]}
    about |= {"speedup": times[BASELINE][0] / times[best][0], "later_speedup": times[BASELINE][1] / times[best][1]}
    about |= {"now": now, "many": many, "saved": 1 - times[best][1] / many * now / times[best][0]}
    if later == best:
        return finding("once-per-step", **about)
    return finding("once-per-step-decides", **about, other=later)


def cheapest_finding(gpus: Sequence[GpuForecast]) -> Finding | None:
    """Whether the cheapest GPU would be another one with more micro-batches per step."""
    now, later = dict[str, float](), dict[str, float]()
    for gpu in gpus:
        best = gpu.step.of(gpu.step.winner.best) if gpu.step is not None and gpu.step.winner is not None else None
        if best is None or best.cost is None or best.cost.money is None:
            continue
        saved = next((about.facts.get("saved") for about in gpu.findings if about.code.startswith("once-per-step")), 0.0)
        now[gpu.gpu] = best.cost.money.value
        later[gpu.gpu] = best.cost.money.value * (1 - float(str(saved)))
    if len(now) < 2:
        return None
    first, other = min(now, key=lambda name: now[name]), min(later, key=lambda name: later[name])
    return finding("cheapest-depends", gpu=first, other=other) if first != other else None
