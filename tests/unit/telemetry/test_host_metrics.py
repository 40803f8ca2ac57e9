import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import psutil
import pytest
import torch

from elastictrain.telemetry import host_metrics
from elastictrain.telemetry.host_metrics import DeviceBusySampler, host_scalars

DEVICE = torch.device("cuda", 1)
BUSY = "system/device_busy_percent"


def test_a_host_without_cuda_has_plausible_figures_and_none_of_a_device() -> None:
    values = host_scalars(torch.device("cpu"))
    assert values.keys() == {"system/cpu_percent", "system/memory_gb"}
    assert 0.0 <= values["system/cpu_percent"] <= 100.0
    assert 0.0 < values["system/memory_gb"] < psutil.virtual_memory().total / 1e9


class Library:
    """The driver's, which hangs while it has no answer."""

    def __init__(self) -> None:
        self.calls = 0
        self.answers = SimpleQueue[int | Exception]()

    def utilization(self, device: torch.device) -> int:
        assert device == DEVICE
        self.calls += 1
        answer = self.answers.get(timeout=10)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_nobody_waits_for_the_share_in_which_a_device_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(torch.cuda, "utilization", library.utilization)
    monkeypatch.setattr(host_metrics, "find_spec", lambda _: object())
    sampler = DeviceBusySampler(DEVICE)
    sampler.ask()
    wait_until(lambda: library.calls == 1)
    # Asked while the driver hangs, however often: one more sample.
    sampler.ask()
    sampler.ask()
    assert sampler.scalars == {}
    library.answers.put(41)
    wait_until(lambda: sampler.scalars == {BUSY: 41.0} and library.calls == 2)
    library.answers.put(LookupError("an error of the library's own"))
    wait_until(lambda: sampler.scalars == {})
    sampler.ask()
    library.answers.put(42)
    wait_until(lambda: sampler.scalars == {BUSY: 42.0})
    sampler.ask()
    wait_until(lambda: library.calls == 4)
    sampler.close()
    assert names().count("device-busy") == 1, "it hangs in the driver, and nobody has waited"
    library.answers.put(43)
    wait_until(lambda: "device-busy" not in names())
    assert library.calls == 4


@pytest.mark.parametrize(("kind", "package", "samples"), [("cuda", True, 1), ("cuda", False, 0), ("cpu", True, 0)])
def test_it_needs_a_device_and_the_drivers_library(
    kind: str, package: bool, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_metrics, "find_spec", lambda _: object() if package else None)
    sampler = DeviceBusySampler(torch.device(kind))
    assert names().count("device-busy") == samples
    sampler.close()
    wait_until(lambda: "device-busy" not in names())


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)
