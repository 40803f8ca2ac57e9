import re
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastictrain.config.composed import FaultGroup, LaunchGroup
from elastictrain.errors import RunHeldError
from elastictrain.fault.reasons import Reason, SlowRank
from elastictrain.launch.membership.observation import ClusterState, HostObservation
from elastictrain.launch.membership.records import End, EndKind, Generation, GenerationOutcome, HostState
from elastictrain.launch.records import GenerationEnded, LauncherEnded, WorkersNotForked
from elastictrain.launch.workers_of_generation import WorkersEnd
from tests.unit.launch.membership.made import end, generation, observed, record
from tests.unit.launch.supervised import FakeSaverProcess, SupervisedHost

RETRY_S = 20.0
STOP_LIMIT_S = 7.0
DETACHED_S = 2.5
SHORT = FaultGroup(save_timeout_s=5.0, shutdown_grace_s=2.0)
GROWING = LaunchGroup(grow_every_s=0.0, grow_after_s=0.0)
PORT = 4711
UNFIT = Reason(0, 69, "start", 0, "GPU 3 has fallen off the bus")
STOPPED = Reason(0, 75, "save", 7, "asked to stop")


@pytest.fixture(autouse=True)
def free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastictrain.launch.supervisor.bind_everywhere", lambda _: PORT)


@pytest.fixture
def host(tmp_path: Path) -> SupervisedHost:
    return SupervisedHost(tmp_path, GROWING, fault=SHORT)


def near(*times_s: float) -> Any:
    """The turn at one of these moments, or the one after it."""
    return pytest.approx(list(times_s), abs=0.15)


def ends_of(posts: Iterable[Generation | End]) -> list[tuple[EndKind, str, int]]:
    return [(post.kind, post.host, post.exit_code) for post in posts if isinstance(post, End)]


def recorded_ends(host: SupervisedHost) -> list[tuple[int, str]]:
    return [(number, event.kind) for number, event in host.recorder.events if isinstance(event, GenerationEnded)]


def newcomer(host: SupervisedHost) -> dict[str, HostObservation]:
    return {"c": observed(record("c"), changed_s=host.diary.now_s, since_s=0.0)}


def told_deadline_in_s(host: SupervisedHost, *, asked: int = 0) -> float:
    """From when the workers were asked; nothing but the clock of the test has moved since then."""
    return host.workers.asked[asked].deadline - time.time()


