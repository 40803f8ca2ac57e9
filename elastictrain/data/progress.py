"""How far a command is: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LINE_EVERY_S = 10.0


@contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """A function that takes the bytes that are done since its last call. Prints to stderr."""
    from tqdm import tqdm

    if sys.stderr.isatty():
        with tqdm(desc=what, total=total_bytes or None, unit="B", unit_scale=True, dynamic_ncols=True) as bar:
            yield bar.update
        return
    began = last = time.monotonic()
    done = 0

    def line(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - last >= _LINE_EVERY_S:
            last = now
            shown = tqdm.format_meter(done, total_bytes or None, now - began, ncols=80, prefix=what, unit="B", unit_scale=True)
            print(shown, file=sys.stderr, flush=True)  # noqa: T201

    yield line
