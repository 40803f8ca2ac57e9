"""Meets the keepers of the other hosts for one save, through the store. What they say is defined in `meeting`."""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from elastictrain.checkpoint.keeper.meeting import (
    PENDING,
    RankPart,
    begin_key,
    decode_parts,
    encode_parts,
    failed_key,
    host_key,
    late_error,
    missing_ranks,
    pending_folder,
)
from elastictrain.errors import CheckpointError, ObjectNotFoundError, StorageError
from elastictrain.storage.store import Store

T = TypeVar("T")

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
HURRY_S = 10.0
"""How long other hosts are waited for once the group that took the snapshots is gone."""


class Hosts:
    """One save, as this host takes part in it."""

    def __init__(
        self, store: Store, incarnation: str, step: int, *, first_rank: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._incarnation = incarnation
        self._step = step
        self._first_rank = first_rank
        self._clock = clock

    def begin(self, folder: str) -> None:
        """As the leader: tell where files go. Raises: StorageError."""
        # What was said of a failed attempt at the same step says nothing about this one.
        for info in list(self._store.list(pending_folder(self._incarnation, self._step))):
            self._store.delete(info.key)
        self._store.write(begin_key(self._incarnation, self._step), json.dumps({"folder": folder}).encode())

    def wait_for_begin(self, *, limit_s: float, hurry: threading.Event) -> str:
        """The folder that the leader chose. Raises: CheckpointError if it says nothing; StorageError."""
        key = begin_key(self._incarnation, self._step)

        def look() -> str | None:
            try:
                folder = json.loads(self._store.read(key))["folder"]
            except ObjectNotFoundError:
                return None
            except (ValueError, TypeError, KeyError) as error:
                raise CheckpointError(f"{self._store.url}/{key} is garbled: {error}") from error
            return str(folder)

        found = self._poll(look, limit_s=limit_s, hurry=hurry)
        if found is None:
            raise CheckpointError(f"the host of rank 0 did not begin to save step {self._step} within {limit_s:.0f} s")
        return found

    def say_written(self, parts: Sequence[RankPart]) -> None:
        """This host's files are durable. Raises: StorageError."""
        self._store.write(host_key(self._incarnation, self._step, first_rank=self._first_rank), encode_parts(parts))

    def say_failed(self, reason: str) -> None:
        """This host cannot write its files; said if the store lets it."""
        key = failed_key(self._incarnation, self._step, first_rank=self._first_rank)
        try:
            self._store.write(key, json.dumps({"reason": reason}).encode())
        except StorageError as error:
            logger.warning("the other hosts could not be told of it: %s", error)

    def wait_for_parts(
        self, world_size: int, *, own: Sequence[RankPart], limit_s: float, hurry: threading.Event
    ) -> list[RankPart]:
        """As the leader: what the other hosts wrote. Raises: CheckpointError naming who failed or is missing; StorageError."""
        others: list[RankPart] = []
        read: set[str] = set()

        def look() -> bool | None:
            if not missing_ranks((*own, *others), world_size=world_size):
                return True
            for info in list(self._store.list(pending_folder(self._incarnation, self._step))):
                name = info.key.rpartition("/")[2]
                if info.key in read:
                    continue
                if name.startswith("failed-"):
                    raise CheckpointError(f"the host of rank {name[7:12]} could not save: {self._told(info.key)}")
                if name.startswith("host-"):
                    read.add(info.key)
                    others.extend(decode_parts(self._store.read(info.key), where=f"{self._store.url}/{info.key}"))
            return True if not missing_ranks((*own, *others), world_size=world_size) else None

        if self._poll(look, limit_s=limit_s, hurry=hurry) is None:
            raise late_error(missing_ranks((*own, *others), world_size=world_size), waited_s=limit_s)
        return others

    def clear(self) -> None:
        """As the leader: remove what was said about this save, and what older saves left; never raises."""
        try:
            for info in list(self._store.list(PENDING)):
                folder = info.key.removeprefix(f"{PENDING}/").partition("/")[0]
                # Incarnations are numbered: names below ours are of the past.
                if folder <= f"{self._incarnation}-{self._step:09d}":
                    self._store.delete(info.key)
        except StorageError as error:
            logger.warning("what hosts said to each other could not be deleted yet: %s", error)

    def _told(self, key: str) -> str:
        try:
            return str(json.loads(self._store.read(key))["reason"])
        except (StorageError, ValueError, TypeError, KeyError) as error:
            return f"no reason can be read ({error})"

    def _poll(self, look: Callable[[], T | None], *, limit_s: float, hurry: threading.Event) -> T | None:
        began, pause_s = self._clock(), _FIRST_PAUSE_S
        while True:
            found = look()
            if found is not None:
                return found
            limit_now_s = min(limit_s, HURRY_S) if hurry.is_set() else limit_s
            if self._clock() - began > limit_now_s:
                return None
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)