class TestUnfit:
    def unfit(self, folder: Path, *, retry_s: float = RETRY_S) -> SupervisedHost:
        host = SupervisedHost(folder, LaunchGroup(retry_unfit_s=retry_s))
        host.run_workers(generation(1, "ab"))
        host.unfit = UNFIT.sentence
        host.end_workers(1, UNFIT)
        return host

    def test_it_rests_and_comes_back_when_it_passes_its_checks(self, tmp_path: Path) -> None:
        host = self.unfit(tmp_path)
        ended_s = host.diary.elapsed_s
        assert host.go(RETRY_S - 0.5) is None
        line = host.registry.record
        assert (line.state, line.reason, line.ended) == (HostState.UNFIT, UNFIT.sentence, 1)
        assert ends_of(host.registry.posts) == [(EndKind.FAILED, "a", 69)]
        assert host.diary.when("check") == []
        assert host.go(RETRY_S) is None
        assert host.diary.when("check") == near(ended_s + RETRY_S)
        assert [UNFIT.sentence in text for text in host.sentences("unfit")] == [True]
        assert (host.registry.record.state, host.registry.record.reason) == (HostState.UNFIT, UNFIT.sentence)
        host.unfit = ""
        assert host.go(3 * RETRY_S) is None
        assert host.diary.when("check") == near(ended_s + RETRY_S, ended_s + 2 * RETRY_S)
        assert len(host.sentences("passes")) == 1
        line = host.registry.record
        assert (line.state, line.reason, line.ended) == (HostState.READY, "", 1)
        assert line.master_port == PORT
        assert host.diary.when("start") == near(0.1)

    @pytest.mark.parametrize(("from_host", "unfit"), [("b", True), ("a", False)])
    def test_it_rests_also_if_another_host_was_the_first_to_say_that_the_generation_has_failed(
        self, from_host: str, unfit: bool, tmp_path: Path
    ) -> None:
        """A preflight of all hosts finds one unfit: all workers end in the same moment, those of the others with 71."""
        host = SupervisedHost(tmp_path, LaunchGroup(retry_unfit_s=RETRY_S))
        host.run_workers(generation(1, "ab"))
        if from_host == "b":
            host.learn(ends=[end("b", EndKind.FAILED, 71)])
        else:
            host.ask(notice_s=30.0)
        assert host.go(0.1) is None
        host.end_workers(1, UNFIT)
        host.go(0.5)
        line = host.registry.record
        assert (line.state is HostState.UNFIT) is unfit
        assert ends_of(host.registry.posts) == [(EndKind.FAILED, "a", 69) if unfit else (EndKind.LEAVING, "a", 75)]
        assert recorded_ends(host) == [(1, "failed" if unfit else "leaving")]

    def test_what_the_others_say_of_it_does_not_put_off_the_next_look(self, tmp_path: Path) -> None:
        host = self.unfit(tmp_path)
        ended_s = host.diary.elapsed_s
        assert host.go(RETRY_S / 2) is None
        host.learn(generation(2, "b", excluded=("a",)))
        assert host.go(RETRY_S) is None
        assert host.diary.when("check") == near(ended_s + RETRY_S)
        assert (host.registry.record.state, host.registry.record.ended) == (HostState.UNFIT, 2)

    def test_one_that_is_left_out_rests_as_well(self, tmp_path: Path) -> None:
        host = SupervisedHost(tmp_path, LaunchGroup(retry_unfit_s=RETRY_S))
        host.learn(generation(3, "b", excluded=("a",)))
        assert host.go(RETRY_S - 0.5) is None
        line = host.registry.record
        assert (line.state, line.ended) == (HostState.UNFIT, 3)
        assert "made-up" in line.reason
        assert host.go(2 * RETRY_S) is None
        assert host.diary.when("check") == near(RETRY_S)
        assert (host.registry.record.state, host.registry.record.ended) == (HostState.READY, 3)

    def test_one_that_holds_up_the_others_ends_in_order_and_rests(self, tmp_path: Path) -> None:
        host = SupervisedHost(tmp_path, LaunchGroup(retry_unfit_s=RETRY_S))
        host.run_workers(generation(1, "abc"))
        host.workers.slow = SlowRank(0, "rank 0 is slow")
        assert host.go(1.0) is None
        assert ends_of(host.registry.posts) == [(EndKind.LEAVING, "a", 69)]
        assert (host.diary.when("kill"), host.diary.when("detach")) == ([], [])
        # What it keeps in memory is not there for the next generation.
        message = host.workers.asked[-1]
        assert (message.reason, message.host_stays) == ("rank 0 is slow", False)
        others = {"b": observed(record("b", HostState.BUSY), changed_s=host.diary.now_s)}
        host.learn(observed=others)
        host.end_workers(1, STOPPED)
        assert host.go(0.5) is None
        line = host.registry.record
        assert (line.state, line.reason, line.ended) == (HostState.UNFIT, "rank 0 is slow", 1)
        assert recorded_ends(host) == [(1, "leaving")]
        host.learn(generation(2, "bc"))
        assert host.go(RETRY_S - 1.5) is None
        assert host.registry.record.state is HostState.UNFIT
        assert host.go(2 * RETRY_S) is None
        assert host.registry.record.state is HostState.READY

    @pytest.mark.parametrize(("unfit", "retry_s", "code"), [("", 0.0, None), ("", RETRY_S, None), ("no GPU", 0.0, 69)])
    def test_a_slow_host_takes_part_again_at_once_if_nobody_else_is_left(
        self, unfit: str, retry_s: float, code: int | None, tmp_path: Path
    ) -> None:
        host = SupervisedHost(tmp_path, LaunchGroup(retry_unfit_s=retry_s))
        host.run_workers(generation(1, "abc"))
        host.workers.slow = SlowRank(0, "rank 0 is slow")
        assert host.go(1.0) is None
        host.learn(observed={"b": observed(record("b", HostState.BUSY), changed_s=host.diary.now_s - 100.0)})
        host.unfit, host.committed_steps[0.0] = unfit, STOPPED.step
        host.end_workers(1, STOPPED)
        assert host.go(2.0) == code
        assert host.registry.record.state is (HostState.READY if code is None else HostState.GONE)
        assert len(host.diary.when("check")) == 1

    def test_another_host_that_is_left_out_leaves_this_one_fit(self, tmp_path: Path) -> None:
        host = SupervisedHost(tmp_path, LaunchGroup(retry_unfit_s=RETRY_S))
        host.run_workers(generation(1, "ab"))
        host.learn(ends=[end("b", EndKind.LEAVING, 69)])
        assert host.go(1.0) is None
        assert host.workers.asked[-1].host_stays
        host.end_workers(1, STOPPED)
        assert host.go(1.0) is None
        assert (host.registry.record.state, host.registry.record.ended) == (HostState.READY, 1)

    def test_what_another_host_failed_of_is_no_failing_of_this_one(self, tmp_path: Path) -> None:
        host = SupervisedHost(tmp_path, LaunchGroup(retry_unfit_s=RETRY_S))
        host.run_workers(generation(1, "ab"))
        host.learn(ends=[end("b", EndKind.FAILED, 69)])
        assert host.go(3.0) is None
        assert (host.registry.record.state, host.registry.record.ended) == (HostState.READY, 1)

    def test_it_leaves_where_nobody_wants_it_looked_at_again(self, tmp_path: Path) -> None:
        host = self.unfit(tmp_path, retry_s=0.0)
        host.unfit = ""
        assert host.go(5.0) == 69
        assert host.diary.elapsed_s < 0.5
        assert host.diary.when("check") == []
        assert host.diary.order("post failed", "say gone", "close registry") == ["post failed", "say gone", "close registry"]
        assert (host.registry.record.state, host.registry.record.reason) == (HostState.GONE, UNFIT.sentence)
        assert host.said[-1][1].startswith(f"stopped with exit code 69: {UNFIT.sentence}; ")


