"""Each cloud's notices from a server that behaves like the cloud's own, and what happens when it does not."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from elastictrain.fault.clouds import (
    AWS_ACTION,
    AWS_REBALANCE,
    AWS_TOKEN_LIFE_S,
    AZURE_EVENTS,
    AZURE_NAME,
    GCP_MAINTENANCE,
    GCP_PREEMPTED,
    Cloud,
    MetadataService,
    aws_source,
    azure_source,
    cloud_of,
    detect,
    gcp_source,
    parse_action,
    parse_rebalance,
)
from elastictrain.fault.notices import MetadataError, Notice, NoticeSource
from tests.unit.fault.metadata_servers import FakeAws, FakeAzure, FakeCloud, FakeGcp, serving

NAMES = {aws_source: "AWS", gcp_source: "Google Cloud", azure_source: "Azure"}
NOWHERE = "http://127.0.0.1:9"
NOW = 1_700_000_000.0
NAME = "west-3"


def preempt_event(**changes: Any) -> dict[str, Any]:
    return {
        "EventId": "602d9444",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["other", NAME],
        "EventStatus": "Scheduled",
        "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT",
        **changes,
    }


def document(*events: Any) -> bytes:
    return json.dumps({"DocumentIncarnation": 1, "Events": events}).encode()


def source_at(cloud: FakeCloud, *, timeout_s: float = 5.0) -> NoticeSource:
    service = MetadataService(cloud.url, timeout_s=timeout_s)
    if isinstance(cloud, FakeAws):
        return aws_source(service)
    return gcp_source(service, wall=lambda: NOW) if isinstance(cloud, FakeGcp) else azure_source(service)


def quiet_clouds() -> list[FakeCloud]:
    """One of each, with nothing to say."""
    return [
        FakeAws(),
        FakeGcp(items={GCP_PREEMPTED: b"FALSE", GCP_MAINTENANCE: b"NONE"}),
        FakeAzure(items={AZURE_NAME: NAME.encode(), AZURE_EVENTS: document()}),
    ]


@pytest.fixture(params=quiet_clouds(), ids=lambda cloud: type(cloud).__name__)
def quiet(request: pytest.FixtureRequest) -> FakeCloud:
    cloud: FakeCloud = request.param
    return type(cloud)(items=dict(cloud.items))


def test_no_notice(quiet: FakeCloud) -> None:
    with serving(quiet):
        source = source_at(quiet)
        assert [source.look(), source.look()] == [None, None]


@pytest.mark.parametrize("how", ["error", "garbage", "silent", "drip", "cut"])
def test_a_service_that_misbehaves_is_an_error_within_bounded_time_and_the_next_answer_counts(
    how: str, quiet: FakeCloud
) -> None:
    quiet.misbehave = how
    with serving(quiet):
        source = source_at(quiet, timeout_s=0.3)
        began_s = time.monotonic()
        with pytest.raises(MetadataError, match=r"http://127\.0\.0\.1:\d+/") as told:
            source.look()
        assert ("0.3 s" in str(told.value)) == (how in ("silent", "drip"))
        assert time.monotonic() - began_s < 3.0
        quiet.misbehave = ""
        assert source.look() is None


def test_nobody_there_and_an_address_of_which_no_answer_comes_back(quiet: FakeCloud) -> None:
    """A hop limit of 1 lets a question of a container out, and no answer in."""
    with serving(quiet):
        pass
    with pytest.raises(MetadataError, match="ConnectionRefusedError"):
        source_at(quiet).look()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        quiet.url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(MetadataError, match=r"0\.1 s"):
            source_at(quiet, timeout_s=0.1).look()


def test_proxies_are_not_asked(quiet: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(quiet):
        assert source_at(quiet).look() is None


@pytest.mark.parametrize(
    ("body", "notice"),
    [
        (
            b'{"action": "terminate", "time": "2017-09-18T08:22:00Z"}',
            Notice("preempt", "AWS terminates this spot instance", 1505722920.0),
        ),
        (b'{"action": "stop", "time": "2017-09-18T08:22:00"}', Notice("preempt", "AWS stops this spot instance", 1505722920.0)),
        (b'{"action": "hibernate"}', Notice("preempt", "AWS hibernates this spot instance", None)),
        (b'{"action": "eat", "time": 7}', Notice("preempt", "AWS announces 'eat' for this spot instance", None)),
        (b'{"action": ""}', None),
        (b'["terminate"]', None),
        (b"terminate", None),
        (b"[" * 100_000, None),
        (b"\xff", None),
    ],
)
def test_spot_action(body: bytes, notice: Notice | None) -> None:
    with serving(FakeAws(items={AWS_ACTION: body})) as cloud:
        if notice is None:
            with pytest.raises(ValueError):
                parse_action(body)
            with pytest.raises(MetadataError, match=r"instance-action.*200"):
                source_at(cloud).look()
        else:
            assert source_at(cloud).look() == notice


def test_rebalance_is_a_hint_and_an_action_comes_first() -> None:
    with serving(FakeAws(items={AWS_REBALANCE: b'{"noticeTime": "2020-10-27T08:22:00Z"}'})) as cloud:
        source = source_at(cloud)
        notice = source.look()
        assert notice is not None
        assert (notice.kind, notice.leave, notice.deadline) == ("rebalance", False, None)
        cloud.items[AWS_ACTION] = b'{"action": "terminate", "time": "2020-10-27T08:24:00Z"}'
        notice = source.look()
        assert notice is not None
        assert (notice.kind, notice.leave) == ("preempt", True)
    with pytest.raises(ValueError):
        parse_rebalance(b'{"noticeTime": "soon"}')


def test_a_token_serves_until_it_is_old_or_forgotten() -> None:
    now = [0.0]
    with serving(FakeAws()) as cloud:
        source = aws_source(MetadataService(cloud.url), clock=lambda: now[0])
        source.look()
        now[0] = 0.89 * AWS_TOKEN_LIFE_S
        source.look()
        assert len(cloud.tokens) == 1
        now[0] = 0.91 * AWS_TOKEN_LIFE_S
        source.look()
        assert len(cloud.tokens) == 2
        cloud.tokens.clear()
        assert source.look() is None
        assert len(cloud.tokens) == 1


def test_tokens_that_are_never_good_are_an_error_and_no_endless_loop() -> None:
    class Forgetful(FakeAws):
        def verdict(self, method: str, path: str, headers: Any) -> Any:
            answer = super().verdict(method, path, headers)
            self.tokens.clear()
            return answer

    with serving(Forgetful()) as cloud:
        source = source_at(cloud)
        with pytest.raises(MetadataError, match="answers 401"):
            source.look()
        assert len(cloud.asked) == 2


def test_a_service_that_gives_no_token_is_told_of_with_what_may_help() -> None:
    with serving(FakeAws(misbehave="silent")) as cloud, pytest.raises(MetadataError, match="hop limit"):
        source_at(cloud, timeout_s=0.1).look()


@pytest.mark.parametrize(
    ("preempted", "maintenance", "notice"),
    [
        (b"TRUE", b"NONE", Notice("preempt", "Google Cloud takes this spot instance", NOW + 30)),
        (b"TRUE\n", b"TERMINATE_ON_HOST_MAINTENANCE", Notice("preempt", "Google Cloud takes this spot instance", NOW + 30)),
        (
            b"FALSE",
            b"TERMINATE_ON_HOST_MAINTENANCE",
            Notice("maintenance", "Google Cloud ends this instance for maintenance", NOW + 60),
        ),
        (
            None,
            b"MIGRATE_ON_HOST_MAINTENANCE",
            Notice("pause", "Google Cloud moves this instance to another machine", NOW + 60, leave=False),
        ),
    ],
)
def test_google_cloud(preempted: bytes | None, maintenance: bytes, notice: Notice) -> None:
    cloud = FakeGcp(items={GCP_MAINTENANCE: maintenance})
    if preempted is not None:
        cloud.items[GCP_PREEMPTED] = preempted
    with serving(cloud):
        assert source_at(cloud).look() == notice


@pytest.mark.parametrize("body", [b"", b"yes", b"<html>", b"\xff"])
@pytest.mark.parametrize("path", [GCP_PREEMPTED, GCP_MAINTENANCE])
def test_google_cloud_says_nothing_that_can_be_understood(path: str, body: bytes) -> None:
    items = {GCP_PREEMPTED: b"FALSE", GCP_MAINTENANCE: b"NONE", path: body}
    with serving(FakeGcp(items=items)) as cloud, pytest.raises(MetadataError, match="answers 200"):
        source_at(cloud).look()


def test_a_captive_portal_is_no_metadata_server() -> None:
    with (
        serving(FakeGcp(flavor="", items={GCP_PREEMPTED: b"TRUE"})) as cloud,
        pytest.raises(MetadataError, match="/preempted"),
    ):
        source_at(cloud).look()


@pytest.mark.parametrize(
    ("events", "notice"),
    [
        ([preempt_event()], Notice("preempt", "Azure takes this spot machine", 1474309787.0)),
        ([preempt_event(Resources=[NAME.upper()])], Notice("preempt", "Azure takes this spot machine", 1474309787.0)),
        ([preempt_event(Resources=["other"])], None),
        ([preempt_event(NotBefore="", EventStatus="Started")], Notice("preempt", "Azure takes this spot machine", None)),
        ([preempt_event(NotBefore=7)], Notice("preempt", "Azure takes this spot machine", None)),
        ([preempt_event(EventType="Reboot")], Notice("maintenance", "Azure restarts this machine", 1474309787.0)),
        (
            [preempt_event(EventType="Redeploy")],
            Notice("maintenance", "Azure moves this machine, whose memory is lost", 1474309787.0),
        ),
        ([preempt_event(EventType="Terminate")], Notice("preempt", "Azure deletes this machine", 1474309787.0)),
        (
            [preempt_event(EventType="Freeze")],
            Notice("pause", "Azure stops this machine for some seconds", 1474309787.0, leave=False),
        ),
        (
            [
                preempt_event(EventType="Freeze", NotBefore=""),
                preempt_event(EventType="Reboot", NotBefore="Mon, 19 Sep 2016 19:00:00 GMT"),
                preempt_event(),
            ],
            Notice("preempt", "Azure takes this spot machine", 1474309787.0),
        ),
        ([preempt_event(EventType="Party"), "nonsense", preempt_event(Resources=None)], None),
    ],
)
def test_azure(events: list[Any], notice: Notice | None) -> None:
    with serving(FakeAzure(items={AZURE_NAME: NAME.encode(), AZURE_EVENTS: document(*events)})) as cloud:
        source = source_at(cloud)
        assert source.look() == source.look() == notice
        assert [path for _, path in cloud.asked].count(AZURE_NAME) == 1


@pytest.mark.parametrize("body", [b"", b"[]", b'{"Events": {}}', b"\xff", b"[" * 100_000])
def test_azure_says_nothing_that_can_be_understood(body: bytes) -> None:
    items = {AZURE_NAME: NAME.encode(), AZURE_EVENTS: body}
    with serving(FakeAzure(items=items)) as cloud, pytest.raises(MetadataError, match="answers 200"):
        source_at(cloud).look()


def test_a_machine_of_azure_without_a_name_is_an_error() -> None:
    with (
        serving(FakeAzure(items={AZURE_NAME: b" ", AZURE_EVENTS: document()})) as cloud,
        pytest.raises(MetadataError, match="compute/name"),
    ):
        source_at(cloud).look()


def test_an_answer_has_a_longest() -> None:
    with (
        serving(FakeAzure(items={AZURE_NAME: b"x" * (1 << 20 | 1), AZURE_EVENTS: document()})) as cloud,
        pytest.raises(MetadataError, match="more than"),
    ):
        source_at(cloud).look()


@pytest.mark.parametrize(
    ("facts", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2", "product_name": "p5.48xlarge"}, aws_source),
        ({"sys_vendor": "Xen", "product_name": "HVM domU", "bios_version": "4.11.amazon"}, aws_source),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, gcp_source),
        (
            {
                "sys_vendor": "Microsoft Corporation",
                "product_name": "Virtual Machine",
                "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77",
            },
            azure_source,
        ),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine", "chassis_asset_tag": "1"}, None),
        ({"sys_vendor": "Supermicro", "product_name": "SYS-821GE-TNHR"}, None),
        ({}, None),
    ],
)
def test_firmware_names_the_cloud(facts: dict[str, str], cloud: Cloud | None, tmp_path: Path) -> None:
    assert cloud_of(facts) is cloud
    folder = tmp_path / "sys/class/dmi/id"
    folder.mkdir(parents=True)
    for name, text in facts.items():
        (folder / name).write_text(f"{text}\n")
    source = detect(str(tmp_path), base_url=NOWHERE)
    assert (source and source.name) == (cloud and NAMES[cloud])


@pytest.mark.parametrize(
    ("server", "cloud"),
    [
        (FakeAws(), aws_source),
        (FakeGcp(items={GCP_MAINTENANCE: b"NONE"}), gcp_source),
        (FakeAzure(items={AZURE_NAME: b"vm"}), azure_source),
        (FakeAzure(), None),
        (FakeAws(misbehave="error"), None),
        (FakeAws(misbehave="garbage"), None),
    ],
)
def test_without_firmware_whoever_answers_is_asked(server: FakeCloud, cloud: Cloud | None, tmp_path: Path) -> None:
    with serving(server):
        source = detect(str(tmp_path), base_url=server.url, timeout_s=2.0)
    assert (source and source.name) == (cloud and NAMES[cloud])
