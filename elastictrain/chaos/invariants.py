"""What must hold of a run whatever happened to it: from the facts of the run to what is violated. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from elastictrain.chaos.plan import ChaosKind, PlannedFault
from elastictrain.data.ledger import Row, effective, fold

_TOLD = 3  # of many violations of one kind


class Invariant(StrEnum):
    SAME_LOSSES = "same_losses"
    SAMPLES_ONCE = "samples_once"
    ONE_COMMITTER = "one_committer"
    NEWEST_KEPT = "newest_kept"
    REPLICAS_KEPT = "replicas_kept"
    RIGHT_CULPRIT = "right_culprit"
    NO_LEAK = "no_leak"
    NO_ORPHAN = "no_orphan"
    EXIT_CODES = "exit_codes"
    GOES_ON = "goes_on"


@dataclass(frozen=True, slots=True)
class Violation:
    invariant: Invariant
    what: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.what}"


@dataclass(frozen=True, slots=True)
class CommitFact:
    """A checkpoint that storage has held. `at_s`: when it was committed, by one clock for all."""

    at_s: float
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class ResumeFact:
    """Where a generation went on from. `looked_s`: when it began to look for a checkpoint; `step` 0: it began anew."""

    looked_s: float
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class GenerationFact:
    """A generation: its launchers, and the newest step of which other hosts got the replicas of all ranks; 0: of none.
    `spoilt`: what it had in memory, or computed, was damaged."""

    generation: int
    launchers: AbstractSet[str]
    replicated: int = 0
    spoilt: bool = False


@dataclass(frozen=True, slots=True)
class Blamed:
    """An injected fault, and what the report of the run says of the failure that followed; None: it tells of none. `rank`: of
    the worker that was struck, -1 if none was."""

    fault: PlannedFault
    culprit: str | None
    rank: int = -1


@dataclass(frozen=True, slots=True)
class Usage:
    """A figure that is sampled over the run, such as the open files of a host, and by how much it may grow."""

    name: str
    values: Sequence[float]
    allowed: float


@dataclass(frozen=True, slots=True)
class ChaosFacts:
    """What is known of a run; what is left empty is not checked. `damaged`: steps whose checkpoints the plan has spoilt."""

    losses: Mapping[int, float] = field(default_factory=dict)
    undisturbed: Mapping[int, float] = field(default_factory=dict)  # losses of the run without faults
    tolerance: float = 0.0  # relative; 0: bit for bit
    ledger: Sequence[Row] = ()
    undisturbed_ledger: Sequence[Row] = ()
    commits: Sequence[CommitFact] = ()
    resumes: Sequence[ResumeFact] = ()
    generations: Sequence[GenerationFact] = ()
    damaged: AbstractSet[int] = frozenset()
    blamed: Sequence[Blamed] = ()
    usage: Sequence[Usage] = ()
    orphans: Sequence[str] = ()  # a sentence for each process that is left
    exit_codes: Mapping[str, int] = field(default_factory=dict)  # of each launcher
    allowed_codes: AbstractSet[int] = frozenset((0, 75))


def check(facts: ChaosFacts) -> list[Violation]:
    """Every violation, a few of each kind."""
    found = [*_losses(facts), *_ledger(facts), *_commits(facts), *_replicas(facts)]
    found += [*_culprits(facts.blamed), *_leaks(facts.usage)]
    found += [Violation(Invariant.NO_ORPHAN, f"is left: {one}") for one in facts.orphans]
    found += [
        Violation(Invariant.EXIT_CODES, f"{name} must end with one of {sorted(facts.allowed_codes)}, but ended with {code}")
        for name, code in facts.exit_codes.items()
        if code not in facts.allowed_codes
    ]
    seen = Counter[Invariant]()
    told = []
    for one in found:
        seen[one.invariant] += 1
        if seen[one.invariant] <= _TOLD:
            told.append(one)
    return told


def _losses(facts: ChaosFacts) -> Iterator[Violation]:
    if not facts.undisturbed:
        return
    if missing := sorted(facts.undisturbed.keys() - facts.losses.keys()):
        yield Violation(Invariant.SAME_LOSSES, f"{len(missing)} steps have no loss, the first is {missing[0]}")
    for step, right in sorted(facts.undisturbed.items()):
        loss = facts.losses.get(step, right)
        # Written so that a loss that is not a number is a violation.
        if loss != right and not abs(loss - right) <= facts.tolerance * abs(right):
            yield Violation(Invariant.SAME_LOSSES, f"step {step} must have the loss {right!r}, but has {loss!r}")


def _ledger(facts: ChaosFacts) -> Iterator[Violation]:
    if not facts.undisturbed_ledger:
        return
    once = Invariant.SAMPLES_ONCE
    consumed = Counter(p for rows in effective(facts.ledger).values() for row in rows for p in row.each_position)
    if twice := sorted(position for position, times in consumed.items() if times > 1):
        yield Violation(once, f"{len(twice)} positions are consumed more than once, the first is {twice[0]}")
    got, right = fold(facts.ledger), fold(facts.undisturbed_ledger)
    for step in sorted(got.keys() | right.keys()):
        if got.get(step) != right.get(step):
            yield Violation(once, f"step {step} must consume {right.get(step)}, but consumes {got.get(step)}")


def _commits(facts: ChaosFacts) -> Iterator[Violation]:
    resumes = sorted(facts.resumes, key=lambda one: one.generation)
    for commit, later in ((commit, one) for commit in facts.commits for one in resumes if one.generation > commit.generation):
        was_there = commit.at_s <= later.looked_s and commit.step not in facts.damaged
        if was_there and commit.step > later.step and on_lineage(commit, resumes, until=later.generation):
            what = f"generation {later.generation} resumed at {later.step}, though {commit} was there"
            yield Violation(Invariant.NEWEST_KEPT, what)
    kept = sorted((one for one in facts.commits if on_lineage(one, resumes)), key=lambda one: (one.step, one.at_s))
    resumed = {one.generation: one.step for one in resumes}
    for before, after in pairwise(kept):
        # A generation that was stopped before its first step saves once more what it has resumed.
        twice = before.step == after.step and before.generation != after.generation
        again = resumed.get(max(before.generation, after.generation)) == after.step
        if (before.generation > after.generation or twice) and not (twice and again):
            yield Violation(Invariant.ONE_COMMITTER, f"{before} and {after} are both in the history of the run")


def _replicas(facts: ChaosFacts) -> Iterator[Violation]:
    """A step that two hosts have outlives the loss of one."""
    resumed = {one.generation: one.step for one in facts.resumes}
    trained = sorted((one for one in facts.generations if one.generation in resumed), key=lambda one: one.generation)
    on_two_hosts = 0
    for before, after in pairwise(trained):
        on_two_hosts = max(before.replicated, on_two_hosts)
        lost = before.launchers - after.launchers
        spoilt = any(one.spoilt for one in facts.generations if before.generation <= one.generation < after.generation)
        if resumed[after.generation] < on_two_hosts and len(lost) <= 1 and not spoilt:
            what = f"resumed at {resumed[after.generation]}, though replicas of step {on_two_hosts} were there"
            yield Violation(Invariant.REPLICAS_KEPT, f"generation {after.generation} {what}, and at most one host was lost")
        if lost or spoilt:
            on_two_hosts = 0


def on_lineage(commit: CommitFact, resumes: Sequence[ResumeFact], *, until: int | None = None) -> bool:
    """Whether the generations after the one that committed went on from there or later. `until`: as generation `until` found
    it, before it resumed."""
    later = [one for one in resumes if one.generation > commit.generation and (until is None or one.generation < until)]
    return all(one.step >= commit.step for one in later)


def _culprits(blamed: Sequence[Blamed]) -> Iterator[Violation]:
    for one in blamed:
        wanted = expected_culprit(one.fault, rank=one.rank)
        if one.culprit is not None and wanted and not _names(one.culprit, wanted):
            yield Violation(Invariant.RIGHT_CULPRIT, f"{one.fault}: must be blamed on {wanted}, but is on {one.culprit!r}")
        if one.culprit is None and one.fault.kind in ENDS_GENERATION:
            yield Violation(Invariant.RIGHT_CULPRIT, f"{one.fault}: the report must tell of a failure, but tells of none")


ENDS_GENERATION = frozenset((ChaosKind.KILL_WORKER, ChaosKind.KILL_LAUNCHER, ChaosKind.HANG, ChaosKind.HOST_LOST))
_BLAMES_NOBODY = frozenset((ChaosKind.PARTITION, ChaosKind.BLIP, ChaosKind.LEAVE, ChaosKind.FULL_DISK, ChaosKind.FLIP_SHARD))


def expected_culprit(fault: PlannedFault, *, rank: int = -1) -> str:
    """The worker or host that must be named; empty where any will do: storage is no host, sides of a partition blame each
    other, and a flipped shard is read where all hosts are lost."""
    if fault.kind in _BLAMES_NOBODY or not fault.host:
        return ""
    return f"rank {rank} on {fault.host}" if rank >= 0 else fault.host


def _names(culprit: str, wanted: str) -> bool:
    """A culprit is `rank 3 on b`, a host, or several of these."""
    parts = [part.strip() for part in culprit.split(",")]
    return wanted in parts or any(part.rpartition(" ")[2] == wanted for part in parts)


def _leaks(usage: Sequence[Usage]) -> Iterator[Violation]:
    for one in usage:
        quarter = len(one.values) // 4
        # The least of each quarter: what a recovery takes for a while is no leak. The first quarter is warm-up.
        if quarter and (grown := min(one.values[-quarter:]) - min(one.values[quarter : 2 * quarter])) > one.allowed:
            yield Violation(Invariant.NO_LEAK, f"{one.name} must grow by at most {one.allowed:g}, but grew by {grown:g}")