class TestAskedToLeave:
    @pytest.mark.parametrize("reads", [0, 1], ids=["before storage was read", "after it"])
    def test_it_leaves_at_once_where_nothing_runs(self, reads: int, host: SupervisedHost) -> None:
        host.registry.known = replace(host.registry.known, reads=reads)
        assert host.go(1.0) is None
        host.ask(notice_s=30.0, reason="spot")
        assert host.go(60.0) == 75
        assert host.diary.elapsed_s == 1.0
        assert [what for _, what in host.diary.lines] == [
            "close-workers", "say gone", "close registry", "close heartbeat", "wait-30",
        ]  # fmt: skip
        assert "(spot)" in host.registry.record.reason
        assert host.is_said_at_the_end("code 75", "(spot)", "runs/x")
        assert host.registry.posts == []

    @pytest.mark.parametrize(("notice_s", "waited"), [(12.0, "wait-12"), (90.0, "wait-30"), (None, "wait-30")])
    def test_it_leaves_when_what_it_ended_has_given_everything_back(
        self, notice_s: float | None, waited: str, host: SupervisedHost
    ) -> None:
        host.ask(notice_s=notice_s, reason="spot")
        assert host.go(60.0) == 75
        # The others know by then that this host is gone.
        assert host.diary.order("say gone", waited) == ["say gone", waited]

    @pytest.mark.parametrize(
        ("notice_s", "limit_s"), [(4.5, 4.5), (60.0, 60.0), (None, STOP_LIMIT_S)], ids=["soon", "late", "nobody says when"]
    )
    def test_workers_are_asked_again_and_again_and_killed_in_the_end(
        self, notice_s: float | None, limit_s: float, host: SupervisedHost
    ) -> None:
        host.run_workers(generation(1, "ab"))
        asked_s = host.diary.elapsed_s
        host.ask(notice_s=notice_s, reason="spot")
        assert host.go(0.1) is None
        assert told_deadline_in_s(host) == pytest.approx(limit_s, abs=1.0)
        assert host.workers.asked[-1].reason == "spot", "workers say the rest"
        assert host.go(3.3) is None
        assert host.diary.when("ask") == near(*(asked_s + 0.1 + second for second in (0, 1, 2, 3)))
        assert host.go(100.0) == 75
        assert host.diary.when("kill") == near(asked_s + limit_s)
        assert host.diary.elapsed_s == pytest.approx(asked_s + limit_s, abs=0.15)
        assert ends_of(host.registry.posts) == [(EndKind.LEAVING, "a", 75)]
        assert [line.ended for line in host.heartbeat.told] == [0, 1]
        assert recorded_ends(host) == [(1, "leaving")]
        assert (host.registry.record.state, host.registry.record.ended) == (HostState.GONE, 1)

    @pytest.mark.parametrize(("hosts", "has_store"), [("a", True), ("ab", True), ("ba", False)])
    def test_the_first_host_has_the_store(self, host: SupervisedHost, hosts: str, has_store: bool) -> None:
        made = generation(1, hosts)
        host.run_workers(made)
        ((environments, store_port),) = host.workers.orders
        assert store_port == (made.master_port if has_store else 0)
        assert len(environments) == made.members[0].processes

    def test_workers_that_end_in_time_are_not_killed(self, host: SupervisedHost) -> None:
        host.run_workers(generation(1, "ab"))
        host.ask(notice_s=30.0)
        assert host.go(2.0) is None
        host.committed_steps[0.0] = STOPPED.step
        host.end_workers(1, STOPPED)
        assert host.go(30.0) == 75
        assert host.diary.elapsed_s == pytest.approx(2.2, abs=0.15)
        assert host.diary.when("kill") == []
        assert ends_of(host.registry.posts) == [(EndKind.LEAVING, "a", 75)]
        assert host.is_said_at_the_end("step 7 is", "runs/x")


class TestLessTime:
    """What is under way has less time once this host is wanted back sooner."""

    @pytest.mark.parametrize("why", ["growth", "another leaves", "a later notice"])
    def test_the_tighter_deadline_counts(self, why: str, host: SupervisedHost) -> None:
        host.run_workers(generation(1, "ab"))
        if why == "growth":
            host.learn(observed=newcomer(host))
        elif why == "another leaves":
            host.learn(ends=[end("b", EndKind.LEAVING, 75)])
        else:
            host.ask(notice_s=10.0)
        assert host.go(2.0) is None
        posts = len(host.registry.posts)
        asked_s = host.diary.elapsed_s
        host.ask(notice_s=3.0, reason="spot")
        assert host.go(1.2) is None
        # They are asked again within a second.
        assert told_deadline_in_s(host, asked=-1) == pytest.approx(2.5, abs=0.7)
        assert host.go(30.0) == 75
        assert host.diary.when("kill") == near(asked_s + 3.0)
        # The next generation must not count on it.
        leaves = [] if why == "a later notice" else [(EndKind.LEAVING, "a", 75)]
        assert ends_of(host.registry.posts[posts:]) == leaves

    def test_a_looser_one_does_not(self, host: SupervisedHost) -> None:
        host.run_workers(generation(1, "ab"))
        host.ask(notice_s=4.0)
        assert host.go(1.0) is None
        host.ask(notice_s=60.0)
        assert host.go(30.0) == 75
        assert host.diary.when("kill") == near(4.1)


