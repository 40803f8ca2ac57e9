"""A launcher as the acting side is: its roster, its watch and its workers, each with the faults that they can have."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from elastictrain.config.composed import LaunchGroup
from elastictrain.fault.reasons import SlowRank
from elastictrain.launch.membership.observation import ClusterState, HostObservation, observe, observe_datagrams
from elastictrain.launch.membership.records import (
    Create,
    Decision,
    End,
    EndKind,
    Finish,
    Generation,
    HostRecord,
    HostState,
    Join,
    Leave,
    LeaveOut,
    Rejoin,
    Wait,
)
from tests.integration.simulated.storage import Storage, StorageDownError

Decide = Callable[[ClusterState, LaunchGroup], Decision]
STOP_LIMIT_S = 20.0
_CREATE_AGAIN_S = 3.0


@dataclass(frozen=True, slots=True)
class Clock:
    """A host's own time: nobody else's, and not of the same pace."""

    offset_s: float
    rate: float

    def __call__(self, true_s: float) -> float:
        return self.offset_s + self.rate * true_s


@dataclass(slots=True)
class Attempt:
    generation: Generation
    started: bool = False
    asked: End | None = None
    at_once: bool = False
    exits_s: float = float("inf")
    """When its workers are gone, in true time."""

    exit_code: int = 75
    superseded_ticks: int = 0


class Launcher:
    def __init__(
        self,
        name: str,
        host: str,
        *,
        clock: Clock,
        storage: Storage,
        options: LaunchGroup,
        expected_hosts: int,
        decide: Decide,
        committed_step: Callable[[], int],
    ) -> None:
        self.name, self.host = name, host
        self.expected_hosts = expected_hosts
        self.clock, self.storage, self.options, self._decide = clock, storage, options, decide
        self._committed_step = committed_step
        self.frozen = ""
        self.gone = False
        self.silent_death = False
        self.wants_to_leave = self.is_slow = self.first_is_slow = False
        """The host, or the work of the first rank on any host."""

        self.slow_since_s = 0.0
        self.exit_code: int | None = None
        self.attempt: Attempt | None = None
        self.others: tuple[str, ...] = ()
        self.heard_s: dict[str, float] = {}
        self.heard: frozenset[str] = frozenset()
        self.heard_since_s = 0.0
        self.followed_s = self.looked_s = 0.0
        self.silent: frozenset[str] = frozenset()
        self.record = HostRecord(host, name, name, 7, 29_500, 1, -1, HostState.READY, "", 0, 0)
        self.newest: Generation | None = None
        self.newest_since_s = 0.0
        self.ends: dict[str, End] = {}
        self.ended_since_s: float | None = None
        self.observed: dict[str, HostObservation] = {}
        self.read_s = self.began_s = -1.0
        self.reads = 0
        self.posts: list[Generation] = []
        self.told: HostRecord | None = None
        """What it says by datagram, again and again, from an end to the next begin."""

        self.created: tuple[int, float] = (0, 0.0)
        self.retry_s = float("inf")
        self.attentive = True

    @property
    def live(self) -> bool:
        return not self.gone

    def _follow(self, generation: Generation, *, local_s: float) -> None:
        """All members are missed where they are not heard."""
        self.others = tuple(member.host for member in generation.members if member.host != self.host)
        self.followed_s, self.silent = local_s, frozenset()

    def listen(self, hosts: Iterable[str], lines: Iterable[HostRecord], *, now_s: float) -> None:
        """The watch: who is heard, by the own clock; a pause of its own says nothing about the others."""
        local_s = self.clock(now_s)
        self.observed = observe_datagrams(self.observed, lines, own=self.host, now_s=local_s)
        self._note_ends(local_s)
        if local_s - self.looked_s > max(self.options.lost_s / 2, 2.0):
            self.followed_s = local_s
        self.looked_s = local_s
        self.heard_s.update(dict.fromkeys(hosts, local_s))
        heard = frozenset(host for host, heard_s in self.heard_s.items() if local_s - heard_s <= self.options.lost_s / 2)
        if heard != self.heard:
            self.heard, self.heard_since_s = heard, local_s
        self.silent = frozenset(
            host
            for host in self.others
            if local_s - max(self.followed_s, self.heard_s.get(host, self.followed_s)) > self.options.lost_s
        )

    def tick(self, *, now_s: float, cut_off: bool) -> None:
        if not cut_off:
            with suppress(StorageDownError):
                self._turn(now_s)
        self._look_after_workers(now_s)
        self._note_ends(self.clock(now_s))
        if self.reads:
            self._act(self._decide(self.cluster(now_s), self.options), now_s)

    def cluster(self, now_s: float) -> ClusterState:
        return ClusterState(
            now_s=self.clock(now_s),
            began_s=self.began_s,
            me=self.record,
            running=None if self.attempt is None else self.attempt.generation,
            newest=self.newest,
            newest_since_s=self.newest_since_s,
            ends=self.ends,
            ended_since_s=self.ended_since_s,
            observed=self.observed,
            read_s=self.read_s,
            silent=self.silent,
            heard=self.heard,
            heard_since_s=self.heard_since_s,
            expected_hosts=self.expected_hosts,
            stop_limit_s=STOP_LIMIT_S,
            stop_reason="asked to leave" if self.wants_to_leave else "",
            straggles=self._straggles(),
            slow_since_s=self.slow_since_s,
        )

    def _straggles(self) -> SlowRank | None:
        if self.attempt is None or not self.attempt.started:
            return None
        rank = self.attempt.generation.first_rank(self.host)
        return SlowRank(rank, "it is slow") if self.is_slow or (self.first_is_slow and rank == 0) else None

    def _turn(self, now_s: float) -> None:
        storage, local_s = self.storage, self.clock(now_s)
        while self.posts:
            storage.create(self.posts[0], now_s=now_s)
            self.posts.pop(0)
        self._change(hears=tuple(sorted(self.heard)))
        storage.write_record(self.record, now_s=now_s)
        newest = storage.newest(self.newest, now_s=now_s)
        if newest is not None and newest != self.newest:
            if newest.slow != (self.newest and self.newest.slow):
                self.slow_since_s = local_s
            self.newest, self.newest_since_s, self.ends, self.ended_since_s = newest, local_s, {}, None
        if self.attentive:
            self.observed = observe(self.observed, storage.all_entries(now_s=now_s), own=self.host, now_s=local_s)
            self.read_s = local_s
        self._note_ends(local_s)
        if not self.reads:
            self.began_s = local_s
        self.reads += 1

    def _note_ends(self, local_s: float) -> None:
        """What was told once stays true, whatever a later and older reading shows."""
        if self.newest is None:
            return
        told = [line.end for line in (self.record, *(one.record for one in self.observed.values())) if line.end is not None]
        self.ends |= {end.host: end for end in told if end.generation == self.newest.number}
        if self.ends and self.ended_since_s is None:
            self.ended_since_s = local_s

    def _tell(self) -> None:
        self.told = replace(self.record, hears=(), writers=())

    def _change(self, **fields: Any) -> None:
        self.record = replace(self.record, beat=self.record.beat + 1, **fields)

    def _act(self, decision: Decision, now_s: float) -> None:
        match decision:
            case Join(generation):
                assert self.attempt is None
                self.attempt = Attempt(generation)
                self._follow(generation, local_s=self.clock(now_s))
                self.told = None
                self._change(state=HostState.BUSY)
                self.attentive = generation.members[0].host == self.host
            case Create(generation):
                number, when_s = self.created
                if generation.number != number or self.clock(now_s) - when_s > _CREATE_AGAIN_S:
                    self.created = (generation.number, self.clock(now_s))
                    self.posts.append(generation)
            case Finish(end, at_once):
                self._finish(end, at_once=at_once, now_s=now_s)
            case LeaveOut(number, reason):
                self._say(HostState.UNFIT, ended=number, reason=reason)
                self.retry_s = min(self.retry_s, self.clock(now_s) + self.options.retry_unfit_s)
            case Rejoin():
                self._say(HostState.READY, ended=self.record.ended)
                self.retry_s = float("inf")
            case Leave(exit_code):
                self.exit_code = exit_code
                self.gone = True
                self.storage.records.put(
                    self.host, replace(self.record, state=HostState.GONE, beat=self.record.beat + 1), now_s=now_s
                )
            case Wait():
                if self.record.state is HostState.UNFIT and self.clock(now_s) > self.retry_s:
                    self._say(HostState.READY, ended=self.record.ended)
                    self.retry_s = float("inf")

    def _finish(self, end: End, *, at_once: bool, now_s: float) -> None:
        attempt = self.attempt
        assert attempt is not None
        if attempt.asked is None:
            attempt.asked = end
            if end.host == self.host:
                self._change(end=end)
                self._tell()
            attempt.exits_s = min(attempt.exits_s, now_s + (STOP_LIMIT_S if attempt.started else 0.0))
        if at_once and not attempt.at_once:
            attempt.at_once = True
            attempt.exits_s = min(attempt.exits_s, now_s + 1.0)

    def workers_end(self, exit_code: int, *, now_s: float) -> None:
        """All workers of this host are gone by themselves."""
        if self.attempt is not None and self.attempt.started and self.attempt.exits_s > now_s:
            self.attempt.exits_s, self.attempt.exit_code = now_s, exit_code

    def _look_after_workers(self, now_s: float) -> None:
        attempt = self.attempt
        if attempt is None:
            return
        if not attempt.started and attempt.asked is None:
            attempt.started = True
            return
        if now_s < attempt.exits_s:
            return
        number = attempt.generation.number
        kind = EndKind.DONE if attempt.exit_code == 0 else EndKind.FAILED
        if attempt.asked is None or kind is EndKind.DONE:
            self._change(end=End(number, self.host, kind, attempt.exit_code, "", 0, 0, "workers ended"))
        self.attempt, self.attentive = None, True
        self._change(committed_step=max(self.record.committed_step, self._committed_step()))
        own = attempt.asked is not None and attempt.asked.host == self.host
        slow = attempt.asked.reason if attempt.asked is not None and own and attempt.asked.exit_code == 69 else ""
        unfit = slow or (attempt.exit_code == 69 and attempt.asked is None)
        self._say(HostState.UNFIT if unfit else HostState.READY, ended=number, reason=slow)
        self._tell()
        if unfit:
            self.retry_s = self.clock(now_s) + self.options.retry_unfit_s

    def _say(self, state: HostState, *, ended: int, reason: str = "") -> None:
        self._change(state=state, ended=max(ended, self.record.ended), reason=reason)
