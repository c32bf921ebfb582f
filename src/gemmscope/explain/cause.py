"""What a cause is, and what all searches for causes share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from gemmscope.explain.account import Account, Item, Look
from gemmscope.explain.place import UNKNOWN_PRECISION
from gemmscope.explain.rates import gain_ratio, rates
from gemmscope.measure.kernels import CAST_SHARE
from gemmscope.toml import load_data

NAMED = 0.03  # of the step: what costs less is not named


@dataclass(frozen=True)
class Cause:
    """One reason why the step is not faster. `cost_ms`: what the step would save without it, as far as can be told."""

    key: str
    cost_ms: float
    evidence: tuple[str, ...]
    kernels: tuple[str, ...] = ()
    where: str = ""
    spans: tuple[tuple[float, float, str], ...] = field(default=(), repr=False)  # begin, end, words: for a viewer

    @property
    def title(self) -> str:
        return str(_advice()[self.key]["title"])

    def advice(self, framework: str) -> list[str]:
        """In the framework's own options first."""
        found = _advice()[self.key]
        return [*found.get(framework, ()), *found["do"]]

    def speedup(self, step_ms: float) -> float:
        """How many times faster the step would be without it."""
        return step_ms / max(step_ms - self.cost_ms, 1e-9)


class Evidence:
    """A look and its account, with what several searches ask for."""

    def __init__(self, seen: Look, found: Account) -> None:
        self.seen, self.account = seen, found
        self.items = seen.all_items()
        self.steps = seen.count
        self.step_ms = found.step_ms

    @cached_property
    def ratio(self) -> float:
        """How many times faster low precision multiplies."""
        return gain_ratio(self.items)

    @cached_property
    def rates(self) -> dict[str, float]:
        return rates(self.items)

    @cached_property
    def products(self) -> list[Item]:
        """Of linears: attention's own and the head's left out."""
        return [
            item
            for item in self.items
            if item.product is not None
            and not item.product.head
            and "bmm" not in item.product.layer
            and item.placed.is_product
            and item.scope.phase != "optimizer"
        ]

    @cached_property
    def low(self) -> list[Item]:
        return [item for item in self.products if item.product is not None and item.product.low]

    @cached_property
    def high(self) -> list[Item]:
        """In BF16 or above; those whose precision the trace does not tell are neither high nor low."""
        return [
            item
            for item in self.products
            if item.product and not item.product.low and item.product.precision != UNKNOWN_PRECISION
        ]

    @cached_property
    def told(self) -> bool:
        """Whether the trace tells of most products in which precision they ran."""
        known = self.weight(self.low) + self.weight(self.high)
        return known > 0 and known >= 0.5 * self.weight(self.products)

    @cached_property
    def casts(self) -> list[Item]:
        return [item for item in self.items if item.placed.name == "quantization"]

    @cached_property
    def framework(self) -> str:
        """Whose layers these are: by its kernels and operators."""
        for item in self.items:
            if "transformer_engine" in item.work.name or item.scope.inside("_LayerNormLinear", "_LayerNormMLP", "_GroupedLinear"):
                return "transformer_engine"
        for item in self.items:
            if item.scope.inside("float8", "Float8", "_scaled_mm") or (
                item.work.name.startswith("triton_") and "_scaled_mm" in item.work.name
            ):
                return "torchao"
        return ""

    def ms(self, items: Iterable[Item]) -> float:
        """Per step."""
        return sum(item.share for item in items) / 1000 / self.steps

    def per_step(self, items: Sequence[Any]) -> float:
        return len(items) / self.steps

    def weight(self, items: Iterable[Item]) -> float:
        """FLOPs where they are known for all, else microseconds: what shares of products are counted in."""
        return sum(item.product.flops if self.flops_known else item.share for item in items if item.product is not None)

    @cached_property
    def flops_known(self) -> bool:
        counted = [item for item in self.products if item.product is not None and not item.product.reduces]
        return bool(counted) and sum(item.product.flops > 0 for item in counted if item.product) >= 0.95 * len(counted)

    @property
    def counted_in(self) -> str:
        return "of the FLOPs" if self.flops_known else "of the products' time (their shapes are not all known)"

    @cached_property
    def low_share(self) -> float:
        """Of the linears' products whose precision is told, that really run low."""
        whole = self.weight(self.low) + self.weight(self.high)
        return self.weight(self.low) / whole if whole else 0.0

    @cached_property
    def gain_ms(self) -> float:
        """What the products that ran low save against BF16."""
        return self.ms(self.low) * (self.ratio - 1)

    @cached_property
    def casting_ms(self) -> float:
        """Quantization's own time: of a kernel that does a norm or an activation as well, its share."""
        return self.ms(item for item in self.casts if not item.placed.rides) + CAST_SHARE * self.ms(
            item for item in self.casts if item.placed.rides
        )


def main_kernels(items: Iterable[Item], count: int = 3) -> tuple[str, ...]:
    """The names that most of the time went to."""
    times: Counter[str] = Counter()
    for item in items:
        times[item.work.name] += item.share  # type: ignore[assignment]
    return tuple(short_name(name) for name, _ in times.most_common(count))


def short_name(name: str) -> str:
    """A kernel's name without what its template was filled with.

    >>> short_name("void at::native::reduce_kernel<512, 1, Op<float>>(Op)"), short_name("nvjet_sm90_tst_128x64")
    ('at::native::reduce_kernel', 'nvjet_sm90_tst_128x64')
    """
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    cut = min((at for at in (plain.find("<"), plain.find("(")) if at > 0), default=len(plain))
    inner = [
        word
        for word in ("float8_copy", "AbsFunctor", "FillFunctor", "direct_copy", "CUDAFunctor_add", "MulFunctor")
        if word in name
    ]
    return plain[:cut][:100] + (f" ({inner[0]})" if inner and cut < len(plain) else "")


def sizes_of(items: Iterable[Item], count: int = 3) -> str:
    """The sizes of products, most time first: `8192x4096x14336 (12 ms)`."""
    times: Counter[tuple[int, ...]] = Counter()
    for item in items:
        if item.product is not None and item.product.size is not None:
            times[item.product.size] += item.share  # type: ignore[assignment]
    return ", ".join("x".join(str(size) for size in found) for found, _ in times.most_common(count))


@cache
def _advice() -> dict[str, Any]:
    return load_data("gemmscope.explain", "advice.toml")