class TestWaitingForTheSaver:
    def left_at(self, host: SupervisedHost, *reasons: Reason, notice_s: float | None = 30.0) -> float:
        """How long the launcher stays when its workers have left."""
        host.run_workers(generation(1, "ab"))
        host.ask(notice_s=notice_s)
        assert host.go(1.0) is None
        host.end_workers(1, *reasons)
        ended_s = host.diary.elapsed_s
        assert host.go(100.0) == 75
        return host.diary.elapsed_s - ended_s

    def test_it_stays_until_storage_has_what_the_workers_left(self, host: SupervisedHost) -> None:
        host.committed_steps |= {0.0: 4, 5.0: 6, 9.0: 7}
        self.left_at(host, STOPPED)
        assert host.diary.elapsed_s == pytest.approx(9.0, abs=0.15)
        assert host.is_said_at_the_end("step 7 is", "runs/x")

    def test_the_newest_step_of_any_worker_counts(self, host: SupervisedHost) -> None:
        host.committed_steps |= {0.0: 4, 5.0: 7, 9.0: 8}
        others = (msgspec.structs.replace(STOPPED, rank=rank, step=step) for rank, step in ((1, 8), (2, 0)))
        self.left_at(host, STOPPED, *others)
        assert host.diary.elapsed_s == pytest.approx(9.0, abs=0.15)

    def test_it_stays_until_the_deadline_at_most(self, host: SupervisedHost) -> None:
        host.committed_steps[0.0] = 6
        # One second of the 30 is for the last words.
        assert self.left_at(host, STOPPED) == pytest.approx(28.0, abs=0.15)
        assert host.is_said_at_the_end("step 6 is", "step 7 is", "memory")
        assert "process 4242" in host.said[-1][1]

    def test_a_long_wait_is_told(self, host: SupervisedHost) -> None:
        host.committed_steps |= {0.0: 6, 20.0: 7}
        self.left_at(host, STOPPED)
        (told,) = host.sentences("waiting for the saver")
        assert "process 4242" in told
        assert "step 7" in told

    def test_workers_that_were_killed_leave_no_word_but_a_snapshot(self, host: SupervisedHost) -> None:
        """Nobody starts again, so the saver is to write it now: as pid 1 of a container this process ends it, too."""
        host.committed_steps |= {0.0: 0, 9.0: 40}
        host.remembered_step = 40
        host.run_workers(generation(1, "ab"))
        host.end_workers(-9)
        host.ask(notice_s=30.0)
        assert host.go(100.0) == 75
        assert host.diary.when("flush") == near(0.2)
        assert host.diary.elapsed_s == pytest.approx(9.0, abs=0.15)
        assert host.is_said_at_the_end("step 40 is", "runs/x")

    def test_it_does_not_stay_when_the_saver_has_nothing_more_to_write(self, host: SupervisedHost) -> None:
        host.committed_steps[0.0] = 30
        host.remembered_step = 40
        host.saver = FakeSaverProcess(host.diary, until_s=4.0)
        assert self.left_at(host) == pytest.approx(3.0, abs=0.3)
        assert host.is_said_at_the_end("step 30 is", "step 40 is", "memory", "nobody")

    def test_it_does_not_stay_where_there_is_no_saver(self, host: SupervisedHost) -> None:
        host.remembered_step, host.saver = 40, None
        assert self.left_at(host) == pytest.approx(0.0)
        assert host.is_said_at_the_end("step 40 is", "memory", "nobody")

    def test_a_run_that_is_given_up_is_saved_as_well(self, tmp_path: Path) -> None:
        host = SupervisedHost(tmp_path, LaunchGroup(retry_unfit_s=0.0), fault=FaultGroup(notice_s=20.0))
        host.committed_steps |= {0.0: 30, 9.0: 40}
        host.remembered_step = 40
        host.run_workers(generation(1, "ab"))
        host.end_workers(1, UNFIT)
        assert host.go(60.0) == 69
        number, ended = host.recorder.events[-1]
        assert (number, ended) == (1, LauncherEnded(exit_code=69, reason=UNFIT.sentence))
        assert host.diary.elapsed_s == pytest.approx(9.0, abs=0.15)
        assert host.is_said_at_the_end("step 40 is", "runs/x")

    def test_storage_that_does_not_answer_is_not_taken_for_empty(self, host: SupervisedHost) -> None:
        host.storage_answers = False
        host.ask(notice_s=30.0)
        assert host.go(60.0) == 75
        assert host.is_said_at_the_end("runs/x", "unknown")

    def test_it_does_not_stay_where_nobody_ends_it(self, host: SupervisedHost) -> None:
        assert self.left_at(host, STOPPED, notice_s=None) == pytest.approx(0.0)

    @pytest.mark.parametrize(
        "reasons",
        [(), (STOPPED,), (msgspec.structs.replace(STOPPED, exit_code=70, step=9),)],
        ids=["no word", "in storage already", "not saved by one that failed"],
    )
    def test_it_does_not_stay_for_nothing(self, reasons: tuple[Reason, ...], host: SupervisedHost) -> None:
        host.committed_steps[0.0] = 7
        assert self.left_at(host, *reasons) == pytest.approx(0.0)


