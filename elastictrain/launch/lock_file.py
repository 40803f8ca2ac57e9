"""Files of this host that launchers lock: who holds one is there, and who ends lets go of it."""

import os
import tempfile

from elastictrain.errors import HostUnfitError
from elastictrain.storage.failures import reason_of
from elastictrain.storage.private import NameTakenError, open_private_file


def open_lock(name: str, *, folder: str | None = None) -> int:
    """The descriptor of this user's lock file `name`, not locked yet. Raises: HostUnfitError if it cannot be opened."""
    path = f"{folder or tempfile.gettempdir()}/elastictrain-{os.getuid()}-{name}"
    try:
        return open_private_file(path)
    except NameTakenError as error:
        raise HostUnfitError(f"{reason_of(error)}; or set TMPDIR to a folder of your own") from error
    except OSError as error:
        raise HostUnfitError(f"{path} must be a file that this user can lock, but: {reason_of(error)}") from error
