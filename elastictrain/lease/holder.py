"""Takes the lease of a run, writes its heartbeats, and notices when another run has taken over. Acts."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

from elastictrain.errors import RunHeldError, StorageError
from elastictrain.lease.chain import BEAT_S, LAUNCHER, Chain, LeaseClaim, is_held, write_newest_hint

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_GIVE_BACK_S = 5.0


@dataclass(frozen=True, slots=True)
class Waiting:
    on_held: Literal["stop", "wait"]
    url: str
    tell: Callable[[str], None]
    poll: Callable[[], None] = lambda: None  # called about once a second; may raise to leave early
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def wait_until_free(chain: Chain, owner: str, waiting: Waiting) -> LeaseClaim:
    """Wait until no owner but `owner` holds the newest generation; return that.

    Raises: RunHeldError if another owner lives and `on_held` is "stop"; StorageError; what `poll` raises.
    """
    claim = chain.newest()
    before, since_s, told = chain.signs(claim), waiting.clock(), False
    now = before
    while True:
        if claim.over or claim.owner == owner or (not claim.owner and owner == LAUNCHER):
            return claim
        held = is_held(before, now, watched_s=waiting.clock() - since_s)
        if held is False:
            return claim
        if held:
            created_s = chain.created_s(claim.number)
            since = "" if created_s is None else f" since {datetime.fromtimestamp(created_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
            sentence = (
                f"another run trains in {waiting.url}: {claim}{since}. End that one first, set `run.dir` to another folder, or "
                "set `run.on_held=wait`"
            )
            if waiting.on_held == "stop":
                raise RunHeldError(sentence)
            if not told:
                waiting.tell(f"{sentence}. Waiting until it ends, as `run.on_held` is wait")
            before, since_s, told = now, waiting.clock(), True
        waiting.poll()
        waiting.sleep(_LOOK_S)
        following = chain.read(claim.number + 1)
        if following is not None:
            claim, since_s = chain.newest(), waiting.clock()
            before = now = chain.signs(claim)
        else:
            now = chain.signs(claim)


def take(
    chain: Chain,
    draft: LeaseClaim,
    waiting: Waiting,
    *,
    writers: tuple[str, ...],
    on_lost: Callable[[str], None],
    used: int = 0,
) -> "Lease":
    """Create the next generation, `draft` with its number, once no other owner holds the run. Raises as `wait_until_free`.
    The owner is the same for all starts by one torchrun. It is dead when all `writers`, its processes, are."""
    while True:
        before = wait_until_free(chain, draft.owner, waiting)
        # Written first: an owner without a heartbeat would be taken for a silent one.
        chain.write_sign(draft.owner, beat=0, gone=False, writers=writers)
        claim = replace(draft, number=max(chain.last_number(before), used) + 1, lines=(draft.owner,))
        if chain.create(claim):
            break
    if before.owner != draft.owner:
        chain.remove_signs(before)
    return Lease(chain, claim, writers=writers, on_lost=on_lost)


class Lease:
    """A generation of this run, held until it is given back or another owner takes over."""

    def __init__(
        self,
        chain: Chain,
        claim: LeaseClaim,
        *,
        writers: tuple[str, ...],
        on_lost: Callable[[str], None],
        beat_s: float = BEAT_S,
    ) -> None:
        self._chain = chain
        self._owner, self._writers = claim.owner, writers
        self._newest = claim
        self.number = claim.number
        self._on_lost = on_lost
        self._beat_s = beat_s
        self._beat = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def close(self, *, give_back: bool) -> None:
        """Stop the heartbeats. `give_back`: this run has ended in an orderly way, and the next start need not wait."""
        self._closed.set()
        self._thread.join(_GIVE_BACK_S)
        if not give_back or self._thread.is_alive():
            return
        try:
            if self._taken_by() is None:
                self._beat_once(gone=True)
        except StorageError as error:
            logger.warning("lease not released; the next start may wait for it: %s", error)

    def _run(self) -> None:
        try:
            write_newest_hint(self._chain.volatile, self.number)
        except StorageError as error:
            logger.info("the next start has to list the generations: %s", error)
        while not self._closed.wait(self._beat_s):
            try:
                # In this order: a process that was frozen must not write a heartbeat after it has lost the lease.
                taken = self._taken_by()
                if taken is not None:
                    self._on_lost(f"the lease of this run was lost: {taken} has taken over, and nothing more is saved here")
                    return
                self._beat_once(gone=False)
            except StorageError as error:
                logger.warning("cannot store the heartbeat of the lease: %s", error)
            except Exception:
                # The edge of the thread: without heartbeats this run would be taken for dead.
                logger.exception("the lease cannot be kept up")

    def _beat_once(self, *, gone: bool) -> None:
        """Only if the generation still exists: a write would make a deleted folder again. Raises: StorageError."""
        self._beat += 1
        if self._chain.read(self.number) is not None:
            self._chain.write_sign(self._owner, beat=self._beat, gone=gone, writers=self._writers)

    def _taken_by(self) -> LeaseClaim | None:
        """The newest generation, if another owner has it. Raises: StorageError."""
        while self._newest.owner == self._owner:
            following = self._chain.read(self._newest.number + 1)
            if following is None:
                return None
            self._newest = following
        return self._newest
