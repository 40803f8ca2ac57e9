"""The savers of several hosts agree on one save (prepare, acknowledge, commit) through small objects in the run's store,
without the training group.

the leader      (the saver of the host of rank 0) chooses the folder, names the attempt and writes `begin`
every saver    writes its ranks' files into that folder, and then `host-RANK-ATTEMPT` with their part of the manifest
the leader      commits when every rank is covered, and deletes these objects; also when the attempt has failed
a saver that cannot write its files writes `failed-RANK-ATTEMPT` if it can, so that the leader need not wait for it

A restarted leader resumes the attempt that it finds begun: other savers may have written, and do not write twice. Late
objects of a failed attempt carry its name, and do not count in the next one.
"""

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from elastictrain.bounded_json import DOCUMENT, MalformedJsonError, encode_record, parse_record
from elastictrain.checkpoint.folders import ROOT
from elastictrain.checkpoint.manifest_parts import WrittenPart
from elastictrain.checkpoint.memory.layout import RankDigests, RankPart, layout_from_bytes
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.checkpoint.writer import Written
from elastictrain.errors import CheckpointError, ElasticTrainError, InvalidCheckpointError, ObjectNotFoundError, StorageError
from elastictrain.storage.bounded_read import DOCUMENT_BYTES, read_bounded
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

PENDING = f"{ROOT}/pending"

_ANSWER = re.compile(r"(host|failed)-(\d+)-(\w+)\.json")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_BEGINS_WITHIN_S = 30.0  # all hosts are told of a step at once: a leader that saves nothing else has failed at it by then
SHORTENED_S = 10.0  # limit for other hosts once the training group has ended: some of these hosts may have ended, too

T = TypeVar("T")


def steps_begun(keys: Iterable[str], *, incarnation: str) -> list[int]:
    """Steps of an incarnation that have a `begin`, oldest first."""
    steps = []
    for key in keys:
        folder, _, name = key.removeprefix(f"{PENDING}/").partition("/")
        number = folder.removeprefix(f"{incarnation}-")
        if name == "begin.json" and folder != number and number.isdecimal():
            steps.append(int(number))
    return sorted(steps)


@dataclass(frozen=True, slots=True)
class CommitAttempt:
    """Content of `begin`: what the leader has chosen."""

    folder: str
    attempt: str


@dataclass(frozen=True, slots=True)
class _PartsRecord:
    """Content of `host`: each layout once, by digest; number, layout digest and digests of each rank; written parts."""

    layouts: dict[str, str]
    ranks: list[tuple[int, str, RankDigests]]
    parts: list[WrittenPart]


def encode_parts(written: Sequence[Written], *, key: str = "", signing: SigningKey | None = None) -> bytes:
    """Content of `host-RANK`; signed for its `key` in the store if a signing key is given."""
    by_rank = [part for part in written if isinstance(part, RankPart)]
    layouts = {part.layout.digest: part.layout.to_bytes().decode() for part in by_rank}
    ranks = [[part.rank, part.layout.digest, part.digests] for part in by_rank]
    text = encode_record(
        {"layouts": layouts, "ranks": ranks, "parts": [one for one in written if isinstance(one, WrittenPart)]}
    )
    return text if signing is None else signing.sign(text, purpose=f"elastictrain {key}").encode() + b"\n" + text


def decode_parts(data: bytes, *, where: str, key: str = "", signing: SigningKey | None = None) -> list[Written]:
    """Decode a `host` object. Raises: InvalidCheckpointError naming `where`."""
    if signing is not None:
        signature, _, data = data.partition(b"\n")
        if not signing.is_signed(data, signature.decode("latin-1"), purpose=f"elastictrain {key}"):
            raise InvalidCheckpointError(f"{where}: must be signed with the key in {signing.name}, but is not")
    try:
        record = parse_record(data, _PartsRecord, limits=DOCUMENT)
        layouts = {name: layout_from_bytes(text.encode(), where=where) for name, text in record.layouts.items()}
        return [*(RankPart(rank, layouts[name], digests) for rank, name, digests in record.ranks), *record.parts]
    except (MalformedJsonError, KeyError) as error:
        raise InvalidCheckpointError(f"{where}: is garbled ({type(error).__name__}: {error})") from error


def missing_ranks(written: Iterable[Written], *, world_size: int) -> list[int]:
    covered = {rank for part in written for rank in part.ranks}
    return [rank for rank in range(world_size) if rank not in covered]


