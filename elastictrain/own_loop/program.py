"""Runs a program of a user's in a process that has imported torch already, as Python would run it."""

import atexit
import os
import runpy
import sys
import threading
from collections.abc import Sequence
from types import TracebackType

from elastictrain.config.compose import Composed
from elastictrain.errors import EXIT_BUG, EXIT_OK, EXIT_STOPPED
from elastictrain.fault.launcher_channel import tell_launcher
from elastictrain.fault.reasons import Reason
from elastictrain.identity import read_identity
from elastictrain.liveness.progress import Phase
from elastictrain.own_loop import session
from elastictrain.own_loop.options import CommandLineOptions

_ABOVE = frozenset((__file__, runpy.__file__, "<frozen runpy>"))  # files of frames that are not the program's


def run_program(program: Sequence[str], *, overrides: Sequence[str], composed: Composed | None) -> int:
    """Run a Python file, or the module after `-m`, with its arguments, to its end; returns the exit code. `overrides` count for
    the run that it attaches to; `composed`: what `compose` has returned for them."""
    session.command_line = CommandLineOptions(tuple(overrides), composed)
    as_module = program[0] == "-m"
    sys.argv = [*program[as_module:]]
    try:
        if as_module:
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(program[0]))  # noqa: PTH100, PTH120
            runpy.run_path(program[0], run_name="__main__")
        code = EXIT_OK
    except SystemExit as stop:
        code = _code_of(stop)
        if code not in (EXIT_OK, EXIT_STOPPED):
            _tell_launcher(f"the program has called sys.exit({stop.code!r})")
    except BaseException as error:  # noqa: BLE001  # as in an interpreter of its own
        sys.excepthook(type(error), error.with_traceback(_own_frames(error.__traceback__)), error.__traceback__)
        code = EXIT_BUG
        _tell_launcher(f"{type(error).__name__}: {error}")
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    return code


def _code_of(stop: SystemExit) -> int:
    if isinstance(stop.code, int | None):
        return stop.code or EXIT_OK
    sys.stderr.write(f"{stop.code}\n")
    return 1


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in _ABOVE:
        trace = trace.tb_next
    return trace


def _tell_launcher(sentence: str) -> None:
    """Say why the program has ended, if a launcher has started it; a run that has begun would have said it."""
    identity = read_identity(os.environ)
    tell_launcher(identity, Reason(identity.rank, EXIT_BUG, str(Phase.START), 0, sentence))
