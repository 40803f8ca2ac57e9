"""Which checkpoints are on the lineage of the run, where generations of hosts may overlap. Free of torch.

A generation that was given up while it was frozen or cut off may still commit when it thaws. `Fence` refuses that, but no
object store can look and create in one step. So each incarnation, after its restore and before its first commit, also records
its origin: the step, and the incarnation that made it. A start follows these records back from the newest one. State that is
not on this lineage counts only if none on it is left.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from elastictrain.bounded_json import parse_record
from elastictrain.checkpoint.folders import FolderFacts
from elastictrain.errors import LeaseLostError, ObjectNotFoundError, ObjectTooLargeError
from elastictrain.identity import NOTHING_POISONED, PoisonedSteps
from elastictrain.lease.chain import Chain, LeaseClaim
from elastictrain.storage.bounded_read import read_bounded
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

ROOT = "lineage"
_KEY = re.compile(rf"{ROOT}/(\d{{9}})-(.+)\.json")
_SHARD = re.compile(r"(.+)-r\d{5,}-.+")


@dataclass(frozen=True, slots=True)
class ResumeOrigin:
    generation: int
    incarnation: str
    step: int  # 0 for a start from scratch
    parent: str  # the incarnation that made the state; empty for a start from scratch


Lookup = Callable[[str], ResumeOrigin | None]


def is_in_lineage(incarnation: str, step: int, *, newest: ResumeOrigin | None, lookup: Lookup) -> bool:
    """Whether the state of `step` that `incarnation` made is in the history that `newest` continues. Pure, but for `lookup`.

    True if no record decides it: before the first launcher there are no records, and an incarnation newer than all records has
    not written its own yet, or needs none.
    """
    if newest is None or (lookup(incarnation) is None and number_of(incarnation) > number_of(newest.incarnation)):
        return True
    origin, last_step, passed = newest, step, {newest.incarnation}
    while True:
        if incarnation == origin.incarnation:
            return origin.step < step <= last_step
        last_step = origin.step
        following = lookup(origin.parent)
        if following is None:
            # After a start from scratch `last_step` is 0, and no rank commits step 0.
            return step <= last_step
        if following.incarnation in passed:
            # Records in a cycle are damaged and decide nothing.
            return True
        passed.add(following.incarnation)
        origin = following


class Lineage:
    def __init__(self, store: Store, *, poisoned: PoisonedSteps = NOTHING_POISONED) -> None:
        """`poisoned`: checkpoints that the run has gone back from are on no lineage from then on."""
        self._store = store
        self._poisoned = poisoned
        self._known: dict[str, ResumeOrigin | None] = {}

    def write(self, origin: ResumeOrigin) -> None:
        """The caller writes it before its incarnation commits anything. Raises: StorageError."""
        self._store.write(f"{ROOT}/{origin.generation:09d}-{origin.incarnation}.json", json.dumps(asdict(origin)).encode())

    def lineage_first(self, folders: Iterable[FolderFacts]) -> tuple[tuple[FolderFacts, ...], frozenset[str]]:
        """The folders in their order, those off the lineage last; and the names of these. Raises: StorageError."""
        folders = tuple(folders)
        off_lineage = [one for one in folders if (maker := _maker(one)) and not self.has(maker, one.step)]
        off_lineage += self._gone_back_from(folders)
        ordered = (*(one for one in folders if one not in off_lineage), *(one for one in folders if one in off_lineage))
        return ordered, frozenset(folder.name for folder in off_lineage)

    def _gone_back_from(self, folders: Sequence[FolderFacts]) -> list[FolderFacts]:
        """The newest checkpoint at or before the step from which the run goes back, and those after it."""
        if not self._poisoned.before_step:
            return []
        generation, last_step = self._poisoned.generation, self._poisoned.before_step
        older = [(one, maker) for one in folders if (maker := _maker(one)) and number_of(maker) < generation]
        # The lineage as it was when the run went back: later origins are below the checkpoint that is to be found.
        origin = self._newest(name for name in self._keys if number_of(name) < generation)
        whole = [(one, maker) for one, maker in older if one.has_manifest and not one.quarantined and one.step <= last_step]
        steps = (one.step for one, maker in whole if is_in_lineage(maker, one.step, newest=origin, lookup=self._lookup))
        newest = max(steps, default=last_step)
        return [one for one, _ in older if one.step >= newest]

    def has(self, incarnation: str, step: int) -> bool:
        """Whether the state of `step` that `incarnation` made is on the lineage. Raises: StorageError."""
        return is_in_lineage(incarnation, step, newest=self.newest(), lookup=self._lookup)

    def newest(self) -> ResumeOrigin | None:
        """The newest record that can be read. Raises: StorageError."""
        return self._newest(self._keys)

    def _newest(self, names: Iterable[str]) -> ResumeOrigin | None:
        # Keys begin with the generation, so the last readable record is the newest.
        return next((origin for name in reversed([*names]) if (origin := self._lookup(name)) is not None), None)

    @cached_property
    def _keys(self) -> dict[str, str]:
        keys = sorted(info.key for info in self._store.list(ROOT))
        return {match[2]: key for key in keys if (match := _KEY.fullmatch(key))}

    def _lookup(self, incarnation: str) -> ResumeOrigin | None:
        if incarnation not in self._known:
            key, origin = self._keys.get(incarnation), None
            try:
                origin = parse_record(read_bounded(self._store, key), ResumeOrigin) if key is not None else None
            except ObjectNotFoundError:
                pass
            except (ValueError, ObjectTooLargeError):
                logger.warning("%s/%s is damaged, and tells nothing", self._store.url, key)
            self._known[incarnation] = origin if origin is not None and origin.incarnation == incarnation else None
        return self._known[incarnation]


def _maker(folder: FolderFacts) -> str:
    """The incarnation that made a checkpoint; empty for files of several, or of none, which decide nothing."""
    made_by = {match[1] for file in folder.files if (match := _SHARD.fullmatch(file))}
    return made_by.pop() if len(made_by) == 1 else ""


def number_of(incarnation: str) -> int:
    """The number of an incarnation, in the order of starts; two that raced may share one. -1 if the name has none."""
    digits = incarnation.partition("-")[0]
    return int(digits) if digits.isdecimal() else -1


class Fence:
    """The check before each commit: one read of storage, as long as no newer generation exists."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._chain = Chain(store)
        self._known: dict[int, LeaseClaim] = {}

    def check(self, incarnation: str, *, step: int) -> None:
        """Raises: LeaseLostError if a newer generation has resumed without `step` of `incarnation`; StorageError."""
        own = newest = number_of(incarnation)
        if own < 1:
            return
        while self._find(newest + 1) is not None:
            newest += 1
        if newest == own:
            return
        mine = self._find(own)
        for number in range(own + 1, newest + 1):
            other = self._known[number]
            # A damaged claim decides nothing.
            if other.owner and (mine is None or mine.owner not in ("", other.owner)):
                raise LeaseLostError(f"step {step} of {incarnation} is not committed: {other} has taken over the run")
        if not Lineage(self._store).has(incarnation, step):
            raise LeaseLostError(f"step {step} of {incarnation} is not committed: generation {newest} continued without it")

    def _find(self, number: int) -> LeaseClaim | None:
        if number not in self._known and (found := self._chain.read(number)) is not None:
            self._known[number] = found
        return self._known.get(number)