class Deadline:
    """Ends `limit_s` after a wait has begun; sooner once training has ended. Any thread may shorten it."""

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._lock = threading.Lock()
        self._shortened_s: float | None = None

    def shorten(self) -> None:
        """Shorten it, because the training group has ended; only the first call counts."""
        with self._lock:
            if self._shortened_s is None:
                self._shortened_s = self._clock()

    def left_s(self, since_s: float, *, alike_s: float = 0.0) -> float:
        """Seconds left of a wait that began at `since_s` of the clock; 0 or less: it is over.
        `alike_s`: how long this host took for the work that it waits for."""
        now_s = self._clock()
        left_s = since_s + self._limit_s - now_s
        if self._shortened_s is None:
            return left_s
        return min(left_s, max(since_s, self._shortened_s) + SHORTENED_S + alike_s - now_s)


class CommitProtocol:
    """One host's part in one save."""

    def __init__(
        self, store: Store, incarnation: str, step: int, *, first_rank: int, signing: SigningKey | None = None
    ) -> None:
        """With a signing key this host signs its part list, and accepts only signed ones."""
        self._signing = signing
        self._store = store
        self._incarnation = incarnation
        self._step = step
        self._first_rank = first_rank
        self._folder = f"{PENDING}/{incarnation}-{step:09d}"
        self.attempt = ""  # name of the attempt that was begun; empty before that
        self._leader_saves = False  # whether the leader was found to have begun with some step, if not with this one

    def prepare(self, choose: Callable[[], str], *, over: Container[str] = ()) -> str:
        """As the leader: write `begin`; returns the folder, from `choose` unless this save has begun already.
        Attempts that are `over` could not be cleared when they failed. Raises: StorageError, and the errors of `choose`."""
        try:
            begun = self._begun(over)
        except InvalidCheckpointError as error:
            logger.warning("%s", error)
            begun = None
        if begun is None:
            begun = CommitAttempt(choose(), secrets.token_hex(4))
            self._store.write(f"{self._folder}/begin.json", encode_record(begun))
        self.attempt = begun.attempt
        return begun.folder

    def wait_for_prepared(
        self, deadline: Deadline, *, over: Container[str] = (), meanwhile: Callable[[], None] = lambda: None
    ) -> str:
        """Wait for the folder that the leader chose, in an attempt that is not `over` here. `meanwhile` runs at each poll.
        Raises: CheckpointError if the leader chooses none, or begins with nothing for a while: what waits here keeps the memory
        that the next snapshots need; StorageError."""
        idle_since_s = time.monotonic()

        def look() -> str | None:
            """None: look again. Raises: CheckpointError if the leader saves nothing; as `find_prepared`."""
            nonlocal idle_since_s
            meanwhile()
            found, now_s = self.find_prepared(over=over), time.monotonic()
            if self._leader_saves:
                idle_since_s = now_s
            if found is None and now_s - idle_since_s > _BEGINS_WITHIN_S:
                raise CheckpointError(f"the host of rank 0 has not begun to save step {self._step}, and saves no other one")
            return found

        folder, waited_s = self._poll(look, deadline)
        if folder is None:
            raise CheckpointError(f"the host of rank 0 did not begin to save step {self._step} within {waited_s:.0f} s")
        return folder

    def find_prepared(self, *, over: Container[str] = ()) -> str | None:
        """Return the folder that the leader chose, in an attempt that is not `over` here; None if it may still begin.
        Raises: CheckpointError if it will not begin any more; StorageError."""
        begun = self._begun(over)
        if begun is None:
            # The leader saves one step after the other: it begins no step older than one that it has begun.
            steps = steps_begun((info.key for info in self._store.list(PENDING)), incarnation=self._incarnation)
            self._leader_saves = bool(steps)
            if all(step <= self._step for step in steps):
                return None
            # It may have begun just after the first read.
            begun = self._begun(over)
        if begun is None:
            raise CheckpointError(f"the host of rank 0 is past step {self._step}")
        self.attempt = begun.attempt
        return begun.folder

    def acknowledge(self, written: Sequence[Written]) -> None:
        """Report that this host's files are durable. Raises: StorageError."""
        key = f"{self._folder}/host-{self._first_rank:05d}-{self.attempt}.json"
        self._store.write(key, encode_parts(written, key=key, signing=self._signing))

    def report_failure(self, reason: str) -> None:
        """Report that this host cannot write its files; storage errors are only logged."""
        try:
            key = f"{self._folder}/failed-{self._first_rank:05d}-{self.attempt}.json"
            self._store.write(key, encode_record({"reason": reason}))
        except StorageError as error:
            logger.warning("cannot notify the other hosts: %s", error)

    def refuse(self, reason: str, *, over: Container[str] = ()) -> None:
        """Refuse a begun step; never raises. In an attempt that is `over` this host's earlier answer stands."""
        try:
            begun = None if self.attempt else self._begun(over)
        except (StorageError, InvalidCheckpointError) as error:
            logger.warning("the first host waits in vain for step %d: %s", self._step, error)
            return
        if begun is not None:
            self.attempt = begun.attempt
        if self.attempt:
            self.report_failure(reason)

    def wait_for_acknowledgements(
        self, world_size: int, *, own: Sequence[Written], deadline: Deadline, wrote_s: float
    ) -> list[Written]:
        """As the leader, who took `wrote_s` for its own files: return the parts of the other hosts.
        Raises: CheckpointError naming the hosts that failed or are missing; StorageError."""
        parts = list(own)
        read: set[str] = set()

        def look() -> bool | None:
            """None: look again. Raises: CheckpointError if a host could not save, or its object is damaged; StorageError."""
            if not missing_ranks(parts, world_size=world_size):
                return True
            for info in list(self._store.list(self._folder)):
                answer = _ANSWER.fullmatch(info.key.rpartition("/")[2])
                if answer is None or answer[3] != self.attempt or info.key in read:
                    continue
                if answer[1] == "failed":
                    raise CheckpointError(f"the host of rank {int(answer[2])} could not save: {self._reason(info.key)}")
                read.add(info.key)
                raw, where = read_bounded(self._store, info.key, max_bytes=DOCUMENT_BYTES), f"{self._store.url}/{info.key}"
                parts.extend(decode_parts(raw, where=where, key=info.key, signing=self._signing))
            return True if not missing_ranks(parts, world_size=world_size) else None

        complete, waited_s = self._poll(look, deadline, alike_s=wrote_s)
        if complete is None:
            missing = missing_ranks(parts, world_size=world_size)
            named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise CheckpointError(
                f"the hosts of ranks {named} did not say within {waited_s:.0f} s that their files are written"
            )
        return parts[len(own) :]

    def clear(self) -> None:
        """As the leader: delete the objects of this save and of older ones; never raises."""
        try:
            for info in list(self._store.list(PENDING)):
                folder = info.key.removeprefix(f"{PENDING}/").partition("/")[0]
                # Incarnations are numbered: smaller names are older.
                if f"{PENDING}/{folder}" <= self._folder:
                    self._store.delete(info.key)
        except StorageError as error:
            logger.warning("what hosts wrote to each other could not be deleted yet: %s", error)

    def _begun(self, over: Container[str]) -> CommitAttempt | None:
        key = f"{self._folder}/begin.json"
        try:
            begun = parse_record(read_bounded(self._store, key), CommitAttempt)
        except ObjectNotFoundError:
            return None
        except MalformedJsonError as error:
            raise InvalidCheckpointError(f"{self._store.url}/{key}: is garbled ({error})") from error
        return begun if begun.attempt not in over else None

    def _reason(self, key: str) -> str:
        try:
            return parse_record(read_bounded(self._store, key), dict[str, str])["reason"]
        except (StorageError, MalformedJsonError, KeyError) as error:
            return f"no reason can be read ({error})"

    def _poll(self, look: Callable[[], T | None], deadline: Deadline, *, alike_s: float = 0.0) -> tuple[T | None, float]:
        """Poll until a result or the deadline; returns the result, if any, and the seconds waited."""
        began_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while True:
            found = look()
            if found is not None or deadline.left_s(began_s, alike_s=alike_s) <= 0:
                return found, time.monotonic() - began_s
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)


@dataclass(frozen=True, slots=True, eq=False)
class RefusedSave:
    """A step that this host cannot take part in saving; reported to the leader once it has begun."""

    incarnation: str
    step: int
    first_rank: int
    reason: str
    deadline: Deadline

    def report(self, store: Store, *, over: set[str], since_s: float) -> bool:
        """Report it if the leader has begun an attempt that is not `over`; adds that attempt to `over`.
        Returns whether nothing is left to report: the leader has the report, or begins no more."""
        done = self.deadline.left_s(since_s) <= 0
        protocol = CommitProtocol(store, self.incarnation, self.step, first_rank=self.first_rank)
        try:
            if protocol.find_prepared(over=over) is not None:
                protocol.report_failure(self.reason)
                over.add(protocol.attempt)
                done = True
        except StorageError as error:
            logger.warning("cannot see yet whether step %d was begun: %s", self.step, error)
        except ElasticTrainError:
            done = True
        except Exception:
            # The edge of the thread: the next saves matter more than this report.
            logger.exception("the leader cannot be told of step %d", self.step)
            done = True
        return done
