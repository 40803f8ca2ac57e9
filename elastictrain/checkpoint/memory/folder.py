"""The folder of a run in host memory: its access rights, its snapshots, and which of them form a complete checkpoint."""

import logging
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import xxhash

from elastictrain.checkpoint.memory.slot import SnapshotFacts, facts_in
from elastictrain.errors import ConfigError, Problem
from elastictrain.storage.failures import reason_of
from elastictrain.storage.private import NameTakenError, make_private_folders, why_not_private

logger = logging.getLogger(__name__)

_SLOT = re.compile(r"(own|replica)-r(\d{5,})-s(\d)")


@dataclass(frozen=True, slots=True)
class SlotName:
    """Name of a slot file; the kind is `own` for a rank of this host, `replica` for one of another host."""

    kind: str
    rank: int
    index: int

    def __str__(self) -> str:
        return f"{self.kind}-r{self.rank:05d}-s{self.index}"


def run_name(run_url: str) -> str:
    """A digest of the URL, equal for all paths to the same folder on one host."""
    url = run_url if "://" in run_url else os.path.realpath(os.path.expanduser(run_url))  # noqa: PTH111
    return xxhash.xxh3_64_hexdigest(url.rstrip("/").encode())


def run_folder(memory_dir: str, run_url: str) -> str:
    return f"{memory_dir.rstrip('/')}/elastictrain-{os.getuid()}/{run_name(run_url)}"


def make_private(folder: str) -> None:
    """Raises: ConfigError if the folder or its parent cannot be made, or is another user's, who could put snapshots there."""
    try:
        make_private_folders(folder)
    except OSError as error:
        message = f"{error.filename or folder} cannot be made: {error.strerror}"
        if isinstance(error, NameTakenError):
            message = f"cannot be used: {reason_of(error)}; or set another folder"
        raise ConfigError([Problem("checkpoint.memory_dir", message)]) from error


def is_private(folder: str) -> bool:
    """Whether only this user can write to a run's folder, or it does not exist; logs why not."""
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
    """One rank's complete snapshot in one slot of one host."""

    host: int  # the host's first rank
    slot: str
    facts: SnapshotFacts

    @property
    def replica(self) -> bool:
        return self.slot.startswith("replica")


@dataclass(frozen=True, slots=True)
class SnapshotSet:
    """A step with a snapshot of every rank; `sources[rank]` lists where it is held, own slots before replicas."""

    incarnation: str
    step: int
    world_size: int
    sources: tuple[tuple[Held, ...], ...]
    in_lineage: bool = True  # on the lineage of the run, as far as known

    @property
    def on_two_hosts(self) -> bool:
        """Whether it stays complete, whichever host is lost."""
        return all(len({one.host for one in sources}) > 1 for sources in self.sources)


def whole_sets(held: Iterable[Held], *, run: str, off_lineage: Collection[tuple[str, int]] = ()) -> tuple[SnapshotSet, ...]:
    """The complete steps in memory, newest first, those `off_lineage` (incarnation, step) last. Pure."""
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
            sets.append(SnapshotSet(incarnation, step, world_size, sources, in_lineage=(incarnation, step) not in off_lineage))
    return tuple(sorted(sets, key=lambda one: not one.in_lineage))


def sets_to_keep(whole: Sequence[SnapshotSet]) -> tuple[SnapshotSet, ...]:
    """Of `whole_sets`: the one to restore, and the newest that the loss of any one host leaves complete. Both stay until
    replicas of a newer step have arrived. Pure."""
    if not whole:
        return ()
    best, *others = whole
    safe = (one for one in others if one.on_two_hosts and one.in_lineage and one.step < best.step)
    return (best,) if best.on_two_hosts else (best, *islice(safe, 1))


def slot_names(folder: str) -> list[SlotName]:
    """The slots in a run's folder in host memory; none if it does not exist."""
    names = []
    with suppress(FileNotFoundError):
        names = sorted(os.listdir(folder))  # noqa: PTH208
    matches = filter(None, map(_SLOT.fullmatch, names))
    return [SlotName(match[1], int(match[2]), int(match[3])) for match in matches]


def look(folder: str, *, host: int) -> list[Held]:
    """The complete snapshots in a run's folder in host memory."""
    found = ((name, facts_in(f"{folder}/{name}")) for name in slot_names(folder))
    return [Held(host, str(name), facts) for name, facts in found if facts is not None and facts.rank == name.rank]


def remove_slot(folder: str, name: SlotName) -> None:
    """Delete a slot and its digests; its memory is freed once no process maps it."""
    for path in (f"{folder}/{name}", f"{folder}/{name}.digests"):
        with suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108
