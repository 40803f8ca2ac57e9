"""From a URL to a store."""

import os
import secrets
from typing import TypeVar, cast
from urllib.parse import unquote

from elastictrain.errors import ConfigError, ObjectExistsError, PermanentStorageError
from elastictrain.storage.azure import AzureBackend
from elastictrain.storage.failures import Retrying, RetryOptions
from elastictrain.storage.filesystem import FilesystemBackend
from elastictrain.storage.gcs import GcsBackend
from elastictrain.storage.local import LocalStore
from elastictrain.storage.remote import Backend, RemoteStore
from elastictrain.storage.s3 import S3Backend
from elastictrain.storage.store import Store

_EXTRA_OF_PROTOCOL = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}

T = TypeVar("T")


def open_store(url: str, *, retry: RetryOptions | None = None, follow_links: bool = False) -> Store:
    """The store at a path or URL. Touches neither disk nor network: `check_writable` does.

    `follow_links`: on this host objects may be links to files that are only read; for what a user has put together.

    Raises: ConfigError if the URL is malformed, its protocol unknown, or the package for it not installed.
    """
    options = retry or RetryOptions()
    retrying, name = Retrying(options), url.rstrip("/") or "/"
    protocol, separator, rest = url.partition("://")
    if not separator or protocol in ("file", "local"):
        if separator and not rest.startswith("/"):
            raise ConfigError(f"{url!r} must be {protocol}:// and an absolute path, as in {protocol}:///data/run")
        root = unquote(rest) if separator else absolute_url(url)
        return LocalStore(root, url=name, retrying=retrying, follow_links=follow_links)
    if not rest.strip("/"):
        raise ConfigError(f"{url!r} names no bucket; it must be like {protocol}://bucket/folder")
    root = _remote_root(url, protocol)

    def connect() -> Backend:
        match _EXTRA_OF_PROTOCOL.get(protocol):
            case "s3":
                return S3Backend(answer_timeout_s=options.answer_timeout_s)
            case "gcs":
                return GcsBackend(answer_timeout_s=options.answer_timeout_s)
            case "azure":
                return AzureBackend(url, answer_timeout_s=options.answer_timeout_s)
        return FilesystemBackend(url, answer_timeout_s=options.answer_timeout_s)

    return RemoteStore(root, url=name, backend=connect, retrying=retrying)


def absolute_url(url: str) -> str:
    """What the URL means, wherever the process that reads it runs: a path becomes absolute."""
    return url if "://" in url else os.path.abspath(os.path.expanduser(url))  # noqa: PTH100, PTH111


def _remote_root(url: str, protocol: str) -> str:
    """What the client of the protocol calls the path of the URL."""
    import fsspec

    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise ConfigError(
            f"{url!r} has the unknown protocol {protocol!r}; it must be a path, file://, s3://, gs://, az:// or another "
            "protocol that fsspec knows"
        ) from None
    except ImportError as error:
        extra = _EXTRA_OF_PROTOCOL.get(protocol)
        remedy = f'pip install "elastictrain[{extra}]"' if extra else str(error)
        raise ConfigError(f"{url!r} needs a package that is not installed; run: {remedy}") from error
    return str(kind._strip_protocol(url)).rstrip("/")


def without_sync(store: T) -> T:
    """The same store for what need not outlast a loss of power: it does not wait for a disk."""
    return cast(T, store.without_sync()) if isinstance(store, LocalStore) else store


def is_blocked(store: Store, key: str) -> bool:
    """Whether the object can be neither there nor written, since something else has its name or that of its folder.

    Only a file system knows such things. Raises: StorageError, also if something else has the name of a folder further up.
    """
    return isinstance(store, LocalStore) and store.is_blocked(key)


def create_secret(store: Store, key: str, data: bytes) -> None:
    """Like `Store.create`; a file is one that this user alone can read. In an object store its permissions decide."""
    if isinstance(store, LocalStore):
        store.create_secret(key, data)
    else:
        store.create(key, data)


def read_secret(store: Store, key: str, *, most_bytes: int) -> bytes:
    """What `create_secret` made. Raises: StorageError; AccessDeniedError for a file that may be of another user."""
    return store.read_secret(key, most_bytes=most_bytes) if isinstance(store, LocalStore) else store.read(key)


def check_writable(store: Store) -> None:
    """Creates, reads, lists and deletes a small object, so that a run finds out at its start and not at its first checkpoint.

    Raises: StorageError, whose message says what to do.
    """
    folder, data = f"probe-{secrets.token_hex(8)}", b"This object may be deleted.\n"
    key = f"{folder}/object"
    store = without_sync(store)
    store.create(key, data)
    try:
        found = store.read(key)
        listed = [info.key for info in store.list(folder)]
        if found != data or listed != [key]:
            raise PermanentStorageError(
                f"{store.url}: an object just written must be listed and read back as it is, but was "
                f"{'read back' if listed else 'not listed'} ({len(found)} of {len(data)} bytes); use another store"
            )
        try:
            store.create(key, b"Another content.\n")
        except ObjectExistsError:
            return
        raise PermanentStorageError(
            f"{store.url}: creating an object that exists must fail, but succeeded; the service ignores the condition "
            "(If-None-Match, or ifGenerationMatch=0), so a checkpoint could be replaced unnoticed; use another service or a "
            "newer version of it"
        )
    finally:
        store.delete(key)
