"""A part of the checks that all ranks do at once: run under a deadline, told to each other, and who is to blame if not all came
through.

All collectives run in one thread, so that whoever waits for one need not wait for ever.
"""

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from elastictrain.bounded_json import DOCUMENT, as_record, encode_record, parse_record
from elastictrain.preflight.group.members import GroupMember
from elastictrain.preflight.surroundings import Exchange
from elastictrain.preflight.verdict import Reporter, Scope, Verdict

T = TypeVar("T")

_MOST_NAMED = 8


class PartState(StrEnum):
    """How a rank came out of a part of the checks. BROKEN: it raised. STUCK: it did not come back in time, and will not be
    waited for."""

    DONE = "done"
    BROKEN = "broken"
    STUCK = "stuck"


@dataclass(frozen=True, slots=True)
class RankResult:
    """What a rank says afterwards. `figure`: JSON; `detail`: the error, or where it is stuck; `num_begun`: so many calls."""

    state: PartState
    figure: object = None
    detail: str = ""
    num_begun: int = 0


Act = Callable[[Callable[[str], None]], object]
"""Does a part; tells its argument what is about to begin; returns records."""


@dataclass(slots=True)
class _Progress:
    """How far an act has come; written by its thread, read by the one that waits."""

    what: str = ""
    num_begun: int = 0

    def tell(self, what: str) -> None:
        self.what = what
        self.num_begun += 1


class DeadlineThread:
    """Runs acts one after the other. After one that did not come back, nothing can run any more.

    A collective that hangs cannot be woken from outside: its thread stays, and ends with the process.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        self._acts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, args=(prepare,), name="group-checks", daemon=True).start()

    def run(self, act: Act, *, limit_s: float) -> RankResult:
        """Its word, after `limit_s` at the latest. Never raises."""
        answer: queue.SimpleQueue[RankResult] = queue.SimpleQueue()
        progress = _Progress()
        self._acts.put(lambda: answer.put(_do(act, progress)))
        try:
            return answer.get(timeout=limit_s)
        except queue.Empty:
            return RankResult(PartState.STUCK, detail=progress.what, num_begun=progress.num_begun)

    def close(self) -> None:
        """No more acts."""
        self._acts.put(None)

    def _work(self, prepare: Callable[[], None]) -> None:
        prepare()
        while (act := self._acts.get()) is not None:
            act()


def _do(act: Act, progress: _Progress) -> RankResult:
    try:
        figure = msgspec.to_builtins(act(progress.tell))
        encode_record(figure)
    except Exception as error:  # noqa: BLE001  # the edge of a thread: every rank hears of it
        first_line = (str(error).splitlines() or [""])[0][:300]
        detail = f"{type(error).__name__}: {first_line}" + (f" ({progress.what})" if progress.what else "")
        return RankResult(PartState.BROKEN, detail=detail, num_begun=progress.num_begun)
    return RankResult(PartState.DONE, figure, num_begun=progress.num_begun)


@dataclass(frozen=True, slots=True)
class Attendance:
    """Of one part: the word of each rank that gave one, and who had entered. `seconds`: what it took rank 0."""

    part: str
    world_size: int
    limit_s: float
    words: Mapping[int, RankResult]
    entered: frozenset[int] = field(default_factory=frozenset)
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether all came through it."""
        return len(self.words) == self.world_size and all(word.state is PartState.DONE for word in self.words.values())

    def figures(self, kind: type[T]) -> dict[int, T]:
        """By rank, of a part that all came through."""
        return {rank: as_record(word.figure, kind) for rank, word in sorted(self.words.items())}


