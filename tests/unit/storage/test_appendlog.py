import errno
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from uuid import uuid4

import pytest

from elastictrain.errors import AccessDeniedError, ObjectNotFoundError, TransientStorageError
from elastictrain.storage import appendlog
from elastictrain.storage.appendlog import open_append_log
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Bytes, ObjectInfo, Store
from tests.unit.storage.appended import read_appended


def memory() -> Store:
    return open_store(f"memory://{uuid4().hex}")


def keys(store: Store) -> list[str]:
    return [info.key for info in store.list()]


def wait_for(condition: object, *, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_local_record_is_in_the_file_at_once(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    log = open_append_log(store, "events/a.jsonl", flush_s=60.0)
    for number in range(3):
        log.append(b"%d\n" % number)
        assert (tmp_path / "events/a.jsonl").read_bytes().count(b"\n") == number + 1
    log.close()
    again = open_append_log(store, "events/a.jsonl", flush_s=60.0)
    again.append(b"3\n")
    again.close()
    assert list(read_appended(store, "events")) == [b"0", b"1", b"2", b"3"]


def test_a_thread_that_flushes_disturbs_nobody_who_appends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the thread of a snapshot does while the next step is recorded."""
    really = os.write

    def slowly(descriptor: int, data: bytes) -> int:
        with memoryview(data) as written:  # as the system call does
            time.sleep(0.001)
            return really(descriptor, written)

    log = open_append_log(open_store(str(tmp_path)), "events/a.jsonl", flush_s=60.0)
    ended = threading.Event()
    flushing = threading.Thread(target=lambda: [log.flush() for _ in iter(ended.is_set, True)])
    monkeypatch.setattr(os, "write", slowly)
    flushing.start()
    try:
        for number in range(20):
            log.append(b"%d\n" % number)
    finally:
        ended.set()
        flushing.join()
    log.close()
    assert (tmp_path / "events/a.jsonl").read_bytes() == b"".join(b"%d\n" % number for number in range(20))


def test_a_local_log_is_durable_when_it_is_closed_and_waits_for_no_disk_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start opens one, and may do so while gigabytes are on their way to the disk."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))  # noqa: PTH115
    (tmp_path / "run").mkdir()
    log = open_append_log(open_store(str(tmp_path / "run")), "events/a.jsonl", flush_s=60.0)
    log.append(b"1\n")
    log.flush()
    assert synced == []
    log.close()
    run = f"{tmp_path}/run"
    assert synced == [f"{run}/events/a.jsonl", run, f"{run}/events"]
    synced.clear()
    open_append_log(open_store(str(tmp_path / "new")), "events/a.jsonl", flush_s=60.0)
    assert str(tmp_path) in synced, "a new run's folder is"


def test_torn_record_stays_alone(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    (tmp_path / "a.jsonl").write_bytes(b"1\nto")
    assert list(read_appended(store, "")) == [b"1"]
    log = open_append_log(store, "a.jsonl", flush_s=60.0)
    log.append(b"2\n")
    log.close()
    assert list(read_appended(store, "")) == [b"1", b"to", b"2"]


def test_full_disk_does_not_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    log = open_append_log(open_store(str(tmp_path)), "a.jsonl", flush_s=60.0)
    log.append(b"1\n")

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "write", full)
        log.append(b"2\n")
        log.append(b"3\n")
    assert len(caplog.records) == 1
    log.append(b"4\n")
    log.close()
    assert (tmp_path / "a.jsonl").read_bytes() == b"1\n2\n3\n4\n"


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: a process that is killed after `append` has lost nothing."""
    log = open_append_log(open_store(str(tmp_path)), "a.jsonl", flush_s=60.0)
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data[:3])))
    log.append(b"a record\n")
    assert (tmp_path / "a.jsonl").read_bytes() == b"a record\n"
    log.append(b"another one\n")
    assert (tmp_path / "a.jsonl").read_bytes() == b"a record\nanother one\n"
    log.close()


def test_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "mkdir", denied)
    with pytest.raises(AccessDeniedError, match=r"a\.jsonl"):
        open_append_log(open_store(str(tmp_path)), "events/a.jsonl", flush_s=1.0)


def test_remote_log_is_sent_while_it_grows() -> None:
    store = memory()
    log = open_append_log(store, "events/a.jsonl", flush_s=0.01)
    log.append(b"1\n")
    wait_for(lambda: list(read_appended(store, "events")) == [b"1"])
    log.append(b"2\n")
    wait_for(lambda: list(read_appended(store, "events")) == [b"1", b"2"])
    log.close()
    assert keys(store) == ["events/a.part-00001.jsonl"]


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_closed_log_loses_what_comes_and_says_so_once(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(str(tmp_path)) if kind == "local" else memory()
    log = open_append_log(store, "a.jsonl", flush_s=60.0)
    log.append(b"1\n")
    log.close()
    log.close()
    assert caplog.records == []
    for _ in range(3):
        log.append(b"2\n")
        log.flush()
    log.close()
    (record,) = caplog.records
    assert record.getMessage().endswith(f"/{'a.jsonl' if kind == 'local' else 'a'} is closed: later records are lost")
    assert list(read_appended(store, "")) == [b"1"]


def test_segments_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appendlog, "SEGMENT_BYTES", 100)
    store = memory()
    lines = [b"%04d" % number for number in range(200)]
    for half in (lines[:100], lines[100:]):
        log = open_append_log(store, "events/a.jsonl", flush_s=0.001)
        for line in half:
            log.append(line + b"\n")
        log.close()
    assert list(read_appended(store, "events")) == lines
    assert keys(store) == [f"events/a.part-{number:05d}.jsonl" for number in range(1, 11)]


