"""A part of the checks that all ranks run at once under a deadline: exchange of the results, and culprits if one is missing."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

import msgspec

from elastictrain.bounded_json import DOCUMENT, as_record, encode_record, parse_record
from elastictrain.distributed.bounded import each_within
from elastictrain.distributed.exchange import Exchange
from elastictrain.preflight.group.members import GroupMember
from elastictrain.preflight.verdict import Reporter, Scope, Verdict

T = TypeVar("T")

_MOST_NAMED = 8


class PartState(StrEnum):
    DONE = "done"
    BROKEN = "broken"  # it raised
    STUCK = "stuck"  # no result in time


@dataclass(frozen=True, slots=True)
class RankResult:
    state: PartState
    figure: object = None  # JSON
    detail: str = ""  # the error, or where it is stuck
    num_begun: int = 0  # number of calls it began


Act = Callable[[Callable[[str], None]], object]  # runs a part; first passes the name of each call to its argument


def run_act(act: Act, *, limit_s: float, in_background: Callable[[], None] | None = None) -> RankResult:
    """Run a part for at most `limit_s`, and `in_background` in another thread. Never raises. A hanging collective keeps its
    thread until the process ends."""
    begun: list[str] = []

    def run() -> RankResult:
        """Turns an exception into a result that names it and the call in which it came."""
        try:
            figure = msgspec.to_builtins(act(begun.append))
            encode_record(figure)
        except Exception as error:  # noqa: BLE001  # the edge of a thread: every rank receives the error
            first_line = (str(error).splitlines() or [""])[0][:300]
            detail = f"{type(error).__name__}: {first_line}" + (f" ({begun[-1]})" if begun else "")
            return RankResult(PartState.BROKEN, detail=detail, num_begun=len(begun))
        return RankResult(PartState.DONE, figure, num_begun=len(begun))

    calls: list[tuple[float, Callable[[], RankResult | None]]] = [(limit_s, run)]
    result = each_within([*calls, (limit_s, in_background)] if in_background is not None else calls)[0]
    return result or RankResult(PartState.STUCK, detail=begun[-1] if begun else "", num_begun=len(begun))


@dataclass(frozen=True, slots=True)
class Attendance:
    part: str
    world_size: int
    limit_s: float
    words: Mapping[int, RankResult]  # by rank, of those that sent one
    entered: frozenset[int] = field(default_factory=frozenset)  # ranks that began the part
    seconds: float = 0.0  # on rank 0

    @property
    def complete(self) -> bool:
        return len(self.words) == self.world_size and all(word.state is PartState.DONE for word in self.words.values())

    def figures(self, kind: type[T]) -> dict[int, T]:
        return {rank: as_record(word.figure, kind) for rank, word in sorted(self.words.items())}


@dataclass(frozen=True, slots=True)
class Entries:
    """One rank's side of the exchange. Raises, in all methods: TransportError if the exchange cannot be reached."""

    exchange: Exchange
    rank: int
    world_size: int
    grace_s: float  # a rank whose result is later than the deadline by this counts as silent

    def enter(self, part: str) -> None:
        """Publish that this rank is about to begin."""
        self.exchange.put(f"group/{part}/in/{self.rank}", b"1")

    def settle(self, part: str, word: RankResult, *, began: float, limit_s: float) -> Attendance:
        """Results of all ranks for a part that this one began at `began`, a little after `limit_s` at the latest."""
        self.exchange.put(f"group/{part}/word/{self.rank}", encode_record(word))
        published = f"group/{part}/all"
        # Also after a failure of this rank: only the other results show which rank is the cause.
        until = began + limit_s + self.grace_s
        if self.rank != 0:
            data = self.exchange.get(published, limit_s=max(0.0, until + 2 * self.grace_s - time.monotonic()))
            if data is not None:
                return parse_record(data, Attendance, limits=DOCUMENT)
            until = time.monotonic()
        words, entered = {self.rank: word}, {self.rank}
        for rank in set(range(self.world_size)) - {self.rank}:
            data = self.exchange.get(f"group/{part}/word/{rank}", limit_s=max(0.0, until - time.monotonic()))
            if data is not None:
                words[rank] = parse_record(data, RankResult)
            if data is not None or self.exchange.get(f"group/{part}/in/{rank}", limit_s=0.0) is not None:
                entered.add(rank)
        seconds = round(time.monotonic() - began, 4)
        attendance = Attendance(part, self.world_size, limit_s, words, frozenset(entered), seconds)
        if self.rank == 0:
            self.exchange.put(published, encode_record(attendance))
        return attendance


