import time
from pathlib import Path

import pytest

from elastictrain.checkpoint.folders import ROOT, key_of
from elastictrain.checkpoint.lineage import Lineage, ResumeOrigin
from elastictrain.checkpoint.memory.folder import make_private, run_folder, run_name
from elastictrain.config.load import load
from elastictrain.errors import TransientStorageError
from elastictrain.launch import final_save
from elastictrain.launch.final_save import committed_step, remembered_step
from elastictrain.storage.opening import open_store
from tests.unit.checkpoint.fakes import FakeStore
from tests.unit.checkpoint.memory.madeslots import facts_of, put


@pytest.mark.parametrize(
    ("objects", "step"),
    [
        ([], 0),
        (["step-000000004/manifest.json", "step-000000012/manifest.json", "step-000000008/manifest.json"], 12),
        (["step-000000004/manifest.json", "step-000000008/rank-00000.safetensors"], 4),
        (["step-000000004/manifest.json", "step-000000008/manifest.json", "step-000000008/quarantine.json"], 4),
        (["step-000000004-2/manifest.json", "step-000000004/quarantine.json"], 4),
        (["begun.json", "committed.json", "notes/manifest.json"], 0),
    ],
    ids=str,
)
def test_the_newest_step_in_storage(objects: list[str], step: int, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    for name in objects:
        store.write(f"{ROOT}/{name}", b"x")
    assert committed_step(store) == step


def test_a_step_that_nobody_goes_on_from_is_no_progress() -> None:
    first, second = "000001-aa", "000002-bb"

    def commits(*made: tuple[str, int]) -> FakeStore:
        store = FakeStore()
        Lineage(store).write(ResumeOrigin(1, first, 0, ""))
        Lineage(store).write(ResumeOrigin(2, second, 20, first))
        for incarnation, step in made:
            for file in (f"{incarnation}-r00000-000.safetensors", "manifest.json"):
                store.write(key_of(f"step-{step:09d}", file), b"x")
        return store

    # The first generation was given up at step 20, and thawed.
    assert committed_step(commits((first, 20), (second, 25), (first, 30))) == 25
    assert committed_step(commits((first, 20), (first, 30))) == 20
    # It counts where nothing else is left: a start takes it then.
    assert committed_step(commits((first, 28), (first, 30))) == 30


def test_storage_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_save, "_LISTING_S", 0.05)
    store = FakeStore({key_of("step-000000004", "manifest.json"): b"x"})
    assert committed_step(store) == 4

    def fail(operation: str, key: str) -> None:
        raise TransientStorageError("away")

    store.before = fail
    assert committed_step(store) is None
    opened: list[bool] = []

    def stall(operation: str, key: str) -> None:
        time.sleep(0.2)
        opened.append(True)

    store.before = stall
    assert committed_step(store) is None
    assert opened == []


def test_what_all_workers_of_this_host_remember_counts(tmp_path: Path) -> None:
    config = load(["recipe=llama_tiny", "run.dir=run", f"checkpoint.memory_dir={tmp_path}"], with_task=False)
    assert remembered_step(config) == 0
    folder, run = run_folder(str(tmp_path), "run"), run_name("run")
    make_private(folder)
    put(Path(folder), facts_of(10, rank=0, world_size=2, run=run), index=0)
    put(Path(folder), facts_of(20, rank=0, world_size=2, run=run), index=1)
    assert remembered_step(config) == 20
    put(Path(folder), facts_of(10, rank=1, world_size=2, run=run), index=0)
    put(Path(folder), facts_of(30, rank=1, world_size=2, run="another"), index=1)
    assert remembered_step(config) == 10
