"""Agreement on a fresh incarnation: the first thing that a group of ranks does.

torchrun's shared store outlives a restart and is handed to the next attempt as it is, so its keys name dead addresses. Nothing
in the environment tells attempts apart reliably either: each agent counts restarts on its own. So the ranks agree through the
store itself, in a way that a predecessor's leftovers cannot disturb:

    every rank      writes hello/RANK = a nonce of its own
    rank 0          reads all hellos, publishes proposal = (incarnation, all nonces); again whenever a hello changes,
                    or another rank 0, whose place it took, has written over it
    every rank      that finds its own nonce in the proposal writes ack/INCARNATION/RANK
    rank 0          when all have acknowledged, writes go/INCARNATION
    every rank      leaves when it sees go/INCARNATION of the proposal it acknowledged

A stale hello has a nonce that no living rank acknowledges; it is replaced as soon as its successor speaks.
"""

import base64
import json
import math
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypedDict

from elastictrain.errors import ConfigError, Problem, TransportError
from elastictrain.identity import Identity

_ROOT = "elastictrain"
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.1
_PIECE = 1000
_PATIENCE_S = 5.0
"""Ranks of one torchrun start within a few seconds of each other."""

_SHOWN_PROBLEMS = 8

_WAITING = f"{_ROOT}/waiting"
_LOOK_BEFORE_S = 1.0
_WAITS_ON_S = 10.0
"""How long a word of rank 0 that it still waits for the run's lease is good for."""


class SharedStore(Protocol):
    """What is needed of torch's c10d stores."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a rank tells of itself, so that all know what only each host can see."""

    host: str
    local_world_size: int
    backend: str
    digest: str
    """Of configuration and data: ranks that differ must not train together."""


@dataclass(frozen=True, slots=True)
class Hello:
    """One rank's word that it is there."""

    nonce: str
    introduction: Introduction


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One life of the group. `name` sorts in the order of lives within a run folder."""

    name: str
    ranks: tuple[Introduction, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host of each rank."""
        return tuple(rank.host for rank in self.ranks)

    @property
    def shared_local_size(self) -> int:
        """The largest number of ranks that divides every host evenly; the same on all ranks, however uneven the hosts are."""
        return math.gcd(*(rank.local_world_size for rank in self.ranks))


def check_alike(incarnation: Incarnation) -> None:
    """Raises: ConfigError that names the ranks which differ from rank 0 in backend, or in configuration or data."""
    first = incarnation.ranks[0]
    problems = []
    for number, other in enumerate(incarnation.ranks):
        name = f"rank {number} on {other.host}"
        if other.backend != first.backend:
            message = f"is {other.backend} for {name}, but {first.backend} for rank 0 on {first.host}; do all show their GPUs?"
            problems.append(Problem("parallel.backend", message))
        if other.digest != first.digest:
            message = f"differ between {name} and rank 0 on {first.host}; give all hosts the same command, data and version"
            problems.append(Problem("configuration or data", message))
    if problems:
        raise ConfigError(problems[:_SHOWN_PROBLEMS])


