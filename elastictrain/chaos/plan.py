"""Plans of faults: made from a seed or a recorded trace, written to JSON and read from it. Pure.

A plan names kinds of faults, times and targets; what strikes is elsewhere, so one plan serves real hosts and simulated ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

from elastictrain.bounded_json import MalformedJsonError, encode_record, parse_record
from elastictrain.errors import UsageError
from elastictrain.simulate.faults import FaultKind, replay


class ChaosKind(StrEnum):
    """`amount` and `lasts_s` of a `PlannedFault` mean what stands beside a kind."""

    KILL_WORKER = "kill_worker"
    KILL_LAUNCHER = "kill_launcher"
    KILL_SAVER = "kill_saver"
    FREEZE = "freeze"  # all processes of a host are stopped for `lasts_s`
    HANG = "hang"  # a worker makes no call any more, and does not end
    LEAVE = "leave"  # a host is told, and taken away `amount` seconds later or when another comes, which is after `lasts_s`
    HOST_LOST = "host_lost"  # without a word; another comes after `lasts_s`
    CABLE = "cable"  # a host reaches nobody for `lasts_s`; a short one is a flap
    ONE_WAY = "one_way"  # what a host sends is lost for `lasts_s`
    SLOW_DISK = "slow_disk"  # each write of a host takes `amount` seconds more
    FULL_DISK = "full_disk"
    STORE_503 = "store_503"  # the share `amount` of requests is refused
    STORE_SLOW = "store_slow"  # each request takes `amount` seconds more
    STORE_AWAY = "store_away"  # for all hosts
    CLOCK = "clock"  # of a host, wrong by `amount` seconds
    FLIP_SNAPSHOT = "flip_snapshot"  # a bit at the share `amount` of the bytes
    FLIP_REPLICA = "flip_replica"
    FLIP_SHARD = "flip_shard"
    FLIP_GRADIENT = "flip_gradient"
    PARTITION = "partition"  # `amount` hosts, the target and the next ones, and the others do not reach each other
    BLIP = "blip"  # no host reaches another one
    WRONG_VERSION = "wrong_version"  # a launcher of another release comes


class FaultScope(StrEnum):
    WORKER = "worker"
    HOST = "host"
    RUN = "run"


@dataclass(frozen=True, slots=True)
class KindTraits:
    """What a fault of a kind strikes, and the ranges from which its figures are drawn."""

    scope: FaultScope = FaultScope.HOST
    lasts_s: tuple[float, float] = (0.0, 0.0)
    amount: tuple[float, float] = (0.0, 0.0)
    whole: bool = False  # `amount` is a whole number


_WORKER, _RUN = KindTraits(FaultScope.WORKER), FaultScope.RUN
_OUT_S, _FLIP, _SHARE = (3.0, 15.0), (0.0, 1.0), (0.1, 0.9)
TRAITS: Mapping[ChaosKind, KindTraits] = {
    ChaosKind.KILL_WORKER: _WORKER,
    ChaosKind.KILL_LAUNCHER: KindTraits(),
    ChaosKind.KILL_SAVER: KindTraits(),
    ChaosKind.FREEZE: KindTraits(lasts_s=_OUT_S),
    ChaosKind.HANG: _WORKER,
    ChaosKind.LEAVE: KindTraits(lasts_s=_OUT_S, amount=(5.0, 30.0)),
    ChaosKind.HOST_LOST: KindTraits(lasts_s=_OUT_S),
    ChaosKind.CABLE: KindTraits(lasts_s=_OUT_S),
    ChaosKind.ONE_WAY: KindTraits(lasts_s=_OUT_S),
    ChaosKind.SLOW_DISK: KindTraits(lasts_s=_OUT_S, amount=(0.1, 1.0)),
    ChaosKind.FULL_DISK: KindTraits(lasts_s=_OUT_S),
    ChaosKind.STORE_503: KindTraits(_RUN, _OUT_S, _SHARE),
    ChaosKind.STORE_SLOW: KindTraits(_RUN, _OUT_S, (0.1, 2.0)),
    ChaosKind.STORE_AWAY: KindTraits(_RUN, _OUT_S),
    ChaosKind.CLOCK: KindTraits(amount=(-30.0, 30.0), lasts_s=_OUT_S),
    ChaosKind.FLIP_SNAPSHOT: KindTraits(FaultScope.WORKER, amount=_FLIP),
    ChaosKind.FLIP_REPLICA: KindTraits(FaultScope.WORKER, amount=_FLIP),
    ChaosKind.FLIP_SHARD: KindTraits(FaultScope.WORKER, amount=_FLIP),
    ChaosKind.FLIP_GRADIENT: KindTraits(FaultScope.WORKER, amount=_FLIP),
    ChaosKind.PARTITION: KindTraits(lasts_s=_OUT_S, amount=(1, 2), whole=True),
    ChaosKind.BLIP: KindTraits(_RUN, (0.5, 2.0)),
    ChaosKind.WRONG_VERSION: KindTraits(),
}


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """Strikes after `step` is done, or `at_s` seconds after all hosts train; one of the two is None."""

    kind: ChaosKind
    at_s: float | None = None
    step: int | None = None
    host: str = ""  # empty: the whole run
    worker: int = 0  # the nth of its host
    lasts_s: float = 0.0  # 0: nothing is to end
    amount: float = 0.0

    def __str__(self) -> str:
        when = f"after step {self.step}" if self.at_s is None else f"at {self.at_s:g} s"
        worker = f", worker {self.worker}" if TRAITS[self.kind].scope is FaultScope.WORKER else ""
        lasts = f", for {self.lasts_s:g} s" if self.lasts_s else ""
        return f"{when}: {self.kind}{f' on {self.host}' if self.host else ''}{worker}{lasts}" + (
            f", {self.amount:g}" if self.amount else ""
        )


@dataclass(frozen=True, slots=True)
class FaultPlan:
    seed: int
    hosts: tuple[str, ...]
    workers: int  # of each host
    faults: tuple[PlannedFault, ...]
    strict: bool = False  # faults come at their times even where training has not gone on since the one before

    def of(self, *faults: PlannedFault) -> "FaultPlan":
        """The same run with other faults."""
        return replace(self, faults=faults)


def host_names(count: int) -> tuple[str, ...]:
    return tuple("abcdefghijklmnopqrstuvwxyz"[:count]) if count <= 26 else tuple(f"h{number:04d}" for number in range(count))


def seeded_plan(
    seed: int,
    *,
    hosts: int,
    workers: int,
    count: int = 0,
    until_s: float = float("inf"),
    kinds: Sequence[ChaosKind] = tuple(ChaosKind),
    every_s: tuple[float, float] = (20.0, 60.0),
) -> FaultPlan:
    """`count` faults (0: as many as come before `until_s`), the least and most time between two of them in `every_s`. Every
    kind comes before any comes again. Raises: UsageError."""
    if hosts < 1 or workers < 1:
        raise UsageError(f"a plan must have at least one host and one worker, but has {hosts} and {workers}")
    if not kinds or not 0 <= every_s[0] <= every_s[1] or (not count and not (every_s[1] and until_s < float("inf"))):
        raise UsageError(f"a plan must have kinds, an end and 0 <= least <= most seconds between faults, but has {every_s}")
    chance, names, faults, at_s = Random(seed), host_names(hosts), list[PlannedFault](), 0.0
    coming: list[ChaosKind] = []
    while True:
        at_s = round(at_s + chance.uniform(*every_s), 3)
        if at_s > until_s or (count and len(faults) == count):
            return FaultPlan(seed, names, workers, tuple(faults))
        coming = coming or chance.sample(kinds, len(kinds))
        faults.append(_drawn(coming.pop(), chance, at_s=at_s, hosts=names, workers=workers))


def _drawn(kind: ChaosKind, chance: Random, *, at_s: float, hosts: Sequence[str], workers: int) -> PlannedFault:
    traits = TRAITS[kind]
    host = "" if traits.scope is FaultScope.RUN else chance.choice(hosts)
    worker = chance.randrange(workers) if traits.scope is FaultScope.WORKER else 0
    lasts_s, amount = (round(chance.uniform(*one), 3) for one in (traits.lasts_s, traits.amount))
    if traits.whole:
        amount = min(float(round(amount)), max(1.0, len(hosts) - 1.0))
    return PlannedFault(kind, at_s=at_s, host=host, worker=worker, lasts_s=lasts_s, amount=amount)


def plan_of_trace(
    counts: Sequence[tuple[float, int]],
    *,
    hosts: int,
    workers: int,
    until_s: float,
    seed: int = 1,
    faster: float = 1.0,
    notice_s: float = 0.0,
    noticed: float = 0.0,
) -> FaultPlan:
    """The hosts of a trace that come and go (`simulate.faults.read_trace`), scaled to `hosts`, in 1/`faster` of its time;
    the share `noticed` of those that go are told `notice_s` before. `until_s`: of the plan."""
    names, away, faults = host_names(hosts), dict[int, PlannedFault](), list[PlannedFault]()
    for fault in replay(counts, machines=hosts, until_s=until_s * faster, seed=seed, noticed=noticed):
        at_s = round(fault.at_s / faster, 3)
        for machine in fault.machines:
            if fault.kind is FaultKind.COME:
                gone = away.pop(machine)
                faults.append(replace(gone, lasts_s=round(at_s - (gone.at_s or 0.0), 3)))
            else:
                told = fault.kind is FaultKind.NOTICE
                kind, amount = (ChaosKind.LEAVE, notice_s) if told else (ChaosKind.HOST_LOST, 0.0)
                away[machine] = PlannedFault(kind, at_s=at_s, host=names[machine], amount=amount)
    faults += [replace(one, lasts_s=round(until_s - (one.at_s or 0.0), 3)) for one in away.values()]
    # One that is back at once is no fault.
    whole = sorted((one for one in faults if one.lasts_s), key=lambda one: (one.at_s or 0.0, one.host))
    return FaultPlan(seed, names, workers, tuple(whole))


def write_plan(plan: FaultPlan) -> str:
    """JSON, a line for each fault."""
    head = encode_record({"seed": plan.seed, "hosts": plan.hosts, "workers": plan.workers, "strict": plan.strict}).decode()
    lines = (encode_record({key: value for key, value in _fields(one) if value is not None}).decode() for one in plan.faults)
    return f'{head[:-1]},"faults":[\n ' + ",\n ".join(lines) + "\n]}\n"


def _fields(fault: PlannedFault) -> Iterator[tuple[str, object]]:
    yield from ((name, getattr(fault, name)) for name in ("kind", "at_s", "step", "host", "worker", "lasts_s", "amount"))


def read_plan(text: str, *, name: str = "the plan") -> FaultPlan:
    """Raises: UsageError that names the file, the fault and what is wrong with it."""
    try:
        plan = parse_record(text, FaultPlan)
    except MalformedJsonError as error:
        raise UsageError(f"{name} {error}") from None
    if not plan.hosts or len(set(plan.hosts)) != len(plan.hosts) or plan.workers < 1:
        raise UsageError(f"{name} must have hosts, each once, and workers >= 1, but has {plan.hosts} and {plan.workers}")
    for number, fault in enumerate(plan.faults):
        if problem := _problem(fault, plan):
            raise UsageError(f"{name}: faults[{number}] ({fault.kind}) {problem}")
    return plan


def _problem(fault: PlannedFault, plan: FaultPlan) -> str:
    traits = TRAITS[fault.kind]
    if (fault.at_s is None) == (fault.step is None):
        return f"must have `at_s` or `step`, but has {'neither' if fault.step is None else 'both'}"
    if (fault.at_s or 0.0) < 0 or (fault.step or 0) < 0 or fault.lasts_s < 0:
        return "must have times >= 0, but has one < 0"
    if traits.scope is FaultScope.RUN and fault.host:
        return f"strikes the whole run: `host` must be empty, but is {fault.host!r}"
    if traits.scope is not FaultScope.RUN and fault.host not in plan.hosts:
        return f"must have a `host` of {', '.join(plan.hosts)}, but has {fault.host!r}"
    if not 0 <= fault.worker < plan.workers:
        return f"must have a `worker` below {plan.workers}, but has {fault.worker}"
    return ""
