import errno
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elastictrain.cgroup import Mount
from elastictrain.errors import ObjectExistsError, ObjectNotFoundError, PermanentStorageError, StorageFullError
from elastictrain.preflight.host import trip
from elastictrain.preflight.host.storage_trip import (
    SharedFolder,
    TripFacts,
    TripMessage,
    blame_unshared,
    judge_trip,
    parse_messages,
)
from elastictrain.preflight.host.trip import FOLDER, look, travel
from elastictrain.preflight.verdict import Reporter, Scope, Status, Verdict
from elastictrain.storage.failures import RetryOptions
from elastictrain.storage.local import LocalStore
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Bytes, ObjectInfo
from tests.unit.preflight.table import Table

SILENT = TripMessage(fault="CRASHED", message="no word at its end")
STEPS = ["create", "create again", "replace", "read", "list", "delete"]


@dataclass
class Words:
    said: list[Mapping[str, object]] = field(default_factory=list)

    def __call__(self, word: Mapping[str, object]) -> None:
        self.said.append(word)


def local(path: Path) -> LocalStore:
    store = open_store(str(path), retry=RetryOptions(attempts=1))
    assert isinstance(store, LocalStore)
    return store


def remains(path: Path) -> list[str]:
    return sorted(str(one.relative_to(path)) for one in path.rglob("*"))


def test_every_step_is_said_and_nothing_remains(tmp_path: Path) -> None:
    words = Words()
    travel(local(tmp_path), name="a", send=words)
    assert [word["done"] for word in words.said if "done" in word] == STEPS
    assert [word["begun"] for word in words.said if "begun" in word] == STEPS
    assert remains(tmp_path) == []


def test_memory_store() -> None:
    store = open_store("memory://trips/run")
    travel(store, name="a", send=Words())
    assert list(store.list()) == []


def test_leftovers_of_killed_trips_go_in_time(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir(parents=True)
    for name, age_s in (("old", 4000.0), ("of-another-host", 10.0)):
        (folder / name).write_text("x")
        os.utime(folder / name, (time.time() - age_s,) * 2)
    travel(local(tmp_path), name="a", send=Words())
    assert [one.name for one in folder.iterdir()] == ["of-another-host"]


def test_nothing_remains_of_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: Bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageFullError):
        travel(local(tmp_path), name="a", send=Words())
    monkeypatch.undo()
    assert remains(tmp_path) == []


def test_store_that_replaces_what_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "create", LocalStore.write)
    with pytest.raises(PermanentStorageError, match="creating"):
        travel(local(tmp_path), name="a", send=Words())
    assert remains(tmp_path) == []


def test_store_that_forgets_the_last_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "write", lambda self, key, data: None)
    with pytest.raises(PermanentStorageError, match="read back"):
        travel(local(tmp_path), name="a", send=Words())


def test_store_that_does_not_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "list", lambda self, prefix="": iter(()))
    with pytest.raises(PermanentStorageError, match="listed"):
        travel(local(tmp_path), name="a", send=Words())
    assert remains(tmp_path) == []


def test_failed_create_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exists(self: LocalStore, key: str, data: Bytes) -> None:
        raise ObjectExistsError("somebody else's")

    monkeypatch.setattr(LocalStore, "create", exists)
    words = Words()
    with pytest.raises(ObjectExistsError):
        travel(local(tmp_path), name="a", send=words)
    assert words.said == [{"begun": "create"}]


def test_what_the_first_host_left_is_seen(tmp_path: Path) -> None:
    words, store = Words(), local(tmp_path)
    store.create(f"{FOLDER}/shared", b"x")
    look(store, name="shared", send=words)
    assert [word["done"] for word in words.said if "done" in word] == ["look"]


