from dataclasses import dataclass

import pytest

from elastictrain.checkpoint.peers.placement import Peer, replica_target_of
from elastictrain.launch.membership.records import DRAFT, Generation, GenerationMember, HostRecord, HostState
from elastictrain.simulate.costs import RunCosts
from elastictrain.simulate.network import Network
from elastictrain.simulate.queue import EventQueue
from elastictrain.simulate.scenario import Scenario
from elastictrain.simulate.training import Training

COSTS = RunCosts(step_s=1.0, recovery_s=0.0, restore_s=50.0, save_stall_s=0.0, snapshot_every_s=10.0, snapshot_stall_s=0.0)


@dataclass
class Joined:
    record: HostRecord
    ready_s: float = 0.0


class Run:
    """Generations of hosts with names of one letter."""

    def __init__(self, **options: int) -> None:
        self.queue = EventQueue()
        self.training = Training(
            self.queue, Network(self.queue, 4.0), Scenario(hosts=4, costs=COSTS, every_s=100.0, **{"replicas": 1, **options})
        )
        self.number = 0

    def join(self, hosts: str) -> Generation:
        self.number += 1
        members = tuple(GenerationMember(host, host, host, 7, 1) for host in hosts)
        generation = Generation(self.number, DRAFT.outcome, members, 0, "", (), (), 0.0, 0, "")
        self.training.network.machine |= {host: ord(host) for host in hosts}
        records = [HostRecord(host, host, host, 7, 0, 1, 0, HostState.BUSY, "", 0, 0) for host in hosts]
        self.training.join(generation, [Joined(record) for record in records])
        return generation

    def until(self, time_s: float) -> None:
        while self.queue.next_s() <= time_s:
            self.queue.run_next()
        self.queue.now_s = time_s
        self.training.count()

    def resumed(self, *, lost: str, others: str) -> float:
        """The step from which others go on when hosts are lost at second 255, after 255 steps."""
        generation = self.join("abcd")
        self.until(255.0)
        self.training.host_over(generation, "a")
        for host in lost:
            self.training.host_gone(host)
        self.join(others)
        self.until(400.0)
        return self.training.totals.lost_steps


@pytest.mark.parametrize(
    ("lost", "replicas", "lost_steps"),
    [
        ("", 0, 5),
        ("b", 1, 5),
        ("bd", 1, 5),
        # The replicas of b are at c.
        ("bc", 1, 55),
        ("bc", 2, 5),
        ("b", 0, 55),
    ],
)
def test_the_newest_snapshot_of_which_all_parts_are_left_is_taken(lost: str, replicas: int, lost_steps: int) -> None:
    others = "".join(host for host in "abcd" if host not in lost)
    assert Run(replicas=replicas).resumed(lost=lost, others=others) == lost_steps


def test_replicas_are_where_savers_put_them() -> None:
    roster = [Peer(f"host-{number}", f"10.0.0.{number}", 7, (number,), number) for number in range(5)]
    assert [replica_target_of(peer, roster) for peer in roster] == [*roster[1:], roster[0]]


def test_a_group_that_is_whole_and_connected_trains() -> None:
    run = Run()
    generation = run.join("abcd")
    run.until(50.0)
    assert run.training.totals.steps == 50
    run.training.host_over(generation, "a")
    run.until(90.0)
    assert (run.training.totals.steps, run.training.totals.progress_s) == (50, 50)


def test_steps_take_longer_on_fewer_hosts() -> None:
    run = Run()
    run.join("ab")
    run.until(50.0)
    assert run.training.totals.steps == 25


def test_old_checkpoints_are_deleted_and_their_objects_counted() -> None:
    run = Run(keep_last=2, processes=8)
    run.join("abcd")
    run.until(550.0)
    assert (run.training.totals.saves, run.training.totals.writes, run.training.totals.deletes) == (5, 5 * 35, 3 * 35)


def test_a_save_whose_host_is_lost_before_it_is_durable_does_not_count() -> None:
    run = Run()
    run.join("abcd")
    run.until(101.0)
    run.training.host_gone("a")
    run.until(150.0)
    assert run.training.totals.saves == 0


def test_after_an_orderly_end_nothing_is_repeated() -> None:
    run = Run()
    generation = run.join("abcd")
    run.until(55.0)
    assert run.training.stop(generation, orderly=True)
    run.join("abcd")
    run.until(60.0)
    assert run.training.totals.lost_steps == 0
