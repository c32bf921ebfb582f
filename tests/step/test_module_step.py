"""The step of a live module at toy size on the CPU: what is converted, what is compiled, what all recipes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gemmscope.engine.messages import Failed, Fatal, Hello, Message, Noticed
from gemmscope.findings import finding
from gemmscope.model.spec import RunSpec, from_hyperparameters
from gemmscope.recipe.recipes import recipe
from gemmscope.results.step import StepSettings, Variant
from gemmscope.step.module_plan import ModulePlan
from gemmscope.step.stack_plan import plan_step

torch = pytest.importorskip("torch", reason="modules need torch")
from torch import nn  # noqa: E402

from gemmscope.step.conversion import decide, record_linears, summary  # noqa: E402
from gemmscope.step.kits.plain import Kit, PlainLinear  # noqa: E402
from gemmscope.step.live_module import LiveModule, ModuleStep, built_notes, linear_notes  # noqa: E402  # noqa: E402
from gemmscope.step.marks import recording  # noqa: E402
from gemmscope.step.stack import Step, Weights  # noqa: E402
from gemmscope.step.worker import StepWorker  # noqa: E402
from gemmscope.workload.failures import TraceError  # noqa: E402
from gemmscope.workload.module_parts import expert_weights, find_layers, output_head  # noqa: E402

MODULES = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(width, 256), nn.Linear(256, width), nn.Linear(width, 128)
        self.odd, self.tiny, self.unused = nn.Linear(width, 136), nn.Linear(width, 16), nn.Linear(width, width)

    def forward(self, x):
        self.odd(x), self.tiny(x), self.gate(x)
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(128, 128)
        self.layers = nn.ModuleList([Layer(128), Layer(128)])
        self.head = nn.Linear(128, 128, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class WithLoss(Model):
    def forward(self, ids):
        out = super().forward(ids)
        return {"loss": out.float().square().mean(), "logits": out}


def ids():
    return torch.arange(32).reshape(2, 16)


def plain():
    return Model(), ids()


def tied():
    return Model(tied=True), ids(), lambda out: out.float().logsumexp(-1).mean()


def with_loss():
    return WithLoss(), (ids(),)


def flat():
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)), torch.ones(16, 128)


class Pairs(Model):
    def forward(self, batch):
        return [{"out": self.layers[0](batch["inner"][0])}]


def nested():
    return Pairs(), ({"inner": [torch.ones(16, 128)]},)


def half():
    model = Model().half()
    with torch.no_grad():
        model.head.weight[0, 0] = float("inf")
    return model, ids()


def pruned():
    from torch.nn.utils import prune
    model = Model()
    prune.identity(model.layers[0].up, "weight")
    return model, ids()


def no_linears():
    return nn.Sequential(nn.Conv1d(2, 2, 1)), torch.ones(1, 2, 4)


def frozen():
    return Model().requires_grad_(False), ids()


def not_a_scalar():
    return Model(), ids(), lambda out: out


def no_gradient():
    return Model(), ids(), lambda out: out.detach().mean()


def no_output():
    return Integers(), ids()


class Integers(Model):
    def forward(self, ids):
        return super().forward(ids).argmax(-1)


class Slopes(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)
        self.register_buffer("angles", torch.ones(4, dtype=torch.complex64))

    def forward(self, x):
        x.requires_grad_()
        (slope,) = torch.autograd.grad(self.down(torch.tanh(self.up(x))).sum(), x, create_graph=True)
        return slope.square().mean()


def sparse():
    return nn.Sequential(nn.Embedding(8, 128, sparse=True), nn.Linear(128, 128)), torch.zeros(16, dtype=torch.long)


def slopes():
    return Slopes(), torch.ones(16, 128)
"""


@pytest.fixture
def live(tmp_path: Path) -> Callable[..., LiveModule]:
    """Builds a factory of that file."""
    (tmp_path / "toys.py").write_text(MODULES)

    def build(name: str, optimizer: str = "adamw") -> LiveModule:
        return LiveModule.build(plan(tmp_path, name), "cpu", torch.bfloat16, optimizer)

    return build


def plan(folder: Path, name: str) -> ModulePlan:
    return ModulePlan(f"{folder}/toys.py:{name}", None, 0, 0, 0)


def kit(name: str = "FP8Current", compiled: str = "none") -> Kit:
    return Kit(recipe(name), compiled=compiled)


def test_which_linears_are_converted_and_why_not_the_others(live: Callable[..., LiveModule]) -> None:
    module = live("plain")
    step = ModuleStep(module, kit())
    converted, kept = summary(step.conversion)
    assert converted == ["2 x layers.*.up", "2 x layers.*.down"]
    reasons = {line.partition(" (")[0]: line.partition(" (")[2] for line in kept}
    assert set(reasons) == {"2 x layers.*.gate", "2 x layers.*.odd", "2 x layers.*.tiny", "2 x layers.*.unused", "head"}
    assert reasons["2 x layers.*.gate"] == "a router)"
    assert reasons["2 x layers.*.odd"].startswith("output features = 136 is not a multiple of 16")
    assert reasons["2 x layers.*.tiny"] == "fewer than 128 features)"
    assert reasons["2 x layers.*.unused"].startswith("never called")
    assert reasons["head"] == "the head)"
    notes = dict(linear_notes([ModuleStep(module, kit("BF16")), step, ModuleStep(module, kit("FP8Delayed"))]))
    assert notes["linears-converted"]["recipes"] == ["FP8Current", "FP8Delayed"]
    assert all(finding(code, **facts).text for code, facts in notes.items())


