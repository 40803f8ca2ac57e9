"""Which slot takes the next snapshot. Pure: all ranks compute the same answer from the same flags."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elastictrain.checkpoint.memory.folder import SnapshotSet
from elastictrain.checkpoint.memory.slot import SnapshotId


def agreed_steps(rows: Sequence[Sequence[int | None]], *, sets: Sequence[SnapshotSet]) -> list[int | None]:
    """The step of one of these sets that each slot must keep, if any. `rows[r][s]`: which of their steps rank r has in slot s.
    Pure."""
    return [next((one.step for one in sets if _must_keep(one, slot, rows)), None) for slot in range(len(rows[0]))]


def _must_keep(one: SnapshotSet, slot: int, rows: Sequence[Sequence[int | None]]) -> bool:
    """Whether the ranks have a set in this slot. For a rank that has come to a new host, with nothing of it, or that there is
    no more, a replica on another host will do."""
    of_ranks = [*rows, *[[None] * len(rows[0])] * one.world_size][: one.world_size]
    return any(row[slot] == one.step for row in of_ranks) and all(
        row[slot] == one.step or (row[slot] is None and one.step not in row and any(held.replica for held in one.sources[rank]))
        for rank, row in enumerate(of_ranks)
    )


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

        The oldest snapshot is overwritten first, and only while another complete one remains or there is no other slot. The
        newest complete one is not, while a newer one is being copied.
        """
        candidates, newest = [], self.newest_whole()
        copying = any(step is not None and not self._is_whole(index) for index, step in enumerate(self._steps))
        for index, step in enumerate(self._steps):
            if self._busy[index] or not self._is_known(step):
                continue
            others = [place for place in range(len(self._steps)) if place != index]
            if step is None or self._torn[index]:
                # A snapshot that is torn on one rank is of no use on any.
                candidates.append((0, index))
            elif (
                step not in protected and (not others or any(map(self._is_whole, others))) and not (copying and step == newest)
            ):
                candidates.append((step, index))
        return min(candidates)[1] if candidates else None

    def holds(self, step: int) -> bool:
        return step in self._steps

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
    safe: SnapshotId | None = None
    under_way: int | None = None
    asked_at: int = -1  # step at which the round began
    after_step: int = -1  # only newer steps are replicated

    @classmethod
    def after(cls, sets: Sequence[SnapshotSet], *, incarnation: str) -> "Rounds":
        """Those of a new incarnation that goes on from the first of these `sets_to_keep`. Without one on two hosts the restored
        one stays as if it were: after the loss of another host it may be complete all the same."""
        if not sets:
            return cls(incarnation)
        safe = next((one for one in sets if one.on_two_hosts), sets[0])
        return cls(incarnation, SnapshotId(safe.incarnation, safe.step), after_step=sets[0].step)

    @property
    def safe_step(self) -> int | None:
        return None if self.safe is None else self.safe.step

    @property
    def protected(self) -> tuple[int | None, int | None]:
        return (self.safe_step, self.under_way)

    def update(self, step: int, *, sending: bool, failed: bool) -> None:
        """The flags in `step`: some host still sends, or has failed to."""
        if self.under_way is None or step <= self.asked_at or sending:
            return
        if not failed:
            self.safe, self.after_step = SnapshotId(self.incarnation, self.under_way), self.under_way
        self.under_way = None

    def next(self, newest: int | None, *, at: int) -> int | None:
        if self.under_way is not None or newest is None or newest <= self.after_step:
            return None
        self.under_way, self.asked_at = newest, at
        return newest
