"""Notes of a job for its next generation: in torchrun's store, or in a file beside the launcher. They survive the deletion of
the run folder."""

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from elastictrain.bounded_json import encode_record, parse_record
from elastictrain.checkpoint.earlier_commits import JobMemory
from elastictrain.checkpoint.exchange import gather_records
from elastictrain.checkpoint.save_interval import FailureCounts
from elastictrain.distributed.bounded import within
from elastictrain.fault.reasons import JOB_NAME, leave_text
from elastictrain.identity import Identity

_KEY = "elastictrain/job"
_LIMIT_S = 5.0
_INCARNATIONS = 64  # snapshots in host memory are of the last few generations


class JobNotes:
    """Nothing here raises or waits long: a run is right without its notes, unless its folder was deleted."""

    def __init__(self, store: dist.Store, identity: Identity) -> None:
        self._store = store
        self._identity = identity
        launcher = identity.launcher
        self._file = Path(launcher.folder) / JOB_NAME if launcher is not None else None
        self.memory = JobMemory()  # of the generations before this one, and of this one as far as it has come
        self.evaluated: int | None = None  # the same on all ranks: `JobMemory.evaluated`; None if the job has just begun

    def read(self) -> JobMemory:
        """The notes of earlier generations of this job; empty if they cannot be read."""
        text = within(_LIMIT_S, self._read) if self._identity.launched else None
        try:
            memory = parse_record(text or "", JobMemory)
        except ValueError:
            return JobMemory()
        return memory if memory.step >= 0 else JobMemory()

    def gather(self, group: dist.ProcessGroup | None) -> JobMemory:
        """The notes of the host that knows most of the newest generation: rank 0 may be on one that has just come. Collective:
        yes."""
        own = self.read() if self._identity.local_rank == 0 else JobMemory()
        self.memory = max(gather_records(own, group=group), key=_knowledge)
        self.evaluated = self.memory.evaluated if self.memory.incarnations else None
        return self.memory

    def begin(self, incarnation: str, *, step: int, tier: str) -> None:
        """Note that this generation resumes from `step`, which was in `tier`. Step 0 begins the run anew and deletes earlier
        notes."""
        before = max(self.read(), self.memory, key=_knowledge) if step else JobMemory()
        names = (*(one for one in before.incarnations if one != incarnation), incarnation)[-_INCARNATIONS:]
        # Earlier jobs may have evaluated.
        evaluated = before.evaluated if before.incarnations else step
        failures, launcher = before.failures, self._identity.launcher
        # torchrun starts workers again only after a failure; a launcher tells.
        if before.incarnations and (launcher is None or launcher.recovery is not None):
            failures = failures.failed(lost=tier == "storage")
        self.memory = JobMemory(names, max(step, before.step), before.snapshot_interval, evaluated, failures)
        self._write()

    def trained(self, failures: FailureCounts) -> None:
        """Note how long the job has trained by now."""
        self.memory = replace(self.memory, failures=failures)
        self._write()

    def learned(self, snapshot_interval: int) -> None:
        self.memory = replace(self.memory, snapshot_interval=snapshot_interval)
        self._write()

    def evaluation_done(self, step: int) -> None:
        self.memory = replace(self.memory, evaluated=step)
        self._write()

    def committed(self, step: int) -> None:
        self.memory = replace(self.memory, step=max(self.memory.step, step))
        self._write()

    def _write(self) -> None:
        if not self._identity.launched:
            return
        text = encode_record(self.memory).decode()
        if self._identity.rank == 0:
            within(_LIMIT_S, lambda: self._store.set(_KEY, text))
        if self._file is not None and self._identity.local_rank == 0:
            # Rank 0 may be on another host in the next generation.
            leave_text(self._file, text)

    def _read(self) -> str:
        if self._file is not None:
            return self._file.read_text() if self._file.exists() else ""
        return self._store.get(_KEY).decode() if self._store.check([_KEY]) else ""


def _knowledge(memory: JobMemory) -> tuple[tuple[str, ...], int, int]:
    # Notes of a host that was away are old; names of incarnations sort by their numbers.
    return memory.incarnations[-1:], len(memory.incarnations), memory.step
