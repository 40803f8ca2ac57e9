"""Which failure of a report was caused by which injected fault. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastictrain.chaos.invariants import Blamed
from elastictrain.chaos.plan import ChaosKind, PlannedFault
from elastictrain.report.failures import FailureRecord


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that has happened at `time_s` (Unix), while which generation was the newest, and to which rank (-1: none).
    `recovered_s`: from then until all hosts trained again; None if nobody waited for that."""

    fault: PlannedFault
    generation: int
    rank: int
    recovered_s: float | None = None
    time_s: float = 0.0


def followed_by(
    struck: Sequence[Struck], failures: Sequence[FailureRecord], plan_name: Callable[[str], str], *, alone: bool = False
) -> tuple[dict[int, FailureRecord], list[Blamed]]:
    """By number of the fault, the failure of the generation that it struck; where it struck several, that of the last one.
    `plan_name`: replaces names of hosts by those of the plan. `alone`: there is one host, whose workers save and leave in order
    when they lose their launcher."""
    of_generation = {one.generation: one for one in failures}
    last = {one.generation: number for number, one in enumerate(struck)}
    found: dict[int, FailureRecord] = {}
    blamed = []
    for number, one in enumerate(struck):
        failure = of_generation.get(one.generation) if last[one.generation] == number else None
        if failure is not None:
            found[number] = failure
        orderly = alone and failure is None and one.fault.kind is ChaosKind.KILL_LAUNCHER
        if last[one.generation] == number and not orderly:
            culprit = plan_name(failure.culprit) if failure is not None else None
            blamed.append(Blamed(one.fault, culprit, one.rank))
    return found, blamed