class TestNothingToSave:
    def test_workers_of_a_broken_group_are_detached_and_not_asked_and_who_does_not_obey_is_killed(
        self, host: SupervisedHost
    ) -> None:
        host.run_workers(generation(1, "ab"))
        host.learn(ends=[end("b", EndKind.FAILED, 70)])
        broken_s = host.diary.elapsed_s
        assert host.go(10.0) is None
        assert host.diary.when("ask") == []
        assert host.diary.when("detach") == near(broken_s)
        assert host.diary.when("kill") == near(broken_s + DETACHED_S)
        assert ends_of(host.registry.posts) == []
        assert recorded_ends(host) == [(1, "failed")]
        assert (host.registry.record.state, host.registry.record.ended) == (HostState.READY, 1)

    def test_those_that_end_by_themselves_before_are_not_killed(self, host: SupervisedHost) -> None:
        host.run_workers(generation(1, "ab"))
        host.learn(ends=[end("b", EndKind.FAILED, 70)])
        assert host.go(1.0) is None
        host.end_workers(1, Reason(0, 71, "reduce", 5, "a peer is gone"))
        assert host.go(10.0) is None
        assert host.diary.when("kill") == []
        assert ends_of(host.registry.posts) == []

    def test_a_host_whose_workers_were_not_met_is_lost(self, host: SupervisedHost) -> None:
        host.run_workers(generation(1, "abc"))
        host.end_workers(1, Reason(0, 71, "rendezvous", 0, "not met", missing=(2,)))
        assert host.go(1.0) is None
        assert ends_of(host.registry.posts) == [(EndKind.LOST, "a", 71)]
        (posted,) = (post for post in host.registry.posts if isinstance(post, End))
        assert posted.lost == "c"

    @pytest.mark.parametrize("why", ["leaving", "growth"])
    def test_an_orderly_end_that_is_under_way_is_cut_short(self, why: str, tmp_path: Path) -> None:
        host = SupervisedHost(tmp_path, GROWING)
        host.run_workers(generation(1, "ab"))
        if why == "leaving":
            host.ask(notice_s=120.0)
        else:
            host.learn(observed=newcomer(host))
        assert host.go(3.0) is None
        host.learn(ends=[end("b", EndKind.FAILED, 70)])
        broken_s = host.diary.elapsed_s
        assert host.go(10.0) == (75 if why == "leaving" else None)
        assert host.diary.when("detach") == near(broken_s)
        assert host.diary.when("kill") == near(broken_s + DETACHED_S)
        kind = EndKind.LEAVING if why == "leaving" else EndKind.GROW
        assert [one for one, *_ in ends_of(host.registry.posts)] == [kind]

    def test_a_deadline_that_comes_first_stays(self, host: SupervisedHost) -> None:
        host.run_workers(generation(1, "ab"))
        asked_s = host.diary.elapsed_s
        host.ask(notice_s=2.0)
        assert host.go(1.5) is None
        host.learn(ends=[end("b", EndKind.FAILED, 70)])
        assert host.go(10.0) == 75
        assert host.diary.when("kill") == near(asked_s + 2.0)


class TestOrderlyEnd:
    def test_of_our_own_for_growth(self, host: SupervisedHost) -> None:
        host.run_workers(generation(1, "ab"))
        host.learn(observed=newcomer(host))
        asked_s = host.diary.elapsed_s
        assert host.go(2.5) is None
        assert host.diary.when("ask") == near(*(asked_s + 0.1 + second for second in (0, 1, 2)))
        assert told_deadline_in_s(host) == pytest.approx(STOP_LIMIT_S, abs=1.0)
        assert host.diary.order("post grow", "say ended") == ["post grow", "say ended"]
        host.end_workers(1, STOPPED)
        assert host.go(1.0) is None
        assert ends_of(host.registry.posts) == [(EndKind.GROW, "a", 0)]
        assert [line.ended for line in host.heartbeat.told] == [0, 1]
        assert host.diary.when("kill") == []
        assert recorded_ends(host) == [(1, "grow")]
        line = host.registry.record
        assert (line.state, line.ended, line.master_port) == (HostState.READY, 1, PORT)

    def test_of_another_host_is_followed_and_not_told_again(self, host: SupervisedHost) -> None:
        host.run_workers(generation(1, "ba"))
        assert not host.registry.attentive
        host.learn(ends=[end("b", EndKind.LEAVING, 75)])
        asked_s = host.diary.elapsed_s
        assert host.go(1.5) is None
        assert host.diary.when("ask") == near(asked_s + 0.1, asked_s + 1.1)
        assert host.workers.asked[-1].reason == "leaving-b"
        # Whatever they say of their end, it was asked for.
        host.end_workers(1, Reason(0, 70, "reduce", 5, "boom"))
        assert host.go(1.0) is None
        assert ends_of(host.registry.posts) == []
        assert [line.end for line in host.heartbeat.told] == [None]
        assert recorded_ends(host) == [(1, "leaving")]
        assert (host.registry.record.state, host.registry.record.ended) == (HostState.READY, 1)
        assert host.registry.attentive

    def test_workers_that_do_not_end_are_killed(self, host: SupervisedHost) -> None:
        host.run_workers(generation(1, "ba"))
        host.learn(ends=[end("b", EndKind.LEAVING, 75)])
        asked_s = host.diary.elapsed_s
        assert host.go(20.0) is None
        assert host.diary.when("kill") == near(asked_s + STOP_LIMIT_S)


