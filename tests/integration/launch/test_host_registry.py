import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from elastictrain.errors import AccessDeniedError, TransientStorageError
from elastictrain.launch.host_registry import HostRegistry
from elastictrain.launch.membership.records import End, EndKind, GenerationOutcome, HostRecord, HostState
from elastictrain.launch.membership.store import MembershipStore
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store
from tests.unit.checkpoint.fakes import FakeStore, nothing
from tests.unit.launch.membership.made import end, generation, member, record

LIMIT_S = 10.0
POLL_S, LOST_S = 0.01, 0.4
LONG_S = 30.0
NEWER = 10**6


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextmanager
def registering(
    store: Store, line: HostRecord | None = None, *, poll_s: float = POLL_S, clock: Callable[[], float] = time.monotonic
) -> Iterator[HostRegistry]:
    before = threading.enumerate()
    registry = HostRegistry(MembershipStore(store), line or record("a"), poll_s=poll_s, lost_s=LOST_S, clock=clock)
    registry.start()
    try:
        yield registry
    finally:
        if isinstance(store, FakeStore):
            store.before = nothing
        registry.close(limit_s=LIMIT_S)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("registry") and thread not in before]


def tell(store: Store, told: End) -> None:
    """Another host's line says how a generation has ended for it."""
    before = line_in(store, told.host) or record(told.host)
    MembershipStore(store).write_record(replace(before, beat=before.beat + 1, end=told))


def without_beat(line: HostRecord) -> HostRecord:
    return replace(line, beat=0)


def turn(registry: HostRegistry) -> None:
    """Until it has read once more, from begin to end."""
    enough = registry.known.reads + 2
    registry.wake(NEWER)
    eventually(lambda: registry.known.reads >= enough)


def line_in(store: Store, host: str = "a") -> HostRecord | None:
    return next((line for line in MembershipStore(store).records() if line.host == host), None)


@dataclass
class Gate:
    """Holds up or refuses what a store is asked for, from the moment that it is shut."""

    part: str
    error: Exception | None = None
    asked: list[str] = field(default_factory=list)
    opened: threading.Event = field(default_factory=threading.Event)

    def __call__(self, operation: str, key: str) -> None:
        what = f"{operation} {key}"
        if self.part in what:
            self.asked.append(what)
            if self.error is not None:
                raise self.error
            assert self.opened.wait(LIMIT_S)


def test_nothing_is_known_before_storage_was_read() -> None:
    registry = HostRegistry(MembershipStore(FakeStore()), record("a"), poll_s=POLL_S, lost_s=LOST_S)
    assert (registry.known.reads, registry.known.newest, registry.record) == (0, None, record("a"))


@pytest.mark.parametrize("kind", ["fake", "local"])
def test_two_hosts_see_each_other(kind: str, tmp_path: Path) -> None:
    store = FakeStore() if kind == "fake" else open_store(str(tmp_path))
    with registering(store) as a, registering(store, record("b")) as b:
        eventually(lambda: "b" in a.known.observed and a.known.observed["b"].fresh)
        b.update(HostState.UNFIT, reason="no disk", ended=4)
        eventually(lambda: a.known.observed["b"].record.state is HostState.UNFIT)
        line = a.known.observed["b"].record
        assert (line.reason, line.ended, line.master_port) == ("no disk", 4, record("b").master_port)
        assert set(a.known.observed) == {"b"}
        assert set(b.known.observed) == {"a"}


def test_what_is_not_said_anew_stays_as_it_was() -> None:
    registry = HostRegistry(MembershipStore(FakeStore()), record("a"), poll_s=POLL_S, lost_s=LOST_S)
    registry.update(HostState.READY, ended=3, master_port=7000)
    registry.update(HostState.UNFIT, reason="no disk")
    said = replace(record("a"), state=HostState.UNFIT, reason="no disk", ended=3, master_port=7000, beat=0)
    assert without_beat(registry.record) == said
    registry.update(HostState.BUSY)
    assert without_beat(registry.record) == replace(said, state=HostState.BUSY, reason="")


