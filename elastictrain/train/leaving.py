"""How long a run that was asked to stop waits for its state to be safe, and what it has reached. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from elastictrain.checkpoint.saver.final_save import KEPT_S
from elastictrain.fault.stop import StopRequest

Tier = Literal["storage", "peer", "memory", "nothing"]

_SHARE_OF_THE_END = 0.25
_LEAST_COPY_S = 5.0
"""A snapshot in host memory is tried, however late it is: it takes a second at most, and what comes then may be late, too."""


@dataclass(frozen=True, slots=True)
class Reached:
    """The newest step that a next start can go on from, and the safest place that has it."""

    step: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class SaveStatus:
    """What one rank says while all wait for one save. All decide by what all say, and so alike."""

    left_s: float | None
    """Until it has to go; None: nobody asked it to, or nobody said by when."""

    sending: bool = False
    """Whether its host still sends replicas."""

    unsent: bool = False
    """Whether they did not arrive."""

    saved: bool = False
    """Whether the saver has committed the step; rank 0 alone knows."""

    error: str = ""
    """Why the save comes to nothing."""

    busy: tuple[bool, ...] = ()
    torn: tuple[bool, ...] = ()
    """Of its slots, as in `StepFlags`."""


def left_s(request: StopRequest | None, *, now_s: float, grace_s: float) -> float | None:
    """How long a save may still be waited for; None: as long as it takes. All times are monotonic.

    The end of a run needs its own time: `grace_s`, or a quarter of a notice that is short.
    """
    if request is None or request.deadline_s is None:
        return None
    margin_s = min(grace_s, _SHARE_OF_THE_END * max(0.0, request.deadline_s - request.since_s))
    return request.deadline_s - margin_s - now_s


def least(times_s: Sequence[float | None]) -> float | None:
    """The shortest of those that are limited."""
    return min((one for one in times_s if one is not None), default=None)


def copy_limit_s(left: float | None, *, most_s: float) -> float:
    """How long to wait for a copy into host memory."""
    return most_s if left is None else min(most_s, max(left, _LEAST_COPY_S))


@dataclass(frozen=True, slots=True)
class LeaveDecision:
    """Waiting for the save of one step is over, on all ranks alike."""

    tier: Tier
    """The safest place that has the step by now."""

    limited: bool
    """Whether this run has to go by some time."""

    error: str = ""
    """Why the save came to nothing, while there is time to try it again."""


def judge(told: Sequence[SaveStatus], *, replicating: bool) -> LeaveDecision | None:
    """Whether waiting is over, from what the ranks say in one round; None if not.

    `replicating`: whether replicas of the step were asked for. Storage is waited for as long as there is time, and what the
    peers have counts only when there is none.
    """
    left = least([one.left_s for one in told])
    limited = left is not None
    if any(one.saved for one in told):
        return LeaveDecision("storage", limited)
    tier: Tier = "peer" if replicating and not any(one.sending or one.unsent for one in told) else "memory"
    if left is not None and left <= 0:
        return LeaveDecision(tier, limited)
    error = next((one.error for one in told if one.error), "")
    return LeaveDecision(tier, limited, error) if error else None


def describe(reached: Reached, *, step: int, run_dir: str, several_hosts: bool) -> str:
    """Where the state of a run is that stopped after step `step`: goes on from a sentence that names this step."""
    if reached.tier == "nothing":
        return "; nothing is saved yet"
    hosts, they_live = ("these hosts", "they live") if several_hosts else ("this host", "it lives")
    memory = f"storage was not reached in time, and is still written to as long as {they_live}, for up to {KEPT_S / 3600:g} h"
    places = {
        "storage": f"saved in {run_dir}",
        "peer": f"only in the memory of {hosts}, but twice: {memory}",
        "memory": f"only in the memory of {hosts}: {memory}",
    }
    place = places[reached.tier]
    return f", which is {place}" if reached.step == step else f"; the newest step that is safe is {reached.step}, {place}"


def describe_kept(step: int | None, *, where: str) -> str:
    """What stays in host memory of a run that ends because storage refuses its checkpoints; empty if nothing does."""
    if step is None:
        return ""
    return (
        f"step {step} is in {where}, where the saver keeps it for up to {KEPT_S / 3600:g} h and goes on trying to write it; "
        "the same command on the same hosts goes on from there"
    )
