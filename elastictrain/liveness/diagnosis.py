"""Which ranks of a group cause a hang, and which only wait.

In a hang nearly all ranks wait: those in a collective wait for one that is not. All ranks run the same program, so they wait
for the rank that has come least far in it.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import msgspec

from elastictrain.events import Hang
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

LONGEST_TEXT = 200


@dataclass(frozen=True, slots=True)
class Entered:
    """The last collectives that a rank has entered; empty if unknown."""

    sequences: Mapping[str, int] = field(default_factory=dict)  # process group -> number of its last one, equal on all ranks
    last: Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)] = ""  # the newest of all, for messages


def last_entered(trace: str) -> Entered:
    """Parse a dump of the flight recorder; empty if its form is unknown."""
    try:
        entries = [entry for entry in json.loads(trace)["entries"] if not entry["is_p2p"]]
        entries.sort(key=lambda entry: int(entry["record_id"]))
        sequences = {str(entry["process_group"][0]): int(entry["collective_seq_id"]) for entry in entries}
        if not entries:
            return Entered()
        newest = entries[-1]
        what = f"{newest.get('profiling_name')} no. {newest['collective_seq_id']} of group {newest['process_group'][0]}"
    except (ValueError, KeyError, TypeError, IndexError):
        return Entered()
    return Entered(sequences, f"{what}, sizes {newest.get('input_sizes')}"[:LONGEST_TEXT])


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

    reason: str  # `frozen`, `behind`, `did not enter`; `nobody`: all ranks are at one place, so what connects them is at fault
    guilty: tuple[RankStatus, ...]
    waiting: tuple[RankStatus, ...]

    def later(self, seconds: float) -> "HangDiagnosis":
        """The same `seconds` later, if no rank has moved."""
        guilty = tuple(replace(one, silent_s=one.silent_s + seconds) for one in self.guilty)
        return HangDiagnosis(self.reason, guilty, tuple(replace(one, silent_s=one.silent_s + seconds) for one in self.waiting))

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
    frozen = [one for one in statuses if one.still_s > frozen_s]
    least = min((progress_order(one.mark) for one in statuses), default=None)
    behind = [one for one in statuses if progress_order(one.mark) == least]
    absent = [one for one in statuses if any(_lags(one, other) for other in statuses)]
    guilty: list[RankStatus] = []
    if 0 < len(frozen) < len(statuses):
        reason, guilty = "frozen", frozen
    elif len(behind) < len(statuses) or len(statuses) == 1:
        reason, guilty = "behind", behind
    # If each rank lags behind another one in some group, none can be singled out.
    elif 0 < len(absent) < len(statuses):
        reason, guilty = "did not enter", absent
    else:
        reason = "nobody"
    return HangDiagnosis(reason, tuple(guilty), tuple(one for one in statuses if one not in guilty))


def paragraph(found: HangDiagnosis) -> str:
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
    return text


def _lags(one: RankStatus, other: RankStatus) -> bool:
    """Whether `other` has entered a collective of a group of both that `one` has not."""
    return any(other.entered.sequences.get(group, last) > last for group, last in one.entered.sequences.items())


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
