"""Notices of Azure: scheduled events of this virtual machine.

Source: the Azure documentation, "Scheduled Events for Linux VMs", and "Azure Instance Metadata Service".
"""

from email.utils import parsedate_to_datetime

from elastictrain.bounded_json import parse_json
from elastictrain.fault.notices.metadata import MetadataService, unexpected
from elastictrain.fault.notices.notice import Notice

EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
HEADERS = {"Metadata": "true"}

_LEAVING = {
    "Preempt": ("preempt", "Azure takes this spot machine"),
    "Terminate": ("preempt", "Azure deletes this machine"),
    "Reboot": ("maintenance", "Azure restarts this machine"),
    "Redeploy": ("maintenance", "Azure moves this machine, whose memory is lost"),
}


def parse_events(body: bytes, *, machine: str) -> Notice | None:
    """What a document of scheduled events says of `machine`: the first that ends it, or else one that only pauses it.

    Events of other machines of the same set are in the document, too. Raises: ValueError if it is no such document.
    """
    document = parse_json(body)
    if not isinstance(document, dict) or not isinstance(document.get("Events"), list):
        raise ValueError("no list `Events`")
    found: list[Notice] = []
    for event in document["Events"]:
        if isinstance(event, dict) and _concerns(event, machine):
            notice = _notice(event)
            found += [notice] if notice is not None else []
    # One that has begun has no time any more: it comes before all that have.
    return min(found, key=lambda notice: (not notice.leave, notice.deadline or 0.0), default=None)


def _concerns(event: dict[str, object], machine: str) -> bool:
    resources = event.get("Resources")
    return isinstance(resources, list) and machine.lower() in [str(name).lower() for name in resources]


def _notice(event: dict[str, object]) -> Notice | None:
    kind = event.get("EventType")
    if kind == "Freeze":
        return Notice("pause", "Azure stops this machine for some seconds", _not_before(event), leave=False)
    if isinstance(kind, str) and kind in _LEAVING:
        return Notice(*_LEAVING[kind], _not_before(event))
    return None


def _not_before(event: dict[str, object]) -> float | None:
    """It is empty once the event has begun."""
    try:
        return parsedate_to_datetime(str(event.get("NotBefore"))).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


class AzureSource:
    """Asks a virtual machine's metadata service. The first question may take minutes: it switches the events on."""

    name = "Azure"

    def __init__(self, service: MetadataService) -> None:
        self._service = service
        self._machine = ""

    def look(self) -> Notice | None:
        if not self._machine:
            answer = self._service.ask(NAME_PATH, headers=HEADERS)
            self._machine = answer.body.decode(errors="replace").strip() if answer.status == 200 else ""
            if not self._machine:
                raise unexpected(self._service, NAME_PATH, answer)
        answer = self._service.ask(EVENTS_PATH, headers=HEADERS)
        if answer.status != 200:
            raise unexpected(self._service, EVENTS_PATH, answer)
        try:
            return parse_events(answer.body, machine=self._machine)
        except (ValueError, RecursionError) as error:
            raise unexpected(self._service, EVENTS_PATH, answer) from error
