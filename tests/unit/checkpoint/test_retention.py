from collections.abc import Collection

from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.checkpoint.folders import FolderFacts, folder_name
from elastictrain.checkpoint.retention import plan_retention
from tests.unit.examples import examples

KINDS = ("valid", "damaged", "quarantined", "marked remnant", "remnant")


def facts(step: int, kind: str) -> FolderFacts:
    files = {"a.safetensors": 1, "b.safetensors": 1}
    if kind in ("valid", "damaged", "quarantined"):
        files["manifest.json"] = 1
    if kind in ("quarantined", "marked remnant"):
        files["quarantine.json"] = 1
    return FolderFacts(folder_name(step), step, 1, files)


def plan(
    kinds: dict[int, str],
    *,
    newest: int,
    keep_last: int = 2,
    keep_every: int = 0,
    unknown: Collection[int] = (),
    best: Collection[int] = (),
) -> dict[int, tuple[str, ...]]:
    deletions = plan_retention(
        [facts(step, kind) for step, kind in kinds.items()],
        newest=folder_name(newest),
        intact={folder_name(step) for step, kind in kinds.items() if kind == "valid"},
        keep_last=keep_last,
        keep_every=keep_every,
        best=best,
        unknown={folder_name(step) for step in unknown},
    )
    return {int(deletion.folder[5:14]): deletion.files for deletion in deletions}


def test_keeps_the_last_and_multiples() -> None:
    kinds = dict.fromkeys(range(1, 9), "valid")
    assert set(plan(kinds, newest=8, keep_last=2, keep_every=4)) == {1, 2, 3, 5, 6}
    assert set(plan(kinds, newest=8, keep_last=1)) == set(range(1, 8))
    assert plan(kinds, newest=8, keep_last=20) == {}


def test_keeps_the_best_that_are_whole() -> None:
    kinds = {**dict.fromkeys(range(1, 9), "valid"), 2: "damaged", 3: "remnant"}
    assert set(plan(kinds, newest=8, keep_last=2, best=(2, 3, 5, 8, 11))) == {1, 2, 3, 4, 6}


def test_what_is_not_intact_takes_nobodys_place() -> None:
    assert set(plan({1: "valid", 2: "damaged", 3: "remnant", 4: "quarantined", 5: "valid"}, newest=5, keep_last=2)) == {3}


def test_damaged_ones_go_when_they_are_older_than_all_that_is_kept() -> None:
    kinds = {1: "quarantined", 2: "damaged", 3: "valid", 4: "quarantined", 5: "valid"}
    assert set(plan(kinds, newest=5, keep_last=2)) == {1, 2}


def test_nothing_newer_than_the_verified_one_goes() -> None:
    kinds = {1: "valid", 2: "valid", 3: "remnant", 4: "valid"}
    assert set(plan(kinds, newest=2, keep_last=1)) == {1}


def test_nothing_goes_without_a_verified_one() -> None:
    assert plan({1: "valid", 2: "quarantined"}, newest=2, keep_last=1) == {}
    assert plan({1: "valid"}, newest=2, keep_last=1) == {}
    assert plan({1: "valid", 2: "damaged"}, newest=2, keep_last=1) == {}


def test_what_this_release_does_not_read_stays() -> None:
    kinds = {1: "damaged", 2: "damaged", 3: "valid"}
    assert set(plan(kinds, newest=3, keep_last=1)) == {1, 2}
    assert set(plan(kinds, newest=3, keep_last=1, unknown={2})) == {1}


def test_order_within_a_folder() -> None:
    deleted = plan({1: "quarantined", 2: "valid"}, newest=2, keep_last=1)
    assert deleted[1] == ("manifest.json", "a.safetensors", "b.safetensors", "quarantine.json")


def test_a_checkpoint_that_goes_is_told_from_a_remnant() -> None:
    kinds = {1: "valid", 2: "remnant", 3: "damaged", 4: "valid", 5: "valid"}
    deletions = plan_retention(
        [facts(step, kind) for step, kind in kinds.items()],
        newest=folder_name(5),
        intact={folder_name(step) for step, kind in kinds.items() if kind == "valid"},
        keep_last=2,
        keep_every=0,
    )
    assert [deletion.committed for deletion in deletions] == [True, False, False]


@settings(max_examples=examples(200))
@given(st.dictionaries(st.integers(1, 9), st.sampled_from(KINDS), min_size=1), st.integers(1, 4), st.integers(0, 3))
def test_interrupted_after_every_deletion_the_same_ones_are_left_to_choose(
    kinds: dict[int, str], keep_last: int, keep_every: int
) -> None:
    newest = max(kinds)
    kinds[newest] = "valid"
    left = {(step, file) for step, kind in kinds.items() for file in facts(step, kind).files}
    whole = {step for step, kind in kinds.items() if kind == "valid"}
    expected = sorted(whole)[-keep_last:]
    for step, files in plan(kinds, newest=newest, keep_last=keep_last, keep_every=keep_every).items():
        for file in files:
            left.discard((step, file))
            chosen = {s for s, f in left if f == "manifest.json" and (s, "quarantine.json") not in left}
            for candidate in chosen - {s for s, kind in kinds.items() if kind == "damaged"}:
                assert {(candidate, "a.safetensors"), (candidate, "b.safetensors")} <= left
            assert set(expected) <= chosen
            damaged = [s for s, kind in kinds.items() if kind in ("quarantined", "marked remnant")]
            assert all((s, "quarantine.json") in left or (s, "manifest.json") not in left for s in damaged)
    survivors = {s for s, f in left if f == "manifest.json"} & whole
    assert survivors == set(expected) | {s for s in whole if keep_every and s % keep_every == 0}
