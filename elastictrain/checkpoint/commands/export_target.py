"""Where an export goes: a folder or a file that must not be there yet."""

import os
from dataclasses import dataclass

from elastictrain.checkpoint.commands.location import split_url
from elastictrain.checkpoint.second_look import is_there
from elastictrain.errors import UsageError
from elastictrain.storage.local import LocalStore
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """A folder (`file` is empty), or one file in it."""

    url: str
    """As the person wrote it."""

    store: Store
    file: str = ""

    def clear(self) -> None:
        """Deletes what an export has written so far. Raises: StorageError."""
        for info in [] if self.file else list(self.store.list()):
            self.store.delete(info.key)


def folder_target(url: str) -> ExportTarget:
    """An empty folder.

    Raises: UsageError if anything is in it, as a file of an earlier export could be taken for a part of this one; ConfigError;
        StorageError.
    """
    store = open_store(url)
    if (present := next(iter(store.list()), None)) is not None:
        raise UsageError(f"{store.url} must be empty, but holds {present.key}; choose another folder, or delete it")
    return ExportTarget(url, store)


def file_target(url: str) -> ExportTarget:
    """A file that does not exist. Raises: UsageError; ConfigError; StorageError."""
    name, parent = split_url(url)
    if not name or url.endswith("/"):
        raise UsageError(f"--to torch writes one file, so OUT must be the name of a file, but is {url}")
    store = open_store(parent)
    folder_there = isinstance(store, LocalStore) and os.path.isdir(store.path(name))  # noqa: PTH112
    if folder_there or next(iter(store.list(name)), None) is not None:
        raise UsageError(f"--to torch writes one file, but {url} is a folder; give a name such as {url}/checkpoint.pt")
    if is_there(store, name):
        raise UsageError(f"{url} must not exist, but does; choose another name, or delete it")
    return ExportTarget(url, store, name)
