"""Which GPUs and nodes are outliers: the rule, with its rate of false alarms.

Speeds are compared as logarithms, so that slow and fast are treated alike. A GPU is called if it is further from the median of
its group than a critical number of robust standard deviations (Qn), and further than the tolerance. The critical numbers
(rule.toml) hold the probability of *any* false alarm in the whole fleet, over all GPUs, nodes and figures, at 1% for normally
distributed chips. The scale contains the noise of the measurement, because it is taken from measured speeds; a GPU that was
measured less precisely than the others is compared with a larger one.

The median and Qn describe the healthy GPUs as long as these are more than half. If more than half are slow, the others are called
fast: one fleet alone cannot show the difference.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import exp, isfinite, log, nan, sqrt
from statistics import NormalDist, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmscope.fleet.spread import NORMAL_95, Floats, qn_scale
from gemmscope.grouping import grouped
from gemmscope.interval import Interval
from gemmscope.toml import load_data

MEDIAN_ERROR = sqrt(np.pi / 2)  # the standard error of the median over that of the mean, for normal values


@cache
def rule_data() -> dict[str, Any]:
    """The table of `rule.toml`."""
    return load_data("gemmscope.fleet", "rule.toml")


@dataclass(frozen=True)
class Sample:
    """One figure over the GPUs (or the nodes) of a group. `speeds` are logarithms, NaN: not measured. `errors` are relative
    standard errors, NaN: not known."""

    name: str
    speeds: Floats
    errors: Floats


@dataclass(frozen=True)
class RuleOutcome:
    """What the rule says of one figure: by GPU, deviations from the center (logarithms), scores and whether it is outside."""

    center: float
    scale: float
    critical: float
    limit: float
    """The least relative deviation of a slow GPU that is called."""
    deviations: Floats
    scores: Floats
    outside: NDArray[np.bool_]
    error: float
    """The standard error of the center."""


def critical_value(count: int, alarms: float) -> float:
    """How many robust standard deviations an outlier among `count` is away, if `alarms` false ones are expected in all of them.

    >>> round(critical_value(8, 0.01), 1), round(critical_value(64, 0.01), 1), round(critical_value(10_000, 0.01), 1)
    (5.5, 4.0, 4.9)
    """
    table = rule_data()["critical"]
    rates = [log(rate) for rate in reversed(table["alarms"])]
    counts, ratios = _ratios()
    alarms = min(max(alarms, table["alarms"][-1]), table["alarms"][0])
    above = bisect_right(counts, count)
    if above == len(counts):  # the scale is known ever better, as 1 / count
        row = 1 + (ratios[-1] - 1) * counts[-1] / count
    elif above == 0:
        row = ratios[0]
    else:
        low, high = counts[above - 1], counts[above]
        share = (1 / low - 1 / count) / (1 / low - 1 / high)
        row = ratios[above - 1] * (1 - share) + ratios[above] * share
    return float(np.interp(log(alarms), rates, row[::-1])) * NormalDist().inv_cdf(1 - alarms / 2 / count)


@cache
def _ratios() -> tuple[list[int], list[Floats]]:
    rows = {int(name): np.array(values) for name, values in rule_data()["critical"].items() if name != "alarms"}
    return list(rows), list(rows.values())


def apply_rule(sample: Sample, alarms: float, tolerance: float, widths: Floats | None = None) -> RuleOutcome:
    """Apply the rule to one figure. `widths`: how much more a value varies than the others by nature, as a node with few GPUs."""
    known = np.isfinite(sample.speeds)
    values = sample.speeds[known]
    center = float(np.median(values))
    noise = typical_error(sample.errors[known])
    scale = max(qn_scale(values), noise, rule_data()["least_scale"])
    excess = np.maximum(np.nan_to_num(sample.errors) ** 2 - noise**2, 0.0)  # of GPUs that were measured less precisely
    deviations = sample.speeds - center
    scores = deviations / np.sqrt(scale**2 + excess) / (1.0 if widths is None else widths)
    critical = critical_value(len(values), alarms)
    with np.errstate(invalid="ignore"):
        outside = (np.abs(scores) > critical) & (np.abs(np.expm1(deviations)) >= tolerance)
    limit = max(-float(np.expm1(-critical * scale)), tolerance)
    return RuleOutcome(center, scale, critical, limit, deviations, scores, outside, MEDIAN_ERROR * scale / sqrt(len(values)))


def typical_error(errors: Floats) -> float:
    """The median of the standard errors that are known; 0 if none is."""
    known = errors[np.isfinite(errors)]
    return float(np.median(known)) if len(known) else 0.0


@dataclass(frozen=True)
class OutlierCall:
    """One outlier of a group. `gpu`: its number in the group, or -1 for a whole node; `members`: GPUs of the node that are
    outside by themselves. `also`: other figures, and the ratio in each."""

    gpu: int
    node: str
    figure: str
    ratio: Interval
    score: float
    also: Mapping[str, float] = field(default_factory=dict)
    members: Sequence[int] = ()


@dataclass(frozen=True)
class GroupCalls:
    """What the rule says of one group: the figures that were tested, and the outliers."""

    figures: Mapping[str, RuleOutcome]
    calls: Sequence[OutlierCall]


def call_group(
    samples: Sequence[Sample], baseline: str, nodes: Sequence[str], *, alarms: float, tolerance: float, least: int
) -> GroupCalls:
    """Test the figures of one group, GPU by GPU and node by node.

    `baseline` is the figure that gets the largest part of the allowed false alarms: a slow chip is slow in every figure, and few
    GPUs need every bit of it. `nodes`: the node of every GPU.
    """
    usable = [sample for sample in samples if np.isfinite(sample.speeds).sum() >= least]
    if not usable:
        return GroupCalls({}, ())
    by_node = _nodes(nodes, usable[0], least)
    share = rule_data()["share_of_nodes"] if by_node else 0.0
    shares = _shares([sample.name for sample in usable], baseline)
    figures = {sample.name: apply_rule(sample, alarms * (1 - share) * shares[sample.name], tolerance) for sample in usable}
    node_tests: dict[str, RuleOutcome] = {}
    if by_node:
        sizes = np.array([len(members) for members in by_node.values()])
        widths = np.sqrt(np.maximum(np.median(sizes) / sizes, 1.0))  # a median of fewer GPUs varies more
        for sample in usable:
            medians = _node_sample(sample, list(by_node.values()))
            if np.isfinite(medians.speeds).sum() >= least:
                node_tests[sample.name] = apply_rule(medians, alarms * share * shares[sample.name], tolerance, widths)
    calls = _node_calls(node_tests, by_node, figures) if node_tests else []
    return GroupCalls(figures, [*calls, *_gpu_calls(usable, figures, nodes, calls, node_tests, list(by_node))])


def _shares(names: Sequence[str], baseline: str) -> dict[str, float]:
    """Each figure's share of the allowed false alarms.

    >>> _shares(["BF16 step", "FP8Block step", "FP8Block speedup"], "BF16 step")
    {'BF16 step': 0.5, 'FP8Block step': 0.25, 'FP8Block speedup': 0.25}
    """
    if baseline not in names or len(names) == 1:
        return dict.fromkeys(names, 1 / len(names))
    share = rule_data()["share_of_baseline"]
    return {name: share if name == baseline else (1 - share) / (len(names) - 1) for name in names}


def _nodes(nodes: Sequence[str], sample: Sample, least: int) -> dict[str, list[int]]:
    """The measured GPUs of every node that has several; empty if these are too few to compare."""
    members = grouped((nodes[gpu], gpu) for gpu in np.flatnonzero(np.isfinite(sample.speeds)).tolist() if nodes[gpu])
    several = {node: own for node, own in members.items() if len(own) >= rule_data()["least_gpus_of_node"]}
    return several if len(several) >= least else {}


def _node_sample(sample: Sample, members: Sequence[list[int]]) -> Sample:
    """The median speed of every node."""
    speeds = [[speed for speed in sample.speeds[own].tolist() if isfinite(speed)] for own in members]
    return Sample(sample.name, np.array([median(own) if own else nan for own in speeds]), np.full(len(members), nan))


def _node_calls(
    node_tests: Mapping[str, RuleOutcome], by_node: Mapping[str, list[int]], figures: Mapping[str, RuleOutcome]
) -> list[OutlierCall]:
    calls = []
    for position, (node, members) in enumerate(by_node.items()):
        hits = {name: test for name, test in node_tests.items() if test.outside[position]}
        if hits:
            worst = _worst(hits, position)
            side = np.sign(hits[worst].deviations[position])
            relative = figures[worst].deviations[members] / float(hits[worst].deviations[position])
            if np.mean(relative >= 0.5) < rule_data()["least_share_of_node"]:  # some of its GPUs are slow, not the node
                continue
            own = [gpu for gpu in members if figures[worst].outside[gpu] and np.sign(figures[worst].deviations[gpu]) == side]
            calls.append(_call(-1, node, hits, worst, position, (MEDIAN_ERROR * figures[worst].scale / sqrt(len(members))), own))
    return calls


def _gpu_calls(
    samples: Sequence[Sample],
    figures: Mapping[str, RuleOutcome],
    nodes: Sequence[str],
    node_calls: Sequence[OutlierCall],
    node_tests: Mapping[str, RuleOutcome],
    node_names: Sequence[str],
) -> list[OutlierCall]:
    """GPUs that are outside; on a node that was called, only those that are outside relative to their node too."""
    called = {call.node for call in node_calls}
    positions = {node: position for position, node in enumerate(node_names)}
    errors = {sample.name: sample.errors for sample in samples}
    calls = []
    outside = np.any([test.outside for test in figures.values()], axis=0)
    for gpu in np.flatnonzero(outside).tolist():
        hits = {name: test for name, test in figures.items() if test.outside[gpu]}
        if nodes[gpu] in called:
            at = positions[nodes[gpu]]
            hits = {
                name: test
                for name, test in hits.items()
                if abs(test.deviations[gpu] - (node_tests[name].deviations[at] if name in node_tests else 0.0))
                > max(test.critical * test.scale, test.limit)
            }
        if hits:
            worst = _worst(hits, gpu)
            calls.append(_call(gpu, nodes[gpu], hits, worst, gpu, float(np.nan_to_num(errors[worst][gpu]))))
    return calls


def _worst(hits: Mapping[str, RuleOutcome], position: int) -> str:
    """The figure that is furthest beyond its critical value."""
    return max(hits, key=lambda name: abs(hits[name].scores[position]) / hits[name].critical)


def _call(
    gpu: int, node: str, hits: Mapping[str, RuleOutcome], worst: str, position: int, error: float, members: Sequence[int] = ()
) -> OutlierCall:
    test = hits[worst]
    deviation = float(test.deviations[position])
    reach = NORMAL_95 * sqrt(error**2 + test.error**2)
    ratio = Interval(exp(deviation), exp(deviation - reach), exp(deviation + reach))
    also = {name: exp(float(other.deviations[position])) for name, other in hits.items() if name != worst}
    return OutlierCall(gpu, node, worst, ratio, abs(float(test.scores[position])), also, members)
