import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastictrain.bounded_json import encode_record
from elastictrain.errors import ObjectNotFoundError, PermanentStorageError, StorageError, TransientStorageError
from elastictrain.identity import PoisonedSteps
from elastictrain.launch.membership.records import EndKind, Generation, GenerationOutcome, HostState
from elastictrain.launch.membership.store import MembershipStore
from elastictrain.lease.chain import Chain, LeaseClaim
from elastictrain.storage.failures import Retrying, RetryOptions
from elastictrain.storage.local import LocalStore
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import ObjectInfo, Store
from tests.unit.checkpoint.fakes import FakeStore
from tests.unit.launch.membership.made import end, generation, record


def key(number: int) -> str:
    return f"launch/generations/{number:09d}.json"


@pytest.fixture(params=["fake", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return FakeStore() if request.param == "fake" else open_store(str(tmp_path / "run"))


def test_an_empty_store(store: Store) -> None:
    membership = MembershipStore(store)
    assert membership.records() == []
    assert membership.newest() is None
    assert not membership.follows_another(1)


def test_all_hosts_have_the_same_secret(store: Store) -> None:
    token = MembershipStore(store).token()
    assert len(token) >= 32
    assert MembershipStore(store).token() == token
    assert MembershipStore(FakeStore()).token() != token


@pytest.mark.parametrize("size_bytes", [0, 1, 31])
def test_a_secret_that_can_be_guessed_is_refused_by_name(store: Store, size_bytes: int) -> None:
    store.create("launch/token", b"x" * size_bytes)
    with pytest.raises(PermanentStorageError, match=rf"{store.url}/launch/token .* {size_bytes};"):
        MembershipStore(store).token()
    store.delete("launch/token")
    assert len(MembershipStore(store).token()) >= 32


def test_nobody_else_reads_the_secret(tmp_path: Path) -> None:
    MembershipStore(open_store(str(tmp_path))).token()
    assert (tmp_path / "launch/token").stat().st_mode & 0o777 == 0o600


def test_who_agrees_on_a_generation_waits_for_no_disk_but_it_outlasts_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(str(tmp_path), url="u", retrying=Retrying(RetryOptions(attempts=1)))
    membership = MembershipStore(store, volatile=store.without_sync())

    def refuse(_: int) -> None:
        raise AssertionError("fsync")

    monkeypatch.setattr(os, "fsync", refuse)
    membership.write_record(record("a"))
    assert membership.create(generation(1, "a"))
    assert not membership.create(generation(1, "b"))
    with pytest.raises(AssertionError, match="fsync"):
        membership.token()
    assert membership.newest() == generation(1, "a")
    for _ in range(2):
        with pytest.raises(AssertionError, match="fsync"):
            membership.settle()
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    membership.settle()
    assert synced
    assert membership.newest() == generation(1, "a")
    synced.clear()
    membership.settle()
    assert synced == []
    assert membership.records() == [record("a")]


def test_lines_are_replaced_and_forgotten(store: Store) -> None:
    membership = MembershipStore(store)
    for line in (record("a"), record("b"), replace(record("a"), beat=2)):
        membership.write_record(line)
    assert MembershipStore(store).records() == [replace(record("a"), beat=2), record("b")]
    membership.remove("a")
    membership.remove("a")
    assert membership.records() == [record("b")]


def test_lines_that_are_none_are_left_out() -> None:
    store = FakeStore()
    membership = MembershipStore(store)
    membership.write_record(record("a"))
    store.objects["launch/hosts/b.json"] = encode_record(record("b"))[:-5]
    store.objects["launch/hosts/c.json"] = b"\xff"
    store.objects["launch/hosts/a copy.json"] = encode_record(record("a"))
    store.objects["launch/hosts/notes.txt"] = b"hello"
    store.objects["launch/hosts-of-old/d.json"] = encode_record(record("d"))
    assert membership.records() == [record("a")]


def test_what_is_gone_between_the_list_and_the_read_is_left_out() -> None:
    store = FakeStore()
    membership = MembershipStore(store)
    for host in "ab":
        membership.write_record(record(host))

    def take_away(operation: str, name: str) -> None:
        if operation == "read" and name.endswith("/a.json"):
            raise ObjectNotFoundError(name)

    store.before = take_away
    assert membership.records() == [record("b")]


def test_each_number_is_taken_once(store: Store) -> None:
    first, second = MembershipStore(store), MembershipStore(store)
    mine, other = generation(1, "ab"), generation(1, "ba")
    assert first.create(mine)
    assert not second.create(other)
    # Its own proposal is there already: the answer to an earlier try was lost.
    assert first.create(mine)
    assert first.newest() == second.newest() == mine


def test_the_newest_generation_is_followed(store: Store) -> None:
    writer, reader = MembershipStore(store), MembershipStore(store)
    for number in (1, 2, 3):
        writer.create(generation(number, "ab"))
        assert reader.newest() == generation(number, "ab")
    assert MembershipStore(store).newest() == generation(3, "ab")


class LaggingStore(FakeStore):
    """Shows in a list only what it held when `freeze` was called, as an object store may for a while; reads are current."""

    def freeze(self) -> None:
        self.listed = set(self.objects)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter([info for info in super().list(prefix) if info.key in self.listed])


@pytest.mark.parametrize("listed", [0, 1, 2])
def test_a_list_may_lag_behind(listed: int) -> None:
    store = LaggingStore()
    writer = MembershipStore(store)
    store.freeze()
    for number in (1, 2, 3):
        writer.create(generation(number, "a"))
        if number == listed:
            store.freeze()
    assert MembershipStore(store).newest() == generation(3, "a")


def test_a_list_that_knows_more_than_a_read_is_no_end() -> None:
    store = FakeStore()
    MembershipStore(store).create(generation(1, "a"))
    store.objects[key(2)] = encode_record(generation(2, "a"))

    def hide(operation: str, name: str) -> None:
        if operation == "read" and name == key(2):
            raise ObjectNotFoundError(name)

    reader, store.before = MembershipStore(store), hide
    assert reader.newest() == generation(1, "a")
    store.before = lambda operation, name: None
    assert reader.newest() == generation(2, "a")


def test_a_first_look_that_fails_is_taken_again() -> None:
    store = FakeStore()
    MembershipStore(store).create(generation(1, "a"))
    reader = MembershipStore(store)
    for broken in ("list", "read"):

        def fail(operation: str, name: str, broken: str = broken) -> None:
            if operation == broken:
                raise TransientStorageError("away")

        store.before = fail
        with pytest.raises(StorageError, match="away"):
            reader.newest()
    store.before = lambda operation, name: None
    assert reader.newest() == generation(1, "a")


def test_a_number_is_found_without_a_second_list() -> None:
    store = FakeStore()
    membership = MembershipStore(store)
    membership.create(generation(1, "a"))
    membership.newest()
    asked: list[tuple[str, str]] = []
    store.before = lambda operation, name: asked.append((operation, name))
    membership.newest()
    assert sorted(asked) == [("read", key(2)), ("read", key(3))]


@pytest.mark.parametrize(
    "data",
    [b"", b"{", encode_record(generation(2, "ab"))[:-9], encode_record(generation(1, "ab")), encode_record(record("a"))],
    ids=["empty", "torn", "cut", "of another number", "another record"],
)
def test_a_damaged_generation_is_one_without_hosts(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore()
    MembershipStore(store).create(generation(1, "ab"))
    store.objects[key(2)] = data
    membership = MembershipStore(store)
    with caplog.at_level(logging.WARNING):
        found = membership.newest()
        membership.newest()
    assert found is not None
    assert (found.number, found.outcome, found.members) == (2, GenerationOutcome.RUN, ())
    assert not found.terminal
    (told,) = caplog.records
    assert f"fake://run/{key(2)}" in told.getMessage()
    # Nobody can create it a second time, so the next one has another number.
    assert not membership.create(generation(2, "ab"))
    assert membership.create(generation(3, "ab"))
    assert membership.newest() == generation(3, "ab")


def test_foreign_names_are_no_generations() -> None:
    store = FakeStore()
    membership = MembershipStore(store)
    membership.create(generation(1, "a"))
    for name in ("7.json", "000000007.json.bak", "old/000000008.json", "000000009.txt", "0000000010.json"):
        store.objects[f"launch/generations/{name}"] = encode_record(generation(7, "z"))
    assert MembershipStore(store).newest() == generation(1, "a")


def test_whether_a_generation_follows_another(store: Store) -> None:
    membership = MembershipStore(store)
    membership.create(generation(1, "a"))
    membership.create(generation(2, "a", outcome=GenerationOutcome.GIVE_UP))
    membership.create(generation(3, "a"))
    assert [membership.follows_another(number) for number in (1, 2, 3, 4)] == [False, True, False, True]


def test_a_line_tells_how_a_generation_ended(store: Store) -> None:
    membership = MembershipStore(store)
    line = replace(record("a"), end=end("a", EndKind.LOST, lost="b", blames=("b", "c")))
    membership.write_record(line)
    assert membership.records() == [line]


class ForgettingStore(FakeStore):
    """Its answer to the first create is lost on the way, and the request is sent again."""

    def create(self, key: str, data: bytes | bytearray | memoryview) -> None:
        super().create(key, data)
        super().create(key, data)


def test_a_proposal_whose_answer_was_lost_counts() -> None:
    store = ForgettingStore()
    assert MembershipStore(store).create(generation(1, "a"))
    assert MembershipStore(store).newest() == generation(1, "a")


def test_a_generation_is_kept_as_it_was_made() -> None:
    store = FakeStore()
    made = Generation(1, GenerationOutcome.GIVE_UP, (), 0, "a", (), ("b",), 1.5, 70, "it fails again and again")
    MembershipStore(store).create(made)
    assert MembershipStore(store).newest() == made


def test_a_launcher_that_is_known_to_be_dead_is_buried_once() -> None:
    store = FakeStore()
    membership = MembershipStore(store)
    membership.write_record(replace(record("a"), state=HostState.BUSY, beat=5))
    membership.mark_dead("a")
    (line,) = membership.records()
    # A beat of its own: readers take an equal or older one for a late answer.
    assert (line.state, line.beat) == (HostState.GONE, 6)
    membership.mark_dead("a")
    membership.mark_dead("b")
    assert membership.records() == [line]
    store.objects["launch/hosts/c.json"] = b"{"
    membership.mark_dead("c")
    assert store.objects["launch/hosts/c.json"] == b"{"


def test_an_orderly_end_keeps_its_reason() -> None:
    membership = MembershipStore(FakeStore())
    left = replace(record("a"), state=HostState.GONE, reason="asked to stop")
    membership.write_record(left)
    membership.mark_dead("a")
    assert membership.records() == [left]


def test_records_that_no_launcher_writes_count_for_nothing(tmp_path: Path) -> None:
    """Their size is as absurd as their content."""
    store = open_store(str(tmp_path / "run"))
    membership = MembershipStore(store)
    membership.write_record(record("a"))
    for name in ("launch/hosts/b.json", key(1)):
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(30 << 30)
    assert [one.host for one in membership.records()] == ["a"]
    newest = MembershipStore(store).newest()
    assert newest is not None
    assert (newest.number, newest.members) == (1, ())


def test_a_generation_that_no_launcher_made_is_over_for_launchers() -> None:
    store = FakeStore()
    Chain(store).create(LeaseClaim(1, "torchrun-x", "host1", 17, ("torchrun-x",)))
    newest = MembershipStore(store).newest()
    assert newest is not None
    assert (newest.number, newest.outcome, newest.owner, newest.exit_code) == (1, GenerationOutcome.ELSEWHERE, "torchrun-x", 75)
    assert newest.terminal


def test_what_is_poisoned_is_known_after_other_runs_trained_in_the_folder() -> None:
    store, poisoned = FakeStore(), PoisonedSteps(skipped=(412,))
    MembershipStore(store).create(replace(generation(1, "a"), poisoned=PoisonedSteps(skipped=(9,))))
    MembershipStore(store).create(replace(generation(2, "a"), poisoned=poisoned))
    running = MembershipStore(store)
    assert running.newest() is not None
    for number in range(3, 75):
        Chain(store).create(LeaseClaim(number, "torchrun-x", "host1", 17, ("torchrun-x",)))
    store.objects[key(75)] = b"torn"
    for one in (running, MembershipStore(store)):
        newest = one.newest()
        assert newest is not None
        assert (newest.number, newest.poisoned) == (75, poisoned)
    alone = FakeStore()
    Chain(alone).create(LeaseClaim(1, "torchrun-x", "host1", 17, ("torchrun-x",)))
    found = MembershipStore(alone).newest()
    assert found is not None
    assert found.poisoned == PoisonedSteps()


def test_records_of_releases_without_owners_are_read() -> None:
    store = FakeStore()
    old = json.loads(encode_record(generation(1, "a")))
    del old["owner"]
    store.objects[key(1)] = json.dumps(old).encode()
    assert MembershipStore(store).newest() == replace(generation(1, "a"), owner="")
    line = json.loads(encode_record(record("a")))
    del line["writers"], line["end"]
    store.objects["launch/hosts/a.json"] = json.dumps(line).encode()
    assert MembershipStore(store).records() == [record("a")]
