"""Which slot takes the next snapshot. Pure: all ranks compute the same answer from the same flags."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from elastictrain.checkpoint.memory.folder import SnapshotSet
from elastictrain.checkpoint.memory.slot import SnapshotId


def agreed_step(of_ranks: Sequence[int | None], kept: Sequence[SnapshotSet]) -> int | None:
    """The step that a slot must keep, one of the sets `kept` or None. `of_ranks[r]`: which of their steps rank r holds there.
    For a rank that has come to a new host, and holds nothing, a replica on another host will do."""
    for one in kept:
        steps = [*of_ranks[: one.world_size], *[None] * (one.world_size - len(of_ranks))]
        if one.step in steps and all(
            step == one.step or (step is None and any(held.replica for held in sources))
            for step, sources in zip(steps, one.sources, strict=True)
        ):
            return one.step
    return None


class SlotBook:
    """The state of the slots. Each rank keeps the same one, from the same decisions and agreed flags."""

    def __init__(self, steps: Sequence[int | None]) -> None:
        """`steps[i]`: the step whose snapshot slot i holds on every rank, if any."""
        self._steps = list(steps)
        self._known_step = -1
        self._busy = [True] * len(steps)
        self._torn = [False] * len(steps)

    def update(self, step: int, *, busy: Sequence[bool], torn: Sequence[bool]) -> None:
        """The flags in `step`: which slots are busy or torn on some rank."""
        self._known_step = step
        self._busy, self._torn = list(busy), list(torn)

    def choose(self, *, protected: Collection[int | None] = ()) -> int | None:
        """The slot for a snapshot now, if any; the snapshots of `protected` steps stay.

        The oldest snapshot is overwritten first, and only while another complete one remains or there is no other slot.
        """
        candidates = []
        for index, step in enumerate(self._steps):
            if self._busy[index] or not self._is_known(step):
                continue
            others = [place for place in range(len(self._steps)) if place != index]
            if step is None or self._torn[index]:
                # A snapshot that is torn on one rank is of no use on any.
                candidates.append((0, index))
            elif step not in protected and (not others or any(map(self._is_whole, others))):
                candidates.append((step, index))
        return min(candidates)[1] if candidates else None

    def newest_whole(self) -> int | None:
        return max((step for index, step in enumerate(self._steps) if step and self._is_whole(index)), default=None)

    def started(self, index: int, step: int) -> None:
        self._steps[index] = step

    def _is_known(self, step: int | None) -> bool:
        """Flags from before a snapshot began do not describe it."""
        return step is None or self._known_step > step

    def _is_whole(self, index: int) -> bool:
        step = self._steps[index]
        return step is not None and self._is_known(step) and not self._torn[index]


@dataclass(slots=True)
class Rounds:
    """Which step is being replicated (`under_way`), and which is complete on two hosts (`safe`); the same on all ranks.

    The replicas of a lost host are all of one step. They are of use only with the other hosts' snapshots of the same step, so
    the hosts keep it until all replicas of a newer step have arrived.
    """

    incarnation: str = ""  # the present one
    safe: int | None = None
    inherited: Mapping[int, str] = field(default_factory=dict)  # incarnations of the steps in slots that are of earlier ones
    under_way: int | None = None
    asked_at: int = -1  # step at which the round began

    @property
    def protected(self) -> tuple[int | None, int | None]:
        return (self.safe, self.under_way)

    @classmethod
    def after(cls, kept: Sequence[SnapshotSet], *, steps: Collection[int | None], incarnation: str) -> "Rounds":
        """Those of a new incarnation that goes on from the sets of `kept`. `steps`: in the slots of all ranks."""
        here = [one for one in kept if one.step in steps]
        safe = next((one.step for one in here if one.on_two_hosts), None)
        return cls(incarnation, safe, {one.step: one.incarnation for one in here})

    def id_of(self, step: int) -> SnapshotId:
        return SnapshotId(self.inherited.get(step, self.incarnation), step)

    @property
    def safe_id(self) -> SnapshotId | None:
        return None if self.safe is None else self.id_of(self.safe)

    def update(self, step: int, *, sending: bool, failed: bool) -> None:
        """The flags in `step`: some host still sends, or has failed to."""
        if self.under_way is None or step <= self.asked_at or sending:
            return
        if not failed:
            self.safe = self.under_way
        self.under_way = None

    def next(self, newest: int | None, *, at: int) -> int | None:
        if self.under_way is not None or newest is None or newest <= (self.safe if self.safe is not None else -1):
            return None
        self.under_way, self.asked_at = newest, at
        return newest
