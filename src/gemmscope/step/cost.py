"""What a run costs: days, GPU-hours and money for a number of tokens, with the step's interval carried through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gemmscope.errors import UserError, shown
from gemmscope.interval import Interval
from gemmscope.model.spec import RunSpec


@dataclass(frozen=True)
class Budget:
    """How many tokens, on how many GPUs, at what price for one GPU and hour (None: not asked)."""

    tokens: float
    gpus: int
    price: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.tokens < float("inf"):
            raise UserError(f"--tokens {self.tokens:g} is no number of tokens", "for example --tokens 1e12")
        if self.gpus < 1:
            raise UserError(f"--gpus {self.gpus} leaves nothing to train on", "it is 1 or more")
        if self.price is not None and not 0 <= self.price < float("inf"):
            raise UserError(f"--price {self.price:g} is no price", "for one GPU and one hour, for example --price 2.5")

    @classmethod
    def asked(cls, tokens: float | None, gpus: int | None, price: float | None) -> Budget | None:
        """None if nothing was asked for; a `UserError` if too little was."""
        if tokens is None and gpus is None and price is None:
            return None
        if tokens is None or gpus is None:
            raise UserError("a run's cost needs --tokens and --gpus", "for example --tokens 1e12 --gpus 256 --price 2.5")
        return cls(tokens, gpus, price)

    def at(self, price: float | None) -> Budget:
        """At another price."""
        return replace(self, price=price)

    def replicas(self, run: RunSpec) -> int:
        """How many copies of the model the GPUs hold; experts are shared among `ep` of them."""
        group = run.tp * run.cp * run.pp
        if self.gpus % group:
            raise UserError(
                f"{self.gpus} GPUs do not divide into groups of {group} (tp x cp x pp)", f"for example --gpus {group * 8}"
            )
        if (self.gpus // group) % run.ep:
            raise UserError(
                f"{self.gpus // group} replicas do not divide into the {run.ep} that share the experts",
                f"for example --gpus {group * run.ep}",
            )
        return self.gpus // group


@dataclass(frozen=True)
class Cost:
    """Of the whole run in one precision."""

    days: Interval
    gpu_hours: Interval
    money: Interval | None


def prices(text: str) -> Mapping[str, float] | float:
    """One price for every GPU, or one for each by its name.

    >>> prices("2.5"), prices("h200=2.5, b300=4")
    (2.5, {'h200': 2.5, 'b300': 4.0})
    """
    found: dict[str, float] = {}
    try:
        if "=" not in text:
            return float(text)
        for part in text.split(","):
            name, _, price = part.partition("=")
            found[name.strip().lower()] = float(price)
    except ValueError:
        raise UserError(
            f"--price {shown(text)} is no price", "for one GPU and one hour: --price 2.5, or --price h200=2.5,b300=4"
        ) from None
    return found


def cost(step: Interval, run: RunSpec, budget: Budget) -> Cost:
    """Every GPU computes all the time. What is not in the step (measured, that is communication) is not in it; nor are restarts.

    >>> run = RunSpec(micro_batch_size=1, sequence_length=1000)
    >>> found = cost(Interval(100.0, 99.0, 101.0), run, Budget(tokens=8.64e9, gpus=10, price=2.0))
    >>> round(found.days.value, 3), round(found.gpu_hours.value), round(found.money.value)
    (1.0, 240, 480)
    """
    tokens_per_step = run.micro_batch_size * run.sequence_length * run.gradient_accumulation * budget.replicas(run)
    days = _times(step, budget.tokens / tokens_per_step / 1000 / 86400)
    hours = _times(days, 24 * budget.gpus)
    return Cost(days, hours, _times(hours, budget.price) if budget.price is not None else None)


def _times(found: Interval, factor: float) -> Interval:
    return Interval(found.value * factor, found.low * factor, found.high * factor)
