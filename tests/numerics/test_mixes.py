"""The mix that is recommended is the best of all mixes: checked against every one of them, computed cell by cell."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from math import inf, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.interval import Interval
from gemmscope.numerics.evaluation import mixes
from gemmscope.numerics.evaluation.error_table import ErrorTable, error_table, recipe_errors
from gemmscope.numerics.evaluation.mixes import PART_COST, recommend_mix
from gemmscope.numerics.evaluation.speeds import Savings, Speeds, nominal_speeds, speeds_of
from gemmscope.results.numerics import DroppedPass, LinearError, Mix, OperandError, PassError
from support.forecast_files import several_gpus
from support.numerics_files import linear_errors, recipes_and_mix
from support.run_files import recorded_bench
from support.step_files import recorded_step

NAMES = ("BF16", "MXFP8", "NVFP4")


def weight_only(linear: str, layer: int | None, recipe: str, error: float, expert: int | None = None) -> LinearError:
    weight = OperandError(tensor="W", format="e4m3", relative=error)
    name = f"{layer}.{linear}.{expert}"
    return LinearError(name=name, linear=linear, layer=layer, recipe=recipe, weight=weight, inputs=8, outputs=16)


@st.composite
def tables(draw: st.DrawFn) -> tuple[ErrorTable, Speeds]:
    """Random errors and times. A higher precision may be worse or faster somewhere, and cells may be missing."""
    layers, linears = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shape = (layers, linears)
    values = st.floats(0.001, 1.0)

    def table(strategy: st.SearchStrategy[float]) -> np.ndarray:
        return np.array([[draw(strategy) for _ in range(linears)] for _ in range(layers)])

    present = np.array([[draw(st.booleans()) for _ in range(linears)] for _ in range(layers)]) | np.eye(*shape, dtype=bool)
    squares = {"BF16": np.zeros(shape), **{name: table(values) * present for name in NAMES[1:]}}
    flops = table(values) * present
    speeds = {"BF16": Savings((0.0, 0.0, 0.0), flops)}
    times = flops / flops.sum()  # in BF16
    for name in NAMES[1:]:
        saved = times * table(st.floats(-0.3, 0.75))  # of each cell's own time: some are slower in low precision
        runs = np.array([[draw(st.integers(0, 9)) > 0 for _ in range(linears)] for _ in range(layers)])  # the rest saves nothing
        total = saved.sum() if abs(saved.sum()) > 1e-6 else 1e-6
        speeds[name] = Savings((total, total - 0.05, total + 0.05), saved / total * runs)
    linears_named = tuple(f"linear{number}" for number in range(linears))
    cells = ErrorTable(tuple(range(layers)), linears_named, squares, flops / flops.sum(), ("",) * linears)
    gains = {name: Interval(1 / (1 - saved.totals[0])) for name, saved in speeds.items() if name != "BF16"}
    return cells, Speeds(speeds, gains, "measured", "step", "H200")


def every_mix(cells: ErrorTable, speeds: Speeds) -> list[tuple[float, float]]:
    """Error and cost of all mixes, cell by cell, without sums over rows or columns."""
    layers, linears = len(cells.layers), len(cells.linears)
    points = []
    for recipe, higher in product(NAMES, NAMES):
        if recipe != higher and not cells.error(higher) < cells.error(recipe):
            continue
        sets = [set(chosen) for size in range(linears) for chosen in combinations(range(linears), size)]
        for first, last, chosen in product(range(layers), range(layers), sets):
            if first + last >= layers:
                continue
            error, time = 0.0, 1.0
            for layer, linear in product(range(layers), range(linears)):
                kept = layer < first or layer >= layers - last or linear in chosen
                name = higher if kept else recipe
                error += cells.squares[name][layer, linear]
                time -= speeds.savings[name].by_cell[layer, linear]
            parts = (first > 0) + (last > 0) + len(chosen)
            parts += parts > 0 and higher != "BF16"
            points.append((sqrt(error), time + PART_COST * parts))
    return points


def cost_of(mix: Mix) -> float:
    parts = (mix.first_layers > 0) + (mix.last_layers > 0) + len(mix.linears)
    parts += parts > 0 and mix.higher != "BF16"
    return (1 / mix.speedup.value if mix.speedup is not None else 1.0) + PART_COST * parts


@settings(max_examples=150, deadline=None)
@given(tables(), st.floats(0.01, 1.0), st.booleans())
def test_no_mix_is_better(table: tuple[ErrorTable, Speeds], bound: float, built: bool) -> None:
    """With all sets of linears listed, and with sets built up linear by linear."""
    cells, speeds = table
    before, mixes.MOST_LISTED = mixes.MOST_LISTED, 0 if built else mixes.MOST_LISTED
    try:
        result = recommend_mix(cells, speeds, bound)
    finally:
        mixes.MOST_LISTED = before
    every = every_mix(cells, speeds)
    best = min((cost for error, cost in every if error <= bound * (1 + mixes.CLOSE)), default=inf)
    chosen = result.chosen
    assert chosen is not None  # BF16 has no error here
    assert chosen.error <= bound * (1 + 1e-8)
    assert cost_of(chosen) == pytest.approx(best, rel=1e-7)
    for mix in result.frontier:
        beaten = [1 for error, cost in every if error < mix.error * (1 - 1e-6) and cost < cost_of(mix) * (1 - 1e-6)]
        assert not beaten, mix
    speedups = [mix.speedup.value if mix.speedup is not None else 1.0 for mix in result.frontier]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(speedups))
    assert min(mix.error for mix in result.frontier) == pytest.approx(min(error for error, _ in every), abs=1e-7)


def test_keeps_what_costs_least() -> None:
    """Of two linears with the same error, the one that saves less; of equal mixes, the one with less to configure."""
    both = [weight_only(name, layer, "NVFP4", 0.1) for name in ("small", "large") for layer in range(4)]
    cells = error_table(both)
    assert cells is not None
    shares = np.array([[0.05, 0.2]] * 4)
    savings = {"BF16": Savings((0.0, 0.0, 0.0), shares), "NVFP4": Savings((0.5, 0.4, 0.6), shares)}
    speeds = Speeds(savings, {"NVFP4": Interval(2.0, 5 / 3, 2.5)}, "measured", "linears", "B200")
    mix = recommend_mix(cells, speeds, 0.0708).chosen
    assert mix is not None
    assert (mix.linears, mix.first_layers, mix.last_layers, mix.higher) == (("small",), 0, 0, "BF16")
    assert mix.error == pytest.approx(0.1 / sqrt(2))
    assert mix.kept_share == pytest.approx(0.5)
    assert mix.speedup is not None
    assert (mix.speedup.value, mix.speedup.low) == (pytest.approx(1 / 0.6), pytest.approx(1 / 0.68))


def test_no_bound_chooses_nothing_and_no_mix_may_be_below_it() -> None:
    linears = [*linear_errors(2, ("MXFP8", "NVFP4")), *(weight_only(name, 0, "BF16", 0.01) for name in ("self_attn.q_proj",))]
    assert recipes_and_mix(linears, None, None).mixed.chosen is None
    result = recipes_and_mix(linears, None, 0.0001)
    assert result.mixed.chosen is None
    assert [finding.code for finding in result.findings] == ["numerics-no-mix"]


def test_every_cell_counts_once() -> None:
    """Experts of a layer count together, the head not at all, a recipe without numbers somewhere as BF16 there."""
    experts = [
        weight_only("experts.up", layer, "MXFP8", error, expert) for layer in (0, 1) for expert, error in enumerate((0.1, 0.3))
    ]
    others = [weight_only("qkv", layer, "MXFP8", 0.2) for layer in (0, 1)]
    head = [weight_only("lm_head", None, "MXFP8", 9.0)]
    low = [weight_only("qkv", 0, "NVFP4", 0.4)]
    linears = [*experts, *others, *head, *low]
    cells = error_table(linears)
    assert cells is not None
    assert cells.linears == ("experts.up", "qkv")
    assert cells.error("MXFP8") == pytest.approx(sqrt(((0.01 + 0.09) / 2 + 0.04) / 2))
    assert cells.error("NVFP4") == pytest.approx(sqrt(0.16 / 4))
    assert cells.missing("NVFP4") == ("experts.up", "qkv")
    saved = nominal_speeds(cells).savings["NVFP4"].shares
    assert saved[0, 1] == cells.flops[0, 1]
    assert saved.sum() == saved[0, 1]  # what stays in BF16 saves nothing
    assert cells.flops[0, 0] == pytest.approx(2 * cells.flops[0, 1])
    worst = {summary.recipe: (summary.worst, summary.worst_error) for summary in recipe_errors(linears, cells)}
    assert worst["MXFP8"] == ("0.experts.up.1", 0.3)


def test_experts_count_with_the_tokens_that_they_get() -> None:
    """Two of 64 experts are recorded; 8 of them get each token, so that all of them have 8 times the FLOPs of one linear."""
    own = {"inputs": 64, "outputs": 64}
    experts = [
        weight_only("experts.up", 0, "MXFP8", 0.1, number).model_copy(update={**own, "experts": 64, "tokens": tokens})
        for number, tokens in ((3, 96.0), (40, 160.0))
    ]
    plain = weight_only("qkv", 0, "MXFP8", 0.1).model_copy(update={**own, "tokens": 1024.0})
    cells = error_table([*experts, plain])
    assert cells is not None
    assert cells.flops[0].tolist() == pytest.approx([8 / 9, 1 / 9])


def test_passes_that_could_not_be_computed_count_as_the_mean_of_the_others() -> None:
    whole, part = (LinearError(name=f"{layer}.qkv", linear="qkv", layer=layer, recipe="FP8Current") for layer in (0, 1))
    operand = OperandError(tensor="W", format="e4m3", relative=0.0)
    passes = [
        PassError.model_validate({"pass": name, "relative": Interval(error), "first_share": 0.5, "operands": (operand, operand)})
        for name, error in (("fprop", 0.1), ("dgrad", 0.3), ("wgrad", 0.2))
    ]
    dropped = tuple(DroppedPass.model_validate({"pass": name, "steps": (7,), "reason": "NaN"}) for name in ("dgrad", "wgrad"))
    whole = whole.model_copy(update={"passes": tuple(passes)})
    part = part.model_copy(update={"passes": (passes[0],), "dropped": dropped})
    cells, alone = error_table([whole, part]), error_table([part])
    assert cells is not None
    assert alone is not None
    assert cells.error("FP8Current") == pytest.approx(whole.error)
    assert alone.error("FP8Current") == pytest.approx(0.1)  # no other linear has them


def test_a_model_without_layers_and_layers_that_were_skipped() -> None:
    plain = error_table([weight_only(name, None, "NVFP4", error) for name, error in (("one", 0.1), ("two", 0.3))])
    assert plain is not None
    chosen = recommend_mix(plain, nominal_speeds(plain), 0.1).chosen
    assert chosen is not None
    assert (chosen.linears, chosen.first_layers) == (("two",), 0)
    some = error_table([weight_only("one", layer, "NVFP4", 0.1) for layer in (0, 8, 16)])
    assert some is not None
    assert all(not mix.first_layers for mix in recommend_mix(some, nominal_speeds(some), 0.05).frontier)


def test_without_speeds_bits_decide() -> None:
    """4 bits before 8, 8 before 16; what is kept higher is as few FLOPs as possible, and nothing claims a speedup."""
    linears = linear_errors(4)
    loose, tight = recipes_and_mix(linears, None, 0.5), recipes_and_mix(linears, None, 0.05)
    assert loose.mixed.chosen is not None
    assert (loose.mixed.chosen.recipe, loose.mixed.chosen.is_mixed) == ("NVFP4", False)
    assert tight.mixed.chosen is not None
    assert tight.mixed.chosen.speedup is None
    assert (tight.mixed.cost, tight.speed_of, tight.recipes[0].speedup) == ("bits", None, None)


def test_speeds_of_a_forecast() -> None:
    """What all linears save together is what the step saves; each linear's share follows its own op."""
    cells = error_table(linear_errors(8))
    assert cells is not None
    speeds = speeds_of(several_gpus(), cells, "b300")
    everywhere = np.ones(cells.flops.shape)
    for name, gain in speeds.speedups.items():
        assert 1 / speeds.time({name: everywhere}) == pytest.approx(gain.value)
        speedup = speeds.speedup({name: everywhere})
        assert speedup is not None
        assert (speedup.low, speedup.high) == (pytest.approx(gain.low), pytest.approx(gain.high))
    shares = speeds.savings["NVFP4"].shares.sum(axis=0)
    gpu = several_gpus().gpus[0]
    times = {op: [gpu.linears.op_time(op, name, "autocast") for name in ("BF16", "NVFP4")] for op in ("QKV Proj", "MLP Down")}
    saved = {op: high.total_ms.value - low.total_ms.value for op, (high, low) in times.items() if high and low}
    qkv, down = sum(shares[:3]), shares[6]
    assert qkv / down == pytest.approx(saved["QKV Proj"] / saved["MLP Down"])
    assert shares[0] / shares[1] == pytest.approx(4)  # one fused GEMM, divided by sizes
    assert speeds.findings == ()
    assert gpu.step is not None
    for name, rivals in speeds.rivals.items():  # by the interval of the two recipes' ratio
        close = {other for other in speeds.speedups if (ratio := gpu.step.speedup(name, other)) and ratio.includes_one}
        assert set(rivals) == close


