"""A file of what this host's launcher and all its processes print, beside the terminal: a small process copies it. The launcher
keeps its exit code, which a pipe into `tee` would replace.

    python -m elastictrain.launch.host_log FILE OUTPUT ERRORS CONTROL     (descriptors; started by the launcher)
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from elastictrain.errors import HostUnfitError

_CLOSE_S = 2.0  # for what has been printed to reach file and terminal
_STREAMS = (1, 2)
_CHUNK = 1 << 16
_MODULE = "elastictrain.launch.host_log"


@dataclass(frozen=True, slots=True)
class HostLog:
    """The launcher's end."""

    path: Path
    _control: socket.socket
    _copier: subprocess.Popen[bytes]
    _terminal: tuple[int, ...]  # where output and errors went before

    @classmethod
    def begin(cls, folder: str, *, host: str) -> Self:
        """From now on what this process and its children print goes to the terminal and to a new file in `folder`. Raises:
        HostUnfitError if there can be no such file."""
        path = Path(folder).expanduser() / f"{host}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            raise HostUnfitError(f"`launch.log_dir` must be a folder in which {path.name} can be made, but {error}") from error
        ours, theirs = socket.socketpair()
        pipes = [os.pipe() for _ in _STREAMS]
        passed = [*(reader for reader, _ in pipes), theirs.fileno()]
        command = [sys.executable, "-m", _MODULE, str(path), *map(str, passed)]
        # A signal from the terminal is for the launcher: what it prints then is copied, too.
        copier = subprocess.Popen(  # noqa: S603  # this module
            command, pass_fds=passed, stdin=subprocess.DEVNULL, start_new_session=True
        )
        terminal = tuple(map(os.dup, _STREAMS))
        for stream, (reader, writer) in zip(_STREAMS, pipes, strict=True):
            os.dup2(writer, stream)
            os.close(reader)
            os.close(writer)
        theirs.close()
        return cls(path, ours, copier, terminal)

    def close(self, code: int) -> None:
        """Note the exit code in the file, and wait a moment until all is copied. A saver may print after that."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        for stream, before in zip(_STREAMS, self._terminal, strict=True):
            os.dup2(before, stream)
        with suppress(OSError):
            self._control.settimeout(_CLOSE_S)
            self._control.sendall(f"elastictrain: exit code {code}\n".encode())
            self._control.shutdown(socket.SHUT_WR)
            self._control.recv(1)
        self._control.close()


def copy(path: Path, sources: Sequence[int], control: socket.socket) -> None:
    """Copy each of the `sources` to the stream of its number (1, 2) and to the file, until nobody writes to them any more. The
    launcher's last word comes over `control` when it ends, and is for the file; it is answered by the end of `control`."""
    with path.open("ab", buffering=0) as file, selectors.DefaultSelector() as selector:
        for stream, source in zip(_STREAMS, sources, strict=True):
            os.set_blocking(source, False)
            selector.register(source, selectors.EVENT_READ, stream)
        selector.register(control, selectors.EVENT_READ, 0)
        while selector.get_map():
            ready = sorted(selector.select(), key=lambda one: one[0].data)
            if ready[0][0].data == 0:
                last_word = b"".join(iter(lambda: control.recv(_CHUNK), b""))
                selector.unregister(control)
                # All that the launcher has printed is in the pipes by now.
                for source in sources:
                    while source in selector.get_map() and _copy_once(source, selector, file.fileno()):
                        pass
                _write(file.fileno(), last_word)
                control.close()
                continue
            for key, _ in ready:
                _copy_once(key.fd, selector, file.fileno())


def _copy_once(source: int, selector: selectors.BaseSelector, file: int) -> bool:
    """Whether there was something to copy."""
    try:
        data = os.read(source, _CHUNK)
    except BlockingIOError:
        return False
    if data:
        _write(file, data)
        _write(selector.get_key(source).data, data)
    else:
        selector.unregister(source)
    return bool(data)


def _write(descriptor: int, data: bytes) -> None:
    """A terminal that was closed, or a full disk, must not end the other copy."""
    with suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    _path, *_descriptors, _control = sys.argv[1:]
    copy(Path(_path), [*map(int, _descriptors)], socket.socket(fileno=int(_control)))
