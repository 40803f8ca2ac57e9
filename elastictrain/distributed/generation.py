"""Agreement of all ranks on a fresh generation, before they do anything else together.

torchrun's store outlives a restart, so its keys name dead addresses. No environment variable identifies an attempt either: each
agent counts restarts on its own. So the ranks agree through the store itself, undisturbed by keys of earlier generations:

    every rank      writes hello/RANK = its nonce
    rank 0          reads all hellos, publishes proposal = (name, all nonces); again when a hello changes, or when an earlier
                    rank 0 has overwritten it
    every rank      that finds its nonce in the proposal writes ack/NAME/RANK
    rank 0          when all have acknowledged, writes go/NAME
    every rank      leaves when it sees go/NAME of the proposal it acknowledged

No living rank acknowledges the nonce of a stale hello; the new rank overwrites that hello when it starts.
"""

import math
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from elastictrain.bounded_json import DOCUMENT, encode_record, parse_record
from elastictrain.distributed.store import BoundedStore, get_pieces, put_pieces, store_host
from elastictrain.errors import ConfigError, Problem, TransportError
from elastictrain.identity import Identity

_ROOT = "elastictrain"
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.1
_PATIENCE_S = 5.0  # ranks of one torchrun start within a few seconds of each other
_SHOWN_PROBLEMS = 8

_WAITING = f"{_ROOT}/waiting"
_LOOK_BEFORE_S = 1.0
_WAITS_ON_S = 10.0  # by which rank 0's sign that it waits for the run's lease extends the time-out


@dataclass(frozen=True, slots=True)
class Introduction:
    """A rank's facts that only its host can observe."""

    host: str
    local_world_size: int
    backend: str
    digest: str  # of configuration and data: ranks that differ must not train together
    pid: int = 0
    stayed: bool = False  # whether the process finished a step in an earlier generation
    planned: bool = False  # whether it has the variables that an earlier preflight of its host has set for NCCL and gloo
    recovers: bool = False  # whether its launcher has seen the failure of the last generation


