from collections.abc import Mapping
from typing import Any

import pytest

from elastictrain.launch.cluster.detect import detect
from tests.unit.launch.cluster.environments import (
    LOOPBACK,
    SHELL,
    VAST,
    VAST_ALONE,
    VAST_CREATED_ON_OVERLAY,
    VAST_JOINED_LATER,
)
from tests.unit.launch.cluster.refusals import refused, told, without

OTHER_SUBNET = LOOPBACK | {"eth0": ("172.20.0.5",), "eth1": ("172.17.0.2",)}
NO_ADDRESS = LOOPBACK | {"eth0": ("fe80::1", "169.254.3.4"), "eth1": ("172.17.0.2",)}


@pytest.mark.parametrize(
    ("probes", "address"),
    [
        ({"interfaces": VAST_CREATED_ON_OVERLAY, "default_interface": "eth1"}, "10.0.0.1"),
        ({"interfaces": VAST_JOINED_LATER, "default_interface": "eth0"}, "10.0.0.7"),
        ({"interfaces": VAST_CREATED_ON_OVERLAY}, "10.0.0.1"),
        ({"interfaces": VAST_JOINED_LATER}, "10.0.0.7"),
        ({"interfaces": OTHER_SUBNET, "default_interface": "eth1"}, "172.20.0.5"),
    ],
)
def test_the_address_is_the_overlays_not_dockers(probes: Mapping[str, Any], address: str) -> None:
    place = detect(VAST, **probes)
    assert (place.kind, place.address, place.num_hosts, place.processes) == ("vast", address, 0, 2)
    assert any(address in sentence and "overlay" in sentence for sentence in place.conclusions)
    assert place.warnings == ()


@pytest.mark.parametrize(
    "probes",
    [
        {"interfaces": VAST_ALONE, "default_interface": "eth0"},
        {"interfaces": VAST_ALONE},
        {"interfaces": OTHER_SUBNET},
        {"interfaces": NO_ADDRESS, "default_interface": "eth1"},
        {"interfaces": LOOPBACK, "default_interface": "eth0"},
        {},
    ],
)
def test_without_an_overlay_an_instance_is_alone(probes: Mapping[str, Any]) -> None:
    place = detect(VAST, **probes)
    assert (place.address, place.num_hosts, place.job) == ("", 1, "7835610")
    assert told(place.conclusions, "no overlay")


def test_several_instances_without_an_overlay_are_told_what_to_do() -> None:
    several = VAST | {"PET_NNODES": "2", "PET_NODE_RANK": "0"}
    (warning,) = detect(several, interfaces=VAST_ALONE, default_interface="eth0").warnings
    assert told([warning], "2 hosts", '"-n OVERLAY"')
    place = detect(several, interfaces=VAST_CREATED_ON_OVERLAY, default_interface="eth1")
    assert (place.order, place.num_hosts, place.warnings) == (0, 2, ())


@pytest.mark.parametrize(
    ("asked", "address"), [("eth1", "172.17.0.2"), ("=eth1", "172.17.0.2"), ("^docker", "10.0.0.1"), ("eth9", "10.0.0.1")]
)
def test_an_interface_that_a_person_named_is_taken(asked: str, address: str) -> None:
    probes = {"interfaces": VAST_CREATED_ON_OVERLAY, "default_interface": "eth1"}
    assert detect(VAST | {"NCCL_SOCKET_IFNAME": asked}, **probes).address == address


@pytest.mark.parametrize(
    ("change", "processes"), [({"GPU_COUNT": "0"}, 0), ({"CUDA_VISIBLE_DEVICES": "1"}, 1), ({"PET_NPROC_PER_NODE": "1"}, 1)]
)
def test_workers(change: Mapping[str, str], processes: int) -> None:
    assert detect(VAST | change).processes == processes


def test_workers_without_a_count() -> None:
    assert detect(without(VAST, "GPU_COUNT")).processes == 0


def test_a_garbled_count_is_refused() -> None:
    said = refused(VAST | {"GPU_COUNT": "two"})
    assert said.keys() == {"GPU_COUNT"}
    assert "'two'" in said["GPU_COUNT"]


@pytest.mark.parametrize("change", [{"CONTAINER_ID": "1"}, {"PUBLIC_IPADDR": "65.1.1.1"}, {"GPU_COUNT": "x"}])
def test_names_that_others_use_too_are_no_evidence(change: Mapping[str, str]) -> None:
    assert detect(SHELL | change).kind == "plain"


def test_a_port_alone_is_evidence() -> None:
    assert detect(SHELL | {"VAST_TCP_PORT_22": "33526"}).kind == "vast"
