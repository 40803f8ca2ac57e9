from dataclasses import replace
from math import nan

import pytest

from elastictrain.chaos.invariants import (
    Blamed,
    ChaosFacts,
    CommitFact,
    GenerationFact,
    Invariant,
    ResumeFact,
    Usage,
    check,
)
from elastictrain.chaos.plan import ChaosKind, PlannedFault
from elastictrain.data.ledger import Row


def row(step: int, first: int, end: int, *, incarnation: str = "000001-a", rank: int = 0) -> Row:
    return Row(incarnation, rank, step, ((first, end),), tuple(range(100 + first, 100 + end)))


RIGHT = ChaosFacts(
    losses={1: 2.0, 2: 1.0},
    undisturbed={1: 2.0, 2: 1.0},
    ledger=[row(1, 0, 2), row(1, 2, 4, rank=1), row(2, 4, 8), row(2, 4, 8, incarnation="000002-a")],
    undisturbed_ledger=[row(1, 0, 4), row(2, 4, 8)],
    commits=[CommitFact(1.0, 1, 10), CommitFact(2.0, 1, 20), CommitFact(5.0, 2, 30), CommitFact(6.0, 2, 40)],
    resumes=[ResumeFact(0.0, 1, 0), ResumeFact(3.0, 2, 20)],
    blamed=[Blamed(PlannedFault(ChaosKind.HANG, at_s=1.0, host="b"), "rank 3 on b, rank 1 on a")],
    usage=[Usage("files of a", [1, 5, 9, 5, 6, 9, 5, 6], allowed=1)],
    exit_codes={"a": 0, "b": 75},
)


def found(**facts: object) -> list[Invariant]:
    return [one.invariant for one in check(replace(RIGHT, **facts))]  # type: ignore[arg-type]


def test_nothing_is_wrong_with_a_run_that_is_right() -> None:
    assert check(RIGHT) == []
    assert check(ChaosFacts()) == []


@pytest.mark.parametrize("losses", [{1: 2.0}, {1: 2.0, 2: 1.0 + 2**-52}, {1: 2.0, 2: nan}])
def test_losses(losses: dict[int, float]) -> None:
    assert found(losses=losses) == [Invariant.SAME_LOSSES]


def test_losses_within_a_tolerance() -> None:
    assert found(losses={1: 2.1, 2: 1.0}, tolerance=0.1) == []
    assert found(losses={1: 2.3, 2: 1.0}, tolerance=0.1) == [Invariant.SAME_LOSSES]


@pytest.mark.parametrize(
    "ledger",
    [
        [row(1, 0, 4)],
        [row(1, 0, 4), row(2, 4, 8), row(3, 8, 12)],
        [row(1, 0, 4), row(2, 5, 9)],
        [row(1, 0, 4), Row("000001-a", 0, 2, ((4, 8),), (104, 105, 106, 99))],
    ],
)
def test_ledger(ledger: list[Row]) -> None:
    assert found(ledger=ledger) == [Invariant.SAMPLES_ONCE]


def test_a_position_that_two_ranks_consume() -> None:
    twice = [row(1, 0, 4), row(2, 4, 8), row(2, 4, 5, rank=1)]
    assert found(ledger=twice) == [Invariant.SAMPLES_ONCE]


def test_a_commit_that_a_later_generation_went_past_without() -> None:
    """It landed before that one looked, or it was fenced off."""
    assert found(commits=[CommitFact(2.0, 1, 20), CommitFact(2.5, 1, 25)]) == [Invariant.NEWEST_KEPT]
    assert found(commits=[CommitFact(2.0, 1, 20), CommitFact(2.5, 1, 25)], damaged={25}) == []
    assert found(commits=[CommitFact(2.0, 1, 20), CommitFact(3.5, 1, 25), CommitFact(5.0, 2, 30)]) == []


def test_a_run_that_begins_anew_has_lost_its_commits() -> None:
    assert Invariant.NEWEST_KEPT in found(resumes=[ResumeFact(0.0, 1, 0), ResumeFact(3.0, 2, 0)])


def test_a_lost_commit_is_told_once_for_the_generation_that_lost_it() -> None:
    resumes = [ResumeFact(0.0, 1, 0), ResumeFact(3.0, 2, 10), ResumeFact(5.0, 3, 10)]
    assert found(commits=[CommitFact(1.0, 1, 10), CommitFact(2.0, 1, 20)], resumes=resumes) == [Invariant.NEWEST_KEPT]


