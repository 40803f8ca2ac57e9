"""The registry and the generations, in the run's storage."""

import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from elastictrain.bounded_json import encode_record
from elastictrain.errors import EXIT_STOPPED, ObjectExistsError, ObjectNotFoundError, PermanentStorageError
from elastictrain.identity import NOTHING_POISONED, PoisonedSteps
from elastictrain.launch.membership.records import DRAFT, Generation, GenerationOutcome, HostRecord, HostState, decode
from elastictrain.lease.chain import HOSTS, create_record, generation_key, newest_record, parse_claim, write_newest_hint
from elastictrain.storage.bounded_read import read_all, read_record, run_concurrently
from elastictrain.storage.opening import create_secret, read_secret
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

ROOT = "launch"
_TOKEN = f"{ROOT}/token"
_TOKEN_BYTES = 32
_MOST_TOKEN_BYTES = 4096
_READ_AT_ONCE = 64


class MembershipStore:
    """The hosts' shared state in the run's storage. Every method raises StorageError."""

    def __init__(self, store: Store, *, volatile: Store | None = None) -> None:
        """`volatile` writes the same objects without a sync: a power loss may lose them."""
        self._store = store
        self._volatile = volatile or store
        self._unsettled: list[tuple[str, bytes]] = []
        self._newest: Generation | None = None
        self._listed = False
        self._created = 0  # last generation that this host created, and that the hint for readers does not name yet
        self._known_keys: frozenset[str] = frozenset()

    def token(self) -> bytes:
        """Return the run's secret, known to all that can read its storage; the first caller creates it.
        Raises: PermanentStorageError, AccessDeniedError if the stored object can be no secret of this run."""
        with suppress(ObjectExistsError):
            create_secret(self._store, _TOKEN, secrets.token_bytes(_TOKEN_BYTES))
        token = read_secret(self._store, _TOKEN, max_bytes=_MOST_TOKEN_BYTES)
        if len(token) < _TOKEN_BYTES:
            raise PermanentStorageError(
                f"{self._store.url}/{_TOKEN} must hold at least {_TOKEN_BYTES} bytes that nobody can guess, but holds "
                f"{len(token)}; delete it while no launcher of this run is running, and the next one makes a new one"
            )
        return token

    def write_record(self, record: HostRecord) -> None:
        self._volatile.write(_host_key(record.host), encode_record(record))

    def records(self) -> list[HostRecord]:
        """Those of all hosts, in the order of their keys. A damaged one, or one under the key of another host, is left out."""
        # Records that existed the last time are read while the others are listed.
        calls: list[Callable[[], dict[str, bytes] | list[str]]] = [
            lambda: [info.key for info in self._store.list(HOSTS)],
            *(partial(read_all, self._store, [key]) for key in sorted(self._known_keys)),
        ]
        listed, *read = run_concurrently(calls)
        found = {key: data for one in read if isinstance(one, dict) for key, data in one.items()}
        found |= read_all(self._store, [key for key in listed if key not in found])
        self._known_keys = frozenset(found)
        records = [(key, decode(HostRecord, data)) for key, data in sorted(found.items())]
        return [record for key, record in records if record is not None and key == _host_key(record.host)]

    def remove(self, host: str) -> None:
        self._store.delete(_host_key(host))

    def mark_dead(self, host: str) -> None:
        """Publish that a dead launcher has left, unless it did so itself."""
        try:
            record = decode(HostRecord, read_record(self._store, _host_key(host)))
        except ObjectNotFoundError:
            return
        if record is not None and record.state is not HostState.GONE:
            self.write_record(replace(record, state=HostState.GONE, reason="its launcher was ended", beat=record.beat + 1))

    def newest(self) -> Generation | None:
        """Return the generation with the largest number; None if there is none."""
        if not self._listed:
            number, data = newest_record(self._store)
            self._newest, self._listed = self._parse(number, data) if number else None, True
            return self._newest
        # A list may lag behind, a read of a name does not. Two reads at a time: one round trip also shows that none follows.
        while True:
            first = self._newest.number + 1 if self._newest else 1
            found = read_all(self._store, [generation_key(number) for number in (first, first + 1)])
            for number in (first, first + 1):
                if generation_key(number) not in found:
                    return self._newest
                self._advance(self._parse(number, found[generation_key(number)]))

    def follows_another(self, number: int) -> bool:
        """Whether generation `number` continues a launch: the one before it was not its last."""
        with suppress(ObjectNotFoundError):
            return number > 1 and not self._parse(number - 1, read_record(self._store, generation_key(number - 1))).terminal
        return False

    def create(self, generation: Generation) -> bool:
        """Create the generation; False if another host was first."""
        data = encode_record(generation)
        if not create_record(self._volatile, generation.number, data):
            return False
        self._advance(generation)
        self._created = generation.number
        if self._volatile is not self._store:
            self._unsettled.append((generation_key(generation.number), data))
        return True

    def settle(self) -> None:
        """Make the generations that this host created durable against power loss: commits carry their numbers.
        Apart from their creation, for which all hosts wait each time."""
        while self._unsettled:
            self._store.write(*self._unsettled[0])
            self._unsettled.pop(0)
        if self._created:
            write_newest_hint(self._volatile, self._created)
            self._created = 0

    def _advance(self, generation: Generation) -> None:
        # One thread creates generations while another one reads them.
        if self._newest is None or self._newest.number < generation.number:
            self._newest = generation

    def _parse(self, number: int, data: bytes) -> Generation:
        generation = decode(Generation, data)
        if generation is None and (claim := parse_claim(number, data)).owner:
            reason = f"another run trains here: {claim}"
            taken = replace(DRAFT, number=number, reason=reason, outcome=GenerationOutcome.ELSEWHERE, exit_code=EXIT_STOPPED)
            return replace(taken, owner=claim.owner, poisoned=self._poisoned_before(number))
        if generation is None or generation.number != number:
            logger.warning("%s/%s is damaged: it counts as a generation without hosts", self._store.url, generation_key(number))
            return replace(DRAFT, number=number, reason="its record is damaged", poisoned=self._poisoned_before(number))
        return generation

    def _poisoned_before(self, number: int) -> PoisonedSteps:
        """What the newest record of a launcher before `number` names: other runs know of no poisoned steps."""
        if self._newest is not None and self._newest.number == number - 1:
            return self._newest.poisoned
        while number > 1:
            numbers = range(number - 1, max(0, number - 1 - _READ_AT_ONCE), -1)
            found = read_all(self._store, map(generation_key, numbers))
            records = (decode(Generation, found.get(generation_key(one), b"")) for one in numbers)
            if (newest := next((record for record in records if record is not None), None)) is not None:
                return newest.poisoned
            number = numbers[-1]
        return NOTHING_POISONED


def _host_key(host: str) -> str:
    return f"{HOSTS}/{host}.json"
