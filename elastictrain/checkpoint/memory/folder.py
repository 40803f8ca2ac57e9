"""The folder of a run in host memory: who may enter it, which snapshots it holds, and which of them make a whole checkpoint."""

import logging
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

import xxhash

from elastictrain.checkpoint.manifest import Manifest
from elastictrain.checkpoint.memory.slot import SnapshotFacts, facts_in
from elastictrain.errors import ConfigError, Problem
from elastictrain.storage.failures import reason_of
from elastictrain.storage.private import NameTakenError, make_private_folders, why_not_private

logger = logging.getLogger(__name__)

_SLOT = re.compile(r"(own|replica)-r(\d{5,})-s(\d)")


@dataclass(frozen=True, slots=True)
class SlotName:
    """Name of a slot file: of this host's rank, or a replica of another's."""

    kind: str
    rank: int
    index: int

    def __str__(self) -> str:
        return f"{self.kind}-r{self.rank:05d}-s{self.index}"


def parse_slot_name(name: str) -> SlotName | None:
    """The inverse of `str`; None for files of another kind."""
    match = _SLOT.fullmatch(name)
    return SlotName(match[1], int(match[2]), int(match[3])) if match else None


def run_name(run_url: str) -> str:
    """The same for all who mean the same folder on one host."""
    url = run_url if "://" in run_url else os.path.realpath(os.path.expanduser(run_url))  # noqa: PTH111
    return xxhash.xxh3_64_hexdigest(url.rstrip("/").encode())


def run_folder(memory_dir: str, run_url: str) -> str:
    """The folder of the run in host memory; those of all runs of this user lie beside it."""
    return f"{memory_dir.rstrip('/')}/elastictrain-{os.getuid()}/{run_name(run_url)}"


def make_private(folder: str) -> None:
    """Makes a folder and its parent, for this user alone.

    Raises: ConfigError if either belongs to somebody else, who could then put snapshots there, or cannot be made.
    """
    try:
        make_private_folders(folder)
    except NameTakenError as error:
        message = f"cannot be used: {reason_of(error)}; or set another folder"
        raise ConfigError([Problem("checkpoint.memory_dir", message)]) from error
    except OSError as error:
        raise ConfigError(
            [Problem("checkpoint.memory_dir", f"{error.filename or folder} cannot be made: {error.strerror}")]
        ) from error


def is_private(folder: str) -> bool:
    """Whether what is in a run's folder can only be this user's; also if the folder is not there. One that is not is logged."""
    for path in (os.path.dirname(folder), folder):  # noqa: PTH120
        try:
            found = os.lstat(path)
        except OSError:
            return True
        if why := why_not_private(path, found, folder=True, own_uid=os.getuid()):
            logger.warning("snapshots in host memory are passed over: %s", why)
            return False
    return True


@dataclass(frozen=True, slots=True)
class Held:
    """One rank's whole snapshot in one slot of one host."""

    host: int
    """Number of the host in the group that asks."""

    slot: str
    facts: SnapshotFacts

    @property
    def replica(self) -> bool:
        """Whether it is of a rank of another host."""
        return self.slot.startswith("replica")


@dataclass(frozen=True, slots=True)
class SnapshotSet:
    """A step of which every rank's snapshot is held somewhere; `sources[rank]` are its holders, own ones first."""

    incarnation: str
    step: int
    world_size: int
    sources: tuple[tuple[Held, ...], ...]
    on_line: bool = True
    """Whether the run went on with it, as far as is known."""

    def manifest_facts(self) -> Manifest:
        """What a manifest of the set says besides its files and tensors, as rank 0 saw it."""
        facts = self.sources[0][0].facts
        return Manifest(self.step, self.world_size, self.incarnation, facts.created, facts.config_digest, {}, facts.state)


def whole_sets(held: Iterable[Held], *, run: str, off_line: Collection[tuple[str, int]] = ()) -> tuple[SnapshotSet, ...]:
    """The complete steps in memory, newest first, `off_line` (incarnation and step) behind all others. Pure."""
    found: dict[tuple[int, str, int], dict[int, list[Held]]] = defaultdict(lambda: defaultdict(list))
    for one in held:
        facts = one.facts
        if facts.run == run:
            found[(facts.step, facts.incarnation, facts.world_size)][facts.rank].append(one)
    sets = []
    for (step, incarnation, world_size), ranks in sorted(found.items(), reverse=True):
        if ranks.keys() == set(range(world_size)):
            sources = tuple(
                tuple(sorted(ranks[rank], key=lambda one: (one.replica, one.host, one.slot))) for rank in range(world_size)
            )
            sets.append(SnapshotSet(incarnation, step, world_size, sources, on_line=(incarnation, step) not in off_line))
    return tuple(sorted(sets, key=lambda one: not one.on_line))


def slot_names(folder: str) -> list[SlotName]:
    """The slots in a run's folder in host memory; none if it is not there."""
    names = []
    with suppress(FileNotFoundError):
        names = sorted(os.listdir(folder))  # noqa: PTH208
    return [slot for name in names if (slot := parse_slot_name(name)) is not None]


def look(folder: str, *, host: int) -> list[Held]:
    """The whole snapshots in a run's folder in host memory."""
    found = ((name, facts_in(f"{folder}/{name}")) for name in slot_names(folder))
    return [Held(host, str(name), facts) for name, facts in found if facts is not None and facts.rank == name.rank]


def remove_slot(folder: str, name: SlotName) -> None:
    """Delete a slot and what lies beside it; who has it mapped keeps its memory until then."""
    for path in (f"{folder}/{name}", f"{folder}/{name}.digests"):
        with suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108
