"""Google Cloud Storage and Azure Blob Storage: what a store promises, what a refusal says, and a run whose worker is killed."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import uuid4

import pytest
from torchruns import TINY, events, kill, losses, torchrun, train_warm, wait_until

from elastictrain.errors import (
    AccessDeniedError,
    ObjectExistsError,
    ObjectNotFoundError,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
)
from elastictrain.storage.failures import RetryOptions
from elastictrain.storage.opening import check_writable, open_store
from elastictrain.storage.store import Store
from tests.integration.storage.conformance import CHECKS
from tests.process.clouds.servers import CloudServer, azure_environment, gcs_environment
from tests.process.s3.faultproxy import Answer, DropAnswer, Fault, FaultProxy, Request
from tests.process.s3.server import bring

STEPS = 12
ARGUMENTS = (
    *TINY,
    f"train.steps={STEPS}",
    "train.eval_every_steps=0",
    "checkpoint.every_steps=4",
    "fault.heartbeat_s=0.2",
)
PACED = ("task._target_=tests.process.paced.PacedLlama", "task.pause_s=0.3")
ONCE = RetryOptions(attempts=1)


# gcsfs sends the parts of a large object as plain bytes, of which aiohttp warns.
@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Store], None], store: Store) -> None:
    check(store)


def test_an_answer_that_is_lost_does_not_lose_the_creation(
    cloud: CloudServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(proxy.endpoint.rpartition(":")[2])
    for name, value in cloud.environment(port=port).items():
        monkeypatch.setenv(name, value)
    store = open_store(f"{cloud.bucket_url}/lost-{uuid4().hex}")
    left: list[Fault] = [DropAnswer(), Answer(503), DropAnswer()]

    def plan(request: Request) -> Fault | None:
        return left.pop(0) if request.method in ("PUT", "POST") and left else None

    proxy.follow(plan)
    store.create("mine", b"mine")
    assert not left
    assert store.read("mine") == b"mine"
    # The same bytes from somebody else are not ours.
    with pytest.raises(ObjectExistsError):
        store.create("mine", b"mine")


def test_a_missing_bucket_is_told_from_a_missing_object(cloud: CloudServer, store: Store) -> None:
    with pytest.raises(ObjectNotFoundError):
        store.read("none")
    elsewhere = open_store(f"{cloud.bucket_url.partition('://')[0]}://no-such-bucket/x", retry=ONCE)
    for request in (
        lambda: elsewhere.write("a", b"x"),
        lambda: elsewhere.create("a", b"x"),
        lambda: list(elsewhere.list()),
        lambda: check_writable(elsewhere),
    ):
        with pytest.raises(PermanentStorageError) as caught:
            request()
        assert "create the bucket" in str(caught.value)


def test_a_wrong_key_of_azure_is_denied(clouds: dict[str, CloudServer | str], monkeypatch: pytest.MonkeyPatch) -> None:
    server = clouds["azure"]
    if isinstance(server, str):
        pytest.skip(server)
    for name, value in azure_environment(f"http://127.0.0.1:{server.port}", key="d3Jvbmc=").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(AccessDeniedError):
        check_writable(open_store(f"{server.bucket_url}/denied", retry=ONCE))


def test_azure_without_credentials_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("adlfs")
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(AccessDeniedError, match="AZURE_STORAGE_CONNECTION_STRING"):
        check_writable(open_store("az://bucket/denied", retry=ONCE))


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """A service that says one thing only; its address."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            """Nothing is printed."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def refusal(code: int, reason: str, message: str) -> bytes:
    errors = [{"message": message, "domain": "global", "reason": reason}]
    return json.dumps({"error": {"code": code, "message": message, "errors": errors}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        # The emulator knows no rights; these are answers of the service, as its documentation shows them.
        (401, refusal(401, "required", "Anonymous caller does not have storage.objects.create access"), AccessDeniedError),
        (403, refusal(403, "forbidden", "x@y does not have storage.objects.create access"), AccessDeniedError),
        (403, refusal(403, "rateLimitExceeded", "The project exceeded the rate limit"), TransientStorageError),
        (404, refusal(404, "notFound", "The specified bucket does not exist."), PermanentStorageError),
        (412, refusal(412, "conditionNotMet", "At least one of the pre-conditions did not hold"), ObjectExistsError),
        (429, refusal(429, "rateLimitExceeded", "slow down"), TransientStorageError),
        (503, b"upstream is away", TransientStorageError),
        (400, b"\xff[]", PermanentStorageError),
    ],
)
def test_what_google_refuses(status: int, body: bytes, kind: type[StorageError], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gcsfs")
    with answering(status, body) as endpoint:
        for name, value in gcs_environment(endpoint).items():
            monkeypatch.setenv(name, value)
        store = open_store("gs://bucket/refused", retry=ONCE)
        with pytest.raises(kind) as caught:
            # Asks only whether the object is its own where that could be.
            store.create("a", b"x") if status != 412 else store.write("a", b"x")
    assert type(caught.value) is kind


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the same run on local disk."""
    found = losses(train_warm(ARGUMENTS, world_size=2, folder=tmp_path_factory.mktemp("undisturbed")))
    assert sorted(found) == list(range(1, STEPS + 1))
    return found


def test_a_worker_is_killed(cloud: CloudServer, store: Store, undisturbed: dict[int, float], tmp_path: Path) -> None:
    def committed() -> list[str]:
        return [info.key for info in store.list("checkpoints") if info.key.endswith("manifest.json")]

    with torchrun(
        [*ARGUMENTS, *PACED, f"run.dir={store.url}"],
        world_size=2,
        folder=tmp_path,
        max_restarts=1,
        extra_environment=cloud.environment(),
    ) as run:
        wait_until(lambda: bool(committed()), timeout_s=120, what="the first checkpoint")
        kill(run.workers()[1])
        assert run.wait(240) == 0, run.output()[-6000:]
    run_dir = bring(store, tmp_path / "copy")
    assert losses(run_dir) == undisturbed
    first, second = events(run_dir, "resume")
    assert (first["step"], first["tier"]) == (0, "none")
    assert second["step"] >= 4
    assert any(f"step-{STEPS:09d}" in key for key in committed())
