"""A limit on the end of a process, which holds whatever hangs in it."""

import faulthandler
import os
import threading

_LOCK_FREE_MARGIN_S = 1.0


def limit_the_end(grace_s: float, *, exit_code: int) -> None:
    """This process ends with `exit_code` after `grace_s`, unless it has ended before."""
    limit = threading.Timer(grace_s, os._exit, args=(exit_code,))
    limit.daemon = True
    limit.start()
    # A call into a device's library may hang with the interpreter's lock held, and the timer with it. This limit needs no
    # lock; its exit code is 1.
    faulthandler.dump_traceback_later(grace_s + _LOCK_FREE_MARGIN_S, exit=True)
