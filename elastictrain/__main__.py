"""The console script `elastictrain COMMAND ...`; `python -m elastictrain` is the same."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from elastictrain.entry_point import leave_process
from elastictrain.errors import EXIT_OK, EXIT_USAGE
from elastictrain.version import __version__

COMMANDS = {  # command -> the module whose `main(argv) -> int` runs it, and its summary
    "run": ("elastictrain.run", "train: under torchrun a worker of the group, otherwise a world of one"),
    "launch": ("elastictrain.launch.__main__", "one per host: train, start again after failures, shrink and grow"),
    "data": ("elastictrain.data.__main__", "prepare text into token files, and inspect them"),
    "preflight": ("elastictrain.preflight.__main__", "check this host, or under torchrun all hosts and their links"),
    "simulate": ("elastictrain.simulate.__main__", "what months on a fleet of machines that fail would cost a run"),
    "checkpoint": ("elastictrain.checkpoint.__main__", "list, verify, delete, compare and export checkpoints"),
    "chaos": ("elastictrain.chaos.__main__", "break a run on purpose, and check what must still hold"),
    "report": ("elastictrain.report.__main__", "what a run has spent its time on, and what its failures cost"),
}
_USAGE = """\
usage: elastictrain COMMAND ...
       elastictrain --help | --version

commands:
{commands}

`elastictrain COMMAND --help` tells more; `python -m elastictrain.COMMAND` is the same, for torchrun.
"""


def usage() -> str:
    width = max(map(len, COMMANDS))
    return _USAGE.format(commands="\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: this process's arguments); returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    first = arguments[0] if arguments else None
    if first in ("-h", "--help"):
        sys.stdout.write(usage())
        return EXIT_OK
    if first == "--version":
        sys.stdout.write(f"elastictrain {__version__}\n")
        return EXIT_OK
    if first in COMMANDS:
        # Imported only now: `elastictrain --help` must not wait for torch.
        run: Callable[[Sequence[str]], int] = import_module(COMMANDS[first][0]).main
        return run(arguments[1:])
    problem = "a command is missing" if first is None else f"unknown command {first!r}"
    sys.stderr.write(f"elastictrain: {problem}\n{usage()}")
    return EXIT_USAGE


def script() -> NoReturn:
    """The console script: like `main`, but ends the process as a worker must end."""
    leave_process(main())


if __name__ == "__main__":
    script()
