"""One launcher of a run on each host: a second one would take the same devices."""

import fcntl
import hashlib
import json
import os
import socket

from elastictrain.checkpoint.memory.place import run_name
from elastictrain.errors import UsageError
from elastictrain.launch.lock_file import open_lock

_DIGITS = 16
_MOST_BYTES = 4096


class Claim:
    """Held as long as this process lives."""

    def __init__(self, descriptor: int, before: str) -> None:
        self._descriptor = descriptor
        self.before = before
        """The launcher that held it before, which is gone; empty if nobody did."""

    def close(self) -> None:
        """Let go."""
        os.close(self._descriptor)

    def sign(self, host: str) -> None:
        """Tell the next one who this was."""
        data = json.dumps({"pid": os.getpid(), "host": host}).encode()
        os.pwrite(self._descriptor, data, 0)
        os.ftruncate(self._descriptor, len(data))


def claim_run(run_dir: str, *, folder: str | None = None) -> Claim:
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
    return Claim(descriptor, str(_read(descriptor).get("host", "")))


def _read(descriptor: int) -> dict[str, object]:
    try:
        facts = json.loads(os.pread(descriptor, _MOST_BYTES, 0))
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}
