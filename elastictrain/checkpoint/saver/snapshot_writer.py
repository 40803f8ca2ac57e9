"""Writes snapshots to storage and commits them, one save after another, in a thread of its own."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from msgspec.structs import replace

from elastictrain.checkpoint.folders import ROOT, Listing, clear_target, discard_files, list_checkpoints
from elastictrain.checkpoint.layout import Item
from elastictrain.checkpoint.manifest import Manifest
from elastictrain.checkpoint.memory.layout import RankDigests, RankPart, joined
from elastictrain.checkpoint.retention import read_manifest
from elastictrain.checkpoint.run_folder import RunFolder
from elastictrain.checkpoint.saver.commit_protocol import CommitProtocol, RefusedSave
from elastictrain.checkpoint.saver.messages import Saved, SaveFailure, SlotsReleased
from elastictrain.checkpoint.saver.pending_snapshots import Cause, LeasedSnapshot, SaveJob, cause_of
from elastictrain.checkpoint.saver.process import SaverConfig
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.checkpoint.writer import ByteReader, Committer, Written, write_file, write_part
from elastictrain.errors import CheckpointError, ElasticTrainError, InvalidCheckpointError, UntrustedCheckpointError
from elastictrain.events import CheckpointSaved, Event
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # seconds between checks whether the leader has begun a refused step
STREAMS = 8  # files that are written at once
SaveOutcome: TypeAlias = SlotsReleased | Saved | SaveFailure


class SnapshotWriter:
    def __init__(
        self,
        store: Store,
        config: SaverConfig,
        *,
        record: Callable[[str, Event], None],
        report: Callable[[SaveJob, SaveOutcome, Cause], None],
        signing: SigningKey | None = None,
    ) -> None:
        """`record` takes the event's incarnation first; `report` takes a job's outcome: snapshots released, saved, or failed
        for that cause. Both run in the writer's thread. `signing` signs what is saved."""
        self._signing = signing
        self._store = store
        self._run_folder = RunFolder(store)
        self._config = config
        self._record = record
        self._report = report
        self._committer = Committer(store, keep_last=config.keep_last, keep_every=config.keep_every, signing=signing)
        self._jobs: queue.Queue[SaveJob | RefusedSave | None] = queue.Queue()
        self._current: tuple[SaveJob, float] | None = None
        self._lock = threading.Lock()
        self._unfinished: list[SaveJob | RefusedSave] = []  # guarded by the lock
        # Refused steps and when they were refused, by incarnation and step: several ranks may lack one.
        self._refused: dict[tuple[str, int], tuple[RefusedSave, float]] = {}
        self._over: set[str] = set()  # multi-host attempts that have failed, or whose part of this host is done
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return bool(self._unfinished)

    @property
    def under_way(self) -> tuple[SaveJob, float] | None:
        """The running job, and for how many seconds it has run."""
        current = self._current
        return (current[0], time.monotonic() - current[1]) if current is not None else None

    def begin(self, job: SaveJob | RefusedSave) -> None:
        with self._lock:
            self._unfinished.append(job)
        self._jobs.put(job)

    def shorten_deadline(self) -> None:
        """Shorten the wait for other hosts in all jobs: the training group has ended."""
        with self._lock:
            for job in [*self._unfinished, *(refused for refused, _ in list(self._refused.values()))]:
                job.deadline.shorten()

    def close(self) -> None:
        """Complete all queued jobs, then end."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=LOOK_S if self._refused else None)
            except queue.Empty:
                self._report_refused()
                continue
            if job is None:
                return
            try:
                if isinstance(job, RefusedSave):
                    self._refused[(job.incarnation, job.step)] = (job, time.monotonic())
                    self._report_refused()
                else:
                    self._current = (job, time.monotonic())
                    self._carry_out(job)
            except Exception as error:
                # The edge of the thread: training continues after any error, and the next save is tried.
                if not isinstance(error, ElasticTrainError):
                    logger.exception("step %d could not be saved", job.step)
                if isinstance(job, SaveJob):
                    self._report(job, SaveFailure(job.step, _reason(error)), cause_of(error))
            finally:
                self._current = None
                with self._lock:
                    self._unfinished.remove(job)

    def _report_refused(self) -> None:
        for key, (refused, since_s) in list(self._refused.items()):
            if refused.report(self._store, over=self._over, since_s=since_s):
                del self._refused[key]

    def _carry_out(self, job: SaveJob) -> None:
        signing = self._signing
        protocol = CommitProtocol(self._store, job.incarnation, job.step, first_rank=job.first.rank, signing=signing)
        if job.leader:
            self._save(job, protocol)
            return
        # All its ranks have the step now, maybe for another attempt.
        self._refused.pop((job.incarnation, job.step), None)
        try:
            self._take_part(job, protocol)
        except BaseException as error:
            # The leader deletes the files: it may have read that they are written, and commit them.
            protocol.refuse(_reason(error), over=self._over)
            raise
        finally:
            self._over.add(protocol.attempt)

    def _take_part(self, job: SaveJob, protocol: CommitProtocol) -> None:
        """Write this host's files; the leader commits."""
        self._check_run()
        if self._saved_before(job, list_checkpoints(self._store)) is not None:
            return
        # The leader may be waiting, in an older step, for a part that this host refuses.
        folder = protocol.wait_for_prepared(job.deadline, over=self._over, meanwhile=self._report_refused)
        protocol.acknowledge(self._write(job, folder))

    def _save(self, job: SaveJob, protocol: CommitProtocol) -> None:
        """Write this host's files, wait for the other hosts' files, and commit."""
        began = time.monotonic()
        self._check_run()
        listing = list_checkpoints(self._store)
        known = self._saved_before(job, listing)
        if known is not None:
            self._tidy(job, *known, listing, protocol)
            return
        if job.alone:
            folder = clear_target(self._store, listing, step=job.step)
        else:
            folder = protocol.prepare(lambda: clear_target(self._store, listing, step=job.step), over=self._over)
        prepared = time.monotonic()
        try:
            try:
                written = self._write(job, folder)
                wrote_s = time.monotonic() - prepared
                written += protocol.wait_for_acknowledgements(
                    job.first.world_size, own=written, deadline=job.deadline, wrote_s=wrote_s
                )
                self._check_run()
            except BaseException:
                discard_files(self._store, folder, incarnation=job.incarnation)
                raise
            seconds = {"prepare": prepared - began, "write": time.monotonic() - prepared}
            facts = Manifest(
                step=job.step,
                world_size=job.first.world_size,
                incarnation=job.incarnation,
                created=job.first.created,
                config_digest=job.first.config_digest,
                versions=self._config.versions,
                state=job.first.state,
            )
            manifest = self._committer.commit(written, facts=facts, folder=folder)
        except BaseException:
            self._over.add(protocol.attempt)
            if not job.alone:
                protocol.clear()
            raise
        seconds["commit"] = time.monotonic() - began - sum(seconds.values())
        reason, size_bytes = job.first.reason or "flush", manifest.size_bytes
        saved = CheckpointSaved(step=job.step, checkpoint=folder, reason=reason, bytes=size_bytes, seconds=seconds)
        self._record(job.incarnation, saved)
        self._tell(job, Saved(job.step, folder, size_bytes))
        self._tidy(job, folder, manifest, listing, protocol)

    def _write(self, job: SaveJob, folder: str) -> list[Written]:
        """Write this host's files; returns what the committer has to know of them."""
        parts = write_snapshots(self._store, job, folder, sha256=self._signing is not None)
        self._tell(job, SlotsReleased(job.step))
        return write_part(
            self._store,
            parts,
            folder=folder,
            incarnation=job.incarnation,
            world_size=job.first.world_size,
            manifest_bytes=self._config.manifest_bytes,
        )

    def _tidy(self, job: SaveJob, folder: str, manifest: Manifest, listing: Listing, protocol: CommitProtocol) -> None:
        self._committer.tidy(
            folder, manifest, listing=listing, time_s=time.time(), record=lambda event: self._record(job.incarnation, event)
        )
        if not job.alone:
            protocol.clear()

    def _tell(self, job: SaveJob, outcome: SaveOutcome) -> None:
        self._report(job, outcome, Cause.OTHER)

    def _check_run(self) -> None:
        """A write would recreate the folder of a run that was deleted."""
        if not self._run_folder.is_there():
            raise CheckpointError(f"{self._store.url} was deleted")

    def _saved_before(self, job: SaveJob, listing: Listing) -> tuple[str, Manifest] | None:
        """A checkpoint that a killed saver committed from this very save or a later one, and its manifest."""
        for folder in listing.folders:
            if folder.step >= job.step and folder.has_manifest and not folder.quarantined:
                try:
                    manifest = read_manifest(self._store, folder.name, signing=self._signing)
                except UntrustedCheckpointError:
                    # Not written by a saver of this run.
                    continue
                if manifest is not None and manifest.incarnation == job.incarnation:
                    self._tell(job, Saved(job.step, folder.name, manifest.size_bytes))
                    return folder.name, manifest
        return None


def write_snapshots(store: Store, job: SaveJob, folder: str, *, sha256: bool, streams: int = STREAMS) -> list[RankPart]:
    """Write all files of this host's ranks durably, `streams` at once; their bytes must match the digests taken on arrival.
    Raises: StorageError; InvalidCheckpointError if host memory has changed."""
    tasks: list[tuple[LeasedSnapshot, int]] = [
        (leased, index) for leased in job.snapshots for index in range(len(leased.layout.template))
    ]

    def write_one(task: tuple[LeasedSnapshot, int]) -> RankDigests:
        """Write one file, with one buffer of its largest chunk; returns the digests of the written bytes."""
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

        return write_file(store, file, prefix=f"{ROOT}/{folder}", source=source, sha256=sha256)

    with ThreadPoolExecutor(max(1, min(streams, len(tasks))), thread_name_prefix="save") as pool:
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


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, ElasticTrainError) else f"{type(error).__name__}: {error}"