@dataclass(frozen=True, slots=True)
class KeepWaiting:
    """Rank 0 cannot go on yet: these ranks are missing, at this stage."""

    ranks: tuple[int, ...]
    stage: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Rank 0 must publish a new proposal with these nonces."""

    nonces: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Go:
    """All ranks have acknowledged."""


def coordinate(
    hellos: Mapping[int, str], *, world_size: int, proposed: tuple[str, ...] | None, acknowledged: frozenset[int]
) -> KeepWaiting | Publish | Go:
    """What rank 0 does next. `hellos` maps ranks to the nonces read now; `acknowledged` are acks of the proposal `proposed`."""
    silent = tuple(rank for rank in range(world_size) if rank not in hellos)
    if silent:
        return KeepWaiting(silent, "say hello")
    nonces = tuple(hellos[rank] for rank in range(world_size))
    if nonces != proposed:
        return Publish(nonces)
    pending = tuple(rank for rank in range(world_size) if rank not in acknowledged)
    return KeepWaiting(pending, "acknowledge") if pending else Go()


def agree(  # noqa: PLR0913 -- clocks are handed in
    store: SharedStore,
    identity: Identity,
    introduction: Introduction,
    *,
    number: int,
    timeout_s: float,
    poll: Callable[[], None] = lambda: None,
    put_off: Callable[[float], None] = lambda _: None,
    tell: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Incarnation:
    """Agree with all other ranks. `number` counts the run's incarnations; rank 0's is taken. `poll` may raise to leave early.
    `put_off` hears for how long the time-out is put off, where rank 0 says that it waits for another run. `tell` hears once, on
    rank 0, who is being waited for if that takes long.

    Collective: yes. Raises: TransportError that names the ranks that are missing.
    """
    nonce = uuid.uuid4().hex
    store.set(f"{_ROOT}/hello/{identity.rank}", json.dumps({"nonce": nonce, "introduction": asdict(introduction)}))
    seat = _Participant(store, identity, nonce, number)
    began = clock()
    deadline, told = began + timeout_s, False
    waiting, margin_s = _word(store), min(_LOOK_BEFORE_S, timeout_s / 4)
    pause_s = _FIRST_PAUSE_S
    while True:
        if identity.rank == 0:
            seat.lead()
        agreed = seat.follow()
        if agreed is not None:
            return agreed
        poll()
        if identity.rank == 0 and not told and clock() - began > _PATIENCE_S:
            told = True
            tell(f"waiting for up to {timeout_s:g} s until all {identity.world_size} ranks have met: {seat.missing()}")
        if identity.rank != 0 and clock() > deadline - margin_s and (word := _word(store)) != waiting:
            waiting, deadline = word, clock() + _WAITS_ON_S
            put_off(_WAITS_ON_S)
        if clock() > deadline:
            raise TransportError(f"the {identity.world_size} ranks did not agree within {timeout_s:g} s: {seat.missing()}")
        sleep(pause_s)
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)


def say_waiting(store: SharedStore) -> None:
    """As rank 0, again and again before it meets the others: it waits for another run to end, and so do they."""
    store.set(_WAITING, uuid.uuid4().hex)


def _word(store: SharedStore) -> bytes:
    return store.get(_WAITING) if store.check([_WAITING]) else b""


def pack(text: str) -> list[str]:
    """Small pieces for a store that takes texts."""
    packed = base64.b64encode(zlib.compress(text.encode())).decode()
    return [packed[begin : begin + _PIECE] for begin in range(0, len(packed), _PIECE)]


def unpack(pieces: Iterable[bytes]) -> str:
    """The inverse of `pack`."""
    return zlib.decompress(base64.b64decode(b"".join(pieces))).decode()


class _Heading(TypedDict):
    """Where the newest proposal is."""

    name: str
    pieces: int


class _Proposal(TypedDict):
    """What rank 0 publishes."""

    name: str
    nonces: list[str]
    ranks: list[dict[str, Any]]


class _Participant:
    """One rank's side of the exchange."""

    def __init__(self, store: SharedStore, identity: Identity, nonce: str, number: int) -> None:
        self._store = store
        self._identity = identity
        self._nonce = nonce
        self._number = number
        self._proposed: tuple[str, ...] | None = None
        self._name = ""
        self._acknowledged: set[int] = set()
        self._waiting: KeepWaiting | None = None
        self._joined: Incarnation | None = None

    def lead(self) -> None:
        hellos = self._hellos()
        if hellos[0].nonce != self._nonce:
            raise TransportError("another rank 0 has taken this one's place: its agent has started the group again")
        for rank in range(self._identity.world_size):
            if self._name and rank not in self._acknowledged and self._has(f"ack/{self._name}/{rank}"):
                self._acknowledged.add(rank)
        if self._proposed is not None and self._read_heading()["name"] != self._name:
            # A rank 0 whose place was taken may have written its last word over ours.
            self._proposed = None
        decision = coordinate(
            {rank: hello.nonce for rank, hello in hellos.items()},
            world_size=self._identity.world_size,
            proposed=self._proposed,
            acknowledged=frozenset(self._acknowledged),
        )
        self._waiting = decision if isinstance(decision, KeepWaiting) else None
        if isinstance(decision, Publish):
            self._proposed = decision.nonces
            self._acknowledged = set()
            self._name = f"{self._number:06d}-{uuid.uuid4().hex[:8]}"
            ranks = [asdict(hellos[rank].introduction) for rank in range(self._identity.world_size)]
            self._publish(json.dumps({"name": self._name, "nonces": decision.nonces, "ranks": ranks}))
        elif isinstance(decision, Go):
            self._set(f"go/{self._name}", "")

    def follow(self) -> Incarnation | None:
        # The go is looked for before another proposal is joined: one that comes after it is no business of this group's.
        if not self._may_go() and self._has("proposal") and not self._has_joined(self._read_heading()):
            self._join(self._read_proposal())
        return self._joined if self._may_go() else None

    def _may_go(self) -> bool:
        return self._joined is not None and self._has(f"go/{self._joined.name}")

    def _has_joined(self, heading: _Heading) -> bool:
        return self._joined is not None and self._joined.name == heading["name"]

    def _join(self, proposal: _Proposal) -> None:
        name, nonces, rank = proposal["name"], proposal["nonces"], self._identity.rank
        if len(nonces) != self._identity.world_size or nonces[rank] != self._nonce:
            return
        if self._joined is None or self._joined.name != name:
            self._joined = Incarnation(name, tuple(Introduction(**one) for one in proposal["ranks"]))
            self._set(f"ack/{name}/{rank}", "")

    def _publish(self, text: str) -> None:
        """In pieces, each waited for: on a network that drops large frames this is what must still pass, to find that out."""
        pieces = pack(text)
        for number, piece in enumerate(pieces):
            self._set(f"proposal/{self._name}/{number}", piece)
            self._has(f"proposal/{self._name}/{number}")
        self._set("proposal", json.dumps({"name": self._name, "pieces": len(pieces)}))

    def _read_heading(self) -> _Heading:
        heading: _Heading = json.loads(self._store.get(f"{_ROOT}/proposal"))
        return heading

    def _read_proposal(self) -> _Proposal:
        heading = self._read_heading()
        pieces = [self._store.get(f"{_ROOT}/proposal/{heading['name']}/{number}") for number in range(heading["pieces"])]
        proposal: _Proposal = json.loads(unpack(pieces))
        return proposal

    def missing(self) -> str:
        if self._identity.rank != 0:
            heard = "heard nothing of rank 0" if not self._joined else "rank 0 still waits for others; its message names them"
            return f"rank {self._identity.rank} on {self._identity.host} {heard}"
        if self._waiting is None:
            return "a rank was replaced again and again"
        ranks = ", ".join(map(str, self._waiting.ranks[:16])) + (", ..." if len(self._waiting.ranks) > 16 else "")
        return f"rank(s) {ranks} did not {self._waiting.stage}"

    def _hellos(self) -> dict[int, Hello]:
        hellos = {}
        for rank in range(self._identity.world_size):
            if self._has(f"hello/{rank}"):
                hello = json.loads(self._store.get(f"{_ROOT}/hello/{rank}"))
                hellos[rank] = Hello(hello["nonce"], Introduction(**hello["introduction"]))
        return hellos

    def _set(self, key: str, value: str) -> None:
        self._store.set(f"{_ROOT}/{key}", value)

    def _has(self, key: str) -> bool:
        return self._store.check([f"{_ROOT}/{key}"])
