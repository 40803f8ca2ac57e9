"""Which ranks of a group cause a hang, and which only wait.

In a hang nearly all ranks wait: those in a collective wait for one that is not. All ranks run the same program, so they wait
for the rank that has come least far in it. A rank that calls another collective than the rest, or one more or less, is at
fault wherever it is: the rest then waits for a call that it will never make.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from elastictrain.events import CollectiveFaultFound, Hang
from elastictrain.liveness.flight_recorder import CollectiveFault, Entered, find_collective_fault
from elastictrain.liveness.progress import Phase, ProgressMark

LEFT_TO_THE_GUILTY_S = 3.0  # how long waiting ranks leave it to the guilty rank's host to end that rank and report it
_NAMED_AT_MOST = 8
# Passes alternate within a step, before the phases that follow all passes.
_IN_PASS = {Phase.STEP: 0, Phase.DATA: 0, Phase.FORWARD: 1, Phase.BACKWARD: 2}
_AFTER_PASSES = {Phase.REDUCE: 1, Phase.UPDATE: 2, Phase.SAVE: 3, Phase.EVAL: 3, Phase.DETACH: 4, Phase.END: 4}
# The checks of a group run while it is formed.
_BEFORE_STEPS = {
    Phase.STANDBY: 0, Phase.START: 0, Phase.RENDEZVOUS: 1, Phase.PREFLIGHT: 2, Phase.GROUP: 2, Phase.BUILD: 3, Phase.RESTORE: 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank, as another one sees it."""

    rank: int
    host: str
    mark: ProgressMark
    silent_s: float  # since its phase began
    bound_s: float
    still_s: float = 0.0  # since its last heartbeat, at least
    entered: Entered = field(default_factory=Entered)

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def place(self) -> str:
        return f"{self.mark}, {self.entered.last}" if self.entered.last else f"{self.mark}"


@dataclass(frozen=True, slots=True)
class HangDiagnosis:
    """The ranks at fault, and why."""

    reason: str
    """`frozen`, `mismatch`, `behind`, `did not enter`; `nobody`: all are at one place, so what connects them is at fault."""
    guilty: tuple[RankStatus, ...]
    waiting: tuple[RankStatus, ...]
    fault: CollectiveFault | None = None  # the collective at which the ranks part, if it is known

    def later(self, seconds: float) -> "HangDiagnosis":
        """The same `seconds` later, if no rank has moved."""
        guilty = tuple(replace(one, silent_s=one.silent_s + seconds) for one in self.guilty)
        waiting = tuple(replace(one, silent_s=one.silent_s + seconds) for one in self.waiting)
        return replace(self, guilty=guilty, waiting=waiting)

    def is_guilty(self, rank: int) -> bool:
        return any(one.rank == rank for one in self.guilty)

    def is_in_vain(self, rank: int) -> bool:
        """Whether this rank, once silent beyond its bound, has nothing to wait for any more.

        Another guilty rank has its own bound; then it ends itself or is ended from outside, and its group notices.
        """
        return self.is_guilty(rank) or (
            bool(self.guilty) and all(one.silent_s > one.bound_s + LEFT_TO_THE_GUILTY_S for one in self.guilty)
        )

    def event(self, text: str, *, stacks: str | None) -> Hang:
        """Phase, step and times are those of the first guilty rank, or else of the first that waits. `stacks`: their key."""
        first = (self.guilty or self.waiting)[0]
        return Hang(
            guilty=tuple(one.name for one in self.guilty),
            hosts=tuple(sorted({one.host for one in self.guilty})),
            reason=self.reason,
            phase=str(first.mark.phase),
            step=first.mark.step,
            silent_s=round(first.silent_s, 3),
            bound_s=first.bound_s,
            waiting={one.name: one.place for one in self.waiting},
            text=text,
            stacks=stacks,
        )

    def name(self, rank: int) -> str:
        return next((one.name for one in (*self.guilty, *self.waiting) if one.rank == rank), f"rank {rank}")

    @property
    def collective_event(self) -> CollectiveFaultFound | None:
        return self.fault.event(self.name) if self.fault is not None else None


def progress_order(mark: ProgressMark) -> tuple[int, int, int, int]:
    """How far a rank has come in the program that all ranks run; greater is further."""
    if mark.phase in _BEFORE_STEPS:
        return (0, _BEFORE_STEPS[mark.phase], 0, 0)
    # The end of a run has no step, and comes after all steps.
    step = 1 << 62 if mark.phase is Phase.END else max(1, mark.step)
    if mark.phase in _IN_PASS:
        return (step, 0, mark.micro_batch, _IN_PASS[mark.phase])
    return (step, _AFTER_PASSES[mark.phase], 0, 0)


