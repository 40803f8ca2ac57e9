"""Which checkpoint a start restores: one rank tries them from the newest one back. Free of torch."""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Literal

from elastictrain.checkpoint.earlier_commits import InMemory, JobMemory, Trace, find_traces, lost_message, of_memory
from elastictrain.checkpoint.folders import (
    QUARANTINE_NAME,
    ROOT,
    RUN_COMMITTED_KEY,
    FolderFacts,
    Listing,
    Reject,
    encode_mark,
    key_of,
    list_checkpoints,
    mark_begun,
    mark_committed,
    quarantine_reason,
)
from elastictrain.checkpoint.lineage import Lineage, number_of
from elastictrain.checkpoint.manifest import MANIFEST_NAME, JsonValue
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.checkpoint.verified_read import Examined, examine
from elastictrain.errors import NoValidCheckpointError, ObjectNotFoundError, StorageError
from elastictrain.events import CheckpointRejected, Event
from elastictrain.identity import NOTHING_POISONED, PoisonedSteps
from elastictrain.lease.chain import Starts
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NoCandidate:
    rejects: tuple[Reject, ...]
    fresh: bool  # whether the run may start at step 0; otherwise it had checkpoints, and none is valid


def select_checkpoint(
    listing: Listing, *, rejected: Collection[Reject], on_invalid: Literal["stop", "fresh"]
) -> FolderFacts | NoCandidate:
    """The newest committed folder that neither this search nor an earlier quarantine rejected. Pure.

    Without one, the run may start at step 0 if no checkpoint can be lost (no folder exists and the run never committed, or only
    remnants of a first save exist: `Listing.begun`), or if the user set `on_invalid=fresh`.
    """
    known = {reject.folder: reject for reject in rejected}
    rejects: list[Reject] = []
    for folder in listing.folders:
        if folder.name in known:
            rejects.append(known[folder.name])
        elif folder.quarantined:
            rejects.append(Reject(folder.name, None, "quarantined by an earlier start"))
        elif not folder.has_manifest:
            rejects.append(_uncommitted(folder))
        else:
            return folder
    only_remnants = not rejected and all(not folder.quarantined for folder in listing.folders)
    never_committed = not listing.committed and (not rejects or (listing.begun and only_remnants))
    return NoCandidate(tuple(rejects), fresh=never_committed or on_invalid == "fresh")


def _uncommitted(folder: FolderFacts) -> Reject:
    return Reject(folder.name, MANIFEST_NAME, f"{MANIFEST_NAME} is not there: the save was cut short, or the file was lost")


def refusal_message(rejects: Collection[Reject], *, url: str) -> str:
    if rejects:
        lines = "\n".join(f"  - {reject}" for reject in rejects)
        what = f"has {len(rejects)} checkpoint(s), and none is valid:\n{lines}\nNothing was deleted. "
    else:
        what = "is of a run that had committed checkpoints (committed.json is there), and none is left.\n"
    return f"{url} {what}Restore one of them from a backup, or start over from step 0 with `checkpoint.on_invalid=fresh`."


IN_MEMORY = b"memory\n"  # proposal: the best step in host memory
FRESH_START = b"\n"


