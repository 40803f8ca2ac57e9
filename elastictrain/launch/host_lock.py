"""One launcher of a run on each host: a second one would take the same devices."""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from elastictrain.checkpoint.memory.place import run_name
from elastictrain.errors import UsageError
from elastictrain.launch.lock_file import open_lock

_DIGITS = 16
_MOST_BYTES = 4096


class HostLock:
    """Held as long as this process lives."""

    def __init__(self, descriptor: int, before: str, *, digest: str, folder: str | None) -> None:
        self._descriptor = descriptor
        self._digest = digest
        self._folder = folder
        self.before = before
        """The launcher that held it before, which is gone; empty if nobody did."""

    def close(self) -> None:
        """Let go."""
        os.close(self._descriptor)

    def make_folder(self) -> Path:
        """A new folder for temporary files of this launcher; those that killed launchers of the run left here are removed.

        Raises: OSError.
        """
        parent, prefix = Path(self._folder or tempfile.gettempdir()), f"elastictrain-launch-{self._digest}-"
        for left in parent.glob(f"{prefix}*"):
            with suppress(OSError):
                if left.lstat().st_uid == os.getuid():
                    shutil.rmtree(left)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))

    def sign(self, host: str) -> None:
        """Tell the next one who this was."""
        data = json.dumps({"pid": os.getpid(), "host": host}).encode()
        os.pwrite(self._descriptor, data, 0)
        os.ftruncate(self._descriptor, len(data))


def lock_run(run_dir: str, *, folder: str | None = None) -> HostLock:
    """Raises: UsageError if another launcher of this run lives on this host; HostUnfitError if that cannot be found out."""
    # Hosts may share the folder for temporary files.
    digest = hashlib.sha256(f"{socket.gethostname()} {run_name(run_dir)}".encode()).hexdigest()[:_DIGITS]
    descriptor = open_lock(f"launch-{digest}", folder=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _read(descriptor).get("pid", "unknown")
        os.close(descriptor)
        raise UsageError(
            f"another launcher of {run_dir} lives on this host (process {holder}); end it first, or give another run.dir"
        ) from None
    return HostLock(descriptor, str(_read(descriptor).get("host", "")), digest=digest, folder=folder)


def _read(descriptor: int) -> dict[str, object]:
    try:
        facts = json.loads(os.pread(descriptor, _MOST_BYTES, 0))
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}
