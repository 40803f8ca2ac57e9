"""What a run leaves in host memory, and its removal."""

import fcntl
import os
import time
from contextlib import suppress

from elastictrain.checkpoint.keeper.messages import LOCK_NAME
from elastictrain.checkpoint.memory.place import SlotName

_STALE_S = 3600.0


def remove_slot(folder: str, name: SlotName) -> None:
    """Delete a slot and what lies beside it; who has it mapped keeps its memory until then."""
    for path in (f"{folder}/{name}", f"{folder}/{name}.digests"):
        with suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108


def clear_folder(folder: str) -> None:
    """Remove everything of the run from host memory, the lock last."""
    with suppress(FileNotFoundError):
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name == LOCK_NAME):
            with suppress(OSError):
                os.unlink(entry.path)  # noqa: PTH108
        with suppress(OSError):
            os.rmdir(folder)  # noqa: PTH106
    with suppress(OSError):
        os.rmdir(os.path.dirname(folder))  # noqa: PTH106, PTH120


def clear_if_abandoned(folder: str) -> bool:
    """Remove everything of a run that no keeper keeps; whether it was so."""
    try:
        descriptor = os.open(f"{folder}/{LOCK_NAME}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        clear_folder(folder)
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # With the lock held: a keeper that starts now waits, and finds that its lock is gone.
        clear_folder(folder)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def sweep(parent: str, *, now: float | None = None) -> list[str]:
    """Removes folders of other runs whose keeper and workers were all killed long ago; returns their paths."""
    removed = []
    with suppress(OSError):
        for entry in list(os.scandir(parent)):
            with suppress(OSError):
                age_s = (time.time() if now is None else now) - entry.stat(follow_symlinks=False).st_mtime
                if entry.is_dir(follow_symlinks=False) and age_s > _STALE_S and clear_if_abandoned(entry.path):
                    removed.append(entry.path)
    return removed
