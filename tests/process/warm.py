"""Starts Python programs as forks of a process that has imported torch: a worker is there in 0.3 s of CPU time and not in 5 s.

What a fork does is what the program does, in an environment, a folder and a process of its own, which ends by itself or by a
signal. The workers that a torchrun starts, and a launcher's fork server, are forks, too. A fork differs where the kernel shows
how it began: `/proc/PID/environ` is that of the host of forks, and its parent is that host. Tests of how processes begin, or
which find them by their environment, start them cold.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_START_LIMIT_S = 120.0
_END_LIMIT_S = 60.0
_COMMAND_BYTES = 1 << 15


@dataclass(slots=True)
class WarmHost:
    """The process whose forks become programs."""

    process: "subprocess.Popen[bytes]"
    codes: dict[int, int] = field(default_factory=dict)
    """Of forks that have ended, by process id."""
    _text: bytes = b""

    def start(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        cwd: Path,
        errors_log: Path | None = None,
        errors: Sequence[str] = (),
        namespaces: Sequence[str] = (),
    ) -> "WarmProcess":
        """`python ARGUMENTS`, where they begin with `-m` or the path of a script; what it prints is appended to `log`, or its
        errors to `errors_log`.

        `errors` are warnings that raise, `namespaces` the files of those that it enters first.
        """
        order = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "log": str(log),
            "cwd": str(cwd),
            "errors_log": str(errors_log) if errors_log is not None else "",
            "errors": list(errors),
            "namespaces": list(namespaces),
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        deadline = time.monotonic() + _START_LIMIT_S
        while (pid := self.hear(deadline - time.monotonic())) is None:
            assert time.monotonic() < deadline, "the host of forks does not answer"
        # Its number may have been another's before.
        self.codes.pop(pid, None)
        return WarmProcess(pid, self)

    def hear(self, limit_s: float) -> int | None:
        """Takes in one word of the host, if it says one in time; returns the process id if one was started."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        if b"\n" not in self._text:
            if not select.select([descriptor], [], [], max(0.0, limit_s))[0]:
                return None
            piece = os.read(descriptor, 65536)
            assert piece, "the host of forks has ended"
            self._text += piece
        line, complete, rest = self._text.partition(b"\n")
        if not complete:
            return None
        self._text = rest
        word = json.loads(line)
        if "ended" in word:
            self.codes[word["ended"]] = word["code"]
            return None
        started: int = word["started"]
        return started

    def close(self) -> None:
        """Ends it, and every fork that still lives."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(_END_LIMIT_S)
        finally:
            self.process.kill()


@dataclass(slots=True)
class WarmProcess:
    """A fork, with the part of subprocess.Popen that tests use."""

    pid: int
    host: WarmHost
    returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired."""
        deadline = time.monotonic() + (1e9 if timeout is None else timeout)
        while (code := self._look(deadline - time.monotonic())) is None:
            if timeout is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _look(self, limit_s: float) -> int | None:
        while self.returncode is None and self.pid not in self.host.codes:
            heard = len(self.host.codes)
            self.host.hear(limit_s)
            if len(self.host.codes) == heard:
                return None
        if self.returncode is None:
            self.returncode = self.host.codes.pop(self.pid)
        return self.returncode


def can_be_warm(command: Sequence[str]) -> bool:
    """Whether a fork can become this command. torchrun counts GPUs through the driver, which does not survive a fork."""
    return list(command[:2]) == [sys.executable, "-m"] and not Path("/dev/nvidiactl").exists()


@cache
def warm_host(ahead: str = "") -> WarmHost:
    """The one of this test process, started when it is first asked for. `ahead`: modules that its forks have imported, too."""
    from torchruns import environment

    # Threads, of OpenBLAS and of Arrow's allocator, would make it unfit to fork.
    single = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"} if ahead else {}

    # The last word makes room for the command lines of forks.
    command = [sys.executable, str(Path(__file__).with_name("warm_host.py")), _COMMAND_BYTES * "-"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment({**single, "AHEAD": ahead})
    )
    host = WarmHost(process)
    atexit.register(host.close)
    return host