class Stepped:
    """A clock that stands still between steps."""

    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def test_a_host_that_waits_shows_a_sign_of_life_at_each_poll_and_one_that_trains_less_often() -> None:
    store, clock = FakeStore(), Stepped()

    def beat_after(seconds: float) -> int:
        clock.now_s += seconds
        turn(registry)
        line = line_in(store)
        assert line is not None
        return line.beat

    with registering(store, clock=clock) as registry:
        first = beat_after(0.0)
        assert beat_after(POLL_S / 2) == first
        assert beat_after(POLL_S / 2) == first + 1
        registry.update(HostState.BUSY)
        assert beat_after(0.0) == first + 2
        assert beat_after(LOST_S / 4) == first + 2
        assert beat_after(LOST_S / 4) == first + 3
        registry.update(HostState.READY)
        assert beat_after(0.0) == first + 4


def test_times_are_of_the_first_sight() -> None:
    store, clock = FakeStore(), Stepped()
    with registering(store, clock=clock) as registry:
        turn(registry)
        clock.now_s = 60.0
        MembershipStore(store).create(generation(1, "ab"))
        turn(registry)
        clock.now_s = 70.0
        tell(store, end("b", EndKind.FAILED, 70))
        turn(registry)
        clock.now_s = 80.0
        registry.post(end("a", EndKind.FAILED, 70))
        turn(registry)
        known = registry.known
        assert (known.began_s, known.newest_since_s, known.ended_since_s, known.read_s) == (50.0, 60.0, 70.0, 80.0)
        assert set(known.ends) == {"a", "b"}
        MembershipStore(store).create(generation(2, "ab"))
        turn(registry)
        known = registry.known
        assert (known.began_s, known.newest_since_s, known.ended_since_s, dict(known.ends)) == (50.0, 80.0, None, {})
        assert known.newest == generation(2, "ab")


def test_since_when_the_last_host_is_left_out_for_being_slow() -> None:
    store, clock, told = FakeStore(), Stepped(), []
    with registering(store, clock=clock) as registry:
        for number, host in enumerate(("", "b", "b", "c"), start=1):
            slow = end(host, EndKind.LEAVING, 69, slow_rank=1) if host else None
            clock.now_s += 10.0
            MembershipStore(store).create(generation(number, "a", slow=slow))
            turn(registry)
            told.append(registry.known.slow_since_s)
    assert told == [float("-inf"), 70.0, 70.0, 90.0]


def test_whether_a_generation_goes_on_with_a_launch() -> None:
    store = FakeStore()
    with registering(store) as registry:
        told = []
        for number, outcome in (
            (1, GenerationOutcome.RUN),
            (2, GenerationOutcome.RUN),
            (3, GenerationOutcome.GIVE_UP),
            (4, GenerationOutcome.RUN),
        ):
            MembershipStore(store).create(generation(number, "a", outcome=outcome))
            turn(registry)
            told.append(registry.known.follows_another)
    assert told == [False, True, True, False]


def test_an_end_that_a_later_line_does_not_tell_stays() -> None:
    store = FakeStore()
    with registering(store) as registry:
        MembershipStore(store).create(generation(1, "ab"))
        tell(store, end("b", EndKind.FAILED, 70))
        turn(registry)
        tell(store, end("b", EndKind.FAILED, 70, number=2))
        turn(registry)
        assert dict(registry.known.ends) == {"b": end("b", EndKind.FAILED, 70)}


def test_an_end_that_is_told_before_its_generation_is_known_counts() -> None:
    store = FakeStore()
    with registering(store) as registry:
        MembershipStore(store).create(generation(1, "ab"))
        turn(registry)
        tell(store, end("b", EndKind.FAILED, 70, number=2))
        turn(registry)
        assert dict(registry.known.ends) == {}
        MembershipStore(store).create(generation(2, "ab"))
        turn(registry)
        assert set(registry.known.ends) == {"b"}


def test_the_word_of_another_host_in_its_own_name_alone_counts() -> None:
    store = FakeStore()
    with registering(store) as registry:
        MembershipStore(store).create(generation(1, "abc"))
        MembershipStore(store).write_record(replace(record("b"), end=end("c", EndKind.FAILED, 70)))
        turn(registry)
        assert set(registry.known.observed) == {"b"}
        assert dict(registry.known.ends) == {}


