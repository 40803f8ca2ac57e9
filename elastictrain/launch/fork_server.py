"""The process from which a host's workers are forked. It imports what they need ahead of time, so a start waits for no import.

The launcher starts it early. Over a socket, the server's standard input, it receives the workers to start and reports their
pids and exit codes. A forked worker differs from a started one only in its command line, which is the server's; its process
name is its rank. It inherits nothing harmful: the server has one thread, and no store or device of its own.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from elastictrain.bounded_json import encode_record
from elastictrain.bytecode import bytecode_kept
from elastictrain.errors import EXIT_BUG, EXIT_OK, EXIT_TRANSPORT, EXIT_UNFIT
from elastictrain.fault.exits import Process, early_exit_code, identify
from elastictrain.fault.launcher_channel import STANDBY_VARIABLE
from elastictrain.fault.reasons import NO_RANK, Reason
from elastictrain.fault.stop import STOP_SIGNALS
from elastictrain.identity import CHANNEL
from elastictrain.launch.fork_server_link import READY
from elastictrain.launch.imports_ahead import ImportedAhead, import_ahead, import_compiler, summary, why_no_fork
from elastictrain.liveness.progress import Phase
from elastictrain.processes import follow_parent

if TYPE_CHECKING:
    from elastictrain.config.compose import Composed

_MODULE = "elastictrain.run"
_EXIT_FAILED = 1
_LOOK_EVERY_S = 0.02
_IDLE_S = 1.0  # without an order for so long the launcher waits, for other hosts or for an end of the last generation
_LOOPBACK = "127.0.0.1"
_ANSWERS = b"ready"
_MOST_WORKERS = 253  # descriptors that one message can carry. Source: SCM_MAX_FD of the kernel's net/scm.h
STORE_LIMIT_S = 60.0  # a store opens within milliseconds


@dataclass(slots=True)
class _Worker:
    order: int
    index: int  # its place in the order
    pid: int
    process: Process | None
    descriptor: int  # of its pidfd, which wakes this process when the worker has ended; -1 if the kernel has none
    told: bool = False


@dataclass(slots=True)
class _StoreProcess:
    """Opens a store at the port that it is asked for. Made ahead: a fork of all that is imported takes a tenth of a second."""

    pid: int
    connection: socket.socket

    def open(self, port: int) -> str:
        """Returns why no store answers at `port`; empty if one does. To be called once."""
        answer = b""
        with self.connection, suppress(OSError):
            self.connection.settimeout(STORE_LIMIT_S)
            self.connection.sendall(str(port).encode())
            answer = self.connection.recv(1 << 16)
        return "" if answer == _ANSWERS else answer.decode() or "its process has ended, or had not answered in time"


class ForkServer:
    """Runs the workers of one generation after another, and their rendezvous store if this host is the first."""

    def __init__(self, launcher: socket.socket, *, arguments: Sequence[str], imported: ImportedAhead) -> None:
        """`imported`: for workers with these `arguments`."""
        self._launcher = launcher
        self._arguments = arguments
        self._composed, self._unfit, self._imports_later = imported.composed, imported.unfit, imported.later
        self._workers: list[_Worker] = []
        self._store_pid = 0
        self._spare: _StoreProcess | None = None  # for the next generation
        self._wants_spare = False
        self._ended: list[int] = []  # children that have been killed

    def serve(self) -> int:
        """Serve until the launcher closes the socket; returns the exit code. Running workers end with this process."""
        received, channels = b"", list[int]()
        self._tell(READY)
        while True:
            ended = [worker.descriptor for worker in self._workers if worker.descriptor >= 0]
            lacks_store = self._store_pid and self._wants_spare
            limit_s = _LOOK_EVERY_S if self._workers or lacks_store else _IDLE_S if self._imports_later else None
            ready = select.select([self._launcher.fileno(), *ended], [], [], limit_s)[0]
            if not ready and lacks_store:
                self._wants_spare = False
                with suppress(OSError):
                    self._spare = self._fork_store()
            if self._launcher.fileno() in ready:
                # The launcher sends with each order the workers' ends of their channels.
                try:
                    data, descriptors, _, _ = socket.recv_fds(self._launcher, 1 << 16, _MOST_WORKERS)
                except ConnectionResetError:  # it has closed the socket before it has read all
                    return EXIT_OK
                if not data:
                    return EXIT_OK
                for descriptor in descriptors:
                    # A worker that is no fork would inherit the channels of the others.
                    os.set_inheritable(descriptor, False)
                *orders, received = (received + data).split(b"\n")
                channels += descriptors
                # Not bounded: a folder's name may be no UTF-8.
                for order in map(json.loads, orders):
                    own, channels = channels[: len(order["environments"])], channels[len(order["environments"]) :]
                    reason = self._start(**order, channels=own)
                    for descriptor in own:
                        os.close(descriptor)
                    if reason is not None:
                        return self._complain(reason)
            if self._imports_later and (self._workers or not ready):
                # For what is forked from now on. The first workers import it themselves, unless the launcher waits anyway.
                self._imports_later = False
                with bytecode_kept():
                    import_compiler()
            if self._workers:
                self._look_after_workers()
            if self._store_pid and os.waitpid(self._store_pid, os.WNOHANG)[0]:
                # The launcher ends the workers, which cannot resume without the store.
                return self._complain(_reason(EXIT_BUG, "the store that the workers meet through has ended"))
            self._ended = [pid for pid in self._ended if not os.waitpid(pid, os.WNOHANG)[0]]

    def _start(
        self,
        *,
        order: int,
        environments: Sequence[Mapping[str, str]],
        channels: Sequence[int],
        store_port: int | None,
    ) -> Reason | None:
        """Start the workers; returns why that failed, None if it did not. `channels`: descriptors of their ends. `store_port`:
        0 where another host has the store, None where the present store stays."""
        if self._unfit:
            return _reason(EXIT_UNFIT, self._unfit)
        # Also where another host is the first one now: the end of a store that serves nobody must not end these workers.
        if self._store_pid and store_port is not None:
            os.kill(self._store_pid, signal.SIGKILL)
            self._ended.append(self._store_pid)
            self._store_pid = 0
        started: list[_Worker] = []
        try:
            unforked = why_no_fork()
            if unforked:
                self._imports_later = False
            # Garbage collection would write to pages that all forks share, and so copy them.
            gc.freeze()
            if store_port and (problem := self._start_store(store_port)):
                where = f"the store that the workers meet through cannot be opened at port {store_port}"
                return _reason(EXIT_TRANSPORT, f"{where}: {problem}", Phase.RENDEZVOUS)
            for index, (variables, channel) in enumerate(zip(environments, channels, strict=True)):
                environment = {**variables, CHANNEL: str(channel)}
                if unforked:
                    os.set_inheritable(channel, True)
                    command = [sys.executable, "-u", "-m", _MODULE, *self._arguments]
                    pid = os.posix_spawn(sys.executable, command, {**os.environ, **environment}, setsid=True)
                    os.set_inheritable(channel, False)
                else:
                    others = [one for one in channels if one != channel]
                    others += [one.descriptor for one in (*self._workers, *started) if one.descriptor >= 0]
                    others += [self._spare.connection.fileno()] if self._spare is not None else []
                    pid = self._fork(partial(_become_worker, self._arguments, environment, self._composed, others))
                started.append(_Worker(order, index, pid, identify(pid), _descriptor_of(pid)))
        except OSError as error:
            if store_port is None:
                # The workers of the generation are well. A standby that was started ends: nobody holds its channel.
                self._workers += started
                self._tell({"order": order, "pids": [], "codes": [(index, EXIT_UNFIT) for index in range(len(environments))]})
                return None
            return _reason(EXIT_BUG, f"workers cannot be started: {summary(error)}")
        self._workers += started
        pids, store_pid = [worker.pid for worker in started], self._store_pid
        self._tell({"order": order, "pids": pids, "store_pid": store_pid, "unforked": unforked})
        return None

    def _start_store(self, port: int) -> str:
        """Start the store of this generation; returns why it does not answer, empty if it does."""
        while True:
            store, is_spare = self._spare or self._fork_store(), self._spare is not None
            self._spare = None
            # A child of a process that had other threads may hang before it is a store.
            if not (problem := store.open(port)):
                self._store_pid, self._wants_spare = store.pid, True
                return ""
            os.kill(store.pid, signal.SIGKILL)
            self._ended.append(store.pid)
            # A spare one may have been killed meanwhile.
            if not is_spare:
                return problem

    def _fork_store(self) -> _StoreProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            return _StoreProcess(self._fork(partial(_become_store, theirs, ours)), ours)

    def _fork(self, become: Callable[[], NoReturn]) -> int:
        """Fork a process that ends with this one, in its own session: workers are killed by process group."""
        server = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            self._launcher.close()
            os.setsid()
            if follow_parent(server, with_signal=signal.SIGKILL):
                become()
        except BaseException:  # noqa: BLE001  # the child must never continue as a second server
            traceback.print_exc()
        finally:
            os._exit(_EXIT_FAILED)

    def _look_after_workers(self) -> None:
        """Report exit codes as soon as nothing of a worker runs: the kernel may take seconds more to release what it held."""
        codes: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for worker in [*self._workers]:
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if pid else None
            if pid:
                self._workers.remove(worker)
                if worker.descriptor >= 0:
                    os.close(worker.descriptor)
            elif worker.process is not None:
                code = early_exit_code(worker.process, parent=os.getpid())
            if code is not None and not worker.told:
                worker.told = True
                codes[worker.order].append((worker.index, code))
        for order, ended in codes.items():
            self._tell({"order": order, "codes": ended})

    def _complain(self, reason: Reason) -> int:
        self._tell({"reason": reason})
        sys.stderr.write(f"elastictrain: {reason.sentence}\n")
        return _EXIT_FAILED

    def _tell(self, message: Mapping[str, Any]) -> None:
        # A launcher that has ended is noticed at the next read.
        with suppress(OSError):
            self._launcher.sendall(encode_record(message) + b"\n")


def _descriptor_of(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _become_worker(
    arguments: Sequence[str], environment: Mapping[str, str], composed: "Composed | None", others: Sequence[int]
) -> NoReturn:
    """`others`: descriptors that are for other workers."""
    for descriptor in others:
        os.close(descriptor)
    os.environ.update(environment)
    with suppress(OSError):
        name = "standby" if STANDBY_VARIABLE in environment else f"rank {environment['RANK']}"
        Path("/proc/self/comm").write_text(name)
    # Forks would draw the same numbers from numpy's global generator; separate interpreters would not.
    import numpy as np

    np.random.seed()
    sys.argv = [_MODULE, *arguments]
    runpy.run_module(_MODULE, init_globals={"COMPOSED": composed}, run_name="__main__", alter_sys=True)
    os._exit(EXIT_OK)


def _become_store(connection: socket.socket, servers_end: socket.socket) -> NoReturn:
    """Serve a TCPStore that outlives the workers: survivors can read what a dead worker left in it."""
    import torch.distributed as dist

    servers_end.close()
    if not (port := connection.recv(1 << 10)):
        os._exit(EXIT_OK)
    try:
        # Over the loopback: the address that other hosts use does not matter here.
        store = dist.TCPStore(_LOOPBACK, int(port), is_master=True, wait_for_workers=False)
    except Exception as error:  # noqa: BLE001  # reported to the launcher
        connection.sendall(summary(error).encode())
        os._exit(_EXIT_FAILED)
    connection.sendall(_ANSWERS)
    connection.close()
    while store:
        signal.pause()
    os._exit(EXIT_OK)


def _reason(exit_code: int, sentence: str, phase: Phase = Phase.START) -> Reason:
    return Reason(NO_RANK, exit_code, str(phase), 0, sentence)


def main() -> int:
    """Import what workers need, then serve the launcher at the other end of stdin. Returns the exit code."""
    # An ignored SIGCHLD is inherited, and would lose the workers' exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Schedulers signal every process, but only the launcher stops the workers. Workers inherit the blocked mask and unblock
    # once they listen: a signal that came before is not lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, signal.SIGHUP))
    # The workers follow their server's death with a SIGTERM of their own, and save.
    if not follow_parent(os.getppid(), with_signal=signal.SIGKILL):
        return _EXIT_FAILED
    launcher = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    # What is imported stays: to look through it again and again for garbage takes an eighth of the time.
    gc.disable()
    arguments = sys.argv[1:]
    with bytecode_kept():
        imported = import_ahead(arguments)
    gc.enable()
    return ForkServer(launcher, arguments=arguments, imported=imported).serve()


if __name__ == "__main__":
    # Finalizing torch takes a tenth of a second, for which the launcher would wait.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
