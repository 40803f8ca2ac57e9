"""A file of what this host's launcher and all its processes print, beside the terminal: a small process copies it. The launcher
keeps its exit code, which a pipe into `tee` would replace.

    python -m elastictrain.launch.host_log FILE OUTPUT ERRORS CONTROL     (descriptors; started by the launcher)
"""

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from elastictrain.errors import HostUnfitError
from elastictrain.fault.stop import STOP_SIGNALS

_CLOSE_S = 2.0  # for what has been printed to reach file and terminal
_TERMINAL_S = 10.0  # for which a terminal that does not block may take nothing
_STREAMS = (1, 2)
_CHUNK = 1 << 16
_MODULE = "elastictrain.launch.host_log"


@dataclass(frozen=True, slots=True)
class HostLog:
    """The launcher's end."""

    path: Path
    _file: int
    _sources: tuple[int, ...]  # read ends of the pipes: open here, too, so that they outlive a copier that is killed
    _control: socket.socket
    _copiers_control: socket.socket
    _copier: subprocess.Popen[bytes]
    _terminal: tuple[int, ...]  # where output and errors went before

    @classmethod
    def begin(cls, folder: str, *, host: str) -> Self:
        """From now on what this process and its children print goes to the terminal and to a new file in `folder`. Raises:
        HostUnfitError if there can be no such file, or no process that copies."""
        path = Path(folder).expanduser() / f"{host}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise HostUnfitError(f"`launch.log_dir` must be a folder in which {path.name} can be made, but {error}") from error
        try:
            ours, theirs = socket.socketpair()
            pipes = [os.pipe() for _ in _STREAMS]
            passed = (file, *(reader for reader, _ in pipes), theirs.fileno())
            copier = _start_copier(passed)
        except OSError as error:
            raise HostUnfitError(f"with `launch.log_dir` this host must be able to start a process, but {error}") from error
        terminal = tuple(map(os.dup, _STREAMS))
        for stream, (_, writer) in zip(_STREAMS, pipes, strict=True):
            os.dup2(writer, stream)
            os.close(writer)
        log = cls(path, file, passed[1:-1], ours, theirs, copier, terminal)
        threading.Thread(target=log._replace_copier, name="host log", daemon=True).start()
        return log

    def _replace_copier(self) -> None:
        """Copy here once the copier was killed: whoever prints into a pipe that nobody reads ends, or waits for ever."""
        if self._copier.wait():
            copy(self._file, self._sources, self._terminal, self._copiers_control)

    def close(self, code: int) -> None:
        """Note the exit code in the file, and wait a moment until all is copied. A saver may print after that."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        for stream, before in zip(_STREAMS, self._terminal, strict=True):
            os.dup2(before, stream)
        with suppress(OSError):
            self._control.settimeout(2 * _CLOSE_S)
            self._control.sendall(f"elastictrain: exit code {code}\n".encode())
            self._control.shutdown(socket.SHUT_WR)
            self._control.recv(1)
        self._control.close()


def _start_copier(passed: Sequence[int]) -> subprocess.Popen[bytes]:
    """Raises: OSError."""
    command = [sys.executable, "-m", _MODULE, *map(str, passed)]
    # A signal to all processes is for the launcher: what it prints then is copied, too. The copier inherits that these are
    # blocked, from its first moment on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, signal.SIGHUP, signal.SIGPIPE))
    try:
        return subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def copy(file: int, sources: Sequence[int], terminal: Sequence[int], control: socket.socket) -> None:
    """Copy each of the `sources` to its stream of the `terminal` and to the file, until nobody writes to them any more. The
    launcher's last word comes over `control` when it ends, and is for the file; it is answered with one byte."""
    # Of one stream alone, so that a terminal that takes no output does not hold up the errors.
    locks = [threading.Lock() for _ in sources]
    parts = zip(sources, [file] * len(sources), terminal, locks, strict=True)
    threads = [threading.Thread(target=_copy_stream, args=one, daemon=True) for one in parts]
    for thread in threads:
        thread.start()
    last_word = b"".join(iter(lambda: control.recv(_CHUNK), b""))
    until_s = time.monotonic() + _CLOSE_S
    # All that the launcher has printed is in the pipes by now.
    while not all(map(_is_copied, sources, locks)) and time.monotonic() < until_s:
        time.sleep(0.01)
    _write(file, last_word)
    with suppress(OSError):
        control.send(b".")
    for thread in threads:
        thread.join()


def _copy_stream(source: int, file: int, stream: int, lock: threading.Lock) -> None:
    data = b"."
    while data:
        select.select([source], [], [])
        with lock:
            data = os.read(source, _CHUNK)
            _write(file, data)
            _write(stream, data)


def _is_copied(source: int, lock: threading.Lock) -> bool:
    """Whether all is copied that had been printed to `source`."""
    if not lock.acquire(blocking=False):
        return False
    unread = any(fcntl.ioctl(source, termios.FIONREAD, bytes(4)))
    lock.release()
    return not unread


def _write(descriptor: int, data: bytes) -> None:
    """A terminal that was closed, or a full disk, must not end the other copy."""
    with suppress(OSError):
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                if not select.select([], [descriptor], [], _TERMINAL_S)[1]:
                    return


if __name__ == "__main__":
    _file, *_sources, _control = map(int, sys.argv[1:])
    copy(_file, _sources, _STREAMS, socket.socket(fileno=_control))