def test_what_is_heard_is_known_before_storage_shows_it_and_no_older_reading_takes_it_back() -> None:
    store = FakeStore()
    with registering(store) as registry:
        MembershipStore(store).create(generation(1, "abc"))
        MembershipStore(store).write_record(replace(record("b", HostState.BUSY, hears="ac"), beat=5))
        turn(registry)
        told = replace(record("b", ended=1, hears=""), beat=6, end=end("b", EndKind.FAILED, 70))
        registry.receive([told, replace(told, host="c"), replace(told, host="a")])
        for _ in range(2):
            assert set(registry.known.observed) == {"b"}
            assert registry.known.observed["b"].record == replace(told, hears=("a", "c"))
            assert registry.known.observed["b"].fresh
            assert set(registry.known.ends) == {"b"}
            turn(registry)
        registry.receive([replace(told, beat=5, ended=0)])
        assert registry.known.observed["b"].record.ended == 1


def test_a_group_that_forms_looks_more_often_and_one_that_trains_at_each_poll() -> None:
    store = FakeStore()
    with registering(store, poll_s=LONG_S) as registry:
        eventually(lambda: registry.known.reads >= 3)
        MembershipStore(store).create(generation(1, "ab"))
        eventually(lambda: registry.known.newest is not None)
        # The turn that has found it may not be over.
        time.sleep(0.3)
        reads = registry.known.reads
        time.sleep(0.3)
        assert registry.known.reads == reads
        registry.wake(NEWER)
        eventually(lambda: registry.known.reads > reads)
        tell(store, end("b", EndKind.GROW))
        registry.wake(NEWER)
        eventually(lambda: registry.known.reads > reads + 3)


def test_other_lines_are_not_read_without_need() -> None:
    store, clock = FakeStore(), Stepped()
    with registering(store, clock=clock) as registry:
        MembershipStore(store).write_record(record("b"))
        turn(registry)
        registry.attentive = False
        turn(registry)
        clock.now_s = 90.0
        MembershipStore(store).write_record(replace(record("b"), beat=2))
        MembershipStore(store).create(generation(1, "a"))
        turn(registry)
        assert registry.known.newest is not None
        assert registry.known.read_s == 50.0
        assert registry.known.observed["b"].record.beat == 1
        registry.attentive = True
        turn(registry)
        assert registry.known.read_s == 90.0
        assert registry.known.observed["b"].record.beat == 2


def test_a_proposal_becomes_the_generation_or_another_was_there_before() -> None:
    store = FakeStore()
    with registering(store) as registry:
        registry.post(generation(1, "ab"))
        eventually(lambda: registry.known.newest == generation(1, "ab"))
        assert registry.known.created == {1}
        MembershipStore(store).create(generation(2, "ba"))
        registry.post(generation(2, "ab"))
        eventually(lambda: 2 in registry.known.created)
        eventually(lambda: registry.known.newest == generation(2, "ba"))


def test_a_line_that_says_that_a_generation_has_ended_says_why() -> None:
    store = FakeStore()
    with registering(store) as registry:
        turn(registry)
        registry.post(end("a", EndKind.FAILED, 70))
        registry.update(HostState.READY, ended=1)
        eventually(lambda: (line_in(store) or record("a")).ended == 1)
        line = line_in(store)
        assert line is not None
        assert line.end == end("a", EndKind.FAILED, 70)
        # It stays until the next one ends.
        registry.update(HostState.BUSY)
        eventually(lambda: (line_in(store) or record("a")).state is HostState.BUSY)
        line = line_in(store)
        assert line is not None
        assert line.end == end("a", EndKind.FAILED, 70)


def test_while_storage_stalls_the_launcher_goes_on_and_nothing_is_lost() -> None:
    store, gate = FakeStore(), Gate("write launch/hosts")
    with registering(store) as registry:
        turn(registry)
        store.before = gate
        registry.post(end("a", EndKind.FAILED, 70))
        eventually(lambda: len(gate.asked) == 1)
        for number in range(5):
            registry.update(HostState.READY, ended=1, master_port=7000 + number)
        # A line on its way keeps no proposal waiting.
        registry.post(generation(1, "a"))
        eventually(lambda: registry.known.newest == generation(1, "a"))
        assert set(registry.known.ends) == {"a"}
        gate.opened.set()
        eventually(lambda: (line_in(store) or record("a")).master_port == 7004)
        line = line_in(store)
        assert line is not None
        assert line.end == end("a", EndKind.FAILED, 70)


