"""Micro-batches of one rank in order, read ahead of the trainer by a thread or by worker processes.

A thread shares torch's generators with the trainer. Samples that may draw random numbers are therefore read by worker
processes, or by the trainer itself when it needs them: a device computes meanwhile what was launched before.

Workers receive sample ids, one micro-batch at a time. They are not torch's DataLoader: its handler of SIGCHLD raises in
whatever the trainer's main thread is doing (a save, say), and it notices a dead worker, or a request to end, only every five
seconds. Here both wake the waiting thread at once.
"""

import atexit
import logging
import multiprocessing
import os
import pickle
import signal
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from threading import Condition, Lock, Thread
from types import TracebackType
from typing import Self

import torch

# This import lets connections send tensors through shared memory.
import torch.multiprocessing
from torch import Tensor

from elastictrain.data.assignment import Pass
from elastictrain.data.dataset import Batch, map_tensors
from elastictrain.data.samples import SampleReader
from elastictrain.errors import ElasticTrainError
from elastictrain.processes import follow_parent

_logger = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 5.0
_RELEASE_TIMEOUT_S = 1.0  # a reader that takes longer is not waited for: the processes are started anew
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# One in work and one waiting: few enough that neither side ever blocks on a full pipe.
_PER_WORKER = 2


@dataclass(frozen=True, slots=True)
class MicroBatch(Pass):
    """What one rank reads in one pass."""

    batch: Batch  # its first dimension follows `sample_ids`

    @classmethod
    def read(cls, reader: SampleReader, planned: Pass) -> Self:
        """Raises: as `SampleReader.read`."""
        return cls(
            planned.step, planned.portion, planned.sample_ids, reader.read(planned.sample_ids, first=planned.portion.first)
        )


