"""What is in the checkpoint folders of a run: their manifests and the sizes of their files, not the bytes of tensors."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from elastictrain.checkpoint.commands.location import Location
from elastictrain.checkpoint.commands.rows import Row, State
from elastictrain.checkpoint.examine import examine
from elastictrain.checkpoint.folders import QUARANTINE_NAME, ROOT, FolderFacts, key_of, read_listing
from elastictrain.checkpoint.manifest import MANIFEST_NAME, Manifest
from elastictrain.checkpoint.marks import quarantine_reason
from elastictrain.errors import ObjectNotFoundError, UnknownFormatError
from elastictrain.storage.store import Store

_READERS = 8
_UNCOMMITTED = "being written, or cut short"


@dataclass(frozen=True, slots=True)
class Listed:
    """One folder as listed, and when the newest of its files was written (unix seconds)."""

    facts: FolderFacts
    modified: float


@dataclass(frozen=True, slots=True)
class Surveyed:
    """One folder and what its manifest says, where it can be read."""

    run: Store
    listed: Listed
    state: State
    reason: str
    manifest: Manifest | None

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.listed.facts.name

    @property
    def url(self) -> str:
        """Of the folder."""
        return f"{self.run.url}/{ROOT}/{self.name}"

    @property
    def row(self) -> Row:
        """What `ls` tells of it."""
        facts, manifest = self.listed.facts, self.manifest
        return Row(
            name=facts.name,
            step=facts.step,
            tier="storage",
            state=self.state,
            reason=self.reason,
            created=None if manifest is None else manifest.created,
            modified=self.listed.modified,
            size_bytes=sum(facts.files.values()),
            world_size=None if manifest is None else manifest.world_size,
            signed=None if manifest is None else bool(manifest.signature),
            num_files=len(facts.files.keys() - {MANIFEST_NAME, QUARANTINE_NAME}),
        )


def list_folders(location: Location) -> tuple[Listed, ...]:
    """All checkpoint folders of the run, newest first. Raises: StorageError."""
    infos = list(location.run.list(ROOT))
    modified: dict[str, float] = {}
    for info in infos:
        name = info.key.split("/")[1]
        modified[name] = max(modified.get(name, 0.0), info.modified)
    return tuple(Listed(facts, modified[facts.name]) for facts in read_listing(infos).folders)


def survey(location: Location, folders: Iterable[Listed]) -> tuple[Surveyed, ...]:
    """Reads manifests, some at once; leaves out folders that the run deletes meanwhile.

    Raises: StorageError.
    """
    with ThreadPoolExecutor(_READERS, thread_name_prefix="survey") as pool:
        found = pool.map(lambda listed: _look_at(location, listed), folders)
        return tuple(one for one in found if one is not None)


def _look_at(location: Location, listed: Listed) -> Surveyed | None:
    run, facts = location.run, listed.facts
    manifest: Manifest | None = None
    state, reason = State.UNCOMMITTED, _UNCOMMITTED
    if facts.has_manifest:
        try:
            found = examine(run, facts, signing=location.signing)
        except ObjectNotFoundError:
            return None
        except UnknownFormatError as error:
            # What to do about it is told where somebody wants to use it.
            state, reason = State.UNKNOWN, _short(str(error), run=run, name=facts.name).partition(";")[0]
        else:
            manifest, state, reason = found.manifest, State.VALID, ""
            if found.reject is not None:
                state = State.DAMAGED if found.reject.lasting else State.UNTRUSTED
                reason = _short(found.reject.reason, run=run, name=facts.name)
    if facts.quarantined:
        state, reason = State.QUARANTINED, _short(quarantine_reason(run, facts.name), run=run, name=facts.name)
    return Surveyed(run, listed, state, reason, manifest)


def _short(reason: str, *, run: Store, name: str) -> str:
    """Without the URL of the folder, which stands above."""
    return reason.replace(f"{run.url}/{key_of(name, '')}", "")
