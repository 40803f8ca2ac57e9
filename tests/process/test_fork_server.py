"""Workers that are forked and not started: what they are like, and what is told where that is not possible."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from test_worker_group import hold, is_gone, lives
from torchruns import environment, free_port, rendezvous_arguments, wait_until

from elastictrain.errors import EXIT_BUG, EXIT_TRANSPORT, EXIT_UNFIT
from elastictrain.fault.reasons import Reason
from elastictrain.launch.membership.records import GenerationMember
from elastictrain.launch.rank_variables import plan_workers
from elastictrain.launch.worker_group import WorkerGroup
from elastictrain.launch.workers_of_generation import WorkersEnd
from tests.unit.launch.membership.made import generation

PROGRAM = """
import os, sys
from elastictrain.launch import fork_server as module, imports_ahead
# Of interest is what comes after it.
module.import_ahead = lambda _: imports_ahead.ImportedAhead()
{program}
os._exit(module.main())
"""
SLEEPS = "import time; time.sleep(600)"
FAILED = WorkersEnd(1, {})


def python(program: str, *, limit_s: float = 60) -> str:
    """What a program prints that must end well."""
    done = subprocess.run(
        [sys.executable, "-u", "-c", program], capture_output=True, text=True, timeout=limit_s, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Server:
    """A fork server and its launcher's side, with what the workers are to do instead of training."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        for name, value in environment().items():
            monkeypatch.setenv(name, value)
        self.group = WorkerGroup()
        self.unforked = ""
        self.reasons: tuple[Reason, ...] = ()

    def start(
        self, *arguments: str, program: str = "", worker: str = "", count: int = 1, store_port: int = 0, ignored: bool = False
    ) -> psutil.Process:
        """Workers of a new server; the rest is as for `prepare`."""
        server = self.prepare(*arguments, program=program, worker=worker, ignored=ignored)
        self.again(count=count, store_port=store_port)
        return server

    def prepare(self, *arguments: str, program: str = "", worker: str = "", ignored: bool = False) -> psutil.Process:
        """A new server; `program` runs in it first, `worker` in each worker instead of ours. `ignored`: it is started by
        somebody who ignores the ends of processes."""
        if worker:
            (self.folder / "made_up_worker.py").write_text(worker)
            program += f"\nsys.path.insert(0, {str(self.folder)!r})\nmodule._MODULE = 'made_up_worker'\n"
        self.group.close()
        self.group = WorkerGroup(arguments, program=[sys.executable, "-u", "-c", PROGRAM.format(program=program)])
        others = set(psutil.Process().children())
        before = signal.signal(signal.SIGCHLD, signal.SIG_IGN) if ignored else None
        try:
            self.group.prepare()
        finally:
            if before is not None:
                signal.signal(signal.SIGCHLD, before)
        (server,) = set(psutil.Process().children()) - others
        return server

    def again(self, *, count: int = 1, store_port: int = 0) -> None:
        """The next workers of the same server."""
        common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        environments = tuple({**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count))
        self.group.start(environments, store_port=store_port)

    def end(self, *, timeout_s: float = 60) -> WorkersEnd:
        found: list[WorkersEnd] = []

        def ended() -> bool:
            self.unforked = (self.group.run.unforked if self.group.run is not None else "") or self.unforked
            found.extend(filter(None, [self.group.poll()]))
            return bool(found)

        wait_until(ended, timeout_s=timeout_s, what="the end of the workers")
        self.reasons = found[0].reasons
        return replace(found[0], reasons=())

    def workers(self, server: psutil.Process, count: int) -> list[psutil.Process]:
        """When all of them are what they are to be."""

        def named() -> list[psutil.Process]:
            self.group.wait(0.0)
            return [one for one in server.children() if one.name().startswith("rank ")]

        wait_until(lambda: len(named()) == count, timeout_s=30, what="the workers")
        assert self.group.poll() is None
        return sorted(named(), key=psutil.Process.name)

    @property
    def reason(self) -> Reason:
        (found,) = self.reasons
        return found


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server(tmp_path, monkeypatch)
    yield made
    made.group.close()