@dataclass(frozen=True, slots=True)
class Entries:
    """One rank's side. `grace_s`: how much later than the deadline the word of a rank may come before it counts as silent.

    Raises, in all methods: TransportError if the exchange cannot be reached.
    """

    exchange: Exchange
    rank: int
    world_size: int
    grace_s: float
    clock: Callable[[], float] = time.monotonic

    def enter(self, part: str) -> None:
        """Leave word that this rank is about to begin."""
        self.exchange.put(f"group/{part}/in/{self.rank}", b"1")

    def settle(self, part: str, word: RankResult, *, began: float, limit_s: float) -> Attendance:
        """What all ranks say of a part that this one began at `began`, a little after `limit_s` at the latest."""
        self.exchange.put(f"group/{part}/word/{self.rank}", encode_record(word))
        published = f"group/{part}/all"
        # Also if this rank came out in trouble: only the words of the others tell who is the cause, and who is stuck with it.
        until = began + limit_s + self.grace_s
        if self.rank != 0:
            data = self.exchange.get(published, limit_s=max(0.0, until + 2 * self.grace_s - self.clock()))
            if data is not None:
                return _decode(data)
            until = self.clock()
        attendance = self._collect(part, word, began=began, until=until, limit_s=limit_s)
        if self.rank == 0:
            self.exchange.put(published, encode_record(attendance))
        return attendance

    def _collect(self, part: str, word: RankResult, *, began: float, until: float, limit_s: float) -> Attendance:
        words, entered = {self.rank: word}, {self.rank}
        for rank in range(self.world_size):
            if rank == self.rank:
                continue
            data = self.exchange.get(f"group/{part}/word/{rank}", limit_s=max(0.0, until - self.clock()))
            if data is not None:
                words[rank] = parse_record(data, RankResult)
            if data is not None or self.exchange.get(f"group/{part}/in/{rank}", limit_s=0.0) is not None:
                entered.add(rank)
        seconds = round(self.clock() - began, 4)
        return Attendance(part, self.world_size, limit_s, words, frozenset(entered), seconds)


def _decode(data: bytes) -> Attendance:
    row = parse_record(data, dict[str, Any], limits=DOCUMENT)
    # Keys of JSON are texts.
    words = {int(rank): word for rank, word in row["words"].items()}
    return as_record({**row, "words": words}, Attendance)


def scope_of(culprits: Collection[int], members: Sequence[GroupMember]) -> Scope:
    """HOST if all that are to blame are ranks of one host, and not simply all that there are."""
    hosts = {members[rank].host for rank in culprits}
    return Scope.HOST if len(hosts) == 1 and len(culprits) < len(members) else Scope.GROUP


def judge_attendance(check: str, attendance: Attendance, members: Sequence[GroupMember]) -> list[Verdict]:
    """One failure for each culprit; nothing if all came through.

    Those that did not enter are to blame, even if others are stuck: they wait for them. Then those that entered and have not
    been heard of since, then those that raised, and where all are stuck, those that came least far.
    """
    if attendance.complete:
        return []
    culprits, words = dict(_culprits(attendance)), attendance.words
    # What a rank raises is often about the other end of a connection.
    raised = any(rank in words and words[rank].state is PartState.BROKEN for rank in culprits)
    scope = Scope.GROUP if raised else scope_of(culprits, members)
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
    """Where to look for a rank that is missing, or hangs."""
    without = f"to go on without {member.host}, start the others with a smaller --nnodes"
    if member.pid is None:
        return f"on {member.host} look for rank {member.rank} (`pgrep -af elastictrain`) and at what it printed; {without}"
    dump = f"`py-spy dump --pid {member.pid}`"
    if not was_there:
        return f"on {member.host} see what rank {member.rank} does: {dump}; {without}"
    waiting = "start again with NCCL_DEBUG=INFO to see which connection it waits for"
    return f"on {member.host} see where rank {member.rank} is: {dump}; {waiting}; {without}"


def _culprits(attendance: Attendance) -> Iterator[tuple[int, str]]:
    part, limit, words = attendance.part, f"within {attendance.limit_s:g} s", attendance.words
    ranks = range(attendance.world_size)
    if absent := [rank for rank in ranks if rank not in attendance.entered]:
        yield from ((rank, f"did not enter {part} {limit}") for rank in absent)
    elif silent := [rank for rank in ranks if rank not in words]:
        yield from ((rank, f"entered {part} and gave no word {limit}") for rank in silent)
    elif broken := [rank for rank in ranks if words[rank].state is PartState.BROKEN]:
        yield from ((rank, f"broke in {part}: {words[rank].detail}") for rank in broken)
    else:
        stuck = {rank: words[rank] for rank in ranks if words[rank].state is PartState.STUCK}
        least = min(word.num_begun for word in stuck.values())
        for rank, word in stuck.items():
            if word.num_begun == least:
                yield rank, f"no answer from {part}{f' at {word.detail}' if word.detail else ''} {limit}"
