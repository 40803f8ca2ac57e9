"""One object's round trip through a store, as a process of its own: `python -m elastictrain.preflight.host.trip`, started by
the check `storage`, for nobody else to use.

It reads what to do from its input (a URL may hold a password, and command lines are public), and writes a line of JSON to its
output when a step begins and when it ends: who kills it knows then where it stood.
"""

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

from elastictrain.errors import ConfigError, StorageError
from elastictrain.fault.exits import follow_parent
from elastictrain.storage.failures import RetryOptions, errno_of, fault_of
from elastictrain.storage.local import LocalStore
from elastictrain.storage.opening import check_writable, open_store, without_sync
from elastictrain.storage.store import Store

FOLDER = "preflight/trips"
"""Below the root of the store; empty, and on a file system gone, after a trip."""

_STALE_S = 3600.0
"""What an earlier trip left, because it was killed, is older than this. Both times are the store's own."""

Send = Callable[[Mapping[str, object]], None]


def travel(store: Store, *, name: str, send: Send) -> None:
    """A round trip, and what earlier ones that were killed have left goes. Raises: StorageError."""
    key = f"{FOLDER}/{name}"
    modified = {info.key: info.modified for info in check_writable(store, key=key, step=partial(_step, send=send))}
    for other, modified_s in modified.items():
        if modified[key] - modified_s > _STALE_S:
            store.delete(other)
    if isinstance(store, LocalStore):
        store.sweep_temporaries(FOLDER)


@contextmanager
def _step(name: str, *, send: Send) -> Iterator[None]:
    send({"begun": name})
    began = time.monotonic()
    yield
    send({"done": name, "ms": round((time.monotonic() - began) * 1e3, 2)})


@contextmanager
def _leaving_as_found(store: Store) -> Iterator[None]:
    """Folders above the objects that were not there before are not there afterwards, unless others have begun to use them."""
    made = []
    folder = store.root if isinstance(store, LocalStore) else "/"
    while not os.path.lexists(folder):
        made.append(folder)
        folder = os.path.dirname(folder)  # noqa: PTH120
    try:
        yield
    finally:
        with suppress(OSError):
            for one in made:
                os.rmdir(one)  # noqa: PTH106


def main() -> int:
    """Reads `{"url": ..., "patience_s": ..., "parent": pid}`; returns 0 whenever what happened was said."""
    order = json.loads(sys.stdin.read())
    # Nobody would miss us if the preflight were killed while we wait for a store that does not answer.
    if not follow_parent(order["parent"], with_signal=signal.SIGKILL):
        return 0
    patience_s = float(order["patience_s"])

    def send(word: Mapping[str, object]) -> None:
        sys.stdout.write(json.dumps(word) + "\n")
        sys.stdout.flush()

    retry = RetryOptions(attempts=3, base_s=0.1, total_s=patience_s / 3, answer_timeout_s=patience_s)
    send({"begun": "open"})
    try:
        # Whether it answers is the question: what is on its way to a disk already would make the answer wait.
        store = without_sync(open_store(str(order["url"]), retry=retry))
        with _leaving_as_found(store):
            travel(store, name=f"trip-{secrets.token_hex(8)}", send=send)
    except ConfigError as error:
        send({"fault": "CONFIG", "errno": None, "message": str(error)})
    except StorageError as error:
        send({"fault": fault_of(error).name, "errno": errno_of(error), "message": str(error)})
    else:
        send({"end": True})
    return 0


if __name__ == "__main__":
    sys.exit(main())
