"""The mixers of hybrids on the CPU: each computes what the module of transformers does, with its weights."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from gemmscope.model.layer_spec import MixerSpec
from gemmscope.recipe.recipes import recipe

torch = pytest.importorskip("torch", reason="mixers need torch")
pytest.importorskip("transformers", reason="what they are compared with")

from gemmscope.step.kits.plain import Kit  # noqa: E402
from gemmscope.step.mixer_kernels import MissingKernelError, MixerKernels, gated_backward_is_wrong  # noqa: E402
from gemmscope.step.mixer_modules import MIXERS  # noqa: E402

HIDDEN, SEQUENCE = 32, 24


def mixer(spec: MixerSpec) -> Any:
    torch.manual_seed(0)
    return MIXERS[spec.kind](Kit(recipe("FP32")), HIDDEN, spec, SEQUENCE, None)


def load(ours: Any, **weights: Any) -> None:
    """Copy weights into parameters by name, and check that none is forgotten."""
    parameters = dict(ours.named_parameters())
    assert set(weights) == set(parameters)
    for name, weight in weights.items():
        parameters[name].data.copy_(weight.reshape(parameters[name].shape))


def agree(ours: Any, theirs: Any, *more: Any) -> None:
    x = torch.randn(2, SEQUENCE, HIDDEN)
    with torch.no_grad():
        expected = theirs(x, *more)
        expected = expected[0] if isinstance(expected, tuple) else expected
        result = ours(x.flatten(0, 1)).view_as(expected)
    assert torch.allclose(result, expected, rtol=1e-3, atol=1e-4), float((result - expected).abs().max())


def randomized(module: Any) -> Any:
    torch.manual_seed(1)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module.eval()


def test_mamba2() -> None:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        num_heads=4, head_dim=16, hidden_size=HIDDEN, state_size=8, n_groups=2, expand=2, chunk_size=8, num_hidden_layers=1
    )
    theirs = randomized(Mamba2Mixer(config, 0))
    ours = mixer(MixerSpec("ssd", 4, 16, groups=2, key_dim=8, conv_kernel=4, conv_bias=True, chunk=8))
    load(
        ours, a_log=theirs.A_log, skip=theirs.D, dt_bias=theirs.dt_bias, conv_weight=theirs.conv1d.weight,
        conv_bias=theirs.conv1d.bias, norm_weight=theirs.norm.weight,
        **{"projection.weight": theirs.in_proj.weight, "out.weight": theirs.out_proj.weight},
    )  # fmt: skip
    agree(ours, theirs)
    assert ours.kit.kernels.sources["state-space scan"] == "transformers"


def test_mamba2_with_grouped_norms() -> None:
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated

    theirs = randomized(NemotronHRMSNormGated(64, 32, eps=1e-5))
    x, z = torch.randn(2, 2, SEQUENCE, 64).unbind()
    result = MixerKernels("cpu").gated_norm(x, z, theirs.weight, eps=1e-5, group=32, gate_first=True)
    assert torch.allclose(result, theirs(x, z), atol=1e-5)


def test_mamba() -> None:
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    config = MambaConfig(hidden_size=HIDDEN, state_size=8, expand=2, time_step_rank=4, num_hidden_layers=1)
    theirs = randomized(MambaMixer(config, 0))
    ours = mixer(MixerSpec("selective scan", 64, 1, key_dim=8, conv_kernel=4, conv_bias=True, rank=4, norm=""))
    load(
        ours, a_log=theirs.A_log, skip=theirs.D, conv_weight=theirs.conv1d.weight, conv_bias=theirs.conv1d.bias,
        **{
            "states.weight": theirs.x_proj.weight,
            "time_step.weight": theirs.dt_proj.weight, "time_step.bias": theirs.dt_proj.bias,
            "projection.weight": theirs.in_proj.weight, "out.weight": theirs.out_proj.weight,
        },
    )  # fmt: skip
    agree(ours, theirs)


def test_gated_delta_rule() -> None:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    keys, values, size = 2, 4, 8
    config = Qwen3NextConfig(
        hidden_size=HIDDEN, linear_num_key_heads=keys, linear_num_value_heads=values, linear_key_head_dim=size,
        linear_value_head_dim=size, rms_norm_eps=1e-5, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    theirs = randomized(Qwen3NextGatedDeltaNet(config, 0))
    ours = mixer(MixerSpec("gated delta rule", values, size, groups=keys, key_dim=size, conv_kernel=4, norm="head"))
    shared = values // keys
    qkvz = theirs.in_proj_qkvz.weight.view(keys, -1, HIDDEN).split([size, size, shared * size, shared * size], dim=1)
    ba = theirs.in_proj_ba.weight.view(keys, -1, HIDDEN).split([shared, shared], dim=1)
    rows = torch.cat([part.reshape(-1, HIDDEN) for part in (*qkvz, *ba)])  # theirs are sorted by key head
    load(
        ours, a_log=theirs.A_log, dt_bias=theirs.dt_bias, conv_weight=theirs.conv1d.weight, norm_weight=theirs.norm.weight,
        **{"projection.weight": rows, "out.weight": theirs.out_proj.weight},
    )  # fmt: skip
    agree(ours, theirs)


def test_kda() -> None:
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    config = KimiLinearConfig(
        hidden_size=HIDDEN, linear_num_heads=4, linear_head_dim=8, rms_norm_eps=1e-5, num_hidden_layers=1,
        layer_types=["linear_attention"], mlp_layer_types=["dense"],
    )  # fmt: skip
    theirs = randomized(KimiLinearDeltaAttention(config, 0))
    ours = mixer(MixerSpec("kda", 4, 8, groups=4, key_dim=8, conv_kernel=4, rank=8, norm="head"))
    inputs = (theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.b_proj)
    gate = theirs.forget_gate
    load(
        ours, a_log=gate.A_log, dt_bias=gate.dt_bias, conv_weight=theirs.conv1d.weight, norm_weight=theirs.o_norm.weight,
        **{
            "projection.weight": torch.cat([linear.weight for linear in inputs]), "out.weight": theirs.o_proj.weight,
            "downs.0.weight": gate.f_a_proj.weight, "ups.0.weight": gate.f_b_proj.weight,
            "downs.1.weight": theirs.g_a_proj.weight, "ups.1.weight": theirs.g_b_proj.weight,
        },
    )  # fmt: skip
    agree(ours, theirs)


def test_lightning_attention() -> None:
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    config = MiniMaxConfig(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        head_dim=8,
        block_size=8,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 4,
    )
    theirs = randomized(MiniMaxLightningAttention(config, 0))
    ours = mixer(MixerSpec("lightning attention", 4, 8, groups=4, key_dim=8))
    rows = theirs.qkv_proj.weight.view(4, 3, 8, HIDDEN).transpose(0, 1).reshape(-1, HIDDEN)  # theirs are sorted by head
    load(
        ours,
        **{
            "out_norm.weight": theirs.norm.weight, "projection.weight": torch.cat([rows, theirs.output_gate.weight]),
            "out.weight": theirs.out_proj.weight,
        },
    )  # fmt: skip
    agree(ours, theirs, None, None)


def test_short_convolution() -> None:
    from transformers import Lfm2Config
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    theirs = randomized(Lfm2ShortConv(Lfm2Config(hidden_size=HIDDEN, num_hidden_layers=1, layer_types=["conv"]), 0))
    ours = mixer(MixerSpec("short convolution", 1, HIDDEN, conv_kernel=3, gated=False, norm=""))
    load(
        ours, conv_weight=theirs.conv.weight,
        **{"projection.weight": theirs.in_proj.weight, "out.weight": theirs.out_proj.weight},
    )  # fmt: skip
    agree(ours, theirs)


def test_a_kernel_that_nobody_has_is_named() -> None:
    """On a GPU, transformers' loop over all positions is not used as a fallback."""
    x = torch.zeros(1, 2, 4)
    with pytest.raises(MissingKernelError, match="selective scan needs mamba-ssm: install one of them"):
        MixerKernels("cuda").selective_scan(x, x, x[0], x, x, skip=x[0, 0], z=x, dt_bias=x[0, 0])


