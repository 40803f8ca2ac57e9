"""Which workers take part in the next generation, which are killed, and what the launcher takes for the end of one."""

import json
import random
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest

from elastictrain.fault.launcher_channel import (
    AskToStop,
    Attach,
    Attached,
    Begun,
    Detach,
    Detached,
    DetachReceived,
    Introduced,
    LeaveOutSlow,
    Monitored,
)
from elastictrain.fault.reasons import NO_RANK, Reason, SlowRank
from elastictrain.identity import PREVIOUS_WORKERS
from elastictrain.launch import worker_process
from elastictrain.launch.fork_server_link import start_ahead
from elastictrain.launch.worker_group import WorkerGroup
from elastictrain.launch.worker_process import BUILT_FOR
from elastictrain.launch.workers_of_generation import WorkersEnd
from tests.unit.examples import examples
from tests.unit.launch.made_workers import ARGUMENTS, FakeWorker, World, world

__all__ = ["world"]
KILLED = WorkersEnd(-9, {})
STOP = AskToStop("spot", 1000.0, host_stays=False)
FORK_SERVER = Reason(NO_RANK, 70, "start", 0, "the store has ended")


def environments(world: World) -> list[dict[str, str]]:
    """Of the ranks that the fork server was last ordered to start."""
    found: list[dict[str, str]] = world.server.orders[-1]["environments"]
    return found


def ranks(world: World) -> list[str]:
    return [one["RANK"] for one in environments(world)]


def test_a_fork_server_that_was_started_ahead_is_taken_over_and_tells_when_it_is_ready(world: World) -> None:
    world.imports = True
    for asks in ("--help", "-h", "--cfg=job", "--dry-run"):
        assert start_ahead(["recipe=x", asks, "8x80"]) is None
    ahead = start_ahead(["--config-dir", "mine", "recipe=x", "--", "program.py", "--help"])
    assert ahead is not None
    assert world.server.command[-4:] == ["recipe=x", "--", "program.py", "--help"]
    group = WorkerGroup(server=ahead)
    group.prepare()
    group.wait(0.0)
    assert (len(world.servers), group.ready) == (1, False)
    world.server.tell(ready=True)
    group.wait(1.0)
    assert group.ready
    world.server.kill()
    group.prepare()
    assert (len(world.servers), group.ready) == (2, False)
    group.close()


class TestNewWorkers:
    def test_each_gets_its_rank_and_a_channel_of_its_own(self, world: World) -> None:
        first, second = world.begin(2)
        order = world.server.orders[0]
        assert order["store_port"] == 7
        assert world.server.command[-1] == ARGUMENTS[0], "the server prepares for them"
        assert [(one["RANK"], one[PREVIOUS_WORKERS]) for one in order["environments"]] == [("0", ""), ("1", "")]
        first.say(Introduced())
        assert world.group.poll() is None
        assert world.group.run.silent == [1]
        second.say(Introduced(), Attached(""))
        assert world.group.poll() is None
        assert (world.group.run.silent, world.group.run.attached, world.group.run.reused) == ([], False, False)
        first.say(Attached(""))
        assert world.group.poll() is None
        assert world.group.run.attached

    def test_none_is_told_to_attach(self, world: World) -> None:
        workers = world.begin(2)
        assert world.group.poll() is None
        assert [one.heard() for one in workers] == [[], []]


