from collections.abc import Callable
from uuid import uuid4

import pytest

from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store
from tests.integration.storage.conformance import CHECKS
from tests.process.s3.server import S3Server

pytestmark = pytest.mark.s3


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Store], None], s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    check(open_store(f"{s3_server.bucket_url}/conformance/{uuid4().hex}"))