@pytest.mark.parametrize(("triton", "package"), [({"TRITON_ABOVE_3_7_1": False}, "transformers"), ({}, "flash-linear-attention")])
def test_kernels_that_cannot_train_here_are_replaced(
    triton: dict[str, bool], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-linear-attention refuses gated gradients on Hopper with some versions of Triton."""
    hopper = SimpleNamespace(IS_NVIDIA_HOPPER=True, TRITON_ABOVE_3_4_0=True, **triton)
    rule = SimpleNamespace(chunk_gated_delta_rule=lambda q, k, v, **_: (v, None))
    for name, module in (
        ("fla", SimpleNamespace()),
        ("fla.utils", hopper),
        ("fla.ops", rule),
        ("fla.ops.gated_delta_rule", rule),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    gated_backward_is_wrong.cache_clear()
    kernels, x = MixerKernels("cuda"), torch.randn(1, 8, 2, 4)
    kernels.delta_rule(x, x, x, x[..., 0], x[..., 0], a_log=torch.zeros(2), dt_bias=torch.zeros(2))
    gated_backward_is_wrong.cache_clear()
    assert kernels.sources == {"gated delta rule": package}
    assert list(kernels.refused) == (["gated delta rule"] if package == "transformers" else [])


def test_a_package_that_does_not_load_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced, not taken for one that is not installed; an error that is no matter of loading is raised."""
    broken, x = "fla.ops.gated_delta_rule", torch.randn(1, 8, 2, 4)
    loading = importlib.import_module

    def load(name: str) -> Any:
        if name.startswith("fla"):
            raise OSError(f"undefined symbol in {name}") if name == broken else ModuleNotFoundError(name=name)
        return loading(name)

    monkeypatch.setattr("gemmscope.step.mixer_kernels.import_module", load)
    gated_backward_is_wrong.cache_clear()
    kernels = MixerKernels("cuda")
    kernels.delta_rule(x, x, x, x[..., 0], x[..., 0], a_log=torch.zeros(2), dt_bias=torch.zeros(2))
    gated_backward_is_wrong.cache_clear()
    assert kernels.sources == {"gated delta rule": "transformers"}
    assert "undefined symbol" in kernels.refused["gated delta rule"]