@pytest.mark.parametrize(
    ("groups", "right"),
    [
        ([GenerationFact(1, {"a", "b", "c"}, 21), GenerationFact(2, {"a", "b"})], False),
        ([GenerationFact(1, {"a", "b", "c"}, 20), GenerationFact(2, {"a", "b"})], True),
        ([GenerationFact(1, {"a", "b", "c"}, 21), GenerationFact(2, {"a", "b", "d"})], False),
        ([GenerationFact(1, {"a", "b", "c"}, 21), GenerationFact(2, {"a"})], True),
        ([GenerationFact(1, {"a", "b"}, 21, spoilt=True), GenerationFact(2, {"a", "b"})], True),
        # Without a new replica the next one keeps those of the one before, but for what a lost host has taken.
        ([GenerationFact(1, {"a", "b"}, 20), GenerationFact(2, {"a", "b"}), GenerationFact(3, {"a"})], False),
        ([GenerationFact(1, {"a", "b", "c"}, 20), GenerationFact(2, {"a", "b"}), GenerationFact(3, {"a"})], True),
        ([GenerationFact(1, {"a", "b", "c"}, 20), GenerationFact(2, {"a", "b"}, 25), GenerationFact(3, {"a"})], False),
        # One that has not resumed has not trained.
        ([GenerationFact(1, {"a", "b"}, 21), GenerationFact(4, {"b"})], True),
        ([GenerationFact(1, {"a", "b"}, 21), GenerationFact(4, {"b"}), GenerationFact(2, {"b"})], False),
    ],
)
def test_a_step_that_two_hosts_have_outlives_the_loss_of_one(groups: list[GenerationFact], right: bool) -> None:
    resumes = [ResumeFact(0.0, 1, 0), ResumeFact(3.0, 2, 20), ResumeFact(5.0, 3, 15)]
    assert found(generations=groups, resumes=resumes, commits=[]) == ([] if right else [Invariant.REPLICAS_KEPT])


def test_two_generations_in_one_history() -> None:
    resumes = [ResumeFact(0.0, 1, 0), ResumeFact(3.0, 2, 20)]
    crossed = [CommitFact(2.0, 2, 15), CommitFact(2.0, 1, 20)]
    assert found(commits=crossed, resumes=resumes) == [Invariant.ONE_COMMITTER]


@pytest.mark.parametrize(
    ("kind", "culprit", "right"),
    [
        (ChaosKind.HANG, "rank 3 on c", False),
        (ChaosKind.HANG, "bb", False),
        (ChaosKind.HANG, "b", True),
        (ChaosKind.HANG, None, False),
        (ChaosKind.CABLE, None, True),
        (ChaosKind.PARTITION, "c", True),
    ],
)
def test_culprits(kind: ChaosKind, culprit: str | None, right: bool) -> None:
    blamed = [Blamed(PlannedFault(kind, at_s=1.0, host="b"), culprit)]
    assert found(blamed=blamed) == ([] if right else [Invariant.RIGHT_CULPRIT])


def test_what_grows_is_a_leak_and_a_peak_is_none() -> None:
    assert found(usage=[Usage("files", [0, 9, 1, 1, 3, 3, 5, 5], allowed=3)]) == [Invariant.NO_LEAK]
    assert found(usage=[Usage("files", [0, 1, 1, 9, 9, 9, 9, 2], allowed=3)]) == []
    assert found(usage=[Usage("files", [1, 9], allowed=3)]) == []


def test_processes_and_exit_codes() -> None:
    assert found(orphans=["pid 7: saver"], exit_codes={"a": 70}) == [Invariant.NO_ORPHAN, Invariant.EXIT_CODES]


def test_many_violations_of_one_kind_are_cut_short() -> None:
    losses = dict.fromkeys(range(100), 1.0)
    assert len(found(losses={}, undisturbed=losses)) == 1
    assert len(found(losses=dict.fromkeys(range(100), 2.0), undisturbed=losses)) == 3


def test_a_generation_that_did_no_step_may_save_what_it_resumed_once_more() -> None:
    resumes = [ResumeFact(0.0, 1, 0), ResumeFact(3.0, 2, 20)]
    assert found(commits=[CommitFact(2.0, 1, 20), CommitFact(4.0, 2, 20)], resumes=resumes) == []