class TestDelayedStart:
    PAUSE_S = 5.0

    def adopted(self, host: SupervisedHost) -> None:
        host.learn(replace(generation(1, "ab"), pause_s=self.PAUSE_S))
        assert host.go(2.0) is None
        assert host.registry.record.state is HostState.BUSY
        assert host.diary.order("follow 1", "start") == ["follow 1"]

    def test_workers_start_after_the_pause(self, host: SupervisedHost) -> None:
        self.adopted(host)
        assert host.go(10.0) is None
        assert host.diary.when("start") == near(self.PAUSE_S)

    def test_a_generation_that_is_broken_before_never_starts(self, host: SupervisedHost) -> None:
        self.adopted(host)
        host.learn(ends=[end("b", EndKind.FAILED, 70)])
        assert host.go(10.0) is None
        assert host.diary.order("start", "ask", "kill", "say ready") == ["say ready"]
        assert host.diary.when("say ready") == near(2.1)
        assert ends_of(host.registry.posts) == []
        assert recorded_ends(host) == [(1, "failed")]
        assert host.registry.record.ended == 1

    def test_nor_does_one_of_a_host_that_leaves(self, host: SupervisedHost) -> None:
        self.adopted(host)
        host.ask(notice_s=30.0)
        assert host.go(10.0) == 75
        assert host.diary.elapsed_s == pytest.approx(2.1, abs=0.15)
        assert host.diary.order("start", "ask") == []
        assert ends_of(host.registry.posts) == [(EndKind.LEAVING, "a", 75)]
        assert recorded_ends(host) == [(1, "leaving")]
        assert host.registry.record.ended == 1


@pytest.mark.parametrize("why", ["growth", "another leaves"])
def test_the_last_step_wins_over_what_was_asked(why: str, host: SupervisedHost) -> None:
    host.run_workers(generation(1, "ab"))
    if why == "growth":
        host.learn(observed=newcomer(host))
    else:
        host.learn(ends=[end("b", EndKind.LEAVING, 75)])
    assert host.go(1.0) is None
    host.end_workers(0)
    assert host.go(1.0) is None
    asked_first = [(EndKind.GROW, "a", 0)] if why == "growth" else []
    assert ends_of(host.registry.posts) == [*asked_first, (EndKind.DONE, "a", 0)]
    assert host.diary.order("post done", "say ended")[-2:] == ["post done", "say ended"]
    assert recorded_ends(host) == [(1, "done")]
    assert host.sentences("ended here") == []
    host.learn(generation(2, "ab", outcome=GenerationOutcome.DONE))
    assert host.go(1.0) == 0


class TestSayingWhatIsWaitedFor:
    def test_is_done_when_it_lasts_and_when_it_changes(self, tmp_path: Path) -> None:
        host = SupervisedHost(tmp_path, LaunchGroup(min_hosts=2, wait_s=0.0))
        broken = {"c": observed(record("c", HostState.UNFIT, reason="no disk"), changed_s=host.diary.now_s)}
        assert host.go(1.0) is None
        host.learn(observed=broken)
        assert host.go(1.0) is None
        # Nothing has lasted yet, though something has been waited for all along.
        assert host.said == []
        assert host.go(10.0) is None
        alone = "(ready: a"
        assert [(alone in text, "(no disk)" in text) for _, text in host.said] == [(True, True)]
        assert [said_s for said_s, _ in host.said] == near(2.5)
        host.learn(observed={})
        assert host.go(1.0) is None
        assert len(host.said) == 1
        assert host.go(10.0) is None
        assert [(alone in text, "(no disk)" in text) for _, text in host.said[1:]] == [(True, False)]

    def test_tells_until_when(self, tmp_path: Path) -> None:
        host = SupervisedHost(tmp_path, LaunchGroup(min_hosts=2, wait_s=60.0))
        assert host.go(10.0) is None
        assert len(host.said) == 1
        assert host.said[0][1].endswith("(ready: a), for 58 s at most")

    def test_is_not_done_where_nobody_needs_to_know(self, tmp_path: Path) -> None:
        host = SupervisedHost(tmp_path, LaunchGroup(min_hosts=2, wait_s=0.0))
        assert host.go(3.0) is None
        host.learn(generation(1, "bc", excluded=("a",)))
        assert host.go(5.0) is None
        assert host.registry.record.state is HostState.UNFIT
        assert len(host.said) == 1

    def test_is_done_anew_after_a_generation(self, tmp_path: Path) -> None:
        host = SupervisedHost(tmp_path, LaunchGroup(min_hosts=2, wait_s=0.0))
        assert host.go(3.0) is None
        host.run_workers(generation(1, "ab"))
        assert host.go(5.0) is None
        host.end_workers(1, STOPPED)
        assert host.go(0.2) is None
        host.learn(ends=[post for post in host.registry.posts if isinstance(post, End)])
        assert host.go(5.0) is None
        first, again = host.sentences("waiting for")
        assert first == again


class TestRestartCost:
    def grow(self, host: SupervisedHost) -> tuple[int, ...]:
        """The figures of why growth is worth it: what a restart is thought to cost, and after how long it is won back."""
        host.learn(observed=newcomer(host))
        assert host.go(0.2) is None
        grown = host.registry.posts[-1]
        assert isinstance(grown, End)
        return tuple(int(number) for number in re.findall(r"(\d+) s", grown.reason))

    def test_is_not_known_from_a_first_start(self, host: SupervisedHost) -> None:
        host.run_workers(generation(1, "ab"))
        host.begin_training()
        assert host.go(1.0) is None
        assert self.grow(host) == (30, 60)

    def test_is_the_time_from_the_adoption_of_a_generation_to_its_first_step(self, host: SupervisedHost) -> None:
        host.run_workers(generation(1, "ab"))
        host.begin_training()
        assert host.go(5.0) is None
        host.end_workers(1, Reason(0, 70, "reduce", 5, "boom"))
        # However long the hosts wait for others.
        assert host.go(300.0) is None
        host.run_workers(generation(2, "ab"))
        assert host.go(8.8) is None
        host.begin_training()
        assert host.go(20.0) is None
        assert self.grow(host) == (9, 18)

    def test_and_what_the_end_of_the_one_before_took(self, host: SupervisedHost) -> None:
        host.run_workers(generation(1, "ab"))
        host.begin_training()
        assert host.go(5.0) is None
        host.learn(ends=[end("b", EndKind.LEAVING, 75)])
        assert host.go(4.0) is None
        host.end_workers(1, STOPPED)
        assert host.go(300.0) is None
        host.run_workers(generation(2, "ab"))
        assert host.go(8.8) is None
        host.begin_training()
        assert host.go(20.0) is None
        assert self.grow(host) == (13, 26)


