"""What a launcher does so that workers recover in place, and where it has new ones started instead."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from elastictrain.config.composed import FaultGroup, LaunchGroup
from elastictrain.fault.reasons import Reason
from elastictrain.identity import RecoveryPlan, read_identity
from elastictrain.launch.membership.records import End, EndKind, HostState
from elastictrain.launch.worker_process import BUILT_FOR
from tests.unit.launch.membership.made import end, generation, member, observed, record
from tests.unit.launch.supervised import SupervisedHost

PORT = 4711
DETACHED_S = 2.5
REUSED_S, IN_PLACE_S, MARGIN_S = 10.0, 10.0, 10.0
INIT_S = 40.0
KILLED = {1: -9}
NOTICED = Reason(0, 71, "reduce", 6, "a peer is gone")


@pytest.fixture(autouse=True)
def free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastictrain.launch.supervisor.bind_everywhere", lambda _: PORT)


def made(folder: Path, *, standbys: int | Literal["auto"] = "auto", uses_gpus: bool = False) -> SupervisedHost:
    launch = LaunchGroup(standbys=standbys, grow_every_s=0.0, grow_after_s=0.0)
    return SupervisedHost(folder, launch, fault=FaultGroup(init_timeout_s=INIT_S), uses_gpus=uses_gpus)


@pytest.fixture
def host(tmp_path: Path) -> SupervisedHost:
    return made(tmp_path)


def near(second: float) -> object:
    return pytest.approx([second], abs=0.15)


def fail(host: SupervisedHost, number: int, *, codes: dict[int, int] | None = None, hosts: str = "a") -> None:
    """A generation whose workers end because one of them was killed, or with these codes."""
    host.run_workers(generation(number, hosts))
    host.end_workers(1, *([NOTICED] if codes is None else []), codes=KILLED if codes is None else codes)
    assert host.go(0.1) is None


def plan_of(host: SupervisedHost) -> RecoveryPlan | None:
    """What the newest workers are told of their recovery."""
    launcher = read_identity(host.workers.orders[-1][0][0]).launcher
    assert launcher is not None
    return launcher.recovery


def ends_of(host: SupervisedHost) -> list[End]:
    return [post for post in host.registry.posts if isinstance(post, End)]


class TestRungs:
    def test_the_first_workers_recover_from_nothing(self, host: SupervisedHost) -> None:
        host.run_workers(generation(1, "a"))
        assert plan_of(host) is None

    def test_after_a_death_the_others_keep_their_processes(self, host: SupervisedHost) -> None:
        began = time.time()
        fail(host, 1)
        assert host.diary.when("release") == []
        host.run_workers(generation(2, "a"))
        plan = plan_of(host)
        assert plan is not None
        assert (plan.rung, plan.lost, plan.step) == ("in_place", ("rank 1 on a",), NOTICED.step - 1)
        assert began <= plan.since <= time.time()
        assert plan.reason

    def test_where_only_connections_broke_new_workers_are_started(self, host: SupervisedHost) -> None:
        host.run_workers(generation(1, "a"))
        host.end_workers(1, NOTICED, codes={0: 71, 1: 71})
        assert host.go(0.1) is None
        host.run_workers(generation(2, "a"))
        assert host.diary.order("release", "start") == ["start", "release", "start"]
        plan = plan_of(host)
        assert plan is not None
        assert (plan.rung, plan.lost) == ("restart", ("a",))

    def test_on_other_hosts_it_is_another_rung(self, host: SupervisedHost) -> None:
        fail(host, 1, hosts="ab")
        host.run_workers(generation(2, "a"))
        plan = plan_of(host)
        assert plan is not None
        assert plan.rung == "regroup"

    def test_the_death_of_another_host_leaves_the_processes_of_this_one(self, host: SupervisedHost) -> None:
        host.run_workers(generation(1, "ab"))
        host.learn(ends=[end("b", EndKind.FAILED, 137)])
        assert host.go(0.1) is None
        host.end_workers(1, NOTICED, codes={0: 71})
        assert host.go(0.1) is None
        assert host.diary.when("release") == []
        host.run_workers(generation(2, "ab"))
        plan = plan_of(host)
        assert plan is not None
        assert (plan.rung, plan.lost) == ("in_place", ("b",))

    def test_after_two_recoveries_in_place_that_fail_all_are_new(self, host: SupervisedHost) -> None:
        rungs = []
        for number in range(1, 6):
            fail(host, number)
            plan = plan_of(host)
            rungs.append(plan.rung if plan is not None else "")
        assert rungs == ["", "in_place", "in_place", "restart", "restart"]
        assert len(host.diary.when("release")) == 2

    def test_a_first_step_ends_the_row(self, host: SupervisedHost) -> None:
        for number in range(1, 6):
            host.run_workers(generation(number, "a"))
            host.begin_training()
            assert host.go(0.1) is None
            fail_code = KILLED
            host.end_workers(1, NOTICED, codes=fail_code)
            assert host.go(0.1) is None
        assert host.diary.when("release") == []

    def test_the_time_counts_from_the_first_failure(self, host: SupervisedHost) -> None:
        fail(host, 1)
        host.run_workers(generation(2, "a"))
        first = plan_of(host)
        host.end_workers(1, codes=KILLED)
        assert host.go(0.1) is None
        host.run_workers(generation(3, "a"))
        second = plan_of(host)
        assert first is not None
        assert second is not None
        assert second.since == first.since

    @pytest.mark.parametrize("kind", [EndKind.LEAVING, EndKind.GROW])
    def test_an_orderly_end_needs_no_recovery(self, kind: EndKind, host: SupervisedHost) -> None:
        host.run_workers(generation(1, "ab"))
        host.learn(ends=[end("b", kind, 75)])
        assert host.go(0.1) is None
        host.end_workers(1, Reason(0, 75, "save", 7, "asked to stop"), codes={0: 75})
        assert host.go(0.1) is None
        host.run_workers(generation(2, "ab"))
        assert plan_of(host) is None

    def test_a_host_that_is_left_out_keeps_nobody(self, host: SupervisedHost) -> None:
        fail(host, 1, hosts="ab")
        host.learn(generation(2, "b", excluded=("a",)))
        assert host.go(0.2) is None
        assert host.registry.record.state is HostState.UNFIT
        assert len(host.diary.when("release")) == 1


class TestStandbys:
    def kept(self, host: SupervisedHost) -> tuple[list[str], tuple[str, ...]]:
        """The ranks that are likely for the standbys after the first step, and what they are bound to."""
        host.run_workers(replace(generation(1, "a"), members=(member("a", processes=3),)))
        assert host.go(5.0) is None
        assert host.workers.standbys == []
        host.begin_training()
        assert host.go(5.0) is None
        ((environments, bound),) = host.workers.standbys
        places = host.workers.orders[0][0]
        assert list(environments) == [one | {"ELASTICTRAIN_RESTARTED": "1"} for one in places[: len(environments)]]
        return [one["RANK"] for one in environments], bound

    @pytest.mark.parametrize(
        ("standbys", "uses_gpus", "expected"),
        [
            ("auto", False, (["0"], ())),
            ("auto", True, (["0", "1", "2"], BUILT_FOR)),
            (0, False, ([], ())),
            (2, False, (["0", "1"], ())),
            (2, True, (["0", "1"], BUILT_FOR)),
            (9, True, (["0", "1", "2"], BUILT_FOR)),
        ],
    )
    def test_as_many_as_wanted_are_prepared_after_the_first_step(
        self, standbys: int | Literal["auto"], uses_gpus: bool, expected: tuple[list[str], tuple[str, ...]], tmp_path: Path
    ) -> None:
        assert self.kept(made(tmp_path, standbys=standbys, uses_gpus=uses_gpus)) == expected

    @pytest.mark.parametrize(
        ("standbys", "uses_gpus", "ranks", "bound"),
        [
            ("auto", False, ["2", "3"], ()),
            ("auto", True, ["2", "3"], ("LOCAL_RANK",)),
            (0, False, [], ()),
            (1, True, ["2"], ("LOCAL_RANK",)),
        ],
    )
    def test_a_spare_host_prepares_for_the_place_of_a_member(
        self, standbys: int | Literal["auto"], uses_gpus: bool, ranks: list[str], bound: tuple[str, ...], tmp_path: Path
    ) -> None:
        """Nothing else needs its memory."""
        host = SupervisedHost(tmp_path, LaunchGroup(standbys=standbys, max_hosts=2), uses_gpus=uses_gpus)
        host.registry.record = record("a", processes=2)
        members = (member("b", processes=2), member("c", processes=2))
        for number in (1, 2):
            host.learn(replace(generation(number, "bc"), members=members))
            assert host.go(3.0) is None
        assert len(host.workers.standbys) == 2, "once for each generation"
        for environments, found in host.workers.standbys:
            assert [one["RANK"] for one in environments] == ranks
            assert {one["WORLD_SIZE"] for one in environments} <= {"4"}
            assert found == bound
        assert host.diary.when("start") == []


class TestLimits:
    """Workers that hang on their way into a generation are ended, and their host is to blame."""

    def assert_ended(self, host: SupervisedHost, *, after_s: float, began_s: float) -> None:
        assert host.go(after_s - 0.5) is None
        assert ends_of(host) == []
        assert host.go(5.0) is None
        (posted,) = ends_of(host)
        assert (posted.kind, posted.exit_code, posted.blames) == (EndKind.FAILED, 71, ("a",))
        assert host.diary.when("detach") == near(began_s + after_s)
        assert host.diary.when("kill") == near(began_s + after_s + DETACHED_S)
        assert not host.workers.running

    @pytest.mark.parametrize(("reused", "limit_s"), [(True, REUSED_S), (False, INIT_S + MARGIN_S)])
    def test_who_does_not_go_to_meet_the_others(self, reused: bool, limit_s: float, host: SupervisedHost) -> None:
        host.workers.reused, host.workers.silent = reused, [1]
        host.run_workers(generation(1, "ab"))
        (began_s,) = host.diary.when("start")
        host.diary.until_s = host.diary.now_s
        self.assert_ended(host, after_s=limit_s - (host.diary.elapsed_s - began_s), began_s=host.diary.elapsed_s)

    def test_who_does_not_make_its_groups_in_place(self, host: SupervisedHost) -> None:
        fail(host, 1)
        host.registry.posts.clear()
        host.workers.reused, host.workers.attached = True, False
        host.run_workers(generation(2, "a"))
        began_s = host.diary.when("start")[-1]
        left_s = REUSED_S + IN_PLACE_S - (host.diary.elapsed_s - began_s)
        self.assert_ended(host, after_s=left_s, began_s=host.diary.elapsed_s)

    def test_a_first_start_has_its_own_limits_for_making_groups(self, host: SupervisedHost) -> None:
        host.workers.attached = False
        host.run_workers(generation(1, "ab"))
        assert host.go(10 * INIT_S) is None
        assert ends_of(host) == []

    def test_who_has_met_the_others_is_not_ended(self, host: SupervisedHost) -> None:
        fail(host, 1)
        host.registry.posts.clear()
        host.workers.reused = True
        host.run_workers(generation(2, "a"))
        assert host.go(10 * INIT_S) is None
        assert ends_of(host) == []

    def test_an_end_that_is_under_way_is_not_explained_by_it(self, host: SupervisedHost) -> None:
        host.workers.silent = [0]
        host.run_workers(generation(1, "ab"))
        host.learn(observed={"c": observed(record("c"), changed_s=host.diary.now_s)}, ends=[end("b", EndKind.LEAVING, 75)])
        assert host.go(INIT_S + MARGIN_S + 20.0) is None
        assert ends_of(host) == []
