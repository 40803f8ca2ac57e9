import socket

import pytest

from elastictrain.errors import ConfigError
from elastictrain.identity import Identity, read_identity

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "PATH": "/bin"}


def test_without_torchrun_a_world_of_one() -> None:
    assert read_identity({"PATH": "/bin"}) == Identity(0, 1, 0, 1, socket.gethostname(), launched=False)


def test_reads_what_torchrun_sets() -> None:
    identity = read_identity(TORCHRUN)
    assert identity == Identity(5, 8, 1, 4, socket.gethostname(), launched=True)
    assert not identity.speaks


def test_rank_zero_speaks() -> None:
    assert read_identity(TORCHRUN | {"RANK": "0"}).speaks


def test_local_values_have_defaults() -> None:
    identity = read_identity({"RANK": "1", "WORLD_SIZE": "2"})
    assert (identity.local_rank, identity.local_world_size) == (0, 1)
    assert identity.launched


@pytest.mark.parametrize(("present", "absent"), [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_half_of_torchrun_is_refused_by_name(present: str, absent: str) -> None:
    with pytest.raises(ConfigError, match=f"`{absent}` must be set in the environment when {present} is"):
        read_identity({present: "1"})


@pytest.mark.parametrize("text", ["", "two", "-1", "1.0"])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_value_that_is_no_number_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_identity(TORCHRUN | {name: text})
    assert [problem.key for problem in caught.value.problems] == [name]
    assert repr(text) in str(caught.value)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_identity(TORCHRUN | {"RANK": "x", "LOCAL_RANK": "y"})
    assert {problem.key for problem in caught.value.problems} == {"RANK", "LOCAL_RANK"}


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_a_world_of_nobody_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` must be a whole number >= 1 in the environment, but is '0'"):
        read_identity(TORCHRUN | {name: "0"})


@pytest.mark.parametrize("world", ["1", "5"])
def test_a_rank_outside_the_world_is_refused(world: str) -> None:
    with pytest.raises(ConfigError, match=f"`RANK` must be < WORLD_SIZE={world}, but is 5"):
        read_identity(TORCHRUN | {"WORLD_SIZE": world})
