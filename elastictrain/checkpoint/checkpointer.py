"""Saves and restores the state of a run: the training loop's interface."""

import logging
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from elastictrain.checkpoint.candidate_search import FRESH_START, IN_MEMORY, CandidateSearch
from elastictrain.checkpoint.earlier_commits import InMemory, JobMemory
from elastictrain.checkpoint.exchange import describe, from_first, gather_bytes, gather_json, revive
from elastictrain.checkpoint.folders import ROOT, Listing, Reject, clear_target, discard_files, list_checkpoints
from elastictrain.checkpoint.lineage import Lineage, ResumeOrigin
from elastictrain.checkpoint.manifest import MANIFEST_NAME, JsonValue, Manifest
from elastictrain.checkpoint.manifest_format import parse_manifest
from elastictrain.checkpoint.memory.folder import Held, SnapshotSet
from elastictrain.checkpoint.memory.layout import RankLayout, RankPart
from elastictrain.checkpoint.memory_restore import FromMemory, MemoryRestore, ranks_of_files
from elastictrain.checkpoint.reader import load
from elastictrain.checkpoint.saver.commit_protocol import decode_parts, encode_parts
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.checkpoint.tensor_bytes import local_part, own_items, reader_of
from elastictrain.checkpoint.verified_read import CheckpointFolder
from elastictrain.checkpoint.writer import Committer, write_files, write_part
from elastictrain.config.composed import CheckpointGroup
from elastictrain.errors import CheckpointError, ConfigError, ElasticTrainError, LeaseLostError, StorageError
from elastictrain.events import CheckpointRejected, CheckpointSaved, Event
from elastictrain.identity import NOTHING_POISONED, PoisonedSteps
from elastictrain.lease.chain import Starts
from elastictrain.storage.store import Store
from elastictrain.version import __version__

logger = logging.getLogger(__name__)


def save_error(failures: Mapping[int, ElasticTrainError], *, url: str) -> ElasticTrainError:
    """A StorageError of the first failed rank's kind if only the store failed; else a CheckpointError."""
    lines = [str(failures[rank]) if len(failures) == 1 else f"rank {rank}: {failures[rank]}" for rank in sorted(failures)]
    only_store = all(isinstance(error, StorageError) for error in failures.values())
    kind = type(failures[min(failures)]) if only_store else CheckpointError
    return kind(f"{url} could not be saved: " + "; ".join(dict.fromkeys(lines)))


