"""The run's folder: what must hold before anything is written to it, and the configuration kept in it."""

from elastictrain.checkpoint.run_folder import CONFIG_NAME, read_stored_config
from elastictrain.config.composed import RunConfig
from elastictrain.config.digest import changed_answers, to_yaml
from elastictrain.errors import ConfigError, ObjectNotFoundError, Problem, StorageError
from elastictrain.storage.local import LocalStore
from elastictrain.storage.opening import check_writable
from elastictrain.storage.store import Store
from elastictrain.train.task import HasNeutralOptions, Task


def check_run_folder(store: Store, config: RunConfig, *, task: Task, try_writing: bool = True) -> None:
    """The folder takes writes, if that is to be tried, and this configuration continues what is in it.

    Raises: StorageError; ConfigError that names the keys which would change the answer.
    """
    try:
        if try_writing:
            check_writable(store)
    except StorageError as error:
        raise type(error)(f"`run.dir` cannot be used: {error}. Set run.dir to another place, or mend this one.") from error
    if isinstance(store, LocalStore):
        store.sweep_temporaries("checkpoints")
    stored = read_stored_config(store)
    if stored is None or config.run.on_change == "continue":
        return
    neutral = task.neutral_options if isinstance(task, HasNeutralOptions) else ()
    changes = changed_answers(stored, now=config, neutral=neutral)
    # Listed only here: an ordinary start has changed nothing.
    if changes and any(info.key.startswith("checkpoints/step-") for info in store.list("checkpoints")):
        advice = "the run in `run.dir` has checkpoints; put it back, choose another run.dir, or set run.on_change=continue"
        raise ConfigError(
            [Problem(key, f"was {before!r} when the run began and is {now!r} now: {advice}") for key, before, now in changes]
        )


def store_config(store: Store, config: RunConfig) -> None:
    """Keep the resolved configuration with the run, if it is not there already."""
    data = to_yaml(config).encode()
    try:
        there = store.read(CONFIG_NAME, end=len(data) + 1) == data
    except ObjectNotFoundError:
        there = False
    if not there:
        store.write(CONFIG_NAME, data)
