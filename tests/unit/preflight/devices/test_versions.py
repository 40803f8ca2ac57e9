from collections.abc import Callable

from elastictrain.preflight.devices.nvidia import parse_nvidia
from elastictrain.preflight.devices.versions import installed_version, read_versions
from elastictrain.preflight.surroundings import Surroundings, ToolOutput


def test_versions_of_a_gpu_host(host: Callable[..., Surroundings], answered: Callable[..., ToolOutput]) -> None:
    report = parse_nvidia(answered("nvidia_smi_550_h100.xml"))
    installed = {"torch": "2.11.0+cu130", "nvidia-nccl-cu13": "2.28.9"}.get
    found = read_versions(host(), report, installed=installed)
    assert found["driver"] == "550.54.15"
    assert found["cuda"] == "12.4"
    assert (found["torch"], found["nccl"], found["gpus"]) == ("2.11.0+cu130", "2.28.9", "2 x NVIDIA H100 80GB HBM3")


def test_versions_of_a_host_without_anything(host: Callable[..., Surroundings]) -> None:
    found = read_versions(host(), None, installed=lambda package: None)
    assert {name for name, value in found.items() if value is not None} == {"python"}


def test_packages_are_found_without_importing_them() -> None:
    assert installed_version("pytest")
    assert installed_version("there-is-no-such-package") is None
