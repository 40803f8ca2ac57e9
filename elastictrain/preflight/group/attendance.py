"""One thread in which all collectives run, so that whoever waits for one need not wait for ever."""

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from elastictrain.preflight.surroundings import Exchange


class PartState(StrEnum):
    """How a rank came out of a part of the checks."""

    DONE = "done"
    BROKEN = "broken"
    """It raised."""

    STUCK = "stuck"
    """It did not come back in time, and will not be waited for."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """What a rank says afterwards. `figure`: JSON; `detail`: the error, or where it is stuck; `num_begun`: so many calls."""

    state: PartState
    figure: object = None
    detail: str = ""
    num_begun: int = 0


Act = Callable[[Callable[[str], None]], object]
"""Does a part; tells its argument what is about to begin; returns JSON."""


class DeadlineThread:
    """Runs acts one after the other. After one that did not come back, nothing can run any more.

    A collective that hangs cannot be woken from outside: its thread stays, and ends with the process.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        self._acts: queue.SimpleQueue[tuple[Act, _Progress, queue.SimpleQueue[RankResult]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(prepare,), name="group-checks", daemon=True)
        self._thread.start()

    def run(self, act: Act, *, limit_s: float) -> RankResult:
        """Its word, after `limit_s` at the latest. Never raises."""
        answer: queue.SimpleQueue[RankResult] = queue.SimpleQueue()
        progress = _Progress()
        self._acts.put((act, progress, answer))
        try:
            return answer.get(timeout=limit_s)
        except queue.Empty:
            return RankResult(PartState.STUCK, detail=progress.what, num_begun=progress.num_begun)

    def close(self) -> None:
        """No more acts."""
        self._acts.put(None)

    def _work(self, prepare: Callable[[], None]) -> None:
        prepare()
        while (order := self._acts.get()) is not None:
            act, progress, answer = order
            answer.put(_do(act, progress))


class _Progress:
    """How far an act has come; written by its thread, read by the one that waits."""

    def __init__(self) -> None:
        self.what = ""
        self.num_begun = 0

    def tell(self, what: str) -> None:
        self.what = what
        self.num_begun += 1


def _do(act: Act, progress: _Progress) -> RankResult:
    try:
        figure = act(progress.tell)
        json.dumps(figure)
    except Exception as error:  # noqa: BLE001  # the edge of a thread: every rank hears of it
        first_line = (str(error).splitlines() or [""])[0][:300]
        detail = f"{type(error).__name__}: {first_line}" + (f" ({progress.what})" if progress.what else "")
        return RankResult(PartState.BROKEN, detail=detail, num_begun=progress.num_begun)
    return RankResult(PartState.DONE, figure, num_begun=progress.num_begun)


@dataclass(frozen=True, slots=True)
class Attendance:
    """Of one part: the word of each rank that gave one, and who of the others had entered."""

    part: str
    world_size: int
    limit_s: float
    words: Mapping[int, RankResult]
    entered: frozenset[int] = field(default_factory=frozenset)
    seconds: float = 0.0
    """What it took rank 0."""

    @property
    def complete(self) -> bool:
        """Whether all came through it."""
        return len(self.words) == self.world_size and all(word.state is PartState.DONE for word in self.words.values())


class Entries:
    """One rank's side. Raises, in all methods: TransportError if the exchange cannot be reached."""

    def __init__(
        self,
        exchange: Exchange,
        *,
        rank: int,
        world_size: int,
        grace_s: float,
        prefix: str = "group",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exchange = exchange
        self._rank = rank
        self._world_size = world_size
        self._grace_s = grace_s
        self._prefix = prefix
        self._clock = clock

    def enter(self, part: str) -> None:
        """Leave word that this rank is about to begin."""
        self._exchange.put(f"{self._prefix}/{part}/in/{self._rank}", b"1")

    def settle(self, part: str, word: RankResult, *, began: float, limit_s: float) -> Attendance:
        """What all ranks say of a part that this one began at `began`, a little after `limit_s` at the latest."""
        self._exchange.put(f"{self._prefix}/{part}/word/{self._rank}", json.dumps(asdict(word)).encode())
        published = f"{self._prefix}/{part}/all"
        # Also if this rank came out in trouble: only the words of the others tell who is the cause, and who is stuck with it.
        until = began + limit_s + self._grace_s
        if self._rank != 0:
            data = self._exchange.get(published, limit_s=max(0.0, until + 2 * self._grace_s - self._clock()))
            if data is not None:
                return _decode(data)
            until = self._clock()
        attendance = self._collect(part, word, began=began, until=until, limit_s=limit_s)
        if self._rank == 0:
            self._exchange.put(published, _encode(attendance))
        return attendance

    def _collect(self, part: str, word: RankResult, *, began: float, until: float, limit_s: float) -> Attendance:
        words, entered = {self._rank: word}, {self._rank}
        for rank in range(self._world_size):
            if rank == self._rank:
                continue
            key = f"{self._prefix}/{part}/word/{rank}"
            data = self._exchange.get(key, limit_s=max(0.0, until - self._clock()))
            if data is not None:
                words[rank] = _word(json.loads(data))
                entered.add(rank)
            elif self._exchange.get(f"{self._prefix}/{part}/in/{rank}", limit_s=0.0) is not None:
                entered.add(rank)
        seconds = round(self._clock() - began, 4)
        return Attendance(part, self._world_size, limit_s, words, frozenset(entered), seconds)


def _encode(attendance: Attendance) -> bytes:
    row = {
        "part": attendance.part,
        "world_size": attendance.world_size,
        "limit_s": attendance.limit_s,
        "words": {rank: asdict(word) for rank, word in attendance.words.items()},
        "entered": sorted(attendance.entered),
        "seconds": attendance.seconds,
    }
    return json.dumps(row).encode()


def _decode(data: bytes) -> Attendance:
    row = json.loads(data)
    words = {int(rank): _word(word) for rank, word in row["words"].items()}
    return Attendance(row["part"], row["world_size"], row["limit_s"], words, frozenset(row["entered"]), row["seconds"])


def _word(row: dict[str, object]) -> RankResult:
    return RankResult(PartState(str(row["state"])), row["figure"], str(row["detail"]), int(str(row["num_begun"])))
