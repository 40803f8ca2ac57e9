"""Workers begin while those of the generation before still give back their devices: what both need is waited for."""

import time
from collections.abc import Callable

from elastictrain.fault.exits import decode, wait_until_gone
from elastictrain.identity import Identity

PREVIOUS_EXIT_TIMEOUT_S = 30.0
"""How long they may hold up this start: the kernel lets go of some only when a device has answered."""


def wait_for_previous_workers(identity: Identity, *, poll: Callable[[], None] = lambda: None) -> list[int]:
    """Until nothing of the generation before holds anything on this host; returns what still does after half a minute.

    What `poll` raises ends the wait.
    """

    def pause(seconds: float) -> None:
        poll()
        time.sleep(seconds)

    processes = decode(identity.launcher.predecessors) if identity.launcher is not None else ()
    return wait_until_gone(processes, limit_s=PREVIOUS_EXIT_TIMEOUT_S, sleep=pause)
