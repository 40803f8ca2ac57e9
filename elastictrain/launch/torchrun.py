"""One host's torchruns, one after the other. Acts: starts and ends processes."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress

import psutil

from elastictrain.launch.orders import Orders, encode

_OUTLIVE_WORKERS = frozenset(("elastictrain.checkpoint.keeper", "elastictrain.fault.hang"))
"""Modules of processes that workers start, and that end by themselves with nothing left behind."""

_COLLECT_S = 5.0


class Torchrun:
    """At most one runs, and one more waits for its orders."""

    def __init__(self) -> None:
        self._waiting: subprocess.Popen[bytes] | None = None
        self._running: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Start the next one ahead of time, unless it waits already."""
        if self._waiting is None or self._waiting.poll() is not None:
            self._waiting = subprocess.Popen(
                # Its forks print as workers do, whose output is not held back.
                [sys.executable, "-u", "-m", "elastictrain.launch.agent"],
                stdin=subprocess.PIPE,
                env=agent_environment(os.environ),
                # Ctrl-C is for the launcher, which then asks the workers; torchrun would end them at once.
                start_new_session=True,
            )

    def start(self, orders: Orders) -> None:
        """Run workers; the one before must have ended."""
        self.prepare()
        agent, self._waiting = self._waiting, None
        assert agent is not None  # noqa: S101
        assert agent.stdin is not None  # noqa: S101
        assert self._running is None  # noqa: S101
        with suppress(BrokenPipeError):
            # If it has died meanwhile, `poll` says so.
            agent.stdin.write(encode(orders))
            agent.stdin.close()
        self._running = agent

    def poll(self) -> int | None:
        """How the running one ended; None while it runs. After an answer there is none any more."""
        assert self._running is not None  # noqa: S101
        code = self._running.poll()
        if code is not None:
            self._running = None
        return code

    def ask_to_stop(self) -> None:
        """SIGTERM to each worker, as often as this is called; torchrun ends when they have."""
        # Not to torchrun: it would kill them after half a minute, whatever a large save needs.
        for worker in self._workers():
            with suppress(psutil.Error):
                worker.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End torchrun, its workers and what they started, but not keeper and watcher, and wait until they are gone."""
        if self._running is None:
            return
        family = [*self._workers(with_children=True)]
        self._running.kill()
        for one in family:
            with suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(family, timeout=_COLLECT_S)
        self._running.wait(_COLLECT_S)

    def close(self) -> None:
        """End everything that was started here."""
        self.kill()
        self._running = None
        if self._waiting is not None:
            self._waiting.kill()
            self._waiting.wait(_COLLECT_S)
            self._waiting = None

    def _workers(self, *, with_children: bool = False) -> Iterator[psutil.Process]:
        if self._running is None:
            return
        try:
            children = psutil.Process(self._running.pid).children(recursive=with_children)
        except psutil.Error:
            return
        for child in children:
            try:
                if _OUTLIVE_WORKERS.isdisjoint(child.cmdline()):
                    yield child
            except psutil.Error:
                continue


def agent_environment(present: Mapping[str, str]) -> dict[str, str]:
    """Of a torchrun, and so of its workers."""
    # torchrun takes its defaults from these, where an operator has set them for a torchrun of its own.
    kept = {name: value for name, value in present.items() if not name.startswith("PET_")}
    # What torchrun sets for several workers, with a warning; `run.num_threads` is what counts. Read when torch is imported.
    return {"OMP_NUM_THREADS": "1", **kept}


def free_port() -> int:
    """A TCP port that nobody listens on now, on any address."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
