"""Workers that go on in the next generation in the same process, with a fork server that starts real processes."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from test_fork_server import ANOTHER_THREAD, Server
from test_worker_group import is_gone, lives, spare
from torchruns import wait_until

from elastictrain.fault.exits import decode
from elastictrain.identity import FOLDER, GENERATION, LAUNCHER
from elastictrain.launch.worker_process import BUILT_FOR
from elastictrain.launch.workers_of_generation import WorkersEnd

# Speaks with its launcher as a worker does, and notes where it took part; of rank `DEAF` it does not listen, and of rank
# `LOCKED` no thread of it runs in the first generation.
WORKER = """
import ctypes, os, time
from pathlib import Path
from elastictrain.fault.launcher_channel import STANDBY_VARIABLE, Attached, Detached, Introduced, open_channel, tell_launcher
from elastictrain.fault.stop import StopListener
from elastictrain.identity import read_identity

environment, identity = os.environ, read_identity(os.environ)
channel = open_channel(identity, StopListener())
if STANDBY_VARIABLE in os.environ:
    tell_launcher(identity, Detached(0))
    Path(environment["ELASTICTRAIN_LAUNCH_FOLDER"], f"standby-{os.getpid()}").touch()
    environment = channel.wait()
while environment is not None:
    number, rank = environment["NUMBER"], environment["RANK"]
    Path(environment["ELASTICTRAIN_LAUNCH_FOLDER"], f"part-{number}-{rank}").write_text(
        f"{os.getpid()} {environment['ELASTICTRAIN_PREVIOUS_WORKERS']}"
    )
    tell_launcher(identity, Introduced())
    tell_launcher(identity, Attached(f'{{"OF": "{rank}"}}'))
    if (number, rank) == ("1", os.environ.get("LOCKED")):
        ctypes.PyDLL(None).sleep(600)
    while channel.detach_reason is None or rank == os.environ.get("DEAF"):
        time.sleep(0.01)
    tell_launcher(identity, Detached(71))
    environment = channel.wait()
"""


class Host:
    """A launcher's side, with workers that do nothing but take part."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.number = 0
        self.process: psutil.Process | None = None

    def environments(self, count: int) -> list[dict[str, str]]:
        common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "NUMBER": str(self.number)}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        launched = {FOLDER: str(self.server.folder), GENERATION: str(self.number), LAUNCHER: str(os.getpid())}
        return [{**common, **launched, **rank} for rank in ranks]

    def begin(self, count: int, *, program: str = "") -> dict[str, int]:
        """The next generation; returns the pid of each rank, once its groups are made."""
        self.number += 1
        if self.process is None:
            self.process = self.server.prepare(program=program, worker=WORKER)
        self.server.group.start(self.environments(count), store_port=0)
        self.wait_until_attached()
        return {str(rank): self.part(rank)[0] for rank in range(count)}

    def wait_until_attached(self) -> None:
        def attached() -> bool:
            assert self.server.group.poll() is None
            return self.server.group.run.attached

        wait_until(attached, timeout_s=30, what="the groups")

    def part(self, rank: int) -> tuple[int, str]:
        """The process that took part as this rank in the present generation, and whom it was told to wait for."""
        pid, _, previous = (self.server.folder / f"part-{self.number}-{rank}").read_text().partition(" ")
        return int(pid), previous

    def keep_standby(self, count: int, *, bound: tuple[str, ...] = ()) -> int:
        """Returns its pid, once it waits."""
        assert self.process is not None
        before = set(self.process.children())
        self.server.group.keep_standbys(self.environments(count)[-1:], bound=bound)
        wait_until(lambda: len(set(self.process.children()) - before) == 1, timeout_s=30, what="the standby")  # type: ignore[union-attr]
        (standby,) = set(self.process.children()) - before
        wait_until((self.server.folder / f"standby-{standby.pid}").exists, timeout_s=30, what="its word")
        assert standby.name() == "standby"
        return standby.pid

    def lose(self, pid: int, *, rank: int) -> WorkersEnd:
        """Kill a worker, and have the others detach."""
        os.kill(pid, signal.SIGKILL)
        group = self.server.group
        wait_until(lambda: group.poll() is None and group.run.codes == {rank: -9}, timeout_s=20, what="the death")
        group.detach("a worker has died")
        return self.server.end(timeout_s=20)

    @property
    def waiting(self) -> dict[str, int]:
        return {one.environment["RANK"]: one.process.pid for one in self.server.group.waiting if one.process is not None}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    made = Server(tmp_path, monkeypatch)
    # For workers that are not forked.
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    yield Host(made)
    made.group.close()


