"""How the entry points of all commands run and end, and show how far they are."""

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, NoReturn

from elastictrain.errors import EXIT_OK, EXIT_USAGE, ElasticTrainError

_EXIT_INTERRUPTED = 130
_EXIT_PIPE = 141
_LINE_EVERY_S = 10.0


def split_program(arguments: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The arguments before `--`, and those after it: a program with its own, which takes the place of a task."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return tuple(arguments[:place]), tuple(arguments[place + 1 :])


def run_command(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    act: Callable[[argparse.Namespace], int],
    *,
    if_interrupted: Callable[[argparse.Namespace], str] = lambda _: "",
) -> int:
    """Call `act` with the parsed arguments; returns the exit code. `if_interrupted`: advice to print after Ctrl-C."""
    try:
        parsed = parser.parse_args(arguments)
    except SystemExit as stop:
        # argparse exits with 2 for a wrong command line, and with 0 after --help.
        return EXIT_USAGE if stop.code else EXIT_OK
    try:
        code = act(parsed)
        sys.stdout.flush()
    except ElasticTrainError as error:
        sys.stderr.write(f"elastictrain: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write(f"elastictrain: interrupted{if_interrupted(parsed)}\n")
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the output, `head` for example, has closed it; the interpreter must not try to write the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_PIPE
    return code


@contextmanager
def progress(what: str, total: int, *, unit: str = "B", lines: bool = False) -> Iterator[Callable[[int], None]]:
    """Takes the units that are done since its last call, in any thread, and shows them on stderr: a bar on a terminal;
    elsewhere nothing or, with `lines`, a line now and then."""
    from tqdm import tqdm

    lock, done, began_s = Lock(), 0, time.monotonic()
    told_s = began_s
    style: dict[str, Any] = {"unit": unit, "unit_scale": unit == "B"}
    # `disable=None` draws the bar on a terminal alone.
    with tqdm(desc=what, total=total or None, leave=False, dynamic_ncols=True, disable=None, **style) as bar:

        def advance(count: int) -> None:
            """Counts the units that are done since the last call. From any thread."""
            nonlocal done, told_s
            with lock:
                bar.update(count)
                done, now_s = done + count, time.monotonic()
                if lines and bar.disable and now_s - told_s >= _LINE_EVERY_S:
                    told_s = now_s
                    sys.stderr.write(
                        f"{tqdm.format_meter(done, total or None, now_s - began_s, prefix=what, ncols=80, **style)}\n"
                    )
                    sys.stderr.flush()

        yield advance


def leave_process(code: int) -> NoReturn:
    """End this process at once; all that matters is durable by now.

    Gloo's threads sometimes abort the interpreter in its own shutdown, even after the group was destroyed, and torchrun would
    count that as a failure. A collective may be stuck in another thread, too.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
