import threading

import psutil
import pytest
import torch

from elastictrain.storage.opening import open_store
from elastictrain.telemetry import host_metrics
from elastictrain.telemetry.host_metrics import DeviceBusyLogger, host_scalars
from elastictrain.telemetry.loggers import LoggedRun, LoggerThread

DEVICE = torch.device("cuda", 1)
NAME = "system/device_busy_percent"


def test_a_host_without_cuda_has_plausible_figures_and_none_of_a_device() -> None:
    values = host_scalars(torch.device("cpu"))
    assert values.keys() == {"system/cpu_percent", "system/memory_gb"}
    assert 0.0 <= values["system/cpu_percent"] <= 100.0
    assert 0.0 < values["system/memory_gb"] < psutil.virtual_memory().total / 1e9


def test_nobody_waits_for_the_share_in_which_a_device_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, asked = threading.Event(), list[torch.device]()

    def utilization(device: torch.device) -> int:
        asked.append(device)
        assert answers.wait(10)
        if len(asked) == 3:
            raise LookupError("an error of the library's own")
        return 40 + len(asked)

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    busy = DeviceBusyLogger(DEVICE)
    run = LoggedRun(open_store("memory://busy"), {}, 1, "000001-aa", 1, 9, 1.0, 1.0)
    thread = LoggerThread("busy", busy, run)
    thread.log(1, {})
    thread.log(2, {})
    assert busy.scalars == {}, "the driver has not answered"
    answers.set()
    thread.close(10)
    assert asked == [DEVICE] * 3
    assert busy.scalars == {NAME: 42.0}, "what could not be told is as before"


@pytest.mark.parametrize(("kind", "package", "works"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)])
def test_it_needs_a_device_and_the_drivers_library(
    kind: str, package: bool, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_metrics, "find_spec", lambda _: object() if package else None)
    assert DeviceBusyLogger.works_on(torch.device(kind)) is works
