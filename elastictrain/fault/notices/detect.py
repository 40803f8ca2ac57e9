"""Which cloud this host is in: what its firmware says, or else who answers at the metadata address."""

import socket
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from elastictrain.fault.notices.aws import TOKEN_LIFE_HEADER, TOKEN_PATH, AwsSource
from elastictrain.fault.notices.azure import HEADERS as AZURE_HEADERS
from elastictrain.fault.notices.azure import NAME_PATH, AzureSource
from elastictrain.fault.notices.gcp import HEADERS as GCP_HEADERS
from elastictrain.fault.notices.gcp import MAINTENANCE_PATH, GcpSource
from elastictrain.fault.notices.metadata import ADDRESS, MetadataError, MetadataService
from elastictrain.fault.notices.notice import Source

_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
"""Of the chassis of every virtual machine of Azure; other hosts of Hyper-V have the same vendor."""

PROBE_S = 1.0


class Cloud(StrEnum):
    """One whose notices are understood."""

    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"


def cloud_of(facts: dict[str, str]) -> Cloud | None:
    """What the files of /sys/class/dmi/id say, by name; None if they name no cloud. Pure."""
    vendor = facts.get("sys_vendor", "")
    if vendor == "Amazon EC2" or "amazon" in facts.get("bios_version", "").lower():
        return Cloud.AWS
    if vendor == "Google" or facts.get("product_name") == "Google Compute Engine":
        return Cloud.GCP
    if vendor == "Microsoft Corporation" and facts.get("chassis_asset_tag") == _AZURE_TAG:
        return Cloud.AZURE
    return None


def detect(root: str = "/", *, base_url: str = ADDRESS, timeout_s: float = PROBE_S) -> Cloud | None:
    """The cloud of this host, within a few `timeout_s`; None if it is in none that gives notices."""
    facts = {}
    for name in ("sys_vendor", "product_name", "bios_version", "chassis_asset_tag"):
        with suppress(OSError):
            facts[name] = Path(root, "sys/class/dmi/id", name).read_text(errors="replace").strip()
    return cloud_of(facts) or _probe(base_url, timeout_s)


def source_of(cloud: Cloud, *, base_url: str = ADDRESS) -> Source:
    """Whom to ask there."""
    service = MetadataService(base_url)
    match cloud:
        case Cloud.AWS:
            return AwsSource(service)
        case Cloud.GCP:
            return GcpSource(service)
        case Cloud.AZURE:
            return AzureSource(service)


def _probe(base_url: str, timeout_s: float) -> Cloud | None:
    parts = urlsplit(base_url)
    try:
        # Outside of clouds nobody is there, and one time-out is enough to know it.
        socket.create_connection((parts.hostname or "", parts.port or 80), timeout_s).close()
    except OSError:
        return None
    service = MetadataService(base_url, timeout_s=timeout_s)
    with suppress(MetadataError):
        if service.ask(MAINTENANCE_PATH, headers=GCP_HEADERS).headers.get("metadata-flavor") == "Google":
            return Cloud.GCP
    with suppress(MetadataError):
        if service.ask(NAME_PATH, headers=AZURE_HEADERS).status == 200:
            return Cloud.AZURE
    with suppress(MetadataError):
        if service.ask(TOKEN_PATH, method="PUT", headers={TOKEN_LIFE_HEADER: "60"}).status == 200:
            return Cloud.AWS
    return None
