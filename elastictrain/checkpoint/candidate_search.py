"""The walk from the newest checkpoint back, as one rank leads it: lists, reads manifests, quarantines, records."""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from elastictrain.checkpoint.earlier_commits import InMemory, JobMemory, Trace, find_traces, lost_message, of_memory
from elastictrain.checkpoint.folders import QUARANTINE_NAME, ROOT, Listing, key_of
from elastictrain.checkpoint.lineage import Lineage
from elastictrain.checkpoint.manifest import MANIFEST_NAME, JsonValue
from elastictrain.checkpoint.marks import encode_mark, mark_begun, mark_committed, mark_lost, quarantine_reason
from elastictrain.checkpoint.retry_read import examine
from elastictrain.checkpoint.select_checkpoint import (
    FreshStart,
    LineageStanding,
    Refuse,
    Reject,
    TryFolder,
    passed_over,
    prefers_memory,
    refusal_message,
    select_checkpoint,
)
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.checkpoint.target import list_checkpoints
from elastictrain.errors import NoValidCheckpointError, ObjectNotFoundError, StorageError
from elastictrain.events import CheckpointRejected, Event
from elastictrain.lease.starts import Starts
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

_NOTHING = JobMemory()


@dataclass(frozen=True, slots=True)
class RestoreCandidate:
    """What to try next: the best step in host memory, or a folder with the bytes of its manifest; neither is a fresh start."""

    folder: str = ""
    manifest: bytes = b""
    in_memory: bool = False

    def to_bytes(self) -> bytes:
        """For `exchange.from_first`."""
        return json.dumps([self.folder, self.in_memory]).encode() + b"\n" + self.manifest


def candidate_from_bytes(data: bytes) -> RestoreCandidate:
    """The inverse of `RestoreCandidate.to_bytes`."""
    head, _, manifest = data.partition(b"\n")
    folder, in_memory = json.loads(head)
    return RestoreCandidate(folder, manifest, in_memory=in_memory)


