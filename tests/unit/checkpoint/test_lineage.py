import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.checkpoint.folders import FolderFacts, folder_name
from elastictrain.checkpoint.lineage import Lineage, ResumeOrigin, is_in_lineage, number_of
from elastictrain.identity import PoisonedSteps
from elastictrain.storage.local import LocalStore
from elastictrain.storage.opening import open_store

FIRST, SECOND, THIRD = "000001-aa", "000002-bb", "000003-cc"


def folder(step: int, incarnation: str, *, attempt: int = 1) -> FolderFacts:
    name = folder_name(step, attempt=attempt)
    files = {f"{incarnation}-r{rank:05d}-0001.safetensors": 10 for rank in range(2)} | {"manifest.json": 5}
    return FolderFacts(name, step, attempt, files)


def in_lineage(incarnation: str, step: int, *origins: ResumeOrigin) -> bool:
    known = {origin.incarnation: origin for origin in origins}
    newest = max(origins, key=lambda origin: (origin.generation, origin.incarnation), default=None)
    return is_in_lineage(incarnation, step, newest=newest, lookup=known.get)


def test_without_records_everything_counts() -> None:
    assert in_lineage(FIRST, 10)


@pytest.mark.parametrize(
    ("incarnation", "step", "counts"),
    [
        (FIRST, 10, True),
        (FIRST, 20, True),  # what the second one went on from
        (FIRST, 25, False),  # committed when nobody followed it any more
        (SECOND, 20, False),  # it began there, and has not trained that step
        (SECOND, 25, True),
        (SECOND, 30, True),
        (SECOND, 31, False),
        (THIRD, 31, True),
        ("000004-dd", 40, True),  # newer than all records: started without a launcher
        ("000003-zz", 31, False),  # not newer than all records
        ("000002-xx", 22, False),  # a third one that nobody went on from
    ],
)
def test_a_line_of_three(incarnation: str, step: int, counts: bool) -> None:
    origins = (
        ResumeOrigin(1, FIRST, 0, ""),
        ResumeOrigin(2, SECOND, 20, FIRST),
        ResumeOrigin(3, THIRD, 30, SECOND),
        ResumeOrigin(2, "000002-xx", 10, FIRST),
    )
    assert in_lineage(incarnation, step, *origins) is counts


def test_what_was_there_before_the_first_launcher_counts() -> None:
    assert in_lineage(FIRST, 20, ResumeOrigin(1, SECOND, 20, FIRST))
    assert not in_lineage(FIRST, 21, ResumeOrigin(1, SECOND, 20, FIRST))


def test_the_generation_is_what_makes_a_record_the_newest() -> None:
    # The frozen one wrote down where it went on from after its successor did, and both found the same number free.
    frozen, successor = ResumeOrigin(4, "000005-zz", 10, FIRST), ResumeOrigin(5, "000005-aa", 12, FIRST)
    first = ResumeOrigin(1, FIRST, 0, "")
    assert in_lineage(successor.incarnation, 15, first, frozen, successor)
    assert not in_lineage(frozen.incarnation, 15, first, frozen, successor)
    assert in_lineage(FIRST, 12, first, frozen, successor)


@pytest.mark.parametrize(("incarnation", "number"), [(FIRST, 1), ("000012", 12), ("run7", -1), ("-1", -1), ("", -1)])
def test_an_incarnation_without_a_number_is_before_all_others(incarnation: str, number: int) -> None:
    assert number_of(incarnation) == number


def test_records_that_go_round_in_circles_end() -> None:
    origins = (ResumeOrigin(2, SECOND, 20, FIRST), ResumeOrigin(1, FIRST, 10, SECOND))
    assert in_lineage("000001-other", 5, *origins)


