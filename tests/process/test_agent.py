"""torchruns that die, do not die, or fail by themselves: what the launcher learns, and what is left running."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from torchruns import environment, wait_until

from elastictrain.errors import EXIT_BUG, EXIT_TRANSPORT, EXIT_UNFIT
from elastictrain.fault.exits import encode as encode_processes
from elastictrain.fault.exits import identify, runs
from elastictrain.fault.reasons import Reason, read_reasons
from elastictrain.identity import FOLDER, LAUNCHER, PREDECESSORS
from elastictrain.launch.orders import Orders, decode, encode, read_answer
from elastictrain.launch.torchrun import Torchrun

NO_ORDERS = Orders((), {}, "", 0, (), 600.0)
PR_SET_CHILD_SUBREAPER = 36
PTRACE_SEIZE, WALL = 0x4206, 0x40000000

SLEEPS = "import time; time.sleep(600)"
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


def stands_in(*workers: Sequence[str], then: str = "time.sleep(600)") -> list[str]:
    """A torchrun of which only the processes count."""
    program = f"""
        import subprocess, sys, time
        sys.stdin.readline()
        for worker in {[list(worker) for worker in workers]}:
            subprocess.Popen([sys.executable, *worker])
        {then}
    """
    return [sys.executable, "-c", textwrap.dedent(program)]


class Clock:
    """Real time, and what a test adds to it."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Host:
    """A torchrun, and all processes that it ever started."""

    def __init__(self, *workers: Sequence[str], then: str = "time.sleep(600)") -> None:
        self.clock = Clock()
        self.torchrun = Torchrun(program=stands_in(*workers, then=then), clock=self.clock)
        others = set(psutil.Process().children())
        self.torchrun.start(NO_ORDERS)
        (self.agent,) = set(psutil.Process().children()) - others
        self.family: list[psutil.Process] = []

    def see(self, number: int) -> list[psutil.Process]:
        """Wait until there are so many, and until they have been looked at."""

        def all_there() -> bool:
            self.family = self.agent.children(recursive=True)
            return len(self.family) == number

        wait_until(all_there, timeout_s=20, what=f"{number} processes")
        # So that they do what they are told before anything happens to them.
        time.sleep(0.3)
        self.clock.ahead_s += 2
        assert self.torchrun.poll() is None
        return self.family

    def kill_agent(self) -> None:
        """It alone; after that nobody can look at its family any more."""
        self.agent.kill()
        self.wait_for_agent()

    def wait_for_agent(self) -> None:
        wait_until(lambda: not lives(self.agent), timeout_s=20, what="the end of torchrun")

    def end(self, *, timeout_s: float = 10) -> int:
        """What `poll` says in the end; it never takes long to say that there is no answer yet."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            began = time.monotonic()
            code = self.torchrun.poll()
            assert time.monotonic() - began < 1
            if code is not None:
                return code
            time.sleep(0.02)
        raise AssertionError("no answer")

    def clean(self) -> None:
        for one in (self.agent, *self.family):
            if one.is_running():
                os.kill(one.pid, signal.SIGKILL)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    made: list[Host] = []
    yield made
    for host in made:
        host.clean()


def lives(process: psutil.Process) -> bool:
    """Whether it may still do something."""
    return process.is_running() and runs(process.pid)


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_workers_whose_torchrun_was_killed_are_gone_before_the_next_one_starts(hosts: list[Host]) -> None:
    hosts.append(host := Host(["-c", SAVES], ["-c", STARTS_ONE]))
    family = host.see(3)
    host.kill_agent()
    assert host.end() == -signal.SIGKILL
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
    host.kill_agent()
    assert host.end(timeout_s=5) == -signal.SIGKILL
    assert not lives(worker)
    assert not lives(slow)
    assert not is_gone(slow)
    return Leaver(slow, release)


def assert_waits_for(leaver: Leaver, host: Host) -> None:
    timer = threading.Timer(0.5, leaver.release)
    timer.start()
    host.torchrun.wait_until_gone(10)
    assert is_gone(leaver.process)
    timer.join()


@needs_root
def test_the_next_workers_are_told_who_still_gives_back_what_it_holds(hosts: list[Host], tmp_path: Path) -> None:
    hosts.append(host := Host(["-c", LEAVES_SLOWLY]))
    leaver = leave_one_behind(host)
    told = tmp_path / "told"
    host.torchrun._program = [sys.executable, "-c", f"import sys; open({str(told)!r}, 'w').write(sys.stdin.readline())"]
    host.torchrun.start(replace(NO_ORDERS, environment={"A": "b"}))
    assert host.end() == 0
    leaving = identify(leaver.process.pid)
    assert leaving is not None
    assert decode(told.read_bytes()).environment == {"A": "b", PREDECESSORS: encode_processes([leaving])}
    leaver.release()


@needs_root
def test_who_still_gives_back_what_it_holds_is_gone_when_the_launcher_is(hosts: list[Host]) -> None:
    """Who comes next on this host knows nothing of it."""
    hosts.append(host := Host(["-c", LEAVES_SLOWLY]))
    leaver = leave_one_behind(host)
    host.torchrun.close()
    host.torchrun.wait_until_gone(0.1)
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
        host.torchrun.wait_until_gone(10)
        assert not [one for one in host.family if one.is_running()]
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@needs_root
def test_who_is_left_of_two_starts_ago_is_not_forgotten(hosts: list[Host]) -> None:
    hosts.append(host := Host(["-c", LEAVES_SLOWLY]))
    leaver = leave_one_behind(host)
    host.torchrun._program = stands_in(then="sys.exit(1)")
    host.torchrun.start(NO_ORDERS)
    assert host.end() == 1
    assert_waits_for(leaver, host)


@needs_root
def test_a_worker_that_was_killed_has_ended_before_it_is_gone() -> None:
    program = f"""
