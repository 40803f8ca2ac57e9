"""Writes snapshots to storage and commits them, one save after another, in a thread of its own."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from msgspec.structs import replace

from elastictrain.checkpoint.folders import ROOT, Listing, clear_target, discard_files, list_checkpoints
from elastictrain.checkpoint.layout import Item
from elastictrain.checkpoint.lineage import Fence
from elastictrain.checkpoint.manifest import Manifest
from elastictrain.checkpoint.memory.layout import RankDigests, RankPart, joined
from elastictrain.checkpoint.retention import Pruner, read_manifest
from elastictrain.checkpoint.run_folder import RunFolder
from elastictrain.checkpoint.saver.commit_protocol import CommitProtocol, RefusedSave, RefusedSaves
from elastictrain.checkpoint.saver.pending_snapshots import Cause, LeasedSnapshot, SaveJob, cause_of
from elastictrain.checkpoint.saver.process import SaverConfig
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.checkpoint.writer import ByteReader, build_manifest, check_files, commit, write_file
from elastictrain.errors import (
    CheckpointError,
    ElasticTrainError,
    InvalidCheckpointError,
    UntrustedCheckpointError,
)
from elastictrain.events import CheckpointSaved, CheckpointsPruned, Event
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often it is looked whether the leader has begun a step that this host has refused."""

STREAMS = 8
"""Files that are written at once."""


@dataclass(frozen=True, slots=True)
class SaveCallbacks:
    """What a writer reports; called in its thread."""

    record: Callable[[str, Event], None]
    """With the incarnation that the event belongs to."""

    written: Callable[[SaveJob], None]
    """The snapshots are not needed any more."""

    saved: Callable[[SaveJob, str, int], None]
    """With the name of the checkpoint and its bytes."""

    failed: Callable[[SaveJob, str, Cause], None]


