"""Notices of AWS, Google Cloud and Azure for this host, and detection of the cloud.

Requests to the metadata services go by plain HTTP to a link-local address, past any proxy, within a bounded time.

Sources: EC2 user guide, "Spot Instance interruption notices", "EC2 instance rebalance recommendations" and "Use the Instance
Metadata Service" (version 2: a token first, then everything with it). Compute Engine documentation, "Spot VMs" (30 s between
the notice and the end) and "Get live migration notices" (60 s at least; an instance with GPUs is ended, not moved, with up to
an hour's notice). Azure documentation, "Scheduled Events for Linux VMs" and "Azure Instance Metadata Service".
"""

import http.client
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from elastictrain.bounded_json import parse_record
from elastictrain.fault.notices import MetadataError, Notice

AWS_TOKEN = "/latest/api/token"  # noqa: S105  # a path
AWS_ACTION = "/latest/meta-data/spot/instance-action"
AWS_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
AWS_TOKEN_LIFE_S = 21600
AWS_TOKEN_LIFE_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"  # noqa: S105
AWS_TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105
_AWS_REFRESHED_AT = 0.9
_AWS_HOPS = "in a container the hop limit of the metadata service must be 2 or more"

GCP_PREEMPTED = "/computeMetadata/v1/instance/preempted"
GCP_MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
GCP_HEADERS = {"Metadata-Flavor": "Google"}
_GCP_ITEMS: Mapping[str, Mapping[bytes, Notice | None]] = {  # item -> its values; a deadline counts from reading the item
    GCP_PREEMPTED: {b"TRUE": Notice("preempt", "Google Cloud takes this spot instance", 30.0), b"FALSE": None},
    GCP_MAINTENANCE: {
        b"TERMINATE_ON_HOST_MAINTENANCE": Notice("maintenance", "Google Cloud ends this instance for maintenance", 60.0),
        b"MIGRATE_ON_HOST_MAINTENANCE": Notice("pause", "Google Cloud moves this instance to another machine", 60.0, False),
        b"NONE": None,
    },
}

AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
AZURE_HEADERS = {"Metadata": "true"}
_AZURE_LEAVING = {
    "Preempt": ("preempt", "Azure takes this spot machine"),
    "Terminate": ("preempt", "Azure deletes this machine"),
    "Reboot": ("maintenance", "Azure restarts this machine"),
    "Redeploy": ("maintenance", "Azure moves this machine, whose memory is lost"),
}
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"  # chassis of every Azure machine; other hosts of Hyper-V have the same vendor

ADDRESS = "http://169.254.169.254"  # the same at AWS, GCP and Azure
TIMEOUT_S = 2.0
_MOST_BYTES = 1 << 20
PROBE_S = 1.0

Parser = Callable[[bytes], Notice | None]  # the notice in an item, if any. Raises: ValueError for an unknown form.


@dataclass(frozen=True, slots=True)
class MetadataAnswer:
    url: str
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    def unexpected(self) -> MetadataError:
        return MetadataError(f"{self.url} answers {self.status}: {self.body[:100]!r}")


