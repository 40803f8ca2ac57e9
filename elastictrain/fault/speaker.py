"""Who of a host's workers says what is wrong for all of them alike."""

import time
from collections.abc import Callable

TURN_S = 10.0
"""How long the first worker of a host is left the word."""


def elect_reporter(
    local_rank: int,
    *,
    ending: Callable[[], bool],
    limit_s: float = TURN_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether this worker has to say it; `ending` tells whether it was asked to end.

    torchrun ends all workers as soon as one has left. If another than the first came first to the same finding and left in
    silence, the first would be ended before it could say anything: the others therefore wait to be ended. One that waits in
    vain is alone with its finding, and speaks.
    """
    if local_rank == 0:
        return True
    deadline = clock() + limit_s
    while clock() < deadline:
        if ending():
            return False
        sleep(0.05)
    return True
