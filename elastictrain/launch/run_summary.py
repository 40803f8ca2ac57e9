"""What a launcher says of its run when it ends."""

import time
from collections.abc import Callable
from functools import partial
from math import inf

from elastictrain.distributed.bounded import within
from elastictrain.fault.stop import StopRequest
from elastictrain.report.history import EventReader
from elastictrain.report.output import summary_line
from elastictrain.report.summary import summarize
from elastictrain.storage.store import Store

_LIMIT_S = 3.0  # the events of a long run take longer: the command has time
_SHARE = 0.5  # of what is left until the deadline


def print_summary(store: Store, request: StopRequest | None, *, print_line: Callable[[str], None]) -> None:
    """Print the most important figures of the run so far, and the command that has more; nothing for a run that never began.
    `request`: the one to stop, whose deadline leaves this process little time."""
    left_s = request.deadline_s - time.monotonic() if request is not None and request.deadline_s is not None else inf
    found = within(min(_LIMIT_S, _SHARE * left_s), partial(_figures, store))
    command = f"python -m elastictrain.report {store.url}"
    if found is None:
        print_line(f"{command} tells what the run spent its time on")
    elif found:
        print_line(f"{found}; more: {command}")


def _figures(store: Store) -> str:
    history = EventReader(store).update()
    return summary_line(summarize(history, url=store.url)) if history.generations else ""
