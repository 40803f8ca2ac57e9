"""The saver's process, from the workers' side: how it is started and reached, and what it leaves in host memory."""

import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from elastictrain.bounded_json import MalformedJsonError, encode_record, parse_record
from elastictrain.checkpoint.memory.folder import make_private
from elastictrain.checkpoint.memory.records import read_file
from elastictrain.errors import CheckpointError, InvalidCheckpointError
from elastictrain.processes import NO_FORKS
from elastictrain.storage.private import clear_folder, try_lock, write_file

SOCKET_NAME = "keeper.sock"
LOCK_NAME = "keeper.lock"
LOG_NAME = "keeper.log"
_CONFIG_NAME = "run.json"

_TRIES = 3
_TRIES_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class SaverConfig:
    """The same for all incarnations that use one configuration."""

    run_dir: str
    run: str  # name of the run in host memory
    keep_last: int
    keep_every: int
    save_timeout_s: float
    flush_s: float
    grace_s: float
    versions: dict[str, str]
    manifest_bytes: int  # of files and chunks that the manifest has of all ranks; what is more goes to parts
    key_env: str = ""  # environment variable with the key that signs checkpoints; empty: none


def store_config(folder: str, config: SaverConfig) -> None:
    """Raises: OSError."""
    write_file(f"{folder}/{_CONFIG_NAME}", encode_record(config))


def load_config(folder: str) -> SaverConfig:
    """Raises: InvalidCheckpointError naming the file."""
    path = f"{folder}/{_CONFIG_NAME}"
    try:
        return parse_record(read_file(path, max_bytes=1 << 20), SaverConfig)
    except (OSError, MalformedJsonError) as error:
        raise InvalidCheckpointError(f"{path} does not say what to keep: {error}") from error


class SaverStarter:
    """Starts a saver for one folder whenever the last one has ended."""

    def __init__(self, folder: str, config: SaverConfig) -> None:
        self._folder = folder
        self._config = config
        self._child: subprocess.Popen[bytes] | None = None
        self._started: list[float] = []

    def start_if_gone(self) -> None:
        """Start a saver, unless the one started here lives. Raises: CheckpointError after 3 starts within 60 s, ConfigError,
        OSError; FileNotFoundError if the saver before it removes the folder meanwhile."""
        if self._child is not None and self._child.poll() is None:
            return
        now = time.monotonic()
        self._started = [at for at in self._started if now - at < _TRIES_WITHIN_S]
        if len(self._started) >= _TRIES:
            raise CheckpointError(f"it ended {_TRIES} times within {_TRIES_WITHIN_S:g} s")
        self._started.append(now)
        make_private(self._folder)
        store_config(self._folder, self._config)
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        with NO_FORKS, open(f"{self._folder}/{LOG_NAME}", "ab") as log:  # noqa: PTH123
            self._child = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "elastictrain.checkpoint.saver", self._folder],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def wait_for_end(self, pid: int, *, timeout_s: float) -> None:
        """Wait until the saver with this pid, started here or elsewhere, has ended, for `timeout_s` at most."""
        # Unlike a wait for the pid to vanish, a pidfd also reports the end of a zombie that its parent does not reap.
        with suppress(OSError):
            descriptor = os.pidfd_open(pid)
            try:
                select.select([descriptor], [], [], timeout_s)
            finally:
                os.close(descriptor)
        if self._child is not None:
            # Reaped, or it would stay a zombie as long as this process lives.
            self._child.poll()


def connect_saver(folder: str) -> socket.socket:
    """Connect to the saver of a folder. Raises: OSError if none answers."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        through_folder(folder, connection.connect)
    except OSError:
        connection.close()
        raise
    return connection


def peer_pid(connection: socket.socket) -> int:
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0])


def through_folder(folder: str, use: Callable[[str], None]) -> None:
    """Bind or connect the saver's socket. Socket addresses have at most 107 characters, so the path goes through /proc."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        use(f"/proc/self/fd/{descriptor}/{SOCKET_NAME}")
    finally:
        os.close(descriptor)


def log_tail(folder: str) -> str:
    """Last line of the saver's log, as the end of a sentence; empty if there is none."""
    with suppress(OSError), open(f"{folder}/{LOG_NAME}", "rb") as log:  # noqa: PTH123
        lines = log.read()[-2000:].decode(errors="replace").strip().splitlines()
        if lines:
            return f"; its last words: {lines[-1]}"
    return ""


def clear_if_abandoned(folder: str) -> bool:
    """Clear a run's folder if no saver holds its lock; returns whether it was cleared."""
    try:
        descriptor = os.open(f"{folder}/{LOCK_NAME}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        clear_folder(folder, last=LOCK_NAME)
        return True
    except OSError:
        return False
    try:
        if not try_lock(descriptor):
            return False
        # With the lock held: a saver that starts now waits, and then finds its lock deleted.
        clear_folder(folder, last=LOCK_NAME)
    finally:
        os.close(descriptor)
    return True
