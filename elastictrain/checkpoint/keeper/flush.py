"""Which step is saved from memory when everybody is gone."""

import time
from collections.abc import Callable, Sequence

from elastictrain.checkpoint.keeper.desk import Station
from elastictrain.checkpoint.keeper.meeting import PENDING, steps_begun
from elastictrain.checkpoint.lineage import Lineage
from elastictrain.checkpoint.memory.inventory import Held
from elastictrain.checkpoint.target import list_checkpoints, list_incarnations
from elastictrain.errors import ObjectNotFoundError, StorageError
from elastictrain.storage.store import Store

_PAUSE_S = 0.25
_RUN_MARK = "config.yaml"


def still_there(store: Store) -> bool:
    """Whether the run's folder exists: who deleted it does not want a checkpoint in it."""
    try:
        store.stat(_RUN_MARK)
    except ObjectNotFoundError:
        return next(iter(store.list("events")), None) is not None
    except StorageError:
        # Nothing is known, and trying to save does no harm.
        return True
    return True


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


def choose_flush(
    store: Store,
    station: Station,
    held: Sequence[Held],
    *,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Held, ...]:
    """The snapshots of the step to save; none if storage has all that are whole.

    The leader takes its newest. The others wait for it to begin with a step that they have. Raises: StorageError.
    """
    folders = [folder for folder in list_checkpoints(store).folders if folder.has_manifest and not folder.quarantined]
    _, off_line = Lineage(store).line_first(folders)
    committed = [folder.step for folder in folders if folder.name not in off_line]
    # What a deleted run of the same name left in memory has no events here.
    known = {station.incarnation, *list_incarnations(store)}
    wanted = [
        one
        for one in whole_here(held, station)
        if one[0].facts.step > max(committed, default=-1) and one[0].facts.incarnation in known
    ]
    if not wanted:
        return ()
    if wanted[0][0].facts.rank == 0:
        return wanted[0]
    deadline = clock() + limit_s
    while clock() < deadline:
        begun = steps_begun((info.key for info in store.list(PENDING)), incarnation=station.incarnation)
        common = [one for one in wanted if one[0].facts.step in begun]
        if common:
            return common[0]
        sleep(_PAUSE_S)
    return ()
