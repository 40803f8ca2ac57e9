"""The shortest plan that still fails, found by trying. Pure, but for `fails`.

Source of the search: Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input" (2002), ddmin.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from elastictrain.chaos.plan import TRAITS, FaultPlan, PlannedFault

Fails = Callable[[FaultPlan], bool]


@dataclass(frozen=True, slots=True)
class Shrunk:
    plan: FaultPlan
    tries: int
    minimal: bool  # whether no fault can be left out; False where the tries were used up


@dataclass(slots=True)
class _Trials:
    """Runs plans, each once, as long as it may."""

    fails: Fails
    left: int
    passed: set[FaultPlan]

    def still_fails(self, plan: FaultPlan) -> bool:
        if plan in self.passed or not self.left:
            return False
        self.left -= 1
        if self.fails(plan):
            return True
        self.passed.add(plan)
        return False


def shrink(plan: FaultPlan, fails: Fails, *, tries: int = 200) -> Shrunk:
    """`plan` fails. `tries`: how many plans are run at most."""
    trials = _Trials(fails, tries, set())
    plan = _fewer(plan, trials)
    minimal = bool(trials.left)
    for place in range(len(plan.faults)):
        for simplify in _SIMPLER:
            fault = plan.faults[place]
            simpler = simplify(fault, plan)
            tried = plan.of(*plan.faults[:place], simpler, *plan.faults[place + 1 :])
            if simpler != fault and trials.still_fails(tried):
                plan = tried
    return Shrunk(plan, tries - trials.left, minimal)


def _fewer(plan: FaultPlan, trials: _Trials) -> FaultPlan:
    """Leave out halves, quarters and so on down to single faults, from the end first: later ones matter least."""
    parts = 2
    while plan.faults and trials.left:
        size = -(-len(plan.faults) // parts)
        smaller = next((one for one in _without(plan, size) if trials.still_fails(one)), None)
        if smaller is not None:
            plan, parts = smaller, max(2, parts - 1)
        elif size == 1:
            break
        else:
            parts = min(len(plan.faults), 2 * parts)
    return plan


def _without(plan: FaultPlan, size: int) -> Iterator[FaultPlan]:
    faults: Sequence[PlannedFault] = plan.faults
    for end in range(len(faults), 0, -size):
        yield plan.of(*faults[: max(0, end - size)], *faults[end:])


def _first_host(fault: PlannedFault, plan: FaultPlan) -> PlannedFault:
    return replace(fault, host=plan.hosts[0]) if fault.host else fault


def _first_worker(fault: PlannedFault, _: FaultPlan) -> PlannedFault:
    return replace(fault, worker=0)


def _shortest(fault: PlannedFault, _: FaultPlan) -> PlannedFault:
    return replace(fault, lasts_s=min(fault.lasts_s, TRAITS[fault.kind].lasts_s[0]))


def _least(fault: PlannedFault, _: FaultPlan) -> PlannedFault:
    return replace(fault, amount=min(fault.amount, TRAITS[fault.kind].amount[0]))


def _at_whole_second(fault: PlannedFault, _: FaultPlan) -> PlannedFault:
    return fault if fault.at_s is None else replace(fault, at_s=float(round(fault.at_s)))


_SIMPLER = (_first_host, _first_worker, _shortest, _least, _at_whole_second)
