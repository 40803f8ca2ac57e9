from typing import Literal

import pytest

from elastictrain.config.fault import FaultGroup
from elastictrain.distributed.environment import choose_backend, plan_environment
from elastictrain.errors import ConfigError, HostUnfitError


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
    wanted: Literal["auto", "nccl", "gloo"], devices: int, local: int, chosen: str
) -> None:
    assert choose_backend(wanted, usable_gpus=devices, local_world_size=local, why_none="") == chosen


def test_nccl_without_a_gpu_ends_with_69_and_the_reason() -> None:
    with pytest.raises(HostUnfitError, match=r"parallel\.backend=nccl needs a GPU.*: all are hidden; parallel\.backend=gloo"):
        choose_backend("nccl", usable_gpus=0, local_world_size=1, why_none="all are hidden")


@pytest.mark.parametrize("wanted", ["auto", "nccl"])
def test_more_ranks_than_devices_are_refused(wanted: Literal["auto", "nccl"]) -> None:
    with pytest.raises(ConfigError, match=r"`--nproc-per-node` must be <= 2, .* is 4"):
        choose_backend(wanted, usable_gpus=2, local_world_size=4, why_none="")


def plan(backend: Literal["nccl", "gloo"], **present: str) -> dict[str, str]:
    variables = plan_environment(
        FaultGroup(flight_recorder_entries=123), backend=backend, dump_prefix="/tmp/flight-r", present=present
    )
    assert all(variable.reason for variable in variables)
    assert len({variable.name for variable in variables}) == len(variables)
    return {variable.name: variable.value for variable in variables}


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
