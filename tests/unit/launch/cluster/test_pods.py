from collections.abc import Mapping

import pytest

from elastictrain.launch.cluster.detect import detect
from tests.unit.launch.cluster.environments import (
    INDEXED_JOB,
    POD,
    PYTORCHJOB_15,
    PYTORCHJOB_19,
    PYTORCHJOB_ELASTIC,
    SHELL,
    TRAINJOB_2,
)
from tests.unit.launch.cluster.refusals import refused, told, without


@pytest.mark.parametrize(
    ("environment", "order", "num_hosts", "processes", "peers"),
    [
        (PYTORCHJOB_15, 2, 4, 0, ("llama-master-0",)),
        (PYTORCHJOB_19, 2, 4, 8, ("llama-master-0",)),
        (PYTORCHJOB_ELASTIC, -1, 4, 0, ("llama-worker-0",)),
        (TRAINJOB_2, 1, 2, 0, ("llama-node-0-0.llama",)),
        (INDEXED_JOB, 3, 0, 0, ()),
        (POD, -1, 0, 0, ()),
    ],
)
def test_pods(environment: Mapping[str, str], order: int, num_hosts: int, processes: int, peers: tuple[str, ...]) -> None:
    place = detect(environment)
    assert (place.kind, place.role, place.deadline) == ("kubernetes", "launcher", None)
    assert (place.order, place.num_hosts, place.processes, place.peers) == (order, num_hosts, processes, peers)
    assert place.warnings == ()


def test_rank_and_world_size_count_pods_not_processes() -> None:
    conclusions = detect(PYTORCHJOB_15).conclusions
    assert told(conclusions, "4 hosts", "WORLD_SIZE=4", "pods")
    assert told(conclusions, "host 2", "RANK=2")
    conclusions = detect(PYTORCHJOB_19).conclusions
    assert conclusions[0] == "Kubernetes (KUBERNETES_SERVICE_HOST)"
    assert told(conclusions, "4 hosts", "PET_NNODES=4")
    assert told(conclusions, "8 workers", "PET_NPROC_PER_NODE=8")


def test_the_master_is_no_peer_of_itself() -> None:
    assert detect(PYTORCHJOB_19 | {"RANK": "0", "PET_NODE_RANK": "0"}).peers == ()
    assert detect(PYTORCHJOB_15 | {"RANK": "0"}).peers == ()
    assert detect(PYTORCHJOB_15 | {"MASTER_ADDR": "localhost"}).peers == ()


def test_the_pod_knows_its_address() -> None:
    place = detect(INDEXED_JOB)
    assert place.address == "10.244.3.17"
    assert told(place.conclusions, "10.244.3.17", "POD_IP")
    assert detect(INDEXED_JOB | {"POD_IP": "fd00::17"}).address == "fd00::17"


def test_a_range_promises_its_upper_end() -> None:
    place = detect(PYTORCHJOB_ELASTIC | {"PET_NNODES": "2:6"})
    assert place.num_hosts == 6
    assert told(place.conclusions, "2 to", "6 hosts", "PET_NNODES=2:6")
    assert any("`launch.min_hosts=2`" in warning for warning in place.warnings)


@pytest.mark.parametrize(
    ("endpoint", "peer"),
    [
        ("llama-worker-0:23456", "llama-worker-0"),
        ("llama-worker-0", "llama-worker-0"),
        ("[fd00::1]:29400", "fd00::1"),
        ("", ""),
    ],
)
def test_the_rendezvous_is_a_peer(endpoint: str, peer: str) -> None:
    place = detect(PYTORCHJOB_ELASTIC | {"PET_RDZV_ENDPOINT": endpoint})
    assert place.peers == ((peer,) if peer else ())


@pytest.mark.parametrize("asked", ["auto", "gpu"])
def test_workers_that_follow_the_gpus(asked: str) -> None:
    assert detect(PYTORCHJOB_19 | {"PET_NPROC_PER_NODE": asked, "WORLD_SIZE": "4"}).processes == 0