def test_speeds_of_bench_and_step() -> None:
    """A measured step has no times of single linears. Recipes that were not measured are named."""
    cells = error_table(linear_errors(4))
    assert cells is not None
    step = speeds_of(recorded_step("llama8b"), cells)
    assert (step.of, step.origin) == ("step", "measured")
    codes = [finding.code for finding in step.findings]
    assert codes == ["numerics-no-speed", "numerics-speed-by-flops"]
    assert {"MXFP8", "NVFP4"} <= set(step.findings[0].facts["recipes"])  # type: ignore[arg-type]
    assert step.rivals["FP8Delayed"] == ()  # 1.37x, 1.33x and 1.21x with intervals of 1%
    bench = speeds_of(recorded_bench("first"), cells)
    assert (bench.of, bench.gpu) == ("linears", "NVIDIA H200")
    mixed = recipes_and_mix(linear_errors(4), recorded_bench("first"), 0.06).mixed
    assert {mix.recipe for mix in mixed.frontier} <= {"BF16", *bench.speedups}


def test_many_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets that are built up give the same mix as all of them; where there are too many to keep, one that is nearly as good."""
    random = np.random.default_rng(3)
    errors = random.uniform(0.02, 0.3, (6, 10))
    linears = [weight_only(f"linear{place}", layer, "NVFP4", errors[layer, place]) for layer in range(6) for place in range(10)]
    cells = error_table(linears)
    assert cells is not None
    shares = random.uniform(0.1, 1.0, (6, 10))
    savings = {"BF16": Savings((0.0, 0.0, 0.0), cells.flops), "NVFP4": Savings((0.4, 0.4, 0.4), shares / shares.sum())}
    speeds = Speeds(savings, {"NVFP4": Interval(1 / 0.6)}, origin="measured", of="linears", gpu="B200")
    listed = recommend_mix(cells, speeds, 0.1).chosen
    monkeypatch.setattr(mixes, "MOST_LISTED", 0)
    assert recommend_mix(cells, speeds, 0.1).chosen == listed
    monkeypatch.setattr(mixes, "MOST_SETS", 60)
    thinned = recommend_mix(cells, speeds, 0.1).chosen
    assert listed is not None
    assert thinned is not None
    assert thinned.error <= 0.1
    assert cost_of(thinned) <= cost_of(listed) * 1.02


def test_without_speeds_a_mix_has_recipes_that_one_gpu_runs() -> None:
    """FP8Block is emulated on the GPUs that run NVFP4, so MXFP8 is kept higher, even with a slightly larger error."""
    squares = {"BF16": 0.0, "FP8Block": 4.0e-4, "MXFP8": 4.1e-4, "NVFP4": 1.0e-2}
    table = {name: np.full((2, 2), square / 4) for name, square in squares.items()}
    cells = ErrorTable((0, 1), ("a", "b"), table, np.full((2, 2), 0.25), ("", ""))
    chosen = recommend_mix(cells, nominal_speeds(cells), 0.08).chosen
    assert chosen is not None
    assert (chosen.recipe, chosen.higher) == ("NVFP4", "MXFP8")
