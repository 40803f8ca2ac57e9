"""Workers that die, do not die, or whose fork server ends: what the launcher learns, and what is left running."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from torchruns import wait_until

from elastictrain.fault.exits import encode as encode_processes
from elastictrain.fault.exits import identify, runs
from elastictrain.fault.launcher_channel import AskToStop
from elastictrain.identity import PREVIOUS_WORKERS
from elastictrain.launch.worker_group import WorkerGroup
from elastictrain.launch.workers_of_generation import WorkersEnd
from elastictrain.start_times import ORDERED

ASK = AskToStop("a worker of this host has failed", 2e9, host_stays=True)

PR_SET_CHILD_SUBREAPER = 36
PTRACE_SEIZE, WALL = 0x4206, 0x40000000

SLEEPS = "import time; time.sleep(600)"
TELLS = r"""import os; os.write(0, b'{"ready": true}\n'); """
"""Of a fork server: that it has imported all."""
SAVES = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPS
STARTS_ONE = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]); " + SAVES
LEAVES_ONLY_A_THREAD = """
import ctypes, platform, signal, threading, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


# The first process of a namespace, when killed, is there as long as any other of it is.
LEAVES_SLOWLY = """
import ctypes, os, time
assert ctypes.CDLL(None).unshare(0x20000000) == 0
for _ in range(2):
    if os.fork() > 0:
        break
time.sleep(600)
"""


HOLDS = """
import ctypes, os
libc = ctypes.CDLL(None)
assert libc.unshare(0x20000000) == 0
read, write = os.pipe()
first = os.fork()
if first == 0:
    # In its own count it is the first.
    if os.fork() == 0:
        os.write(write, b"x")
    import time
    time.sleep(600)
os.read(read, 1)
(child,) = map(int, open(f"/proc/{first}/task/{first}/children").read().split())
assert libc.ptrace(0x4206, child, 0, 0) == 0
release = lambda: os.waitpid(child, 0x40000000)
"""


TRACER = f"""
import ctypes, os, sys
assert ctypes.CDLL(None).ptrace({PTRACE_SEIZE}, int(sys.argv[1]), 0, 0) == 0
print("held", flush=True)
sys.stdin.read()
os.waitpid(int(sys.argv[1]), {WALL})
"""