import os, signal, socket, time
from pathlib import Path
{HOLDS}
from elastictrain.fault.exits import is_there
from elastictrain.launch.forks import Fork, Forks
fork = Fork(first, socket.socket())
assert fork.poll() is None
os.kill(first, signal.SIGKILL)
print(fork.wait(10))
forks = Forks()
forks._taken.append(fork)
print(forks.leaving() == (fork.process,))
release()
while is_there(fork.process):
    time.sleep(0.01)
# It waits for its parent.
print(fork.poll(), forks.leaving() == (fork.process,))
os.waitpid(first, 0)
print(forks.leaving())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment(), check=False
    )
    assert done.stdout.split() == ["-9", "True", "-9", "True", "()"], done.stderr


def test_who_has_ended_and_is_asked_for_by_nobody_is_gone(hosts: list[Host]) -> None:
    """As in a container whose first process is the launcher, and so the parent of all orphans."""
    libc = ctypes.CDLL(None)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        hosts.append(host := Host(["-c", SAVES]))
        (worker,) = host.see(1)
        host.kill_agent()
        assert host.end() == -signal.SIGKILL
        host.torchrun.wait_until_gone(10)
        assert is_gone(worker)
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def test_who_came_after_the_last_look_is_found_through_who_had_started_it(hosts: list[Host]) -> None:
    late = f"import subprocess, sys, time; time.sleep(2); subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]); " + SAVES
    hosts.append(host := Host(["-c", late]))
    host.see(1)
    wait_until(lambda: len(host.agent.children(recursive=True)) == 2, timeout_s=20, what="the child")
    host.family = host.agent.children(recursive=True)
    host.kill_agent()
    assert host.end() == -signal.SIGKILL
    assert not any(lives(one) for one in host.family)


def test_saver_and_watcher_outlive_a_killed_torchrun(hosts: list[Host], tmp_path: Path) -> None:
    hosts.append(host := Host(["-c", SLEEPS, "elastictrain.checkpoint.saver"], ["-c", SLEEPS, "elastictrain.liveness"]))
    saver, watcher = host.see(2)
    host.kill_agent()
    assert host.end() == -signal.SIGKILL
    assert lives(saver)
    assert lives(watcher)


def test_who_was_about_to_become_a_saver_when_it_was_seen_lives_on(hosts: list[Host]) -> None:
    becomes = "import os, sys, time; time.sleep(2); "
    becomes += f"os.execv(sys.executable, [sys.executable, '-c', {SLEEPS!r}, 'elastictrain.checkpoint.saver'])"
    hosts.append(host := Host(["-c", becomes]))
    (saver,) = host.see(1)
    wait_until(lambda: "elastictrain.checkpoint.saver" in saver.cmdline(), timeout_s=20, what="the saver")
    host.kill_agent()
    assert host.end() == -signal.SIGKILL
    assert lives(saver)


def test_what_a_failed_torchrun_has_given_up_on_is_not_left_running(hosts: list[Host]) -> None:
    """After a minute it leaves a worker that it could not end."""
    hosts.append(host := Host(["-c", STARTS_ONE], then="time.sleep(2); sys.exit(1)"))
    worker, _ = host.see(2)
    assert host.end() == 1
    assert not lives(worker)


