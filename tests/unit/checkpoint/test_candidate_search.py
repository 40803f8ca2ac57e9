from hypothesis import given
from hypothesis import strategies as st

from elastictrain.checkpoint.candidate_search import FreshStart, Refuse, passed_over, refusal_message, select_checkpoint
from elastictrain.checkpoint.folders import (
    BEGUN_KEY,
    COMMITTED_KEY,
    FolderFacts,
    Listing,
    Reject,
    choose_target,
    folder_name,
    key_of,
    missing_files,
    read_listing,
)
from elastictrain.checkpoint.manifest import FileRecord, Manifest, digest_of
from elastictrain.storage.store import ObjectInfo


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


def test_an_empty_folder_is_a_fresh_start() -> None:
    assert select_checkpoint(listing(), rejected=(), on_invalid="stop") == FreshStart(())
    assert select_checkpoint(listing("config.yaml"), rejected=(), on_invalid="stop") == FreshStart(())


def test_an_empty_folder_of_a_run_that_had_committed_is_a_loss() -> None:
    for found in (listing(COMMITTED_KEY), listing(BEGUN_KEY, COMMITTED_KEY)):
        assert select_checkpoint(found, rejected=(), on_invalid="stop") == Refuse(())
        assert select_checkpoint(found, rejected=(), on_invalid="fresh") == FreshStart(())
    # Killed between the first commit and the removal of the other mark: what has no manifest has lost it.
    assert isinstance(select_checkpoint(listing(BEGUN_KEY, COMMITTED_KEY, remnant(5)), rejected=(), on_invalid="stop"), Refuse)


def test_remnants_refuse_unless_told() -> None:
    decision = select_checkpoint(listing(remnant(10)), rejected=(), on_invalid="stop")
    assert isinstance(decision, Refuse)
    assert "manifest.json is not there" in decision.rejects[0].reason
    assert isinstance(select_checkpoint(listing(remnant(10)), rejected=(), on_invalid="fresh"), FreshStart)


def test_the_first_save_of_a_run_may_be_killed() -> None:
    assert isinstance(select_checkpoint(listing(BEGUN_KEY, remnant(10)), rejected=(), on_invalid="stop"), FreshStart)


def test_the_mark_of_a_beginning_excuses_nothing_else() -> None:
    assert isinstance(
        select_checkpoint(listing(BEGUN_KEY, remnant(10), quarantined(5)), rejected=(), on_invalid="stop"), Refuse
    )
    bad = [Reject("step-000000010", None, "bad")]
    assert isinstance(select_checkpoint(listing(BEGUN_KEY, valid(10)), rejected=bad, on_invalid="stop"), Refuse)


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
        if isinstance(decision, FreshStart):
            assert on_invalid == "fresh" or (not committed and (not folders or (begun and not lost)))


def test_passed_over() -> None:
    found = listing(remnant(5), valid(10), remnant(20), valid(30), quarantined(30))
    assert [reject.folder for reject in passed_over(found, chosen="step-000000010")] == ["step-000000020"]


def test_missing_files() -> None:
    digest = digest_of(b"")
    manifest = Manifest(1, 1, "i", 0.0, "c", {}, {}, (FileRecord("a", 3, digest, 0, digest),), {})
    assert missing_files(manifest, FolderFacts("f", 1, 1, {"a": 3})) is None
    assert missing_files(manifest, FolderFacts("f", 1, 1, {"a": 2})) == Reject("f", "a", "a must have 3 bytes, but has 2")
    assert missing_files(manifest, FolderFacts("f", 1, 1, {})) == Reject("f", "a", "a is gone")


def test_refusal_says_what_to_do() -> None:
    message = refusal_message([Reject("step-000000010", "a", "a is gone")], url="s3://b/checkpoints")
    assert "s3://b/checkpoints" in message
    assert "step-000000010: a is gone" in message
    assert "checkpoint.on_invalid=fresh" in message
    emptied = refusal_message([], url="s3://b/checkpoints")
    assert "s3://b/checkpoints is of a run that had committed checkpoints" in emptied
    assert "none is left" in emptied
    assert "checkpoint.on_invalid=fresh" in emptied


def test_target_of_a_save() -> None:
    assert choose_target((), step=7).folder == "step-000000007"
    remnants = choose_target(listing(remnant(7)).folders, step=7)
    assert (remnants.folder, remnants.stale_files) == ("step-000000007", ("x.safetensors",))
    assert choose_target(listing(valid(7), valid(7, 2)).folders, step=7).folder == "step-000000007-3"
    assert choose_target(listing(quarantined(7)).folders, step=7).folder == "step-000000007-2"
    assert choose_target(listing(valid(8)).folders, step=7).folder == "step-000000007"
    behind = choose_target(listing(remnant(7)).folders, step=7, committed={"step-000000007"})
    assert (behind.folder, behind.stale_files) == ("step-000000007-2", ())
