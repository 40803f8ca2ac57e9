"""Which processes of a host have to be ended from outside, because they cannot end themselves. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from elastictrain.liveness.progress import Phase
from elastictrain.liveness.progress_file import RankProgress

PULSE_S = 2.0
"""A process whose watchdog has not run for so long is stopped, or a thread of it holds the interpreter's lock."""

SURVIVOR_S = 1.4
"""How long a process may outlive another one of its group in which it waits for it; it is ended by itself before, if it can."""

ENDING_S = 8.0
"""The same for one that already ends, and says why."""

_MARGIN_S = 3.0
"""What the limits that a process has for itself may be late."""

Kind = Literal["stopped", "frozen", "stuck", "left behind"]


@dataclass(frozen=True, slots=True)
class Seen:
    """One rank of this host, as it is seen from outside. Times are those in which the observer itself was awake."""

    marks: RankProgress
    unchanged_s: float
    """Since its mark was last seen to change."""

    still_s: float
    """Since its pulse was last seen to go on."""

    stopped: bool = False
    """Whether a signal has stopped it."""

    gone_s: float | None = None
    """Since it ended; None as long as it lives."""


@dataclass(frozen=True, slots=True)
class KillDecision:
    """A process has to be ended."""

    seen: Seen
    kind: Kind
    silent_s: float
    bound_s: float

    @property
    def hangs(self) -> bool:
        """Whether it is at fault, and does not only wait for one that is gone."""
        return self.kind != "left behind"


def judge(seen: Sequence[Seen]) -> list[KillDecision]:
    """Those that must be ended now."""
    failed_peer = [one for one in seen if one.gone_s is not None and one.marks.mark.phase is not Phase.END]
    longest_gone_s = max((one.gone_s for one in failed_peer if one.gone_s is not None), default=0.0)
    sentences = (_judge_one(one, gone_s=longest_gone_s) for one in seen if one.gone_s is None)
    return [sentence for sentence in sentences if sentence is not None]


def _judge_one(one: Seen, *, gone_s: float) -> KillDecision | None:
    marks = one.marks
    if one.stopped and one.still_s > marks.stopped_s:
        return KillDecision(one, "stopped", one.still_s, marks.stopped_s)
    # One that runs ends itself, knows of the others when it does so, and is given the time to say what it knows.
    if one.still_s > PULSE_S and one.unchanged_s > marks.bound_s and not marks.ending:
        return KillDecision(one, "frozen", one.unchanged_s, marks.bound_s)
    latest_s = marks.limit_s + marks.grace_s + _MARGIN_S
    if one.unchanged_s > latest_s:
        return KillDecision(one, "stuck", one.unchanged_s, latest_s)
    patience_s = ENDING_S if marks.ending else SURVIVOR_S
    if gone_s > patience_s and marks.mark.phase is not Phase.END:
        return KillDecision(one, "left behind", gone_s, patience_s)
    return None
