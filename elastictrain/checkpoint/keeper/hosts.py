"""Meets the keepers of the other hosts for one save, through the store. What they say is defined in `meeting`."""

import json
import logging
import secrets
import time
from collections.abc import Callable, Container, Sequence
from typing import TypeVar

from elastictrain.bounded_json import parse_json
from elastictrain.checkpoint.keeper.meeting import (
    PENDING,
    Begun,
    RankPart,
    begin_key,
    begun_from_bytes,
    decode_parts,
    encode_parts,
    failed_key,
    host_key,
    late_error,
    missing_ranks,
    pending_folder,
    said_by,
    steps_begun,
)
from elastictrain.checkpoint.keeper.patience import Patience
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.errors import CheckpointError, InvalidCheckpointError, ObjectNotFoundError, StorageError
from elastictrain.storage.bounded_read import DOCUMENT_BYTES, read_bounded
from elastictrain.storage.store import Store

T = TypeVar("T")

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class Hosts:
    """One save, as this host takes part in it."""

    def __init__(
        self,
        store: Store,
        incarnation: str,
        step: int,
        *,
        first_rank: int,
        clock: Callable[[], float] = time.monotonic,
        signing: SigningKey | None = None,
    ) -> None:
        """With a key, what a host says of its files is signed, and nothing else is believed."""
        self._signing = signing
        self._store = store
        self._incarnation = incarnation
        self._step = step
        self._first_rank = first_rank
        self._attempt = ""
        self._clock = clock

    def begin(self, choose: Callable[[], str], *, over: Container[str] = ()) -> str:
        """As the leader: tell where files go; the folder that `choose` returns, unless this save has begun already.

        Attempts that are `over` could not be cleared when they failed. Raises: StorageError, and what `choose` raises.
        """
        try:
            begun = self._begun()
        except InvalidCheckpointError as error:
            logger.warning("%s", error)
            begun = None
        if begun is None or begun.attempt in over:
            begun = Begun(choose(), secrets.token_hex(4))
            self._store.write(begin_key(self._incarnation, self._step), begun.to_bytes())
        self._attempt = begun.attempt
        return begun.folder

    def wait_for_begin(
        self, patience: Patience, *, over: Container[str] = (), meanwhile: Callable[[], None] = lambda: None
    ) -> str:
        """The folder that the leader chose, in an attempt that is not `over` for this host. `meanwhile` is called at each look.

        Raises: CheckpointError if it says nothing; StorageError.
        """

        def look() -> str | None:
            meanwhile()
            return self.find_begin(over=over)

        folder, waited_s = self._poll(look, patience)
        if folder is None:
            raise CheckpointError(f"the host of rank 0 did not begin to save step {self._step} within {waited_s:.0f} s")
        return folder

    def find_begin(self, *, over: Container[str] = ()) -> str | None:
        """The folder that the leader chose, in an attempt that is not `over` for this host; None if it may still begin.

        Raises: CheckpointError if it will not begin any more; StorageError.
        """

        def another() -> Begun | None:
            begun = self._begun()
            return begun if begun is not None and begun.attempt not in over else None

        begun = another()
        if begun is None and self._is_past() and (begun := another()) is None:
            raise CheckpointError(f"the host of rank 0 is past step {self._step}")
        if begun is None:
            return None
        self._attempt = begun.attempt
        return begun.folder

    def say_written(self, parts: Sequence[RankPart]) -> None:
        """This host's files are durable. Raises: StorageError."""
        key = host_key(self._incarnation, self._step, self._attempt, first_rank=self._first_rank)
        self._store.write(key, encode_parts(parts, key=key, signing=self._signing))

    def say_failed(self, reason: str) -> None:
        """This host cannot write its files; said if the store lets it."""
        key = failed_key(self._incarnation, self._step, self._attempt, first_rank=self._first_rank)
        try:
            self._store.write(key, json.dumps({"reason": reason}).encode())
        except StorageError as error:
            logger.warning("the other hosts could not be told of it: %s", error)

    @property
    def attempt(self) -> str:
        """Names the attempt that was begun; empty before that."""
        return self._attempt

    def refuse(self, reason: str, *, over: Container[str] = ()) -> None:
        """This host has no part in a step that was begun; never raises. What was said in an attempt that is `over` stands."""
        try:
            begun = None if self._attempt else self._begun()
        except (StorageError, InvalidCheckpointError) as error:
            logger.warning("the first host waits in vain for step %d: %s", self._step, error)
            return
        if begun is not None and begun.attempt not in over:
            self._attempt = begun.attempt
        if self._attempt:
            self.say_failed(reason)

    def wait_for_parts(self, world_size: int, *, own: Sequence[RankPart], patience: Patience, wrote_s: float) -> list[RankPart]:
        """As the leader, who took `wrote_s` for its own files: what the other hosts wrote.

        Raises: CheckpointError naming who failed or is missing; StorageError.
        """
        others: list[RankPart] = []
        read: set[str] = set()

        def look() -> bool | None:
            if not missing_ranks((*own, *others), world_size=world_size):
                return True
            for info in list(self._store.list(pending_folder(self._incarnation, self._step))):
                said = said_by(info.key, attempt=self._attempt)
                if said is None or info.key in read:
                    continue
                what, first_rank = said
                if what == "failed":
                    raise CheckpointError(f"the host of rank {first_rank} could not save: {self._told(info.key)}")
                read.add(info.key)
                raw, where = read_bounded(self._store, info.key, most_bytes=DOCUMENT_BYTES), f"{self._store.url}/{info.key}"
                others.extend(decode_parts(raw, where=where, key=info.key, signing=self._signing))
            return True if not missing_ranks((*own, *others), world_size=world_size) else None

        complete, waited_s = self._poll(look, patience, alike_s=wrote_s)
        if complete is None:
            raise late_error(missing_ranks((*own, *others), world_size=world_size), waited_s=waited_s)
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

    def _is_past(self) -> bool:
        """The first host saves one step after the other: it will not begin one that is older than what it has begun."""
        begun = steps_begun((info.key for info in self._store.list(PENDING)), incarnation=self._incarnation)
        return any(step > self._step for step in begun)

    def _begun(self) -> Begun | None:
        key = begin_key(self._incarnation, self._step)
        try:
            return begun_from_bytes(read_bounded(self._store, key), where=f"{self._store.url}/{key}")
        except ObjectNotFoundError:
            return None

    def _told(self, key: str) -> str:
        try:
            return str(parse_json(read_bounded(self._store, key))["reason"])
        except (StorageError, ValueError, TypeError, KeyError) as error:
            return f"no reason can be read ({error})"

    def _poll(self, look: Callable[[], T | None], patience: Patience, *, alike_s: float = 0.0) -> tuple[T | None, float]:
        """What was found, if anything, and how long it was waited for."""
        began_s, pause_s = self._clock(), _FIRST_PAUSE_S
        while True:
            found = look()
            if found is not None or patience.left_s(began_s, alike_s=alike_s) <= 0:
                return found, self._clock() - began_s
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)
