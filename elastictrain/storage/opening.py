"""Opens the store of a URL."""

import os
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TypeVar, cast

from elastictrain.errors import ConfigError, ObjectExistsError, PermanentStorageError, StorageError, TransientStorageError
from elastictrain.storage.azure import AzureBackend
from elastictrain.storage.failures import Retrying, RetryOptions
from elastictrain.storage.filesystem import FilesystemBackend
from elastictrain.storage.gcs import GcsBackend
from elastictrain.storage.local import LOCAL_PROTOCOLS, SECRET, LocalStore, local_path
from elastictrain.storage.remote import Backend, RemoteStore
from elastictrain.storage.s3 import S3Backend
from elastictrain.storage.store import ObjectInfo, Store

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}
_BACKENDS: dict[str, Callable[[str, float], Backend]] = {"s3fs": S3Backend, "gcsfs": GcsBackend, "adlfs": AzureBackend}

T = TypeVar("T")
Step = Callable[[str], AbstractContextManager[None]]


def open_store(url: str, *, retry: RetryOptions | None = None, follow_links: bool = False) -> Store:
    """Open the store at a path or URL. Touches neither disk nor network: `check_writable` does.

    `follow_links`: local objects may be links to files that are only read, as in a folder that a user has put together.
    Raises: ConfigError if the URL is malformed, its protocol unknown, or the package for it not installed.
    """
    options = retry or RetryOptions()
    retrying, name = Retrying(options), url.rstrip("/") or "/"
    if (path := local_path(url)) is not None:
        return LocalStore(path, url=name, retrying=retrying, follow_links=follow_links)
    protocol, _, rest = url.partition("://")
    if protocol in LOCAL_PROTOCOLS:
        raise ConfigError(f"{url!r} must be {protocol}:// and an absolute path, as in {protocol}:///data/run")
    if not rest.strip("/"):
        raise ConfigError(f"{url!r} names no bucket; it must be like {protocol}://bucket/folder")
    import fsspec

    package = _PACKAGES.get(protocol)
    try:
        root = str(fsspec.get_filesystem_class(protocol)._strip_protocol(url)).rstrip("/")
    except ValueError:
        raise ConfigError(
            f"{url!r} has the unknown protocol {protocol!r}; it must be a path, file://, s3://, gs://, az:// or another "
            "protocol that fsspec knows"
        ) from None
    except ImportError as error:
        remedy = f"pip install {package}" if package else str(error)
        raise ConfigError(f"{url!r} needs a package that is not installed; run: {remedy}") from error
    kind = _BACKENDS.get(package or "", FilesystemBackend)
    return RemoteStore(root, url=name, backend=lambda: kind(url, options.answer_timeout_s), retrying=retrying)


def absolute_url(url: str) -> str:
    """Make a path absolute, so that the URL means the same in every process."""
    return url if "://" in url else os.path.abspath(os.path.expanduser(url))  # noqa: PTH100, PTH111


def without_sync(store: T) -> T:
    """The same store for objects that need not survive a power loss: local writes do not wait for the disk."""
    return cast(T, store.without_sync()) if isinstance(store, LocalStore) else store


def is_blocked(store: Store, key: str) -> bool:
    """See `LocalStore.is_blocked`; False for an object store, which has no such conflicts. Raises: StorageError."""
    return isinstance(store, LocalStore) and store.is_blocked(key)


def create_secret(store: Store, key: str, data: bytes) -> None:
    """Like `Store.create`, but only this user can read a local file. An object store applies its own permissions."""
    if isinstance(store, LocalStore):
        store.create(key, data, mode=SECRET)
    else:
        store.create(key, data)


def read_secret(store: Store, key: str, *, max_bytes: int) -> bytes:
    """Read an object of `create_secret`. Raises: StorageError; AccessDeniedError for a file that may belong to another user."""
    return store.read_secret(key, max_bytes=max_bytes) if isinstance(store, LocalStore) else store.read(key)


def why_others_may_write(store: Store, key: str) -> str:
    """Who besides this user and root may have written the object or its folders, as far as they exist; '' if nobody.
    An object store does not say who may. Raises: StorageError."""
    if not isinstance(store, LocalStore):
        return f"{store.url} does not say who may write to it"
    return store.who_else_may_write(key)


def check_writable(store: Store, *, key: str = "", step: Step = lambda _: nullcontext()) -> list[ObjectInfo]:
    """Test an object's round trip, so that a run fails at its start and not at its first checkpoint.

    The object is created, cannot be created again, is replaced, read back, listed and deleted; nothing remains, also after a
    failure. Returns the listing of its folder. `step` is entered with the name of each step.
    Raises: StorageError, whose message names the remedy.
    """
    store, key = without_sync(store), key or f"probe-{secrets.token_hex(8)}/object"
    data, created = b"This object may be deleted.\n", False
    try:
        with step("create"):
            store.create(key, b"This object is replaced.\n")
        created = True
        with step("create again"), suppress(ObjectExistsError):
            store.create(key, b"This must not be written.\n")
            raise PermanentStorageError(
                f"{store.url}: creating an object that exists must fail, but succeeded; the service ignores the condition "
                "(If-None-Match, or ifGenerationMatch=0), so a checkpoint could be replaced unnoticed; use another service or "
                "a newer version of it"
            )
        with step("replace"):
            store.write(key, data)
        with step("read"):
            found = store.read(key)
            if found != data:
                raise PermanentStorageError(
                    f"{store.url}/{key} must be read back as it was written, but {len(found)} other bytes came; "
                    "use another store"
                )
        with step("list"):
            listed = list(store.list(key.rpartition("/")[0]))
            if key not in {info.key for info in listed}:
                raise PermanentStorageError(
                    f"{store.url}: an object just written must be listed, but was not listed; use another store"
                )
        with step("delete"):
            store.delete(key)
    except BaseException as error:
        # A store that did not answer the first request would block this one as long.
        if created or not isinstance(error, TransientStorageError):
            with suppress(StorageError):
                store.delete(key)
        raise
    return listed
