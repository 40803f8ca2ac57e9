"""Check `disk`: room, in bytes and in inodes, for the run's folder and for temporary files."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastictrain.preflight.host.gibibytes import GIB, MIB, in_gib
from elastictrain.preflight.host.mounts import read_mounts
from elastictrain.preflight.host.space import Space, read_space
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Reporter, Verdict

LEAST_BYTES = 64 * MIB
"""Below it not even events, logs and compiled kernels fit for long: the run would die of it in minutes."""

LOW_BYTES = GIB
"""Below it somebody should look, whatever the run needs."""

LEAST_INODES = 64
"""A checkpoint alone makes a file per rank and a few more."""

LOW_INODES = 10_000
"""A folder of temporary files with torch's compiler in it can hold as many."""


@dataclass(frozen=True, slots=True)
class CheckedFolder:
    """A folder that will be written."""

    path: str
    use: str
    """Such as "run.dir"."""

    relief: str
    """What to do where it is too small: a command or a setting."""


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """A folder, and the room it has, if the system tells."""

    folder: CheckedFolder
    space: Space | None


def local_path(url: str) -> str | None:
    """The folder that a URL means, if it is one on this host."""
    protocol, separator, rest = url.partition("://")
    if not separator:
        return os.path.abspath(os.path.expanduser(url))  # noqa: PTH100, PTH111
    return rest if protocol in ("file", "local") and rest.startswith("/") else None


def folders_of(run_dir: str | None, *, environment: Mapping[str, str]) -> list[CheckedFolder]:
    """The run's folder, if it is on this host, and the one for temporary files."""
    found = []
    path = local_path(run_dir) if run_dir else None
    if path:
        prune = f"python -m elastictrain.checkpoint prune {path}, or set run.dir to a folder with more room"
        found.append(CheckedFolder(path, "run.dir", prune))
    temporary = next((environment[name] for name in ("TMPDIR", "TEMP", "TMP") if environment.get(name)), None)
    moving = "export TMPDIR=FOLDER with a folder that has more room"
    return [*found, CheckedFolder(temporary or tempfile.gettempdir(), "temporary files", moving)]


def read_disks(surroundings: Surroundings, folders: Sequence[CheckedFolder]) -> list[DiskFacts]:
    """Asks the file systems."""
    mounts = read_mounts(surroundings)
    return [DiskFacts(folder, read_space(folder.path, mounts=mounts)) for folder in folders]


def judge_disks(facts: Sequence[DiskFacts], *, host: str) -> list[Verdict]:
    """One verdict for each folder: of what is scarcest there."""
    return [_judge(one.folder, one.space, Reporter("disk", host)) for one in facts]


def _judge(folder: CheckedFolder, space: Space | None, report: Reporter) -> Verdict:
    if space is None:
        return report.warned(
            f"nothing known of {folder.path}", remedy=f"look at it on {report.subject}: `stat -f {folder.path}`"
        )
    place = f"free for {folder.use} in {space.path}"
    bytes_remedy = f"on {report.subject}: `du -xhd1 {space.path} | sort -h` shows what is large; {folder.relief}"
    inodes_remedy = (
        f"on {report.subject}: `du --inodes -xd1 {space.path} | sort -n` shows where many files are; {folder.relief}"
    )
    free, inodes = in_gib(space.free_bytes), space.free_inodes
    if space.free_bytes < LEAST_BYTES:
        return report.failed(free, expected=in_gib(LOW_BYTES), unit=f"GiB {place}", remedy=bytes_remedy)
    if inodes is not None and inodes < LEAST_INODES:
        return report.failed(inodes, expected=LOW_INODES, unit=f"inodes {place}", remedy=inodes_remedy)
    if space.free_bytes < LOW_BYTES:
        return report.warned(free, expected=in_gib(LOW_BYTES), unit=f"GiB {place}", remedy=bytes_remedy)
    if inodes is not None and inodes < LOW_INODES:
        return report.warned(inodes, expected=LOW_INODES, unit=f"inodes {place}", remedy=inodes_remedy)
    return report.passed(free, expected=in_gib(LOW_BYTES), unit=f"GiB {place}")