class TestSurvivors:
    def test_keep_their_ranks_and_the_dead_one_is_started_anew(self, world: World) -> None:
        first, dead, last = world.begin(3)
        world.train([first, dead, last])
        world.fail(dead, [first, last])
        assert [one.heard() for one in (first, last)] == [[Detach("a worker is gone")]] * 2
        assert len(world.group.waiting) == 2
        world.group.start(world.places(3), store_port=8)
        (new,) = world.server.start_workers(told=False)
        assert ranks(world) == ["1"]
        assert world.group.poll() is None
        assert (first.heard(), last.heard()) == ([], []), "the store of the generation may not be there yet"
        world.server.tell_started([new])
        assert world.group.poll() is None
        told = [one.heard() for one in (first, last)]
        assert all(isinstance(one, Attach) for (one,) in told)
        got = [one.environment for (one,) in told if isinstance(one, Attach)]
        assert [(one["RANK"], one["ELASTICTRAIN_GENERATION"]) for one in got] == [("0", "2"), ("2", "2")]
        assert not any(one.was_killed for one in (first, last))
        assert (world.group.run.silent, world.group.run.attached, world.group.run.reused) == ([0, 1, 2], False, False)

    def test_all_of_them_are_used_again_where_another_host_failed(self, world: World) -> None:
        workers = world.begin(2, world_size=4, first=2)
        world.train(workers)
        for built in (True, False):
            world.group.detach("b has failed")
            for one in workers:
                one.say(Detached(71, built=built))
            assert world.group.poll() == WorkersEnd(1, {0: 71, 1: 71})
            assert world.begin(2, world_size=4, first=2) == []
            assert world.group.poll() is None
            # Who had not built anything yet needs the time of a new worker.
            assert world.group.run.reused is built

    @pytest.mark.parametrize("place", [{"world_size": 5}, {"world_size": 4, "first": 1}], ids=["world", "rank"])
    def test_that_were_built_for_another_group_are_killed(self, place: dict[str, int], world: World) -> None:
        first, dead = world.begin(2, world_size=4)
        world.train([first, dead])
        world.fail(dead, [first])
        new = world.begin(2, **place)
        assert first.was_killed
        assert len(new) == 2
        assert world.group.poll() is None
        first.die()
        assert world.group.poll() is None
        assert world.group.run.codes == {}, "its end is none of the new ones"

    def test_that_are_too_many_are_killed(self, world: World) -> None:
        workers = world.begin(2)
        world.group.detach("over")
        for one in workers:
            one.say(Detached(71))
        assert world.group.poll() is not None
        world.begin(1, world_size=2)
        assert [one.was_killed for one in workers] == [True, True], "the number of workers of a host has changed"

    def test_get_the_transport_that_was_found_and_so_do_the_new_ones(self, world: World) -> None:
        transport = json.dumps({"NCCL_SOCKET_IFNAME": "eth7"})
        first, dead = world.begin(2)
        world.train([first, dead], transport=transport)
        world.fail(dead, [first])
        first.heard()
        world.begin(2)
        assert environments(world)[0]["NCCL_SOCKET_IFNAME"] == "eth7"
        assert world.group.poll() is None
        (told,) = first.heard()
        assert isinstance(told, Attach)
        assert told.environment["NCCL_SOCKET_IFNAME"] == "eth7"

    @pytest.mark.parametrize("transport", ["", "{", "[]", '{"A": 1}'])
    def test_whose_transport_cannot_be_read_have_none(self, transport: str, world: World) -> None:
        first, dead = world.begin(2)
        world.train([first, dead], transport=transport)
        world.fail(dead, [first])
        world.begin(2)
        assert "A" not in environments(world)[0]

    def test_one_that_dies_while_it_waits_is_replaced(self, world: World) -> None:
        first, dead, last = world.begin(3)
        world.train([first, dead, last])
        world.fail(dead, [first, last])
        last.die()
        world.begin(3)
        assert ranks(world) == ["1", "2"]
        assert world.group.poll() is None
        assert world.group.run.codes == {}

    def test_one_that_has_died_unseen_is_no_survivor(self, world: World) -> None:
        """The fork server has not told of it yet."""
        first, dead = world.begin(2)
        world.train([first, dead])
        world.fail(dead, [first])
        first.process.alive = False
        assert world.group.waiting == []
        world.begin(2)
        assert ranks(world) == ["0", "1"]

    def test_one_that_dies_after_its_choice_fails_the_generation(self, world: World) -> None:
        first, dead = world.begin(2)
        world.train([first, dead])
        world.fail(dead, [first])
        (new,) = world.begin(2)
        first.die(-11)
        assert world.group.poll() is None
        assert world.group.run.codes == {0: -11}
        new.say(Introduced(), Detached(71))
        assert world.group.poll() == WorkersEnd(1, {0: -11})
        assert len(world.group.waiting) == 1


