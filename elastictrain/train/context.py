"""What all parts of one generation share."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from elastictrain.bytecode import bytecode_kept
from elastictrain.checkpoint.exchange import gather_json
from elastictrain.config.composed import RunConfig
from elastictrain.data.assignment import Pass, Share, passes
from elastictrain.data.mixture import Mixture
from elastictrain.data.samples import SampleReader
from elastictrain.distributed.device import Backend
from elastictrain.distributed.generation import AgreedGeneration
from elastictrain.distributed.group import Group
from elastictrain.distributed.store import BoundedStore
from elastictrain.errors import StopRequestedError, StorageError
from elastictrain.events import Journal, event_time
from elastictrain.fault.stop import StopRequest
from elastictrain.identity import Identity
from elastictrain.lease.holder import Lease
from elastictrain.liveness.heartbeats import HeartbeatStore
from elastictrain.liveness.progress import Phase, ProgressTracker
from elastictrain.start_times import StartTimes
from elastictrain.storage.store import Store
from elastictrain.torch_private import prepare_compiler
from elastictrain.train.job_notes import JobNotes
from elastictrain.train.task import Task

StopRequested = Callable[[], StopRequest | None]

_SHARE_OF_THE_END = 0.25
_PREPARING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Samples:
    train: SampleReader
    held_out: SampleReader | None
    digest: str  # names the content of token files; empty for a task's own datasets
    mixture: Mixture | None = None


def left_s(request: StopRequest | None, *, now_s: float, grace_s: float) -> float | None:
    """Seconds left to wait for a save, less the time that the end of a run needs; None: no limit. Times are monotonic."""
    if request is None or request.deadline_s is None:
        return None
    # A short notice leaves the end of the run a part of it instead of the whole grace.
    margin_s = min(grace_s, _SHARE_OF_THE_END * max(0.0, request.deadline_s - request.since_s))
    return request.deadline_s - margin_s - now_s


@dataclass(slots=True)
class TrainContext:
    """The state of one generation: made by the checks of a rank alone, completed when the ranks meet and when the group is
    made."""

    config: RunConfig
    identity: Identity
    tracker: ProgressTracker
    stop_request: StopRequested
    check_attached: Callable[[], None]  # raises DetachedError once the launcher has ended the generation
    backend: Backend
    task: Task
    samples: Samples
    store: Store
    times: StartTimes = field(default_factory=StartTimes)
    began: float = field(default_factory=event_time, init=False)  # unix time
    rendezvous: BoundedStore = field(init=False)  # the store that the ranks meet through
    job: JobNotes = field(init=False)
    lease: Lease | None = field(default=None, init=False)  # rank 0's, where no launcher runs: launchers hold their own
    generation: AgreedGeneration = field(init=False)
    shared: dist.Store = field(init=False)  # the store that the ranks meet through, under this generation's prefix
    heartbeats: HeartbeatStore = field(init=False)
    journal: Journal = field(init=False)
    # why this rank's records cannot be stored; ends the rank, but only after the others know its host
    unwritable: StorageError | None = field(default=None, init=False)
    group: Group = field(init=False)
    await_group: Callable[[], None] = field(default=lambda: None, init=False)  # for all but `group.control`; may raise

    @property
    def on_gpu(self) -> bool:
        """Whether this rank trains on a GPU."""
        return self.backend == "nccl" or self.config.parallel.device == "cuda"

    def prepare_compiler(self) -> None:
        """Before this process compiles, if it does: at once where that has been done. Any thread calls it."""
        if self.config.train.compile:
            with _PREPARING, bytecode_kept():
                prepare_compiler()

    @property
    def share(self) -> Share:
        """What this rank reads of each step."""
        train = self.config.train
        return Share(train.global_batch, train.micro_batch, self.identity.world_size, self.identity.rank)

    def plan_passes(self, first_step: int, last_step: int) -> Iterator[Pass]:
        """What this rank reads in steps [first_step, last_step), counted from 0."""
        return passes(
            first_step,
            last_step=last_step,
            share=self.share,
            num_samples=len(self.samples.train),
            seed=self.config.run.seed,
            shuffle=self.config.data.shuffle,
            mixture=self.samples.mixture,
        )

    def for_next(self, identity: Identity) -> "TrainContext":
        """The state in which the next generation begins in this process: checked alone, with another rank perhaps."""
        return replace(self, identity=identity, times=StartTimes())

    @contextmanager
    def timed(self, name: str, phase: Phase | None = None) -> Iterator[None]:
        """Enter `phase`; the block, and what came since the part before it, is this part of the start."""
        if phase is not None:
            self.tracker.set_phase(phase)
        yield
        self.times.end_part(name)

    def leave_if_asked(self) -> None:
        """Raises: StopRequestedError, DetachedError."""
        self.check_attached()
        if (request := self.stop_request()) is not None:
            raise StopRequestedError(f"asked to stop ({request.reason}) before training began")

    def left_s(self) -> float | None:
        """Seconds for which this rank may still wait for a save; None: no limit."""
        return left_s(self.stop_request(), now_s=time.monotonic(), grace_s=self.config.fault.shutdown_grace_s)

    def any_stop_reason(self) -> str:
        """The first rank's reason to stop; empty if no rank has one. Collective: yes."""
        request = self.stop_request()
        reasons = gather_json(request.reason if request is not None else "", group=self.group.control)
        return next((str(reason) for reason in reasons if reason), "")
