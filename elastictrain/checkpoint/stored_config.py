"""The configuration that a run keeps in its folder. Whoever reads it takes it as data."""

from elastictrain.config.digest import MOST_BYTES, from_yaml
from elastictrain.errors import ConfigError, ObjectNotFoundError, ObjectTooLargeError
from elastictrain.storage.bounded_read import read_bounded
from elastictrain.storage.store import Store

CONFIG_NAME = "config.yaml"


def read_stored_config(run: Store) -> dict[str, object] | None:
    """The tree in the run's config.yaml; None if there is none.

    Raises: ConfigError if it is not what a run writes; StorageError.
    """
    try:
        data = read_bounded(run, CONFIG_NAME, most_bytes=MOST_BYTES)
    except ObjectNotFoundError:
        return None
    except ObjectTooLargeError as error:
        raise ConfigError(f"{error}: it is not the configuration that a run wrote") from error
    return from_yaml(data, source=f"{run.url}/{CONFIG_NAME}")
