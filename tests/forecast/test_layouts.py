"""Steps on several GPUs: exchanges, overlap, pipelines, experts and the host."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.errors import UserError, in_shell
from gemmscope.forecast.communication import Exchange, Network, collective_ms, exposed, network_facts, network_of
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.step import StepForecast
from gemmscope.gpu.specs import gpu, gpus
from gemmscope.model import presets
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.parts import StepPart
from gemmscope.workload.derive import derive

NODES = Network(50.0, 8)


def model_of(name: str) -> ModelSpec:
    model = presets.load(name).model
    assert model is not None
    return model


def steps(name: str, model: ModelSpec, run: RunSpec, network: Network | None = None) -> StepForecast:
    return StepForecast(Forecaster(gpu(name), "sustained"), model, run, derive(model, run), network)


def exchanged(name: str, model: ModelSpec, run: RunSpec) -> dict[str, Exchange]:
    return {exchange.kind: exchange for exchange in steps(name, model, run).exchanged}


# --- collectives and networks ------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(gpus())), st.sampled_from(["all_gather", "all_reduce", "alltoall"]), st.integers(1, 10**9))
def test_larger_messages_take_longer(name: str, operation: Any, size: int) -> None:
    chip, network = gpu(name), network_of(gpu(name))
    for ranks in (2, 8, 64):
        assert collective_ms(chip, network, operation, ranks, size) <= collective_ms(chip, network, operation, ranks, size * 2)
    assert collective_ms(chip, network, operation, 1, size) == 0.0


@given(st.integers(1, 144), st.integers(1, 512), st.integers(1, 64))
def test_a_domain_holds_a_whole_share_of_a_group(domain: int, ranks: int, apart: int) -> None:
    inside = Network(50.0, domain).inside(ranks, apart)
    assert ranks % inside == 0
    assert inside == 1 or inside * apart <= domain


@given(st.floats(1, 400), st.floats(1.1, 4))
def test_a_faster_network_is_never_slower(gbps: float, faster: float) -> None:
    times = [collective_ms(gpu("h100"), Network(bandwidth, 8), "all_gather", 64, 1e9) for bandwidth in (gbps, gbps * faster)]
    assert times[0] >= times[1]


def test_a_full_node_leaves_the_network_to_others() -> None:
    """Gradients of replicas in other nodes are not exchanged over NVLink."""
    h200 = gpu("h200")
    near, apart, half = (collective_ms(h200, NODES, "reduce_scatter", 2, 1e9, apart) for apart in (1, 8, 4))
    assert apart > 5 * near
    assert half == near
    wide = [collective_ms(gpu("gb200"), network_of(gpu("gb200")), "reduce_scatter", 8, 1e9, nodes) for nodes in (1, 8)]
    assert wide[0] == wide[1]


def test_bridges_join_four_cards() -> None:
    nvl = gpu("h200-nvl"), network_of(gpu("h200-nvl"))
    four, eight = (collective_ms(*nvl, "all_gather", ranks, 1e9) for ranks in (4, 8))
    assert eight > 2 * four


def test_networks_have_names_or_rates() -> None:
    chip = gpu("h100")
    assert network_of(chip).gbps == 50
    assert network_of(gpu("a100")).gbps == 25
    assert network_of(chip, "infiniband-xdr").gbps == network_of(chip, 100).gbps == network_of(chip, "100").gbps
    assert network_of(chip, domain=72).domain == 72
    with pytest.raises(UserError, match="not a known network") as unknown:
        network_of(chip, "infiniband-ndrr")
    assert "infiniband-ndr" in unknown.value.hint
    assert all(name in unknown.value.hint for name in network_facts()["networks"])
    for wrong in ("0", "-5", "nan", "1e9"):
        with pytest.raises(UserError, match="GB/s"):
            network_of(chip, wrong)


# --- what is exchanged ---------------------------------------------------------------------------------------------------


def test_sharding_divides_the_gemms_and_adds_communication() -> None:
    model = model_of("llama-3.1-70b")
    one, four = (steps("b200", model, RunSpec(1, 8192, tp=tp, sequence_parallel=tp > 1)).step("BF16") for tp in (1, 4))
    assert 0.2 < four.parts["GEMMs"].value / one.parts["GEMMs"].value < 0.35
    assert "exposed communication" in four.parts
    assert "exposed communication" not in one.parts


def test_whoever_holds_the_same_weights_exchanges_gradients() -> None:
    """Context-parallel ranks exchange gradients too, not only replicas. Experts that are split over ranks are not exchanged."""
    model, moe = model_of("llama-3.1-8b"), model_of("mixtral-8x7b")
    context, replicas = (
        exchanged("h200", model, RunSpec(1, 8192, cp=cp, dp=dp))["gradients"].time_ms for cp, dp in ((8, 1), (1, 8))
    )
    assert context == pytest.approx(replicas)
    assert "gradients" not in exchanged("h200", moe, RunSpec(1, 8192))
    shared, split = (
        exchanged("h200", moe, RunSpec(1, 8192, ep=8, dp=8, tp=tp, etp=etp))["gradients"].time_ms
        for tp, etp in ((1, None), (2, 1))
    )
    assert 0 < shared < 0.5 * replicas  # 1.6 billion weights beside the experts, of 8.0
    assert split > shared  # two ranks hold the same experts


def test_experts_are_folded_over_tensor_and_data_parallelism() -> None:
    """TP 2, EP 64, ETP 1 on 64 GPUs: every expert is on one of them, and no gradients of experts are exchanged."""
    run = RunSpec(1, 4096, tp=2, sequence_parallel=True, ep=64, etp=1)
    assert (run.data_parallel, run.gpus) == (32, 64)
    folded = exchanged("gb200", model_of("qwen3-235b-a22b"), run)
    twice = exchanged("gb200", model_of("qwen3-235b-a22b"), replace(run, dp=64))
    assert twice["gradients"].time_ms > 1.5 * folded["gradients"].time_ms


def test_sharded_weights_are_gathered_in_every_micro_batch() -> None:
    model, run = model_of("llama-3.1-8b"), RunSpec(1, 8192, dp=8)
    optimizer, weights = (exchanged("h100", model, replace(run, zero=zero)) for zero in (1, 3))
    assert optimizer["weights"].per_step
    assert not weights["weights"].per_step
    assert weights["weights"].time_ms == pytest.approx(2 * optimizer["weights"].time_ms)
    assert "weights" not in exchanged("h100", model, replace(run, zero=0))
    hybrid = exchanged("h100", model, replace(run, dp=64, zero=3, zero_ranks=8))
    assert hybrid["weights"].time_ms == pytest.approx(weights["weights"].time_ms)  # inside the node
    assert hybrid["gradients"].crosses


def test_tokens_travel_once_to_each_domain() -> None:
    """Sixteen ranks on two nodes send little more over the network than one copy of their tokens."""
    model = model_of("qwen3-30b-a3b")
    near, far = (exchanged("h100", model, RunSpec(1, 4096, ep=ep, etp=1))["experts"] for ep in (8, 16))
    assert (near.crosses, far.crosses) == (False, True)
    copies = far.time_ms / (4 * 48) * NODES.reached_gbps * 1e6 / (4096 * 2048 * 2)
    assert 0.9 < copies < 1.2  # of a token's eight experts, one at least is nearly always on the other node


# --- what is hidden ------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["tensor", "context", "experts", "stages", "gradients", "weights"]),
    st.floats(0.01, 1e4), st.floats(0.01, 1e4), st.booleans(), st.booleans(),
)  # fmt: skip
def test_what_is_exposed_is_part_of_what_is_exchanged(
    kind: Any, time_ms: float, batch_ms: float, once: bool, overlap: bool
) -> None:
    run = RunSpec(
        1, 4096, tp=2, sequence_parallel=True, vp=2, gradient_accumulation=4,
        tp_overlap=overlap, dp_overlap=overlap, ep_overlap=overlap,
    )  # fmt: skip
    computed: dict[StepPart, float] = {"GEMMs": batch_ms * 0.6, "attention": batch_ms * 0.2, "head and loss": batch_ms * 0.2}
    exchange = exposed(Exchange(kind, time_ms, crosses=False, per_step=once), run, computed)
    assert exchange.time_ms == pytest.approx(time_ms * (1 if once else 4))
    assert 0 < exchange.exposed_ms <= exchange.time_ms * (1 + 1e-9)
    if not overlap and kind in ("tensor", "experts", "gradients", "weights"):
        assert exchange.exposed_ms == pytest.approx(exchange.time_ms)


def test_overlap_is_faster() -> None:
    dense = RunSpec(1, 8192, tp=4, sequence_parallel=True, dp=16)
    moe = RunSpec(1, 4096, ep=8, dp=64)
    for name, run, switch in (
        ("llama-3.1-70b", dense, "tp_overlap"), ("llama-3.1-70b", dense, "dp_overlap"), ("qwen3-30b-a3b", moe, "ep_overlap"),
    ):  # fmt: skip
        off, on = (steps("h100", model_of(name), replace(run, **{switch: enabled})).step("BF16") for enabled in (False, True))
        assert on.time_ms < off.time_ms, switch
        assert on.parts["GEMMs"] == off.parts["GEMMs"]


# --- pipelines ---------------------------------------------------------------------------------------------------------------


def test_virtual_stages_shrink_the_bubble() -> None:
    model, run = model_of("llama-3.1-70b"), RunSpec(1, 8192, tp=4, sequence_parallel=True, pp=4, gradient_accumulation=16)
    plain, interleaved = (steps("h100", model, replace(run, vp=vp)).step("FP8Current") for vp in (1, 5))
    assert interleaved.parts["pipeline bubble"].value == pytest.approx(plain.parts["pipeline bubble"].value / 5, rel=0.05)
    share = plain.parts["pipeline bubble"].value / (plain.time_ms - plain.parts["pipeline bubble"].value)
    assert share == pytest.approx(3 / 16, rel=0.12)  # the last stage also has the head, which others do not wait for twice


# --- experts and the host ---------------------------------------------------------------------------------------------------


def test_small_experts_are_bound_by_the_host_unless_graphs_are_used() -> None:
    model, run = model_of("qwen3-30b-a3b"), RunSpec(1, 4096, ep=8, dp=8, gradient_accumulation=64)
    launched, graphs = (steps("b200", model, replace(run, cuda_graphs=enabled)).step("MXFP8") for enabled in (False, True))
    assert launched.host_bound
    assert not graphs.host_bound
    assert launched.time_ms > 1.5 * graphs.time_ms
    unknown = steps("b200", model, run).step("MXFP8")
    assert unknown.time_ms == launched.time_ms


def test_what_every_recipe_shares_does_not_widen_their_speedup() -> None:
    from gemmscope.forecast.step import forecast_step

    model, run = model_of("qwen3-30b-a3b"), RunSpec(4, 4096, ep=8, dp=8, gradient_accumulation=16)
    forecast = forecast_step(steps("b200", model, run), ["BF16", "MXFP8"])
    gain, time = forecast.speedup("MXFP8"), forecast.of("MXFP8")
    assert gain is not None
    assert time is not None
    assert gain.half_width < 0.6 * time.step_ms.half_width


def test_offloaded_activations_travel_to_the_cpu_and_back() -> None:
    """A fast link hides them; PCIe does not."""
    model, run = model_of("llama-3.1-70b"), RunSpec(2, 8192, dp=64, zero=3, gradient_accumulation=2)
    for name, most in (("gb200", 0.10), ("h100", 0.9)):
        kept, offloaded = (steps(name, model, replace(run, offloaded_layers=layers)).step("FP8Current") for layers in (0, 40))
        assert 0 < offloaded.time_ms / kept.time_ms - 1 < most
    exchanges = {exchange.kind for exchange in steps("gb200", model, replace(run, offloaded_layers=40)).step("BF16").exchanged}
    assert "offload" in exchanges


def test_what_graphs_would_change_is_said_where_launching_limits() -> None:
    from gemmscope.forecast.step import forecast_step
    from gemmscope.forecast.step_findings import graphs_finding

    model, run = model_of("qwen3-30b-a3b"), RunSpec(1, 4096, ep=8, dp=8, gradient_accumulation=64)
    by_graphs = {}
    for graphs in (None, True):
        forecast = steps("b200", model, replace(run, cuda_graphs=graphs))
        by_graphs[graphs] = graphs_finding(forecast, forecast_step(forecast, ["BF16", "FP8Delayed"]))
    assert by_graphs[True] is None
    said = by_graphs[None]
    assert said is not None
    assert said.code == "graphs-would-help"
    assert said.facts["recipe"] == "FP8Delayed"
    assert float(str(said.facts["gain"])) > 1.5
    assert "--cuda-graphs" in in_shell(said.text)