@dataclass(frozen=True, slots=True)
class AgreedGeneration:
    name: str  # number and nonce: names in a folder sort in the order of starts
    ranks: tuple[Introduction, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(rank.host for rank in self.ranks)

    @property
    def pids(self) -> dict[str, int]:
        """The processes by rank."""
        return {str(rank): introduction.pid for rank, introduction in enumerate(self.ranks)}

    @property
    def hosts_that_stayed(self) -> frozenset[str]:
        """Hosts with a process that finished a step in an earlier generation."""
        return frozenset(introduction.host for introduction in self.ranks if introduction.stayed)

    @property
    def planned_hosts(self) -> frozenset[str]:
        """Hosts where an earlier preflight has set the variables for NCCL and gloo."""
        return frozenset(introduction.host for introduction in self.ranks if introduction.planned)

    @property
    def recovery_rank(self) -> int:
        """The rank that records how training has come to go on after a failure: rank 0, unless its host has just come."""
        return next((rank for rank, introduction in enumerate(self.ranks) if introduction.recovers), 0)

    @property
    def shared_local_size(self) -> int:
        """The greatest common divisor of the hosts' numbers of ranks; the same on all ranks."""
        return math.gcd(*(rank.local_world_size for rank in self.ranks))


@dataclass(frozen=True, slots=True)
class _Hello:
    nonce: str
    introduction: Introduction


@dataclass(frozen=True, slots=True)
class _NameProposal:
    name: str
    nonces: tuple[str, ...]
    ranks: tuple[Introduction, ...]


def check_alike(generation: AgreedGeneration) -> None:
    """Raises: ConfigError that names the ranks which differ from rank 0 in backend, or in configuration or data."""
    first = generation.ranks[0]
    problems = []
    for number, other in enumerate(generation.ranks):
        name = f"rank {number} on {other.host}"
        if other.backend != first.backend:
            message = (
                f"is {other.backend} for {name}, but {first.backend} for rank 0 on {first.host}: GPUs and CPUs cannot train "
                "together; make all hosts show their GPUs, leave those without out (nccl), or set parallel.device=cpu for all"
            )
            problems.append(Problem("parallel.backend", message))
        if other.digest != first.digest:
            message = f"differ between {name} and rank 0 on {first.host}; give all hosts the same command, data and version"
            problems.append(Problem("configuration or data", message))
    if problems:
        raise ConfigError(problems[:_SHOWN_PROBLEMS])


@dataclass(frozen=True, slots=True)
class KeepWaiting:
    """Rank 0 must wait: these ranks are missing at this stage."""

    ranks: tuple[int, ...]
    stage: str


def coordinate(
    hellos: Mapping[int, str], *, world_size: int, proposed: tuple[str, ...] | None, acknowledged: frozenset[int]
) -> KeepWaiting | Literal["publish", "go"]:
    """The next action of rank 0: wait, publish a proposal with the nonces of `hellos`, or give the go for the published one.
    `hellos` maps ranks to the nonces read now; `acknowledged` are acks of the proposal with the nonces `proposed`."""
    silent = tuple(rank for rank in range(world_size) if rank not in hellos)
    if silent:
        return KeepWaiting(silent, "say hello")
    if tuple(hellos[rank] for rank in range(world_size)) != proposed:
        return "publish"
    pending = tuple(rank for rank in range(world_size) if rank not in acknowledged)
    return KeepWaiting(pending, "acknowledge") if pending else "go"


def agree(  # noqa: PLR0913 -- clocks are handed in
    store: BoundedStore,
    identity: Identity,
    introduction: Introduction,
    *,
    number: int,
    timeout_s: float,
    poll: Callable[[], None] = lambda: None,
    extend_deadline: Callable[[float], None] = lambda _: None,
    tell: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> AgreedGeneration:
    """Agree with all other ranks. `number` counts the run's generations; rank 0's is used. `poll` may raise to leave early.
    `extend_deadline` receives the seconds that rank 0 waits for another run. `tell` receives the missing ranks once, on rank 0,
    after a long wait. Collective: yes. Raises: TransportError naming the missing ranks."""
    nonce = uuid.uuid4().hex
    store.set(f"{_ROOT}/hello/{identity.rank}", encode_record(_Hello(nonce, introduction)).decode())
    own = _Participant(store, identity, nonce, number)
    began = clock()
    deadline, told = began + timeout_s, False
    waiting, margin_s = _waiting_sign(store), min(_LOOK_BEFORE_S, timeout_s / 4)
    silent: tuple[int, ...] | None = None
    pause_s = _FIRST_PAUSE_S
    while True:
        if identity.rank == 0:
            own.lead()
        agreed = own.follow()
        if agreed is not None:
            return agreed
        poll()
        if identity.rank == 0 and not told and clock() - began > _PATIENCE_S:
            told = True
            tell(f"waiting for up to {timeout_s:g} s until all {identity.world_size} ranks have met: {own.describe_missing()}")
        if clock() > deadline - margin_s:
            if identity.rank != 0 and (word := _waiting_sign(store)) != waiting:
                waiting, deadline, silent = word, clock() + _WAITS_ON_S, None
                extend_deadline(_WAITS_ON_S)
            elif silent is None:
                # Asked while there is time left for the answer.
                silent = own.find_missing()
        if clock() > deadline:
            sentence = (
                f"the {identity.world_size} ranks did not agree within {timeout_s:g} s (`fault.rendezvous_timeout_s`) in "
                f"the store on {store_host()}: {own.describe_missing()}"
            )
            raise TransportError(sentence, missing=silent or ())
        sleep(pause_s)
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)


def signal_waiting(store: BoundedStore) -> None:
    """As rank 0, repeatedly before the agreement: signal that it waits for another run to end, so that the others wait, too."""
    store.set(_WAITING, uuid.uuid4().hex)


def _waiting_sign(store: BoundedStore) -> bytes:
    return store.get(_WAITING) if store.check([_WAITING]) else b""


class _Participant:
    def __init__(self, store: BoundedStore, identity: Identity, nonce: str, number: int) -> None:
        self._store = store
        self._identity = identity
        self._nonce = nonce
        self._number = number
        self._proposal: _NameProposal | None = None  # as rank 0: the newest that it has published
        self._acknowledged: set[int] = set()
        self._waiting: KeepWaiting | None = None
        self._joined: AgreedGeneration | None = None

    def lead(self) -> None:
        """As rank 0: publish a proposal where the hellos have changed, and give the go when all have acknowledged it."""
        world_size, proposal = self._identity.world_size, self._proposal
        hellos = {
            rank: parse_record(self._get(f"hello/{rank}"), _Hello) for rank in range(world_size) if self._has(f"hello/{rank}")
        }
        if hellos[0].nonce != self._nonce:
            raise TransportError("another rank 0 has taken this one's place: its agent has started the group again")
        if proposal is not None:
            pending = [rank for rank in range(world_size) if rank not in self._acknowledged]
            self._acknowledged |= {rank for rank in pending if self._has(f"ack/{proposal.name}/{rank}")}
            if self._proposed() != proposal.name:
                # A rank 0 that was replaced may have overwritten our message with its last one.
                proposal = None
        decision = coordinate(
            {rank: hello.nonce for rank, hello in hellos.items()},
            world_size=world_size,
            proposed=proposal.nonces if proposal is not None else None,
            acknowledged=frozenset(self._acknowledged),
        )
        self._waiting = decision if isinstance(decision, KeepWaiting) else None
        if decision == "publish":
            name, said = f"{self._number:06d}-{uuid.uuid4().hex[:8]}", [hellos[rank] for rank in range(world_size)]
            nonces, ranks = tuple(one.nonce for one in said), tuple(one.introduction for one in said)
            self._proposal, self._acknowledged = _NameProposal(name, nonces, ranks), set()
            # In pieces: this must pass even a network that drops large frames, for the preflight to find that fault.
            put_pieces(self._store, f"{_ROOT}/proposal/{name}", encode_record(self._proposal))
            self._set("proposal", name)
        elif decision == "go" and proposal is not None:
            self._set(f"go/{proposal.name}", "")

    def follow(self) -> AgreedGeneration | None:
        """Acknowledge a proposal that names this rank; returns the agreed generation after the go."""
        # Check for the go before another proposal: one that comes after the go does not concern this group.
        if not self._may_go() and self._has("proposal"):
            name, rank = self._proposed(), self._identity.rank
            if self._joined is None or self._joined.name != name:
                found = get_pieces(self._store, f"{_ROOT}/proposal/{name}")
                proposal = parse_record(found, _NameProposal, limits=DOCUMENT)
                if len(proposal.nonces) == self._identity.world_size and proposal.nonces[rank] == self._nonce:
                    self._joined = AgreedGeneration(proposal.name, proposal.ranks)
                    self._set(f"ack/{proposal.name}/{rank}", "")
        return self._joined if self._may_go() else None

    def find_missing(self) -> tuple[int, ...]:
        """The missing ranks; if all ranks have come, rank 0, which does not proceed."""
        if self._identity.rank == 0:
            return self._waiting.ranks if self._waiting is not None else ()
        return tuple(rank for rank in range(self._identity.world_size) if not self._has(f"hello/{rank}")) or (0,)

    def describe_missing(self) -> str:
        if self._identity.rank != 0:
            heard = "heard nothing of rank 0" if not self._joined else "rank 0 still waits for others; its message names them"
            return f"rank {self._identity.rank} on {self._identity.host} {heard}"
        if self._waiting is None:
            return "a rank was replaced again and again"
        ranks = ", ".join(map(str, self._waiting.ranks[:16])) + (", ..." if len(self._waiting.ranks) > 16 else "")
        return f"rank(s) {ranks} did not {self._waiting.stage}"

    def _may_go(self) -> bool:
        return self._joined is not None and self._has(f"go/{self._joined.name}")

    def _proposed(self) -> str:
        return self._get("proposal").decode()

    def _get(self, key: str) -> bytes:
        return self._store.get(f"{_ROOT}/{key}")

    def _set(self, key: str, value: str) -> None:
        self._store.set(f"{_ROOT}/{key}", value)

    def _has(self, key: str) -> bool:
        return self._store.check([f"{_ROOT}/{key}"])
