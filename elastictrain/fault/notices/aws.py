"""Notices of AWS: a spot instance that is about to be taken, or likely to be.

Source: the EC2 user guide, "Spot Instance interruption notices", "EC2 instance rebalance recommendations" and "Use the
Instance Metadata Service" (version 2: a token first, then everything with it).
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime

from elastictrain.bounded_json import parse_json
from elastictrain.fault.notices.metadata import Answer, MetadataError, MetadataService, unexpected
from elastictrain.fault.notices.notice import Notice

TOKEN_PATH = "/latest/api/token"  # noqa: S105  # where to get one
ACTION_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
TOKEN_LIFE_S = 21600
TOKEN_LIFE_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"  # noqa: S105
TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105

_REFRESHED_AT = 0.9
_HOPS = "in a container the hop limit of the metadata service must be 2 or more"


def parse_action(body: bytes) -> Notice | None:
    """What the item `spot/instance-action` says; None if that is nothing that can be understood.

    One whose time cannot be read is a notice all the same.
    """
    facts = _object(body)
    action = facts.get("action")
    if not isinstance(action, str) or not action:
        return None
    # Hibernation begins at once: what runs is frozen, and may go on much later.
    verb = {"terminate": "terminates", "stop": "stops", "hibernate": "hibernates"}.get(action, f"announces {action!r} for")
    return Notice("preempt", f"AWS {verb} this spot instance", unix_time(facts.get("time")))


def parse_rebalance(body: bytes) -> Notice | None:
    """What the item `events/recommendations/rebalance` says; None if that is nothing that can be understood."""
    noticed = unix_time(_object(body).get("noticeTime"))
    if noticed is None:
        return None
    return Notice("rebalance", "AWS is likely to take this spot instance soon", None, leave=False)


def unix_time(text: object) -> float | None:
    """Of a time such as 2017-09-18T08:22:00Z; UTC if it does not say."""
    try:
        moment = datetime.fromisoformat(str(text))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


class AwsSource:
    """Asks an EC2 instance's metadata service, version 2 only: that one is always there, and the other often is not."""

    name = "AWS"

    def __init__(self, service: MetadataService, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._clock = clock
        self._token = ""
        self._refresh_at_s = 0.0

    def look(self) -> Notice | None:
        for path, parse in ((ACTION_PATH, parse_action), (REBALANCE_PATH, parse_rebalance)):
            answer = self._ask(path)
            if answer.status == 404:
                continue
            notice = parse(answer.body) if answer.status == 200 else None
            if notice is None:
                raise unexpected(self._service, path, answer)
            return notice
        return None

    def _ask(self, path: str) -> Answer:
        fresh = not self._token or self._clock() >= self._refresh_at_s
        if fresh:
            self._refresh()
        answer = self._service.ask(path, headers={TOKEN_HEADER: self._token})
        if answer.status == 401 and not fresh:
            # It has forgotten our token: after a stop and start, for one.
            self._refresh()
            answer = self._service.ask(path, headers={TOKEN_HEADER: self._token})
        return answer

    def _refresh(self) -> None:
        try:
            answer = self._service.ask(TOKEN_PATH, method="PUT", headers={TOKEN_LIFE_HEADER: str(TOKEN_LIFE_S)})
        except MetadataError as error:
            raise MetadataError(f"{error}; {_HOPS}") from error
        token = answer.body.decode("ascii", errors="replace").strip()
        if answer.status != 200 or not token.isprintable() or not token:
            raise unexpected(self._service, TOKEN_PATH, answer)
        self._token = token
        self._refresh_at_s = self._clock() + _REFRESHED_AT * TOKEN_LIFE_S


def _object(body: bytes) -> dict[str, object]:
    try:
        facts = parse_json(body)
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}
