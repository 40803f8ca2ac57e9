"""Compiled code in the folder of a host and in that of a run; the files here stand for what torch would write."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastictrain.checkpoint.signing import SigningKey
from elastictrain.errors import TransientStorageError
from elastictrain.events import Compiled, Event
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store
from elastictrain.train.compile_archive import KEPT_KEYS, ArchiveName, files_in, parse_name
from elastictrain.train.compile_cache import VARIABLE, CompileCache, is_chosen, use_host_folder
from tests.unit.checkpoint.fakes import FakeStore
from tests.unit.train.parts import Squares
from tests.unit.train.test_compile_key import with_group
from tests.unit.train.test_loop import config

KEY = SigningKey("RUN_KEY", b"k" * 32)
OTHER = SigningKey("RUN_KEY", b"o" * 32)
CODE = "1" * 24


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    previous = os.umask(0o022)
    yield
    os.umask(previous)


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run"))


def host(tmp_path: Path, name: str, *, key: str = CODE) -> Path:
    folder = tmp_path / f"{name}-{key}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def start(
    folder: Path, store: Store, *, signing: SigningKey | None = None, number: int = 1, compiles: tuple[str, ...] = ()
) -> Compiled:
    """A start as rank 0, whose first step adds the files `compiles` to the host's folder; returns the event that it records."""
    recorded: list[Event] = []
    done = threading.Event()

    def record(event: Event) -> None:
        recorded.append(event)
        done.set()

    cache = CompileCache(str(folder), store, signing=signing, number=number, record=record)
    cache.begin()
    cache.wait()
    for name in compiles:
        (folder / name).write_bytes(name.encode())
    cache.first_step_done()
    assert done.wait(30)
    (event,) = recorded
    assert isinstance(event, Compiled)
    return event


def archives(store: Store) -> list[ArchiveName]:
    return [name for info in store.list("compile_cache") if (name := parse_name(info.key)) is not None]


def test_another_host_finds_what_one_has_compiled(tmp_path: Path, local: Store) -> None:
    first = start(host(tmp_path, "a"), local, compiles=("x", "y"))
    assert (first.loaded, first.found_files, first.new_files) == (None, 0, 2)
    second = start(host(tmp_path, "b"), local, number=2)
    assert (second.loaded, second.found_files, second.new_files, second.stored) == (first.stored, 2, 0, None)
    assert files_in(str(host(tmp_path, "b"))).keys() == {"x", "y"}
    # The host has it now: nothing is read.
    third = start(host(tmp_path, "b"), local, number=3)
    assert (third.loaded, third.found_files, third.new_files, third.stored) == (None, 2, 0, None)


def test_hosts_that_compiled_different_graphs_end_with_all_of_them(tmp_path: Path, local: Store) -> None:
    start(host(tmp_path, "a"), local, number=1, compiles=("x",))
    start(host(tmp_path, "b"), local, number=2, compiles=("y",))
    last = start(host(tmp_path, "a"), local, number=3)
    assert (last.found_files, last.stored) == (2, None)
    assert [name.number for name in archives(local)] == [2]


def test_archives_of_the_last_keys_remain(tmp_path: Path, local: Store) -> None:
    for number in range(1, 6):
        start(host(tmp_path, "a", key=str(number) * 24), local, number=number, compiles=("x",))
    assert sorted(name.number for name in archives(local)) == [3, 4, 5]
    assert len(archives(local)) == KEPT_KEYS


def test_a_remote_folder_needs_a_signature(tmp_path: Path) -> None:
    store = FakeStore()
    assert start(host(tmp_path, "a"), store, compiles=("x",)).stored is None
    assert store.objects == {}
    assert start(host(tmp_path, "a"), store, signing=KEY).stored is not None
    for name, signing in (("none", None), ("other", OTHER)):
        event = start(host(tmp_path, name), store, signing=signing, number=2)
        assert (event.loaded, event.found_files) == (None, 0)
    assert start(host(tmp_path, "b"), store, signing=KEY, number=2).loaded is not None


