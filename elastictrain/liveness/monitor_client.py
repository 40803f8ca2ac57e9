"""A worker's side of the monitor: its progress file, its stacks on request, and the monitor process of its host."""

import fcntl
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass

from elastictrain.bounded_json import encode_record
from elastictrain.config.composed import FaultGroup
from elastictrain.liveness.progress import ProgressMark
from elastictrain.liveness.progress_file import ProgressFile, ProgressFileReader
from elastictrain.liveness.stacks import dump_stacks_on_signal, stop_stack_dumps, take_stacks
from elastictrain.liveness.watchdog import bound_s, limit_s
from elastictrain.storage.private import clear_folder, make_private_folders, remove_if_empty

logger = logging.getLogger(__name__)

_MEMORY = "/dev/shm"  # noqa: S108  # only a private folder in it is used


@dataclass(frozen=True, slots=True)
class MonitoredHost:
    generation: str
    host: str
    ranks: tuple[int, ...]
    run_dir: str
    flush_s: float
    close_s: float


class RankMonitorClient:
    """One worker's side. `close` removes its files and ends its monitor; if the worker dies, the monitor removes the files."""

    def __init__(self, facts: MonitoredHost, *, rank: int, options: FaultGroup, parent: str = "") -> None:
        """Call from the main thread. `parent`: the folder of all generations, by default in memory. Raises: OSError."""
        self._facts = facts
        self._options = options
        self.folder = f"{parent or default_parent()}/{facts.generation}-r{facts.ranks[0]:05d}"
        make_private_folders(self.folder)
        stopped_s = min(options.hang_floor_s, options.step_timeout_s)
        with ExitStack() as undo:
            undo.callback(remove_if_empty, self.folder)
            # The lock keeps the folder from being swept while this process lives.
            undo.callback(os.close, lock_folder(self.folder, fcntl.LOCK_SH))
            self.progress = ProgressFile(self.folder, rank=rank, stopped_s=stopped_s, grace_s=options.shutdown_grace_s)
            undo.callback(self.progress.close)
            undo.callback(stop_stack_dumps, dump_stacks_on_signal(self.folder, rank))
            self._undo = undo.pop_all()
        self._monitor: subprocess.Popen[bytes] | None = None

    def write(self, mark: ProgressMark) -> None:
        self.progress.write(mark, bound_s=bound_s(mark, self._options), limit_s=limit_s(mark, self._options))

    def start_monitor(self) -> None:
        """One monitor for the whole host; it ends with its last worker. Raises: OSError."""
        # It must not look like a worker, or receive the signals for one.
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        self._monitor = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "elastictrain.liveness", self.folder, encode_record(self._facts).decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )

    def take_stacks(self) -> str:
        """The stacks of all workers of this host, within a bounded time."""
        return take_stacks(self.folder, workers_of(self.folder, self._facts.ranks))

    def close(self) -> None:
        if self._monitor is not None:
            self._monitor.kill()
            self._monitor.wait()
        self._undo.close()


def default_parent() -> str:
    """This user's folder of all generations."""
    # In memory, because on a disk a mark could wait for other writes.
    memory = _MEMORY if os.path.isdir(_MEMORY) and os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()  # noqa: PTH112
    return f"{memory}/elastictrain-{os.getuid()}-marks"


def workers_of(folder: str, ranks: Sequence[int]) -> list[tuple[int, int]]:
    """`(rank, pid)` of each worker that has a progress file."""
    found = []
    for rank in ranks:
        with suppress(OSError, ValueError), closing(ProgressFileReader(folder, rank)) as reader:
            found.append((rank, reader.pid))
    return found


def clear_if_unlocked(folder: str) -> bool:
    """Remove what the workers of a killed generation and their monitor left. Raises: OSError if a worker lives."""
    # By locks, not by pids: containers that share this memory do not know each other's pids.
    descriptor = lock_folder(folder, fcntl.LOCK_EX)
    clear_folder(folder)
    os.close(descriptor)
    return True


def lock_folder(folder: str, how: int) -> int:
    """A descriptor that holds the lock. Raises: OSError if another process holds a conflicting lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