class SnapshotWriter:
    """Carries out jobs."""

    def __init__(
        self,
        store: Store,
        config: SaverConfig,
        reports: SaveCallbacks,
        *,
        clock: Callable[[], float] = time.monotonic,
        signing: SigningKey | None = None,
    ) -> None:
        """`signing` signs what is saved."""
        self._signing = signing
        self._store = store
        self._run_folder = RunFolder(store)
        self._config = config
        self._reports = reports
        self._clock = clock
        self._pruner = Pruner(store, keep_last=config.keep_last, keep_every=config.keep_every, signing=signing)
        self._fence = Fence(store)
        self._jobs: queue.Queue[SaveJob | RefusedSave | None] = queue.Queue()
        self._current: SaveJob | None = None
        self._current_since_s = 0.0
        self._lock = threading.Lock()
        self._unfinished: list[SaveJob | RefusedSave] = []
        """Guarded by the lock."""
        self._refused_saves = RefusedSaves(store, clock=clock)
        self._over: set[str] = set()
        """Attempts of several hosts that have failed, or that this host has done its part of."""

        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)

    def start(self) -> None:
        """Begin to wait for jobs."""
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a job is waiting or being carried out."""
        return bool(self._unfinished)

    @property
    def under_way(self) -> tuple[SaveJob, float] | None:
        """The job that is being carried out, and for how many seconds."""
        current = self._current
        return (current, self._clock() - self._current_since_s) if current is not None else None

    def begin(self, job: SaveJob | RefusedSave) -> None:
        """Carry out a job when its turn comes."""
        with self._lock:
            self._unfinished.append(job)
        self._jobs.put(job)

    def shorten_deadline(self) -> None:
        """The group that took the snapshots is gone: do not wait long for other hosts, in none of the jobs that are begun."""
        with self._lock:
            for job in self._unfinished:
                job.deadline.shorten()
        self._refused_saves.shorten_deadline()

    def close(self) -> None:
        """End when everything that was begun is done."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=LOOK_S if self._refused_saves else None)
            except queue.Empty:
                self._refused_saves.report(over=self._over)
                continue
            if job is None:
                return
            try:
                if isinstance(job, RefusedSave):
                    self._refused_saves.add(job)
                    self._refused_saves.report(over=self._over)
                else:
                    self._current_since_s = self._clock()
                    self._current = job
                    self._carry_out(job)
            except Exception as error:
                # The edge of the thread: whatever it is, the run goes on and the next save is tried.
                if not isinstance(error, ElasticTrainError):
                    logger.exception("step %d could not be saved", job.step)
                if isinstance(job, SaveJob):
                    self._reports.failed(job, _reason(error), cause_of(error))
            finally:
                self._current = None
                with self._lock:
                    self._unfinished.remove(job)

    def _carry_out(self, job: SaveJob) -> None:
        protocol = CommitProtocol(
            self._store, job.incarnation, job.step, first_rank=job.first.rank, clock=self._clock, signing=self._signing
        )
        if job.leader:
            self._save(job, protocol)
            return
        # All its ranks have the step now, maybe for another attempt.
        self._refused_saves.drop(job.incarnation, job.step)
        try:
            self._take_part(job, protocol)
        except BaseException as error:
            # The leader deletes: it may have been told that these files are written, and commit them.
            protocol.refuse(_reason(error), over=self._over)
            raise
        finally:
            self._over.add(protocol.attempt)

    def _take_part(self, job: SaveJob, protocol: CommitProtocol) -> None:
        """Write this host's files; the leader commits."""
        self._check_run()
        known = self._saved_before(job, list_checkpoints(self._store))
        if known is not None:
            self._reports.saved(job, known[0], known[1].size_bytes)
            return
        # The leader may wait in an older step for a part that does not come.
        folder = protocol.wait_for_prepared(
            job.deadline, over=self._over, meanwhile=lambda: self._refused_saves.report(over=self._over)
        )
        parts = self._write(job, folder)
        self._reports.written(job)
        protocol.acknowledge(parts)

    def _save(self, job: SaveJob, protocol: CommitProtocol) -> None:
        """Write this host's files, wait for those of the others, and commit."""
        began = self._clock()
        self._check_run()
        listing = list_checkpoints(self._store)
        known = self._saved_before(job, listing)
        if known is not None:
            self._reports.saved(job, known[0], known[1].size_bytes)
            self._finish(job, *known, listing, protocol)
            return
        if job.alone:
            folder = clear_target(self._store, listing, step=job.step)
        else:
            folder = protocol.prepare(lambda: clear_target(self._store, listing, step=job.step), over=self._over)
        prepared = self._clock()
        committing = False
        try:
            parts = self._write(job, folder)
            self._reports.written(job)
            wrote_s = self._clock() - prepared
            others = protocol.wait_for_acknowledgements(job.first.world_size, own=parts, deadline=job.deadline, wrote_s=wrote_s)
            seconds = {"prepare": prepared - began, "write": self._clock() - prepared}
            manifest = self._manifest(job, [*parts, *others])
            check_files(self._store, manifest, folder=folder)
            self._check_run()
            self._fence.check(job.incarnation, step=job.step)
            committing = True
            commit(self._store, manifest, folder=folder, signing=self._signing)
        except BaseException:
            self._over.add(protocol.attempt)
            if not committing:
                discard_files(self._store, folder, incarnation=job.incarnation)
            if not job.alone:
                protocol.clear()
            raise
        seconds["commit"] = self._clock() - began - sum(seconds.values())
        size_bytes = manifest.size_bytes
        self._reports.record(
            job.incarnation,
            CheckpointSaved(
                step=job.step, checkpoint=folder, reason=job.first.reason or "flush", bytes=size_bytes, seconds=seconds
            ),
        )
        self._reports.saved(job, folder, size_bytes)
        self._finish(job, folder, manifest, listing, protocol)

    def _finish(self, job: SaveJob, folder: str, manifest: Manifest, listing: Listing, protocol: CommitProtocol) -> None:
        """It is committed: remove what is of no use any more."""
        pruned = self._pruner.tidy(
            folder,
            manifest=manifest,
            listing=listing,
            time_s=time.time(),
            fence=self._fence,
        )
        if pruned:
            self._reports.record(job.incarnation, CheckpointsPruned(checkpoints=pruned))
        if not job.alone:
            protocol.clear()

    def _check_run(self) -> None:
        """A write would make the folder of a run again that somebody has deleted."""
        if not self._run_folder.is_there():
            raise CheckpointError(f"{self._store.url} was deleted")

    def _saved_before(self, job: SaveJob, listing: Listing) -> tuple[str, Manifest] | None:
        """The checkpoint and its manifest, if a saver that was killed has committed this very save or a later one."""
        for folder in listing.folders:
            if folder.step >= job.step and folder.has_manifest and not folder.quarantined:
                try:
                    manifest = read_manifest(self._store, folder.name, signing=self._signing)
                except UntrustedCheckpointError:
                    # Not by a saver of this run.
                    continue
                if manifest is not None and manifest.incarnation == job.incarnation:
                    return folder.name, manifest
        return None

    def _write(self, job: SaveJob, folder: str) -> list[RankPart]:
        """All files of this host's ranks, durable, their bytes the ones that were digested when they came."""
        tasks: list[tuple[LeasedSnapshot, int]] = [
            (leased, index) for leased in job.snapshots for index in range(len(leased.layout.template))
        ]

        def write_one(task: tuple[LeasedSnapshot, int]) -> RankDigests:
            leased, index = task
            file = leased.layout.files(incarnation=job.incarnation, rank=leased.facts.rank)[index]
            starts = {placed.item.key: leased.layout.starts[index] + placed.start for placed in file.items}
            longest = max((chunk.size_bytes for placed in file.items for chunk in placed.chunks), default=0)
            buffer = memoryview(bytearray(longest))

            def source(item: Item) -> ByteReader:
                start = starts[item.key]

                def read(begin: int, end: int) -> memoryview:
                    leased.slot.read_into(buffer[: end - begin], start=start + begin)
                    return buffer[: end - begin]

                return read

            sha256 = self._signing is not None
            return write_file(self._store, file, prefix=f"{ROOT}/{folder}", source=source, sha256=sha256)

        with ThreadPoolExecutor(max(1, min(STREAMS, len(tasks))), thread_name_prefix="save") as pool:
            results = list(pool.map(write_one, tasks))
        parts = []
        for leased in job.snapshots:
            digests = joined([of_file for (owner, _), of_file in zip(tasks, results, strict=True) if owner is leased])
            if leased.digests is not None and replace(digests, sha256=()) != leased.digests:
                raise InvalidCheckpointError(
                    f"{leased.slot.path} is not what it was when it was taken: host memory is damaged, or somebody wrote to it"
                )
            parts.append(RankPart(leased.facts.rank, leased.layout, digests))
        return parts

    def _manifest(self, job: SaveJob, parts: Sequence[RankPart]) -> Manifest:
        first = job.first
        facts = Manifest(
            step=first.step,
            world_size=first.world_size,
            incarnation=first.incarnation,
            created=first.created,
            config_digest=first.config_digest,
            versions=self._config.versions,
            state=first.state,
        )
        return build_manifest(parts, facts=facts)


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, ElasticTrainError) else f"{type(error).__name__}: {error}"
