"""Steps that this host has no part in, until the leader is told. Nobody waits for that: it may never begin them."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastictrain.checkpoint.keeper.hosts import Hosts
from elastictrain.checkpoint.keeper.jobs import Refusal
from elastictrain.errors import ElasticTrainError, StorageError
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often it is looked whether the leader has begun one of them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Unsaid:
    refusal: Refusal
    hosts: Hosts
    since_s: float

    @property
    def too_late(self) -> bool:
        return self.refusal.patience.left_s(self.since_s) <= 0


class Refusals:
    """All methods but `hurry` are called by the saver's thread."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._unsaid: list[_Unsaid] = []

    def __bool__(self) -> bool:
        return bool(self._unsaid)

    def add(self, refusal: Refusal) -> None:
        """One more; it is told by the next `say` that finds its step begun."""
        hosts = Hosts(self._store, refusal.incarnation, refusal.step, first_rank=refusal.first_rank, clock=self._clock)
        with self._lock:
            self._unsaid.append(_Unsaid(refusal, hosts, self._clock()))

    def hurry(self) -> None:
        """The group that took the snapshots is gone."""
        with self._lock:
            for one in self._unsaid:
                one.refusal.patience.hurry()

    def drop(self, incarnation: str, step: int) -> None:
        """This host has the step after all, or nobody asks for it any more."""
        with self._lock:
            self._unsaid = [one for one in self._unsaid if (one.refusal.incarnation, one.refusal.step) != (incarnation, step)]

    def say(self, *, over: set[str]) -> None:
        """Tell the leader of what it has begun, in attempts that are not `over`, which those are from then on."""
        for one in list(self._unsaid):
            refusal = one.refusal
            try:
                if one.hosts.find_begin(over=over) is not None:
                    one.hosts.say_failed(refusal.reason)
                    over.add(one.hosts.attempt)
                    # Several ranks may lack it.
                    self.drop(refusal.incarnation, refusal.step)
                    continue
            except StorageError as error:
                logger.warning("whether step %d is begun cannot be seen yet: %s", refusal.step, error)
            except ElasticTrainError:
                # It will not be begun any more.
                self.drop(refusal.incarnation, refusal.step)
                continue
            except Exception:
                # The edge of the thread: the next saves are more than this word.
                logger.exception("the leader cannot be told of step %d", refusal.step)
                self.drop(refusal.incarnation, refusal.step)
                continue
            if one.too_late:
                self.drop(refusal.incarnation, refusal.step)
