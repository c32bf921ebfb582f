"""Error along depth: through real modules, in the user's process and from a factory or a config."""

from pathlib import Path
from typing import Any

import pytest

from gemmscope.numerics.evaluation.requests import DepthModel, DepthReport, ErrorsRequest, TensorSource
from support.commands import run_numerics
from support.refusals import refused_with_hint

torch = pytest.importorskip("torch", reason="modules need torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from gemmscope.numerics.evaluation import depth  # noqa: E402
from gemmscope.numerics.evaluation.depth import compare_depth, depth_report  # noqa: E402
from gemmscope.workload.factory import Built  # noqa: E402

COARSER = ["BF16", "FP8Current", "NVFP4"]
WIDTH, DEPTH = 128, 4


class Block(nn.Module):
    def __init__(self, inplace: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inplace, self.dropout = inplace, nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.mul_(0.5) if self.inplace else x * 0.5
        return x + self.dropout(self.down(functional.silu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, recompute: bool | None = None, **how: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Block(**how) for _ in range(DEPTH))
        self.batch_norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 64)
        self.recompute = recompute  # None: no checkpointing; otherwise whether it is reentrant

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x) if self.recompute is None else checkpoint(layer, x, use_reentrant=self.recompute)
        return self.head(self.batch_norm(x.flatten(0, 1)))


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def model(**how: Any) -> Model:
    torch.manual_seed(0)
    return Model(**how)


def depth_errors(module: nn.Module, batch: Any, recipes: list[str], loss: Any = None) -> DepthReport:
    return compare_depth(Built(module, (batch,), {}, loss), recipes)


def report_of(subject: DepthModel, *recipes: str) -> DepthReport:
    """What a worker sends for a request."""
    return depth_report(ErrorsRequest(TensorSource("recording", "any"), recipes), subject)


IDS = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(0))


def test_error_grows_with_coarser_formats_and_with_depth() -> None:
    report = depth_errors(model(), IDS, COARSER, loss=loss)
    assert [len(one.forward) for one in report.depth] == [DEPTH] * len(COARSER)
    assert [one.recipe for one in report.depth] == COARSER
    for layer in range(DEPTH):
        for side in ("forward", "backward"):
            errors = [getattr(one, side)[layer] for one in report.depth]
            assert 0 < errors[0] < errors[1] / 4
            assert errors[1] < errors[2] / 2
    for one in report.depth:
        assert one.forward[0] < one.forward[-1]
        assert one.backward[0] > one.backward[-1]  # backward starts at the last layer
        assert one.loss is not None
        assert one.loss != 0


def test_a_module_compared_with_itself() -> None:
    """In BF16 the emulation is what the module computes anyway: whatever is not 0 comes from hooks, dropout or buffers."""
    module = model(dropout=0.3).bfloat16()
    (error,) = depth_errors(module, IDS, ["BF16"], loss=loss).depth
    assert set(error.forward) == set(error.backward) == {0.0}
    assert error.loss == 0.0


def test_the_training_goes_on_as_if_nothing_had_happened() -> None:
    module, twin = model(dropout=0.3), model(dropout=0.3)
    for trained in (module, twin):
        torch.manual_seed(1)
        loss(trained(IDS)).backward()
    random = torch.get_rng_state()
    hooked: list[object] = []
    module.head.weight.register_post_accumulate_grad_hook(hooked.append)
    depth_errors(module, IDS, ["NVFP4"], loss=loss)
    assert torch.equal(random, torch.get_rng_state())
    assert hooked == []
    for own, other in zip([*module.parameters(), *module.buffers()], [*twin.parameters(), *twin.buffers()], strict=True):
        assert torch.equal(own, other)
        assert (own.grad is None) == (other.grad is None)
        assert own.grad is None or torch.equal(own.grad, other.grad)


@pytest.mark.parametrize("how", [{"inplace": True}, {"recompute": False}])
def test_layers_that_write_to_their_input_or_are_recomputed(how: dict[str, Any]) -> None:
    expected, report = (depth_errors(model(**kind), IDS, ["FP8Current"], loss=loss) for kind in ({}, how))
    assert report.depth == expected.depth