def sockets(pid: int) -> set[str]:
    """Those that a process has open."""
    found = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        if (target := os.readlink(file)).startswith("socket:"):  # noqa: PTH115
            found.add(target)
    return found


@pytest.mark.parametrize("program", ["", ANOTHER_THREAD], ids=["forked", "started"])
def test_each_worker_has_its_own_channel_and_nobody_else_has_it(program: str, host: Host) -> None:
    """Another process that holds it would keep the launcher from noticing that the worker has ended."""
    pids = host.begin(3, program=program)
    assert host.process is not None
    standby = host.keep_standby(3) if not program else None
    everybody = [host.process.pid, *pids.values(), *([standby] if standby else [])]
    held = [sockets(pid) for pid in everybody]
    assert sum(map(len, held)) == len(set().union(*held)) == len(everybody), "one for each, and the server's own"
    host.server.group.detach("over")
    assert host.server.end() == WorkersEnd(1, {0: 71, 1: 71, 2: 71})
    assert {one.environment["RANK"]: one.transport for one in host.server.group.waiting} == {
        rank: f'{{"OF": "{rank}"}}' for rank in "012"
    }
    assert host.waiting == pids


def test_survivors_keep_their_processes(host: Host) -> None:
    first = host.begin(3)
    assert host.lose(first["1"], rank=1) == WorkersEnd(1, {1: -9})
    assert host.waiting == {rank: first[rank] for rank in "02"}
    second = host.begin(3)
    assert (second["0"], second["2"]) == (first["0"], first["2"])
    assert second["1"] not in first.values()
    # And again, with the one that was new.
    assert host.lose(second["0"], rank=0) == WorkersEnd(1, {0: -9})
    third = host.begin(3)
    assert (third["1"], third["2"]) == (second["1"], second["2"])
    assert third["0"] not in second.values()


def test_a_standby_takes_the_place_of_the_dead(host: Host) -> None:
    first = host.begin(2)
    standby = host.keep_standby(2)
    host.lose(first["1"], rank=1)
    second = host.begin(2)
    assert second == {"0": first["0"], "1": standby}
    # It is a worker like the others now, and another one can be prepared.
    again = host.keep_standby(2)
    host.lose(second["0"], rank=0)
    assert host.begin(2) == {"0": again, "1": standby}


def test_survivors_that_do_not_fit_are_killed_and_waited_for_by_the_new_ones(host: Host) -> None:
    first = host.begin(2)
    host.lose(first["1"], rank=1)
    survivor = psutil.Process(first["0"])
    second = host.begin(3)
    assert is_gone(survivor) or not lives(survivor)
    assert survivor.pid not in second.values()
    assert len(set(second.values())) == 3


