"""Small files in which a host keeps figures from one preflight to the next; they may lie in a folder that others write to."""

import json
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from elastictrain.bounded_json import parse_json

_MOST_BYTES = 1 << 20
_FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def load_kept(path: Path) -> Mapping[str, object] | None:
    """The object that was kept; None if there is none, or none that can be understood, or if it may be somebody else's."""
    try:
        # Neither a link nor a pipe of somebody else leads us away or holds us up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # noqa: PTH123
            if not _is_trusted(os.fstat(descriptor), path.parent):
                return None
            row = parse_json(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def keep(path: Path, row: Mapping[str, object]) -> None:
    """Replaces the file at once, so that nobody reads half of it. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name that nobody can foresee: in a folder for all, another user could have put a link there.
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w") as file:  # noqa: PTH123
            file.write(json.dumps(row, indent=1))
        os.replace(name, path)  # noqa: PTH105
    except OSError:
        with suppress(OSError):
            os.unlink(name)  # noqa: PTH108
        raise


def _is_trusted(found: os.stat_result, folder: Path) -> bool:
    """On a file server our own file may show as nobody's; that is no reason for doubt in a folder that only we write to."""
    ours = found.st_uid == os.geteuid() or not folder.stat().st_mode & _FOR_OTHERS
    return stat.S_ISREG(found.st_mode) and ours