class TestHowAGenerationEnds:
    def test_before_those_that_were_chosen_are_told_of_it(self, world: World) -> None:
        """The fork server still makes the new ones, and those that wait have nothing to leave."""
        first, dead = world.begin(2)
        world.train([first, dead])
        world.fail(dead, [first])
        first.heard()
        world.group.start(world.places(2), store_port=7)
        world.group.detach("b has failed")
        (new,) = world.server.start_workers()
        assert world.group.poll() is None
        assert first.heard() == []
        world.group.detach("b has failed")
        new.say(Detached(71))
        assert world.group.poll() == WorkersEnd(1, {0: 71, 1: 71})
        assert world.begin(2) == []
        assert world.group.poll() is None
        assert isinstance(first.heard()[0], Attach)

    def test_a_death_counts_before_the_codes_of_those_that_left(self, world: World) -> None:
        first, dead, last = world.begin(3)
        first.say(Detached(71))
        assert world.group.poll() is None
        assert world.group.run.codes == {0: 71}
        dead.die(-6)
        assert world.group.poll() is None
        assert world.group.run.codes == {1: -6}
        last.say(Detached(71))
        assert world.group.poll() == WorkersEnd(1, {1: -6})

    def test_the_first_death_counts(self, world: World) -> None:
        first, second, _ = workers = world.begin(3)
        second.die(-9)
        assert world.group.poll() is None
        first.die(-15)
        assert world.group.poll() is None
        assert world.group.run.codes == {1: -9}
        workers[2].die(0)
        assert world.group.poll() == WorkersEnd(1, {1: -9})

    def test_where_none_died_the_codes_of_those_that_left_count(self, world: World) -> None:
        workers = world.begin(2)
        for one, code in zip(workers, (71, 70), strict=True):
            one.say(Detached(code))
        assert world.group.poll() == WorkersEnd(1, {0: 71, 1: 70})

    def test_all_well(self, world: World) -> None:
        for one in world.begin(2):
            one.die(0)
        assert world.group.poll() == WorkersEnd(0, {})
        assert world.group.waiting == []

    def test_those_that_have_left_are_neither_asked_nor_told_nor_killed(self, world: World) -> None:
        left, hangs = world.begin(2)
        left.say(Detached(71))
        assert world.group.poll() is None
        world.group.detach("over")
        world.group.ask_to_stop(STOP)
        assert (left.heard(), hangs.heard()) == ([], [Detach("over"), STOP])
        world.group.kill()
        assert world.group.poll() == WorkersEnd(1, {0: 71})
        assert (left.was_killed, hangs.was_killed) == (False, True)
        assert len(world.group.waiting) == 1
        world.begin(2)
        assert ranks(world) == ["1"]

    def test_what_workers_monitor_and_fork_server_have_left_explains_it(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A worker that hangs may have left a reason before; one that ends is only slow."""
        own = [Reason(rank, 70, "reduce", 9, "boom") for rank in range(4)]
        outside = [Reason(rank, 71, "forward", 9, "hang", guilty=True) for rank in range(5)]
        left = ((outside[1], False), (outside[2], True), (outside[4], True))
        monkeypatch.setattr(worker_process, "_start_monitor", lambda *_: SimpleNamespace(finished_step=lambda: 9, reasons=left))
        workers = world.begin(5)
        world.train(workers)
        workers[0].say(Monitored("/folder", "facts"), Begun(7))
        for one, reason in zip(workers, own, strict=False):
            one.say(Reason(reason.rank, 71, "forward", 9, "the last one counts"), reason)
        assert world.group.poll() is None
        assert world.group.run.begun == 7
        world.server.tell(reason=msgspec.to_builtins(FORK_SERVER))
        for one in workers:
            one.die(70)
        ended = world.group.poll()
        assert ended is not None
        assert ended.reasons == (FORK_SERVER, own[0], outside[1], own[2], own[3], outside[4])
        assert (ended.finished_step, ended.begun) == (9, 7)
        world.begin(5)
        assert (world.group.run.begun, world.group.run.slow) == (None, None)

    def test_a_reason_that_is_no_text_is_passed_over(self, world: World) -> None:
        (one,) = world.begin(1)
        world.train([one])
        sentence = "no module in /x\udcff"
        world.server.tell(reason={"rank": NO_RANK, "exit_code": 70, "phase": "start", "step": 0, "sentence": sentence})
        one.connection.sendall(json.dumps({"type": "reason", "sentence": sentence}).encode() + b"\n")
        one.say(Begun(3))
        one.die(0)
        assert world.group.poll() == WorkersEnd(0, {}, begun=3)

    def test_a_worker_that_stays_leaves_reasons_and_requests_behind(self, world: World) -> None:
        (one,) = world.begin(1)
        world.train([one])
        slow = SlowRank(0, "rank 0 is slow")
        for request in (slow, None, slow):
            one.say(LeaveOutSlow(request))
            assert world.group.poll() is None
            assert world.group.run.slow == request
        one.say(Begun(3), Reason(0, 71, "reduce", 9, "gone"), Detached(71, built=True))
        ended = world.group.poll()
        assert ended is not None
        assert [reason.sentence for reason in ended.reasons] == ["gone"]
        world.group.start(world.places(1), store_port=7)
        assert world.server.start_workers() == []
        assert world.group.poll() is None
        assert (world.group.run.begun, world.group.run.slow) == (None, None)
        one.say(Detached(71))
        assert world.group.poll() == WorkersEnd(1, {0: 71})

    def test_those_that_were_killed_by_us_explain_nothing(self, world: World) -> None:
        one, other = world.begin(2)
        assert world.group.poll() is None
        world.group.kill()
        for worker in (one, other):
            worker.die(-9)
        assert world.group.poll() == KILLED

    def test_the_end_of_the_fork_server_is_the_end_of_all(self, world: World) -> None:
        workers = world.begin(2)
        assert world.group.poll() is None
        workers[0].say(Detached(71))
        assert world.group.poll() is None
        world.server.kill()
        ended = world.group.poll()
        assert ended is not None
        assert ended.code != 0
        assert world.group.waiting == []
        world.begin(2)
        assert (len(world.servers), ranks(world)) == (2, ["0", "1"])

    def test_a_fork_server_that_dies_while_workers_wait_takes_them_along(self, world: World) -> None:
        first, dead = world.begin(2)
        world.train([first, dead])
        world.fail(dead, [first])
        world.server.kill()
        world.group.prepare()
        assert world.group.waiting == []
        world.begin(2)
        assert (len(world.servers), ranks(world)) == (2, ["0", "1"])


def test_new_workers_get_the_variables_that_a_preflight_has_set_even_where_none_has_survived(world: World) -> None:
    (dead,) = world.begin(1)
    dead.say(Introduced(), Attached('{"GLOO_SOCKET_IFNAME": "eth7"}'))
    assert world.group.poll() is None
    dead.die()
    assert world.group.poll() == WorkersEnd(1, {0: -9})
    (new,) = world.begin(1)
    assert new.environment["GLOO_SOCKET_IFNAME"] == "eth7"
    new.die()
    world.group.poll()
    # Everything is checked again then.
    world.group.release()
    (another,) = world.begin(1)
    assert "GLOO_SOCKET_IFNAME" not in another.environment


class TestStandby:
    def keep(self, world: World) -> FakeWorker:
        world.group.keep_standbys([{**world.places(2)[-1]}], bound=())
        (standby,) = world.server.start_workers()
        return standby

    def test_takes_the_place_of_the_dead(self, world: World) -> None:
        first, dead = world.begin(2)
        standby = self.keep(world)
        assert (standby.environment["ELASTICTRAIN_STANDBY"], standby.environment["RANK"]) == ("any", "1")
        assert world.server.orders[-1]["store_port"] is None, "the store of the generation must stay"
        world.train([first, dead])
        standby.say(Detached(0, built=True))
        world.fail(dead, [first])
        assert world.begin(2) == []
        assert world.group.poll() is None
        (told,) = standby.heard()
        assert isinstance(told, Attach)
        assert (told.environment["RANK"], told.environment["ELASTICTRAIN_GENERATION"]) == ("1", str(world.number))
        assert world.group.run.reused
        world.train([first, standby])
        assert world.group.run.attached

    @pytest.mark.parametrize("bound", [BUILT_FOR, ()])
    @pytest.mark.parametrize("ready", [True, False])
    @pytest.mark.parametrize("heard", [True, False])
    def test_a_worker_that_does_not_answer_is_killed_where_one_is_built_for_its_rank(
        self, heard: bool, ready: bool, bound: tuple[str, ...], world: World
    ) -> None:
        """It holds the interpreter's lock while its device takes no more work."""
        first, dead = world.begin(2)
        world.group.keep_standbys(world.places(2), bound=bound)
        standbys = world.server.start_workers()
        world.train([first, dead])
        if ready:
            for one in standbys:
                one.say(Detached(0, built=True))
        dead.die()
        assert world.group.poll() is None
        world.group.detach("a worker is gone")
        if heard:
            first.say(DetachReceived())
        assert world.group.poll() is None
        world.group.kill_unresponsive()
        killed = ready and not heard and bool(bound)
        assert first.was_killed is killed
        assert not any(one.was_killed for one in standbys)
        if killed:
            first.die()
            ended = world.group.poll()
            assert ended is not None
            assert ended.codes == {1: -9}, "the death that was first"

    def test_that_still_warms_stays_a_standby(self, world: World) -> None:
        """A new worker may be there earlier; and nobody takes its word that it is ready for the end of a generation."""
        (dead,) = world.begin(1)
        standby = self.keep(world)
        world.train([dead])
        dead.die()
        assert world.group.poll() == WorkersEnd(1, {0: -9})
        (new,) = world.begin(1)
        standby.say(Detached(0))
        assert world.group.poll() is None
        assert standby.heard() == []
        world.train([new])
        new.die()
        assert world.group.poll() == WorkersEnd(1, {0: -9})
        assert world.begin(1) == [], "now it takes part"

    @pytest.mark.parametrize("bound", [(), ("LOCAL_RANK",), BUILT_FOR])
    def test_of_a_device_takes_the_place_of_its_local_rank_only(self, bound: tuple[str, ...], world: World) -> None:
        workers = world.begin(2)
        world.group.keep_standbys(world.places(2)[:1], bound=bound)
        (standby,) = world.server.start_workers()
        assert standby.environment["ELASTICTRAIN_STANDBY"] == ("exact" if bound == BUILT_FOR else "any")
        world.train(workers)
        standby.say(Detached(0))
        world.fail(workers[1], workers[:1])
        assert len(world.begin(2)) == (1 if bound else 0)
        assert world.group.poll() is None
        assert bool(standby.heard()) is not bool(bound)

    @pytest.mark.parametrize("bound", [(), ("LOCAL_RANK",), BUILT_FOR])
    def test_that_is_built_for_another_world_makes_room(self, bound: tuple[str, ...], world: World) -> None:
        workers = world.begin(2)
        world.group.keep_standbys(world.places(2)[1:], bound=bound)
        (standby,) = world.server.start_workers()
        world.train(workers)
        standby.say(Detached(0))
        world.fail(workers[1], workers[:1])
        world.begin(1)
        assert bool(standby.process.signals) is bool(bound)

    def test_of_devices_are_replaced_for_the_same_devices(self, world: World) -> None:
        workers = world.begin(3)
        places = world.places(3)[:2]
        world.group.keep_standbys(places, bound=("LOCAL_RANK",))
        standbys = world.server.start_workers()
        assert ranks(world) == ["0", "1"]
        world.train(workers)
        for one in standbys:
            one.say(Detached(0))
        world.fail(workers[1], [workers[0], workers[2]])
        assert world.begin(3) == []
        assert world.group.poll() is None
        assert [bool(one.heard()) for one in standbys] == [False, True]
        world.group.keep_standbys(places, bound=("LOCAL_RANK",))
        world.server.start_workers()
        assert ranks(world) == ["1"]

    def test_as_many_as_are_wanted(self, world: World) -> None:
        world.begin(3)
        for wanted, started in ((2, ["0", "1"]), (3, ["2"])):
            world.group.keep_standbys(world.places(3)[:wanted], bound=())
            assert len(world.server.start_workers()) == len(started)
            assert ranks(world) == started

    def test_one_is_enough(self, world: World) -> None:
        world.begin(2)
        self.keep(world)
        world.group.keep_standbys(world.places(2)[-1:], bound=())
        with pytest.raises(BlockingIOError):
            world.server.start_workers()

    def test_is_no_worker_of_the_generation(self, world: World) -> None:
        workers = world.begin(2)
        standby = self.keep(world)
        standby.say(Detached(0))
        assert world.group.poll() is None
        world.group.detach("over")
        world.group.ask_to_stop(STOP)
        assert (standby.heard(), standby.process.signals) == ([], [])
        assert world.group.waiting == []
        for one in workers:
            one.die(0)
        assert world.group.poll() == WorkersEnd(0, {})

    def test_that_dies_while_it_warms_fails_nothing_and_is_replaced(self, world: World) -> None:
        first, dead = world.begin(2)
        standby = self.keep(world)
        standby.die(78)
        assert world.group.poll() is None
        assert world.group.run.codes == {}
        again = self.keep(world)
        again.say(Detached(0))
        world.train([first, dead])
        world.fail(dead, [first])
        assert world.begin(2) == []
        assert world.group.poll() is None
        assert isinstance(again.heard()[0], Attach)

    def test_that_has_died_unseen_takes_no_place(self, world: World) -> None:
        first, dead = world.begin(2)
        standby = self.keep(world)
        standby.say(Detached(0))
        world.train([first, dead])
        world.fail(dead, [first])
        standby.process.alive = False
        assert len(world.begin(2)) == 1

    def test_outlives_a_generation_in_which_nobody_died(self, world: World) -> None:
        workers = world.begin(2)
        standby = self.keep(world)
        standby.say(Detached(0))
        world.group.detach("b has failed")
        for one in workers:
            one.say(Detached(71))
        assert world.group.poll() is not None
        world.begin(2)
        assert world.group.poll() is None
        assert (standby.heard(), standby.was_killed) == ([], False)


class TestServerThatImports:
    """A host may be so slow that a generation fails while its fork server still imports."""

    def start(self, world: World, *, after_s: float) -> None:
        """A generation that ends before its workers are there."""
        world.imports = True
        world.group.start(world.places(2), store_port=7)
        world.now_s += after_s
        assert world.group.poll() is None
        world.group.kill()
        assert world.group.poll() == KILLED

    def test_serves_the_next_generation(self, world: World) -> None:
        self.start(world, after_s=299.0)
        world.group.start(world.places(2), store_port=8)
        assert world.group.poll() is None
        world.server.tell(ready=True)
        assert world.group.poll() is None
        workers = world.server.start_workers()
        assert len(world.servers) == 1
        assert [one["store_port"] for one in world.server.orders] == [8]
        world.train(workers)
        # From now on it holds workers that would be lost.
        world.group.kill()
        assert all(one.was_killed for one in workers)

    def test_is_replaced_if_it_takes_minutes(self, world: World) -> None:
        self.start(world, after_s=301.0)
        assert world.server.code == -9
        world.imports = False
        world.begin(2)
        assert len(world.servers) == 2

    def test_starts_no_standby_of_a_generation_that_is_over(self, world: World) -> None:
        world.imports = True
        world.group.start(world.places(1), store_port=7)
        world.group.keep_standbys(world.places(1), bound=())
        world.group.kill()
        assert world.group.poll() == KILLED
        world.server.tell(ready=True)
        (worker,) = world.begin(1)
        assert worker.environment["RANK"] == "0"
        world.train([worker])
        assert world.group.waiting == []


class TestReleasing:
    def test_leaves_those_that_take_part(self, world: World) -> None:
        workers = world.begin(2)
        world.train(workers)
        world.group.release()
        assert [one.was_killed for one in workers] == [False, False]

    def test_kills_those_that_wait_and_the_standbys(self, world: World) -> None:
        first, dead, last = world.begin(3)
        world.group.keep_standbys(world.places(3)[-1:], bound=())
        (standby,) = world.server.start_workers()
        standby.say(Detached(0))
        world.train([first, dead, last])
        world.fail(dead, [first, last])
        world.group.release()
        assert [one.was_killed for one in (first, last, standby)] == [True, True, True]
        assert world.group.waiting == []
        world.group.release()
        world.begin(3)
        assert len(environments(world)) == 3
        for one in (first, last, standby):
            one.die()
        assert world.group.poll() is None
        assert world.group.run.codes == {}

    def test_closing_kills_the_standby_as_well(self, world: World) -> None:
        first, dead = world.begin(2)
        world.group.keep_standbys(world.places(2)[-1:], bound=())
        (standby,) = world.server.start_workers()
        world.train([first, dead])
        world.fail(dead, [first])
        world.group.close()
        assert [one.was_killed for one in (first, standby)] == [True, True]
        world.group.close()


class TestWaiting:
    def test_ends_with_a_message(self, world: World) -> None:
        (worker,) = world.begin(1)
        assert world.group.poll() is None
        threading.Timer(0.05, lambda: worker.say(Introduced())).start()
        began = time.monotonic()
        while world.group.run.silent:
            world.group.wait(10.0)
        assert time.monotonic() - began < 5

    def test_ends_when_it_is_woken_and_only_then_once(self, world: World) -> None:
        threading.Timer(0.05, world.group.wake).start()
        began = time.monotonic()
        world.group.wait(10.0)
        assert time.monotonic() - began < 5
        began = time.monotonic()
        world.group.wait(0.1)
        assert time.monotonic() - began >= 0.1

    def test_a_thousand_wakes_block_nobody(self, world: World) -> None:
        for _ in range(100_000):
            world.group.wake()
        for _ in range(20):
            world.group.wait(0.0)

    def test_a_worker_that_has_ended_does_not_keep_it_awake(self, world: World) -> None:
        first, _ = world.begin(2)
        first.die()
        assert world.group.poll() is None
        world.group.wait(0.0)
        began = time.monotonic()
        world.group.wait(0.1)
        assert time.monotonic() - began >= 0.1

    def test_goes_on_after_the_group_is_closed(self, world: World) -> None:
        """The launcher still waits for its saver then."""
        world.begin(1)
        world.group.close()
        world.group.wake()
        began = time.monotonic()
        world.group.wait(0.1)
        assert time.monotonic() - began >= 0.1


@pytest.mark.parametrize("seed", range(examples(60)))
def test_over_random_histories_each_rank_has_one_living_process_and_no_process_is_lost(seed: int, world: World) -> None:
    chance, warming = random.Random(seed), list[FakeWorker]()
    for _ in range(chance.randint(2, 8)):
        size = chance.choice([2, 2, 2, 3])
        warming = [one for one in warming if one.process.alive]
        if warming and chance.random() < 0.5:
            warming.pop().say(Detached(0))
        world.begin(size, store_port=chance.choice([0, 7]))
        assert world.group.poll() is None
        part = taking_part(world)
        assert sorted(part) == [str(rank) for rank in range(size)]
        assert all(one.process.alive for one in part.values())
        assert len({one.process.pid for one in part.values()}) == size
        for one in part.values():
            assert one not in warming
            one.say(Introduced(), Attached(""))
        assert world.group.poll() is None
        assert (world.group.run.attached, world.group.run.silent) == (True, [])
        if chance.random() < 0.7:
            warming += keep_standby(world, environments_of(part)[-1], chance)
        dead = [one for one in part.values() if chance.random() < 0.4]
        for one in dead:
            one.die(chance.choice([-9, -11, 1]))
        world.group.poll() if len(dead) < size else None
        world.group.detach("over")
        stuck = [one for one in part.values() if one not in dead and chance.random() < 0.2]
        for one in part.values():
            if one not in dead and one not in stuck:
                one.say(Detached(71))
        if stuck:
            assert world.group.poll() is None
            world.group.kill()
        ended = world.group.poll()
        assert ended is not None
        assert ended.code != 0
        assert len(world.group.waiting) == size - len(dead) - len(stuck)
        if chance.random() < 0.2:
            world.group.release()
            assert world.group.waiting == []
    world.group.close()
    assert [one for one in world.workers if one.process.alive and not one.was_killed] == []


def keep_standby(world: World, environment: dict[str, str], chance: random.Random) -> list[FakeWorker]:
    """Have one prepared, which may be ready, or dead; returns it if it still warms."""
    world.group.keep_standbys([environment], bound=() if chance.random() < 0.7 else ("LOCAL_RANK",))
    try:
        (standby,) = world.server.start_workers()
    except BlockingIOError:
        return []
    what = chance.random()
    if what < 0.6:
        standby.say(Detached(0))
    elif what < 0.8:
        standby.die(70)
    else:
        return [standby]
    return []


def taking_part(world: World) -> dict[str, FakeWorker]:
    """By rank: those that were started with it, or were told of it, for the present generation."""
    part = {}
    for one in world.workers:
        told = [message for message in one.heard() if isinstance(message, Attach)] if one.process.alive else []
        environment = told[-1].environment if told else one.environment
        one.environment = environment
        mine = environment["ELASTICTRAIN_GENERATION"] == str(world.number)
        if mine and one.process.alive and (told or "ELASTICTRAIN_STANDBY" not in environment):
            assert environment["RANK"] not in part
            part[environment["RANK"]] = one
    return part


def environments_of(part: dict[str, FakeWorker]) -> list[dict[str, str]]:
    return [dict(part[rank].environment) for rank in sorted(part)]
