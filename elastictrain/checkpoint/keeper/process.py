"""The process of a keeper, as the worker that starts it sees it."""

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from elastictrain.checkpoint.keeper.facts import RunFacts, store_facts
from elastictrain.checkpoint.keeper.messages import LOG_NAME, SOCKET_NAME
from elastictrain.checkpoint.memory.place import make_private
from elastictrain.errors import CheckpointError

_TRIES = 3
_TRIES_WITHIN_S = 60.0


class KeeperProcess:
    """Starts keepers for one folder, each when the one before it is gone."""

    def __init__(self, folder: str, facts: RunFacts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._facts = facts
        self._clock = clock
        self._child: subprocess.Popen[bytes] | None = None
        self._started: list[float] = []

    def start_if_gone(self) -> None:
        """Start one, unless the last one that was started here lives. Raises: CheckpointError if they end again and again."""
        if self._child is not None and self._child.poll() is None:
            return
        now = self._clock()
        self._started = [at for at in self._started if now - at < _TRIES_WITHIN_S]
        if len(self._started) >= _TRIES:
            raise CheckpointError(f"it ended {_TRIES} times within {_TRIES_WITHIN_S:g} s")
        self._started.append(now)
        make_private(self._folder)
        store_facts(self._folder, self._facts)
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        with open(f"{self._folder}/{LOG_NAME}", "ab") as log:  # noqa: PTH123
            self._child = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "elastictrain.checkpoint.keeper", self._folder],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def wait_for_end(self, pid: int, *, timeout_s: float) -> None:
        """Until the keeper of that number, started here or elsewhere, has ended, or the time is over."""
        with suppress(OSError):
            descriptor = os.pidfd_open(pid)
            try:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                poll.poll(1e3 * timeout_s)
            finally:
                os.close(descriptor)
        if self._child is not None:
            # Collected, or it would stay in the table of processes as long as this one lives.
            self._child.poll()


def knock(folder: str) -> socket.socket:
    """A connection to the keeper of a folder. Raises: OSError if nobody answers."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            connection.connect(f"/proc/self/fd/{descriptor}/{SOCKET_NAME}")
        finally:
            os.close(descriptor)
    except OSError:
        connection.close()
        raise
    return connection


def log_tail(folder: str) -> str:
    """The last line that a keeper wrote to its log, as the end of a sentence; empty if there is none."""
    with suppress(OSError), open(f"{folder}/{LOG_NAME}", "rb") as log:  # noqa: PTH123
        lines = log.read()[-2000:].decode(errors="replace").strip().splitlines()
        if lines:
            return f"; its last words: {lines[-1]}"
    return ""
