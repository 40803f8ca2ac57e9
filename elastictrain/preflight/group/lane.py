"""One thread in which all collectives run, so that whoever waits for one need not wait for ever."""

import json
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


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