def test_an_unsigned_archive_that_others_may_have_written_is_not_loaded(tmp_path: Path, local: Store) -> None:
    stored = start(host(tmp_path, "a"), local, compiles=("x",)).stored
    for place in (tmp_path / "run", tmp_path / "run/compile_cache", tmp_path / f"run/{stored}"):
        mode = place.stat().st_mode
        for bit in (0o020, 0o002):
            place.chmod(mode | bit)
            event = start(host(tmp_path, f"b-{place.name}-{bit}"), local, number=2)
            assert (event.loaded, event.found_files) == (None, 0)
            # What this host has compiled is not put into such a folder either.
            if place.is_dir():
                assert start(host(tmp_path, f"b-{place.name}-{bit}"), local, number=2, compiles=("own",)).stored is None
        place.chmod(mode)
    assert start(host(tmp_path, "c"), local, number=2).loaded == stored


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to somebody else")
def test_an_unsigned_archive_of_another_user_is_not_loaded(tmp_path: Path, local: Store) -> None:
    stored = start(host(tmp_path, "a"), local, compiles=("x",)).stored
    os.chown(tmp_path / f"run/{stored}", 54_321, 54_321)
    assert start(host(tmp_path, "b"), local, number=2).loaded is None


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: data.replace(b"sha256", b"sha257")])
def test_a_damaged_archive_is_compiled_anew_and_replaced(tmp_path: Path, local: Store, damage: object) -> None:
    stored = start(host(tmp_path, "a"), local, compiles=("x", "y")).stored
    path = tmp_path / f"run/{stored}"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    event = start(host(tmp_path, "b"), local, number=2, compiles=("x", "y", "z"))
    assert (event.loaded, event.found_files, event.new_files) == (None, 0, 3)
    assert start(host(tmp_path, "c"), local, number=3).loaded == event.stored != stored


def test_an_object_that_a_killed_compiler_left_is_made_again(tmp_path: Path, local: Store) -> None:
    (host(tmp_path, "a") / "torn.so").write_bytes(b"\x7fELF\x02\x01")
    assert start(host(tmp_path, "a"), local).found_files == 0


def test_a_storage_that_fails_ends_nothing(tmp_path: Path) -> None:
    def fail(operation: str, key: str) -> None:
        raise TransientStorageError("no answer")

    event = start(host(tmp_path, "a"), FakeStore(before=fail), signing=KEY, compiles=("x",))
    assert (event.loaded, event.new_files, event.stored) == (None, 1, None)


def test_a_slow_storage_holds_the_start_up_for_a_bounded_time(tmp_path: Path) -> None:
    answered = threading.Event()
    store = FakeStore(before=lambda operation, key: (answered.wait(30), None)[1])
    cache = CompileCache(str(host(tmp_path, "a")), store, signing=KEY, number=1, record=None)
    cache.begin()
    began = time.monotonic()
    cache.wait(0.05)
    assert time.monotonic() - began < 5
    answered.set()


def test_the_workers_of_a_host_read_an_archive_once(tmp_path: Path) -> None:
    store = FakeStore()
    start(host(tmp_path, "a"), store, signing=KEY, compiles=tuple(f"f{number}" for number in range(50)))
    reads: list[str] = []
    store.before = lambda operation, key: reads.append(key) if operation == "read" else None
    workers = [CompileCache(str(host(tmp_path, "b")), store, signing=KEY, number=2, record=None) for _ in range(8)]
    for worker in workers:
        worker.begin()
    for worker in workers:
        worker.wait()
    assert len(reads) == 1
    assert len(files_in(str(host(tmp_path, "b")))) == 50


def compiling(**keys: object) -> str | None:
    plain = with_group(config(steps=5), "train", compile=True, **keys)
    return use_host_folder(plain, task=Squares(), device=torch.device("cpu"))


def test_the_folder_of_a_host_is_private_and_named_by_the_key(tmp_path: Path) -> None:
    folder = compiling()
    assert folder is not None
    assert os.environ[VARIABLE] == folder
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert compiling() == folder
    # What this process, or torch, has set is no choice of a person.
    assert compiling(micro_batch=3) not in (None, folder)
    os.environ[VARIABLE] = str(tmp_path / "torchinductor_me")
    assert compiling() == folder


def test_nothing_is_kept_where_nothing_is_compiled_or_a_person_has_chosen_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert use_host_folder(config(steps=5), task=Squares(), device=torch.device("cpu")) is None
    assert VARIABLE not in os.environ
    monkeypatch.setenv(VARIABLE, "/data/cache")
    assert compiling() is None
    assert os.environ[VARIABLE] == "/data/cache"
    assert is_chosen("/data/cache", temporary=str(tmp_path), parent="/tmp/elastictrain-1")


def test_a_folder_that_another_user_can_enter_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = compiling()
    assert folder is not None
    Path(folder).chmod(0o755)
    monkeypatch.delenv(VARIABLE)
    assert compiling() is None
    assert VARIABLE not in os.environ


def test_folders_that_no_start_asked_for_in_a_week_are_removed(tmp_path: Path, local: Store) -> None:
    parent = tmp_path / "elastictrain-1"
    for name, age_days in (("compile-old", 8), ("compile-new", 6), ("other", 99)):
        (parent / name).mkdir(parents=True)
        os.utime(parent / name, (time.time() - age_days * 86_400,) * 2)
    folder = host(parent, "compile")
    os.utime(folder, (0, 0))
    start(folder, local)
    assert sorted(path.name for path in parent.iterdir()) == ["compile-" + CODE, "compile-new", "other"]
