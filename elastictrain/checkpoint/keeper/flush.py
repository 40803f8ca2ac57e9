"""Which step is saved from memory when everybody is gone."""

import time
from collections.abc import Callable, Sequence

from elastictrain.checkpoint.keeper.desk import Station
from elastictrain.checkpoint.keeper.meeting import PENDING, steps_begun
from elastictrain.checkpoint.memory.inventory import Held
from elastictrain.checkpoint.target import list_checkpoints
from elastictrain.errors import ObjectNotFoundError, StorageError
from elastictrain.storage.store import Store

_PAUSE_S = 0.25
_RUN_MARK = "config.yaml"


def still_there(store: Store) -> bool:
    """Whether the run's folder exists: who deleted it does not want a checkpoint in it."""
    try:
        store.stat(_RUN_MARK)
    except ObjectNotFoundError:
        return False
    except StorageError:
        # Nothing is known, and trying to save does no harm.
        return True
    return True


def whole_steps(held: Sequence[Held], station: Station) -> list[int]:
    """Steps of this incarnation that all ranks of this host have, newest first. Pure."""
    ranks: dict[int, set[int]] = {}
    for one in held:
        if one.facts.incarnation == station.incarnation and not one.replica:
            ranks.setdefault(one.facts.step, set()).add(one.facts.rank)
    return sorted((step for step, there in ranks.items() if there >= set(station.ranks)), reverse=True)


def choose_flush(
    store: Store,
    station: Station,
    steps: Sequence[int],
    *,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int | None:
    """The step to save, if there is one that storage does not have.

    The leader takes its newest. The others wait for it to begin with a step that they have. Raises: StorageError.
    """
    committed = [folder.step for folder in list_checkpoints(store).folders if folder.has_manifest and not folder.quarantined]
    wanted = [step for step in steps if step > max(committed, default=-1)]
    if not wanted:
        return None
    if station.leader:
        return wanted[0]
    deadline = clock() + limit_s
    while clock() < deadline:
        begun = steps_begun((info.key for info in store.list(PENDING)), incarnation=station.incarnation)
        common = [step for step in wanted if step in begun]
        if common:
            return common[0]
        sleep(_PAUSE_S)
    return None
