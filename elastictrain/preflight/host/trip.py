"""`python -m elastictrain.preflight.host.trip`: an object's round trip through a store, for the check `storage`. The order is
on stdin, as a URL may hold a password. A line of JSON for each begin and end of a step tells the parent how far it came."""

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

from elastictrain.errors import ConfigError, ObjectNotFoundError, StorageError
from elastictrain.processes import follow_parent
from elastictrain.storage.failures import RetryOptions, errno_of, fault_of
from elastictrain.storage.local import LocalStore
from elastictrain.storage.opening import check_writable, open_store, without_sync
from elastictrain.storage.store import Store

FOLDER = "preflight/trips"  # below the store's root; empty after a trip, and on a file system deleted
_STALE_S = 3600.0  # remains of a killed trip are older than this. Both times are the store's own

_LOOKS_S = (0.0, 0.05, 0.2, 0.5, 1.0)  # before each look

Send = Callable[[Mapping[str, object]], None]


def travel(store: Store, *, name: str, send: Send) -> None:
    """Do the round trip, and delete remains of killed ones. Raises: StorageError."""
    key = f"{FOLDER}/{name}"
    modified = {info.key: info.modified for info in check_writable(store, key=key, step=partial(_step, send=send))}
    for other, modified_s in modified.items():
        if modified[key] - modified_s > _STALE_S:
            store.delete(other)
    if isinstance(store, LocalStore):
        store.sweep_temporaries(FOLDER)


def look(store: Store, *, name: str, send: Send) -> None:
    """Look for the object that the first host left. Raises: StorageError."""
    with _step("look", send=send):
        for pause_s in _LOOKS_S:
            time.sleep(pause_s)
            # A file server's client may remember that a name is missing; listing the folder makes it ask again.
            if f"{FOLDER}/{name}" in {info.key for info in store.list(FOLDER)}:
                return
        raise ObjectNotFoundError("what the first host wrote is not there")


@contextmanager
def _step(name: str, *, send: Send) -> Iterator[None]:
    send({"begun": name})
    began = time.monotonic()
    yield
    send({"done": name, "ms": round((time.monotonic() - began) * 1e3, 2)})


@contextmanager
def _leaving_as_found(store: Store) -> Iterator[None]:
    """Remove the parent folders that this trip made, unless others use them now."""
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
    """Reads `{"url": ..., "patience_s": ..., "parent": pid, "leaves": name, "looks_for": name}`, both names perhaps empty."""
    order = json.loads(sys.stdin.read())
    # If the preflight is killed, this process must not wait on for a store that does not answer.
    if not follow_parent(order["parent"], with_signal=signal.SIGKILL):
        return 0
    patience_s = float(order["patience_s"])

    def send(word: Mapping[str, object]) -> None:
        sys.stdout.write(json.dumps(word) + "\n")
        sys.stdout.flush()

    retry = RetryOptions(attempts=3, base_s=0.1, total_s=patience_s / 3, answer_timeout_s=patience_s)
    send({"begun": "open"})
    try:
        # Only the store's answer is measured: waiting for fsync would add pending writes of others.
        store = without_sync(open_store(str(order["url"]), retry=retry))
        with _leaving_as_found(store):
            travel(store, name=f"trip-{secrets.token_hex(8)}", send=send)
            if order["leaves"]:
                store.create(f"{FOLDER}/{order['leaves']}", b"This object may be deleted.\n")
            if order["looks_for"]:
                look(store, name=order["looks_for"], send=send)
    except ConfigError as error:
        send({"fault": "CONFIG", "errno": None, "message": str(error)})
    except StorageError as error:
        send({"fault": fault_of(error).name, "errno": errno_of(error), "message": str(error)})
    else:
        send({"end": True})
    return 0


if __name__ == "__main__":
    sys.exit(main())