def test_without_kubernetes_a_person_may_number_hosts_the_same_way() -> None:
    place = detect(SHELL | {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "10.0.0.1"})
    assert (place.kind, place.order, place.num_hosts, place.peers) == ("plain", 1, 2, ("10.0.0.1",))


@pytest.mark.parametrize(
    ("change", "name", "messages"),
    [
        ({"PET_NODE_RANK": "first"}, "PET_NODE_RANK", "must be a whole number >= 0 in the environment, but is 'first'"),
        ({"PET_NODE_RANK": "4"}, "PET_NODE_RANK", "must be < 4, the hosts of PET_NNODES, in the environment, but is 4"),
        ({"PET_NNODES": "1:2"}, "PET_NODE_RANK", "must be < 2, the hosts of PET_NNODES"),
        ({"PET_NNODES": "four"}, "PET_NNODES", "must be a number of hosts >= 1, or a range like 1:4"),
        ({"PET_NNODES": "4:1"}, "PET_NNODES", "but is '4:1'"),
        ({"PET_NNODES": "0"}, "PET_NNODES", "but is 0"),
        ({"PET_NNODES": "1:"}, "PET_NNODES", "but is '1:'"),
        ({"PET_NPROC_PER_NODE": "cpu"}, "PET_NPROC_PER_NODE", "must be a whole number >= 1, `auto` or `gpu`"),
        ({"PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE", "but is 0"),
        ({"PET_NPROC_PER_NODE": ""}, "PET_NPROC_PER_NODE", "but is ''"),
        ({"RANK": "1"}, "RANK", "must be 2, the pod's number in PET_NODE_RANK, in the environment, but is 1"),
        (
            {"WORLD_SIZE": "16"},
            "WORLD_SIZE",
            "must be 4 or 32 (PET_NNODES=4, PET_NPROC_PER_NODE=8) in the environment, but is 16",
        ),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE", "must be a whole number >= 1"),
        ({"POD_IP": "llama-2"}, "POD_IP", "must be the pod's IP address in the environment, but is 'llama-2'"),
    ],
)
def test_a_contradiction_is_refused_by_name(change: Mapping[str, str], name: str, messages: str) -> None:
    assert messages in refused(PYTORCHJOB_19 | change)[name]


def test_a_pod_outside_its_job_is_refused() -> None:
    said = refused(PYTORCHJOB_15 | {"RANK": "4"})
    assert said.keys() == {"RANK"}
    assert told(said.values(), "< 4", "WORLD_SIZE", "is 4")
    said = refused(INDEXED_JOB | {"PET_NNODES": "2"})
    assert said.keys() == {"JOB_COMPLETION_INDEX"}
    assert told(said.values(), "< 2", "PET_NNODES", "is 3")


def test_a_garbled_rank_is_told_once() -> None:
    assert refused(PYTORCHJOB_15 | {"RANK": "x"}).keys() == {"RANK"}
    assert refused(without(TRAINJOB_2, "PET_NODE_RANK") | {"JOB_COMPLETION_INDEX": "x"}).keys() == {"JOB_COMPLETION_INDEX"}


def test_an_operator_that_counts_workers_without_saying_how_many_a_pod_has() -> None:
    environment = without(PYTORCHJOB_19, "PET_NPROC_PER_NODE")
    place = detect(environment)
    assert (place.num_hosts, place.processes) == (4, 8)
    assert told(place.conclusions, "8 workers", "WORLD_SIZE=32")
    assert detect(environment | {"WORLD_SIZE": "4"}).processes == 0
    assert detect(environment | {"PET_NPROC_PER_NODE": "auto"}).processes == 0
    said = refused(environment | {"WORLD_SIZE": "30"})
    assert said.keys() == {"WORLD_SIZE"}
    assert told(said.values(), "of 4", "PET_NNODES=4", "is 30")
