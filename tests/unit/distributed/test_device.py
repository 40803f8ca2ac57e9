from dataclasses import replace
from typing import Literal

import pytest
import torch

from elastictrain.config.composed import FaultGroup, ParallelGroup
from elastictrain.distributed import device as module
from elastictrain.distributed.device import find_backend, plan_environment, start_device
from elastictrain.distributed.gpus import Gpus
from elastictrain.errors import EXIT_UNFIT, ConfigError, HostUnfitError


class Device:
    """One that has no room at first, as many times as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refusals: int) -> None:
        self.refusals = refusals
        self.diary: list[str] = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)
        monkeypatch.setattr(torch, "empty", lambda *_, device: self.diary.append(f"made on {device}"))

    def set_device(self, index: int) -> None:
        if self.refusals > 0:
            self.refusals -= 1
            self.diary.append("no room")
            raise RuntimeError("CUDA error: out of memory")
        self.diary.append(f"device {index}")

    def wait(self) -> None:
        self.diary.append("waited")


@pytest.mark.parametrize(
    ("refusals", "diary"),
    [
        (0, ["device 1", "made on cuda"]),
        (1, ["no room", "waited", "device 1", "made on cuda"]),
        # It is used again soon, and will say so itself.
        (2, ["no room", "waited", "no room"]),
    ],
)
def test_a_device_that_is_being_given_back_is_waited_for(
    refusals: int, diary: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch, refusals=refusals)
    thread = start_device(ParallelGroup("ddp"), local_rank=1, wait=device.wait)
    assert thread is not None
    thread.join(10)
    assert device.diary == diary


@pytest.mark.parametrize(
    ("parallel", "local_rank"),
    [
        (ParallelGroup("ddp", backend="gloo"), 0),
        (ParallelGroup("ddp", device="cpu"), 0),
        (ParallelGroup("ddp"), 2),
        (ParallelGroup("ddp", backend="nccl"), 3),
    ],
)
def test_who_has_no_device_starts_none(parallel: ParallelGroup, local_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, refusals=0)
    assert start_device(parallel, local_rank=local_rank, wait=device.wait) is None
    assert device.diary == []


OLD_DRIVER = Gpus(files=("/dev/nvidia0",), driver="535.104.05", driver_cuda="12.2", torch="2.13.0+cu130", torch_cuda="13.0")


def test_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by the driver, and still of no use: the CPU with a word, or the end where a GPU is asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = OLD_DRIVER
    monkeypatch.setattr(module, "read_gpus", lambda environment: found)
    backend, why_cpu = find_backend("auto", environment={}, local_world_size=1)
    assert (backend, "535.104.05" in why_cpu) == ("gloo", True)
    assert find_backend("gloo", environment={}, local_world_size=1) == ("gloo", "")
    with pytest.raises(HostUnfitError, match=r"535\.104\.05") as caught:
        find_backend("nccl", environment={}, local_world_size=1)
    assert caught.value.exit_code == EXIT_UNFIT
    for wanted in ("auto", "gloo"):
        with pytest.raises(HostUnfitError, match=r"parallel\.device=cuda"):
            find_backend(wanted, environment={}, local_world_size=1, device="cuda")  # type: ignore[arg-type]
    assert find_backend("auto", environment={}, local_world_size=1, device="cpu") == ("gloo", "")
    found = replace(OLD_DRIVER, mask="CUDA_VISIBLE_DEVICES=", all_hidden=True)
    assert find_backend("auto", environment={}, local_world_size=1) == ("gloo", "")
    found = Gpus(torch="2.13.0+cpu")
    assert find_backend("auto", environment={}, local_world_size=1) == ("gloo", "")


def test_gpus_that_torch_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_backend("auto", environment={}, local_world_size=2) == ("nccl", "")
    assert find_backend("gloo", environment={}, local_world_size=2) == ("gloo", "")


def show_devices(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    monkeypatch.setattr(module, "read_gpus", lambda environment: Gpus(torch="2.13.0+cpu"))


@pytest.mark.parametrize(
    ("wanted", "devices", "local", "chosen"),
    [
        ("auto", 0, 4, "gloo"),
        ("auto", 8, 8, "nccl"),
        ("auto", 8, 1, "nccl"),
        ("nccl", 2, 2, "nccl"),
        ("gloo", 0, 4, "gloo"),
        ("gloo", 1, 4, "gloo"),
    ],
)
def test_the_backend_follows_the_devices(
    wanted: Literal["auto", "nccl", "gloo"], devices: int, local: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    show_devices(monkeypatch, devices)
    assert find_backend(wanted, environment={}, local_world_size=local) == (chosen, "")


@pytest.mark.parametrize(
    ("wanted", "device", "chosen"),
    [
        ("gloo", "cuda", "gloo"),
        ("auto", "cuda", "nccl"),
        ("nccl", "cuda", "nccl"),
        ("auto", "cpu", "gloo"),
        ("gloo", "cpu", "gloo"),
    ],
)
def test_the_device_that_is_asked_for(
    wanted: Literal["auto", "nccl", "gloo"], device: Literal["cpu", "cuda"], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    show_devices(monkeypatch, 2)
    assert find_backend(wanted, environment={}, local_world_size=2, device=device) == (chosen, "")
    if device == "cuda":
        with pytest.raises(ConfigError):
            find_backend(wanted, environment={}, local_world_size=3, device=device)


def test_nccl_without_a_gpu_ends_with_69(monkeypatch: pytest.MonkeyPatch) -> None:
    show_devices(monkeypatch, 0)
    with pytest.raises(HostUnfitError):
        find_backend("nccl", environment={}, local_world_size=1)


@pytest.mark.parametrize("wanted", ["auto", "nccl"])
def test_more_ranks_than_devices_are_refused(wanted: Literal["auto", "nccl"], monkeypatch: pytest.MonkeyPatch) -> None:
    show_devices(monkeypatch, 2)
    with pytest.raises(ConfigError) as caught:
        find_backend(wanted, environment={}, local_world_size=4)
    assert [problem.key for problem in caught.value.problems] == ["--nproc-per-node"]


def plan(backend: Literal["nccl", "gloo"], **present: str) -> dict[str, str]:
    options = FaultGroup(flight_recorder_entries=123)
    return plan_environment(options, backend=backend, dump_prefix="/tmp/flight-r", present=present)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_flight_recorder_is_on_under_every_backend(backend: Literal["nccl", "gloo"]) -> None:
    planned = plan(backend)
    assert planned["TORCH_FR_BUFFER_SIZE"] == "123"
    assert planned["TORCH_FR_DUMP_TEMP_FILE"] == "/tmp/flight-r"


def test_nccl_handles_errors_by_itself() -> None:
    assert plan("nccl")["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert not any("NCCL" in name for name in plan("gloo"))


def test_what_the_user_has_set_is_kept() -> None:
    assert "TORCH_FR_BUFFER_SIZE" not in plan("gloo", TORCH_FR_BUFFER_SIZE="0")


def test_a_resolver_that_does_not_answer_is_not_waited_for() -> None:
    assert plan("gloo")["RES_OPTIONS"] == "timeout:1 attempts:1"
    assert "RES_OPTIONS" not in plan("gloo", RES_OPTIONS="timeout:9")
