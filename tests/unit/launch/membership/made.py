from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf
from string import ascii_lowercase

from elastictrain.config.composed import LaunchGroup
from elastictrain.fault.reasons import SlowRank
from elastictrain.launch.membership.decide import decide
from elastictrain.launch.membership.observation import ClusterState, HostObservation
from elastictrain.launch.membership.records import (
    Decision,
    End,
    EndKind,
    Generation,
    GenerationFailure,
    GenerationMember,
    GenerationOutcome,
    HostRecord,
    HostState,
)

OPTIONS = LaunchGroup()
NOW_S = 10_000.0
"""Everything in a view that nobody dates otherwise happened long before."""

EVERYBODY = (*ascii_lowercase, "aa", *(f"{letter}{number}" for letter in "hz" for number in range(100)))
"""Hosts that every host hears unless a test says otherwise."""


def record(
    host: str,
    state: HostState = HostState.READY,
    *,
    ended: int = 0,
    order: int = -1,
    processes: int = 1,
    reason: str = "",
    committed: int = 0,
    hears: Iterable[str] = EVERYBODY,
) -> HostRecord:
    return HostRecord(
        host, host, f"address-{host}", 7, 29_500, processes, order, state, reason, 1, ended, committed, tuple(hears)
    )


def observed(
    line: HostRecord, *, changed_s: float = NOW_S, fresh: bool = True, since_s: float = 0.0, hears_since_s: float = 0.0
) -> HostObservation:
    return HostObservation(line, changed_s, fresh, since_s, hears_since_s)


def member(host: str, *, processes: int = 1) -> GenerationMember:
    return GenerationMember(host, host, f"address-{host}", 7, processes)


def generation(
    number: int,
    hosts: str,
    *,
    outcome: GenerationOutcome = GenerationOutcome.RUN,
    failures: tuple[GenerationFailure, ...] = (),
    excluded: tuple[str, ...] = (),
    exit_code: int = 0,
    slow: End | None = None,
) -> Generation:
    members = tuple(member(host) for host in hosts)
    return Generation(number, outcome, members, 29_500, hosts[:1], failures, excluded, 0.0, exit_code, "made-up", slow=slow)


def end(
    host: str,
    kind: EndKind,
    code: int = 0,
    *,
    number: int = 1,
    step: int = 0,
    committed: int = 0,
    phase: str = "",
    lost: str = "",
    blames: tuple[str, ...] = (),
    slow_rank: int = -1,
    restored: int = 0,
) -> End:
    return End(number, host, kind, code, phase, step, committed, f"{kind}-{host}", lost, blames, slow_rank, restored)


def by_host(ends: Iterable[End]) -> Mapping[str, End]:
    return {one.host: one for one in ends}


def cluster(
    *others: HostObservation,
    me: HostRecord | None = None,
    running: Generation | None = None,
    newest: Generation | None = None,
    ends: Iterable[End] = (),
    ended_s: float = 0.0,
    began_s: float = 0.0,
    newest_since_s: float = 0.0,
    now_s: float = NOW_S,
    read_s: float | None = None,
    silent: Iterable[str] = (),
    heard: Iterable[str] = EVERYBODY,
    heard_since_s: float = 0.0,
    expected_hosts: int = 0,
    restart_cost_s: float = 0.0,
    most_processes: int = 0,
    left_s: float = inf,
    stop_reason: str = "",
    straggles: SlowRank | None = None,
    slow_since_s: float = 0.0,
) -> ClusterState:
    told = by_host(ends)
    if me is None:
        me = record("a", HostState.READY if running is None else HostState.BUSY)
    return ClusterState(
        now_s=now_s,
        began_s=began_s,
        me=me,
        running=running,
        newest=newest,
        newest_since_s=newest_since_s,
        ends=told,
        ended_since_s=ended_s if told else None,
        observed={one.record.host: one for one in others},
        read_s=now_s if read_s is None else read_s,
        silent=frozenset(silent),
        heard=frozenset(heard),
        heard_since_s=heard_since_s,
        expected_hosts=expected_hosts,
        restart_cost_s=restart_cost_s,
        most_processes=most_processes,
        left_s=left_s,
        stop_reason=stop_reason,
        straggles=straggles,
        slow_since_s=slow_since_s,
    )


def at(look: ClusterState, now_s: float, options: LaunchGroup = OPTIONS) -> Decision:
    """What is decided when nothing has changed by then but the time."""
    living = {
        host: replace(one, changed_s=now_s) if one.fresh and one.changed_s == look.now_s else one
        for host, one in look.observed.items()
    }
    return decide(replace(look, now_s=now_s, read_s=now_s, observed=living), options)