def test_a_linear_whose_weight_is_computed_is_not_converted(live: Callable[..., LiveModule]) -> None:
    step = ModuleStep(live("pruned"), kit())
    assert [path for path, reason in step.conversion.items() if not reason] == ["layers.0.down", "layers.1.up", "layers.1.down"]
    assert "computed in every step" in step.conversion["layers.0.up"]
    step.run()


def test_a_module_in_fp16_is_told_what_to_do(live: Callable[..., LiveModule]) -> None:
    with pytest.raises(ArithmeticError, match=r"the loss is (inf|nan); optimizers overflow in FP16"):
        ModuleStep(live("half"), kit("BF16")).loss()


def test_weights_in_three_dimensions_that_are_not_experts() -> None:
    conv, experts = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3)), nn.Module()
    experts.up = nn.Parameter(torch.zeros(2, 4, 4))
    assert expert_weights(nn.ModuleList([conv, nn.Bilinear(2, 3, 4), experts])) == 1


def test_inputs_and_outputs_inside_others(live: Callable[..., LiveModule]) -> None:
    """Cast to BF16 with the parameters, and part of the loss."""
    module = live("nested")
    assert module.built.args[0]["inner"][0].dtype == torch.bfloat16
    assert ModuleStep(module, kit("BF16")).loss() > 0


def test_a_module_that_computes_gradients_itself(live: Callable[..., LiveModule]) -> None:
    """Its linears are counted once. Complex buffers, such as those of rotary positions, stay complex."""
    module = live("slopes")
    assert {path: use.rows for path, use in module.linears.items()} == {"up": [16], "down": [16]}
    assert module.built.module.angles.dtype == torch.complex64
    assert ModuleStep(module, kit("BF16")).loss() > 0


def test_all_recipes_share_their_parameters_and_run_alike(live: Callable[..., LiveModule]) -> None:
    module = live("tied")
    before = [parameter.clone() for parameter in module.built.module.parameters()]
    steps = [ModuleStep(module, kit(name)) for name in ("BF16", "FP8Current")]
    losses = []
    for step in steps:
        step.run()
        losses.append(step.loss())
    assert losses[0] == losses[1]
    low: Any = steps[1]._objective
    assert isinstance(low.module.layers[0].up, PlainLinear)
    assert type(module.built.module.layers[0].up) is nn.Linear  # type: ignore[index,union-attr]
    assert low.module.head.weight is low.module.embedding.weight is module.built.module.embedding.weight
    assert all(map(torch.equal, before, module.built.module.parameters()))  # the learning rate is zero
    assert all(parameter.grad is None for parameter in module.built.module.parameters())
    assert module.optimizer is not None
    assert len(module.optimizer.state) == 9  # the embedding, and two weights and biases of each layer: others have no gradient
    assert module.held_bytes() > 3 * sum(parameter.numel() * 2 for parameter in before[:2])


@pytest.mark.parametrize(("name", "optimizer"), [("adam", "Adam"), ("sgd", "SGD"), ("none", "NoneType")])
def test_optimizers(live: Callable[..., LiveModule], name: str, optimizer: str) -> None:
    module = live("flat", name)
    assert type(module.optimizer).__name__ == optimizer
    ModuleStep(module, kit("BF16"), accumulation=2).run()


def test_where_the_loss_comes_from(live: Callable[..., LiveModule]) -> None:
    codes = {name: [code for code, _ in built_notes(live(name), "layers")] for name in ("plain", "tied", "with_loss", "flat")}
    assert codes == {
        "plain": ["loss-of-squares", "module-cast"],
        "tied": ["module-cast"],
        "with_loss": ["module-cast"],
        "flat": ["loss-of-squares", "module-cast", "no-layers-to-compile"],
    }
    assert all(finding(code, **facts).text for code, facts in built_notes(live("flat"), "layers"))


