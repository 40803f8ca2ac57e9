"""What must still hold when a run writes or deletes in storage: nobody has taken its place, and its folder is there."""

import os
from pathlib import Path

from elastictrain.checkpoint.lineage import Lineage, number_of
from elastictrain.checkpoint.stored_config import CONFIG_NAME
from elastictrain.errors import LeaseLostError, ObjectNotFoundError, PermanentStorageError, StorageError
from elastictrain.lease.chain import Chain
from elastictrain.lease.records import LeaseClaim
from elastictrain.storage.local import LocalStore
from elastictrain.storage.store import Store


class Fence:
    """Asked before each commit: one read of storage, as long as no newer generation exists.

    The number of an incarnation is that of its generation, so that every manifest carries it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._chain = Chain(store)
        self._known: dict[int, LeaseClaim] = {}

    def check(self, incarnation: str, *, step: int) -> None:
        """`incarnation` may commit `step`. Raises: LeaseLostError; StorageError."""
        own = newest = number_of(incarnation)
        if own < 1:
            return
        while self._find(newest + 1) is not None:
            newest += 1
        if newest == own:
            return
        mine = self._find(own)
        for number in range(own + 1, newest + 1):
            other = self._known[number]
            # One that is damaged tells nothing.
            if other.owner and (mine is None or mine.owner not in ("", other.owner)):
                raise LeaseLostError(f"step {step} of {incarnation} is not committed: {other} has taken over the run")
        if not Lineage(self._store).has(incarnation, step):
            raise LeaseLostError(f"step {step} of {incarnation} is not committed: generation {newest} went on without it")

    def _find(self, number: int) -> LeaseClaim | None:
        if number not in self._known and (found := self._chain.read(number)) is not None:
            self._known[number] = found
        return self._known.get(number)


class RunFolder:
    """Of one run; remembers the file system that it was on."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._path = Path(store.root) if isinstance(store, LocalStore) else None
        self._device = None if self._path is None else device_of(self._path)

    def is_there(self) -> bool:
        """False: it was deleted. Raises: PermanentStorageError if the file system that it was on is not mounted there."""
        if still_there(self._store):
            self._device = self._device_now()
            return True
        if self._device is not None and self._device_now() != self._device:
            raise PermanentStorageError(
                f"{self._store.url} is not there, and neither is the file system that it was on: mount that again"
            )
        return False

    def _device_now(self) -> int | None:
        """Of the file system that has the folder, or would have it. None where there is no such thing, or nobody knows."""
        if self._path is None:
            return None
        return next((found for one in (self._path, *self._path.parents) if (found := device_of(one)) is not None), None)


def device_of(path: Path) -> int | None:
    """Number of the file system that has a file or folder; None if that cannot be seen."""
    try:
        return os.stat(path).st_dev  # noqa: PTH116
    except OSError:
        return None


def still_there(store: Store) -> bool:
    """Whether anything of the run is in storage; true where storage does not say."""
    try:
        store.stat(CONFIG_NAME)
    except ObjectNotFoundError:
        pass
    except StorageError:
        # Nothing is known, and trying to save does no harm.
        return True
    else:
        return True
    try:
        return next(iter(store.list("events")), None) is not None
    except StorageError:
        return True
