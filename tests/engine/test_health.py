"""The health of the GPU on its way from the measuring process into the result."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from gemmscope.engine.campaign import _must_be_alike
from gemmscope.engine.messages import Health, Hello, Message, Sampled, parse
from gemmscope.engine.store import identity
from gemmscope.errors import UserError
from gemmscope.gpu.environment import cpu_name, node_name
from gemmscope.gpu.nvml import Gpu
from support.bench_results import recorded_measurements
from support.nvml_driver import Driver

DEVICE = {"name": "NVIDIA H200", "power_limit_w": 700.0, "uuid": "GPU-1", "node": "node03"}


def messages_of_three_bursts(monkeypatch: pytest.MonkeyPatch, gpu: Gpu | None) -> list[Message]:
    """The messages of a real measuring process whose bursts take no time."""
    pytest.importorskip("torch", reason="the measuring process needs torch")
    from gemmscope.engine import worker
    from gemmscope.engine.timer import Burst, done_burst

    class Bursts(worker.MeasuringProcess):
        def launch(self, group: worker.BurstGroup, number: int) -> Burst:
            return done_burst([[1.0]])

    out = io.StringIO()
    request = {"backend": "cpu", "max_rounds": 3, "seed": 0, "least_rounds": 3, "had": {}}
    process = Bursts(request, out)
    process.gpu = gpu
    monkeypatch.setattr(worker.Orders, "stop", lambda _: False)
    process.rounds([worker.BurstGroup(("BF16",), ["QKV"])])
    return [parse(line) for line in out.getvalue().splitlines()]


def test_health_is_read_while_the_first_burst_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver().install(monkeypatch)
    messages = messages_of_three_bursts(monkeypatch, Gpu(pynvml.c_nvmlDevice_t()))
    kinds = [type(message) for message in messages if isinstance(message, (Health, Sampled))]
    assert kinds == [Health, Sampled, Sampled, Sampled]
    (health,) = (message for message in messages if isinstance(message, Health))
    assert (health.facts["pcie_width"], health.facts["ecc"]) == (16, "on")


def test_health_is_read_again_in_a_long_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the measuring process needs torch")
    Driver().install(monkeypatch)
    monkeypatch.setattr("gemmscope.engine.worker.HEALTH_EVERY_S", 0.0)
    messages = messages_of_three_bursts(monkeypatch, Gpu(pynvml.c_nvmlDevice_t()))
    assert sum(isinstance(message, Health) for message in messages) == 3


def test_a_driver_that_says_nothing_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(broken=["all"]).install(monkeypatch)
    messages = messages_of_three_bursts(monkeypatch, Gpu(pynvml.c_nvmlDevice_t()))
    assert [message.facts for message in messages if isinstance(message, Health)] == [{}]
    assert sum(isinstance(message, Sampled) for message in messages) == 3


def test_the_cpu_has_no_health(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [message for message in messages_of_three_bursts(monkeypatch, None) if isinstance(message, Health)]


def test_a_worker_says_which_gpu_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the measuring process needs torch")
    from gemmscope.engine.worker import _driver_facts

    Driver().install(monkeypatch)
    facts = _driver_facts(Gpu(pynvml.c_nvmlDevice_t()))
    assert (facts["index"], facts["pci_bus"], facts["serial"]) == (5, "00000000:ba:00.0", "1650623004321")
    Driver(broken=["all"]).install(monkeypatch)
    assert _driver_facts(Gpu(pynvml.c_nvmlDevice_t())) == {"power_limit_w": None, "max_sm_mhz": None}


@pytest.mark.parametrize(("known", "count", "expected"), [(True, 8, "its own"), (False, 1, "the only one"), (False, 8, None)])
def test_a_worker_never_reports_another_gpu(
    monkeypatch: pytest.MonkeyPatch, known: bool, count: int, expected: str | None
) -> None:
    """The driver may not know the UUID that CUDA reports, for example that of a MIG instance."""
    torch = pytest.importorskip("torch", reason="the measuring process needs torch")
    from gemmscope.engine import worker

    driver = SimpleNamespace(
        gpu_by_uuid=lambda uuid: "its own" if known and uuid == "GPU-1" else None,
        gpu=lambda _: "the only one",
        count=lambda: count,
    )
    monkeypatch.setattr(worker, "open_nvml", lambda: driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1"))
    assert worker.gpu_in_use() == expected


def test_the_latest_health_is_in_the_result() -> None:
    results = recorded_measurements()
    before = results.hello
    for errors in (0, 2):
        results.take(Health({"uncorrected_errors": errors}))
    assert results.hello == replace(before, device={**before.device, "health": {"uncorrected_errors": 2}})


def test_samples_of_one_gpu_are_combined_whatever_its_health() -> None:
    healthy, sick = ({**DEVICE, "health": {"uncorrected_errors": errors}} for errors in (0, 2))
    assert identity(Hello({}, healthy)) == identity(Hello({}, sick))
    _must_be_alike(Hello({}, healthy), Hello({}, sick))


def test_samples_of_two_gpus_of_one_product_are_not_combined() -> None:
    with pytest.raises(UserError, match="GPU UUID was GPU-1 and is GPU-2"):
        _must_be_alike(Hello({}, DEVICE), Hello({}, {**DEVICE, "uuid": "GPU-2"}))


@pytest.fixture
def no_names(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("SLURMD_NODENAME", "NODE_NAME"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_name_of_the_node(no_names: pytest.MonkeyPatch) -> None:
    no_names.setattr("socket.gethostname", lambda: "pod-7f9")
    assert node_name() == "pod-7f9"
    no_names.setenv("NODE_NAME", "worker-12")
    assert node_name() == "worker-12"
    no_names.setenv("SLURMD_NODENAME", "gpu017")
    assert node_name() == "gpu017"


def test_the_name_of_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def opened(text: str | None) -> str:
        file = tmp_path / "cpuinfo"
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        monkeypatch.setattr("gemmscope.gpu.environment.Path", lambda _: file)
        cpu_name.cache_clear()
        return cpu_name()

    two: Any = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Platinum 8480C\n\nprocessor\t: 1\nmodel name\t: other\n"
    assert opened(two) == "Intel(R) Xeon(R) Platinum 8480C"
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert opened("processor\t: 0\nBogoMIPS\t: 2000\n") == "aarch64"
    assert opened(None) == "aarch64"
    cpu_name.cache_clear()
