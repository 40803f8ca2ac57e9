"""Host-wide locks: one launcher per run, because two would take the same devices, and one launcher per Slurm job."""

import fcntl
import hashlib
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastictrain.bounded_json import MalformedJsonError, encode_record, parse_record
from elastictrain.checkpoint.memory.folder import run_name
from elastictrain.errors import EXIT_OK, HostUnfitError, UsageError
from elastictrain.storage.failures import reason_of
from elastictrain.storage.private import NameTakenError, open_private_file, try_lock

_LAUNCHER_COMES_S = 120.0
_TURN_S = 0.2
_QUIET_S = 2.0


def acquire_task_lock(job: str, *, print_line: Callable[[str], None]) -> int:
    """Lock of a job's launcher on its host, held for life; returns the descriptor. Waits for another holder to end."""
    descriptor = _open_job_lock(job)
    quiet_until = time.monotonic() + _QUIET_S
    while time.monotonic() < quiet_until:
        if try_lock(descriptor):
            return descriptor
        # Waiting tasks probe this lock with short shared locks.
        time.sleep(_TURN_S / 4)
    print_line("waiting for another launcher of this job to end on this host")
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def wait_for_launcher(job: str, *, comes_s: float = _LAUNCHER_COMES_S) -> int:
    """Wait until the launcher of a job on this host has started and ended; returns an exit code."""
    # Signals to the job are for the launcher: a task that ends before it could end all others.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    descriptor = _open_job_lock(job)
    deadline, came = time.monotonic() + comes_s, False
    while came or time.monotonic() < deadline:
        if not try_lock(descriptor, shared=True):
            came = True
        elif came:
            break
        else:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        time.sleep(_TURN_S)
    os.close(descriptor)
    return EXIT_OK


def _open_job_lock(job: str) -> int:
    return _open_lock(f"{job}-{socket.gethostname()}.lock")  # hosts of a job may share the folder for temporary files


def _open_lock(name: str, *, folder: str | None = None) -> int:
    """Descriptor of this user's lock file `name`, not locked yet. Raises: HostUnfitError if it cannot be opened."""
    path = f"{folder or tempfile.gettempdir()}/elastictrain-{os.getuid()}-{name}"
    try:
        return open_private_file(path)
    except NameTakenError as error:
        raise HostUnfitError(f"{reason_of(error)}; or set TMPDIR to a folder of your own") from error
    except OSError as error:
        raise HostUnfitError(f"{path} must be a file that this user can lock, but: {reason_of(error)}") from error


_DIGITS = 16
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Holder:
    pid: int = 0
    host: str = ""


@dataclass(frozen=True, slots=True)
class HostLock:
    """Held as long as this process lives."""

    descriptor: int
    before: str  # the ended launcher that held it before; empty if there was none
    parent: Path
    prefix: str  # of folders for temporary files, in `parent`

    def close(self) -> None:
        os.close(self.descriptor)

    def make_folder(self) -> Path:
        """Make a folder for temporary files, and remove those of killed launchers of this run. Raises: OSError."""
        for left in self.parent.glob(f"{self.prefix}*"):
            with suppress(OSError):
                if left.lstat().st_uid == os.getuid():
                    shutil.rmtree(left)
        return Path(tempfile.mkdtemp(prefix=self.prefix, dir=self.parent))

    def sign(self, host: str) -> None:
        """Write this launcher's name for the next holder."""
        data = encode_record(_Holder(os.getpid(), host))
        os.pwrite(self.descriptor, data, 0)
        os.ftruncate(self.descriptor, len(data))


def lock_run(run_dir: str, *, folder: str | None = None) -> HostLock:
    """Raises: UsageError if another launcher of this run lives on this host; HostUnfitError if that cannot be checked."""
    # Hosts may share the folder for temporary files, so the name contains the host.
    digest = hashlib.sha256(f"{socket.gethostname()} {run_name(run_dir)}".encode()).hexdigest()[:_DIGITS]
    descriptor = _open_lock(f"launch-{digest}", folder=folder)
    taken, holder = not try_lock(descriptor), _Holder()
    with suppress(MalformedJsonError):
        holder = parse_record(os.pread(descriptor, _MOST_BYTES, 0), _Holder)
    if taken:
        os.close(descriptor)
        who = f"process {holder.pid or 'unknown'}"
        raise UsageError(f"another launcher of {run_dir} lives on this host ({who}); end it first, or give another run.dir")
    parent = Path(folder or tempfile.gettempdir())
    return HostLock(descriptor, holder.host, parent, f"elastictrain-launch-{digest}-")
