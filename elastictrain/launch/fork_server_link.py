"""A launcher's link to its fork server: starts the process, sends it orders, and receives its reports."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from elastictrain.bounded_json import DOCUMENT, JsonLines, encode_record
from elastictrain.entry_point import split_program

# Unbuffered (-u), because its forks print as workers do.
SERVER = (sys.executable, "-u", "-m", "elastictrain.launch.fork_server")
_PRINTS = frozenset(("-h", "--help", "--cfg", "--dry-run"))

_DEFAULTS = {
    # As torchrun sets it for several workers; `run.num_threads` overrides it.
    "OMP_NUM_THREADS": "1",
    # Otherwise torch reports a dead launcher with a stack of C++ frames.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # torch counts the GPUs at each start. Through the driver instead of NVML that takes up to half a second.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}


READY: Mapping[str, Any] = {"ready": True}
"""The first report of a fork server."""
_IMPORTS_WITHIN_S = 300.0


class ForkServerLink:
    """`ready`: whether the server has imported what workers need. Orders wait here until then, so they can be taken back."""

    def __init__(self, program: Sequence[str], *, now_s: float) -> None:
        """Start the process."""
        self.began_s, self.ready = now_s, False
        self._held: list[tuple[bytes, Sequence[socket.socket]]] = []
        self.channel, theirs = socket.socketpair()
        # A reason may name a file whose name is no UTF-8.
        self._lines = JsonLines(dict[str, Any], limits=DOCUMENT, lenient=True)
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603  # our own module
                program,
                stdin=theirs.fileno(),
                env={**_DEFAULTS, **os.environ},
                # Ctrl-C is for the launcher, which then stops the workers.
                start_new_session=True,
            )

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def order(self, message: Mapping[str, Any], channels: Sequence[socket.socket]) -> None:
        """Send an order, and with it the workers' ends of their `channels`, once the server is ready. The end of the process is
        noticed by `lives`."""
        self._held.append((encode_record(message) + b"\n", channels))
        if self.ready:
            self._send_held()

    def take_back(self, *, now_s: float) -> bool:
        """Forget all orders if the server has received none because it still imports; not if that takes suspiciously long."""
        early = not self.ready and now_s < self.began_s + _IMPORTS_WITHIN_S
        if early:
            self._drop_held()
        return early

    def _drop_held(self) -> None:
        for channel in (one for _, channels in self._held for one in channels):
            channel.close()
        self._held.clear()

    def _send_held(self) -> None:
        for data, channels in self._held:
            with suppress(OSError):
                sent = socket.send_fds(self.channel, [data], [one.fileno() for one in channels])
                self.channel.sendall(data[sent:])
        self._drop_held()

    def receive(self) -> list[dict[str, Any]]:
        """The reports that have come since the last call."""
        reports: list[dict[str, Any]] = []
        with suppress(OSError):
            while data := self.channel.recv(1 << 16, socket.MSG_DONTWAIT):
                reports += self._lines.feed(data)
        if READY in reports:
            reports = [one for one in reports if one != READY]
            self.ready = True
            self._send_held()
        return reports

    def close(self, limit_s: float) -> None:
        """End the process; without workers it holds nothing that is needed."""
        self._drop_held()
        self.channel.close()
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(limit_s)


def start_ahead(arguments: Sequence[str]) -> ForkServerLink | None:
    """Start the fork server of a launcher with these arguments, whose own imports take half a second; None for a launcher that
    only prints something. It imports torch, which takes seconds, and ends with this process."""
    if _PRINTS.intersection(one.partition("=")[0] for one in split_program(arguments)[0]):
        return None
    # While a parent ignores the ends of its children, they leave no exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return ForkServerLink([*SERVER, *arguments], now_s=time.monotonic())
