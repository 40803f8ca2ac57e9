import json
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.bounded_json import encode_record
from elastictrain.errors import ConfigError
from elastictrain.identity import (
    RECOVERY,
    Identity,
    Launcher,
    RecoveryPlan,
    Rung,
    pods_without_workers,
    read_identity,
)

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "PATH": "/bin"}


def wrong_in(environment: Mapping[str, str]) -> list[str]:
    """The variables that are refused."""
    with pytest.raises(ConfigError) as caught:
        read_identity(environment)
    return [problem.key for problem in caught.value.problems]


def test_without_torchrun_a_world_of_one() -> None:
    assert read_identity({"PATH": "/bin"}) == Identity(0, 1, 0, 1, socket.gethostname(), launched=False)


def test_reads_what_torchrun_sets() -> None:
    identity = read_identity(TORCHRUN)
    assert identity == Identity(5, 8, 1, 4, socket.gethostname(), launched=True)
    assert not identity.is_log_rank


def test_rank_zero_speaks() -> None:
    assert read_identity(TORCHRUN | {"RANK": "0"}).is_log_rank


def test_local_values_have_defaults() -> None:
    identity = read_identity({"RANK": "1", "WORLD_SIZE": "2"})
    assert (identity.local_rank, identity.local_world_size) == (0, 1)
    assert identity.launched


@pytest.mark.parametrize(("present", "absent"), [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_half_of_torchrun_is_refused_by_name(present: str, absent: str) -> None:
    assert wrong_in({present: "1"}) == [absent]


@pytest.mark.parametrize("text", ["", "two", "-1", "1.0"])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_value_that_is_no_number_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_identity(TORCHRUN | {name: text})
    assert [problem.key for problem in caught.value.problems] == [name]
    assert repr(text) in str(caught.value)


def test_all_problems_are_reported_at_once() -> None:
    assert wrong_in(TORCHRUN | {"RANK": "x", "LOCAL_RANK": "y"}) == ["RANK", "LOCAL_RANK"]


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_a_world_of_nobody_is_refused(name: str) -> None:
    assert wrong_in(TORCHRUN | {name: "0"}) == [name]


@pytest.mark.parametrize("world", ["1", "5"])
def test_a_rank_outside_the_world_is_refused(world: str) -> None:
    assert wrong_in(TORCHRUN | {"WORLD_SIZE": world}) == ["RANK"]


LAUNCHED = TORCHRUN | {
    "ELASTICTRAIN_LAUNCHER": "77",
    "ELASTICTRAIN_GENERATION": "3",
    "ELASTICTRAIN_RESTARTED": "1",
    "ELASTICTRAIN_LAUNCH_FOLDER": "/tmp/x/generation-3",
}


def test_workers_of_our_launcher_know_it() -> None:
    assert read_identity(LAUNCHED).launcher == Launcher(77, 3, True, "/tmp/x/generation-3")
    assert read_identity(LAUNCHED | {"ELASTICTRAIN_RESTARTED": "0"}).launcher == Launcher(77, 3, False, "/tmp/x/generation-3")
    assert read_identity(TORCHRUN).launcher is None


def test_what_an_earlier_launcher_left_in_the_environment_is_nothing_without_torchrun() -> None:
    environment = {name: value for name, value in LAUNCHED.items() if name not in TORCHRUN}
    assert read_identity(environment) == Identity(0, 1, 0, 1, socket.gethostname(), launched=False)


@pytest.mark.parametrize("name", ["ELASTICTRAIN_LAUNCHER", "ELASTICTRAIN_GENERATION", "ELASTICTRAIN_LAUNCH_FOLDER"])
def test_half_a_launcher_is_none(name: str) -> None:
    assert read_identity({key: value for key, value in LAUNCHED.items() if key != name}).launcher is None
    assert read_identity(LAUNCHED | {name: ""}).launcher is None


@pytest.mark.parametrize("name", ["ELASTICTRAIN_LAUNCHER", "ELASTICTRAIN_GENERATION"])
@pytest.mark.parametrize("text", ["-1", "x", "1.0"])
def test_a_launcher_whose_numbers_are_none_is_none(name: str, text: str) -> None:
    assert read_identity(LAUNCHED | {name: text}).launcher is None


POD = {"PET_NNODES": "2", "RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}


def test_a_pod_in_which_nobody_has_started_workers_is_refused() -> None:
    assert wrong_in(POD) == ["WORLD_SIZE"]


@pytest.mark.parametrize(
    "change",
    [{"WORLD_SIZE": "2"}, {"LOCAL_WORLD_SIZE": "4"}, {"PET_NNODES": "1:2"}, {"PET_NNODES": ""}],
)
def test_a_pod_that_is_a_worker_and_workers_of_torchrun_in_a_pod_are_taken_as_they_say(change: Mapping[str, str]) -> None:
    environment = POD | dict(change)
    assert pods_without_workers(environment) == 0
    assert read_identity(environment).world_size == int(environment["WORLD_SIZE"])


PLAN = RecoveryPlan("in_place", ("rank 1 on a", "b"), "SIGKILL\n\u2028 'x'", 1_700_000_000.5, 12)


def recovery_of(text: str | None) -> RecoveryPlan | None:
    launcher = read_identity(LAUNCHED | ({} if text is None else {RECOVERY: text})).launcher
    assert launcher is not None
    return launcher.recovery


@given(
    st.builds(
        RecoveryPlan,
        st.sampled_from(get_args(Rung)),
        st.lists(st.text(max_size=20), max_size=4).map(tuple),
        st.text(max_size=200),
        st.floats(0, 2e9),
        st.integers(0, 1 << 40),
    )
)
def test_a_plan_of_recovery_comes_through_the_environment(plan: RecoveryPlan) -> None:
    text = encode_record(plan).decode()
    assert "\0" not in text, "no environment could hold it"
    assert recovery_of(text) == plan


def test_a_plan_of_an_older_launcher_lacks_the_step() -> None:
    fields = json.loads(encode_record(PLAN))
    del fields["step"]
    assert recovery_of(json.dumps(fields)) == replace(PLAN, step=0)


@pytest.mark.parametrize(
    "text",
    [None, "", "{", "[]", "null", "7", encode_record(PLAN).decode()[:-1], encode_record(replace(PLAN, rung="?")).decode()],  # type: ignore[arg-type]
)
def test_a_plan_that_is_missing_or_garbled_is_none(text: str | None) -> None:
    assert recovery_of(text) is None