def test_what_a_worker_leaves_when_it_fails_is_left_alone(hosts: list[Host]) -> None:
    """As after any program that fails: it may be there to send what is not sent yet."""
    fails = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]); time.sleep(2); sys.exit(1)"
    hosts.append(host := Host(["-c", fails], then="time.sleep(2.5); sys.exit(1)"))
    _, left = host.see(2)
    host.wait_for_agent()
    assert host.end() == 1
    assert lives(left)


def test_what_a_worker_leaves_that_takes_its_time_is_left_alone(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a child of that worker until the kernel is done with it."""
    hosts.append(host := Host(["-c", STARTS_ONE], then="time.sleep(2.5); sys.exit(1)"))
    worker, left = host.see(2)
    monkeypatch.setattr("elastictrain.launch.torchrun.runs", lambda pid: pid != worker.pid and runs(pid))
    host.wait_for_agent()
    assert host.end() == 1
    assert lives(left)


def test_what_goes_on_after_a_good_end_is_left_alone(hosts: list[Host]) -> None:
    hosts.append(host := Host(["-c", SLEEPS], then="time.sleep(2); sys.exit(0)"))
    (left,) = host.see(1)
    assert host.end() == 0
    assert lives(left)


def test_killing_does_not_wait_and_poll_says_when_all_are_gone(hosts: list[Host]) -> None:
    hosts.append(host := Host(["-c", SAVES], ["-c", STARTS_ONE]))
    family = host.see(3)
    host.torchrun.kill()
    host.torchrun.kill()
    assert host.end() == -signal.SIGKILL
    assert not any(lives(one) for one in (host.agent, *family))


def test_whoever_is_started_while_torchrun_is_being_killed_is_killed_too(hosts: list[Host]) -> None:
    hosts.append(host := Host(then="[(subprocess.Popen(['sleep', '600.25']), time.sleep(0.002)) for _ in range(300)]"))
    wait_until(lambda: len(host.agent.children()) > 5, timeout_s=20, what="the first of them")
    host.torchrun.kill()
    assert host.end() == -signal.SIGKILL
    left = [one for one in psutil.process_iter() if lives(one) and one.cmdline() == ["sleep", "600.25"]]
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
    host.torchrun.kill()
    host.wait_for_agent()
    assert host.torchrun.poll() is None
    os.kill(worker.pid, signal.SIGKILL)
    assert host.end() == -signal.SIGKILL


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
        host.torchrun.kill()
    else:
        host.kill_agent()
    wait_until(lambda: host.torchrun.poll() is None and not lives(other), timeout_s=20, what="the end of the other one")
    host.clock.ahead_s += 25
    # The time counts from the first.
    host.torchrun.kill()
    assert host.torchrun.poll() is None
    assert not caplog.records
    host.clock.ahead_s += 6
    assert host.torchrun.poll() == -signal.SIGKILL
    assert f"process(es) {worker.pid};" in caplog.text
    # Nothing is in the way of the next one.
    host.torchrun.start(NO_ORDERS)
    host.torchrun.close()


def test_a_torchrun_that_does_not_die_is_given_up_too(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hosts.append(host := Host())
    with monkeypatch.context() as unkillable:
        unkillable.setattr(subprocess.Popen, "kill", lambda self: None)
        host.torchrun.kill()
        assert host.torchrun.poll() is None
        host.clock.ahead_s += 31
        running = host.torchrun._running
        assert host.torchrun.poll() == -signal.SIGKILL
    assert f"process(es) {host.agent.pid};" in caplog.text
    assert running is not None
    running.kill()
    running.wait(10)


def test_closing_takes_some_seconds_and_never_fails(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("elastictrain.launch.torchrun._CLOSE_WITHIN_S", 0.5)
    others = psutil.Process().children()
    hosts.append(host := Host(["-c", SAVES]))
    (worker,) = host.see(1)
    host.torchrun.prepare()
    spare(worker, monkeypatch)
    began = time.monotonic()
    host.torchrun.close()
    assert time.monotonic() - began < 5
    assert f"process(es) {worker.pid};" in caplog.text
    assert not lives(host.agent)
    assert [one for one in psutil.Process().children() if one not in others and lives(one)] == []
    host.torchrun.close()


AGENT = """
import sys
from elastictrain.launch import agent
# Of interest is what comes after it.
agent.import_ahead = lambda: None
{program}
sys.exit(agent.main())
"""


def told(arguments: Sequence[str], folder: Path, *, launcher: int | None = None) -> bytes:
    """Orders for one worker."""
    variables = {LAUNCHER: str(os.getpid() if launcher is None else launcher), FOLDER: str(folder)}
    return encode(Orders(tuple(arguments), variables, str(folder / "answer.json"), 1, ("a",), 600.0))


def agent(
    orders: bytes, program: str = "", *, extra: Mapping[str, str] = {}, ignored: bool = False
) -> subprocess.CompletedProcess[str]:
    """One to its end, with `program` before it begins; `ignored`: started by somebody who ignores the end of processes."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN) if ignored else None
    try:
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", AGENT.format(program=program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(extra),
        )
    finally:
        if before is not None:
            signal.signal(signal.SIGCHLD, before)
    try:
        out, err = process.communicate(orders, timeout=60)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out.decode(), err.decode())


