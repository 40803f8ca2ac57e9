"""Records that hosts or ranks leave for each other before they have a group, such as in torchrun's store. Imports no torch."""

from typing import Protocol, TypeVar

from elastictrain.bounded_json import DOCUMENT, MalformedJsonError, encode_record, parse_record

T = TypeVar("T")


class Exchange(Protocol):
    """Table of small values that all share. Raises: TransportError if unreachable."""

    def put(self, key: str, value: bytes) -> None:
        """Write a value, visible to all, under a key that is used once."""

    def get(self, key: str, *, limit_s: float) -> bytes | None:
        """Wait for a value; None if it does not come in time. A limit of 0 finds an existing value."""


def put_record(exchange: Exchange, key: str, record: object) -> None:
    """Write a record for all. Raises: TransportError."""
    exchange.put(key, encode_record(record))


def get_record(exchange: Exchange, key: str, kind: type[T], *, limit_s: float) -> T | None:
    """Wait for a record. Raises: TransportError; MalformedJsonError for what another release writes."""
    data = exchange.get(key, limit_s=max(0.0, limit_s))
    try:
        return None if data is None else parse_record(data, kind, limits=DOCUMENT)
    except MalformedJsonError as error:
        raise MalformedJsonError(f"{key} {error}") from error