def test_a_fork_is_the_program_in_its_environment(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    process = server.start("--help", count=2)
    # The second ones are forked from the same process.
    for _ in range(2):
        assert server.end() == WorkersEnd(0, {})
        # Only the first rank prints it.
        assert capfd.readouterr().out.count("python -m elastictrain.run") == 1
        server.again(count=2)
    assert server.end() == WorkersEnd(0, {})
    assert server.unforked == ""
    assert lives(process)


ANOTHER_THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"


def test_a_process_with_threads_starts_workers_anew(server: Server) -> None:
    server.start("recipe=none", program=ANOTHER_THREAD)
    assert server.end() == WorkersEnd(1, {0: 78})
    assert "2 threads" in server.unforked


def test_a_process_that_has_touched_a_device_starts_workers_anew(server: Server, tmp_path: Path) -> None:
    device = tmp_path / "device"
    device.touch()
    server.start("recipe=none", program=f"imports_ahead._DEVICES = ({str(device)!r},); file = open({str(device)!r})")
    assert server.end() == WorkersEnd(1, {0: 78})
    assert str(device) in server.unforked


@pytest.mark.parametrize(("compiles", "threads"), [("true", 1), ("false", 2)])
def test_what_is_imported_ahead_leaves_one_thread_and_no_device(compiles: str, threads: int) -> None:
    program = f"""
import os, sys
os.environ["OMP_NUM_THREADS"] = "{threads}"
from elastictrain.launch.imports_ahead import import_ahead, import_compiler, why_no_fork
ahead = import_ahead(["recipe=llama_tiny", "data=stdlib", "train.compile={compiles}"])
if ahead.later:
    import_compiler()
print(not ahead.unfit, not why_no_fork(), "elastictrain.train.worker" in sys.modules, ahead.composed.recipe)
import torch
print(torch.cuda.is_initialized(), *(str(name in sys.modules).lower() for name in ("networkx", "torch._inductor.compile_fx")))
"""
    assert python(program, limit_s=120).split() == ["True", "True", "True", "llama_tiny", "False", compiles, compiles]


def test_the_compiler_is_imported_without_asking_for_gpus(tmp_path: Path) -> None:
    (tmp_path / "compiler.py").write_text("import torch; found = torch.cuda.is_available()")
    program = f"""
import sys, torch
from elastictrain import torch_private
from elastictrain.launch import imports_ahead
def ask():
    raise RuntimeError("a device is opened")
torch.cuda.is_available = ask
sys.path.append({str(tmp_path)!r})
for imports_ahead._DRIVERS in ((), ({str(tmp_path)!r},)):
    torch_private.INDUCTOR = "compiler"
    imports_ahead.import_compiler()
    print(sys.modules.pop("compiler").found, torch.cuda.is_available is ask)
"""
    assert python(program).split() == ["False", "True", "True", "True"]


def test_with_gpus_the_compiler_is_imported_later(tmp_path: Path) -> None:
    program = f"""
import sys
from elastictrain.launch import imports_ahead
for imports_ahead._DRIVERS in (({str(tmp_path)!r},), ()):
    ahead = imports_ahead.import_ahead(["recipe=llama_tiny", "data=stdlib", "train.compile=true"], modules=())
    print(ahead.later, "torch._inductor.compile_fx" in sys.modules)
"""
    assert python(program).split() == ["True", "False", "False", "True"]


@pytest.mark.parametrize(("threads", "after"), [(0, "there"), (1, "-")])
def test_forks_find_the_compiler_that_the_server_has_imported_beside_the_first_ones(
    threads: int, after: str, server: Server, tmp_path: Path
) -> None:
    """Where it does not fork, nobody would."""
    program = f"""
module.import_ahead = lambda _: imports_ahead.ImportedAhead(later=True)
module.import_compiler = lambda: os.environ.update(COMPILER="there")
if {threads}:
    import threading, time
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    os.environ["PYTHONPATH"] = {str(tmp_path)!r} + ":" + os.environ["PYTHONPATH"]
"""
    file = tmp_path / "found"
    server.start(program=program, worker=f"import os; print(os.environ.get('COMPILER', '-'), file=open({str(file)!r}, 'a'))")
    assert server.end() == WorkersEnd(0, {})
    server.again()
    assert server.end() == WorkersEnd(0, {})
    assert file.read_text().split() == ["-", after]


def test_a_server_that_has_nothing_to_do_imports_the_compiler(server: Server, tmp_path: Path) -> None:
    program = f"""
module._IDLE_S = 0.1
module.import_ahead = lambda _: imports_ahead.ImportedAhead(later=True)
module.import_compiler = lambda: print("there", file=open({str(tmp_path / "told")!r}, "a"))
"""
    server.prepare(program=program)
    wait_until((tmp_path / "told").exists, what="the import")
    server.again()
    server.end()
    assert (tmp_path / "told").read_text().split() == ["there"]


def test_modules_that_cannot_be_imported_are_for_workers_to_tell_of() -> None:
    program = """
import os, sys, types
from elastictrain.launch.imports_ahead import import_ahead
sys.modules["torch"] = types.ModuleType("torch")
print(import_ahead(modules=["no.such.module"]).unfit == "", os.environ.get("OPENBLAS_NUM_THREADS"))
"""
    assert python(program).split() == ["True", "None"]


def test_a_torch_that_cannot_be_imported_makes_the_host_unfit(server: Server, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so: cannot open it')")
    program = f"import importlib; importlib.reload(module); sys.path.insert(0, {str(tmp_path)!r})"
    server.start(program=program)
    assert server.end() == FAILED
    assert server.reason.exit_code == EXIT_UNFIT
    assert "libcudart.so" in server.reason.sentence


def test_a_worker_that_is_no_fork_imports_the_compiler_where_its_bytecode_is_kept(tmp_path: Path) -> None:
    program = f"""
import sys
from contextlib import contextmanager
import elastictrain.run as run
from elastictrain.train import context
@contextmanager
def bytecode_kept():
    before = "torch._inductor.compile_fx" in sys.modules
    yield
    print(before, "torch._inductor.compile_fx" in sys.modules, file=sys.stderr)
    raise SystemExit(0)
context.bytecode_kept = bytecode_kept
run.main(["recipe=llama_tiny", "data=stdlib", "train.compile=true", "run.dir={tmp_path}/run"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment(), check=False
    )
    assert "False True" in done.stderr


@pytest.mark.parametrize("way", ["fork server", "run"])
def test_bytecode_of_torch_is_kept_where_nobody_does(
    way: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first import of torch, here a file that only tells where its bytecode goes."""
    packages, temporary, told = tmp_path / "packages", tmp_path / "temporary", tmp_path / "told"
    packages.mkdir()
    temporary.mkdir()
    (packages / "torch.py").write_text(f"import sys; open({str(told)!r}, 'w').write(str(sys.pycache_prefix)); raise OSError")
    variables = {
        "TMPDIR": str(temporary),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": f"{packages}:{Path(__file__).parents[2]}",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if way == "run":
        command = [sys.executable, "-m", "elastictrain.run", "recipe=llama_tiny", "data=stdlib", f"run.dir={tmp_path}/run"]
        assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode
    else:
        server.start(program="import importlib; importlib.reload(module)")
        assert server.end() == FAILED
    assert told.read_text().startswith(f"{temporary}/elastictrain-{os.getuid()}/")


def test_a_port_that_is_taken_is_nobodys_fault(server: Server) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server.start("--help", store_port=port)
        assert server.end() == FAILED
    assert server.reason.exit_code == EXIT_TRANSPORT
    assert str(port) in server.reason.sentence


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_store_outlives_the_workers_until_the_next_ones_start(server: Server) -> None:
    first, second = free_port(), free_port()
    process = server.start("--help", store_port=first)
    assert server.end() == WorkersEnd(0, {})
    assert answers(first)
    server.again(store_port=second)
    assert server.end() == WorkersEnd(0, {})
    assert (answers(first), answers(second)) == (False, True)
    process.kill()
    wait_until(lambda: not answers(second), timeout_s=20, what="the end of the store")


def test_a_store_that_was_made_ahead_and_has_ended_is_made_again(server: Server) -> None:
    port = free_port()
    process = server.start("--help", store_port=free_port())
    assert server.end() == WorkersEnd(0, {})
    wait_until(lambda: len(process.children()) == 2, what="the store, and the next one")
    # The server does not see it before it needs it.
    process.suspend()
    max(process.children(), key=lambda one: one.create_time()).kill()
    server.again(store_port=port)
    process.resume()
    assert server.end() == WorkersEnd(0, {})
    assert answers(port)


def test_the_store_of_a_host_that_is_not_the_first_any_more_ends(server: Server) -> None:
    port = free_port()
    server.start("--help", store_port=port)
    assert server.end() == WorkersEnd(0, {})
    assert answers(port)
    server.again()
    assert server.end() == WorkersEnd(0, {})
    assert not answers(port)


def test_a_store_that_does_not_open_is_given_up(server: Server) -> None:
    server.start(
        program="module.STORE_LIMIT_S = 0.5\nmodule._become_store = lambda *_: __import__('time').sleep(600)", store_port=1
    )
    assert server.end() == FAILED
    assert server.reason.exit_code == EXIT_TRANSPORT


def test_workers_whose_store_has_ended_cannot_go_on(server: Server) -> None:
    process = server.start(worker=SLEEPS, count=2, store_port=free_port())
    workers = server.workers(process, 2)
    # The second one is for the next generation.
    store = min(set(process.children()) - set(workers), key=lambda one: one.create_time())
    store.kill()
    assert server.end() == FAILED
    assert server.reason.exit_code == EXIT_BUG
    wait_until(lambda: all(map(is_gone, workers)), what="the end of the workers")


def test_where_there_is_no_room_for_all_forks_there_is_none(server: Server) -> None:
    program = """
fork, made = os.fork, []
def fork_two():
    if len(made) == 2:
        raise OSError(11, "no room")
    made.append(1)
    return fork()
os.fork = fork_two
"""
    process = server.start(program=program, worker=SLEEPS, count=4)
    assert server.end() == FAILED
    assert server.reason.exit_code == EXIT_BUG
    assert "no room" in server.reason.sentence
    assert is_gone(process)


@pytest.mark.parametrize(
    "program",
    [
        'def refuse(): raise PermissionError(1, "no session")\nos.setsid = refuse',
        "module.follow_parent = lambda parent, **how: parent != main",
    ],
    ids=["no session", "no parent"],
)
def test_a_fork_that_cannot_be_a_worker_does_not_go_on_as_another_server(program: str, server: Server) -> None:
    process = server.start(program=f"main = os.getpid()\n{program}", worker=SLEEPS, count=2)
    ended = server.end()
    assert (ended.code, set(ended.codes.values())) == (1, {1})
    # Codes are reported before the kernel has removed the processes.
    wait_until(lambda: process.children() == [], timeout_s=10, what="the end of the children")
    assert lives(process)


@pytest.mark.parametrize("end", ["close", "kill"])
def test_workers_end_with_their_server(end: str, server: Server) -> None:
    process = server.start(worker=SLEEPS, count=2)
    workers = server.workers(process, 2)
    assert [os.getsid(one.pid) for one in workers] == [one.pid for one in workers]
    if end == "kill":
        process.kill()
    else:
        server.group.close()
    wait_until(lambda: all(map(is_gone, workers)), timeout_s=20, what="the end of the workers")


def test_a_server_ends_with_its_launcher(tmp_path: Path) -> None:
    program = f"""
import sys, time
from elastictrain.launch.worker_group import WorkerGroup
group = WorkerGroup(program=[sys.executable, "-u", "-c", {PROGRAM.format(program="")!r}])
group.prepare()
print("there", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment()) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        (server,) = psutil.Process(launcher.pid).children()
        launcher.kill()
    wait_until(lambda: is_gone(server), timeout_s=20, what="the end of the server")


def test_ends_are_told_where_whoever_started_the_launcher_ignores_them(server: Server) -> None:
    server.start("recipe=none", ignored=True)
    assert server.end() == WorkersEnd(1, {0: 78})


@pytest.mark.skipif(os.getuid() != 0, reason="makes a namespace of processes, which needs root")
def test_the_end_of_a_worker_is_told_before_the_kernel_is_done_with_it(server: Server) -> None:
    # The first process of a namespace, when killed, is there as long as any other of it is.
    program = """
import ctypes
module.follow_parent = lambda *told, **how: True
serve = module.ForkServer.serve
def serve_apart(self):
    assert ctypes.CDLL(None).unshare(0x20000000) == 0
    return serve(self)
module.ForkServer.serve = serve_apart
"""
    process = server.start(program=program, worker=f"import os\nos.fork()\n{SLEEPS}")
    (worker,) = server.workers(process, 1)
    wait_until(lambda: bool(worker.children()), timeout_s=20, what="its child")
    release: Callable[[], None] = hold(worker.children()[0].pid)
    worker.kill()
    assert server.end(timeout_s=10) == WorkersEnd(1, {0: -signal.SIGKILL})
    assert not is_gone(worker)
    release()
    wait_until(lambda: not worker.is_running(), timeout_s=20, what="the end of the worker")


def test_workers_have_what_torchrun_sets(tmp_path: Path) -> None:
    """But for a file for errors, which nobody writes, what it sets for itself, and what the whole launcher has."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *rendezvous_arguments("static")]
    given = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [*command, "--log-dir", str(tmp_path), "--no-python", "env"], capture_output=True, text=True, env=given, check=True
    )
    torchruns = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    one_host = replace(generation(1, "a"), members=(GenerationMember("a", "a", "10.0.0.1", 1, 2),))
    ours, _ = plan_workers(one_host, "a", folder="/x", pid=1, restarted=False)
    others = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    names = torchruns.keys() - given.keys() - others
    assert names <= ours.keys()
    same = names - {"RANK", "LOCAL_RANK", "ROLE_RANK", "MASTER_PORT"}
    assert {name: ours[name] for name in same} == {name: torchruns[name] for name in same}
