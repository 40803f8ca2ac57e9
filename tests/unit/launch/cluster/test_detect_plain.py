import pytest

from elastictrain.errors import ConfigError
from elastictrain.launch.cluster.detect import detect
from elastictrain.launch.cluster.place import ClusterPlace
from tests.unit.launch.cluster.environments import SHELL, SLURM_TASK_PER_NODE, VAST
from tests.unit.launch.cluster.refusals import told

HERE = {"names": ("b", "b.lan", "10.0.0.2")}


def test_nothing_is_known_of_others() -> None:
    place = detect(SHELL)
    assert place == ClusterPlace("plain", conclusions=place.conclusions)
    (sentence,) = place.conclusions
    assert sentence.startswith("no cluster and no list of hosts (`launch.hosts`)")


def test_the_first_host_is_no_peer_of_itself() -> None:
    numbered = {"PET_NNODES": "2", "PET_MASTER_ADDR": "10.0.0.1"}
    assert detect(SHELL | numbered | {"PET_NODE_RANK": "0"}).peers == ()
    assert detect(SHELL | numbered | {"PET_NODE_RANK": "1"}).peers == ("10.0.0.1",)


def test_a_host_with_a_number_is_not_alone() -> None:
    place = detect(SHELL | {"PET_NODE_RANK": "3"})
    assert (place.order, place.num_hosts) == (3, 0)
    assert told(place.conclusions, "host 3", "(PET_NODE_RANK=3)")


@pytest.mark.parametrize("hosts", [("a", "b", "c"), ("10.0.0.1", "10.0.0.2", "10.0.0.3"), ("a.lan", "b.lan", "c.lan")])
def test_a_list_of_hosts(hosts: tuple[str, ...]) -> None:
    place = detect(SHELL, **HERE, hosts=hosts)
    assert (place.kind, place.order, place.num_hosts, place.peers) == ("plain", 1, 3, (hosts[0], hosts[2]))
    assert told(place.conclusions, "3 hosts", "`launch.hosts`")
    assert told(place.conclusions, "host 1", f"({hosts[1]})")


def test_a_host_that_does_not_know_its_name_has_no_number() -> None:
    place = detect(SHELL, hosts=("a", "b"))
    assert (place.order, place.num_hosts, place.peers) == (-1, 2, ("a", "b"))


@pytest.mark.parametrize(
    ("hosts", "messages"),
    [(("a", "c"), "must name this host (one of b, b.lan, 10.0.0.2)"), (("b", "b"), "must name each host once")],
)
def test_a_wrong_list_is_refused(hosts: tuple[str, ...], messages: str) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(SHELL, **HERE, hosts=hosts)
    (problem,) = caught.value.problems
    assert problem.key == "launch.hosts"
    assert messages in problem.message


def test_a_persons_list_comes_before_every_cluster() -> None:
    place = detect(SLURM_TASK_PER_NODE | VAST, **HERE, hosts=("a", "b"))
    assert (place.kind, place.order, place.num_hosts) == ("plain", 1, 2)
    assert [told([warning], "`launch.hosts`", name) for warning, name in zip(place.warnings, ("Slurm", "Vast"), strict=True)]


def test_ranks_that_nobody_explains_are_left_aside() -> None:
    place = detect(SHELL | {"RANK": "3", "WORLD_SIZE": "junk"})
    assert (place.order, place.num_hosts) == (-1, 0)
    (warning,) = place.warnings
    assert warning.startswith("RANK, WORLD_SIZE of the environment are left aside")
