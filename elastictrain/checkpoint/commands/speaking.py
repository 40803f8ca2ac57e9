"""What a command says: results on standard output, everything else on standard error."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Literal

from elastictrain.checkpoint.manifest import JsonValue

Advance = Callable[[int], None]
"""So many units are done; from any thread."""


def result(text: str) -> None:
    """What the person asked for."""
    sys.stdout.write(f"{text}\n")


def result_json(value: JsonValue) -> None:
    """The same for a script."""
    result(json.dumps(value, indent=2, allow_nan=False))


def note(text: str) -> None:
    """What happens meanwhile."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def can_ask() -> bool:
    """Whether there is a person at a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str) -> bool:
    """Whether the person says yes."""
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@contextmanager
def progress(what: str, *, total: int, unit: Literal["B", "tensor", "folder"], lines: bool = False) -> Iterator[Advance]:
    """A bar on a terminal; elsewhere nothing or, with `lines`, a line for every tenth."""
    lock = Lock()
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(desc=what, total=total, unit=unit, unit_scale=unit == "B", leave=False) as bar:

            def move(count: int) -> None:
                with lock:
                    bar.update(count)

            yield move
        return
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        with lock:
            tenths = [math.floor(10 * at / total) for at in (done, done + count)]
            done += count
            if lines and tenths[0] != tenths[1]:
                note(f"{done}/{total} {unit}s")

    yield tell