@pytest.mark.parametrize("codes", [{1: -9}, {1: 71}, {0: 70, 1: -9}, {1: 1}], ids=str)
def test_workers_that_have_lost_one_are_detached_at_once(codes: dict[int, int], host: SupervisedHost) -> None:
    host.run_workers(generation(1, "ab"))
    lost_s = host.diary.elapsed_s
    host.workers.codes = codes
    assert host.go(10.0) is None
    assert host.diary.when("detach") == near(lost_s)
    assert host.diary.when("kill-unresponsive") == near(lost_s + 0.5)
    assert host.diary.when("kill") == near(lost_s + DETACHED_S)
    # A SIGTERM would have them save what they cannot save.
    assert host.diary.when("ask") == []


def test_a_launcher_that_was_held_up_gives_them_the_whole_time_to_answer(host: SupervisedHost) -> None:
    host.run_workers(generation(1, "ab"))
    host.workers.codes = {1: -9}
    real, stalls = host.workers.poll, [3.0]

    def poll() -> WorkersEnd | None:
        host.diary.now_s += stalls.pop() if stalls else 0.0
        return real()

    host.workers.poll = poll  # type: ignore[method-assign]
    assert host.go(10.0) is None
    (told_s,) = host.diary.when("detach")
    assert host.diary.when("kill-unresponsive") == near(told_s + 0.5)


@pytest.mark.parametrize("code", [64, 69, 70, 74, 75, 78])
def test_workers_have_half_a_second_to_find_the_error_of_one_and_half_a_minute_before_they_are_killed(
    code: int, host: SupervisedHost
) -> None:
    host.run_workers(generation(1, "ab"))
    lost_s = host.diary.elapsed_s
    host.workers.codes = {1: code}
    assert host.go(30.0) is None
    assert host.diary.when("ask")[:1] == near(lost_s + 0.5)
    assert host.diary.order("detach", "kill") == []
    assert host.go(2.0) is None
    assert host.diary.when("kill") == near(lost_s + 30.5)


def test_what_is_left_to_workers_that_have_lost_one_is_not_more_when_this_host_is_to_leave(host: SupervisedHost) -> None:
    host.run_workers(generation(1, "ab"))
    lost_s = host.diary.elapsed_s
    host.workers.codes = {1: 70}
    assert host.go(0.2) is None
    host.ask(notice_s=600.0)
    assert host.go(60.0) is not None or host.diary.when("kill")
    assert host.diary.when("kill") == near(lost_s + 30.5)


def test_the_fork_server_is_looked_after_while_nothing_runs(host: SupervisedHost) -> None:
    """It may have ended with its workers, and takes seconds to be there again."""
    for number in (1, 2):
        host.run_workers(generation(number, "ab"))
        host.end_workers(1, Reason(0, 70, "reduce", 5, "boom"))
        assert host.go(1.0) is None
    assert host.diary.order("start", "prepare") == ["start", "prepare"] * 2


def test_workers_that_are_no_forks_are_told_of_once(host: SupervisedHost) -> None:
    for number, unforked in ((1, ""), (2, "2 threads"), (3, "2 threads"), (4, "")):
        host.run_workers(generation(number, "ab"))
        host.workers.unforked = unforked
        assert host.go(0.5) is None
        # Nobody knows before the workers have begun.
        assert len(host.sentences("2 threads")) == (number > 2)
        host.begin_training()
        assert host.go(0.5) is None
        assert len(host.sentences("2 threads")) == (number > 1)
        host.end_workers(1, Reason(0, 70, "reduce", 5, "boom"))
        assert host.go(1.0) is None
    told = [(number, event) for number, event in host.recorder.events if isinstance(event, WorkersNotForked)]
    assert told == [(2, WorkersNotForked(reason="2 threads"))]


@pytest.mark.parametrize(("committed", "remembered", "resumed"), [(9, 4, 5), (4, 9, 5), (4, 5, 9)])
def test_progress_counts_wherever_it_is_kept(committed: int, remembered: int, resumed: int, host: SupervisedHost) -> None:
    host.run_workers(generation(1, "ab"))
    host.note_committed(committed)
    host.remembered_step = remembered
    host.begin_training(resumed_step=resumed)
    host.end_workers(1, Reason(0, 70, "reduce", 12, "boom"))
    assert host.go(0.5) is None
    (post,) = host.registry.posts
    assert isinstance(post, End)
    assert (post.kind, post.exit_code, post.step, post.committed_step) == (EndKind.FAILED, 70, 12, 9)


def test_a_host_that_was_stopped_by_another_says_in_its_line_what_is_committed(host: SupervisedHost) -> None:
    host.run_workers(generation(1, "ab"))
    host.note_committed(9)
    host.learn(ends=[end("b", EndKind.LOST, lost="a")])
    assert host.go(3.0) is None
    assert (host.registry.record.ended, host.registry.record.committed_step) == (1, 9)
    # Storage, which would make all hosts wait, is not asked.
    assert host.storage_asked == 0
    host.note_committed(0)
    host.run_workers(generation(2, "ab"))
    host.end_workers(1, Reason(0, 71, "reduce", 12, "a peer is gone"))
    assert host.go(1.0) is None
    assert (host.registry.record.ended, host.registry.record.committed_step) == (2, 9)


