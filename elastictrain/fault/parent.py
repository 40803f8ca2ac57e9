"""Ties this process to the agent that started it: a worker whose agent was killed must not train on unnoticed."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def follow_parent(expected_parent: int, *, with_signal: int = signal.SIGTERM) -> bool:
    """Ask the kernel for a signal when the parent dies; False if the parent is gone already.

    Source: prctl(2). The request is not retroactive, so the parent is checked after it. Linux only; elsewhere nothing happens.
    """
    if sys.platform != "linux":
        return True
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0)
    return os.getppid() == expected_parent
