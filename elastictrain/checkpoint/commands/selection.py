"""The checkpoint that a command is about: the newest valid one, that of a step, or the one that the URL names."""

from collections.abc import Sequence
from dataclasses import dataclass

from elastictrain.checkpoint.choose import FreshStart, Refuse, Reject, decide
from elastictrain.checkpoint.commands.location import Location
from elastictrain.checkpoint.commands.speaking import note
from elastictrain.checkpoint.examine import examine
from elastictrain.checkpoint.folders import ROOT, Listing, read_listing
from elastictrain.checkpoint.manifest import MANIFEST_NAME, Manifest
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.checkpoint.verified_read import Folder
from elastictrain.errors import NoValidCheckpointError, ObjectNotFoundError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest is valid and whose files are all there in their sizes; bytes are verified when read."""

    name: str
    folder: Folder
    manifest: Manifest

    @property
    def url(self) -> str:
        """Of its folder."""
        return self.folder.url("").rstrip("/")


def find_checkpoint(location: Location, *, step: int | None = None, rejected: Sequence[Reject] = ()) -> Checkpoint:
    """The newest checkpoint that will do, without the `rejected` ones.

    Raises: NoValidCheckpointError; UnknownFormatError; StorageError.
    """
    run, rejects = location.run, list(rejected)
    which = "" if step is None else f" of step {step}"
    while True:
        # Listed anew each time: a run that is still training saves and prunes meanwhile.
        listing = read_listing(run.list(ROOT))
        wanted = tuple(
            folder
            for folder in listing.folders
            if (step is None or folder.step == step) and location.folder in (None, folder.name)
        )
        decision = decide(Listing(wanted, begun=False), rejected=rejects, on_invalid="stop")
        if isinstance(decision, FreshStart):
            raise NoValidCheckpointError(_nothing(location, listing, which=which))
        if isinstance(decision, Refuse):
            lines = "\n".join(f"  - {reject}" for reject in decision.rejects)
            raise NoValidCheckpointError(f"{location.url} has no valid checkpoint{which}:\n{lines}")
        facts = decision.folder
        try:
            found = examine(run, facts, signing=location.signing)
        except ObjectNotFoundError as error:
            rejects.append(Reject(facts.name, MANIFEST_NAME, str(error)))
            continue
        if found.reject is None and found.manifest is not None:
            say_unchecked(found.manifest, name=facts.name, signing=location.signing)
            return Checkpoint(facts.name, Folder(run, f"{ROOT}/{facts.name}/"), found.manifest)
        if found.reject is not None:
            rejects.append(found.reject)


def say_unchecked(manifest: Manifest, *, name: str, signing: SigningKey | None) -> None:
    """That a signature is there, where nobody has given the key to check it."""
    if manifest.signature and signing is None:
        note(f"{name} is signed, and nobody checks it: give --key-env NAME")


def _nothing(location: Location, listing: Listing, *, which: str) -> str:
    steps = sorted({folder.step for folder in listing.folders if folder.has_manifest})
    there = f"; there is step {', '.join(map(str, steps))}" if steps else ""
    if location.folder is not None:
        return f"{location.url} must hold {location.folder}{which}, but does not{there}"
    return f"{location.url} must hold a checkpoint{which}, but does not{there}"