@given(st.integers(0, 10_000))
def test_no_history_mixes_two_generations(seed: int) -> None:
    """Random lives: each goes on from any commit on its own line, and the frozen ones commit later."""
    chance = random.Random(seed)
    origins: dict[str, ResumeOrigin] = {}
    lines: dict[str, set[tuple[str, int]]] = {}
    commits: set[tuple[str, int]] = set()
    for generation in range(1, chance.randint(2, 8)):
        name = f"{generation:06d}-x"
        newest = max(origins.values(), key=lambda origin: origin.generation, default=None)
        usable = sorted(one for one in commits if is_in_lineage(*one, newest=newest, lookup=origins.get))
        parent, step = chance.choice([*usable, ("", 0)]) if usable else ("", 0)
        origins[name] = ResumeOrigin(generation, name, step, parent)
        # The truth, kept in another way: everything that it stands on.
        lines[name] = {one for one in lines.get(parent, set()) if one[1] <= step} | ({(parent, step)} if parent else set())
        for other in chance.sample(sorted(origins), chance.randint(1, len(origins))):
            last_step = max([origins[other].step, *(step for name, step in commits if name == other)])
            made = (other, last_step + chance.randint(1, 5))
            commits.add(made)
            lines[other] = lines[other] | {made}
    newest = max(origins.values(), key=lambda origin: origin.generation)
    for one in commits:
        assert is_in_lineage(*one, newest=newest, lookup=origins.get) == (one in lines[newest.incarnation]), (one, origins)


def test_folders_off_the_line_come_last(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    lineage = Lineage(store)
    lineage.write(ResumeOrigin(1, FIRST, 0, ""))
    lineage.write(ResumeOrigin(2, SECOND, 20, FIRST))
    folders = [folder(30, FIRST), folder(25, SECOND), folder(20, FIRST), FolderFacts("step-000000010", 10, 1, {})]
    ordered, off_lineage = Lineage(store).lineage_first(folders)
    assert [one.step for one in ordered] == [25, 20, 10, 30]
    assert off_lineage == {"step-000000030"}


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"generation": 2}', json.dumps([1]).encode(), b"\xff"])
def test_a_damaged_record_tells_nothing(damage: bytes, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    assert isinstance(store, LocalStore)
    Lineage(store).write(ResumeOrigin(1, FIRST, 0, ""))
    store.write(f"lineage/000000002-{SECOND}.json", damage)
    ordered, off_lineage = Lineage(store).lineage_first([folder(30, FIRST), folder(25, SECOND)])
    assert [one.step for one in ordered] == [30, 25]
    assert not off_lineage


def test_files_of_several_incarnations_or_none_put_no_folder_off_the_line(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    Lineage(store).write(ResumeOrigin(1, FIRST, 0, ""))
    Lineage(store).write(ResumeOrigin(2, SECOND, 20, FIRST))
    mixed = {**folder(30, FIRST).files, **folder(30, SECOND).files}
    for files, off_lineage in (({"manifest.json": 1}, False), (mixed, False), (folder(30, FIRST).files, True)):
        found = Lineage(store).lineage_first([FolderFacts("step-000000030", 30, 1, files)])
        assert bool(found[1]) == off_lineage


def test_the_run_goes_back_to_the_checkpoint_before_the_newest_one(tmp_path: Path) -> None:
    """It failed from a snapshot of step 33. A later generation repeats the steps."""
    store = open_store(str(tmp_path))
    Lineage(store).write(ResumeOrigin(1, FIRST, 0, ""))
    poisoned = PoisonedSteps(went_back=(35,), before_step=33, generation=2)
    uncommitted = replace(folder(33, FIRST), files={f"{FIRST}-r00000-0001.safetensors": 10})
    folders = [folder(40, FIRST), uncommitted, folder(30, FIRST), folder(20, FIRST)]
    ordered, off_lineage = Lineage(store, poisoned=poisoned).lineage_first(folders)
    assert [one.step for one in ordered] == [20, 40, 33, 30]
    assert off_lineage == {"step-000000030", "step-000000033", "step-000000040"}
    Lineage(store).write(ResumeOrigin(2, SECOND, 20, FIRST))
    ordered, _ = Lineage(store, poisoned=poisoned).lineage_first([folder(31, SECOND), *folders])
    assert [one.step for one in ordered] == [31, 20, 40, 33, 30]


def test_it_goes_back_a_second_time_to_before_a_step_below_the_first(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    Lineage(store).write(ResumeOrigin(1, FIRST, 0, ""))
    Lineage(store).write(ResumeOrigin(2, SECOND, 20, FIRST))
    poisoned = PoisonedSteps(went_back=(35, 22), before_step=20, generation=3)
    folders = [folder(30, FIRST), folder(20, FIRST), folder(10, FIRST)]
    assert [one.step for one in Lineage(store, poisoned=poisoned).lineage_first(folders)[0]] == [10, 30, 20]