def scope_of(culprits: Collection[int], members: Sequence[GroupMember]) -> Scope:
    """HOST if all culprits are ranks of one host, and not all ranks there are."""
    hosts = {members[rank].host for rank in culprits}
    return Scope.HOST if len(hosts) == 1 and len(culprits) < len(members) else Scope.GROUP


def judge_attendance(check: str, attendance: Attendance, members: Sequence[GroupMember]) -> list[Verdict]:
    """One failure for each culprit: ranks that did not enter (others may be stuck waiting for them), else ranks that entered
    and sent no result, else those that raised; if all are stuck, those that began the fewest calls."""
    if attendance.complete:
        return []
    culprits, words = _culprits(attendance), attendance.words
    # Errors are often about the other end of a connection, and a rank that answers and lags behind nobody waits for a peer.
    others = [word.num_begun for rank, word in words.items() if rank not in culprits]
    told = [words[rank] for rank in culprits if rank in words]
    waits = any(word.state is PartState.BROKEN or (others and word.num_begun >= min(others)) for word in told)
    scope = Scope.GROUP if waits else scope_of(culprits, members)
    expected = f"all {attendance.world_size} ranks through {attendance.part}"
    verdicts = []
    for rank, measured in list(culprits.items())[:_MOST_NAMED]:
        report = Reporter(check, members[rank].name, scope, attendance.seconds)
        remedy = _remedy(members[rank], was_there=rank in attendance.entered)
        verdicts.append(report.failed(measured, expected=expected, remedy=remedy))
    if (rest := len(culprits) - _MOST_NAMED) > 0:
        report = Reporter(check, "all", Scope.GROUP, attendance.seconds)
        remedy = "see to the ranks that are named first"
        verdicts.append(report.failed(f"{rest} more ranks likewise", expected=expected, remedy=remedy))
    return verdicts


def _remedy(member: GroupMember, *, was_there: bool) -> str:
    without = f"to continue without {member.host}, start the others with a smaller --nnodes"
    if member.pid is None:
        return f"on {member.host} look for rank {member.rank} (`pgrep -af elastictrain`) and at what it printed; {without}"
    dump = f"`py-spy dump --pid {member.pid}`"
    if not was_there:
        return f"on {member.host} see what rank {member.rank} does: {dump}; {without}"
    waiting = "start again with NCCL_DEBUG=INFO to see which connection it waits for"
    return f"on {member.host} see where rank {member.rank} is: {dump}; {waiting}; {without}"


def _culprits(attendance: Attendance) -> dict[int, str]:
    part, limit, words = attendance.part, f"within {attendance.limit_s:g} s", attendance.words
    ranks = range(attendance.world_size)
    if absent := [rank for rank in ranks if rank not in attendance.entered]:
        return dict.fromkeys(absent, f"did not enter {part} {limit}")
    if silent := [rank for rank in ranks if rank not in words]:
        return dict.fromkeys(silent, f"entered {part} and gave no word {limit}")
    if broken := [rank for rank in ranks if words[rank].state is PartState.BROKEN]:
        return {rank: f"broke in {part}: {words[rank].detail}" for rank in broken}
    stuck = {rank: words[rank] for rank in ranks if words[rank].state is PartState.STUCK}
    least = min(word.num_begun for word in stuck.values())
    last = {rank: word.detail for rank, word in stuck.items() if word.num_begun == least}
    return {rank: f"no answer from {part}{f' at {call}' if call else ''} {limit}" for rank, call in last.items()}