def test_a_worker_that_does_not_detach_is_killed_and_the_others_are_kept(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEAF", "1")
    first = host.begin(2)
    group = host.server.group
    group.detach("over")
    wait_until(lambda: group.poll() is None and group.run.codes == {0: 71}, timeout_s=20, what="the one that listens")
    group.kill()
    assert host.server.end(timeout_s=20) == WorkersEnd(1, {0: 71})
    deaf = psutil.Process(first["1"]) if psutil.pid_exists(first["1"]) else None
    wait_until(lambda: deaf is None or is_gone(deaf), timeout_s=10, what="the end of the one that does not listen")
    assert host.waiting == {"0": first["0"]}
    assert host.begin(2)["0"] == first["0"]


def test_a_worker_whose_interpreter_is_locked_is_replaced_by_its_standby(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKED", "2")
    first, group = host.begin(3), host.server.group
    standby = host.keep_standby(3, bound=BUILT_FOR)
    os.kill(first["0"], signal.SIGKILL)
    wait_until(lambda: group.poll() is None and group.run.codes == {0: -9}, timeout_s=20, what="the death")
    group.detach("a worker has died")
    wait_until(lambda: group.poll() is None and set(host.waiting) == {"1"}, timeout_s=20, what="the one that runs")
    group.kill_unresponsive()
    assert host.server.end(timeout_s=20) == WorkersEnd(1, {0: -9}), "the death that came first"
    second = host.begin(3)
    assert (second["1"], second["2"]) == (first["1"], standby)


def test_workers_that_wait_end_with_their_fork_server_and_the_next_ones_are_new(host: Host) -> None:
    first = host.begin(2)
    standby = host.keep_standby(2)
    host.lose(first["1"], rank=1)
    assert host.process is not None
    survivors = [psutil.Process(pid) for pid in (first["0"], standby)]
    host.process.kill()
    wait_until(lambda: all(map(is_gone, survivors)), timeout_s=20, what="the end of those that wait")
    host.server.group.prepare()
    assert host.waiting == {}
    second = host.begin(2)
    assert not {*first.values(), standby} & {*second.values()}


def test_a_worker_that_dies_while_it_waits_is_replaced(host: Host) -> None:
    first = host.begin(3)
    host.lose(first["1"], rank=1)
    os.kill(first["0"], signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(first["0"]), timeout_s=20, what="its end")
    second = host.begin(3)
    assert second["2"] == first["2"]
    assert not {second["0"], second["1"]} & {*first.values()}


def test_closing_ends_those_that_wait_and_the_standby(host: Host) -> None:
    first = host.begin(2)
    standby = host.keep_standby(2)
    host.lose(first["1"], rank=1)
    left = [psutil.Process(pid) for pid in (first["0"], standby)]
    host.server.group.close()
    # Whoever comes next on this host finds what they held released.
    host.server.group.wait_until_gone(10)
    assert all(map(is_gone, left))


def test_new_workers_wait_for_those_that_were_released(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    first = host.begin(2)
    host.lose(first["1"], rank=1)
    survivor = psutil.Process(first["0"])
    with monkeypatch.context() as context:
        # It waits for its device, and does not die at once.
        spare(survivor, context)
        host.server.group.release()
    assert host.waiting == {}
    second = host.begin(2)
    assert survivor.pid not in second.values()
    assert [one.pid for one in decode(host.part(0)[1])] == [survivor.pid]
    assert host.part(1)[1] == host.part(0)[1]
    # Its channel is closed, and so it ends by itself.
    wait_until(lambda: is_gone(survivor), timeout_s=20, what="its end")
    # Those that take part are not waited for, and who has gone is not either.
    assert host.lose(second["1"], rank=1) == WorkersEnd(1, {1: -9})
    host.begin(2)
    assert host.part(1)[1] == ""


NO_ROOM_FOR_A_THIRD = """
fork, made = os.fork, []
def fork_two():
    if len(made) == 2:
        raise OSError(11, "no room")
    made.append(1)
    return fork()
os.fork = fork_two
"""


def test_a_standby_for_which_there_is_no_room_costs_the_generation_nothing(host: Host) -> None:
    first = host.begin(2, program=NO_ROOM_FOR_A_THIRD)
    group = host.server.group
    assert host.process is not None
    for _ in range(2):
        # Each first step tries it again.
        group.keep_standbys(host.environments(2)[-1:], bound=())
        time.sleep(0.3)
        assert group.poll() is None
        assert group.run.codes == {}
    assert lives(host.process)
    assert {one.pid for one in host.process.children()} == {*first.values()}
    assert host.lose(first["1"], rank=1) == WorkersEnd(1, {1: -9})
    assert host.waiting == {"0": first["0"]}