def diagnose(statuses: Sequence[RankStatus], *, frozen_s: float) -> HangDiagnosis:
    """Find the ranks at fault among all that were heard. A rank silent for `frozen_s` counts as frozen."""
    fault = _resolve_ahead(statuses, find_collective_fault({one.rank: one.entered for one in statuses}))
    reason, ranks = _blame_frozen(statuses, frozen_s=frozen_s) or _blame(statuses, fault)
    guilty = tuple(one for one in statuses if one.rank in ranks)
    return HangDiagnosis(reason, guilty, tuple(one for one in statuses if one.rank not in ranks), fault)


def _blame_frozen(statuses: Sequence[RankStatus], *, frozen_s: float) -> tuple[str, tuple[int, ...]] | None:
    frozen = tuple(one.rank for one in statuses if one.still_s > frozen_s)
    return ("frozen", frozen) if 0 < len(frozen) < len(statuses) else None


def _resolve_ahead(statuses: Sequence[RankStatus], fault: CollectiveFault | None) -> CollectiveFault | None:
    """Ranks that have passed the place at which others wait for them will never come: one side has made a call too many, or has
    left one out, and that is the smaller side."""
    if fault is None or fault.kind != "missing":
        return fault
    orders = {one.rank: progress_order(one.mark) for one in statuses}
    if min(orders[rank] for rank in fault.culprits) <= max(orders[rank] for rank in fault.others):
        return fault
    if len(fault.culprits) == len(fault.others):
        return replace(fault, kind="skipped", culprits=(*fault.culprits, *fault.others), others=())
    if len(fault.culprits) < len(fault.others):
        return replace(fault, kind="skipped")
    return replace(fault, kind="extra", culprits=fault.others, others=fault.culprits)


def _blame(statuses: Sequence[RankStatus], fault: CollectiveFault | None) -> tuple[str, tuple[int, ...]]:
    if fault is not None and fault.kind not in ("missing", "not_started"):
        return "mismatch", fault.culprits
    orders = {one.rank: progress_order(one.mark) for one in statuses}
    behind = tuple(rank for rank, order in orders.items() if order == min(orders.values()))
    if len(behind) < len(statuses) or len(statuses) == 1:
        return "behind", behind
    return ("did not enter", fault.culprits) if fault is not None else ("nobody", ())


def paragraph(found: HangDiagnosis) -> str:
    """Who hangs where, for how long, and who waits for it: in words, without a line break. Pure."""
    collective = f". {found.fault.sentence(found.name)}" if found.fault is not None else ""
    if not found.guilty:
        where = _places(found.waiting)
        return (
            f"hang: all {len(found.waiting)} ranks that are heard wait at the same place ({where}): none can be singled "
            "out: look at the links between the hosts, and for a collective that ranks do not call alike"
        )
    sentences = [_name_culprits(one, reason=found.reason) for one in found.guilty[:_NAMED_AT_MOST]]
    if len(found.guilty) > _NAMED_AT_MOST:
        sentences.append(f"so do {len(found.guilty) - _NAMED_AT_MOST} more ranks")
    text = "hang: " + "; ".join(sentences)
    if found.waiting:
        names = ", ".join(one.name for one in found.waiting[:_NAMED_AT_MOST])
        more = len(found.waiting) - _NAMED_AT_MOST
        names += f" and {more} more" if more > 0 else ""
        text += f". {names} {'wait' if len(found.waiting) > 1 else 'waits'} for it in {_places(found.waiting)}"
    return text + collective


def _name_culprits(one: RankStatus, *, reason: str) -> str:
    text = f"{one.name} has been in {one.mark} for {one.silent_s:.1f} s (bound {one.bound_s:g} s)"
    if reason == "frozen":
        text += (
            f", and nothing was heard of it for {one.still_s:.1f} s: it is stopped, holds the interpreter's lock, or is cut off"
        )
    if one.entered.last:
        text += f"; the last collective that it entered is {one.entered.last}"
    return text


def _places(statuses: Sequence[RankStatus]) -> str:
    places = Counter(one.place for one in statuses)
    told = [f"{place} ({count} ranks)" if len(places) > 1 else place for place, count in places.most_common(3)]
    return "; ".join(told) + ("; and elsewhere" if len(places) > len(told) else "")
