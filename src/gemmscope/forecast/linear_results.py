"""The linears of a model, or bare GEMMs, as `Linears` with origin forecast: the same type that `gemmscope bench` measures.

Every interval is a 90% error bar. An error that both sides of a speedup share cancels in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from gemmscope.bench.linears import memory
from gemmscope.choices import Mode
from gemmscope.findings import Finding, finding
from gemmscope.forecast.estimate import Estimate, pairwise, ratio, total, winner_of
from gemmscope.forecast.linears import Forecaster
from gemmscope.grouping import grouped
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.results.linears import Linears, OpTime, Speedup, Winner, linears_total, quantization_by_pass, same_kernels
from gemmscope.workload.cases import Case, op_of
from gemmscope.workload.ops import PASSES


def forecast_linears(
    forecaster: Forecaster,
    cases: Sequence[Case],
    recipes: Sequence[str],
    modes: Sequence[Mode],
    layers: int | None = None,
    layer_counts: Mapping[str, int] | None = None,
    heads: Sequence[str] = (),
    *,
    as_te_benchmark: bool = False,
) -> Linears:
    """Times, speedups, totals, memory and winners.

    An op whose sizes do not fit a recipe is missing there: sizes are not padded. Those of the output head (`heads`) count in
    BF16. `as_te_benchmark`: the cases are forward calls, each with its own X and W.
    """
    forecaster.prepare(cases, recipes)
    bare = not as_te_benchmark and all(case.passes == PASSES[:1] for case in cases)
    counts = dict(layer_counts or {})
    ops, speedups, totals, winners = list[OpTime](), list[Speedup](), [], {}
    for mode in modes:
        names = [name for name in recipes if same_kernels(name, mode, list(recipes)) == name]  # recipes with kernels of their own
        part = _ModeForecast(forecaster, mode, heads)
        for case in cases:
            for name in names:
                part.add_op(case, name)
            own = [name for name in names if (name, case.op) in part.ops and not part.ops[name, case.op].left_in_baseline]
            part.add_speedups({name: part.estimates[name, case.op] for name in own}, case.op)
        whole = {}
        for name in names if not bare else ():
            known = {case.op: part.ops[name, case.op] for case in cases if (name, case.op) in part.ops}
            if len(known) == len(cases):
                whole[name] = total(part.estimates[name, case.op].times(case.count) for case in cases)
                totals.append(linears_total(name, mode, whole[name].interval(), tuple(cases), known, counts))
        if not bare:
            winners[mode] = cast(Winner, winner_of(part.add_speedups(whole)))
        ops += part.ops.values()
        speedups += part.speedups
    return Linears(
        origin="forecast",
        cases=tuple(cases),
        recipes=tuple(recipes),
        modes=tuple(modes),
        layers=layers,
        layer_counts=counts,
        as_te_benchmark=as_te_benchmark,
        cache_weights=forecaster.cache_weights,
        ops=tuple(ops),
        speedups=tuple(speedups),
        totals=tuple(totals),
        memory=()
        if bare or as_te_benchmark
        else tuple(memory(cases, name, capability=forecaster.chip.architecture) for name in recipes),
        winners=winners,
    )


@dataclass
class _ModeForecast:
    """Everything in one mode; `ops` and `estimates` by recipe and op."""

    forecaster: Forecaster
    mode: Mode
    heads: Sequence[str] = ()
    ops: dict[tuple[str, str], OpTime] = field(default_factory=dict)
    estimates: dict[tuple[str, str], Estimate] = field(default_factory=dict)
    speedups: list[Speedup] = field(default_factory=list)

    def add_op(self, case: Case, name: str) -> None:
        """Add one op in one recipe, if its sizes fit."""
        op = op_of(case.op)
        unfit = op in self.heads and recipe(name).quantizes and recipe(name).misaligned(case.unpadded_sizes())
        left = name != BASELINE and (not case.quantized or bool(unfit))
        chosen = recipe(BASELINE if left else name)
        if chosen.quantizes and chosen.misaligned(case.unpadded_sizes()):
            return
        linear = self.forecaster.linear(case, chosen.name)
        quantize_ms = linear.quantize_ms if self.mode == "autocast" else {}
        shares = quantization_by_pass(quantize_ms, case.passes)
        quantization = Estimate(sum(quantize_ms.values()), 0.0, linear.quantize_uncertainty)
        whole = total([linear.all_gemms(), quantization]) if self.mode == "autocast" else linear.all_gemms()
        casts = {pass_name: Estimate(share, 0.0, linear.quantize_uncertainty) for pass_name, share in shares.items()}
        self.estimates[name, case.op] = whole
        self.ops[name, case.op] = OpTime(
            op=case.op,
            recipe=name,
            mode=self.mode,
            total_ms=whole.interval(),
            pass_ms={pass_name: total([gemm, casts[pass_name]]).interval() for pass_name, gemm in linear.gemms.items()},
            quantize_ms=quantize_ms,
            left_in_baseline=f"frameworks leave it in {BASELINE}" if left else "",
        )

    def add_speedups(self, times: Mapping[str, Estimate], op: str = "") -> Mapping[tuple[str, str], Interval]:
        """Add the speedups of every recipe over every other, for one op or for all linears together."""
        in_common = self.forecaster.in_common
        pairs = pairwise(times, lambda name, over: ratio(times[over], times[name], in_common(name, over)).interval())
        for (name, over), gain in pairs.items():
            self.speedups.append(Speedup(recipe=name, over=over, mode=self.mode, op=op, speedup=gain))
        return pairs


def padded_experts(recipes: Sequence[str]) -> Iterator[Finding]:
    """What is added to the tokens of experts: one finding for each multiple."""
    quantized = (chosen for chosen in map(recipe, recipes) if chosen.quantizes)
    for multiple, names in grouped((chosen.experts_multiple_of, chosen.name) for chosen in quantized).items():
        yield finding("experts-padded", recipes=names, multiple_of=multiple, added=multiple // 2)


def misaligned(cases: Sequence[Case], recipes: Sequence[str], heads: Sequence[str] = (), *, left: bool = False) -> list[Finding]:
    """Ops whose sizes do not fit a recipe, those of the output head left out: one finding for each reason.

    `left`: they are left in BF16, as the linears of a module are; else the recipe cannot run the model.
    """
    code = "linears-left-in-baseline" if left else "sizes-misaligned"
    may_be_quantized = [case for case in cases if case.quantized and op_of(case.op) not in heads]
    reasons = grouped(
        ((*wrong, chosen.multiple_of), (case.op, chosen.name))
        for chosen in map(recipe, recipes)
        for case in may_be_quantized
        if chosen.quantizes and (wrong := chosen.misalignment(case.unpadded_sizes())) is not None
    )
    findings = []
    for (what, size, multiple), pairs in reasons.items():
        ops, names = (list(dict.fromkeys(column)) for column in zip(*pairs, strict=True))
        sizes = {"size": size, "multiple_of": multiple, "padded": -(-size // multiple) * multiple}
        findings.append(finding(code, ops=ops, recipes=names, what=what, **sizes))
    return findings
