"""One host's workers, one generation after the other."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from elastictrain.fault.exits import PREVIOUS_EXIT_TIMEOUT_S, Process, encode, identify, is_there, runs, wait_until_gone
from elastictrain.fault.stop import STOP_FILE_VARIABLE
from elastictrain.identity import FOLDER, GENERATION, LAUNCHER, PREVIOUS_WORKERS, RESTARTED, STORE_HOST
from elastictrain.launch.membership.records import Generation

logger = logging.getLogger(__name__)

STOP_NAME = "stop.json"
_LOOPBACK = "127.0.0.1"

# Unbuffered (-u), because its forks print as workers do.
_SERVER = (sys.executable, "-u", "-m", "elastictrain.launch.fork_server")
_OUTLIVE_WORKERS = frozenset(("elastictrain.checkpoint.saver", "elastictrain.liveness"))  # they end by themselves

_DEFAULTS = {
    # As torchrun sets it for several workers; `run.num_threads` overrides it.
    "OMP_NUM_THREADS": "1",
    # Otherwise torch reports a dead launcher with a stack of C++ frames.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # torch counts the GPUs at each start. Through the driver instead of NVML that takes up to half a second.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}

_CLOSE_WITHIN_S = 5.0
_PAUSE_S = 0.02
_EXIT_FAILED = 1


def plan_workers(generation: Generation, host: str, *, folder: str, pid: int, restarted: bool) -> list[dict[str, str]]:
    """The environments of a member's workers, as torchrun would set them, to add to the launcher's own.
    `folder` is for messages between the launcher and the workers of one generation; `pid` is the launcher's."""
    members = generation.members
    index = next(place for place, member in enumerate(members) if member.host == host)
    first_rank, count = generation.first_rank(host), members[index].processes
    common = {
        "WORLD_SIZE": str(generation.world_size),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(index),
        "GROUP_WORLD_SIZE": str(len(members)),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(generation.world_size),
        # A single host needs no network, not even its own address.
        "MASTER_ADDR": _LOOPBACK if len(members) == 1 else members[0].address,
        "MASTER_PORT": str(generation.master_port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCHER: str(pid),
        GENERATION: str(generation.number),
        RESTARTED: "1" if restarted else "0",
        FOLDER: folder,
        STORE_HOST: members[0].name,
        STOP_FILE_VARIABLE: f"{folder}/{STOP_NAME}",
    }
    ranks = [(str(first_rank + local_rank), str(local_rank)) for local_rank in range(count)]
    return [{**common, "RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": local} for rank, local in ranks]


@dataclass(frozen=True, slots=True)
class WorkersEnd:
    code: int  # 0 if all ended well; negative: the fork server was ended by this signal, or the workers were killed
    codes: Mapping[int, int]  # by local rank, of those that failed first; negative for a signal


@dataclass(slots=True)
class _Run:
    num_workers: int | None = None  # None until the server has started them
    workers: dict[int, psutil.Process] = field(default_factory=dict)  # by local rank, if it lived when looked up
    codes: dict[int, int] = field(default_factory=dict)
    killed: list[psutil.Process] = field(default_factory=list)
    killed_s: float | None = None

    @property
    def living(self) -> list[psutil.Process]:
        return [one for rank, one in self.workers.items() if rank not in self.codes and one.is_running()]


class WorkerGroup:
    """Runs the workers of at most one generation. The fork server waits for the next order."""

    def __init__(self, *, program: Sequence[str] = _SERVER, clock: Callable[[], float] = time.monotonic) -> None:
        self._program = program
        self._clock = clock
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._received = b""
        self._order = 0  # number of the newest order: the server may report killed workers of an earlier one
        self._run: _Run | None = None
        self.unforked = ""  # why the running workers are no forks; empty if they are
        self.failed: Mapping[int, int] = {}  # exit codes, by local rank, of the workers that failed first
        self._leaving: set[Process] = set()  # workers, also of earlier generations, that may still hold devices and memory

    def prepare(self) -> None:
        """Start the fork server, unless it runs already."""
        if self._server is not None and self._server.poll() is None:
            return
        self._drop_server()
        ours, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(  # noqa: S603  # our own module
                self._program,
                stdin=theirs.fileno(),
                env={**_DEFAULTS, **os.environ},
                # Ctrl-C is for the launcher, which then stops the workers.
                start_new_session=True,
            )
        self._channel, self._received = ours, b""

    def start(self, arguments: Sequence[str], environments: Sequence[Mapping[str, str]], *, store_port: int) -> None:
        """Start workers; the previous ones must have ended. Before they need devices they wait for what is left of those.
        `store_port`: of the store where the workers of all hosts meet; 0 if another host has it."""
        assert self._run is None  # noqa: S101
        self.prepare()
        assert self._channel is not None  # noqa: S101
        self._run, self._order, self.unforked, self.failed = _Run(), self._order + 1, "", {}
        previous_workers = {PREVIOUS_WORKERS: encode(self._still_there())}
        message = {
            "order": self._order,
            "arguments": arguments,
            "environments": [{**environment, **previous_workers} for environment in environments],
            "store_port": store_port,
        }
        with suppress(OSError):
            # If the server has died meanwhile, `poll` reports it.
            self._channel.sendall(json.dumps(message).encode() + b"\n")

    def poll(self) -> WorkersEnd | None:
        """Return how the workers ended; None while they may still run anything. Not to be called after that."""
        run, server = self._run, self._server
        assert run is not None  # noqa: S101
        assert server is not None  # noqa: S101
        # In this order: all that the server sent before its end is received.
        server_code = server.poll()
        self._receive()
        self._reap()
        if run.killed_s is None and len(run.codes) != run.num_workers:
            if server_code is None:
                return None
            # Workers would save first, and hold their devices meanwhile.
            self._kill(run)
        left = self._left(run)
        if left and run.killed_s is not None and self._clock() < run.killed_s + PREVIOUS_EXIT_TIMEOUT_S:
            return None
        code = server_code or -signal.SIGKILL if run.killed_s is not None else 0
        self._give_up(run, left)
        return WorkersEnd(_EXIT_FAILED if self.failed else code, self.failed)

    def ask_to_stop(self) -> None:
        if self._run is not None:
            self._receive()
            for process in self._run.living:
                with suppress(psutil.Error):
                    process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the workers and their children, except saver and monitor; `poll` then returns how they ended."""
        run, server = self._run, self._server
        if run is None or server is None or run.killed_s is not None:
            return
        self._receive()
        if run.num_workers is None:
            # A stopped server starts no worker between this look and its end.
            server.send_signal(signal.SIGSTOP)
            with suppress(psutil.Error):
                run.workers = dict(enumerate(psutil.Process(server.pid).children()))
            server.kill()
        self._kill(run)

    def close(self) -> None:
        """Kill all that was started here, and wait up to 5 s until none of it runs."""
        self.kill()
        until_s = self._clock() + _CLOSE_WITHIN_S
        while self._run is not None and self.poll() is None:
            if self._clock() >= until_s:
                self._give_up(self._run, self._left(self._run))
                break
            time.sleep(_PAUSE_S)
        self._drop_server()

    def wait_until_gone(self, limit_s: float) -> None:
        """Wait until nothing that was started here holds devices or memory: the next launcher does not know of it."""
        wait_until_gone(self._still_there(), limit_s=limit_s, clock=self._clock)
        self._reap()

    def _receive(self) -> None:
        assert self._channel is not None  # noqa: S101
        with suppress(OSError):
            while data := self._channel.recv(1 << 16, socket.MSG_DONTWAIT):
                self._received += data
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            self._note(**json.loads(line))

    def _note(
        self,
        *,
        order: int,
        pids: Sequence[int] | None = None,
        store_pid: int = 0,
        unforked: str = "",
        codes: Sequence[tuple[int, int]] = (),
    ) -> None:
        run = self._run
        if run is None or order != self._order:
            return
        if pids is not None:
            run.num_workers, self.unforked = len(pids), unforked
            # The store is reaped with them, should its server end first.
            self._leaving.update(known for pid in (*pids, store_pid) if pid and (known := identify(pid)) is not None)
            for local_rank, pid in enumerate(pids):
                with suppress(psutil.Error):
                    run.workers[local_rank] = psutil.Process(pid)
        run.codes |= dict(codes)
        # Later failures may be effects of the first.
        self.failed = self.failed or {local_rank: code for local_rank, code in codes if code}

    def _kill(self, run: _Run) -> None:
        """SIGKILL the living workers and all that they have started."""
        run.killed_s = self._clock()
        run.killed = [one for one in _with_children(run.living) if not _outlives(one)]
        self._leaving.update(known for one in run.killed if (known := identify(one.pid)) is not None and one.is_running())
        for one in run.killed:
            with suppress(psutil.Error):
                one.kill()

    def _left(self, run: _Run) -> list[int]:
        """Killed processes that may still run: one that waits for a device dies only when the device has answered."""
        server = self._server if run.num_workers is None else None
        left = [server.pid] if server is not None and server.poll() is None else []
        return left + [one.pid for one in run.killed if one.is_running() and runs(one.pid)]

    def _still_there(self) -> list[Process]:
        """Processes that hold resources but no longer run; those that still run were waited for and logged."""
        return [one for one in self._leaving if is_there(one) and not runs(one.pid)]

    def _reap(self) -> None:
        """Reap processes that hold nothing any more: as pid 1 of a container this process is their parent."""
        for one in [one for one in self._leaving if not is_there(one)]:
            if identify(one.pid) == one:
                with suppress(ChildProcessError):
                    os.waitpid(one.pid, os.WNOHANG)
            self._leaving.discard(one)

    def _give_up(self, run: _Run, left: Sequence[int]) -> None:
        if left and run.killed_s is not None:
            logger.warning(
                "killed, but still there after %.0f s: process(es) %s; they may hold devices that the next workers need",
                self._clock() - run.killed_s,
                ", ".join(map(str, left)),
            )
        self._run = None

    def _drop_server(self) -> None:
        """Without workers the server holds nothing that is needed."""
        server, self._server = self._server, None
        if server is not None and self._channel is not None:
            self._channel.close()
            server.kill()
            with suppress(subprocess.TimeoutExpired):
                server.wait(_CLOSE_WITHIN_S)


def _with_children(family: Iterable[psutil.Process]) -> list[psutil.Process]:
    """`family` and all descendants, in one pass over the host's processes."""
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            children.setdefault(process.ppid(), []).append(process)
    found = {one.pid: one for one in family if one.is_running()}
    to_do = [*found]
    while to_do:
        started = [child for child in children.get(to_do.pop(), ()) if child.pid not in found]
        found |= {child.pid: child for child in started}
        to_do += [child.pid for child in started]
    return [*found.values()]


def _outlives(process: psutil.Process) -> bool:
    try:
        return not _OUTLIVE_WORKERS.isdisjoint(process.cmdline())
    except psutil.Error:
        return False


def free_port() -> int:
    """A TCP port on which no process listens now, on any address."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
