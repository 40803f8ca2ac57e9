import pytest
import torch

from elastictrain.distributed.device import start_device


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
    thread = start_device("auto", local_rank=1, wait=device.wait)
    assert thread is not None
    thread.join(10)
    assert device.diary == diary


@pytest.mark.parametrize(("backend", "local_rank"), [("gloo", 0), ("auto", 2), ("nccl", 3)])
def test_who_has_no_device_starts_none(backend: str, local_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, refusals=0)
    assert start_device(backend, local_rank=local_rank, wait=device.wait) is None  # type: ignore[arg-type]
    assert device.diary == []
