"""Which step is saved from memory when everybody is gone."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from elastictrain.checkpoint.keeper.desk import Station
from elastictrain.checkpoint.keeper.hosts import Hosts
from elastictrain.checkpoint.keeper.meeting import PENDING, steps_begun
from elastictrain.checkpoint.lineage import Lineage
from elastictrain.checkpoint.memory.inventory import Held
from elastictrain.checkpoint.target import list_checkpoints
from elastictrain.errors import TransientStorageError
from elastictrain.lease.starts import Starts
from elastictrain.storage.opening import check_writable
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

_PAUSE_S = 0.25
_STORAGE_PAUSE_S = 1.0
_AGAIN = 5
"""Times the limit for a first host that is at work, and has chosen a step that is not whole here."""


def whole_here(held: Sequence[Held], station: Station) -> list[tuple[Held, ...]]:
    """The steps that could be saved with what this host holds, newest first, each in the order of its ranks. Pure.

    A host that holds all ranks takes any incarnation: the last one may have ended before its first snapshot. One of several
    hosts takes only the steps of the last incarnation, of which it knows the ranks that are its own.
    """
    found: dict[tuple[int, str, int], dict[int, Held]] = {}
    for one in held:
        facts = one.facts
        found.setdefault((facts.step, facts.incarnation, facts.world_size), {})[facts.rank] = one
    whole = []
    for (_, incarnation, world_size), ranks in sorted(found.items(), reverse=True, key=lambda pair: pair[0]):
        ours = set(station.ranks) if incarnation == station.incarnation else set(range(world_size))
        if ranks.keys() >= ours:
            whole.append(tuple(ranks[rank] for rank in sorted(ours)))
    return whole


def last_station(held: Sequence[Held], *, run: str) -> Station | None:
    """Whose snapshots these are, as far as they tell themselves; None if there are none. Pure."""
    facts = [one.facts for one in held if not one.replica and one.facts.run == run]
    last = max(facts, key=lambda one: one.incarnation, default=None)
    if last is None:
        return None
    ranks = {one.rank for one in facts if one.incarnation == last.incarnation}
    return Station(last.incarnation, last.world_size, tuple(sorted(ranks)), heard=False)


@dataclass(frozen=True, slots=True)
class FlushLimits:
    """How long the first host is waited for, and storage that is away, in seconds."""

    leader_s: float
    storage_s: float


def choose_flush(
    store: Store,
    station: Station,
    held: Sequence[Held],
    *,
    done: Collection[int],
    limits: FlushLimits,
    needed_no_more: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Held, ...]:
    """The snapshots of the step to save; none if storage has all that are whole, or when it is `needed_no_more`.

    The leader takes its newest. The others wait for it to begin with a step that they have, and tell it of one that they have
    not, unless their part of it is `done`. Storage that is away is waited for, too: what is here is nowhere else.
    Raises: StorageError.
    """
    began_s = clock()
    while True:
        try:
            wanted = _wanted(store, station, held)
            break
        except TransientStorageError as error:
            if clock() - began_s > limits.storage_s or needed_no_more():
                raise
            logger.warning("what is in memory only waits for storage: %s", error)
        sleep(_STORAGE_PAUSE_S)
    if not wanted or needed_no_more():
        return ()
    if wanted[0][0].facts.rank == 0:
        return wanted[0]
    noted: set[int] = set()
    deadline_s = clock() + limits.leader_s
    while clock() < deadline_s and not needed_no_more():
        try:
            begun = set(steps_begun((info.key for info in store.list(PENDING)), incarnation=station.incarnation))
            if noted - begun:
                # That save is over. If it failed, the first host goes on with an older step.
                wanted = _wanted(store, station, held)
                noted &= begun
                deadline_s = clock() + limits.leader_s
        except TransientStorageError as error:
            logger.warning("whether the first host saves cannot be seen yet: %s", error)
            begun = noted
        if not wanted:
            return ()
        common = [one for one in wanted if one[0].facts.step in begun]
        if common:
            return common[0]
        for step in sorted(begun - noted):
            noted.add(step)
            deadline_s = clock() + _AGAIN * limits.leader_s
            if step not in done and step > wanted[-1][0].facts.step:
                # Torn here by what ended everything. The first host writes its own files before it hears this.
                first_rank = min(station.ranks)
                Hosts(store, station.incarnation, step, first_rank=first_rank).refuse("it has no whole snapshot of this step")
        sleep(_PAUSE_S)
    return () if needed_no_more() else _without_leader(store)


def _without_leader(store: Store) -> tuple[Held, ...]:
    """The first host has not begun: it may be gone, or storage refuses its writes as it refuses ours. Raises: StorageError."""
    check_writable(store)
    return ()


def _wanted(store: Store, station: Station, held: Sequence[Held]) -> list[tuple[Held, ...]]:
    """What storage does not have yet, newest first. Raises: StorageError."""
    folders = [folder for folder in list_checkpoints(store).folders if folder.has_manifest and not folder.quarantined]
    _, off_line = Lineage(store).line_first(folders)
    newest = max((folder.step for folder in folders if folder.name not in off_line), default=-1)
    whole = whole_here(held, station)
    # What a deleted run of the same name left in memory has left no trace here.
    known = {
        *Starts(store).known(one[0].facts.incarnation for one in whole),
        *((station.incarnation,) if station.heard else ()),
    }
    return [one for one in whole if one[0].facts.step > newest and one[0].facts.incarnation in known]
