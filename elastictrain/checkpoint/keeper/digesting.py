"""Digests of snapshots, computed one after the other beside whatever else the keeper does."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from elastictrain.checkpoint.keeper.pins import Pinned
from elastictrain.checkpoint.memory.records import compute_digests, load_digests, store_digests

logger = logging.getLogger(__name__)


class Digesting:
    """One thread; `done` is called in it, with the snapshot and its digests, or without them where that did not work."""

    def __init__(self, done: Callable[[Pinned], None]) -> None:
        self._done = done
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="digest")

    def begin(self, pinned: Pinned) -> None:
        """Have it digested, unless its digests are kept already."""
        self._threads.submit(self._digest, pinned)

    def close(self) -> None:
        """Nothing more is begun, and what is under way is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _digest(self, pinned: Pinned) -> None:
        digests = None
        try:
            digests = load_digests(pinned.slot.path, pinned.facts)
            if digests is None:
                digests = compute_digests(pinned.slot, pinned.layout)
                store_digests(pinned.slot.path, pinned.facts, digests)
        except OSError as error:
            logger.warning("the digests of %s cannot be kept: %s", pinned.slot.path, error)
        except Exception:
            # The edge of the thread. Digests are computed once more when it is written.
            logger.exception("%s cannot be digested", pinned.slot.path)
        self._done(replace(pinned, digests=digests))
