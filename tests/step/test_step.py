"""The training step at toy size on the CPU: the stack is the model, and the rolled stack computes what the real one does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from gemmscope.engine.campaign import LocalWorkers
from gemmscope.engine.journal import RecordedRun
from gemmscope.engine.messages import Begin, Done, Failed, Hello, Message, Round, Sampled
from gemmscope.engine.rule import StoppingRule
from gemmscope.errors import DoesNotFitError, UserError
from gemmscope.findings import finding
from gemmscope.model.layer_spec import AttentionSpec, LatentSpec, LayerSpec, LinearSpec, MixerSpec, MlpSpec, MoeSpec
from gemmscope.model.spec import ModelSpec, NormSpec, RunSpec, from_hyperparameters
from gemmscope.recipe.recipes import recipe
from gemmscope.results.step import StepSettings, Variant
from gemmscope.roles import role
from gemmscope.step.stack_plan import StackPlan, plan_step, share_weights
from gemmscope.step.step_campaign import StepCampaign
from gemmscope.step.step_measurements import StepMeasurements
from gemmscope.toml import load_data
from gemmscope.workload.derive import derive
from support.campaigns import Scripted, interrupt, recorded
from support.small_steps import NOT_RUN, two_layers
from support.small_steps import RUN as PRESETS
from support.workers import forked_workers

__all__ = ["forked_workers"]  # the fixture

torch = pytest.importorskip("torch", reason="steps need torch")

from gemmscope.step.kits.plain import Kit, activation_of  # noqa: E402
from gemmscope.step.marks import recording  # noqa: E402
from gemmscope.step.stack import Stack, Step, Weights  # noqa: E402

RUN = RunSpec(2, 16)
ATTENTION = AttentionSpec(4, 2, 16)
DENSE = LayerSpec(ATTENTION, MlpSpec(96, gated=True, activation="silu"))
MOE = LayerSpec(ATTENTION, MoeSpec(4, 2, MlpSpec(48, gated=True, activation="silu"), MlpSpec(32, gated=True, activation="silu")))
LATENT = LayerSpec(
    AttentionSpec(4, 4, 24, value_dim=16, latent=LatentSpec(q_rank=32, kv_rank=24, rope_dim=8)), MlpSpec(96, gated=False)
)
WINDOW = LayerSpec(replace(ATTENTION, window=4), DENSE.mlp)
MAMBA = MixerSpec("ssd", 4, 16, groups=2, key_dim=8, conv_kernel=4, conv_bias=True, chunk=8, norm="group")
DELTA = MixerSpec("gated delta rule", 4, 16, groups=2, key_dim=8, conv_kernel=4, norm="head")
KDA = MixerSpec("kda", 4, 16, groups=4, key_dim=8, conv_kernel=4, rank=8, norm="head")
LIGHTNING = MixerSpec("lightning attention", 4, 16, groups=4, key_dim=16)
SHORT = MixerSpec("short convolution", 1, 64, conv_kernel=3, gated=False, norm="")
SELECTIVE = MixerSpec("selective scan", 64, 1, key_dim=8, conv_kernel=4, conv_bias=True, rank=4, norm="")
HYBRID = (
    LayerSpec(None, None, 1, MAMBA),
    LayerSpec(None, MOE.mlp, 1),
    LayerSpec(ATTENTION, None, 1),
    LayerSpec(ATTENTION, DENSE.mlp, 2, MAMBA),
    *(LayerSpec(None, DENSE.mlp, 2, mixer) for mixer in (DELTA, KDA, LIGHTNING, SHORT, SELECTIVE)),
)
MODELS = {
    "llama": from_hyperparameters(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_hidden_layers=6, num_key_value_heads=2, vocab_size=97,
        gated=True,
    ),
    "gpt": ModelSpec("gpt", 64, (LayerSpec(ATTENTION, MlpSpec(96, gated=False)),) * 5, 97, NormSpec("layernorm", bias=True)),
    "experts": ModelSpec("experts", 64, (DENSE, MOE, MOE, MOE, MOE, MOE), 97),
    "latent": ModelSpec("latent", 64, (LATENT,) * 3, 97),
    "norms": ModelSpec("norms", 64, (replace(DENSE, attention=replace(ATTENTION, qk_norm="head"), norms=4),) * 2, 97),
    "parallel": ModelSpec("parallel", 64, (replace(DENSE, attention=replace(ATTENTION, qk_norm="full"), norms=1),) * 2, 97),
    "windows": ModelSpec("windows", 64, (LayerSpec(replace(ATTENTION, window=4, sinks=True), DENSE.mlp), WINDOW), 97),
    "predictions": ModelSpec("predictions", 64, (DENSE, MOE), 97, prediction_layers=2),
    "one prediction": ModelSpec("one prediction", 64, (DENSE,), 97, prediction_layers=2, prediction_shared=True),
    "hybrid": ModelSpec("hybrid", 64, HYBRID, 97),
    "layers only": ModelSpec("layers only", 64, (DENSE,) * 3),
}  # fmt: skip


def plan(name: str, **run: Any) -> StackPlan:
    return plan_step(MODELS[name], RunSpec(2, 16, **run))[0]


def step(name: str, recipe_name: str = "FP32", *, real: bool = False, **run: Any) -> Step:
    stack_plan = plan(name, **run)
    return Step(stack_plan.unrolled() if real else stack_plan, Kit(recipe(recipe_name)), Weights(), "cpu")


@pytest.mark.parametrize("name", MODELS)
def test_plan_crosses_the_process_boundary(name: str) -> None:
    stack_plan = plan(name)
    assert TypeAdapter(StackPlan).validate_python(json.loads(json.dumps(asdict(stack_plan)))) == stack_plan


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=40))
def test_weights_are_shared_among_layers_of_a_kind(kinds: list[str]) -> None:
    layers: tuple[Any, ...] = tuple(kinds)
    slots = share_weights(layers)
    assert len(set(slots)) <= 4
    assert sorted(set(slots)) == list(range(len(set(slots))))
    assert all(len({layers[index] for index, slot in enumerate(slots) if slot == chosen}) == 1 for chosen in slots)


@pytest.mark.parametrize("name", NOT_RUN)
def test_presets_that_cannot_be_run(name: str) -> None:
    with pytest.raises(UserError, match=r"step does not support layers with .* yet") as caught:
        two_layers(name)
    assert "hugging_face" in caught.value.hint


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_built_and_run(name: str) -> None:
    """Two layers of it on the meta device, forward and backward; what FP8 needs of sizes, they all have but one."""
    stack_plan, kit = two_layers(name), Kit(recipe("BF16"), device="meta")
    stack = Stack(stack_plan, kit, Weights(), "meta")
    labels = torch.zeros(stack_plan.run.tokens, dtype=torch.long, device="meta")
    states = torch.zeros(stack_plan.run.tokens, stack_plan.model.hidden_size, dtype=kit.precision, device="meta")
    stack(labels if stack_plan.model.vocab_size else states, labels).backward()
    assert all(parameter.grad is not None for parameter in stack.inner)
    assert bool(stack_plan.misaligned(recipe("FP8Current"))) == (name == "falcon-h1-7b")


def test_unaligned_sizes_are_told() -> None:
    odd = from_hyperparameters(hidden_size=64, intermediate_size=90, num_attention_heads=4, num_hidden_layers=2)
    reason = plan_step(odd, RunSpec(2, 16))[0].misaligned(recipe("FP8Current"))
    assert reason == "MLP Up: " + recipe("FP8Current").misaligned({"output features": 90})


def test_sizes_that_are_in_no_gemm_need_not_be_aligned() -> None:
    """Queries, keys and values come from one GEMM; of a bottleneck, every side counts."""
    model = ModelSpec("odd heads", 64, (LayerSpec(AttentionSpec(2, 1, 24), MlpSpec(96, gated=False)),))
    assert not plan_step(model, RUN)[0].misaligned(recipe("FP8Current"))
    assert plan("latent").misaligned(recipe("FP8Current")).startswith("KV Up Proj: input features = 24 ")


def test_experts_tokens_are_padded_to_what_a_recipe_needs() -> None:
    stack_plan = replace(plan("experts"), expert_rows=(48, 64))
    assert stack_plan.padded(recipe("FP8Current").multiple_of).expert_rows == (48, 64)
    assert stack_plan.padded(recipe("MXFP8").multiple_of).expert_rows == (64, 64)


def test_what_is_not_run_is_said() -> None:
    odd = LayerSpec(ATTENTION, MlpSpec(96, gated=True, activation="xielu"), norms=5, extra=(LinearSpec("laurel-left", 64, 8),))
    findings = {finding.code: finding for finding in plan_step(ModelSpec("odd", 64, (odd,)), RUN)[1]}
    assert set(findings) == {"some-norms-not-run", "activation-replaced", "extra-linears-not-run"}
    assert findings["some-norms-not-run"].facts == {"norms": ["5"]}
    assert findings["activation-replaced"].facts == {"activations": ["xielu"]}
    split = plan_step(MODELS["llama"], RunSpec(2, 16, tp=2, sequence_parallel=True, separate_projections=True))[1]
    assert [finding.code for finding in split] == ["communication-not-run", "quantized-after-gather"]
    assert all(finding.text for finding in (*findings.values(), *split))
    normed = plan_step(replace(MODELS["llama"], embedding_norm=True), RUN)[1]
    assert [(finding.code, finding.facts) for finding in normed] == [("ops-not-run", {"ops": ["Embedding Norm"]})]
    assert plan_step(MODELS["llama"], RUN)[1] == plan_step(MODELS["experts"], RUN)[1] == []


def test_the_ops_of_a_stack_have_roles() -> None:
    assert all(role(key) for keys in load_data("gemmscope.step", "stack_ops.toml").values() for key in keys)


@pytest.mark.parametrize("name", ["llama", "norms", "parallel", "experts", "predictions"])
@pytest.mark.parametrize("etp", [None, 1])
def test_sequence_parallelism(name: str, etp: int | None) -> None:
    """Norms of the hidden state and routers see this rank's tokens, projections those of all ranks; every weight learns."""
    model = MODELS[name]
    if etp is not None and not any(layer.is_moe for layer in model.layers):
        pytest.skip("no experts")
    run = RunSpec(2, 16, tp=2, sequence_parallel=True, etp=etp)
    stack = Stack(plan_step(model, run)[0], Kit(recipe("BF16")), Weights(), "cpu")
    rows: dict[str, set[int]] = {}
    for path, part in stack.named_modules():
        if isinstance(part, (torch.nn.RMSNorm, torch.nn.LayerNorm)) and part.weight.shape[0] == model.hidden_size:
            part.register_forward_pre_hook(lambda _, given: rows.setdefault("norm", set()).add(given[0].shape[0]))
        elif path.endswith(".router") or isinstance(part, torch.nn.Linear):
            kind = "router" if path.endswith(".router") else "head" if path == "head" else path.split(".")[-1]
            part.register_forward_pre_hook(lambda _, given, kind=kind: rows.setdefault(kind, set()).add(given[0].shape[0]))
    ids = torch.randint(8, (32,))
    stack(ids, ids).backward()
    assert rows["norm"] == {16}
    assert rows["head"] == rows["out"] == {32}
    assert rows.get("router", {16}) == {16}
    assert [path for path, parameter in stack.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize(("name", "function"), [("swish", "silu"), ("gelu_python", "gelu"), ("gelu", "gelu"), ("relu", "relu")])
def test_activations_have_several_names(name: str, function: str) -> None:
    x = torch.linspace(-3, 3, 7)
    output = activation_of(MlpSpec(96, gated=False, activation=name))(x)
    assert torch.equal(output, getattr(torch.nn.functional, function)(x))


def test_a_pipeline_stage_without_layers() -> None:
    with pytest.raises(UserError, match="pipeline stage 0 has no layers"):
        plan("llama", pp=2, pp_layers=(0, 6), pp_stage=0)


def test_too_many_kinds_of_layers() -> None:
    assert share_weights(tuple("abcdea")) == (0, 1, 2, 3, 4, 0)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="13 kinds of layers"):
        share_weights(tuple("abcdefghijklm"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["llama", "gpt", "experts", "latent", "norms", "parallel", "windows", "predictions", "one prediction", "hybrid"]
)
def test_the_real_stack_has_the_models_parameters(name: str) -> None:
    """To the last one, as `shapes` counts them (rotary and routing tables are no parameters)."""
    model = MODELS[name]
    count = sum(parameter.numel() for parameter in step(name, real=True).stack.parameters())
    assert count == derive(model, RUN).parameters


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["BF16", "FP32"])
def test_it_trains(name: str, precision: str) -> None:
    trained = step(name, precision)
    trained.run()
    assert trained.loss() > 0