def used_versions() -> dict[str, str]:
    return {"elastictrain": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What was loaded. `bytes` counts the reads of all ranks."""

    step: int
    checkpoint: str
    state: Mapping[str, JsonValue]
    config_digest: str
    world_size: int
    bytes: int
    seconds: Mapping[str, float]
    tier: str  # `memory`, `peer` or `storage`


@dataclass
class Checkpointer:
    """Saves to and restores from one store; every method is collective over `group` (None: a world of one)."""

    store: Store
    _: KW_ONLY
    options: CheckpointGroup
    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    incarnation: str
    config_digest: str
    record: Callable[[Event], None]
    generation: int | None = None  # set if a launcher started this incarnation
    job: JobMemory = field(default_factory=JobMemory)  # read on rank 0 only
    clock: Callable[[], float] = time.time
    signing: SigningKey | None = None  # the same on all ranks: signs saves; restores from storage need its signature
    poisoned: PoisonedSteps = NOTHING_POISONED  # the state that restores take last

    def __post_init__(self) -> None:
        self._saved: tuple[int, str] | None = None  # the step that was committed last, and its checkpoint
        self._listing = Listing((), begun=False)  # of rank 0, from before its save
        keep_last, keep_every = self.options.keep_last, self.options.keep_every
        self._committer = Committer(self.store, keep_last=keep_last, keep_every=keep_every, signing=self.signing)

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, JsonValue],
        reason: str,
        of_first: frozenset[str] = frozenset(),
    ) -> str:
        """Write and commit a checkpoint, unless this step was committed before; returns its name. Synchronous. Collective: yes.

        `tensors`, the same names on all ranks, may be shards (DTensor), or whole and the same on all ranks (written once).
        Of tensors `of_first`, and of `state`, rank 0's count. A failure leaves earlier checkpoints as they are; all ranks raise
        the same error.

        Raises: StorageError, CheckpointError: the caller may try again; LeaseLostError: it may not; what a broken group raises.
        """
        began = time.monotonic()
        folder = from_first(lambda: self._prepare(step), group=self.group)
        if self._saved is not None and not folder:
            return self._saved[1]
        prepared = time.monotonic()
        part = self._write_together(tensors, folder, of_first)
        parts = gather_bytes(part, group=self.group, to_first=True)
        wrote = time.monotonic()
        facts = Manifest(
            step=step,
            world_size=self.world_size,
            incarnation=self.incarnation,
            created=self.clock(),
            config_digest=self.config_digest,
            versions=used_versions(),
            state=state,
        )

        def conclude() -> None:
            """On rank 0: commit, record, tidy. Raises: LeaseLostError; any other error of the commit as `save_error`."""
            of_ranks = (part for data in parts for part in decode_parts(data, where=folder))
            try:
                manifest = self._committer.commit(of_ranks, facts=facts, folder=folder, names=tensors.keys())
            except LeaseLostError:
                raise
            except Exception as error:
                raise save_error({0: revive(describe(error))}, url=f"{self.store.url}/{ROOT}/{folder}") from error
            seconds = {"prepare": prepared - began, "write": wrote - prepared, "commit": time.monotonic() - wrote}
            size_bytes = manifest.size_bytes
            self.record(CheckpointSaved(step=step, checkpoint=folder, reason=reason, bytes=size_bytes, seconds=seconds))
            self._committer.tidy(folder, manifest, listing=self._listing, time_s=self.clock(), record=self.record)

        from_first(conclude, group=self.group)
        self._saved = (step, folder)
        return folder

    def _prepare(self, step: int) -> str:
        """On rank 0: the folder to write to, without files; empty if this step was saved already."""
        self._listing = listing = list_checkpoints(self.store)
        if self._saved is not None and self._saved[0] == step:
            folder = listing.folder(self._saved[1])
            if folder is not None and folder.has_manifest and not folder.quarantined:
                return ""
        return clear_target(self.store, listing, step=step, at_work=self.incarnation)

    def _write_together(self, tensors: Mapping[str, Tensor], folder: str, of_first: frozenset[str]) -> bytes:
        """Write this rank's files; returns their encoded records. Raises on all ranks if any fails. Collective: yes."""
        part, failure = b"", None
        try:
            shard_bytes = int(self.options.shard_mb * 2**20)
            items = own_items(tensors, rank=self.rank, world_size=self.world_size, of_first=of_first)
            layout = RankLayout(items, shard_bytes)
            digests = write_files(
                self.store,
                layout.files(incarnation=self.incarnation, rank=self.rank),
                prefix=f"{ROOT}/{folder}",
                source=lambda item: reader_of(local_part(tensors[item.name]), item),
                sha256=self.signing is not None,
            )
            written = write_part(
                self.store,
                [RankPart(self.rank, layout, digests)],
                folder=folder,
                incarnation=self.incarnation,
                world_size=self.world_size,
                manifest_bytes=int(self.options.manifest_mb * 2**20),
            )
            part = encode_parts(written)
        except BaseException as error:  # noqa: BLE001  # the other ranks wait for this one's result
            failure = error
        results = gather_json(None if failure is None else describe(failure), group=self.group)
        failures = {rank: revive(one) for rank, one in enumerate(results) if isinstance(one, dict)}
        if not failures:
            return part
        # All ranks wait while rank 0 deletes what they wrote: ranks that went ahead would take the others for hung.
        from_first(lambda: discard_files(self.store, folder, incarnation=self.incarnation), group=self.group)
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        raise save_error(failures, url=f"{self.store.url}/{ROOT}/{folder}")

    def restore(
        self,
        *,
        tensors: Mapping[str, Tensor],
        reset: Callable[[], None],
        recall: MemoryRestore | None = None,
    ) -> RestoreResult | None:
        """Load the newest valid checkpoint into `tensors`, in place; None for a fresh start. Collective: yes.

        Every byte is verified as it is read, and goes to its tensor at once. If a checkpoint turns out to be damaged during its
        load, and a fresh start follows, `reset` gives the tensors their first values again.

        The memory of hosts is used if its step is at least as new as any valid one in storage. State off the lineage of the run
        counts only if none on it is left, in either. Damaged checkpoints are quarantined.

        Raises: NoValidCheckpointError; UnknownFormatError; ConfigError if the checkpoint is of another model; StorageError.
        After an error tensors may hold parts of a checkpoint.
        """
        begin = time.monotonic()
        search = CandidateSearch(
            self.store,
            on_invalid=self.options.on_invalid,
            incarnation=self.incarnation,
            record=self.record,
            clock=self.clock,
            job=self.job,
            signing=self.signing,
            poisoned=self.poisoned,
        )
        touched = False
        if recall is not None:
            self._look(recall, search)
        while True:
            best = None if recall is None else recall.best()
            memory = None if best is None else (best.in_lineage, best.step)
            proposed = from_first(partial(search.next_candidate, memory=memory), group=self.group)
            chosen = time.monotonic()
            if proposed == FRESH_START:
                if touched:
                    reset()
                self._note_origin(step=0, parent="")
                return None
            touched = True
            if proposed == IN_MEMORY:
                assert recall is not None  # noqa: S101
                assert best is not None  # noqa: S101
                restored = self._try_memory(recall, best, tensors)
            else:
                restored = self._try_folder(search, proposed, tensors)
            if restored is not None:
                return replace(restored, seconds={"choose": chosen - begin, "read": time.monotonic() - chosen})

    def _look(self, recall: MemoryRestore, search: CandidateSearch) -> None:
        """List the snapshots on all hosts; those off the lineage count last. Collective: yes."""
        recall.look()
        search.in_memory = [InMemory(one.facts.incarnation, one.facts.step, recall.name_of(one)) for one in recall.held]
        made = [(one.incarnation, one.step) for one in recall.whole()]
        if not made:
            return

        def judge_snapshots() -> tuple[list[str], list[tuple[str, int]]]:
            off_lineage = search.off_lineage(made)
            for incarnation, step in off_lineage:
                logger.warning(
                    "step %d of %s in memory counts last: a later generation had gone on without it", step, incarnation
                )
            known = Starts(self.store).known(incarnation for incarnation, _ in made)
            return [*known, *self.job.incarnations], off_lineage

        # Snapshots of a deleted run in the same folder do not count, unless the same job has trained it.
        incarnations, off_lineage = from_first(judge_snapshots, group=self.group)
        recall.keep(incarnations, off_lineage=((incarnation, step) for incarnation, step in off_lineage))

    def _try_folder(self, search: CandidateSearch, proposed: bytes, tensors: Mapping[str, Tensor]) -> RestoreResult | None:
        """Load from storage; None if it is damaged. Collective: yes."""
        head, _, raw = proposed.partition(b"\n")
        name = head.decode()
        folder = CheckpointFolder(self.store, f"{ROOT}/{name}/")
        manifest = parse_manifest(raw, where=folder.url(MANIFEST_NAME), key=self.signing)
        if manifest.signature and self.signing is None and self.rank == 0:
            logger.warning("%s is signed, but its signature is not checked: `checkpoint.key_env` is not set", name)
        result = load(folder, manifest, tensors=tensors, group=self.group)
        if result.outcome == "failed":
            raise revive({"type": result.error, "message": result.message})
        if result.outcome == "damaged":
            if self.rank == 0:
                search.reject(Reject(name, next(iter(result.files), None), result.message))
            return None
        if self.rank == 0:
            search.accepted(name)
        return self._accepted(manifest, name=name, bytes_read=result.bytes_read, tier="storage")

    def _accepted(self, manifest: Manifest, *, name: str, bytes_read: int, tier: str) -> RestoreResult:
        """Collective: yes."""
        self._note_origin(step=manifest.step, parent=manifest.incarnation)
        return RestoreResult(
            manifest.step, name, manifest.state, manifest.config_digest, manifest.world_size, bytes_read, {}, tier
        )

    def _note_origin(self, *, step: int, parent: str) -> None:
        """Record what this incarnation resumed from, before it can commit anything. Collective: yes."""
        if self.generation is not None:
            origin = ResumeOrigin(self.generation, self.incarnation, step, parent)
            from_first(lambda: Lineage(self.store).write(origin), group=self.group)

    def _try_memory(self, recall: MemoryRestore, chosen: SnapshotSet, tensors: Mapping[str, Tensor]) -> RestoreResult | None:
        """Load from the memory of hosts; if a snapshot is damaged, drop it and return None. Collective: yes."""
        opened = recall.open(chosen)
        if not isinstance(opened, FromMemory):
            self._pass_over(recall, chosen, opened, "it cannot be opened")
            return None
        try:
            result = load(CheckpointFolder(opened.source, ""), opened.manifest, tensors=tensors, group=self.group)
        finally:
            opened.source.resources.close()
        if result.outcome == "loaded":
            name, tier = f"snapshot of step {chosen.step}", recall.tier(opened)
            return self._accepted(opened.manifest, name=name, bytes_read=result.bytes_read, tier=tier)
        if result.error == ConfigError.__name__:
            raise revive({"type": result.error, "message": result.message})
        for rank in ranks_of_files(result.files, chosen):
            self._pass_over(recall, chosen, chosen.sources[rank][0], result.message)
        return None

    def _pass_over(self, recall: MemoryRestore, chosen: SnapshotSet, held: Held, reason: str) -> None:
        recall.forget(held)
        if self.rank == 0:
            logger.warning("snapshot of step %d in %s on host %d is skipped: %s", chosen.step, held.slot, held.host, reason)
            self.record(CheckpointRejected(checkpoint=f"snapshot of step {chosen.step}", file=held.slot, reason=reason))