@dataclass
class CandidateSearch:
    store: Store
    _: KW_ONLY
    on_invalid: Literal["stop", "fresh"]
    incarnation: str
    record: Callable[[Event], None]
    clock: Callable[[], float]
    job: JobMemory
    signing: SigningKey | None  # with a key, only checkpoints signed with it are proposed
    poisoned: PoisonedSteps = NOTHING_POISONED
    in_memory: Sequence[InMemory] = ()  # all snapshots of this run on the hosts, complete or not

    def __post_init__(self) -> None:
        self._rejected: list[Reject] = []
        self._lineage = Lineage(self.store, poisoned=self.poisoned)
        self._off_lineage: frozenset[str] = frozenset()

    def off_lineage(self, made: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """The states in memory (incarnation, step) that are not on the lineage of the run, or were made before it went back:
        these are newer than checkpoints, and may be poisoned, too. Raises: StorageError."""
        back = self.poisoned.generation if self.poisoned.before_step else 0
        return [one for one in made if 0 <= number_of(one[0]) < back or not self._lineage.has(*one)]

    def next_candidate(self, *, memory: tuple[bool, int] | None) -> bytes:
        """The next candidate in storage (folder, line feed, manifest), `IN_MEMORY` if that is better, or `FRESH_START`.

        `memory` describes the best step in host memory: whether it is on the lineage of the run, and the step. State off the
        lineage counts only if none on it is left. The candidate's manifest is valid, and all its files exist in their sizes.
        The caller asks again after each rejected candidate.

        Raises: NoValidCheckpointError, UnknownFormatError, StorageError.
        """
        listing = self._listing
        while True:
            decision = select_checkpoint(listing, rejected=self._rejected, on_invalid=self.on_invalid)
            folder = decision if isinstance(decision, FolderFacts) else None
            if memory is not None and (folder is None or memory >= (folder.name not in self._off_lineage, folder.step)):
                self._refuse_if_newer_lost(memory[1])
                return IN_MEMORY
            if isinstance(decision, NoCandidate) and not decision.fresh:
                rejects = [self._with_reason(reject) for reject in decision.rejects]
                raise NoValidCheckpointError(refusal_message(rejects, url=f"{self.store.url}/{ROOT}"))
            if isinstance(decision, NoCandidate):
                self._refuse_if_lost()
                told = {reject.folder for reject in self._rejected}
                self._tell(reject for reject in decision.rejects if reject.folder not in told)
                mark_begun(self.store, listing=listing, note=self._signed())
                return FRESH_START
            key = key_of(decision.name, MANIFEST_NAME)
            try:
                found = examine(self.store, decision, signing=self.signing)
            except ObjectNotFoundError:
                found = Examined(None, b"", Reject(decision.name, MANIFEST_NAME, f"{self.store.url}/{key} is gone"))
            if found.reject is None:
                return b"\n".join((decision.name.encode(), found.raw))
            self.reject(found.reject)

    def reject(self, reject: Reject) -> None:
        """Quarantine a folder: it is kept, and no start tries it again. If it is not `lasting`, only this search skips it."""
        self._rejected.append(reject)
        self._tell([reject], what="rejected")
        if not reject.lasting:
            return
        mark = encode_mark({"reason": reject.reason, "file": reject.file, **self._signed()})
        try:
            self.store.write(key_of(reject.folder, QUARANTINE_NAME), mark)
        except StorageError as error:
            # The marker only saves the next start the check, so this start continues without it.
            logger.warning("%s could not be marked as damaged: %s", reject.folder, error)

    def accepted(self, folder: str) -> None:
        """Call once a candidate is loaded: report the newer folders that were skipped, and mark the run as committed."""
        listing = self._listing
        newer = takewhile(lambda one: one.name != folder, listing.folders)
        self._tell(_uncommitted(one) for one in newer if not one.has_manifest and not one.quarantined)
        if folder not in self._off_lineage:
            reason = "committed by a generation that others had gone on without, or after which a step failed again and again"
            self._tell(Reject(name, None, reason) for name in sorted(self._off_lineage))
        mark_committed(self.store, listing=listing, note={"checkpoint": folder, **self._signed()})

    @cached_property
    def _listing(self) -> Listing:
        listing = list_checkpoints(self.store)
        folders, self._off_lineage = self._lineage.lineage_first(listing.folders)
        return replace(listing, folders=folders)

    def _refuse_if_newer_lost(self, step: int) -> None:
        """Where storage shows no checkpoint at all, as before its disk is mounted, the run may have committed a newer step than
        `step`, which is in memory. Raises: NoValidCheckpointError; StorageError."""
        if self.on_invalid == "fresh" or self._listing.begun or self._listing.folders:
            return
        if traces := [one for one in find_traces(self.store, self._lineage, incarnation=self.incarnation) if one.step > step]:
            raise NoValidCheckpointError(lost_message(traces, url=f"{self.store.url}/{ROOT}"))

    def _refuse_if_lost(self) -> None:
        """A folder without checkpoints looks like a new run. Raises: NoValidCheckpointError if the run has committed before."""
        if self.on_invalid == "fresh" or self._listing.begun:
            # The user, or an earlier start, knows that there is no checkpoint to resume from.
            return
        traces = find_traces(self.store, self._lineage, incarnation=self.incarnation)
        if self.in_memory:
            traces += of_memory(self.in_memory, known=Starts(self.store).known(one.incarnation for one in self.in_memory))
        if self.job.step > 0:
            traces.append(Trace(self.job.step, "the torchrun or launcher that started this process"))
        if not traces:
            return
        newest = max(traces)
        try:
            # The next start then needs no search.
            mark = encode_mark({"step": newest.step, "found_in": newest.where, **self._signed()})
            self.store.write(RUN_COMMITTED_KEY, mark)
        except StorageError as error:
            logger.warning("cannot record that the run had checkpoints: %s", error)
        raise NoValidCheckpointError(lost_message(traces, url=f"{self.store.url}/{ROOT}"))

    def _signed(self) -> dict[str, JsonValue]:
        return {"time": self.clock(), "incarnation": self.incarnation}

    def _tell(self, rejects: Iterable[Reject], *, what: str = "skipped") -> None:
        for reject in rejects:
            logger.warning("checkpoint %s: %s", what, reject)
            self.record(CheckpointRejected(checkpoint=reject.folder, file=reject.file, reason=reject.reason))

    def _with_reason(self, reject: Reject) -> Reject:
        """Add the reason that an earlier start wrote when it quarantined the folder."""
        folder = self._listing.folder(reject.folder)
        if reject in self._rejected or folder is None or not folder.quarantined:
            return reject
        return replace(reject, reason=f"{reject.reason}: {quarantine_reason(self.store, reject.folder)}")
