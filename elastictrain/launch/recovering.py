"""Which rung of the recovery ladder follows a failure on this host. Pure."""

from dataclasses import dataclass

from elastictrain.errors import EXIT_TRANSPORT
from elastictrain.identity import RecoveryPlan, Rung
from elastictrain.launch.membership.records import End, EndKind, Generation

_MOST_IN_PLACE = 2  # recoveries in place that fail before their first step; then all processes are started anew


@dataclass(frozen=True, slots=True)
class Recovering:
    """A generation has failed, and no step has been done since."""

    failed: Generation  # the last one that has failed
    end: End  # how it ended on this host
    since: float  # unix time at which this was known
    times: int  # generations that have failed since the last step
    lost: tuple[str, ...]  # what has died
    finished_step: int = 0  # the newest one of any worker of this host

    def keeps_workers(self, following: Generation) -> bool:
        """Whether the surviving workers keep their processes. Not if only connections broke: that may be the network, which the
        preflight of new processes checks; and not if recoveries in place fail again and again. The record of the failure
        decides, which all hosts share: a host may have noticed no more than broken connections."""
        cause = following.failures[-1] if following.failures else None
        died = self.end.exit_code != EXIT_TRANSPORT or self.end.kind is EndKind.LOST or bool(self.end.blames)
        if cause is not None and cause.generation == self.failed.number and len(self.failed.members) > 1:
            died = cause.exit_code != EXIT_TRANSPORT or bool(cause.hosts)
        return died and self.times <= _MOST_IN_PLACE

    def plan(self, following: Generation) -> RecoveryPlan:
        """The recovery by the generation `following`."""
        return RecoveryPlan(self.rung(following), self.lost, self.end.reason, self.since, self.finished_step)

    def rung(self, following: Generation) -> Rung:
        members = [(member.host, member.processes) for member in following.members]
        if members != [(member.host, member.processes) for member in self.failed.members]:
            return "regroup"
        return "in_place" if self.keeps_workers(following) else "restart"


def after_end(
    before: Recovering | None, generation: Generation, end: End, *, since: float, lost: tuple[str, ...], finished_step: int = 0
) -> Recovering | None:
    """The state after the end of a generation; None where nothing has failed. `before`: that of earlier failures since the last
    step; `since`: unix time at which this end began; `finished_step`: the newest one of any worker."""
    if not end.loses_state:
        return None
    times = before.times if before is not None else 0
    newest = max(finished_step, before.finished_step if before is not None else 0)
    return Recovering(generation, end, before.since if before is not None else since, times + 1, lost, newest)
