"""The run folder in storage: whether it still exists, and the stored configuration, which readers take as data."""

import os
from pathlib import Path

from elastictrain.config.digest import MOST_BYTES, from_yaml
from elastictrain.errors import ConfigError, ObjectNotFoundError, ObjectTooLargeError, PermanentStorageError, StorageError
from elastictrain.storage.bounded_read import exists, read_bounded
from elastictrain.storage.local import LocalStore
from elastictrain.storage.store import Store

CONFIG_NAME = "config.yaml"


def read_stored_config(run: Store) -> dict[str, object] | None:
    """The run's config.yaml, None if it does not exist. Raises: ConfigError if no run wrote it like that; StorageError."""
    try:
        data = read_bounded(run, CONFIG_NAME, max_bytes=MOST_BYTES)
    except ObjectNotFoundError:
        return None
    except ObjectTooLargeError as error:
        raise ConfigError(f"{error}: it is not the configuration that a run wrote") from error
    return from_yaml(data, source=f"{run.url}/{CONFIG_NAME}")


class RunFolder:
    """The folder of one run; remembers the file system that it was on."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._path = Path(store.root) if isinstance(store, LocalStore) else None
        self._device = None if self._path is None else device_of(self._path)

    def is_there(self) -> bool:
        """False if it was deleted. Raises: PermanentStorageError if the file system that it was on is not mounted."""
        if still_there(self._store):
            self._device = self._device_now()
            return True
        if self._device is not None and self._device_now() != self._device:
            raise PermanentStorageError(
                f"{self._store.url} is not there, and neither is the file system that it was on: mount that again"
            )
        return False

    def _device_now(self) -> int | None:
        """Device of the folder or of its nearest existing parent; None in a bucket, or if unknown."""
        if self._path is None:
            return None
        return next((found for one in (self._path, *self._path.parents) if (found := device_of(one)) is not None), None)


def device_of(path: Path) -> int | None:
    try:
        return os.stat(path).st_dev  # noqa: PTH116
    except OSError:
        return None


def still_there(store: Store) -> bool:
    """Whether storage holds anything of the run; true if storage fails."""
    try:
        return exists(store, CONFIG_NAME) or next(iter(store.list("events")), None) is not None
    except StorageError:
        # Unknown; an attempt to save does no harm.
        return True
