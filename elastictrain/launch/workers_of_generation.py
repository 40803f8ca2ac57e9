"""The workers of one generation on one host, and how it ended for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

from elastictrain.fault.reasons import Reason, SlowRank
from elastictrain.launch.worker_process import WorkerProcess

_EXIT_FAILED = 1


@dataclass(frozen=True, slots=True)
class WorkersEnd:
    code: int  # 0 if all ended well; negative: the fork server was ended by this signal, or the workers were killed
    codes: Mapping[int, int]  # by local rank, of those that failed first; negative for a signal
    finished_step: int = 0  # the newest one of any worker
    begun: int | None = None  # the step whose state was restored; None if the first step was not done
    reasons: tuple[Reason, ...] = ()  # that the workers, their monitor or the fork server have left, by rank


@dataclass(slots=True)
class WorkersOfGeneration:
    """Those of the present generation. What they have left of earlier ones is forgotten."""

    order: int
    workers: list[WorkerProcess] = field(default_factory=list)  # by local rank
    reused: bool = False  # whether all of them had built what they need before
    started: bool = False  # whether the fork server has carried out the order
    unforked: str = ""  # why they are no forks; empty if they are
    failed: dict[int, int] = field(default_factory=dict)  # exit codes of the workers that failed first, by local rank
    unknown: list[psutil.Process] = field(default_factory=list)  # children of a server that was killed before it told of them
    killed: list[psutil.Process] = field(default_factory=list)
    killed_s: float | None = None
    reason: Reason | None = None  # of the fork server

    @property
    def silent(self) -> list[int]:
        """Local ranks that have not yet gone to meet the other ranks."""
        return [rank for rank, one in enumerate(self.workers) if not one.introduced]

    @property
    def attached(self) -> bool:
        """Whether the groups are made on this host."""
        return all(one.attached for one in self.workers)

    @property
    def begun(self) -> int | None:
        """The step whose state was restored; None if the first step is not done."""
        return next((one.begun for one in self.workers if one.begun is not None), None)

    @property
    def slow(self) -> SlowRank | None:
        """For which rank the workers ask to leave this host out; None if they do not."""
        return next((one.slow for one in self.workers if one.slow is not None), None)

    @property
    def codes(self) -> dict[int, int]:
        """Exit codes that explain the end; where no process failed by itself, those with which workers left their groups."""
        left = {rank: one.waiting for rank, one in enumerate(self.workers) if one.waiting}
        return self.failed or left

    def end(self, code: int) -> WorkersEnd:
        """How it ended; `code` counts where no worker failed."""
        reasons = {one.rank: one for one in (self.reason, *(one.reason for one in self.workers)) if one is not None}
        monitors = [one.monitor for one in self.workers if one.monitor is not None]
        for reason, own_counts in (pair for one in monitors for pair in one.reasons):
            if not (own_counts and reason.rank in reasons):
                reasons[reason.rank] = reason
        finished_step, codes = max((one.finished_step() for one in monitors), default=0), self.codes
        in_order = tuple(reasons[rank] for rank in sorted(reasons))
        return WorkersEnd(_EXIT_FAILED if codes else code, codes, finished_step, self.begun, in_order)