class CandidateSearch:
    """Proposes candidates, newest first."""

    def __init__(
        self,
        store: Store,
        *,
        on_invalid: Literal["stop", "fresh"],
        incarnation: str,
        record: Callable[[Event], None],
        clock: Callable[[], float],
        job: JobMemory = _NOTHING,
        signing: SigningKey | None = None,
    ) -> None:
        """With a key only checkpoints that are signed with it are proposed."""
        self._signing = signing
        self._store = store
        self._job = job
        self._on_invalid = on_invalid
        self._incarnation = incarnation
        self._record = record
        self._clock = clock
        self._rejected: list[Reject] = []
        self._listing = Listing((), begun=False)
        self._listed = False
        self._lineage = Lineage(store)
        self._off_line: frozenset[str] = frozenset()
        self.in_memory: Sequence[InMemory] = ()
        """What hosts hold of this run, whole or not."""

    def off_line(self, made: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Of states, by incarnation and step, those which the run did not go on with. Raises: StorageError."""
        return [one for one in made if not self._lineage.has(*one)]

    def next_candidate(self, *, memory: LineageStanding | None) -> RestoreCandidate:
        """The best step in host memory, or the next candidate in storage if that is better.

        The manifest of a candidate is valid, and its files are all there, in their sizes. To be asked again after each that was
        rejected: both may have another one then.

        Raises: NoValidCheckpointError, UnknownFormatError, StorageError.
        """
        self._list()
        while True:
            decision = select_checkpoint(self._listing, rejected=self._rejected, on_invalid=self._on_invalid)
            if prefers_memory(memory, self._standing(decision)):
                return RestoreCandidate(in_memory=True)
            if isinstance(decision, Refuse):
                raise NoValidCheckpointError(refusal_message(self._with_reasons(decision), url=f"{self._store.url}/{ROOT}"))
            if isinstance(decision, FreshStart):
                self._refuse_if_lost()
                self._begin(decision)
                return RestoreCandidate()
            found = self._examine(decision)
            if isinstance(found, bytes):
                return RestoreCandidate(decision.folder.name, found)
            self.reject(found)

    def reject(self, reject: Reject) -> None:
        """Quarantines a folder: it is kept, and never considered again. Where only the key may be wrong, this walk alone passes
        it over."""
        self._rejected.append(reject)
        logger.warning("checkpoint rejected: %s", reject)
        self._record(CheckpointRejected(checkpoint=reject.folder, file=reject.file, reason=reject.reason))
        if not reject.lasting:
            return
        mark = encode_mark({"reason": reject.reason, "file": reject.file, **self._signed()})
        try:
            self._store.write(key_of(reject.folder, QUARANTINE_NAME), mark)
        except StorageError as error:
            # The mark saves the next start the trouble; this one goes on without.
            logger.warning("%s could not be marked as damaged: %s", reject.folder, error)

    def accepted(self, folder: str) -> None:
        """Tells what newer remnants were passed over, once a candidate is loaded."""
        self._tell(passed_over(self._listing, chosen=folder))
        if folder not in self._off_line:
            reason = "committed by a generation that others had gone on without"
            self._tell(tuple(Reject(name, None, reason) for name in sorted(self._off_line)))
        mark_committed(self._store, listing=self._listing, note={"checkpoint": folder, **self._signed()})

    def _standing(self, decision: TryFolder | FreshStart | Refuse) -> LineageStanding | None:
        if not isinstance(decision, TryFolder):
            return None
        return LineageStanding(decision.folder.name not in self._off_line, decision.folder.step)

    def _list(self) -> None:
        if not self._listed:
            listing = list_checkpoints(self._store)
            folders, self._off_line = self._lineage.line_first(listing.folders)
            self._listing = replace(listing, folders=folders)
            self._listed = True

    def _examine(self, decision: TryFolder) -> bytes | Reject:
        folder = decision.folder.name
        try:
            found = examine(self._store, decision.folder, signing=self._signing)
        except ObjectNotFoundError:
            return Reject(folder, MANIFEST_NAME, f"{self._store.url}/{key_of(folder, MANIFEST_NAME)} is gone")
        return found.raw if found.reject is None else found.reject

    def _refuse_if_lost(self) -> None:
        """A folder without checkpoints looks like that of a new run. Raises: NoValidCheckpointError if it is not."""
        if self._on_invalid == "fresh" or self._listing.begun:
            # A person, or an earlier start, has seen that nothing is there to go on from.
            return
        traces = find_traces(self._store, self._lineage, incarnation=self._incarnation)
        if self.in_memory:
            traces += of_memory(self.in_memory, known=Starts(self._store).known(one.incarnation for one in self.in_memory))
        if self._job.step > 0:
            traces.append(Trace(self._job.step, "the torchrun or launcher that started this process"))
        if not traces:
            return
        newest = max(traces)
        mark_lost(self._store, note={"step": newest.step, "found_in": newest.where, **self._signed()})
        raise NoValidCheckpointError(lost_message(traces, url=f"{self._store.url}/{ROOT}"))

    def _begin(self, decision: FreshStart) -> None:
        told = {reject.folder for reject in self._rejected}
        self._tell(tuple(reject for reject in decision.rejects if reject.folder not in told))
        mark_begun(self._store, listing=self._listing, note=self._signed())

    def _signed(self) -> dict[str, JsonValue]:
        return {"time": self._clock(), "incarnation": self._incarnation}

    def _tell(self, rejects: tuple[Reject, ...]) -> None:
        for reject in rejects:
            logger.warning("checkpoint passed over: %s", reject)
            self._record(CheckpointRejected(checkpoint=reject.folder, file=reject.file, reason=reject.reason))

    def _with_reasons(self, decision: Refuse) -> list[Reject]:
        """Folders that an earlier start quarantined, with the reason it wrote down."""
        told = {reject.folder for reject in self._rejected}
        rejects = []
        for reject in decision.rejects:
            folder = self._listing.folder(reject.folder)
            if reject.folder not in told and folder is not None and folder.quarantined:
                rejects.append(
                    Reject(reject.folder, reject.file, f"{reject.reason}: {quarantine_reason(self._store, reject.folder)}")
                )
            else:
                rejects.append(reject)
        return rejects
