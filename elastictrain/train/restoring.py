"""What a run goes on from: its checkpointer, and its state as it was saved."""

import time
from collections.abc import Callable

from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.checkpoint.earlier_commits import JobMemory
from elastictrain.checkpoint.lineage import number_of
from elastictrain.checkpoint.manifest import counters_of
from elastictrain.checkpoint.memory_restore import MemoryRestore
from elastictrain.config.composed import RunConfig
from elastictrain.config.digest import config_digest
from elastictrain.errors import DataError, Problem
from elastictrain.events import Resume
from elastictrain.identity import Identity
from elastictrain.train.bringup import Started
from elastictrain.train.signing import agreed_key
from elastictrain.train.state import TrainState


def make_checkpointer(config: RunConfig, identity: Identity, started: Started) -> Checkpointer:
    """The checkpointer of this rank. Collective: yes. Raises: ConfigError if ranks have no key, or not all the same one."""
    signing = agreed_key(config, group=started.group.control)
    job = started.met.job.read() if identity.rank == 0 else JobMemory()
    return Checkpointer(
        started.store,
        options=config.checkpoint,
        group=started.group.control,
        rank=identity.rank,
        world_size=identity.world_size,
        incarnation=started.met.incarnation.name,
        config_digest=config_digest(config),
        record=started.met.journal.record,
        job=job,
        generation=number_of(started.met.incarnation.name),
        signing=signing,
    )


def restore(
    checkpointer: Checkpointer, state: TrainState, *, on_change: str, recall: MemoryRestore | None, reset: Callable[[], None]
) -> Resume:
    """Load the newest state in any tier into `state`; with `on_change` stop it must have been trained on the same data.

    `reset` gives the tensors their first values again, where a fresh start follows a state that was damaged.
    Collective: yes. Raises: CheckpointError, ConfigError, StorageError; DataError if the data is not the same.
    """
    began = time.monotonic()
    result = checkpointer.restore(tensors=state.tensors(), reset=reset, recall=recall)
    if result is None:
        seconds = {"total": round(time.monotonic() - began, 4)}
        return Resume(step=0, tier="none", checkpoint=None, bytes=0, seconds=seconds)
    # The restore has taken no state whose counters are not sound.
    counters = counters_of(result.state, step=result.step)
    state.adopt(counters)
    before = counters.data_digest
    if before is not None and before != state.data_digest and on_change == "stop":
        message = (
            f"holds other data (digest {state.data_digest}) than {result.checkpoint} was trained on ({before}); put it back, "
            "or set run.on_change=continue"
        )
        raise DataError([Problem("data.path", message)])
    return Resume(step=state.step, tier=result.tier, checkpoint=result.checkpoint, bytes=result.bytes, seconds=result.seconds)