class Loader:
    """Yields the micro-batches of `planned`, once and in order. `next` raises what the data set raises.

    The only state is the step: a loader with the passes from a later step on yields exactly what remains. Reading starts with
    the context, or with the first `next`.
    """

    def __init__(
        self,
        reader: SampleReader,
        planned: Iterator[Pass],
        *,
        workers: int,
        prefetch: int,
        pin_memory: bool = False,
        pool: "WorkerPool | None" = None,
    ) -> None:
        """`workers`: processes that read, 0 for a thread of this one, or for none of them where the reader has a seed;
        `prefetch`: most micro-batches that wait to be taken.

        `pin_memory`: batches are copied to page-locked memory, from which a GPU can fetch them while it computes. `pool`: the
        processes of another loader of this reader, which has been `release`d.
        """
        self._reader = reader
        self._passes = planned
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        self._pool = pool or (WorkerPool(reader, num_workers=workers) if workers else None)
        self._source = self._read()
        self._ahead = self._pool is not None or reader.seed is None
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
        if not self._ahead:
            micro_batch = None if self._closed else next(self._source)
            if micro_batch is None or self._closed:
                raise RuntimeError("the loader is closed")
            return micro_batch
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._closed)
            if self._closed:
                raise RuntimeError("the loader is closed")
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """Stop reading; end the processes, and the thread unless the data set hangs. May be called again."""
        self.interrupt()
        if self._pool is not None:
            # This wakes a thread that waits for them.
            self._pool.kill()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                _logger.warning("the data set returns no sample for %.0f s; its thread is left behind", _CLOSE_TIMEOUT_S)
        if self._pool is not None and (self._thread is None or not self._thread.is_alive()):
            self._pool.close()
        self._ready.clear()
        atexit.unregister(self.close)

    def interrupt(self) -> None:
        """Have `next` raise, in any thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def release(self) -> "WorkerPool | None":
        """Stop reading, and return the processes for another loader of the dataset; None if there are none that are well."""
        pool, self._pool = self._pool, None
        self.interrupt()
        if self._thread is not None:
            self._thread.join(_RELEASE_TIMEOUT_S)
        late = self._thread is None or self._thread.is_alive()
        if pool is not None and (late or self._error is not None or pool.killed):
            pool.kill()
            pool = None
        self.close()
        return pool

    def _start(self) -> None:
        if self._thread is None and self._ahead and not self._closed:
            # At exit, multiprocessing would wait for ever for workers that ignore its SIGTERM: they must end before.
            atexit.register(self.close)
            if self._pool is not None:
                self._pool.start()
            self._thread = Thread(target=self._run, name="data-read-ahead", daemon=True)
            self._thread.start()

    def _read(self) -> Iterator[MicroBatch]:
        reader, pool = self._reader, self._pool
        here = ((planned, reader.read(planned.sample_ids, first=planned.portion.first)) for planned in self._passes)
        for planned, batch in here if pool is None else pool.read(self._passes):
            ready = map_tensors(batch, Tensor.pin_memory) if self._pin_memory else batch
            yield MicroBatch(planned.step, planned.portion, planned.sample_ids, ready)

    def _run(self) -> None:
        try:
            for micro_batch in self._source:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._ready) < self._prefetch or self._closed)
                    if self._closed:
                        return
                    self._ready.append(micro_batch)
                    self._changed.notify_all()
        # The edge of a thread: `next` raises it.
        except BaseException as error:  # noqa: BLE001
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class _Failure:
    error: Exception | None
    text: str


_Worker = tuple[SpawnProcess, Connection]


class WorkerPool:
    """Workers of one loader after the other. The kernel ends them with the thread that has called `start`. One thread at a time
    calls everything else, except `kill`."""

    def __init__(self, reader: SampleReader, *, num_workers: int) -> None:
        self._reader = reader
        self._num_workers = num_workers
        self._workers: list[_Worker] = []
        self._asked: deque[_Worker] = deque()  # workers that have not answered yet, in the order of the answers
        self._lock = Lock()
        self._killed = False

    def read(self, passes: Iterator[Pass]) -> Iterator[tuple[Pass, Batch]]:
        """Yield batches in order; workers take turns. Raises: the data set's error; ElasticTrainError if a worker died."""
        if not self.start():
            return
        # What another loader has asked for, and not taken.
        while self._asked:
            self._receive()
        in_flight: deque[Pass] = deque()
        for number, planned in enumerate(passes):
            if len(in_flight) == _PER_WORKER * self._num_workers:
                yield in_flight.popleft(), self._receive()
            worker = self._workers[number % self._num_workers]
            with suppress(OSError):  # the wait for its answer reports a dead worker
                worker[1].send((planned.sample_ids, planned.portion.first))
            in_flight.append(planned)
            self._asked.append(worker)
        while in_flight:
            yield in_flight.popleft(), self._receive()

    def start(self) -> bool:
        """Start the workers, unless they run already; False if `kill` came first."""
        if self._workers:
            return not self._killed
        # Python 3.11 unblocks SIGINT and SIGTERM in the calling thread when it starts its resource tracker: start that first.
        resource_tracker.ensure_running()
        # Workers inherit the mask: a SIGTERM to the whole process group cannot kill one that is still starting.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        # Forking would copy the trainer's CUDA context, threads, sockets and signal handlers into every worker.
        context = multiprocessing.get_context("spawn")
        try:
            for number in range(self._num_workers):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(self._reader, theirs, os.getpid()), name=f"data-worker-{number}", daemon=True
                )
                with self._lock:
                    if self._killed:
                        return False
                    process.start()
                    self._workers.append((process, ours))
                theirs.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return True

    def _receive(self) -> Batch:
        """The answer that is due next."""
        process, connection = self._asked.popleft()
        # Wait for the end of the process, not only of the connection: a child of the worker may hold that open.
        ready = wait([connection, process.sentinel])
        try:
            if connection not in ready:
                raise EOFError
            answer: Batch | _Failure = connection.recv()
        except (OSError, EOFError):
            process.join()
            name, code = f"{process.name} (pid {process.pid})", process.exitcode
            if code is None or code >= 0:
                message = f"{name} must run as long as the loader, but ended with exit code {code}; see its output"
                raise ElasticTrainError(message) from None
            hints = {
                signal.SIGKILL: "; if the host ran out of memory, lower `data.workers` or `data.prefetch`",
                signal.SIGBUS: "; if /dev/shm is full, enlarge it, or lower `data.workers`",
            }
            death = signal.Signals(-code)
            raise ElasticTrainError(f"{name} died of {death.name}{hints.get(death, '')}") from None
        if isinstance(answer, _Failure):
            error = answer.error or ElasticTrainError("a data worker failed")
            error.add_note(f"in a data worker:\n{answer.text}")
            raise error
        return answer

    @property
    def killed(self) -> bool:
        return self._killed

    def kill(self) -> None:
        """Kill the workers at once, from any thread; wakes the thread that waits for them. They hold nothing to lose."""
        with self._lock:
            self._killed = True
            for process, _ in self._workers:
                process.kill()

    def close(self) -> None:
        """Kill the workers and wait until they have ended."""
        self.kill()
        for process, connection in self._workers:
            process.join()
            connection.close()


def _serve(reader: SampleReader, connection: Connection, parent: int) -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    if not follow_parent(parent, with_signal=signal.SIGKILL):
        return
    torch.set_num_threads(1)
    while True:
        try:
            sample_ids, first = connection.recv()
        except (EOFError, OSError):
            return
        answer: Batch | _Failure
        try:
            answer = reader.read(sample_ids, first=first)
        # The edge of a process: the loader raises it again.
        except Exception as error:  # noqa: BLE001
            answer = _Failure(None, traceback.format_exc())
            # The exception is sent if it survives pickling; its text is sent in any case.
            with suppress(Exception):
                copy = pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
                answer = _Failure(copy if isinstance(copy, Exception) else None, answer.text)
        try:
            connection.send(answer)
        except OSError:
            return
