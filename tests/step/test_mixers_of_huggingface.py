"""Which implementation of a mixer a Hugging Face model runs."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

pytest.importorskip("torch", reason="models need torch")
pytest.importorskip("transformers", reason="their classes")

import torch
from torch import nn

from gemmscope.step import live_module
from gemmscope.step.live_module import hide_wrong_kernels, mixers


def chosen_by_wrapper(name: str, package: str) -> object:
    """A function as transformers 5.22 wraps it: the implementation is in its closure."""
    func_name = name

    def implementation() -> None: ...

    implementation.__module__ = package

    is_new_implementation = not package.startswith("transformers")

    def wrapped() -> object:
        return implementation, func_name, is_new_implementation

    return wrapped


def test_functions_of_mixers_and_where_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    file = ModuleType("transformers.models.toy.modeling_toy")
    file.torch_rule = chosen_by_wrapper("chunk_gated_delta_rule", "fla.ops")  # type: ignore[attr-defined]
    file.causal_conv1d_fn = chosen_by_wrapper("causal_conv1d_fn", "transformers.models.toy")  # type: ignore[attr-defined]
    file.causal_conv1d_update = chosen_by_wrapper("causal_conv1d_update", "causal_conv1d")  # type: ignore[attr-defined]
    file.helper = chosen_by_wrapper("helper", "fla")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, file.__name__, file)
    mixer = type("Mixer", (nn.Module,), {"__module__": file.__name__})()
    assert mixers(mixer).sources == {"causal_conv1d_fn": "transformers", "chunk_gated_delta_rule": "flash-linear-attention"}
    assert mixers(mixer).refused == mixers(nn.Linear(2, 2)).sources == {}


def test_compiled_by_a_pytorch_that_says_it_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 does, and then transformers runs its own code although the package is installed."""
    file = ModuleType("transformers.models.toy.modeling_toy")
    file.torch_rule = chosen_by_wrapper("chunk_gated_delta_rule", "fla.ops")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, file.__name__, file)
    mixer = type("Mixer", (nn.Module,), {"__module__": file.__name__})()
    for told, source in ((False, "flash-linear-attention"), (True, "transformers")):
        monkeypatch.setattr(live_module, "compiled_as_exported", lambda told=told: told)
        assert mixers(mixer, compiled=True).sources == {"chunk_gated_delta_rule": source}
        assert mixers(mixer).sources == {"chunk_gated_delta_rule": "flash-linear-attention"}
    assert "--compile none" in mixers(mixer, compiled=True).refused["chunk_gated_delta_rule"]


def test_whether_compiled_code_is_told_that_it_is_exported() -> None:
    live_module.compiled_as_exported.cache_clear()
    told = torch.compile(lambda x: x + int(torch.compiler.is_exporting()), backend="eager")(torch.zeros(1))
    assert live_module.compiled_as_exported() == bool(told)


def test_an_older_version_keeps_the_function_in_the_module() -> None:
    mixer = nn.Module()

    def rule() -> None: ...

    rule.__module__ = "fla.ops.gated_delta_rule"
    mixer.chunk_gated_delta_rule = rule
    assert mixers(mixer).sources == {"chunk_gated_delta_rule": "flash-linear-attention"}


def test_kernels_that_refuse_to_train_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then transformers falls back to its own code, and the reason is known."""
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setattr(live_module, "gated_backward_is_wrong", lambda: True)
    hide_wrong_kernels()
    with pytest.raises(ImportError):
        importlib.import_module("fla")
    mixer = nn.Module()

    def rule() -> None: ...

    rule.__module__ = "transformers.models.qwen3_next"
    mixer.chunk_gated_delta_rule = rule
    assert "needs Triton 3.7.1" in mixers(mixer).refused["chunk_gated_delta_rule"]
