"""A worker's part in being watched from outside: its progress file, its stacks when asked, and the monitor of its host."""

import fcntl
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from elastictrain.bounded_json import encode_record
from elastictrain.config.composed import FaultGroup
from elastictrain.liveness.progress import ProgressMark
from elastictrain.liveness.progress_file import ProgressFile, ProgressFileReader
from elastictrain.liveness.stacks import no_stacks_any_more, take_stacks, tell_stacks_when_asked
from elastictrain.liveness.watchdog import bound_s, limit_s
from elastictrain.storage.private import clear_folder, make_private_folders, remove_if_empty

logger = logging.getLogger(__name__)

_MEMORY = "/dev/shm"  # noqa: S108  # the folder in it is ours alone


@dataclass(frozen=True, slots=True)
class MonitoredHost:
    """What the monitor of a host has to know of a generation."""

    generation: str
    host: str
    ranks: tuple[int, ...]
    run_dir: str
    flush_s: float
    close_s: float
    launcher_folder: str = ""  # where the launcher finds why ranks ended; empty if there is none


class RankMonitorClient:
    """One worker. Its files and its monitor go with `close`; where a worker ends otherwise, the monitor removes them."""

    def __init__(self, facts: MonitoredHost, *, rank: int, options: FaultGroup, parent: str = "") -> None:
        """From the main thread. Raises: OSError. `parent`: the folder for all generations, by default one in memory."""
        self._facts = facts
        self._options = options
        self.folder = f"{parent or default_parent()}/{facts.generation}-r{facts.ranks[0]:05d}"
        make_private_folders(self.folder)
        stopped_s = min(options.hang_floor_s, options.step_timeout_s)
        with ExitStack() as undo:
            undo.callback(remove_if_empty, self.folder)
            # Kept from being swept for the life of this process.
            undo.callback(os.close, lock_folder(self.folder, fcntl.LOCK_SH))
            self.progress = ProgressFile(self.folder, rank=rank, stopped_s=stopped_s, grace_s=options.shutdown_grace_s)
            undo.callback(self.progress.close)
            undo.callback(no_stacks_any_more, tell_stacks_when_asked(self.folder, rank))
            self._undo = undo.pop_all()
        self._monitor: subprocess.Popen[bytes] | None = None

    def write(self, mark: ProgressMark) -> None:
        self.progress.write(mark, bound_s=bound_s(mark, self._options), limit_s=limit_s(mark, self._options))

    def start_monitor(self) -> None:
        """For the whole host; it ends when the last of its workers has. Raises: OSError."""
        # It must not look like a worker, or take the signals that are meant for one.
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        self._monitor = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "elastictrain.liveness", self.folder, encode_record(self._facts).decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )

    def take_stacks(self) -> str:
        """Of all workers of this host; within a bounded time."""
        return take_stacks(self.folder, workers_of(self.folder, self._facts.ranks))

    def close(self) -> None:
        if self._monitor is not None:
            self._monitor.kill()
            self._monitor.wait()
        self._undo.close()


def default_parent() -> str:
    """The folder of this user for all generations."""
    # On a disk a mark could wait for what else is written there.
    memory = _MEMORY if os.path.isdir(_MEMORY) and os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()  # noqa: PTH112
    return f"{memory}/elastictrain-{os.getuid()}-marks"


def workers_of(folder: str, ranks: Sequence[int]) -> list[tuple[int, int]]:
    """`(rank, pid)` of those that have marks."""
    found = []
    for rank in ranks:
        with suppress(OSError, ValueError):
            reader = ProgressFileReader(folder, rank)
            found.append((rank, reader.pid))
            reader.close()
    return found


def clear_if_unlocked(folder: str) -> bool:
    """Removes what the workers of a generation and their monitor left when all were killed. Raises: OSError if one lives."""
    # By locks, not by process numbers: containers that share this memory do not know each other's numbers.
    descriptor = lock_folder(folder, fcntl.LOCK_EX)
    clear_folder(folder)
    os.close(descriptor)
    return True


def lock_folder(folder: str, how: int) -> int:
    """A descriptor that holds the lock. Raises: OSError if somebody holds it otherwise."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
