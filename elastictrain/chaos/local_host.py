"""The host that this machine is: what chaos uses where it cannot make hosts of its own."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from elastictrain.chaos.processes import StartedProcess, child_environment, kill_all, start_process

_MEMORY = "/dev/shm"  # noqa: S108  # what is made there is private
_MARK = "ELASTICTRAIN_CHAOS_HOST"


class LocalHost:
    """Whoever is started here has a mark in its environment, which its descendants inherit. All end with the block."""

    def __init__(self, name: str, *, folder: Path) -> None:
        self.name = name
        self.address = "127.0.0.1"
        in_memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
        self.memory = Path(tempfile.mkdtemp(prefix="elastictrain-host-", dir=in_memory))
        self._mark = f"{folder}/{name}"
        self._runs: list[StartedProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.kill()
        shutil.rmtree(self.memory, ignore_errors=True)

    def popen(self, command: Sequence[str | Path], *, log: Path, extra_environment: Mapping[str, str] = {}) -> StartedProcess:
        """Start a process in the folder of its log."""
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = child_environment({_MARK: self._mark, **extra_environment})
        self._runs.append(start_process([*map(str, command)], log=log, cwd=log.parent, environment=variables))
        return self._runs[-1]

    def inhabitants(self) -> list[int]:
        """Every process with the mark."""
        mark = f"{_MARK}={self._mark}\0".encode()
        found = []
        for entry in Path("/proc").iterdir():
            # Dead ones have no environment any more.
            with suppress(OSError):
                if entry.name.isdecimal() and mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """SIGKILL everything; what is in host memory stays."""
        kill_all(self.inhabitants)
        for one in self._runs:
            one.process.wait()

    def lose(self) -> None:
        """The same, and the memory with it."""
        self.kill()
        shutil.rmtree(self.memory)
        self.memory.mkdir(mode=0o700)

    def restore(self) -> None:
        """There is no cable to be plugged in again."""