@pytest.mark.parametrize(
    ("compiled", "name", "expected"),
    [
        ("none", "plain", []),
        ("layers", "plain", ["Layer", "Layer"]),
        ("layers", "flat", ["Objective"]),
        ("whole", "plain", ["Objective"]),
        ("whole", "with_loss", ["WithLoss"]),
    ],
)
def test_what_is_compiled(
    live: Callable[..., LiveModule], compiled: str, name: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that computes its loss is compiled by itself, as people do; any other with its loss."""
    seen = []
    monkeypatch.setattr(torch, "compile", lambda module, dynamic: seen.append(type(module).__name__) or module)
    ModuleStep(live(name), kit("BF16", compiled)).run()
    assert seen == expected


def test_layers_are_the_outermost_lists_of_alike_modules() -> None:
    layer = lambda: nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)] * 2))  # noqa: E731
    model = nn.ModuleDict({"encoder": nn.ModuleList([layer(), layer()]), "decoder": nn.Sequential(layer(), layer()),
                           "head": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})  # fmt: skip
    assert find_layers(model) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
    assert find_layers(nn.Sequential(layer(), layer())) == ["0", "1"]
    assert find_layers(nn.Linear(2, 2)) == []


def test_a_mask_is_seen_and_a_head_is_the_last_linear_outside_the_layers() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            y = self.last(x)
            y = nn.functional.scaled_dot_product_attention(y, y, y, torch.zeros(2, 2))
            return self.first(nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True))

    module = Attending()
    uses, masked = record_linears(module, lambda: module(torch.ones(1, 2, 4)))
    assert masked == [True, False]
    head = output_head(module, {path: use.last_call for path, use in uses.items() if use.rows}, [])
    assert (uses["first"].rows, head) == ([2], "first")
    assert nn.functional.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"
    assert all(decide(uses, None, kit()).values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_linears", "Sequential runs no nn.Linear"),
        ("frozen", "Model has no parameter that requires a gradient"),
        ("sparse", "the gradients of 0 are sparse"),
    ],
)
def test_modules_that_cannot_be_trained(live: Callable[..., LiveModule], name: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        live(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("not_a_scalar", "the loss is a tensor of shape 2 x 16 x 128, not a scalar"),
        ("no_gradient", "the loss does not require a gradient"),
        ("no_output", "the module returns no float tensor"),
    ],
)
def test_losses_that_are_none(live: Callable[..., LiveModule], name: str, message: str) -> None:
    step = ModuleStep(live(name), kit("BF16"))
    with pytest.raises(TraceError, match=message):
        step.run()


def worker(folder: Path, name: str, recipes: tuple[str, ...], said: list[Message], compiled: str = "none") -> StepWorker:
    (folder / "toys.py").write_text(MODULES)
    settings = asdict(StepSettings("cpu", compile=compiled, drop_ms=0.1, keep_ms=0.1, least_steps=1, max_rounds=1))  # type: ignore[arg-type]
    variants = [Variant(recipe_name, 0).to_json() for recipe_name in recipes]
    request = {**settings, "plan": asdict(plan(folder, name)), "live": True, "variants": variants}
    step_worker = StepWorker({**request, "host": False, "profile": False, "least_rounds": 1, "had": {}}, None)
    step_worker.say = said.append  # type: ignore[method-assign]
    return step_worker


def test_what_is_wrong_with_the_module_itself_ends_the_measurement(tmp_path: Path) -> None:
    """Before anything is measured, and with what to do about it."""
    said: list[Message] = []
    worker(tmp_path, "no_linears", ("BF16",), said).main()
    [fatal] = said
    assert isinstance(fatal, Fatal)
    assert fatal.why.startswith("Sequential runs no nn.Linear")
    assert fatal.hint


def test_a_recipe_that_cannot_run_any_linear_costs_that_recipe(tmp_path: Path) -> None:
    said: list[Message] = []
    step_worker = worker(tmp_path, "flat", ("BF16", "MXFP8"), said)
    step_worker._measure = lambda: None  # type: ignore[method-assign]
    step_worker.request["optimizer"] = "none"
    step_worker.main()
    assert [type(message) for message in said if isinstance(message, (Hello, Fatal))] == [Hello]
    failed = [message for message in said if isinstance(message, Failed)]
    assert [message.task for message in failed] == ["MXFP8"]
    assert failed[0].why == "none of its 2 linears can run in MXFP8: rows = 16 is not a multiple of 32"
    assert {message.code for message in said if isinstance(message, Noticed)} == {"loss-of-squares", "module-cast"}


def test_a_module_that_cannot_be_compiled_costs_a_recipe_and_says_what_to_do(tmp_path: Path) -> None:
    from torch._dynamo.exc import Unsupported

    said: list[Message] = []
    worker(tmp_path, "flat", ("BF16",), said).failed("BF16", Unsupported("no graph"))
    [failed] = said
    assert isinstance(failed, Failed)
    text = finding("step-not-measured", recipe="BF16", reason=failed.why).text
    assert "it cannot be compiled (Unsupported: no graph" in text
    assert "--compile none runs it as it is" in text


@pytest.mark.parametrize(("compiled", "expected"), [("none", []), ("layers", ["Block"] * 3), ("whole", ["Stack"])])
def test_what_is_compiled_of_the_layers_that_step_builds(
    compiled: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks inside would split a model that is compiled as a whole: only its ends are marked."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 97}
    seen: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda module, dynamic: seen.append(type(module).__name__) or module)
    step = Step(plan_step(from_hyperparameters(**sizes), RunSpec(1, 16))[0], kit("BF16", compiled), Weights(), "cpu")
    assert seen == expected
    with recording(inner=compiled != "whole") as marks:
        step.run()
    assert marks[0] == ("model" if compiled == "whole" else "embedding", "forward")
    assert len(marks) == 2 or compiled != "whole"
