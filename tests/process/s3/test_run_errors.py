"""Buckets that a run cannot use: found out at the start, said in one message."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from refusals import RefusingHost, running_host

from tests.process.s3.faultproxy import FaultProxy, Stall
from tests.process.s3.server import S3Server, environment_for, free_ports

pytestmark = pytest.mark.s3


@pytest.fixture(scope="module")
def host() -> Iterator[RefusingHost]:
    with running_host() as started:
        yield started


KEYS = pytest.mark.parametrize("key", ["run.dir", "data.path"])


@KEYS
def test_missing_bucket(key: str, host: RefusingHost, s3_server: S3Server, tmp_path: Path) -> None:
    refusal = host.start(f"{key}=s3://no-such-bucket/x", folder=tmp_path, extra_environment=s3_server.environment)
    refusal.check(74, f"`{key}`", "s3://no-such-bucket/x", "create the bucket, or correct the URL")
    assert "trying again" not in refusal.output
    assert refusal.seconds < 30


@KEYS
@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials(name: str, key: str, host: RefusingHost, s3_server: S3Server, tmp_path: Path) -> None:
    url = f"{s3_server.bucket_url}/x"
    refusal = host.start(f"{key}={url}", folder=tmp_path, extra_environment={**s3_server.environment, name: "wrong"})
    refusal.check(74, f"`{key}`", url, "check that this user, or the credentials in the environment")
    assert "trying again" not in refusal.output
    assert refusal.seconds < 30


def test_missing_data(host: RefusingHost, s3_server: S3Server, tmp_path: Path) -> None:
    url = f"{s3_server.bucket_url}/no-tokens"
    refusal = host.start(f"data.path={url}", folder=tmp_path, extra_environment=s3_server.environment)
    refusal.check(78, f"{url} must be a folder of token files, but has no index.json", f"prepare TEXT... --out {url}")


@KEYS
def test_unreachable_endpoint(key: str, host: RefusingHost, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    refusal = host.start(f"{key}=s3://bucket/x", folder=tmp_path, extra_environment=environment_for(endpoint), patience_s=5.0)
    refusal.check(74, f"`{key}`", "s3://bucket/x", f"127.0.0.1:{port}", "can be reached", "trying again for up to 5 s")
    assert refusal.seconds < 15


def test_endpoint_that_breaks_every_connection(host: RefusingHost, s3_proxy: FaultProxy, tmp_path: Path) -> None:
    s3_proxy.follow(lambda _: Stall(0.1))
    refusal = host.start(
        "run.dir=s3://bucket/x", folder=tmp_path, extra_environment=environment_for(s3_proxy.endpoint), patience_s=2.0
    )
    refusal.check(74, "`run.dir` cannot be used: cannot create s3://bucket/x/", "check that the service can be reached")
    assert refusal.seconds < 15