@dataclass(frozen=True, slots=True)
class MetadataService:
    url: str = ADDRESS
    timeout_s: float = TIMEOUT_S

    def ask(self, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None) -> MetadataAnswer:
        """Raises: MetadataError if no complete answer comes in time; an answer may have any status."""
        url, address = f"{self.url}{path}", urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=self.timeout_s)
        # A socket's time-out counts from each byte, so that a service which drips would hold this thread for ever.
        overdue = threading.Event()
        limit: threading.Timer | None = None
        try:
            connection.connect()
            # Taken now: the connection drops its socket as soon as an answer announces that it is the last.
            limit = threading.Timer(self.timeout_s, _break_off, args=(connection.sock, overdue))
            limit.daemon = True
            limit.start()
            connection.request(method, path, headers=dict(headers or {}))
            # A response without a length keeps the socket, so it must be closed.
            with closing(connection.getresponse()) as response:
                body = response.read(_MOST_BYTES + 1)
            if len(body) > _MOST_BYTES:
                raise MetadataError(f"{url} answers with more than {_MOST_BYTES} bytes")
            if overdue.is_set():
                # A body without a length ends with the connection, and may have been cut.
                raise TimeoutError
            return MetadataAnswer(url, response.status, {name.lower(): value for name, value in response.getheaders()}, body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            late = overdue.is_set() or isinstance(error, TimeoutError)
            reason = f"no answer within {self.timeout_s:g} s" if late else f"{type(error).__name__}: {error}"
            raise MetadataError(f"{url}: {reason}") from error
        finally:
            if limit is not None:
                limit.cancel()
            connection.close()


def _break_off(connection: socket.socket, overdue: threading.Event) -> None:
    overdue.set()
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class MetadataSource:
    """Asks the metadata service of one cloud, item by item, for the first notice."""

    name: str
    ask: Callable[[str], MetadataAnswer]
    items: Mapping[str, Parser]  # by path
    may_lack: bool = True  # whether an instance that cannot be preempted lacks some items

    def look(self) -> Notice | None:
        """The notice of the first item that has one. Raises: MetadataError if no answer comes, or one of an unknown form."""
        for path, parse in self.items.items():
            answer = self.ask(path)
            if answer.status == 404 and self.may_lack:
                continue
            if answer.status != 200:
                raise answer.unexpected()
            try:
                notice = parse(answer.body)
            except ValueError as error:
                raise answer.unexpected() from error
            if notice is not None:
                return notice
        return None


def aws_source(service: MetadataService, *, clock: Callable[[], float] = time.monotonic) -> MetadataSource:
    """Version 2 of the service only: it always exists, version 1 often does not. The token is renewed before it expires."""
    token, refresh_at_s = "", 0.0

    def refresh() -> None:
        """Get a token that is valid for `AWS_TOKEN_LIFE_S`. Raises: MetadataError."""
        nonlocal token, refresh_at_s
        try:
            answer = service.ask(AWS_TOKEN, method="PUT", headers={AWS_TOKEN_LIFE_HEADER: str(AWS_TOKEN_LIFE_S)})
        except MetadataError as error:
            raise MetadataError(f"{error}; {_AWS_HOPS}") from error
        found = answer.body.decode("ascii", errors="replace").strip()
        if answer.status != 200 or not found.isprintable() or not found:
            raise answer.unexpected()
        token, refresh_at_s = found, clock() + _AWS_REFRESHED_AT * AWS_TOKEN_LIFE_S

    def ask(path: str) -> MetadataAnswer:
        """Renews the token before it expires, and once if the service does not know it. Raises: MetadataError."""
        fresh = not token or clock() >= refresh_at_s
        if fresh:
            refresh()
        answer = service.ask(path, headers={AWS_TOKEN_HEADER: token})
        if answer.status == 401 and not fresh:
            # The service has lost the token, for example after a stop and start.
            refresh()
            answer = service.ask(path, headers={AWS_TOKEN_HEADER: token})
        return answer

    return MetadataSource("AWS", ask, {AWS_ACTION: parse_action, AWS_REBALANCE: parse_rebalance})


def gcp_source(service: MetadataService, *, wall: Callable[[], float] = time.time) -> MetadataSource:
    """`wall`: unix seconds."""

    def ask(path: str) -> MetadataAnswer:
        answer = service.ask(path, headers=GCP_HEADERS)
        if answer.headers.get("metadata-flavor") != "Google":
            raise MetadataError(f"{answer.url}: whoever answers is not the metadata server of Google Cloud")
        return answer

    def parse(body: bytes, values: Mapping[bytes, Notice | None]) -> Notice | None:
        value = body.strip().upper()
        if value not in values:
            raise ValueError(value)
        notice = values[value]
        return None if notice is None else replace(notice, deadline=wall() + (notice.deadline or 0.0))

    return MetadataSource("Google Cloud", ask, {path: partial(parse, values=values) for path, values in _GCP_ITEMS.items()})


def azure_source(service: MetadataService) -> MetadataSource:
    """The first request may take minutes: it switches the events on."""
    ask = partial(service.ask, headers=AZURE_HEADERS)

    @cache
    def machine() -> str:
        answer = ask(AZURE_NAME)
        name = answer.body.decode(errors="replace").strip()
        if answer.status != 200 or not name:
            raise answer.unexpected()
        return name

    return MetadataSource("Azure", ask, {AZURE_EVENTS: lambda body: parse_events(body, machine=machine())}, may_lack=False)


class _Action(msgspec.Struct):
    action: Annotated[str, msgspec.Meta(min_length=1)]
    time: Any = None


class _Rebalance(msgspec.Struct, rename="camel"):
    notice_time: str


class _Events(msgspec.Struct, rename="pascal"):
    events: list[Any]


def parse_action(body: bytes) -> Notice:
    """A notice whose time cannot be read still counts."""
    found = parse_record(body, _Action)
    # Hibernation begins at once: processes are frozen, and may continue much later.
    verbs = {"terminate": "terminates", "stop": "stops", "hibernate": "hibernates"}
    verb = verbs.get(found.action, f"announces {found.action!r} for")
    deadline: float | None = None
    with suppress(ValueError, OverflowError):
        deadline = _unix_time(str(found.time))
    return Notice("preempt", f"AWS {verb} this spot instance", deadline)


def parse_rebalance(body: bytes) -> Notice:
    """Its time must be valid, but does not bound the end."""
    _unix_time(parse_record(body, _Rebalance).notice_time)
    return Notice("rebalance", "AWS is likely to take this spot instance soon", None, leave=False)


def _unix_time(text: str) -> float:
    """Parse a time such as 2017-09-18T08:22:00Z; UTC by default."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def parse_events(body: bytes, *, machine: str) -> Notice | None:
    """The first scheduled event that ends `machine`, or else one that only pauses it. `body` also lists other machines."""
    found = []
    for event in parse_record(body, _Events).events:
        resources = event.get("Resources") if isinstance(event, dict) else None
        if not isinstance(resources, list) or machine.lower() not in [str(name).lower() for name in resources]:
            continue
        kind = str(event.get("EventType"))
        deadline: float | None = None
        # NotBefore is empty once the event has begun.
        with suppress(ValueError, TypeError, IndexError, OverflowError):
            deadline = parsedate_to_datetime(str(event.get("NotBefore"))).timestamp()
        if kind == "Freeze":
            found.append(Notice("pause", "Azure stops this machine for some seconds", deadline, leave=False))
        elif kind in _AZURE_LEAVING:
            found.append(Notice(*_AZURE_LEAVING[kind], deadline))
    # An event that has begun has no time, and comes first.
    return min(found, key=lambda notice: (not notice.leave, notice.deadline or 0.0), default=None)


Cloud = Callable[[MetadataService], MetadataSource]


def cloud_of(facts: dict[str, str]) -> Cloud | None:
    """The cloud by the files of /sys/class/dmi/id (name -> content); None if they name none."""
    vendor = facts.get("sys_vendor", "")
    if vendor == "Amazon EC2" or "amazon" in facts.get("bios_version", "").lower():
        return aws_source
    if vendor == "Google" or facts.get("product_name") == "Google Compute Engine":
        return gcp_source
    if vendor == "Microsoft Corporation" and facts.get("chassis_asset_tag") == _AZURE_TAG:
        return azure_source
    return None


def detect(root: str = "/", *, base_url: str = ADDRESS, timeout_s: float = PROBE_S) -> MetadataSource | None:
    """The metadata source of this host, found within a few `timeout_s`; None outside of clouds that give notices.

    The firmware names the cloud, or else the service at the metadata address does.
    """
    facts = {}
    for name in ("sys_vendor", "product_name", "bios_version", "chassis_asset_tag"):
        with suppress(OSError):
            facts[name] = Path(root, "sys/class/dmi/id", name).read_text(errors="replace").strip()
    cloud = cloud_of(facts) or _probe(base_url, timeout_s)
    return None if cloud is None else cloud(MetadataService(base_url))


def _probe(base_url: str, timeout_s: float) -> Cloud | None:
    parts = urlsplit(base_url)
    try:
        # Outside of clouds no service answers, and one time-out is enough to know it.
        socket.create_connection((parts.hostname or "", parts.port or 80), timeout_s).close()
    except OSError:
        return None
    questions: tuple[tuple[Cloud, str, str, Mapping[str, str]], ...] = (
        (gcp_source, GCP_MAINTENANCE, "GET", GCP_HEADERS),
        (azure_source, AZURE_NAME, "GET", AZURE_HEADERS),
        (aws_source, AWS_TOKEN, "PUT", {AWS_TOKEN_LIFE_HEADER: "60"}),
    )
    for cloud, path, method, headers in questions:
        with suppress(MetadataError):
            answer = MetadataService(base_url, timeout_s).ask(path, method=method, headers=headers)
            google = answer.headers.get("metadata-flavor") == "Google"
            if google if cloud is gcp_source else answer.status == 200:
                return cloud
    return None
