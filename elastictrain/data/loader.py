"""Micro-batches of one rank in order, read ahead of the trainer."""

import atexit
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Condition, Thread
from types import TracebackType
from typing import Self

from elastictrain.data.assignment import Pass, Portion, Share, passes
from elastictrain.data.dataset import Batch, Dataset
from elastictrain.data.workers import WorkerPool, read_batch

_logger = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one rank reads in one pass. `step` counts from 0; the batch's first dimension follows `sample_ids`."""

    step: int
    portion: Portion
    sample_ids: tuple[int, ...]
    batch: Batch


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """How samples are read before they are needed."""

    workers: int
    """Processes; 0 for a thread of this process."""

    prefetch: int
    """Micro-batches that wait to be taken, at most."""

    pin_memory: bool
    """Copy batches to page-locked memory, from which a GPU can fetch them while it computes."""


class Loader:
    """Micro-batches from `first_step` (from 0) up to `last_step` (exclusive), once.

    Its only state is the step: a loader made with a later `first_step` yields exactly what remains. Reading starts with the
    context, or with the first `next`. Whatever the data set raises is raised by `next`.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        share: Share,
        seed: int,
        shuffle: bool,
        first_step: int,
        last_step: int,
        read_ahead: ReadAhead,
    ) -> None:
        self._dataset = dataset
        self._read_ahead = read_ahead
        self._passes = passes(
            first_step, last_step=last_step, share=share, num_samples=len(dataset), seed=seed, shuffle=shuffle
        )
        self._pool = WorkerPool(dataset, num_workers=read_ahead.workers) if read_ahead.workers else None
        self._changed = Condition()
        self._ready: deque[MicroBatch] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._closed = False
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MicroBatch:
        self._start()
        with self._changed:
            while not self._ready and not self._ended and not self._closed:
                self._changed.wait()
            if self._closed:
                raise RuntimeError("the loader is closed")
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """Stop reading; leaves no thread and no process. May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._pool is not None:
            self._pool.kill()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                _logger.warning(
                    "the data set has not returned a sample for %.0f s; its thread is left behind", _CLOSE_TIMEOUT_S
                )
        self._ready.clear()
        atexit.unregister(self.close)

    def _start(self) -> None:
        if self._thread is None and not self._closed:
            # At exit, multiprocessing would wait for ever for workers that ignore its SIGTERM: they must be gone by then.
            atexit.register(self.close)
            self._thread = Thread(target=self._run, name="data-read-ahead", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            for planned, batch in self._read_here() if self._pool is None else self._pool.read(self._passes):
                ready = {name: tensor.pin_memory() for name, tensor in batch.items()} if self._read_ahead.pin_memory else batch
                if not self._hand_over(MicroBatch(planned.step, planned.portion, planned.sample_ids, ready)):
                    return
        # The edge of a thread: the consumer raises it.
        except BaseException as error:  # noqa: BLE001
            self._error = error
        finally:
            if self._pool is not None:
                self._pool.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _read_here(self) -> Iterator[tuple[Pass, Batch]]:
        for planned in self._passes:
            yield planned, read_batch(self._dataset, planned.sample_ids)

    def _hand_over(self, micro_batch: MicroBatch) -> bool:
        """Queues a micro-batch, after waiting for room; false once the loader is closed."""
        with self._changed:
            while len(self._ready) >= self._read_ahead.prefetch and not self._closed:
                self._changed.wait()
            if self._closed:
                return False
            self._ready.append(micro_batch)
            self._changed.notify_all()
            return True
