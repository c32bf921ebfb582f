"""Which GPUs `--gpus` means, and the CPU cores that each gets."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmscope.errors import UserError, in_shell
from gemmscope.gpu.environment import Environment
from gemmscope.gpu.visible import visible_gpus
from gemmscope.pool import gpus as opened
from gemmscope.pool.gpus import allowed_cores, divide_cores, local_gpus, one_gpu, open_pool, pinned, thread_siblings
from support.machines import NOTHING, machine


def eight(visible: str | None = None) -> Environment:
    """A machine with eight GPUs."""
    one = machine(visible=visible)
    return replace(one, gpus=tuple(replace(one.gpus[0], index=n, uuid=f"GPU-{n}abc") for n in range(8)))


def numbers(text: str | None, visible: str | None = None) -> list[int]:
    return [gpu.index for gpu in local_gpus(text, eight(visible))]


@pytest.mark.parametrize(
    ("text", "visible", "expected"),
    [
        ("all", None, list(range(8))),
        ("0,1,5", None, [0, 1, 5]),
        (" 5 , 0 ", None, [5, 0]),
        ("0,0", None, [0, 0]),
        ("ALL", "4,5", [4, 5]),
        ("all", "GPU-6,GPU-2", [6, 2]),
        ("5", "4,5", [5]),
        ("all", "1,-1,2", [1]),  # like CUDA: entries after the first invalid one are ignored
        ("all", "3,3", [3]),
        (None, None, [0]),
        (None, "6,2", [6]),
    ],
)
def test_gpus_that_are_named(text: str | None, visible: str | None, expected: list[int]) -> None:
    assert numbers(text, visible) == expected


@pytest.mark.parametrize(
    ("text", "visible", "message", "hint"),
    [
        ("8", None, "--gpus 8: GPU 8 does not exist", "8 GPUs can be used: 0, 1, 2, 3, 4, 5, 6, 7"),
        ("0", "4,5", "--gpus 0: GPU 0 is hidden by CUDA_VISIBLE_DEVICES=4,5", "2 GPUs can be used: 4, 5"),
        ("", None, "--gpus must be all, or the numbers of GPUs, got ''", "for example --gpus 0,1,5"),
        ("0;1", None, "--gpus must be all, or the numbers of GPUs, got '0;1'", "for example --gpus 0,1,5"),
        ("0,,1", None, "--gpus must be all, or the numbers of GPUs, got '0,,1'", "for example --gpus 0,1,5"),
        ("-1", None, "--gpus must be all, or the numbers of GPUs, got '-1'", "for example --gpus 0,1,5"),
        ("²", None, "--gpus must be all, or the numbers of GPUs, got '\\xb2'", "for example --gpus 0,1,5"),
        (",".join(["0"] * 300), None, "--gpus names 300 GPUs, more than 256", "use --gpus all"),
        ("all", "", "there is no NVIDIA GPU here to measure on (CUDA_VISIBLE_DEVICES is '')", "--device cpu"),
    ],
)
def test_gpus_that_are_not_there(text: str, visible: str | None, message: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        local_gpus(text, eight(visible))
    assert in_shell(error.value.message) == message
    assert hint in in_shell(error.value.hint)


def test_a_machine_without_gpus() -> None:
    with pytest.raises(UserError, match="there is no NVIDIA GPU here"):
        local_gpus("all", NOTHING)


def test_gpus_and_the_cpu_exclude_each_other() -> None:
    with pytest.raises(UserError, match="uses none"):
        open_pool(gpus="0", on_cpu=True)


def test_one_gpu_is_chosen_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(opened, "environment", eight)
    with one_gpu("3"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-3abc"
        assert [gpu.index for gpu in visible_gpus(eight("GPU-3abc"))] == [3]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with one_gpu("3"), one_gpu(None):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-3abc"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize("text", ["0,1", "all"])
def test_one_measurement_on_several_gpus_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(opened, "environment", eight)
    with pytest.raises(UserError, match="a single measurement uses one") as error, one_gpu(text):
        pass
    assert in_shell(error.value.hint) == "use gemmscope fleet to measure every GPU, or --sweep to spread points over them"


def test_places_that_share_a_gpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    near = {0: range(4), 1: range(4), 5: range(4, 8)}
    driver = SimpleNamespace(gpu=lambda number: SimpleNamespace(cpu_cores=lambda: near[number]))
    monkeypatch.setattr(opened, "open_nvml", lambda: driver)
    monkeypatch.setattr(opened, "allowed_cores", lambda: frozenset(range(8)))
    monkeypatch.setattr("gemmscope.pool.gpus.TOPOLOGY", "/nowhere/{}")
    places = pinned(local_gpus("0,1,5,0", eight()))
    assert [(place.gpu, place.cores) for place in places] == [(0, (0, 1)), (1, (2, 3)), (5, (4, 5, 6, 7)), (0, (0, 1))]


def test_both_threads_of_a_core_go_to_one_gpu() -> None:
    cores = divide_cores([range(128)] * 4, range(128), lambda core: {core % 64, core % 64 + 64})
    assert cores[1] == (*range(16, 32), *range(80, 96))
    assert core_count(cores) == 128


def core_count(shares: list[tuple[int, ...]]) -> int:
    return len({core for share in shares for core in share})


@given(
    st.lists(st.sets(st.integers(0, 40)), min_size=1, max_size=10),
    st.sets(st.integers(0, 40), min_size=1),
    st.integers(1, 3),
)
def test_cores_are_divided(near: list[set[int]], allowed: set[int], threads: int) -> None:
    shares = divide_cores(near, allowed, lambda core: set(range(core // threads * threads, core // threads * threads + threads)))
    for cores, share in zip(near, shares, strict=True):
        assert share
        assert set(share) <= (cores & allowed or allowed)
        assert list(share) == sorted(set(share))
    for group in {frozenset(cores & allowed or allowed) for cores in near}:
        own = [share for cores, share in zip(near, shares, strict=True) if frozenset(cores & allowed or allowed) == group]
        assert {core for share in own for core in share} == group  # none is left over
        physical = [{core // threads for core in share} for share in own]
        if len({core // threads for core in group}) >= len(own):  # none is shared
            assert sum(map(len, physical)) == len({core // threads for core in group})
            assert max(map(len, physical)) - min(map(len, physical)) <= 1


def test_the_cores_of_this_machine() -> None:
    for core in allowed_cores():
        assert core in thread_siblings(core)
