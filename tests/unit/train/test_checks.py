import dataclasses
from pathlib import Path

import pytest

from elastictrain.config.composed import RunConfig
from elastictrain.errors import ConfigError, StorageError
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store
from elastictrain.train import checks
from elastictrain.train.checks import check_run_folder, store_config
from tests.unit.train.parts import Squares
from tests.unit.train.test_loop import config


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run"))


def of(store: Store, **run: object) -> RunConfig:
    plain = config(steps=5)
    return dataclasses.replace(plain, run=dataclasses.replace(plain.run, dir=store.url, **run))  # type: ignore[arg-type]


def test_a_new_folder_is_fine_and_so_is_the_same_config_again(store: Store) -> None:
    check_run_folder(store, of(store), task=Squares())
    store_config(store, of(store))
    store.write("checkpoints/step-000000001/manifest.json", b"{}")
    check_run_folder(store, of(store), task=Squares())


def test_a_config_that_is_there_is_not_written_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store_config(store, of(store))

    def refuse(*_: object) -> None:
        raise AssertionError

    with monkeypatch.context() as patched:
        patched.setattr(type(store), "write", refuse)
        store_config(store, of(store))
        with pytest.raises(AssertionError):
            store_config(store, of(store, seed=3))
    store_config(store, of(store, seed=3))
    assert b"seed: 3" in store.read("config.yaml")


def test_a_config_that_changes_the_answer_is_refused_by_key(store: Store) -> None:
    store_config(store, of(store))
    store.write("checkpoints/step-000000001/manifest.json", b"{}")
    with pytest.raises(ConfigError, match=r"run\.seed") as caught:
        check_run_folder(store, of(store, seed=3), task=Squares())
    assert [problem.key for problem in caught.value.problems] == ["run.seed"]
    check_run_folder(store, of(store, seed=3, on_change="continue"), task=Squares())


def test_without_a_checkpoint_nothing_depends_on_the_old_config(store: Store) -> None:
    store_config(store, of(store))
    check_run_folder(store, of(store, seed=3), task=Squares())


def test_writing_is_tried_unless_the_preflight_does_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(store: Store) -> None:
        raise StorageError("read-only")

    monkeypatch.setattr(checks, "check_writable", refuse)
    with pytest.raises(StorageError, match=r"`run\.dir`.*read-only"):
        check_run_folder(store, of(store), task=Squares())
    check_run_folder(store, of(store), task=Squares(), try_writing=False)
