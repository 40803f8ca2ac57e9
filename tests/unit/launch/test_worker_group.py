from dataclasses import replace

import pytest

from elastictrain.identity import Identity, Launcher, RecoveryPlan, read_identity
from elastictrain.launch.membership.records import Generation, GenerationMember
from elastictrain.launch.rank_variables import plan_workers
from tests.unit.launch.membership.made import generation

A = GenerationMember("a-1", "a", "10.0.0.1", 4000, 8)
B = GenerationMember("b-1", "b", "10.0.0.2", 4001, 2)


def plan(generation: Generation, host: str = "b-1", *, restarted: bool = True) -> list[dict[str, str]]:
    return plan_workers(generation, host, folder="/tmp/x", pid=77, restarted=restarted)


def group(*members: GenerationMember) -> Generation:
    return replace(generation(7, "z"), members=members, master_port=5000)


def test_the_workers_of_the_second_host() -> None:
    environments = plan(group(A, B))
    assert len(environments) == 2
    assert environments[1] == {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "ROLE_RANK": "9",
        "WORLD_SIZE": "10",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": "10",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "5000",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "ELASTICTRAIN_LAUNCHER": "77",
        "ELASTICTRAIN_GENERATION": "7",
        "ELASTICTRAIN_STORE_HOST": "a",
        "ELASTICTRAIN_RESTARTED": "1",
        "ELASTICTRAIN_LAUNCH_FOLDER": "/tmp/x",
        "ELASTICTRAIN_RECOVERY": "",
        "ELASTICTRAIN_POISONED": "",
    }


def test_the_first_host_has_the_workers_that_it_says() -> None:
    environments = plan(group(A, B), "a-1")
    assert [environment["RANK"] for environment in environments] == [str(rank) for rank in range(8)]
    assert {environment["MASTER_ADDR"] for environment in environments} == {"10.0.0.1"}


def test_a_single_host_needs_no_network() -> None:
    assert [(one["RANK"], one["MASTER_ADDR"], one["MASTER_PORT"]) for one in plan(group(B))] == [
        ("0", "127.0.0.1", "5000"),
        ("1", "127.0.0.1", "5000"),
    ]


@pytest.mark.parametrize("restarted", [True, False])
def test_workers_know_who_they_are_and_their_launcher(restarted: bool) -> None:
    identity = read_identity(plan(group(A, B), restarted=restarted)[0])
    launcher = Launcher(77, 7, restarted, "/tmp/x")
    assert identity == Identity(8, 10, 0, 2, identity.host, launched=True, launcher=launcher)


def test_workers_know_how_they_follow_a_failure() -> None:
    recovery = RecoveryPlan("in_place", ("rank 9 on b",), "it was killed\nby 'somebody'", 1_700_000_000.25, 12)
    environments = plan_workers(group(A, B), "b-1", folder="/tmp/x", pid=77, restarted=True, recovery=recovery)
    for environment in environments:
        launcher = read_identity(environment).launcher
        assert launcher is not None
        assert launcher.recovery == recovery