def test_a_file_servers_client_may_see_it_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, looks, real = local(tmp_path), [], LocalStore.list
    store.create(f"{FOLDER}/shared", b"x")

    def late(self: LocalStore, prefix: str = "") -> Iterator[ObjectInfo]:
        looks.append(prefix)
        return real(self, prefix) if len(looks) > 2 else iter(())

    monkeypatch.setattr(LocalStore, "list", late)
    look(store, name="shared", send=Words())
    assert len(looks) == 3


def test_a_folder_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trip, "_LOOKS_S", (0.0, 0.001))
    words = Words()
    with pytest.raises(ObjectNotFoundError):
        look(local(tmp_path), name="shared", send=words)
    assert words.said == [{"begun": "look"}]
    facts = TripFacts("/runs/x", (), "look", TripMessage(fault="PERMANENT", message="not there"))
    verdict = judge_trip(facts, host="h2", environment={})
    assert (verdict.status, verdict.subject, verdict.scope, verdict.may_pass) == (Status.FAIL, "h2", Scope.HOST, False)
    assert "mount" in verdict.remedy
    bucket = TripFacts("s3://bucket/x", (), "look", TripMessage(fault="PERMANENT", message="not there"))
    assert "mount" not in judge_trip(bucket, host="h2", environment={}).remedy


def unshared(*hosts: str) -> list[Verdict]:
    others = [Reporter("disk", host).failed("full", remedy="r") for host in ("a", "b", "c")]
    return [*others, *(Reporter("storage", host).failed("look: not there", remedy="r") for host in hosts)]


def test_who_does_not_share_is_unfit_if_another_host_does() -> None:
    assert [one.scope for one in blame_unshared(unshared("c"), num_hosts=3)] == [Scope.HOST] * 4
    assert [one.scope for one in blame_unshared(unshared("b", "c"), num_hosts=3)] == [Scope.HOST] * 3 + [Scope.GROUP] * 2
    assert [one.scope for one in blame_unshared(unshared("b"), num_hosts=2)][-1] is Scope.GROUP


def test_the_others_look_only_for_what_the_first_host_has_left(tmp_path: Path) -> None:
    table = Table()
    first, second = SharedFolder(table, is_first=True), SharedFolder(table, is_first=False)
    assert second.announced(limit_s=0.0) == ""
    second.announce(TripFacts("/x", ()))
    assert table.rows == {}
    first.announce(TripFacts("/x", ()))
    assert second.announced(limit_s=0.0) == first.name
    assert first.announced(limit_s=0.0) == ""
    store = local(tmp_path)
    store.create(f"{FOLDER}/{first.name}", b"x")
    first.remove(str(tmp_path))
    assert list(store.list()) == []


def test_nothing_is_looked_for_after_a_trip_that_failed(tmp_path: Path) -> None:
    table = Table()
    first = SharedFolder(table, is_first=True)
    first.announce(TripFacts("/x", (), "create", SILENT))
    assert SharedFolder(table, is_first=False).announced(limit_s=0.0) == ""
    first.remove("no protocol://")


def test_words_of_a_whole_trip() -> None:
    text = '{"begun": "open"}\n{"begun": "create"}\n{"done": "create", "ms": 1.5}\n{"end": true}\n'
    facts = parse_messages(text, url="/x", mount=None, silent=SILENT)
    assert facts == TripFacts("/x", (("create", 1.5),))
    verdict = judge_trip(facts, host="h1", environment={})
    assert (verdict.status, verdict.measured, verdict.unit) == (Status.PASS, 1.5, "ms")


def test_words_of_a_trip_that_was_killed() -> None:
    stalled = TripMessage(fault="STALLED", message="no answer in 8 s")
    facts = parse_messages('{"begun": "open"}\n{"begun": "create"}\n{"do', url="/x", mount=None, silent=stalled)
    verdict = judge_trip(facts, host="h1", environment={})
    assert (verdict.status, verdict.measured) == (Status.FAIL, f"create: {stalled.message}")
    assert verdict.may_pass
    assert "stat -f" in verdict.remedy


