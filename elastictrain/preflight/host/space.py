"""How much room a folder has."""

import os
from dataclasses import dataclass

from elastictrain.preflight.host.mounts import Mount, mount_of


@dataclass(frozen=True, slots=True)
class Space:
    """Room on the file system of a folder, for this user. Inodes are None where the file system does not count them."""

    path: str
    total_bytes: int
    free_bytes: int
    free_inodes: int | None
    kind: str | None = None
    """Such as "tmpfs"; None if unknown."""


def read_space(path: str, *, mounts: list[Mount]) -> Space | None:
    """Of a folder, or of the nearest one above it that exists; None if the system does not tell."""
    try:
        nearest = os.path.realpath(os.path.expanduser(path))  # noqa: PTH111
        while not os.path.isdir(nearest) and nearest != "/":  # noqa: PTH112
            nearest = os.path.dirname(nearest)  # noqa: PTH120
        found = os.statvfs(nearest)
    except (OSError, ValueError):
        return None
    mount = mount_of(nearest, mounts)
    return Space(
        path=nearest,
        total_bytes=found.f_blocks * found.f_frsize,
        free_bytes=found.f_bavail * found.f_frsize,
        # Btrfs and many network file systems make inodes as they need them, and say 0 of 0.
        free_inodes=found.f_favail if found.f_files else None,
        kind=mount.kind if mount else None,
    )