def test_without_a_loss_gradients_start_from_random_values() -> None:
    first, again = (depth_errors(model(), IDS, ["MXFP8"]).depth[0] for _ in range(2))
    assert first == again
    assert first.loss is None
    assert min(first.backward) > 0.01


def test_delayed_scaling_has_a_history() -> None:
    current, delayed = depth_errors(model(), IDS, ["FP8Current", "FP8Delayed"], loss=loss).depth
    assert delayed.forward == pytest.approx(current.forward, rel=0.1)
    assert delayed.backward == pytest.approx(current.backward, rel=0.1)


def test_a_plain_mlp_has_its_linears_as_layers() -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    report = depth_errors(mlp, torch.randn(32, 128), ["MXFP8"])
    assert len(report.depth[0].backward) == 2


def test_from_a_factory(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\n\ndef build():\n    torch.manual_seed(0)\n"
        "    layer = lambda: nn.Sequential(nn.Linear(128, 128), nn.ReLU())\n"
        "    return nn.Sequential(layer(), layer()), torch.randn(64, 128), lambda y: y.square().mean()\n"
        "\n\ndef broken():\n    return nn.Linear(128, 128), torch.randn(64, 64)\n"
    )
    report = report_of(DepthModel(f"{file}:build"), "MXFP8", "NVFP4")
    assert report.notes[0] == "the weights are those of the factory"
    assert report.depth[0].forward[-1] < report.depth[1].forward[-1]
    assert "running the module raised RuntimeError" in report_of(DepthModel(f"{file}:broken"), "MXFP8").failure
    assert "has no function" in report_of(DepthModel(f"{file}:missing"), "MXFP8").failure


def test_report_of_the_worker(tmp_path: Path) -> None:
    file = tmp_path / "theirs.py"
    file.write_text("from torch import nn, randn\n\n\ndef build():\n    return nn.Linear(128, 128), randn(64, 128)\n")
    report, failed = (report_of(DepthModel(f"{file}:{name}"), "FP32", "NVFP4") for name in ("build", "nothing"))
    assert [one.recipe for one in report.depth] == ["NVFP4"]
    assert report.notes[0] == "the weights are those of the factory"
    assert report.failure == ""
    assert failed.depth == ()
    assert "has no function 'nothing'" in failed.failure


def test_depth_needs_a_model_that_runs(tmp_path: Path) -> None:
    with refused_with_hint("depth", hint=("module", "config")):
        run_numerics(checkpoint=tmp_path / "any.safetensors", depth=True)


LLAMA = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 256,
}  # fmt: skip


def test_from_a_config() -> None:
    pytest.importorskip("transformers", reason="configs need transformers")
    report = report_of(DepthModel(None, LLAMA, 1, 32), "FP8Current")
    assert report.notes[0] == "random weights and random inputs"
    assert "5 of 15 linears are not emulated" in report.notes  # key and value projections have 64 features only
    assert len(report.depth[0].forward) == 2
    assert report.depth[0].loss is not None
    for subject, message in (
        (DepthModel(None, {**LLAMA, "intermediate_size": 2**20}, 8, 8192), "would take too long on a CPU"),
        (DepthModel(None, {"model_type": "unheard"}, 1, 32), "does not know model_type"),
    ):
        assert message in report_of(subject, "FP8Current").failure


@pytest.mark.parametrize(
    ("arguments", "how", "message"),
    [
        ((model(), IDS, ["FP9"]), {}, "unknown recipe 'FP9'"),
        ((model(), IDS + 64, ["MXFP8"]), {}, "running the module raised IndexError"),
        ((model(), IDS, ["MXFP8"]), {"loss": lambda output: output}, "not a scalar"),
        ((model(recompute=True), IDS, ["MXFP8"]), {"loss": loss}, "use_reentrant=False"),
        ((nn.Linear(8, 8), torch.randn(4, 8), ["MXFP8"]), {}, "no linear to emulate in MXFP8"),
        ((nn.Embedding(64, 8), IDS, ["MXFP8"]), {}, "has no nn.Linear"),
    ],
)
def test_one_message(arguments: tuple[Any, ...], how: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch, recipes = arguments
    monkeypatch.setattr(depth, "load_factory", lambda *_: Built(module, (batch,), {}, how.get("loss")))
    assert message in report_of(DepthModel("mine.py:build"), *recipes).failure
