"""Notices of Google Cloud: a spot instance that is being taken, and maintenance of the machine below it.

Source: the Compute Engine documentation, "Spot VMs" (30 s between the notice and the end) and "Get live migration notices"
(60 s at least; an instance with GPUs is ended, not moved, and told up to an hour before).
"""

import time
from collections.abc import Callable

from elastictrain.fault.notices.metadata import Answer, MetadataError, MetadataService, unexpected
from elastictrain.fault.notices.notice import Notice

PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"
MAINTENANCE_PATH = "/computeMetadata/v1/instance/maintenance-event"
HEADERS = {"Metadata-Flavor": "Google"}

PREEMPT_S = 30.0
MAINTENANCE_S = 60.0


def parse_preempted(body: bytes, *, now: float) -> Notice | None:
    """What `instance/preempted` says. Raises: ValueError if it is neither TRUE nor FALSE."""
    match body.strip().upper():
        case b"TRUE":
            return Notice("preempt", "Google Cloud takes this spot instance", now + PREEMPT_S)
        case b"FALSE":
            return None
        case other:
            raise ValueError(other)


def parse_maintenance(body: bytes, *, now: float) -> Notice | None:
    """What `instance/maintenance-event` says. Raises: ValueError if it is none of its values."""
    match body.strip().upper():
        case b"TERMINATE_ON_HOST_MAINTENANCE":
            return Notice("maintenance", "Google Cloud ends this instance for maintenance", now + MAINTENANCE_S)
        case b"MIGRATE_ON_HOST_MAINTENANCE":
            return Notice("pause", "Google Cloud moves this instance to another machine", now + MAINTENANCE_S, leave=False)
        case b"NONE":
            return None
        case other:
            raise ValueError(other)


class GcpSource:
    """Asks an instance's metadata server."""

    name = "Google Cloud"

    def __init__(self, service: MetadataService, *, wall: Callable[[], float] = time.time) -> None:
        """`wall`: unix seconds."""
        self._service = service
        self._wall = wall

    def look(self) -> Notice | None:
        for path, parse in ((PREEMPTED_PATH, parse_preempted), (MAINTENANCE_PATH, parse_maintenance)):
            answer = self._ask(path)
            # An instance that is not of a kind that can be taken may lack an item.
            if answer.status == 404:
                continue
            if answer.status != 200:
                raise unexpected(self._service, path, answer)
            try:
                notice = parse(answer.body, now=self._wall())
            except ValueError as error:
                raise unexpected(self._service, path, answer) from error
            if notice is not None:
                return notice
        return None

    def _ask(self, path: str) -> Answer:
        answer = self._service.ask(path, headers=HEADERS)
        if answer.headers.get("metadata-flavor") != "Google":
            raise MetadataError(f"{self._service.url}{path}: whoever answers is not the metadata server of Google Cloud")
        return answer