def test_a_worker_that_has_explained_itself_is_known_by_its_rank_in_the_group(host: SupervisedHost) -> None:
    host.run_workers(generation(1, "ba"))
    host.end_workers(1, Reason(1, 71, "reduce", 5, "a peer is gone"), codes={0: -9})
    assert host.go(0.5) is None
    (post,) = host.registry.posts
    assert isinstance(post, End)
    assert (post.exit_code, post.step) == (71, 5)


def test_a_generation_is_proposed_once_though_it_is_decided_again_and_again(host: SupervisedHost) -> None:
    assert host.go(4.0) is None
    proposals = len(host.registry.posts)
    assert proposals > 1
    host.registry.known = replace(host.registry.known, created=frozenset({1}))
    assert host.go(4.0) is None
    assert len(host.registry.posts) == proposals


def test_what_other_hosts_say_of_their_ends_is_known_before_storage_shows_it(host: SupervisedHost) -> None:
    host.run_workers(generation(1, "ab"))
    host.heartbeat.lines = (record("b", ended=1),)
    assert host.go(1.0) is None
    assert host.diary.when("hear b") == near(0.2)


def test_news_of_the_others_has_storage_read_at_once(host: SupervisedHost) -> None:
    host.run_workers(generation(1, "ab"))
    host.heartbeat.news = 2
    assert host.go(1.0) is None
    assert host.diary.when("wake-registry 2") == near(0.2)


def test_nothing_is_decided_before_storage_was_read(host: SupervisedHost) -> None:
    host.registry.known = ClusterState(me=host.registry.record)
    assert host.go(5.0) is None
    assert (host.diary.lines, host.said) == ([], [])


def test_one_that_is_asked_to_leave_after_the_last_step_is_done(host: SupervisedHost) -> None:
    host.run_workers(generation(1, "ab"))
    host.ask(notice_s=30.0)
    assert host.go(0.5) is None
    host.end_workers(0)
    assert host.go(5.0) == 0
    assert ends_of(host.registry.posts) == [(EndKind.LEAVING, "a", 75), (EndKind.DONE, "a", 0)]


def test_nobody_counts_on_a_host_that_only_waits_for_its_saver(host: SupervisedHost) -> None:
    host.run_workers(generation(1, "ab"))
    host.ask(notice_s=30.0)
    assert host.go(0.5) is None
    host.end_workers(1, STOPPED)
    assert host.go(5.0) is None
    assert host.registry.record.state is HostState.GONE


def test_its_line_tells_whom_it_hears_and_while_it_waits_it_speaks_to_all_that_live(host: SupervisedHost) -> None:
    host.heartbeat.heard = (frozenset("cb"), 0.0)
    host.learn(observed={name: observed(record(name)) for name in "bc"} | {"d": observed(record("d", HostState.GONE))})
    assert host.go(0.3) is None
    assert host.registry.hears == ("b", "c")
    assert host.heartbeat.called == ("b", "c")
    host.run_workers(generation(1, "ab"))
    assert host.heartbeat.called == ()


def test_an_outage_of_the_network_between_two_decisions_is_known_to_the_next_one(host: SupervisedHost) -> None:
    lines = {"b": observed(record("b", ended=1), changed_s=host.diary.now_s)}
    host.heartbeat.heard = (frozenset(), host.diary.now_s + 2.0)
    host.run_workers(generation(1, "ab"))
    host.learn(ends=[end("b", EndKind.LOST, lost="a")], observed=lines)
    assert host.go(3.0) is None
    assert not [post for post in host.registry.posts if isinstance(post, Generation)]


def elsewhere(number: int) -> Generation:
    return replace(
        generation(number, ""), outcome=GenerationOutcome.ELSEWHERE, exit_code=75, reason="another run trains here", owner="x"
    )


def test_it_leaves_where_a_run_without_a_launcher_was_faster(host: SupervisedHost) -> None:
    host.learn(elsewhere(1))
    assert host.go(1.0) == 75


def test_it_makes_way_where_it_is_to_wait_for_a_run_that_was_faster(tmp_path: Path) -> None:
    host = SupervisedHost(tmp_path, on_held="wait")
    host.learn(elsewhere(1))
    with pytest.raises(RunHeldError):
        host.go(1.0)
    assert host.diary.order("say gone", "close registry", "close heartbeat") == [
        "say gone",
        "close registry",
        "close heartbeat",
    ]
    # Nothing was to be saved, and what waits to run workers is needed again.
    assert host.diary.order("flush", "close-workers") == []


def test_one_that_was_replaced_leaves_although_it_is_to_wait(tmp_path: Path) -> None:
    host = SupervisedHost(tmp_path, on_held="wait")
    host.run_workers(generation(1, "a"))
    host.learn(elsewhere(2))
    assert host.go(5.0) == 75


def test_it_ends_its_workers_where_a_run_without_a_launcher_has_taken_over(host: SupervisedHost) -> None:
    host.run_workers(generation(1, "a"))
    host.learn(elsewhere(2))
    assert host.go(5.0) == 75
    assert not host.workers.running
