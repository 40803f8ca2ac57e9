"""Workers as forks of a torchrun that has imported what they need, so that a restart waits for no import.

A fork is what a worker is, but for how it began: its command line is torchrun's, and its name is its rank. It inherits nothing
that it could not have: torchrun forks before it has threads, a store or a device of its own.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, cast

from elastictrain.errors import EXIT_BUG, EXIT_OK
from elastictrain.fault.exits import Process, early_exit_code, follow_parent, identify
from elastictrain.torch_private import COMPILER, intercept_workers

_AHEAD = (
    COMPILER,
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "elastictrain.config.load",
    "elastictrain.train.worker",
)
_MODULE = "elastictrain.run"
_COMMAND = (sys.executable, "-u", "-m", _MODULE)
_NUMPY_THREADS = "OPENBLAS_NUM_THREADS"
_READY = b"+"
_LOOK_EVERY_S = 0.02
_BY_THEMSELVES_S = 0.5
"""How long workers that have lost one have before they are asked to end: they notice it, and say what they know of it."""

_DEVICES = ("/dev/nvidia", "/dev/kfd")


def import_ahead(modules: Sequence[str] = _AHEAD) -> None:
    """Import what workers import. Where that fails they are left to find it out, and to say it."""
    # Threads that start when numpy is imported would keep this process from forking.
    ours = _NUMPY_THREADS not in os.environ
    os.environ.setdefault(_NUMPY_THREADS, "1")
    try:
        for name in modules:
            importlib.import_module(name)
    except Exception:  # noqa: BLE001, S110  # an incomplete installation may raise anything
        pass
    finally:
        if ours:
            del os.environ[_NUMPY_THREADS]


class Fork:
    """A process of ours that waits to become a worker; with what torchrun, in one thread, uses of `subprocess.Popen`."""

    def __init__(self, pid: int, orders: socket.socket) -> None:
        self.pid = pid
        self.process = identify(pid)
        self.returncode: int | None = None
        self._orders = orders

    def begin(self, arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Have it run with these; False if it is gone."""
        try:
            with self._orders:
                self._orders.sendall(json.dumps([list(arguments), dict(environment)]).encode())
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Not to be begun from this process any more."""
        self._orders.close()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs.

        One that fails is told of as soon as nothing of it runs any more: what it holds it may hold for seconds.
        """
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                # It has ended, and somebody else was told how; that it ended well nobody can say.
                self.returncode = EXIT_BUG
                return EXIT_BUG
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif self.process is not None:
                self.returncode = early_exit_code(self.process, parent=os.getpid())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
            time.sleep(_LOOK_EVERY_S)
        return code


class Forks:
    """What torchrun starts instead of a new interpreter each; made while this process has one thread."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self._clock = clock
        self._sleep = sleep
        self._waiting: list[Fork] = []
        self._taken: list[Fork] = []
        self._ask_at_s: float | None = None
        self.begun = False
        """Whether torchrun has asked for a worker."""

    def prepare(self, count: int) -> str:
        """Fork as far as that is possible; whoever gets no fork starts its worker as before. Does not return in a fork.

        Returns why there are fewer than `count`; empty if there are not.
        """
        if reason := why_no_fork():
            return reason
        # Collecting garbage would write to, and so copy, pages that all of them share.
        gc.freeze()
        for _ in range(count):
            # What one of them finds no room for, no process number or no file, the next will not find either.
            if reason := self._add():
                return reason
        return ""

    def _add(self) -> str:
        """Why there is not one more; empty if there is."""
        agent = os.getpid()
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            return f"no socket for one more: {error.strerror}"
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            return f"no process for one more: {error.strerror}"
        if pid == 0:
            ours.close()
            for other in self._waiting:
                other.close()
            _become_worker(theirs, agent=agent)
        theirs.close()
        fork = Fork(pid, ours)
        if ours.recv(len(_READY)) == _READY:
            self._waiting.append(fork)
            return ""
        fork.close()
        return f"a fork ended before it was ready (exit code {fork.wait()})"

    def take(self, command: Sequence[str], environment: Mapping[str, str]) -> Fork | None:
        """A worker that runs `command`, in exactly this environment; None if none of ours can."""
        self.begun = True
        if tuple(command[: len(_COMMAND)]) != _COMMAND:
            return None
        while self._waiting:
            fork = self._waiting.pop()
            if fork.begin(command[len(_COMMAND) :], environment):
                self._taken.append(fork)
                return fork
        return None

    def leaves_by_itself(self, worker: object) -> bool:
        """Whether a worker ends before it has to be asked; all of them together have half a second from the first question."""
        if not isinstance(worker, Fork):
            return False
        if self._ask_at_s is None:
            self._ask_at_s = self._clock() + _BY_THEMSELVES_S
        while worker.poll() is None:
            if self._clock() >= self._ask_at_s:
                return False
            self._sleep(_LOOK_EVERY_S)
        return True

    def leaving(self) -> tuple[Process, ...]:
        """Those that have been workers, and for which nobody has waited to the end."""
        known = [fork.process for fork in self._taken if fork.process is not None]
        return tuple(process for process in known if identify(process.pid) == process)


def why_no_fork(process: Path = Path("/proc/self")) -> str:
    """Why a fork cannot use all that this process has: a lock held by a thread that it lacks, a device of its parent's.

    Empty if it can.
    """
    try:
        threads = list((process / "task").iterdir())
        files = list((process / "fd").iterdir())
    except OSError as error:
        return f"threads and open files of torchrun cannot be read: {error.strerror}"
    if len(threads) != 1:
        return f"torchrun has {len(threads)} threads where its imports should have left one"
    devices = set()
    for file in files:
        # The folder's own is closed by now.
        with suppress(OSError):
            if (target := str(file.readlink())).startswith(_DEVICES):
                devices.add(target)
    return f"torchrun has opened {', '.join(sorted(devices))} while it imported what workers need" if devices else ""


def hand_out(forks: Forks) -> str:
    """Have torchrun, in this process, start its workers from `forks`, as far as these can be what it asks for.

    Returns why this torchrun cannot, which then starts them as before; empty if it can.
    """
    changes = intercept_workers(
        start=lambda command, environment: cast("subprocess.Popen[bytes] | None", forks.take(command, environment)),
        leaves_by_itself=forks.leaves_by_itself,
    )
    return "; ".join(changes)


def _become_worker(orders: socket.socket, *, agent: int) -> NoReturn:
    """Wait for orders, and carry them out as the program that they are for."""
    received = b""
    with suppress(OSError):
        # torchrun ends its workers by process group.
        os.setsid()
        if follow_parent(agent, with_signal=signal.SIGKILL):
            with orders:
                orders.sendall(_READY)
                with orders.makefile("rb") as stream:
                    received = stream.read()
    if not received:
        os._exit(EXIT_OK)
    arguments, environment = json.loads(received)
    os.environ.clear()
    os.environ.update(environment)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"rank {environment['RANK']}")
    _draw_anew()
    sys.argv = [_MODULE, *arguments]
    runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)
    sys.exit(EXIT_OK)


def _draw_anew() -> None:
    """All forks would draw the same numbers from numpy's own generator, as interpreters of their own would not."""
    import numpy as np

    np.random.seed()