def one_worker(port: int) -> list[str]:
    return [*f"--nnodes 1 --nproc-per-node 1 --max-restarts 0 --master-addr 127.0.0.1 --master-port {port}".split()]


HELP = ["-m", "elastictrain.run", "--help"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def reason(folder: Path) -> Reason:
    (found,) = read_reasons(str(folder))
    return found


def test_a_master_port_that_is_taken_is_a_sentence_and_nobodys_fault(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = agent(told([*one_worker(port), *HELP], tmp_path))
    assert done.returncode == 1
    assert reason(tmp_path).exit_code == EXIT_TRANSPORT
    assert str(port) in reason(tmp_path).sentence
    assert f"elastictrain: {reason(tmp_path).sentence}\n" in done.stderr
    assert "Traceback" not in done.stderr


PARSE = """
from types import SimpleNamespace
def parse_args(told): return SimpleNamespace(master_addr="", master_port=0, rdzv_id="", node_rank=0)
"""


def made_up_torch(folder: Path, *, at_import: str = "", at_run: str = "") -> dict[str, str]:
    """A package that takes no time to import, and fails as it is told; returns the environment that has it."""
    files = {
        "torch/__init__.py": f"__version__ = '0'\n{at_import}",
        "torch/distributed/__init__.py": "",
        "torch/distributed/run.py": f"def run(told):\n    {at_run or 'pass'}\n" + PARSE,
        "torch/distributed/elastic/__init__.py": "",
        "torch/distributed/elastic/multiprocessing/__init__.py": "",
        "torch/distributed/elastic/multiprocessing/errors.py": "class ChildFailedError(Exception): pass\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(folder), environment()["PYTHONPATH"]])}


def test_a_torchrun_that_fails_otherwise_says_so(tmp_path: Path) -> None:
    made_up = made_up_torch(tmp_path / "packages", at_run="raise ValueError('no such thing')")
    done = agent(told([], tmp_path), extra=made_up)
    assert done.returncode == 1
    assert reason(tmp_path).exit_code == EXIT_BUG
    assert reason(tmp_path).sentence == "torchrun failed: ValueError: no such thing"
    assert "Traceback" in done.stderr


def test_a_torch_that_cannot_be_imported_makes_the_host_unfit(tmp_path: Path) -> None:
    made_up = made_up_torch(tmp_path / "packages", at_import="raise OSError('libcudart.so: cannot open it')")
    done = agent(told([], tmp_path), extra=made_up)
    assert done.returncode == 1
    assert reason(tmp_path).exit_code == EXIT_UNFIT
    assert "torch cannot be imported: OSError: libcudart.so: cannot open it" in reason(tmp_path).sentence
    assert done.stderr == f"elastictrain: {reason(tmp_path).sentence}\n"


def test_orders_of_a_launcher_that_died_before_it_was_followed_are_not_carried_out(tmp_path: Path) -> None:
    made_up = made_up_torch(tmp_path / "packages", at_run="print('ran')")
    assert agent(told([], tmp_path), extra=made_up).stdout == "ran\n"
    done = agent(told([], tmp_path, launcher=os.getppid()), extra=made_up)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_workers_start_where_torch_has_no_hook_for_them_any_more(tmp_path: Path) -> None:
    renames = """
import inspect, torch.distributed.run
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing import api
source = inspect.getsource(api.SubprocessContext).replace("get_subprocess_handler", "make_handler")
api.make_handler = api.get_subprocess_handler
del api.get_subprocess_handler
exec(source, vars(api))
multiprocessing.SubprocessContext = api.SubprocessContext
agent.Forks.prepare = None
"""
    done = agent(told([*one_worker(free_port()), *HELP], tmp_path), renames)
    assert done.returncode == 0, done.stderr
    assert "python -m elastictrain.run" in done.stdout


def test_ends_are_told_where_whoever_started_the_launcher_ignores_them(tmp_path: Path) -> None:
    done = agent(told([*one_worker(free_port()), "-m", "elastictrain.run", "recipe=none"], tmp_path), ignored=True)
    assert done.returncode == 1, done.stderr
    assert read_answer(tmp_path / "answer.json").codes == {0: 78}
