"""Cost of a full training run: days, GPU-hours and money for a number of tokens, with the interval of the step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gemmscope.errors import UserError, option, reject
from gemmscope.interval import Interval
from gemmscope.model.spec import RunSpec
from gemmscope.results.step import Cost
from gemmscope.workload.sharding import Given, solve

MOST_TOKENS, HIGHEST_PRICE = 1e18, 1e6  # far above any run


@dataclass(frozen=True)
class Budget:
    """How many tokens, on how many GPUs, at what price per GPU-hour (None: not given)."""

    tokens: float
    gpus: int
    price: float | None = None

    def __post_init__(self) -> None:
        tokens, price = option("tokens", f"{self.tokens:g}"), 0.0 if self.price is None else self.price
        most, highest = f"from 1 to {MOST_TOKENS:g}", f"the price of one GPU-hour, from 0 to {HIGHEST_PRICE:g}"
        few = f"{option('gpus', self.gpus)} is invalid: it must be 1 or more"
        reject(
            (
                not 1 <= self.tokens <= MOST_TOKENS,
                f"{tokens} is not a number of tokens",
                f"{most}, for example {option('tokens', '1e12')}",
            ),
            (self.gpus < 1, few, f"for example {option('gpus', 256)}"),
            (
                not 0 <= price <= HIGHEST_PRICE,
                f"{option('price', f'{price:g}')} is not a price",
                f"{highest}, for example {option('price', 2.5)}",
            ),
        )

    @classmethod
    def asked(cls, tokens: float | None, gpus: int | None, price: float | None) -> Budget | None:
        """The budget of these options; None if none was given, and a `UserError` if one is missing."""
        if tokens is None and gpus is None and price is None:
            return None
        if tokens is None or gpus is None:
            raise UserError(
                f"the cost of a run needs {option('tokens')} and {option('gpus')}",
                f"for example {option('tokens', '1e12')} {option('gpus', 256)} {option('price', 2.5)}",
            )
        return cls(tokens, gpus, price)

    def at(self, price: float | None) -> Budget:
        """At another price."""
        return replace(self, price=price)

    def replicas(self, run: RunSpec) -> int:
        """How many data-parallel replicas of the model the GPUs hold, in the run's layout."""
        return solve(run, Given(gpus=self.gpus)).dp or 1


def cost(step: Interval, run: RunSpec, budget: Budget) -> Cost:
    """The cost if every GPU computes all the time. Restarts and other time outside the step are not included, nor is
    communication if the step was measured.

    >>> run = RunSpec(micro_batch_size=1, sequence_length=1000)
    >>> total = cost(Interval(100.0, 99.0, 101.0), run, Budget(tokens=8.64e9, gpus=10, price=2.0))
    >>> round(total.days.value, 3), round(total.gpu_hours.value), round(total.money.value)
    (1.0, 240, 480)
    """
    sequences = run.micro_batch_size * run.gradient_accumulation * budget.replicas(run)
    days = step.times(budget.tokens / (sequences * run.sequence_length) / 1000 / 86400)
    hours = days.times(24 * budget.gpus)
    return Cost(
        days=days,
        gpu_hours=hours,
        money=hours.times(budget.price) if budget.price is not None else None,
        tokens=budget.tokens,
        gpus=budget.gpus,
        price=budget.price,
        global_batch=sequences,
    )
