"""Reads small objects whole, and not one byte more than they may have: a file can claim 30 GB and hold nothing."""

import logging
from typing import Protocol

from elastictrain.bounded_json import DOCUMENT, RECORD
from elastictrain.errors import ObjectTooLargeError

logger = logging.getLogger(__name__)

RECORD_BYTES = RECORD.max_bytes
DOCUMENT_BYTES = DOCUMENT.max_bytes


class Readable(Protocol):
    """The part of a store that is needed."""

    @property
    def url(self) -> str:
        """For messages."""

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        """As `Store.read`."""


def read_bounded(store: Readable, key: str, *, most_bytes: int = RECORD_BYTES) -> bytes:
    """The whole object.

    Raises: ObjectTooLargeError if it has more than `most_bytes`; what `Store.read` raises.
    """
    data = store.read(key, end=most_bytes + 1)
    if len(data) > most_bytes:
        raise ObjectTooLargeError(f"{store.url}/{key} must have at most {most_bytes} bytes, but has more")
    return data


def read_record(store: Readable, key: str) -> bytes:
    """The whole of a small object; nothing of one that is larger than any record, which then decodes as none.

    Raises: what `Store.read` raises.
    """
    try:
        return read_bounded(store, key)
    except ObjectTooLargeError as error:
        logger.warning("%s", error)
        return b""
