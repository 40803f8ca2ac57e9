"""One host's torchruns, one after the other."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from elastictrain.fault.exits import PREVIOUS_EXIT_TIMEOUT_S, Process, identify, is_there, runs, wait_until_gone
from elastictrain.fault.exits import encode as encode_processes
from elastictrain.identity import PREDECESSORS
from elastictrain.launch.orders import Orders, encode, read_answer

logger = logging.getLogger(__name__)

# Its forks print as workers do, whose output is not held back.
_AGENT = (sys.executable, "-u", "-m", "elastictrain.launch.agent")

_OUTLIVE_WORKERS = frozenset(("elastictrain.checkpoint.saver", "elastictrain.liveness"))
"""Modules of processes that workers start, and that end by themselves with nothing left behind."""

_SET_FOR_TORCHRUN = {
    # What it sets for several workers, with a warning; `run.num_threads` is what counts.
    "OMP_NUM_THREADS": "1",
    # Otherwise it tells of a dead launcher by the frames of torch's C++ code.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # It counts the GPUs at each start. To ask the driver itself, and not its tools, takes up to half a second.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Read when torch is imported, or later."""

_LOOK_EVERY_S = 1.0
_CLOSE_WITHIN_S = 5.0
_PAUSE_S = 0.02


class Torchrun:
    """At most one runs, and one more waits for its orders."""

    def __init__(self, *, program: Sequence[str] = _AGENT, clock: Callable[[], float] = time.monotonic) -> None:
        self._program = program
        self._clock = clock
        self._waiting: subprocess.Popen[bytes] | None = None
        self._running: subprocess.Popen[bytes] | None = None
        self._answer = Path()
        self._family: dict[psutil.Process, bool] = {}
        """What ends with the running one, as last seen, and whether it is a worker."""

        self._leaving: set[Process] = set()
        """Of those before: what was ended, and may still hold devices and memory."""

        self._looked_s = float("-inf")
        self._killed_s: float | None = None

    def prepare(self) -> None:
        """Start the next one ahead of time, unless it waits already."""
        if self._waiting is not None and self._waiting.poll() is not None:
            self._drop_waiting()
        if self._waiting is None:
            self._waiting = subprocess.Popen(  # noqa: S603  # our own module
                self._program,
                stdin=subprocess.PIPE,
                env=agent_environment(os.environ),
                # Ctrl-C is for the launcher, which then asks the workers; torchrun would end them at once.
                start_new_session=True,
            )

    def start(self, orders: Orders) -> None:
        """Run workers; the one before must have ended. They wait for what is left of it, as soon as they have to."""
        self.prepare()
        agent, self._waiting = self._waiting, None
        assert agent is not None  # noqa: S101
        assert agent.stdin is not None  # noqa: S101
        assert self._running is None  # noqa: S101
        environment = {**orders.environment, PREDECESSORS: encode_processes(self._still_there())}
        with suppress(BrokenPipeError), agent.stdin:
            # If it has died meanwhile, `poll` says so.
            agent.stdin.write(encode(replace(orders, environment=environment)))
        self._running, self._answer = agent, Path(orders.answer_file)
        self._family, self._looked_s, self._killed_s = {}, float("-inf"), None

    def poll(self) -> int | None:
        """How the running one ended; None while it, or anything that it has started, may still do something.

        After an answer there is none any more.
        """
        assert self._running is not None  # noqa: S101
        code = self._running.poll()
        self._reap()
        if self._killed_s is None:
            if code is None:
                if self._clock() >= self._looked_s + _LOOK_EVERY_S:
                    self._look()
                return None
            if code != 0:
                # Killed from outside it leaves all that it had started; otherwise at most workers that it could not end. What
                # those have started that leave by themselves may have something to finish.
                ended = [one for one, is_worker in self._family.items() if is_worker or code < 0]
                self._remember(ended)
                self._kill([one for one in ended if code < 0 or runs(one.pid)])
        left = self._left()
        if left and self._killed_s is not None and self._clock() < self._killed_s + PREVIOUS_EXIT_TIMEOUT_S:
            return None
        self._remember(self._family if self._killed_s is not None else ())
        self._leaving.update(read_answer(self._answer).leaving)
        self._give_up(left)
        return -signal.SIGKILL if code is None else code

    def ask_to_stop(self) -> None:
        """SIGTERM to each worker, as often as this is called; torchrun ends when they have."""
        # Not to torchrun: it would kill them after half a minute, whatever a large save needs.
        for process, is_worker in self._descendants().items():
            if is_worker:
                with suppress(psutil.Error):
                    process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End torchrun, its workers and what they started, but neither saver nor monitor; `poll` says when they are gone."""
        if self._running is None or self._killed_s is not None:
            return
        # Stopped, it starts nobody between our look and its end.
        self._running.send_signal(signal.SIGSTOP)
        self._look()
        self._running.kill()
        self._kill(self._family)

    def close(self) -> None:
        """End everything that was started here, and wait a few seconds at most until nothing of it can do anything."""
        self.kill()
        until_s = self._clock() + _CLOSE_WITHIN_S
        while self._running is not None and self.poll() is None:
            if self._clock() >= until_s:
                self._give_up(self._left())
                break
            time.sleep(_PAUSE_S)
        self._drop_waiting()

    def wait_until_gone(self, limit_s: float) -> None:
        """Until nothing of what was started here holds anything: who comes next on this host knows nothing of it."""
        wait_until_gone(self._still_there(), limit_s=limit_s, clock=self._clock)
        self._reap()

    def _drop_waiting(self) -> None:
        """It has no workers, and holds nothing that anybody needs."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting.stdin is not None:
            waiting.stdin.close()
            waiting.kill()
            with suppress(subprocess.TimeoutExpired):
                waiting.wait(_CLOSE_WITHIN_S)

    def _look(self) -> None:
        """Remember who is there: when torchrun has died nobody can tell any more whom it had started."""
        self._looked_s = self._clock()
        family = self._descendants()
        # If it has died meanwhile its workers had another parent already, and were not found.
        if self._running is not None and self._running.poll() is None:
            self._family = family

    def _kill(self, family: Iterable[psutil.Process]) -> None:
        """SIGKILL to these, and to what they have started since they were seen."""
        self._killed_s = self._clock()
        # One that was about to become a saver when it was seen is one now.
        self._family = {one: False for one in _with_children(family) if not _outlives(one)}
        for one in self._family:
            with suppress(psutil.Error):
                one.kill()

    def _left(self) -> list[int]:
        """Processes that were killed, and may still do something: what waits for a device dies only when that has answered."""
        if self._killed_s is None or self._running is None:
            return []
        agent = [self._running.pid] if self._running.poll() is None else []
        return agent + [one.pid for one in self._family if one.is_running() and runs(one.pid)]

    def _remember(self, processes: Iterable[psutil.Process]) -> None:
        self._leaving.update(known for one in processes if (known := identify(one.pid)) is not None and one.is_running())

    def _still_there(self) -> list[Process]:
        """Without who still runs: that one was waited for, and named."""
        return [one for one in self._leaving if is_there(one) and not runs(one.pid)]

    def _reap(self) -> None:
        """Ask how those ended that hold nothing any more: as the first process of a container this one is their parent."""
        for one in [one for one in self._leaving if not is_there(one)]:
            if identify(one.pid) == one:
                with suppress(ChildProcessError):
                    os.waitpid(one.pid, os.WNOHANG)
            self._leaving.discard(one)

    def _give_up(self, left: Sequence[int]) -> None:
        if left and self._killed_s is not None:
            logger.warning(
                "killed, but still there after %.0f s: process(es) %s; they may hold devices that the next workers need",
                self._clock() - self._killed_s,
                ", ".join(map(str, left)),
            )
        self._running, self._family = None, {}

    def _descendants(self) -> dict[psutil.Process, bool]:
        """What ends with the running one, and whether it is a worker: those it has started itself."""
        if self._running is None:
            return {}
        found = {}
        with suppress(psutil.Error):
            for one in psutil.Process(self._running.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if not _outlives(one):
                        found[one] = one.ppid() == self._running.pid
        return found


def _with_children(family: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The same and all that they have started, in one pass over the host's processes."""
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
    """Whether it is not to end with the workers."""
    try:
        return not _OUTLIVE_WORKERS.isdisjoint(process.cmdline())
    except psutil.Error:
        return False


def agent_environment(present: Mapping[str, str]) -> dict[str, str]:
    """Of a torchrun, and so of its workers."""
    # torchrun takes its defaults from these, where an operator has set them for a torchrun of its own.
    kept = {name: value for name, value in present.items() if not name.startswith("PET_")}
    return {**_SET_FOR_TORCHRUN, **kept}


def free_port() -> int:
    """A TCP port that nobody listens on now, on any address."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
