from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.checkpoint.candidate_search import NoCandidate, refusal_message, select_checkpoint
from elastictrain.checkpoint.folders import (
    BEGUN_KEY,
    COMMITTED_KEY,
    FolderFacts,
    Listing,
    Reject,
    clear_target,
    folder_name,
    key_of,
    read_listing,
)
from elastictrain.checkpoint.manifest import FileRecord, Manifest, digest_of
from elastictrain.checkpoint.verified_read import find_missing
from elastictrain.events import CheckpointRejected
from elastictrain.storage.store import ObjectInfo
from tests.integration.checkpoint.test_checkpointer import restored_step, save
from tests.unit.checkpoint.fakes import Bench, FakeStore


def listing(*keys: str) -> Listing:
    return read_listing(ObjectInfo(key, 10, 0.0) for key in keys)


def valid(step: int, attempt: int = 1) -> str:
    return key_of(folder_name(step, attempt=attempt), "manifest.json")


def quarantined(step: int) -> str:
    return key_of(folder_name(step), "quarantine.json")


def remnant(step: int) -> str:
    return key_of(folder_name(step), "x.safetensors")


def resumed(decision: object) -> str:
    assert isinstance(decision, FolderFacts)
    return decision.name


def test_listing_is_newest_first_and_leaves_out_what_is_not_ours() -> None:
    found = listing(
        valid(5), valid(400), valid(5, 2), "checkpoints/notes.txt", "checkpoints/step-1/x", "checkpoints/old/x", "config.yaml"
    )
    assert [folder.name for folder in found.folders] == ["step-000000400", "step-000000005-2", "step-000000005"]
    assert not found.begun
    assert listing(BEGUN_KEY).begun


def test_newest_committed_one_that_is_not_known_to_be_bad() -> None:
    found = listing(valid(10), valid(20), valid(30), quarantined(30), remnant(40))
    assert resumed(select_checkpoint(found, rejected=(), on_invalid="stop")) == "step-000000020"
    rejected = [Reject("step-000000020", None, "bad")]
    assert resumed(select_checkpoint(found, rejected=rejected, on_invalid="stop")) == "step-000000010"


def fresh(*keys: str, rejected: tuple[Reject, ...] = (), on_invalid: Literal["stop", "fresh"] = "stop") -> bool:
    """Whether a run without a candidate may begin at step 0."""
    decision = select_checkpoint(listing(*keys), rejected=rejected, on_invalid=on_invalid)
    assert isinstance(decision, NoCandidate)
    return decision.fresh


def test_an_empty_folder_is_a_fresh_start() -> None:
    assert select_checkpoint(listing(), rejected=(), on_invalid="stop") == NoCandidate((), fresh=True)
    assert fresh("config.yaml")


def test_an_empty_folder_of_a_run_that_had_committed_is_a_loss() -> None:
    for keys in ((COMMITTED_KEY,), (BEGUN_KEY, COMMITTED_KEY)):
        assert not fresh(*keys)
        assert fresh(*keys, on_invalid="fresh")
    # Killed between the first commit and the removal of the other mark: what has no manifest has lost it.
    assert not fresh(BEGUN_KEY, COMMITTED_KEY, remnant(5))


def test_remnants_refuse_unless_told() -> None:
    decision = select_checkpoint(listing(remnant(10)), rejected=(), on_invalid="stop")
    assert isinstance(decision, NoCandidate)
    assert not decision.fresh
    assert [(reject.folder, reject.file) for reject in decision.rejects] == [("step-000000010", "manifest.json")]
    assert fresh(remnant(10), on_invalid="fresh")


def test_the_first_save_of_a_run_may_be_killed() -> None:
    assert fresh(BEGUN_KEY, remnant(10))


def test_the_mark_of_a_beginning_excuses_nothing_else() -> None:
    assert not fresh(BEGUN_KEY, remnant(10), quarantined(5))
    assert not fresh(BEGUN_KEY, valid(10), rejected=(Reject("step-000000010", None, "bad"),))


