"""Preflight policy: how much is checked, what a failed check means, and what each host then does. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby

from elastictrain.errors import EXIT_TRANSPORT, ConfigError, ElasticTrainError, HostUnfitError, PreflightError
from elastictrain.preflight.verdict import Scope, Status, Verdict, describe, failures, findings, worst_first

PastFindings = Sequence[Mapping[str, object]]  # the findings of one `preflight` event
STARTS = 20  # number of starts that `find_repeated` covers
# Checks of hosts and links, causes before symptoms.
CHAIN = ("name", "interface", "mtu", "roster", "reachable", "loss", "latency", "bandwidth")


class Level(StrEnum):
    OFF = "off"
    GROUP = "group"  # the new group alone: a recovery in place on hosts that have not changed
    QUICK = "quick"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Chosen:
    """How much is checked, and why."""

    level: Level
    reason: str
    after_failure: bool = False  # whether the transport has failed before this start
    first_collective: bool = False  # whether that is all that is checked of the new group


def choose_level(*, first_start: bool, exit_codes: Sequence[int | None]) -> Chosen:
    """The level if the configuration leaves it open. `exit_codes`: of the last generation's ranks. A transport failure means
    the network, unless a rank without exit code (None) was killed: then the others only noticed that."""
    if first_start:
        return Chosen(Level.FULL, "first start")
    if EXIT_TRANSPORT in exit_codes and None not in exit_codes:
        return Chosen(Level.FULL, "the last incarnation ended with a transport failure", after_failure=True)
    return Chosen(Level.QUICK, "restart")


def find_repeated(verdicts: Sequence[Verdict], before: Sequence[PastFindings]) -> list[str]:
    """Problems of this start that earlier starts had, too, the most frequent first: an interface that flaps looks healthy in a
    single check. `before`: the findings of each earlier start, newest last."""
    earlier = [{(str(row.get("check")), str(row.get("subject"))) for row in rows} for rows in before[-(STARTS - 1) :]]
    times = {key: 1 + sum(key in one for one in earlier) for key in ((one.check, one.subject) for one in findings(verdicts))}
    counted = sorted(times.items(), key=lambda one: -one[1])
    starts = 1 + len(earlier)
    return [f"{check} of {subject}: {num} of the last {starts} starts" for (check, subject), num in counted if num > 1]


def find_slow(before: Sequence[PastFindings], *, modes: Mapping[str, str], hosts: Collection[str]) -> str:
    """Why all is to be measured again: one of `hosts` was left out as slow, or the last start went on with one; or empty."""
    failed = [row for rows in before for row in rows if row.get("status") == "fail"]
    slow = [host_of(str(row.get("subject"))) for row in failed if modes.get(str(row.get("check"))) == "exclude"]
    if back := [host for host in slow if host in hosts]:
        return f"{back[-1]} was left out for being slow, and is back"
    excused = any(row.get("excused") is True for rows in before[-1:] for row in rows)
    return "the last start went on although a part of it was too slow" if excused else ""


def apply_modes(verdicts: Iterable[Verdict], modes: Mapping[str, str], *, spare: int | None = None) -> list[Verdict]:
    """Apply the mode of each check: `off` drops its verdicts, `warn` turns its failures into warnings, `exclude` does so if no
    host is to blame, or more hosts failed than the `spare` ones that the run can do without (None: any number)."""
    kept = [one for one in verdicts if modes.get(one.check) != "off"]
    unfit = {host_of(one.subject) for one in failures(kept) if one.scope is Scope.HOST and modes.get(one.check) != "warn"}
    for index, one in enumerate(kept):
        mode, failed = modes.get(one.check), one.status is Status.FAIL
        excused = mode == "exclude" and spare is not None and (one.scope is not Scope.HOST or len(unfit) > spare)
        if failed and (mode == "warn" or excused):
            kept[index] = replace(one, status=Status.WARN, excused=excused)
    return kept


def drop_symptoms(verdicts: Sequence[Verdict], *, hosts: Collection[str]) -> list[Verdict]:
    """The verdicts, causes first, without the findings that another explains: one of an earlier check of `CHAIN`, or of a host
    instead of a link, that failed on the same host or link, or at an end of the link, or on all hosts but one."""
    places = {check: place for place, check in enumerate(CHAIN)}

    def order(one: Verdict) -> tuple[int, bool]:
        return places.get(one.check, len(places)), one.scope is not Scope.HOST

    bad: set[str] = set()
    failed: set[frozenset[str]] = set()
    kept: list[Verdict] = []

    def is_symptom(one: Verdict) -> bool:
        nobody_left = one.scope is Scope.GROUP and bad and len(set(hosts) - bad) < 2
        known = one.check in places and one.status in (Status.WARN, Status.FAIL)
        return known and bool(bad & _ends(one) or _ends(one) in failed or nobody_left)

    for _, group in groupby(sorted(verdicts, key=order), key=order):
        found = [one for one in group if not is_symptom(one)]
        kept += found
        failed |= {_ends(one) for one in failures(found)}
        bad |= {one.subject for one in failures(found) if one.scope is Scope.HOST}
    return worst_first(kept)


def _ends(verdict: Verdict) -> frozenset[str]:
    return frozenset(verdict.subject.split(" -> "))


def decide(verdicts: Sequence[Verdict], *, host: str, hosts: Sequence[str]) -> ElasticTrainError | None:
    """Why `host`, one of `hosts`, leaves; None if it continues.

    - Nothing failed: continue.
    - Every host failed the same check by itself: other hosts would fail, too, so exit without another try (78), unless the
      failure may pass by itself (71).
    - This host failed a check of hosts: it is unfit (69), and may be replaced.
    - Another host failed, or a link or the group: start again, without the culprit or as another try (71).
    """
    failed = failures(verdicts)
    if not failed:
        return None
    of_hosts = [one for one in failed if one.scope is Scope.HOST]
    culprits = {(one.check, host_of(one.subject)) for one in of_hosts}
    own = [one for one in of_hosts if host_of(one.subject) == host]
    alike = next((one for one in failed if all((one.check, other) in culprits for other in hosts)), None)
    if len(hosts) > 1 and alike is not None:
        passing = any(one.may_pass for one in failed if one.check == alike.check)
        reason = f"every host fails the check {alike.check}: {describe(alike)}"
        return PreflightError(reason) if passing else ConfigError(reason)
    if own:
        return HostUnfitError(f"this host is unfit: {describe(own[0])}")
    return PreflightError(f"preflight failed: {describe(failed[0])}")


def host_of(subject: str) -> str:
    return subject.rpartition(" on ")[2]
