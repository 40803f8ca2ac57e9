"""Requests that break on their way, and services that cannot be used."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest

from elastictrain.errors import (
    AccessDeniedError,
    ObjectExistsError,
    ObjectNotFoundError,
    PermanentStorageError,
    TransientStorageError,
)
from elastictrain.storage.appendlog import open_append_log
from elastictrain.storage.failures import Retrying, RetryOptions
from elastictrain.storage.opening import check_writable, open_store
from elastictrain.storage.remote import RemoteStore
from elastictrain.storage.s3 import S3Backend
from elastictrain.storage.store import Store
from tests.process.s3.faultproxy import Answer, DropAnswer, DropRequest, Fault, FaultProxy, Request, Stall, first_of, seeded
from tests.process.s3.server import BUCKET, S3Server, environment_for, free_ports
from tests.unit.storage.appended import read_appended

pytestmark = pytest.mark.s3

QUICK = RetryOptions(attempts=8, base_s=0.02, max_delay_s=0.1, total_s=20.0, answer_timeout_s=1.0)

Opener = Callable[..., Store]


@pytest.fixture
def open_at(monkeypatch: pytest.MonkeyPatch) -> Opener:
    """Opens a store through an endpoint; the connection is made at once, while the environment points there."""

    def open_here(endpoint: str, url: str = f"s3://{BUCKET}/faults", retry: RetryOptions = QUICK, **environment: str) -> Store:
        for name, value in {**environment_for(endpoint), **environment}.items():
            monkeypatch.setenv(name, value)
        store = open_store(f"{url}/{uuid4().hex}", retry=retry)
        with contextlib.suppress(Exception):
            store.stat("connect")
        return store

    return open_here


def use_everything(store: Store) -> None:
    large = os.urandom(20 << 20)
    store.write("a", b"1" * 5000)
    assert store.read("a") == b"1" * 5000
    assert store.read("a", start=10, end=4000) == b"1" * 3990
    store.create("b", b"2" * 2000)
    with pytest.raises(ObjectExistsError):
        store.create("b", b"3" * 2000)
    with store.open_writer("large") as writer:
        writer.write(large)
    buffer = bytearray(len(large))
    assert store.read_into("large", memoryview(buffer)) == len(large)
    assert buffer == large
    assert store.stat("large").size_bytes == len(large)
    assert [info.key for info in store.list()] == ["a", "b", "large"]
    store.delete("large")
    store.delete("a")
    assert [info.key for info in store.list()] == ["b"]


FAULTS: tuple[Fault, ...] = (
    Answer(503, "SlowDown"),
    Answer(500, "InternalError"),
    Answer(429, "TooManyRequests"),
    Stall(1.5),
    DropRequest(1000),
    DropAnswer(),
    DropAnswer(10),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_every_other_request_breaks(fault: Fault, s3_proxy: FaultProxy, open_at: Opener) -> None:
    store = open_at(s3_proxy.endpoint)
    s3_proxy.follow(lambda request: fault if request.number % 2 == 0 else None)
    use_everything(store)
    assert len(s3_proxy.broken) >= 10


@pytest.mark.parametrize("seed", range(2))
def test_mixed_faults(seed: int, s3_proxy: FaultProxy, open_at: Opener) -> None:
    store = open_at(s3_proxy.endpoint)
    s3_proxy.follow(seeded(seed, share=0.4, faults=FAULTS))
    use_everything(store)
    assert s3_proxy.broken


def test_lost_answer_to_create(s3_server: S3Server, s3_proxy: FaultProxy, open_at: Opener) -> None:
    store = open_at(s3_proxy.endpoint)
    s3_proxy.follow(first_of("PUT", [DropAnswer(), Answer(), DropAnswer()]))
    store.create("mine", b"mine")
    assert [type(fault) for _, fault in s3_proxy.broken] == [DropAnswer, Answer, DropAnswer]
    assert store.read("mine") == b"mine"


def test_another_creator_wins_between_attempts(s3_proxy: FaultProxy, open_at: Opener) -> None:
    store = open_at(s3_proxy.endpoint)
    other = open_store(store.url, retry=QUICK)
    arrivals: list[Request] = []

    def plan(request: Request) -> Fault | None:
        # The second PUT is the other creator's; it goes through while ours is held up and then refused.
        if request.method != "PUT":
            return None
        arrivals.append(request)
        return Answer() if len(arrivals) == 1 else None

    s3_proxy.follow(plan)

    def sleep(seconds: float) -> None:
        other.create("theirs", b"same bytes")

    slow = RemoteStore(
        store.url.removeprefix("s3://"),
        url=store.url,
        backend=lambda: S3Backend("s3://", 5.0),
        retrying=Retrying(QUICK, sleep=sleep),
    )
    with pytest.raises(ObjectExistsError, match="theirs"):
        slow.create("theirs", b"same bytes")
    assert len(arrivals) == 3


def test_lost_answer_to_completion(s3_proxy: FaultProxy, open_at: Opener) -> None:
    store = open_at(s3_proxy.endpoint)
    s3_proxy.follow(first_of("POST", [DropAnswer(), DropAnswer()], containing="uploadId="))
    data = os.urandom(17 << 20)
    with store.open_writer("large") as writer:
        writer.write(data)
    assert len(s3_proxy.broken) == 2
    assert store.read("large") == data


def test_aborted_upload_leaves_no_parts(s3_server: S3Server, open_at: Opener) -> None:
    store = open_at(s3_server.endpoint)

    def break_off() -> None:
        with store.open_writer("large") as writer:
            writer.write(bytes(20 << 20))
            assert len(uploads()) == 1
            raise KeyError("mine")

    def uploads() -> list[object]:
        answer = S3Backend("s3://", 5.0).call("list_multipart_uploads", Bucket=BUCKET)
        return [item for item in answer.get("Uploads", []) if store.url.endswith(item["Key"].split("/")[-2])]  # type: ignore[attr-defined]

    with pytest.raises(KeyError, match="mine"):
        break_off()
    assert uploads() == []
    assert list(store.list()) == []


def test_part_that_cannot_be_sent(s3_proxy: FaultProxy, open_at: Opener) -> None:
    store = open_at(s3_proxy.endpoint)
    store.write("large", b"old")
    s3_proxy.follow(lambda request: Answer() if "partNumber=2" in request.target else None)
    with pytest.raises(TransientStorageError, match="large"), store.open_writer("large") as writer:
        writer.write(bytes(48 << 20))
    s3_proxy.follow(lambda _: None)
    assert store.read("large") == b"old"


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def test_dead_endpoint(open_at: Opener) -> None:
    (port,) = free_ports(1)
    store = open_at(f"http://127.0.0.1:{port}", retry=RetryOptions(base_s=0.1, total_s=2.0))
    for request in (
        lambda: store.read("a"),
        lambda: store.write("a", b"1"),
        lambda: list(store.list()),
        lambda: check_writable(store),
    ):
        with within(8.0), pytest.raises(TransientStorageError, match=rf"s3://{BUCKET}/faults/.*127.0.0.1:{port}.*reached"):
            request()


def test_silent_endpoint(s3_proxy: FaultProxy, open_at: Opener) -> None:
    store = open_at(s3_proxy.endpoint, retry=RetryOptions(total_s=2.0, answer_timeout_s=1.0))
    s3_proxy.follow(lambda _: Stall(30.0))
    with within(8.0), pytest.raises(TransientStorageError, match=store.url):
        store.write("a", b"1")


def test_missing_bucket(s3_server: S3Server, open_at: Opener) -> None:
    store = open_at(s3_server.endpoint, "s3://no-such-bucket/run")
    for request in (
        lambda: store.read("a"),
        lambda: store.write("a", b"1"),
        lambda: list(store.list()),
        lambda: check_writable(store),
    ):
        with (
            within(3.0),
            pytest.raises(PermanentStorageError, match=r"no-such-bucket.*does not exist; create the bucket") as raised,
        ):
            request()
        assert not isinstance(raised.value, ObjectNotFoundError)


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials(name: str, s3_server: S3Server, open_at: Opener) -> None:
    store = open_at(s3_server.endpoint, **{name: "wrong"})
    for request in (
        lambda: store.read("a"),
        lambda: store.stat("a"),
        lambda: store.write("a", b"1"),
        lambda: list(store.list()),
        lambda: check_writable(store),
    ):
        with within(3.0), pytest.raises(AccessDeniedError, match=r"s3://.*check that"):
            request()


def test_no_credentials(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with within(5.0), pytest.raises(AccessDeniedError, match="credentials"):
        check_writable(open_store(s3_server.bucket_url))


def test_append_log_outlives_an_outage(s3_proxy: FaultProxy, open_at: Opener) -> None:
    store = open_at(s3_proxy.endpoint, retry=RetryOptions(attempts=2, base_s=0.01))
    lines = [b'{"n": %d}' % number for number in range(300)]
    log = open_append_log(store, "events/a.jsonl", flush_s=0.02)
    for number, line in enumerate(lines):
        if number == 100:
            s3_proxy.follow(lambda _: Answer())
        if number == 200:
            assert s3_proxy.broken
            s3_proxy.follow(lambda _: None)
        log.append(line + b"\n")
        time.sleep(0.002)
    log.close()
    assert list(read_appended(store, "events")) == lines
    log = open_append_log(store, "events/a.jsonl", flush_s=60.0)
    log.append(b"later\n")
    log.close()
    assert list(read_appended(store, "events")) == [*lines, b"later"]
    assert [info.key for info in store.list("events")] == ["events/a.part-00001.jsonl", "events/a.part-00002.jsonl"]
