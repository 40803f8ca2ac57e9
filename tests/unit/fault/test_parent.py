import ctypes
import os
import signal

from elastictrain.fault.exits import follow_parent

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2


def death_signal() -> int:
    number = ctypes.c_int(-1)
    assert ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0) == 0
    return number.value


def test_the_kernel_is_asked_for_sigterm_when_the_parent_dies() -> None:
    try:
        assert follow_parent(os.getppid())
        assert death_signal() == signal.SIGTERM
    finally:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)


def test_a_parent_that_died_before_is_noticed() -> None:
    try:
        assert not follow_parent(os.getppid() + 1)
    finally:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
