"""What is mounted where, as /proc/self/mountinfo says."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from elastictrain.preflight.surroundings import Surroundings

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount. `root` is the folder of its file system that is seen at `point`; `options` are those of the file system."""

    root: str
    point: str
    kind: str
    options: frozenset[str]


def read_mounts(surroundings: Surroundings) -> list[Mount]:
    """All mounts that this process sees, in order; none if the kernel does not tell. Lines that make no sense are left out."""
    return parse_mounts(surroundings.read("proc/self/mountinfo") or "")


def parse_mounts(text: str) -> list[Mount]:
    """Source: proc_pid_mountinfo(5)."""
    found = []
    for line in text.splitlines():
        fields, separator, behind = line.partition(" - ")
        before, after = fields.split(), behind.split()
        if separator and len(before) >= 6 and len(after) >= 2:
            options = after[2] if len(after) > 2 else ""
            found.append(Mount(_plain(before[3]), _plain(before[4]), after[0], frozenset(options.split(","))))
    return found


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """The mount on which an absolute path lies; of several at one point the last one hides the others."""
    best: Mount | None = None
    for mount in mounts:
        point = mount.point.rstrip("/")
        within = path == point or path.startswith(f"{point}/")
        if within and (best is None or len(point) >= len(best.point.rstrip("/"))):
            best = mount
    return best


def _plain(text: str) -> str:
    """The kernel writes space, tab, newline and backslash as octal numbers."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