def test_layers_share_memory_and_gradients_are_dropped() -> None:
    """Six layers on the weights of four: every layer gets its own complete gradient, none is kept."""
    llama = step("llama")
    pointers = {parameter.data_ptr() for parameter in llama.stack.inner}
    assert len(pointers) == len(llama.stack.inner) * 4 // 6
    seen: list[Any] = []
    for parameter in llama.stack.inner:
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    llama.run()
    assert len(seen) == len(llama.stack.inner)
    assert all(parameter.grad is None for parameter in llama.stack.parameters())


def test_a_rolled_stack_computes_what_the_real_one_does() -> None:
    """Give the real model the rolled one's weights, layer by layer: the same loss, the same gradient of the first layer."""
    rolled, real = step("llama"), step("llama", real=True)
    for source, target in ((rolled.stack.inner, real.stack.inner), (rolled.stack.ends, real.stack.ends)):
        for ours, theirs in zip(source, target, strict=True):
            theirs.data.copy_(ours.data)
    real._x, real._labels = rolled._x, rolled._labels
    assert real.loss() == pytest.approx(rolled.loss(), rel=1e-5)
    gradients = []
    for built in (rolled, real):
        kept: list[Any] = []
        built.stack.inner[0].register_hook(kept.append)
        built.run()
        gradients.append(kept[0])
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"recompute": "full"}, {"recompute": "selective"}, {"gradient_accumulation": 3}, {"separate_projections": True}]
)
def test_options_do_not_change_the_loss(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = step("llama")
    torch.manual_seed(0)
    other = step("llama", **options)
    assert other.loss() == pytest.approx(plain.loss(), rel=1e-5)
    other.run()


def test_marks_come_in_the_order_of_the_parts() -> None:
    llama = step("llama")
    with recording() as marks:
        llama.run()
    layer = ["qkv", "attention", "attn out", "mlp"]
    forward = [part for part, way in marks if way == "forward"]
    backward = [part for part, way in marks if way == "backward"]
    assert forward == ["embedding", *(layer * 6), "head", "loss"]
    assert backward == ["loss", "head", *(list(reversed(layer)) * 6)]
    assert marks[-1] == ("optimizer", "step")


def test_tensor_parallel_ranks_are_narrower() -> None:
    stack_plan = plan("llama", tp=2)
    assert (stack_plan.model.layers[0].attention.heads, stack_plan.model.layers[0].attention.kv_heads) == (2, 1)
    mlp = stack_plan.model.layers[0].mlp
    assert isinstance(mlp, MlpSpec)
    assert mlp.intermediate_size == 48


# --- measuring ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def recording_of_run(tmp_path: Path) -> Iterator[RecordedRun]:
    with recorded(tmp_path) as opened:
        yield opened


def step_campaign(
    recording: RecordedRun, stack_plan: StackPlan, recipes: list[str], settings: StepSettings, **more: Any
) -> StepCampaign:
    defaults = {"rule": StoppingRule(), "workers": LocalWorkers()}
    return StepCampaign(plan=stack_plan, recipes=recipes, settings=settings, recording=recording, **(defaults | more))


@pytest.mark.usefixtures("forked_workers")
def test_a_run_on_the_cpu(recording_of_run: RecordedRun) -> None:
    settings = StepSettings("cpu", drop_ms=1, keep_ms=5, max_rounds=4)
    rule = StoppingRule(target=0.9, least_rounds=2)
    run = step_campaign(recording_of_run, plan("llama"), ["BF16", "FP32"], settings, rule=rule)
    measurements = run.run()
    speedup = measurements.speedup("FP32")
    assert speedup is not None
    assert speedup.low is not None
    assert speedup.high is not None
    assert 0 < speedup.low <= speedup.value <= speedup.high
    assert all(result.host_ms for result in measurements.tasks.values())


def test_many_micro_batches_may_be_silent_for_longer(recording_of_run: RecordedRun) -> None:
    def silence(accumulation: int) -> float:
        stack_plan = plan("llama", gradient_accumulation=accumulation)
        return step_campaign(recording_of_run, stack_plan, ["BF16"], StepSettings("cpu", silence_s=180)).silence_s

    assert (silence(1), silence(64)) == (180, 180 * 16)
    assert step_campaign(recording_of_run, plan("hybrid"), ["BF16"], StepSettings("cpu", silence_s=180)).silence_s == 180 * 5


def times(measurements: StepMeasurements, variant: Variant, *rounds: float) -> None:
    for time in rounds:
        measurements.take(Sampled({variant.name: [time] * 4}, {}))


def test_the_whole_depth_is_on_the_line_through_two() -> None:
    whole = replace(plan("llama"), model=replace(MODELS["llama"], layers=(DENSE,) * 40))
    assert whole.weights(16) == {16: 4.0, 8: -3.0}
    assert whole.weights(40) == whole.weights(41) == {40: 1.0}


def test_two_depths_give_the_whole_models_step() -> None:
    """100 ms plus 10 ms per layer, half of that in FP8: the fitted line gives the time of 40 layers."""
    variants = [Variant(name, depth) for name in ("BF16", "FP8Current") for depth in (16, 8)]
    measurements = StepMeasurements(variants, 40, {16: 4.0, 8: -3.0})
    for variant in variants:
        per_layer = 10.0 if variant.recipe == "BF16" else 5.0
        base = 100 + per_layer * variant.depth
        times(measurements, variant, base * 0.999, base, base * 1.001)
    whole, gain = measurements.step("BF16"), measurements.speedup("FP8Current")
    assert whole is not None
    assert gain is not None
    assert whole.value == pytest.approx(500)
    assert gain.value == pytest.approx(500 / 300)
    assert gain.known


def test_memory_that_does_not_suffice_makes_it_shallower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(request: dict[str, Any]) -> Iterator[Message]:
        yield Hello()
        for variant in request["variants"]:
            if variant["depth"] > 2:
                yield Failed(variant["name"], "too large", "out of memory")
        yield Done()

    def run(**more: Any) -> tuple[StepCampaign, list[int]]:
        workers = Scripted(script)
        with recorded(tmp_path) as recording:
            campaign = step_campaign(recording, plan("llama"), ["BF16"], StepSettings("cpu"), workers=workers, **more)
            try:
                campaign.run()
            finally:
                asked.extend(request["variants"][0]["depth"] for request in workers.requests)
        return campaign, asked

    asked: list[int] = []
    monkeypatch.setattr("gemmscope.step.step_campaign.LEAST_DEPTH", 4)
    with pytest.raises(DoesNotFitError, match="does not fit in this GPU's memory even with 4 of its layers"):
        run()
    assert asked == [6, 4]
    monkeypatch.setattr("gemmscope.step.step_campaign.LEAST_DEPTH", 1)
    again, _ = run()
    assert asked[2:] == [6, 3, 1]
    real, _ = run(real=True)
    assert real.findings[0] == finding("real-model-shallower", depth=6, smaller=3)
    assert again.findings == [finding("stack-shallower", depth=deep, smaller=smaller) for deep, smaller in ((6, 3), (3, 1))]


def timed(request: dict[str, Any], rounds: int = 4) -> Iterator[Message]:
    yield Hello()
    for number in range(rounds):
        for variant in request["variants"]:
            yield Sampled({variant["name"]: [10.0 + number / 1000] * 4})
        yield Round(number)


@pytest.mark.parametrize("decisions_take_s", [0.0, 1000.0])
def test_a_process_that_dies_while_profiling_costs_no_step(
    recording_of_run: RecordedRun, monkeypatch: pytest.MonkeyPatch, decisions_take_s: float
) -> None:
    """All was timed well enough; only what its kernels do stays unknown. The same if the machine is too busy to decide often."""
    clock = chain([0.0], repeat(decisions_take_s))  # the first decision takes so long that no other one is made until the end
    monkeypatch.setattr("gemmscope.engine.campaign.time", SimpleNamespace(monotonic=lambda: next(clock)))
    workers = Scripted(timed, "(signal 11)")
    campaign = step_campaign(recording_of_run, plan("llama"), ["BF16", "FP32"], StepSettings("cpu"), workers=workers)
    measurements = campaign.run()
    assert [len(request["variants"]) for request in workers.requests] == [2]
    assert measurements.speedup("FP32") is not None
    (finding,) = measurements.findings
    assert (finding.code, finding.facts["reason"]) == ("kernels-not-profiled", "the measuring process died (signal 11)")


def test_a_shallower_stack_is_resumed_where_it_was(tmp_path: Path) -> None:
    """If the process is killed in its second depth, the first is not measured again, and its samples exist once."""

    def script(request: dict[str, Any]) -> Iterator[Message]:
        deep = request["variants"][0]["depth"] > 3
        yield Hello()
        if deep:
            yield Failed(request["variants"][0]["name"], "too large", "out of memory")
        yield from timed(request, rounds=1)
        interrupt()
        yield Sampled({request["variants"][0]["name"]: [11.0] * 4})

    def campaign(recording: RecordedRun, workers: Scripted) -> StepCampaign:
        return step_campaign(recording, plan("llama"), ["BF16", "FP32"], StepSettings("cpu"), workers=workers)

    with recorded(tmp_path) as recording:
        first = campaign(recording, Scripted(script))
        first.run()
        assert first.interrupted
        assert {result.variant.depth for result in first.results.tasks.values()} == {3, 1}
    with recorded(tmp_path, resume=True) as recording:
        workers = Scripted(lambda request: [*timed(request), Done()])
        after = campaign(recording, workers)
        after.run()
    assert [{variant["depth"] for variant in request["variants"]} for request in workers.requests] == [{3, 1}]
    for name, result in after.results.tasks.items():
        before = first.results.tasks[name].rounds_ms
        assert before
        assert result.rounds_ms == [*before, *([10.0 + number / 1000] * 4 for number in range(4))]


@pytest.mark.parametrize("seed", range(2))
def test_a_burst_that_fails_is_said_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the next of its kind was launched behind it; with its own reason, which decides what follows. The others go on."""
    from gemmscope.engine.timer import Burst
    from gemmscope.engine.worker import BurstGroup
    from gemmscope.step.worker import StepWorker

    class Quiet:
        stop = staticmethod(lambda: False)
        first_wanted = staticmethod(lambda groups: groups[0])

    monkeypatch.setattr("gemmscope.engine.worker.Orders", Quiet)
    monkeypatch.setattr("gc.freeze", lambda: None)  # of the process that runs this test
    monkeypatch.setattr("gc.disable", lambda: None)
    stack_plan = plan("llama")
    settings = asdict(StepSettings("cpu", drop_ms=0.1, keep_ms=0.1, least_steps=1, max_rounds=3, seed=seed))
    worker = StepWorker(
        {**settings, "plan": asdict(stack_plan), "live": False, "variants": [], "least_rounds": 3, "had": {}}, None
    )
    said: list[Message] = []
    monkeypatch.setattr(worker, "say", said.append)
    launch = worker.launch

    def bad() -> list[list[float]]:
        raise RuntimeError("out of memory")

    def launch_or_fail(group: BurstGroup, number: int) -> Burst:
        burst = launch(group, number)
        return Burst(bad, over=True) if group.tasks == ["bad"] else burst

    monkeypatch.setattr(worker, "launch", launch_or_fail)
    worker.steps, worker.once_ms = dict.fromkeys(("bad", "good"), step("llama")), {"bad": 1.0, "good": 3000.0}
    worker._measure()
    good = [message for message in said if isinstance(message, Begin) and message.task == "good"]
    assert len(good) == 3 * 3  # launched, still at it after the steps that do not count, collected
    failed = [message for message in said if isinstance(message, Failed)]
    assert [(message.task, message.kind) for message in failed] == [("bad", "out of memory")]
    assert sum(isinstance(message, Sampled) for message in said) == 3
    assert sum(isinstance(message, Round) for message in said) == 3