def test_a_proposal_that_is_made_again_and_again_while_storage_stalls_is_made_once() -> None:
    store, gate = FakeStore(), Gate("create launch/generations")
    with registering(store) as registry:
        turn(registry)
        store.before = gate
        for _ in range(20):
            registry.post(generation(1, "ab"))
        eventually(lambda: len(gate.asked) == 1)
        for _ in range(20):
            registry.post(generation(1, "ba"))
        gate.opened.set()
        eventually(lambda: registry.known.newest is not None)
        turn(registry)
        assert len(gate.asked) == 1


def test_a_proposal_that_failed_is_not_made_later_by_itself() -> None:
    store, gate = FakeStore(), Gate("create launch/generations", TransientStorageError("away"))
    with registering(store) as registry:
        turn(registry)
        store.before = gate
        registry.post(generation(1, "ab"))
        eventually(lambda: registry.known.trouble == "away")
        assert 1 not in registry.known.created
        store.before = nothing
        turn(registry)
        assert registry.known.newest is None
        registry.post(generation(1, "ba"))
        eventually(lambda: registry.known.newest == generation(1, "ba"))


@pytest.mark.parametrize("part", ["write launch/hosts", "list launch/hosts", "read launch/generations"])
@pytest.mark.parametrize(
    ("error", "trouble"),
    [
        (TransientStorageError("s3://bucket is away"), "s3://bucket is away"),
        (AccessDeniedError("s3://bucket refuses"), "s3://bucket refuses"),
        (KeyError("Contents"), "KeyError: 'Contents'"),
    ],
    ids=["away", "refused", "a bug of a client"],
)
def test_storage_that_fails_is_tried_again(part: str, error: Exception, trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    store, gate = FakeStore(), Gate(part, error)
    with registering(store) as registry, caplog.at_level(logging.WARNING):
        turn(registry)
        store.before = gate
        registry.post(end("a", EndKind.FAILED, 70))
        registry.update(HostState.READY, ended=1)
        eventually(lambda: len(gate.asked) >= 3)
        stalled = registry.known
        assert stalled.trouble == trouble
        eventually(lambda: len(gate.asked) >= 5)
        assert "generations" in part or registry.known.read_s == stalled.read_s
        said = [record.getMessage() for record in caplog.records]
        assert [trouble in text for text in said] == [True]
        store.before = nothing
        eventually(lambda: registry.known.trouble == "")
        eventually(lambda: (line_in(store) or record("a")).ended == 1)


def test_storage_that_fails_is_not_asked_at_every_call() -> None:
    store, gate = FakeStore(), Gate("", TransientStorageError("away"))
    store.before = gate
    with registering(store, poll_s=LONG_S) as registry:
        eventually(lambda: registry.known.trouble == "away")
        asked = len(gate.asked)
        for number in range(10):
            registry.post(generation(number, "a"))
            registry.wake()
            time.sleep(0.01)
        # The first proposal is one more, and another look may have been under way.
        assert len(gate.asked) <= asked + 3


@pytest.mark.parametrize("kind", ["fake", "local"])
def test_close_writes_what_is_still_to_be_written(kind: str, tmp_path: Path) -> None:
    store = FakeStore() if kind == "fake" else open_store(str(tmp_path))
    with registering(store, poll_s=LONG_S) as registry:
        eventually(lambda: registry.known.reads > 0)
        began_s = time.monotonic()
        registry.post(end("a", EndKind.LEAVING))
        registry.update(HostState.GONE, reason="asked", ended=1)
    assert time.monotonic() - began_s < LIMIT_S / 2
    line = line_in(store)
    assert line is not None
    assert (line.state, line.reason, line.ended) == (HostState.GONE, "asked", 1)
    assert line.end == end("a", EndKind.LEAVING)


def test_close_does_not_wait_for_storage_that_stalls() -> None:
    store, gate = FakeStore(), Gate("write launch/hosts")
    with registering(store) as registry:
        turn(registry)
        store.before = gate
        registry.update(HostState.GONE)
        eventually(lambda: len(gate.asked) == 1)
        began_s = time.monotonic()
        registry.close(limit_s=0.05)
        assert 0.04 < time.monotonic() - began_s < LIMIT_S / 2
        gate.opened.set()


@pytest.mark.parametrize("error", [AccessDeniedError("refused"), KeyError("Contents")], ids=["refused", "a bug of a client"])
def test_close_does_not_insist_on_storage_that_fails(error: Exception) -> None:
    store = FakeStore(before=Gate("", error))
    registry = HostRegistry(MembershipStore(store), record("a"), poll_s=LONG_S, lost_s=LOST_S)
    registry.start()
    eventually(lambda: registry.known.trouble != "")
    began_s = time.monotonic()
    registry.close(limit_s=LIMIT_S)
    assert time.monotonic() - began_s < LIMIT_S / 2


def test_lines_of_launchers_that_are_long_gone_are_removed() -> None:
    store, clock = FakeStore(), Stepped()
    with registering(store, clock=clock) as registry:
        MembershipStore(store).write_record(replace(record("b"), state=HostState.GONE))
        MembershipStore(store).write_record(record("c"))
        turn(registry)
        registry.attentive = False
        turn(registry)
        clock.now_s += 100_000.0
        MembershipStore(store).write_record(replace(record("c"), beat=2))
        registry.attentive = True
        turn(registry)
        # In the same turn, but after what was read is known.
        eventually(lambda: [line.host for line in MembershipStore(store).records()] == ["a", "c"])


def test_its_line_tells_whom_it_hears() -> None:
    store = FakeStore()
    with registering(store, record("a", hears="")) as registry:
        turn(registry)
        registry.hears = ("b", "c")
        eventually(lambda: (line := line_in(store)) is not None and line.hears == ("b", "c"))
        assert registry.record.hears == ()


@dataclass
class Slow:
    """A store that takes as long for each request, and how many of them had to follow one another."""

    delay_s: float = 0.05
    spans: list[tuple[float, float]] = field(default_factory=list)

    def __call__(self, operation: str, key: str) -> None:
        began_s = time.monotonic()
        time.sleep(self.delay_s)
        self.spans.append((began_s, time.monotonic()))

    @property
    def in_a_row(self) -> int:
        """Requests of which each began when the one before had ended."""
        number, until_s = 0, float("-inf")
        for began_s, ended_s in sorted(self.spans, key=lambda span: span[1]):
            if began_s >= until_s:
                number, until_s = number + 1, ended_s
        return number


def in_a_row(num_hosts: int, *, ended: bool) -> int:
    """Requests that follow one another in a turn that finds nothing new, or all ends of a generation."""
    store, slow = FakeStore(), Slow()
    hosts = [f"host{number}" for number in range(num_hosts)]
    membership = MembershipStore(store)
    members = tuple(replace(member("a"), host=host) for host in hosts)
    membership.create(replace(generation(1, ""), members=members))
    with registering(store, poll_s=LONG_S) as registry:
        for host in hosts:
            membership.write_record(replace(record("a"), host=host))
        # One turn may be under way, which has looked before they came; afterwards none is.
        registry.wake()
        eventually(lambda: len(registry.known.observed) == num_hosts)
        time.sleep(0.2)
        if ended:
            for host in hosts:
                membership.write_record(
                    replace(record("a"), host=host, beat=2, end=replace(end("a", EndKind.FAILED), host=host))
                )
        reads, store.before = registry.known.reads, slow
        registry.wake(NEWER)
        eventually(lambda: registry.known.reads > reads and len(registry.known.ends) == (num_hosts if ended else 0))
        store.before = nothing
        assert len(registry.known.observed) == num_hosts
    return slow.in_a_row


@pytest.mark.parametrize("ended", [False, True])
def test_a_turn_takes_no_longer_with_many_hosts(ended: bool) -> None:
    assert in_a_row(2, ended=ended) <= 2
    assert in_a_row(40, ended=ended) <= 3


def test_an_address_that_changes_is_in_its_line_and_in_what_it_says_of_itself() -> None:
    store, address = FakeStore(), ["10.0.0.1"]
    registry = HostRegistry(MembershipStore(store), record("a"), poll_s=POLL_S, lost_s=0.02, find_address=lambda: address[0])
    registry.start()
    try:
        eventually(lambda: registry.record.address == "10.0.0.1")
        address[0] = "10.0.0.2"
        eventually(lambda: (line := line_in(store)) is not None and line.address == "10.0.0.2")
        registry.update(HostState.BUSY)
        assert (registry.record.address, registry.record.state) == ("10.0.0.2", HostState.BUSY)
    finally:
        registry.close(limit_s=LIMIT_S)
