"""Files of this host that launchers lock: who holds one is there, and who ends lets go of it."""

import os
import tempfile
from pathlib import Path

from elastictrain.errors import HostUnfitError
from elastictrain.storage.failures import reason_of


def open_lock(name: str, *, folder: str | None = None) -> int:
    """The descriptor of this user's lock file `name`, not locked yet. Raises: HostUnfitError if it cannot be opened."""
    path = Path(folder or tempfile.gettempdir()) / f"elastictrain-{os.getuid()}-{name}"
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise HostUnfitError(f"{path} must be a file that this user can lock, but: {reason_of(error)}") from error
