"""One host's workers, one generation after the other."""

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import psutil

from elastictrain.bounded_json import as_record
from elastictrain.errors import EXIT_TRANSPORT
from elastictrain.fault.exits import PREVIOUS_EXIT_TIMEOUT_S, Process, encode, identify, is_there, runs, wait_until_gone
from elastictrain.fault.launcher_channel import ANY_RANK, EXACT, STANDBY_VARIABLE, AskToStop, Detach
from elastictrain.fault.reasons import Reason
from elastictrain.identity import PREVIOUS_WORKERS
from elastictrain.launch.fork_server_link import SERVER, ForkServerLink
from elastictrain.launch.rank_variables import transport_variables
from elastictrain.launch.worker_process import BUILT_FOR, WorkerProcess, assign, children_once_stopped, outlives, with_children
from elastictrain.launch.workers_of_generation import WorkersEnd, WorkersOfGeneration
from elastictrain.start_times import ORDERED

logger = logging.getLogger(__name__)

_CLOSE_WITHIN_S, _PAUSE_S = 5.0, 0.02


class WorkerGroup:
    """Runs the workers of at most one generation, and keeps those that wait for a rank in the next one."""

    def __init__(
        self,
        arguments: Sequence[str] = (),
        *,
        program: Sequence[str] = SERVER,
        server: ForkServerLink | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`arguments`: those of the workers. `server`: one that has been started with them."""
        self._program = [*program, *arguments]
        self._clock = clock
        self._server = server
        self._order = 0  # number of the newest order
        self.run: WorkersOfGeneration | None = None
        self._workers: list[WorkerProcess] = []  # all that have been started and are not known to have ended
        self._attaching: list[WorkerProcess] = []  # chosen workers that have not been told yet
        self._wakes, self._woken = socket.socketpair()
        self._transport = ""  # variables for NCCL and gloo that a preflight has set on this host, for new workers
        # Workers, also of earlier generations, that may still hold devices and memory; whether nobody has waited for their end.
        self._leaving: dict[Process, bool] = {}

    @property
    def waiting(self) -> list[WorkerProcess]:
        """Workers that have left the last generation, and wait for a rank."""
        return [one for one in self._workers if one.waiting is not None and not one.standby and one.lives]

    @property
    def ready(self) -> bool:
        """Whether the fork server has imported what workers need."""
        return self._server is not None and self._server.ready

    def prepare(self) -> None:
        """Start the fork server, unless it runs already."""
        if self._server is None or not self._server.lives:
            self._drop_server()
            self._server = ForkServerLink(self._program, now_s=self._clock())

    def start(self, environments: Sequence[Mapping[str, str]], *, store_port: int) -> WorkersOfGeneration:
        """Fill the ranks of a generation with waiting workers that fit, with standbys and with new workers. Before new ones
        need devices they wait for what is left of the previous ones. `store_port`: of the store where the workers of all hosts
        meet; 0 if another host has it."""
        assert self.run is None  # noqa: S101
        self.prepare()
        self._receive()
        chosen = self._choose(environments)
        unfit = [one for one in self._workers if one.standby and not any(map(one.fits, environments))]
        self.release([*unfit, *(one for one in self.waiting if one not in chosen.values())])
        previous_workers = {PREVIOUS_WORKERS: encode(self._still_there())}
        places = [{**environment, **previous_workers} for environment in environments]
        new = [{**transport_variables(self._transport), **place} for rank, place in enumerate(places) if rank not in chosen]
        forked = iter(self._send_order(new, store_port=store_port))
        members = [chosen[rank] if rank in chosen else next(forked) for rank in range(len(places))]
        self.run = WorkersOfGeneration(self._order, members, reused=all(one.built for one in members))
        for rank, one in chosen.items():
            one.choose({**transport_variables(self._transport), **places[rank]})
        # Once the fork server has made the store of the new generation.
        self._attaching = [*chosen.values()]
        return self.run

    def keep_standbys(self, environments: Sequence[Mapping[str, str]], *, bound: tuple[str, ...]) -> None:
        """Have a worker prepared for each of `environments` beside the present generation, unless there is one. `bound`: see
        `WorkerProcess`. One that is bound to all that a worker is built for gets no other rank. Others end."""
        if self._server is None or not self._server.lives:
            # How it ended, and the workers with it, is known soon.
            return
        there = [one for one in self._workers if one.standby and one.code is None]
        usable, kind = [one for one in there if one.bound == bound], EXACT if bound == BUILT_FOR else ANY_RANK
        found = assign(usable, dict(enumerate(environments)))
        self.release([one for one in there if one not in found.values()])
        missing = [{**one, STANDBY_VARIABLE: kind} for index, one in enumerate(environments) if index not in found]
        if missing:
            for one in self._send_order(missing, store_port=None):
                one.standby, one.bound = True, bound

    def poll(self) -> WorkersEnd | None:
        """Return how the generation ended; None while its workers may still take part. Not to be called after that."""
        run, server = self.run, self._server
        assert run is not None  # noqa: S101
        assert server is not None  # noqa: S101
        # In this order: all that the server sent before its end is received.
        server_code = server.process.poll()
        self._receive()
        self._reap()
        if run.killed_s is None and not (run.started and all(one.over for one in run.workers)):
            if server_code is None:
                return None
            # Workers would save first, and hold their devices meanwhile.
            self._kill(run)
        left = self._left(run)
        if left and run.killed_s is not None and self._clock() < run.killed_s + PREVIOUS_EXIT_TIMEOUT_S:
            return None
        end = run.end(server_code or -signal.SIGKILL if run.killed_s is not None else 0)
        self._give_up(run, left)
        return end

    def detach(self, reason: str) -> None:
        """Have the workers leave their groups, and wait for their ranks in the next generation."""
        # Those that have not been told of the generation have nothing to leave.
        for one in self._attaching:
            one.waiting = EXIT_TRANSPORT
        self._attaching = []
        if self.run is not None:
            for one in self.run.workers:
                if not one.over:
                    one.send(Detach(reason))

    def kill_unresponsive(self) -> None:
        """Kill workers that have not acknowledged `detach`, where a standby is built for their rank: while a device takes no
        more work, its worker may hold the interpreter's lock, and can leave no group."""
        self._receive()
        standbys = [one for one in self._workers if one.standby and one.bound == BUILT_FOR and one.waiting is not None]
        silent = [one for one in self.run.workers if not (one.over or one.detaching)] if self.run is not None else []
        silent = [one for one in silent if any(each.fits(one.environment) for each in standbys)]
        for one in silent:
            one.killed = True
        if silent:
            self._kill_family([one.process for one in silent if one.process is not None], released=False)

    def ask_to_stop(self, message: AskToStop) -> None:
        for one in self.run.workers if self.run is not None else ():
            if not one.over:
                one.send(message)

    def kill(self) -> None:
        """Kill the workers that take part, and their children, except saver and monitor; `poll` then returns how they ended."""
        run, server = self.run, self._server
        if run is None or server is None or run.killed_s is not None:
            return
        self._receive()
        if server.take_back(now_s=self._clock()):
            # The server is well, and serves the next generation: on a slow host a new one would not be ready sooner.
            run.started = True
            for one in self._workers:
                one.killed, one.code = True, -signal.SIGKILL
        elif not run.started:
            # A stopped server starts no worker between this look and its end.
            server.process.send_signal(signal.SIGSTOP)
            run.unknown = children_once_stopped(server.process.pid)
            server.process.kill()
        self._kill(run)

    def release(self, workers: Sequence[WorkerProcess] | None = None) -> None:
        """Kill workers that wait for a rank, by default all and the standbys: they hold memory and devices, and nothing that
        could be saved."""
        if workers is None:
            self._transport = ""
            workers = [one for one in self._workers if one.code is None and (one.standby or one in self.waiting)]
        if not workers:
            return  # a look at all processes of the host would delay the next generation
        self._kill_family([one.process for one in workers if one.process is not None], released=True)
        for worker in workers:
            worker.killed, worker.waiting, worker.code = True, None, -signal.SIGKILL

    def close(self) -> None:
        """Kill all that was started here, and wait up to 5 s until none of it runs."""
        self.release()
        self.kill()
        until_s = self._clock() + _CLOSE_WITHIN_S
        while self.run is not None and self.poll() is None:
            if self._clock() >= until_s:
                self._give_up(self.run, self._left(self.run))
                break
            time.sleep(_PAUSE_S)
        self._drop_server()
        self._wakes.close()
        self._woken.close()

    def wait_until_gone(self, limit_s: float) -> None:
        """Wait until nothing that was started here holds devices or memory: the next launcher does not know of it."""
        wait_until_gone(self._still_there(), limit_s=limit_s, clock=self._clock)
        self._reap()

    def wake(self) -> None:
        """End a `wait`, from any thread."""
        with suppress(OSError):
            self._wakes.send(b"x", socket.MSG_DONTWAIT)

    def wait(self, limit_s: float) -> None:
        """Wait until a worker or the fork server has something to report, or for `wake`, at most for `limit_s`."""
        sockets = [one for one in (self._woken, *(one.connection for one in self._workers)) if one.fileno() >= 0]
        if self._server is not None and self._server.lives:
            sockets.append(self._server.channel)
        with selectors.DefaultSelector() as selector:
            for one in sockets:
                selector.register(one, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(limit_s)]
        if self._woken in ready:
            self._woken.recv(1 << 16)
        if ready and self._server is not None:
            self._receive()

    def _choose(self, places: Sequence[Mapping[str, str]]) -> dict[int, WorkerProcess]:
        """The workers that exist already, by the local rank that each of them gets."""
        # A standby that is not ready yet may take longer than a new worker.
        ready = [one for one in self._workers if one.waiting is not None and one.lives]
        standbys = sorted((one for one in ready if one.standby), key=lambda one: -len(one.bound))
        chosen = assign(self.waiting, dict(enumerate(places)))
        return chosen | assign(standbys, {rank: place for rank, place in enumerate(places) if rank not in chosen})

    def _send_order(self, environments: Sequence[Mapping[str, str]], *, store_port: int | None) -> list[WorkerProcess]:
        assert self._server is not None  # noqa: S101
        self._order += 1
        pairs = [socket.socketpair() for _ in environments]
        ordered = {ORDERED: str(time.clock_gettime(time.CLOCK_BOOTTIME))}
        message = {"order": self._order, "environments": [{**one, **ordered} for one in environments], "store_port": store_port}
        self._server.order(message, [theirs for _, theirs in pairs])
        both = zip(pairs, environments, strict=True)
        started = [WorkerProcess(self._order, index, ours, one) for index, ((ours, _), one) in enumerate(both)]
        self._workers += started
        return started

    def _receive(self) -> None:
        assert self._server is not None  # noqa: S101
        for report in self._server.receive():
            self._note(**report)
        for one in self._workers:
            one.receive()

    def _note(
        self,
        *,
        order: int = 0,
        pids: Sequence[int] | None = None,
        store_pid: int = 0,
        unforked: str = "",
        codes: Sequence[tuple[int, int]] = (),
        reason: Mapping[str, object] | None = None,
    ) -> None:
        """Take note of a report of the fork server. `reason`: why it ends itself."""
        run, of_order = self.run, {one.index: one for one in self._workers if one.order == order}
        if run is not None and reason is not None:
            run.reason = as_record(reason, Reason)
        if pids is not None:
            # The store is reaped with them, should its server end first.
            self._leaving |= {known: False for pid in (*pids, store_pid) if pid and (known := identify(pid)) is not None}
            for index, pid in enumerate(pids):
                # A standby may have been given up before it was known.
                if (one := of_order.get(index)) is not None:
                    with suppress(psutil.Error):
                        one.process = psutil.Process(pid)
        if pids is not None and run is not None and run.order == order:
            run.started, run.unforked = True, unforked
            for worker in self._attaching:
                worker.attach()
            self._attaching = []
        failed = {}
        for index, code in codes:
            if (one := of_order.get(index)) is not None and one.code is None:
                one.code, one.waiting = code, None
                if run is not None and one in run.workers and code and not one.killed:
                    failed[run.workers.index(one)] = code
        if run is not None:
            # Later failures may be effects of the first.
            run.failed = run.failed or failed
        for one in [one for one in self._workers if one.code is not None and (run is None or one not in run.workers)]:
            one.close()
            self._workers.remove(one)

    def _kill(self, run: WorkersOfGeneration) -> None:
        """SIGKILL the living workers that take part, and all that they have started."""
        run.killed_s = self._clock()
        taking_part = [one for one in run.workers if one.lives and one.waiting is None]
        for one in taking_part:
            one.killed = True
        family = [*run.unknown, *(one.process for one in taking_part if one.process is not None)]
        run.killed = self._kill_family(family, released=False)

    def _kill_family(self, family: Sequence[psutil.Process], *, released: bool) -> list[psutil.Process]:
        """SIGKILL processes and all that they have started, except saver and monitor; returns them."""
        killed = [one for one in with_children(family) if not outlives(one)]
        self._leaving |= {known: released for one in killed if (known := identify(one.pid)) is not None}
        for one in killed:
            with suppress(psutil.Error):
                one.kill()
        return killed

    def _left(self, run: WorkersOfGeneration) -> list[int]:
        """Killed processes that may still run: one that waits for a device dies only when the device has answered."""
        server = self._server if not run.started else None
        left = [server.process.pid] if server is not None and server.lives else []
        return left + [one.pid for one in run.killed if one.is_running() and runs(one.pid)]

    def _still_there(self) -> list[Process]:
        """Processes that hold resources but no longer run; of those that still run the released ones, which nobody has waited
        for yet."""
        return [one for one, released in self._leaving.items() if is_there(one) and (released or not runs(one.pid))]

    def _reap(self) -> None:
        """Reap processes that hold nothing any more: as pid 1 of a container this process is their parent."""
        for one in [one for one in self._leaving if not is_there(one)]:
            if identify(one.pid) == one:
                with suppress(ChildProcessError):
                    os.waitpid(one.pid, os.WNOHANG)
            del self._leaving[one]

    def _give_up(self, run: WorkersOfGeneration, left: Sequence[int]) -> None:
        if left and run.killed_s is not None:
            logger.warning(
                "killed, but still there after %.0f s: process(es) %s; they may hold devices that the next workers need",
                self._clock() - run.killed_s,
                ", ".join(map(str, left)),
            )
        self._transport = next((one.transport for one in run.workers if one.transport), "")
        self.run, self._attaching = None, []
        for one in [one for one in run.workers if one.waiting is None]:
            one.close()
            self._workers.remove(one)

    def _drop_server(self) -> None:
        """Without workers the server holds nothing that is needed."""
        server, self._server = self._server, None
        self.release()
        for one in self._workers:
            one.close()
        self._workers = []
        if server is not None:
            server.close(_CLOSE_WITHIN_S)
