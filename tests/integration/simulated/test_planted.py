"""Each of these bugs, planted in the real modules, breaks what must hold within 200 faults, and is shrunk to a few."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from elastictrain.chaos.invariants import Invariant
from elastictrain.chaos.simulated import SimulatedResult, plan_of, play, simulate_chaos
from elastictrain.chaos.simulated_state import CheckedState
from elastictrain.checkpoint import retention, verified_read, writer
from elastictrain.checkpoint.candidate_search import CandidateSearch
from elastictrain.checkpoint.lineage import Fence
from elastictrain.checkpoint.memory.folder import Held, SnapshotSet
from elastictrain.data import assignment
from elastictrain.errors import TransientStorageError
from elastictrain.launch.membership.records import Wait

FAULTS = 200
Patch = pytest.MonkeyPatch


def commits_are_not_fenced(patch: Patch) -> None:
    patch.setattr(Fence, "check", lambda *given, **others: None)


def digests_are_not_checked(patch: Patch) -> None:
    patch.setattr(verified_read, "has_digest", lambda *given, **others: True)


def retention_deletes_the_newest(patch: Patch) -> None:
    real = retention.plan_retention

    def plan(folders: Any, *, newest: str, **others: Any) -> Any:
        deletions = real(folders, newest=newest, **others)
        files = next(tuple(folder.files) for folder in folders if folder.name == newest)
        return (*deletions, retention.Deletion(newest, files, True)) if deletions else deletions

    patch.setattr(retention, "plan_retention", plan)


def leases_are_not_checked(patch: Patch) -> None:
    patch.setattr("elastictrain.lease.holder.is_held", lambda *given, **others: False)


def replicas_of_another_step_are_accepted(patch: Patch) -> None:
    import elastictrain.checkpoint.memory_restore as module

    real = module.whole_sets

    def whole_sets(held: list[Held], **others: Any) -> tuple[SnapshotSet, ...]:
        """A replica takes the place of any snapshot of its rank."""
        sets = {one.step: one for one in real(held, **others)}
        newest = max(held, key=lambda one: (one.facts.incarnation, one.facts.step), default=None)
        if newest is None or newest.facts.step in sets:
            return tuple(sets.values())
        facts = newest.facts
        found = [
            tuple(
                sorted(
                    (
                        one
                        for one in held
                        if (one.facts.rank, one.facts.incarnation) == (rank, facts.incarnation)
                        and (one.replica or one.facts.step == facts.step)
                    ),
                    key=lambda one: (one.replica, -one.facts.step),
                )
            )
            for rank in range(facts.world_size)
        ]
        mixed = SnapshotSet(facts.incarnation, facts.step, facts.world_size, tuple(found))
        return (mixed, *sets.values()) if all(found) else tuple(sets.values())

    patch.setattr(module, "whole_sets", whole_sets)


def positions_count_twice_after_a_restart(patch: Patch) -> None:
    real = assignment.passes

    def passes(first_step: int, **others: Any) -> Iterator[assignment.Pass]:
        return real(max(0, first_step - 1), **others)

    patch.setattr(assignment, "passes", passes)


def torn_manifests_count_as_committed(patch: Patch) -> None:
    def commit(store: Any, manifest: Any, *, folder: str, signing: Any = None) -> None:
        store.create(f"checkpoints/{folder}/manifest.json", writer.encode_manifest(manifest, key=signing))

    patch.setattr(writer, "commit", commit)


def two_generations_train_at_once(patch: Patch) -> None:
    import elastictrain.simulate.run as module

    real = module.decide

    def decide(cluster: Any, launch: Any) -> Any:
        """A launcher does not stop what is not the newest generation any more."""
        running, newest = cluster.running, cluster.newest
        if running is not None and newest is not None and newest.number > running.number:
            return Wait()
        return real(cluster, launch)

    patch.setattr(
        module.Simulation.__init__, "__kwdefaults__", {**module.Simulation.__init__.__kwdefaults__, "decide_by": decide}
    )  # type: ignore[dict-item]


def lost_checkpoints_start_the_run_anew(patch: Patch) -> None:
    patch.setattr(CandidateSearch, "_refuse_if_lost", lambda self: None)


def a_rank_is_left_out_of_the_vote(patch: Patch) -> None:
    import elastictrain.checkpoint.saver.commit_protocol as module

    real = module.missing_ranks
    patch.setattr(module, "missing_ranks", lambda parts, *, world_size: real(parts, world_size=max(1, world_size - 1)))


PLANTED: dict[Callable[[Patch], None], set[Invariant]] = {
    commits_are_not_fenced: {Invariant.ONE_COMMITTER},
    digests_are_not_checked: {Invariant.SAME_LOSSES},
    retention_deletes_the_newest: {Invariant.NEWEST_KEPT},
    leases_are_not_checked: {Invariant.ONE_COMMITTER},
    replicas_of_another_step_are_accepted: {Invariant.SAME_LOSSES},
    positions_count_twice_after_a_restart: {Invariant.SAMPLES_ONCE},
    torn_manifests_count_as_committed: {Invariant.NEWEST_KEPT},
    two_generations_train_at_once: {Invariant.ONE_COMMITTER, Invariant.GOES_ON},
    lost_checkpoints_start_the_run_anew: {Invariant.NEWEST_KEPT},
    a_rank_is_left_out_of_the_vote: {Invariant.GOES_ON, Invariant.NEWEST_KEPT},
}

SEEDS = {commits_are_not_fenced: 4, digests_are_not_checked: 3}
"""Others than 1, with which the plans that are found are short after few tries."""


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found_and_shrunk(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    result = simulate_chaos(faults=FAULTS, seed=SEEDS.get(plant, 1), shrink_tries=40, per_history=25)
    assert result.broken, f"{result.faults} faults break nothing"
    broken = result.broken[0]
    assert {one.invariant for one in broken.violations} & PLANTED[plant]
    assert broken.shrunk is not None
    assert len(broken.shrunk.plan.faults) <= 5


def test_without_one_nothing_breaks() -> None:
    result = simulate_chaos(faults=FAULTS, seed=2, shrink_tries=0, stop_at_first=False)
    assert result.faults == FAULTS
    assert [str(one) for broken in result.broken for one in broken.violations] == []
    assert min(result.generations, result.commits, result.restores) > FAULTS / 5


def test_a_plan_that_is_played_again_does_the_same() -> None:
    """Storage refuses requests in this one while several threads write and read."""
    played = [SimulatedResult() for _ in range(2)]
    for result in played:
        assert play(plan_of(5000017, faults=50), result) == []
    assert played[0] == played[1]


def test_which_requests_are_refused_does_not_depend_on_their_order(tmp_path: Path) -> None:
    """Threads write at once, and one may come before the other."""

    def refused(keys: Sequence[str]) -> set[str]:
        state, found = CheckedState(tmp_path, seed=1, workers=1, now_s=lambda: 5.0), set[str]()
        state.faults.refused = 1.0
        for key in keys:
            try:
                state.store.before("open", key)
            except TransientStorageError:
                found.add(key)
        return found

    keys = [f"checkpoints/step-000000015/000001-simulated-r{rank:05d}-000.safetensors" for rank in range(200)]
    assert 0 < len(refused(keys)) < len(keys)
    assert refused(keys) == refused(keys[::-1])