def test_empty_log_writes_nothing() -> None:
    store = memory()
    open_append_log(store, "a.jsonl", flush_s=60.0).close()
    assert keys(store) == []


class Unsteady:
    """A store whose writes fail, or hang, as told."""

    url = "unsteady://x"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.failures = 0
        self.failing = True
        self.hang = threading.Event()
        self.hang.set()

    def write(self, key: str, data: Bytes) -> None:
        self.hang.wait(10)
        if self.failing:
            self.failures += 1
            raise TransientStorageError("cannot write now")
        self.objects[key] = bytes(data)

    def stat(self, key: str) -> ObjectInfo:
        raise ObjectNotFoundError(key)


def test_failed_upload_is_logged_once_and_repeated(caplog: pytest.LogCaptureFixture) -> None:
    store = Unsteady()
    log = open_append_log(store, "a.jsonl", flush_s=0.002)  # type: ignore[arg-type]
    log.append(b"1\n")
    wait_for(lambda: store.failures >= 3)
    log.append(b"2\n")
    store.failing = False
    log.close()
    assert store.objects == {"a.part-00001.jsonl": b"1\n2\n"}
    assert len(caplog.records) == 1


def test_close_is_bounded_and_says_what_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    store = Unsteady()
    store.hang.clear()
    log = open_append_log(store, "a.jsonl", flush_s=60.0, close_s=0.05)  # type: ignore[arg-type]
    log.append(b"12345\n")
    began = time.monotonic()
    log.close()
    assert time.monotonic() - began < 2.0
    ((url, missing_bytes, missing_records),) = [record.args for record in caplog.records]
    assert (url, missing_bytes, missing_records) == ("unsteady://x/a", 6, 0)
    store.hang.set()
    for thread in [thread for thread in threading.enumerate() if thread.name == "append-log"]:
        thread.join(5)


def test_kept_records_are_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(appendlog, "KEPT_BYTES", 10)
    store = Unsteady()
    log = open_append_log(store, "a.jsonl", flush_s=60.0)  # type: ignore[arg-type]
    for _ in range(20):
        log.append(b"1\n")
    store.failing = False
    log.close()
    assert store.objects == {"a.part-00001.jsonl": b"1\n" * 5}
    assert caplog.records[-1].args == ("unsteady://x/a", 0, 15)


@pytest.mark.parametrize("segment_bytes", [1 << 20, 20])
def test_what_is_flushed_is_in_the_store(segment_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appendlog, "SEGMENT_BYTES", segment_bytes)
    store = memory()
    log = open_append_log(store, "events/a.jsonl", flush_s=60.0)
    for number in range(20):
        log.append(b"%d\n" % number)
        if number % 5 == 4:
            log.flush()
            assert list(read_appended(store, "events")) == [b"%d" % one for one in range(number + 1)]
    log.flush()
    log.close()
    log.flush()
    assert len(list(read_appended(store, "events"))) == 20


def test_what_several_threads_flush_is_in_the_store() -> None:
    store = memory()
    log = open_append_log(store, "events/a.jsonl", flush_s=60.0)
    missing: list[bytes] = []

    def work(name: int) -> None:
        for number in range(20):
            line = b"%d of %d" % (number, name)
            log.append(line + b"\n")
            log.flush()
            if line not in read_appended(store, "events"):
                missing.append(line)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert missing == []


def test_flushing_is_bounded_where_the_store_hangs() -> None:
    store = Unsteady()
    store.failing = False
    store.hang.clear()
    log = open_append_log(store, "a.jsonl", flush_s=60.0, close_s=0.05)  # type: ignore[arg-type]
    log.append(b"1\n")
    began = time.monotonic()
    log.flush()
    assert time.monotonic() - began < 2.0
    assert store.objects == {}
    store.hang.set()
    log.flush()
    assert store.objects == {"a.part-00001.jsonl": b"1\n"}
    log.close()


def test_flushing_does_not_wait_for_a_store_that_fails() -> None:
    store = Unsteady()
    log = open_append_log(store, "a.jsonl", flush_s=60.0)  # type: ignore[arg-type]
    log.append(b"1\n")
    began = time.monotonic()
    log.flush()
    assert time.monotonic() - began < 5.0
    assert store.failures == 1
    store.failing = False
    log.flush()
    assert store.objects == {"a.part-00001.jsonl": b"1\n"}
    log.close()


def test_flushing_a_local_log_tries_again_what_did_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_append_log(open_store(str(tmp_path)), "a.jsonl", flush_s=60.0)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        log.append(b"1\n")
        log.flush()
    assert (tmp_path / "a.jsonl").read_bytes() == b""
    log.flush()
    assert (tmp_path / "a.jsonl").read_bytes() == b"1\n"
    log.close()


def test_the_folder_of_a_run_that_was_deleted_is_not_made_again(tmp_path: Path) -> None:
    log = open_append_log(open_store(str(tmp_path / "run")), "events/a.jsonl", flush_s=1.0, close_s=1.0)
    log.append(b"x\n")
    shutil.rmtree(tmp_path / "run")
    log.close()
    assert not (tmp_path / "run").exists()
