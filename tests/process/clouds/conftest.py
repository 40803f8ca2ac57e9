import contextlib
from collections.abc import Iterator
from uuid import uuid4

import pytest

from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store
from tests.process.clouds.servers import CloudServer, UnavailableError, running_azure, running_gcs
from tests.process.s3.faultproxy import FaultProxy, running_proxy


@pytest.fixture(scope="session")
def clouds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, CloudServer | str]]:
    """Each emulator, or why it cannot be had."""
    found: dict[str, CloudServer | str] = {}
    with contextlib.ExitStack() as stack:
        for kind, running in (("gcs", running_gcs), ("azure", running_azure)):
            try:
                found[kind] = stack.enter_context(running(tmp_path_factory.mktemp(kind)))
            except UnavailableError as error:
                found[kind] = str(error)
        yield found


@pytest.fixture(params=["gcs", "azure"])
def cloud(request: pytest.FixtureRequest, clouds: dict[str, CloudServer | str]) -> CloudServer:
    """A running emulator. Its address is not in the environment: see `CloudServer.environment`."""
    found = clouds[request.param]
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture
def proxy(cloud: CloudServer) -> Iterator[FaultProxy]:
    """Before the emulator; breaks nothing until it is given a plan."""
    with running_proxy(cloud.port) as started:
        yield started


@pytest.fixture
def store(cloud: CloudServer, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A folder of its own in the bucket, as this process sees it: past the proxy."""
    for name, value in cloud.environment().items():
        monkeypatch.setenv(name, value)
    return open_store(f"{cloud.bucket_url}/run-{uuid4().hex}")
