from pathlib import Path

import pytest

from elastictrain.fault.notices import azure, gcp
from elastictrain.fault.notices.aws import AwsSource
from elastictrain.fault.notices.azure import AzureSource
from elastictrain.fault.notices.detect import Cloud, cloud_of, detect, source_of
from elastictrain.fault.notices.gcp import GcpSource
from tests.unit.fault.notices.clouds import FakeAws, FakeAzure, FakeCloud, FakeGcp, serving

NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("facts", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2", "product_name": "p5.48xlarge"}, Cloud.AWS),
        ({"sys_vendor": "Xen", "product_name": "HVM domU", "bios_version": "4.11.amazon"}, Cloud.AWS),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, Cloud.GCP),
        (
            {
                "sys_vendor": "Microsoft Corporation",
                "product_name": "Virtual Machine",
                "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77",
            },
            Cloud.AZURE,
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
    assert detect(str(tmp_path), base_url=NOWHERE) is cloud


@pytest.mark.parametrize(
    ("server", "cloud"),
    [
        (FakeAws(), Cloud.AWS),
        (FakeGcp(items={gcp.MAINTENANCE_PATH: b"NONE"}), Cloud.GCP),
        (FakeAzure(items={azure.NAME_PATH: b"vm"}), Cloud.AZURE),
        (FakeAzure(), None),
        (FakeAws(misbehave="error"), None),
        (FakeAws(misbehave="garbage"), None),
    ],
)
def test_without_firmware_whoever_answers_is_asked(server: FakeCloud, cloud: Cloud | None, tmp_path: Path) -> None:
    with serving(server):
        assert detect(str(tmp_path), base_url=server.url, timeout_s=2.0) is cloud


def test_each_cloud_has_a_source() -> None:
    assert [type(source_of(cloud)) for cloud in Cloud] == [AwsSource, GcpSource, AzureSource]