FACTS = st.builds(
    lambda step, files: FolderFacts(folder_name(step), step, 1, dict.fromkeys(files, 1)),
    st.integers(0, 5),
    st.sets(st.sampled_from(["manifest.json", "quarantine.json", "x.safetensors"])),
)


@given(
    st.lists(FACTS, max_size=5, unique_by=lambda facts: facts.name),
    st.sets(st.integers(0, 5)),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["stop", "fresh"]),
)
def test_never_silently_from_zero(
    folders: list[FolderFacts], bad: set[int], begun: bool, committed: bool, on_invalid: str
) -> None:
    folders = sorted(folders, key=lambda facts: facts.order, reverse=True)
    rejected = [Reject(folder_name(step), None, "bad") for step in bad]
    usable = [f for f in folders if f.has_manifest and not f.quarantined and f.step not in bad]
    found = Listing(tuple(folders), begun, committed)
    decision = select_checkpoint(found, rejected=rejected, on_invalid=on_invalid)  # type: ignore[arg-type]
    if usable:
        assert decision == usable[0]
    else:
        assert {r.folder for r in decision.rejects} == {f.name for f in folders}  # type: ignore[union-attr]
        lost = any(f.quarantined or f.has_manifest for f in folders)
        if decision.fresh:  # type: ignore[union-attr]
            assert on_invalid == "fresh" or (not committed and (not folders or (begun and not lost)))


def test_newer_remnants_are_told_when_an_older_checkpoint_is_loaded() -> None:
    bench = Bench()
    save(bench, 10)
    bench.store.objects |= dict.fromkeys((remnant(5), remnant(20), remnant(30), quarantined(30)), b"{}")
    assert restored_step(bench) == 10
    told = [event for event in bench.events if isinstance(event, CheckpointRejected)]
    assert [(event.checkpoint, event.file) for event in told] == [("step-000000020", "manifest.json")]


@pytest.mark.parametrize(
    ("listed", "stored", "missing"),
    [({"a": 3}, {}, False), ({"a": 2}, {"a": 2}, True), ({}, {}, True), ({"a": 3, "b": 1}, {}, False), ({}, {"a": 3}, False)],
)
def test_missing_files(listed: dict[str, int], stored: dict[str, int], missing: bool) -> None:
    """A listing may lag behind what the store has."""
    digest = digest_of(b"")
    manifest = Manifest(1, 1, "i", 0.0, "c", {}, {}, (FileRecord("a", 3, digest, 0, digest),), {})
    store = FakeStore({key_of("f", name): bytes(size_bytes) for name, size_bytes in stored.items()})
    reject = find_missing(store, manifest, folder=FolderFacts("f", 1, 1, listed))
    assert (reject is not None) == missing
    assert reject is None or (reject.folder, reject.file, reject.lasting) == ("f", "a", True)


def test_refusal_says_what_to_do() -> None:
    for rejects in ([Reject("step-000000010", "a", "a is gone")], []):
        message = refusal_message(rejects, url="s3://b/checkpoints")
        assert message.startswith("s3://b/checkpoints ")
        assert "checkpoint.on_invalid=fresh" in message
        assert all(str(reject) in message for reject in rejects)


@pytest.mark.parametrize(
    ("keys", "target"),
    [
        ((), "step-000000007"),
        ((remnant(7),), "step-000000007"),
        ((valid(7), valid(7, 2)), "step-000000007-3"),
        ((quarantined(7),), "step-000000007-2"),
        ((valid(8),), "step-000000007"),
    ],
)
def test_target_of_a_save(keys: tuple[str, ...], target: str) -> None:
    store = FakeStore(dict.fromkeys(keys, b"x"))
    assert clear_target(store, listing(*keys), step=7) == target
    assert set(store.objects) == set(keys) - {remnant(7)}


def test_a_listing_that_lags_behind_a_commit() -> None:
    store = FakeStore({remnant(7): b"x", valid(7): b"{}"})
    assert clear_target(store, listing(remnant(7)), step=7) == "step-000000007-2"
    assert len(store.objects) == 2