@pytest.mark.parametrize("text", ["", "[]\n", "Traceback\n", '"end"\n', '{"ms": "x"}\n'])
def test_words_that_say_nothing(text: str) -> None:
    verdict = judge_trip(parse_messages(text, url="/x", mount=None, silent=SILENT), host="h1", environment={})
    assert verdict.status is Status.FAIL
    assert SILENT.message in str(verdict.measured)
    assert not verdict.may_pass


def test_no_folder() -> None:
    assert judge_trip(None, host="h1", environment={}).status is Status.SKIP


def test_slow_store() -> None:
    facts = TripFacts("/x", (("create", 1800.0), ("read", 300.0)))
    verdict = judge_trip(facts, host="h1", environment={})
    assert (verdict.status, verdict.measured) == (Status.WARN, 2100.0)
    assert all(word in verdict.remedy for word in ("`create`", "1800 ms"))


def failed(url: str, fault: str, number: int | None = None, environment: Mapping[str, str] | None = None) -> Verdict:
    mount = Mount("/", "/mnt/runs", "nfs4", frozenset()) if url.startswith("/") else None
    facts = TripFacts(url, (), "create", TripMessage(fault=fault, errno=number, message="the message"), mount)
    return judge_trip(facts, host="h1", environment=environment or {})


@pytest.mark.parametrize(
    ("url", "fault", "number", "remedy"),
    [
        ("/mnt/runs/a", "DENIED", errno.EROFS, "mount -o remount,rw /mnt/runs"),
        ("/mnt/runs/a", "DENIED", errno.EACCES, "chown -R"),
        ("s3://bucket/a", "DENIED", None, "AWS_ACCESS_KEY_ID"),
        ("gs://bucket/a", "DENIED", None, "gcloud auth application-default login"),
        ("az://bucket/a", "DENIED", None, "AZURE_STORAGE_CONNECTION_STRING"),
        ("/mnt/runs/a", "FULL", errno.ENOSPC, "python -m elastictrain.checkpoint prune /mnt/runs/a"),
        ("sftp://bucket/a", "DENIED", None, "credentials for sftp://"),
        ("sftp://bucket/a", "NO_BUCKET", None, "create bucket"),
        ("s3://bucket/a", "FULL", None, "raise the quota of s3://bucket/a"),
        ("s3://bucket/a", "NO_BUCKET", None, "aws s3 mb s3://bucket`"),
        ("gs://bucket/a", "NO_BUCKET", None, "gcloud storage buckets create gs://bucket`"),
        ("az://bucket/a", "NO_BUCKET", None, "az storage container create --name bucket`"),
        ("s3://bucket/a", "TRANSIENT", None, "curl -m 5 -sS -o /dev/null https://s3.amazonaws.com"),
        ("/mnt/runs/a", "TRANSIENT", errno.EIO, "its nfs4 at /mnt/runs must answer"),
        ("x://a", "CONFIG", None, "correct run.dir"),
        ("/mnt/runs/a", "PERMANENT", errno.ENOTDIR, "ls -ld /mnt/runs/a"),
        ("s3://bucket/a", "PERMANENT", None, "another store than s3://bucket/a"),
        ("s3://bucket/a", "of a later release", None, "another store than s3://bucket/a"),
    ],
)
def test_each_failure_has_its_remedy(url: str, fault: str, number: int | None, remedy: str) -> None:
    verdict = failed(url, fault, number)
    assert (verdict.status, str(verdict.measured).partition(":")[0]) == (Status.FAIL, "create")
    assert remedy in verdict.remedy
    assert verdict.may_pass is (fault == "TRANSIENT")


def test_own_endpoint_is_named() -> None:
    environment = {"AWS_ENDPOINT_URL": "http://minio:9000"}
    assert "curl -m 5 -sS -o /dev/null http://minio:9000 must" in failed(
        "s3://b/a", "TRANSIENT", None, environment
    ).remedy.replace("`", "")
