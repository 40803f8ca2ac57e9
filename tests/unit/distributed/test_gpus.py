"""Why torch can use no GPU, from what the kernel, the driver and torch's files say."""

from collections.abc import Mapping
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from elastictrain.distributed import gpus as module
from elastictrain.distributed.gpus import Gpus, read_gpus, why_no_gpu

HEALTHY = Gpus(
    files=("/dev/nvidia0", "/dev/nvidia1"), driver="580.82.07", driver_cuda="13.0", torch="2.13.0+cu130", torch_cuda="13.0"
)
PROC = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build  (dvs-builder@U22)
GCC version:  gcc version 12.3.0
"""
OLDER_PROC = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"


def test_nothing_speaks_against_a_healthy_host() -> None:
    assert why_no_gpu(HEALTHY) == ""


@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        (Gpus(torch="2.13.0+cpu"), "this host has none"),
        (replace(HEALTHY, files=()), "this host has none"),
        (
            replace(HEALTHY, torch="2.13.0+cpu", torch_cuda=""),
            "torch 2.13.0+cpu is built for the CPU, though this host has /dev/nvidia0",
        ),
        (Gpus(files=("/dev/kfd",), torch="2.13.0+cpu"), "torch 2.13.0+cpu is built for the CPU, though this host has /dev/kfd"),
        (
            replace(HEALTHY, driver="535.104.05", driver_cuda="12.2"),
            "built for CUDA 13.0, but the driver 535.104.05 knows CUDA 12.2",
        ),
        (replace(HEALTHY, mask="CUDA_VISIBLE_DEVICES=-1", all_hidden=True), "CUDA_VISIBLE_DEVICES=-1 hides all GPUs"),
    ],
)
def test_each_reason_is_told_from_the_others(gpus: Gpus, says: str) -> None:
    assert says in why_no_gpu(gpus)
    assert says in why_no_gpu(gpus, error="CUDA unknown error")


def test_a_driver_that_is_not_shown_is_not_loaded_if_torch_finds_no_gpu() -> None:
    unseen = replace(HEALTHY, driver="", driver_cuda="")
    assert why_no_gpu(unseen) == ""
    assert "the NVIDIA driver is not loaded" in why_no_gpu(unseen, error="Found no NVIDIA driver on your system")


def test_what_only_torch_knows_is_said_in_its_words() -> None:
    error = (
        "Unexpected error from cudaGetDeviceCount(): Error 803: system has unsupported display driver / cuda driver combination"
    )
    for gpus in (HEALTHY, replace(HEALTHY, driver_cuda=""), replace(HEALTHY, driver_cuda="12.9", torch_cuda="12.8")):
        assert error in why_no_gpu(gpus, error=error)
    assert "CUDA_VISIBLE_DEVICES=7" in why_no_gpu(replace(HEALTHY, mask="CUDA_VISIBLE_DEVICES=7"), error="no device")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two GPUs, and a torch for them."""
    for name in (
        "dev/nvidia0",
        "dev/nvidia1",
        "dev/nvidiactl",
        "dev/nvidia-uvm",
        "proc/driver/nvidia/version",
        "torch/version.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "proc/driver/nvidia/version").write_text(PROC)
    (tmp_path / "torch/version.py").write_text(
        "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    )
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "torch/__init__.py"))
    monkeypatch.setattr(module, "find_spec", lambda name: spec)
    return tmp_path


def test_a_host_with_gpus(host: Path) -> None:
    found = read_gpus({}, root=host)
    assert replace(found, driver_cuda="13.0") == HEALTHY
    (host / "proc/driver/nvidia/version").write_text(OLDER_PROC)
    assert read_gpus({}, root=host).driver == "535.104.05"


@pytest.mark.parametrize(
    ("environment", "mask", "all_hidden"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES=", True),
        ({"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "-1"}, "HIP_VISIBLE_DEVICES=-1", True),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "CUDA_VISIBLE_DEVICES=1", False),
        ({}, "", False),
    ],
)
def test_what_hides_gpus(host: Path, environment: Mapping[str, str], mask: str, all_hidden: bool) -> None:
    found = read_gpus(environment, root=host)
    assert (found.mask, found.all_hidden) == (mask, all_hidden)


def test_what_cannot_be_read_is_not_there(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (host / "torch/version.py").unlink()
    (host / "proc/driver/nvidia/version").unlink()
    found = read_gpus({}, root=host)
    assert (found.driver, found.driver_cuda, found.torch, found.torch_cuda) == ("", "", "", "")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert read_gpus({}, root=host / "none") == Gpus()