def hold(pid: int) -> Callable[[], None]:
    """Have a process be there after its end until what is returned is called; nobody but its tracer could ask for it before."""
    tracer = subprocess.Popen([sys.executable, "-c", TRACER, str(pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert tracer.stdout is not None
    assert tracer.stdout.readline() == b"held\n"

    def release() -> None:
        tracer.communicate(timeout=30)
        assert tracer.returncode == 0

    return release


def stands_in(*workers: Sequence[str], then: str = "time.sleep(600)") -> str:
    """A fork server of which only the processes count; `then` may `tell` of their ends."""
    program = f"""
        import json, os, subprocess, sys, time
        {TELLS}
        order = json.loads(sys.stdin.readline())["order"]
        def tell(**message):
            os.write(0, json.dumps({{"order": order, **message}}).encode() + b"\\n")
        workers = [subprocess.Popen([sys.executable, *worker], start_new_session=True) for worker in {list(map(list, workers))}]
        tell(pids=[worker.pid for worker in workers])
        {then}
    """
    return textwrap.dedent(program)


class Clock:
    """Real time, and what a test adds to it."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Host:
    """A fork server, and all processes that it ever started."""

    def __init__(self, *workers: Sequence[str], then: str = "time.sleep(600)") -> None:
        self.clock = Clock()
        self.group = WorkerGroup(program=self.file(stands_in(*workers, then=then)), clock=self.clock)
        others = set(psutil.Process().children())
        self.group.start(tuple({"RANK": str(rank)} for rank in range(len(workers) or 1)), store_port=0)
        (self.server,) = set(psutil.Process().children()) - others
        self.family: list[psutil.Process] = []

    def file(self, program: str) -> list[str]:
        """The command of the fork server, which may become another program with its next start."""
        handle, self._path = tempfile.mkstemp(suffix=".py")
        os.close(handle)
        self.become(program)
        return [sys.executable, self._path]

    def become(self, program: str) -> None:
        Path(self._path).write_text(program)

    def see(self, number: int) -> list[psutil.Process]:
        """Wait until there are so many, and until the launcher knows the workers."""

        def all_there() -> bool:
            self.group.wait(0.0)
            self.family = self.server.children(recursive=True)
            return len(self.family) == number

        wait_until(all_there, timeout_s=20, what=f"{number} processes")
        # So that they do what they are told before anything happens to them.
        time.sleep(0.3)
        assert self.group.poll() is None
        return self.family

    def kill_server(self) -> None:
        """It alone; after that its workers are nobody's children."""
        self.server.kill()
        self.wait_for_server()

    def wait_for_server(self) -> None:

        def ended() -> bool:
            self.group.wait(0.0)
            return not lives(self.server)

        wait_until(ended, timeout_s=20, what="the end of the fork server")

    def end(self, *, timeout_s: float = 10) -> WorkersEnd:
        """What `poll` says in the end; it never takes long to say that there is no answer yet."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            began = time.monotonic()
            ended = self.group.poll()
            assert time.monotonic() - began < 1
            if ended is not None:
                return ended
            time.sleep(0.02)
        raise AssertionError("no answer")

    def clean(self) -> None:
        self.group.close()
        Path(self._path).unlink()
        for one in (self.server, *self.family):
            if one.is_running():
                os.kill(one.pid, signal.SIGKILL)


KILLED = WorkersEnd(-signal.SIGKILL, {})


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    made: list[Host] = []
    yield made
    for host in made:
        host.clean()


def lives(process: psutil.Process) -> bool:
    """Whether it may still do something."""
    return process.is_running() and runs(process.pid)


def living(command: Sequence[str]) -> list[psutil.Process]:
    """Processes of any parent with this command line; one that ends while it is looked at has none."""
    return [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == [*command] and lives(one)]


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_workers_whose_fork_server_was_killed_are_gone_before_the_next_one_starts(hosts: list[Host]) -> None:
    hosts.append(host := Host(["-c", SAVES], ["-c", STARTS_ONE]))
    family = host.see(3)
    host.kill_server()
    assert host.end() == KILLED
    assert not any(lives(one) for one in family)


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="makes a namespace of processes, which needs root")


@dataclass(frozen=True, slots=True)
class Leaver:
    """A process that was killed, and still holds what it held."""

    process: psutil.Process
    release: Callable[[], None]


def leave_one_behind(host: Host) -> Leaver:
    """The end of a torchrun, one of whose workers takes its time."""
    worker, slow, child = host.see(3)
    release = hold(child.pid)
    host.kill_server()
    assert host.end(timeout_s=5) == KILLED
    assert not lives(worker)
    assert not lives(slow)
    assert not is_gone(slow)
    return Leaver(slow, release)


def assert_waits_for(leaver: Leaver, host: Host) -> None:
    timer = threading.Timer(0.5, leaver.release)
    timer.start()
    host.group.wait_until_gone(10)
    assert is_gone(leaver.process)
    timer.join()


@needs_root
def test_the_next_workers_are_told_who_still_gives_back_what_it_holds(hosts: list[Host], tmp_path: Path) -> None:
    hosts.append(host := Host(["-c", LEAVES_SLOWLY]))
    leaver = leave_one_behind(host)
    told = tmp_path / "told"
    program = TELLS + f"import json, os, sys; open({str(told)!r}, 'w').write(sys.stdin.readline()); sys.exit(1)"
    host.become(program)
    host.group.start(({"A": "b"}, {"A": "c"}), store_port=7)
    assert host.end() == WorkersEnd(1, {})
    leaving = identify(leaver.process.pid)
    assert leaving is not None
    previous_workers = {PREVIOUS_WORKERS: encode_processes([leaving])}
    environments = [{"A": "b", **previous_workers}, {"A": "c", **previous_workers}]
    order = json.loads(told.read_text())
    ordered = [environment.pop(ORDERED) for environment in order["environments"]]
    assert len(set(ordered)) == 1
    assert float(ordered[0]) <= time.clock_gettime(time.CLOCK_BOOTTIME)
    assert order == {"environments": environments, "store_port": 7, "order": 2}
    leaver.release()


@needs_root
def test_who_still_gives_back_what_it_holds_is_gone_when_the_launcher_is(hosts: list[Host]) -> None:
    """Who comes next on this host knows nothing of it."""
    hosts.append(host := Host(["-c", LEAVES_SLOWLY]))
    leaver = leave_one_behind(host)
    host.group.close()
    host.group.wait_until_gone(0.1)
    assert not is_gone(leaver.process)
    assert_waits_for(leaver, host)


@needs_root
def test_nobody_waits_for_ever_to_be_asked_how_he_ended(hosts: list[Host]) -> None:
    """As in a container whose first process is the launcher, and so the parent of all orphans."""
    libc = ctypes.CDLL(None)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        hosts.append(host := Host(["-c", LEAVES_SLOWLY]))
        leaver = leave_one_behind(host)
        leaver.release()
        host.group.wait_until_gone(10)
        assert not [one for one in host.family if one.is_running()]
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@needs_root
def test_who_is_left_of_two_starts_ago_is_not_forgotten(hosts: list[Host]) -> None:
    hosts.append(host := Host(["-c", LEAVES_SLOWLY]))
    leaver = leave_one_behind(host)
    host.become(TELLS + "import sys; sys.stdin.readline(); sys.exit(1)")
    host.group.start(({},), store_port=0)
    assert host.end() == WorkersEnd(1, {})
    assert_waits_for(leaver, host)


def test_who_has_ended_and_is_asked_for_by_nobody_is_gone(hosts: list[Host]) -> None:
    """As in a container whose first process is the launcher, and so the parent of all orphans."""
    libc = ctypes.CDLL(None)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        hosts.append(host := Host(["-c", SAVES]))
        (worker,) = host.see(1)
        host.kill_server()
        assert host.end() == KILLED
        host.group.wait_until_gone(10)
        assert is_gone(worker)
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def test_who_came_after_the_last_look_is_found_through_who_had_started_it(hosts: list[Host]) -> None:
    late = f"import subprocess, sys, time; time.sleep(2); subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]); " + SAVES
    hosts.append(host := Host(["-c", late]))
    host.see(1)
    wait_until(lambda: len(host.server.children(recursive=True)) == 2, timeout_s=20, what="the child")
    host.family = host.server.children(recursive=True)
    host.kill_server()
    assert host.end() == KILLED
    assert not any(lives(one) for one in host.family)


def test_saver_and_watcher_outlive_a_killed_fork_server(hosts: list[Host], tmp_path: Path) -> None:
    hosts.append(host := Host(["-c", SLEEPS, "elastictrain.checkpoint.saver"], ["-c", SLEEPS, "elastictrain.liveness"]))
    saver, watcher = host.see(2)
    host.kill_server()
    assert host.end() == KILLED
    assert lives(saver)
    assert lives(watcher)


def test_who_was_about_to_become_a_saver_when_it_was_seen_lives_on(hosts: list[Host]) -> None:
    becomes = "import os, sys, time; time.sleep(2); "
    becomes += f"os.execv(sys.executable, [sys.executable, '-c', {SLEEPS!r}, 'elastictrain.checkpoint.saver'])"
    hosts.append(host := Host(["-c", becomes]))
    (saver,) = host.see(1)
    wait_until(lambda: "elastictrain.checkpoint.saver" in saver.cmdline(), timeout_s=20, what="the saver")
    host.kill_server()
    assert host.end() == KILLED
    assert lives(saver)


TELLS_OF_ALL = "tell(codes=[(rank, worker.wait()) for rank, worker in enumerate(workers)]); time.sleep(600)"
TELLS_OF_FIRST = "tell(codes=[(0, workers[0].wait())]); tell(codes=[(1, workers[1].wait())]); time.sleep(600)"


def test_workers_that_end_well_are_an_end(hosts: list[Host]) -> None:
    hosts.append(host := Host(["-c", ""], ["-c", ""], then=TELLS_OF_ALL))
    assert host.end() == WorkersEnd(0, {})
    # The next ones are forked from the same process.
    assert lives(host.server)


def test_workers_that_have_ended_well_before_their_fork_server_are_an_end(hosts: list[Host]) -> None:
    hosts.append(host := Host(["-c", ""], then=TELLS_OF_ALL.replace("time.sleep(600)", "sys.exit(3)")))
    host.wait_for_server()
    assert host.end() == WorkersEnd(0, {})


def test_the_code_of_the_worker_that_failed_first_counts(hosts: list[Host]) -> None:
    hosts.append(host := Host(["-c", "raise SystemExit(3)"], ["-c", SAVES.replace("SIG_IGN", "SIG_DFL")], then=TELLS_OF_FIRST))
    wait_until(lambda: host.group.poll() is None and bool(host.group.run.codes), timeout_s=20, what="the first failure")
    assert host.group.run.codes == {0: 3}
    # What ends after the first failure may do so because of it.
    for one in host.server.children():
        one.terminate()
    assert host.end() == WorkersEnd(1, {0: 3})


def test_workers_that_do_not_follow_one_that_failed_are_killed(hosts: list[Host]) -> None:
    hosts.append(host := Host(["-c", "raise SystemExit(3)"], ["-c", STARTS_ONE], then=TELLS_OF_FIRST))
    wait_until(lambda: host.group.poll() is None and bool(host.group.run.codes), timeout_s=20, what="the first failure")
    wait_until(lambda: len(host.server.children(recursive=True)) == 2, timeout_s=20, what="the child of the other one")
    host.family = host.server.children(recursive=True)
    host.group.ask_to_stop(ASK)
    time.sleep(0.3)
    assert host.group.poll() is None
    host.group.kill()
    assert host.end() == WorkersEnd(1, {0: 3})
    assert not any(lives(one) for one in host.family)


def test_an_end_that_is_told_late_is_none_of_the_next_workers(hosts: list[Host]) -> None:
    waits = "[worker.wait() for worker in workers]; late = order; order = json.loads(sys.stdin.readline())['order']; "
    tells = "tell(pids=[os.getpid()]); tell(order=late, codes=[(0, -9)]); tell(codes=[(0, 0)]); time.sleep(600)"
    hosts.append(host := Host(["-c", SLEEPS], then=waits + tells))
    host.see(1)
    host.group.kill()
    assert host.end() == KILLED
    host.group.start(({},), store_port=0)
    assert host.end() == WorkersEnd(0, {})


def test_what_a_worker_leaves_is_left_alone(hosts: list[Host]) -> None:
    """As after any program that ends: it may be there to send what is not sent yet."""
    command = ["sleep", f"600.{os.getpid()}"]  # nothing but this test has started it
    for code in (0, 1):
        leaves = f"import subprocess, sys; subprocess.Popen({command}); sys.exit({code})"
        hosts.append(host := Host(["-c", leaves], then=TELLS_OF_ALL))
        assert host.end().code == code
        (left,) = living(command)
        left.kill()


def test_killing_does_not_wait_and_poll_says_when_all_are_gone(hosts: list[Host]) -> None:
    hosts.append(host := Host(["-c", SAVES], ["-c", STARTS_ONE]))
    family = host.see(3)
    host.group.kill()
    host.group.kill()
    assert host.end() == KILLED
    assert not any(lives(one) for one in family)
    # The next ones are forked from the same process.
    assert lives(host.server)


def test_whoever_is_started_while_workers_are_being_killed_is_killed_too(hosts: list[Host]) -> None:
    """The order is being carried out, and the launcher does not know the workers yet."""
    hosts.append(host := Host())
    host.group.close()
    command = ["sleep", f"600.{os.getpid()}"]
    starts = f"[(subprocess.Popen({command}), time.sleep(0.002)) for _ in range(300)]"
    program = TELLS + f"import subprocess, sys, time; sys.stdin.readline(); {starts}"
    host.group = WorkerGroup(program=[sys.executable, "-c", program], clock=host.clock)
    others = set(psutil.Process().children())
    host.group.start(({},), store_port=0)
    # Not by its command line, which the kernel shows a moment later.
    (host.server,) = set(psutil.Process().children()) - others
    host.group.wait(20.0)
    wait_until(lambda: len(host.server.children()) > 5, timeout_s=20, what="the first of them")
    host.group.kill()
    assert host.end() == KILLED
    left = living(command)
    for one in left:
        one.kill()
    assert not left


def test_a_process_with_a_thread_that_does_not_end_is_not_taken_for_gone(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.append(host := Host(["-c", LEAVES_ONLY_A_THREAD]))
    (worker,) = host.see(1)
    wait_until(lambda: worker.status() == psutil.STATUS_ZOMBIE, timeout_s=20, what="the end of its first thread")
    spare(worker, monkeypatch)
    host.group.kill()
    assert host.group.poll() is None
    os.kill(worker.pid, signal.SIGKILL)
    assert host.end() == KILLED


def spare(process: psutil.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL does not end it, as if it waited for a device."""
    kill = psutil.Process.kill

    def kill_others(one: psutil.Process) -> None:
        if one != process:
            kill(one)

    monkeypatch.setattr(psutil.Process, "kill", kill_others)


@pytest.mark.parametrize("by", ["us", "others"])
def test_the_next_one_waits_for_who_does_not_die_but_not_for_ever(
    by: str, hosts: list[Host], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hosts.append(host := Host(["-c", SAVES], ["-c", SAVES]))
    worker, other = host.see(2)
    spare(worker, monkeypatch)
    if by == "us":
        host.group.kill()
    else:
        host.kill_server()
    wait_until(lambda: host.group.poll() is None and not lives(other), timeout_s=20, what="the end of the other one")
    host.clock.ahead_s += 25
    # The time counts from the first.
    host.group.kill()
    assert host.group.poll() is None
    assert not caplog.records
    host.clock.ahead_s += 6
    assert host.group.poll() == KILLED
    assert f"process(es) {worker.pid};" in caplog.text
    # Nothing is in the way of the next one.
    host.group.start(({},), store_port=0)
    host.group.close()


def test_a_fork_server_that_does_not_die_is_given_up_too(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hosts.append(host := Host())
    host.group.close()
    host.group = WorkerGroup(program=[sys.executable, "-c", SLEEPS], clock=host.clock)
    others = set(psutil.Process().children())
    host.group.start(({},), store_port=0)
    host.clock.ahead_s += 301  # it is no longer taken for one that imports
    (host.server,) = set(psutil.Process().children()) - others
    with monkeypatch.context() as unkillable:
        unkillable.setattr(subprocess.Popen, "kill", lambda self: None)
        host.group.kill()
        assert host.group.poll() is None
        host.clock.ahead_s += 31
        assert host.group.poll() == KILLED
    assert f"process(es) {host.server.pid};" in caplog.text


def test_closing_takes_some_seconds_and_never_fails(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("elastictrain.launch.worker_group._CLOSE_WITHIN_S", 0.5)
    others = psutil.Process().children()
    hosts.append(host := Host(["-c", SAVES]))
    (worker,) = host.see(1)
    host.group.prepare()
    spare(worker, monkeypatch)
    began = time.monotonic()
    host.group.close()
    assert time.monotonic() - began < 5
    assert f"process(es) {worker.pid};" in caplog.text
    assert not lives(host.server)
    assert [one for one in psutil.Process().children() if one not in others and lives(one)] == []
    host.group.close()
