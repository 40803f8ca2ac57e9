"""What a run goes on from: its checkpointer, and its state as it was saved."""

import time
from collections.abc import Callable

from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.checkpoint.earlier_commits import JobMemory
from elastictrain.checkpoint.exchange import gather_json
from elastictrain.checkpoint.lineage import number_of
from elastictrain.checkpoint.manifest import counters_of
from elastictrain.checkpoint.memory_restore import MemoryRestore
from elastictrain.checkpoint.signing import SigningKey, proof_of
from elastictrain.config.digest import config_digest
from elastictrain.errors import ConfigError, DataError, Problem
from elastictrain.events import Resume
from elastictrain.train.checks import signing_key
from elastictrain.train.context import TrainContext
from elastictrain.train.state import TrainState


def make_checkpointer(context: TrainContext) -> Checkpointer:
    """The checkpointer of this rank. Collective: yes. Raises: ConfigError if ranks have no key, or not all the same one."""
    config, identity, incarnation = context.config, context.identity, context.generation.name
    return Checkpointer(
        context.store,
        options=config.checkpoint,
        group=context.group.control,
        rank=identity.rank,
        world_size=identity.world_size,
        incarnation=incarnation,
        config_digest=config_digest(config),
        record=context.journal.record,
        job=context.job.read() if identity.rank == 0 else JobMemory(),
        generation=number_of(incarnation),
        signing=_agreed_key(context),
    )


def _agreed_key(context: TrainContext) -> SigningKey | None:
    """The key that signs checkpoints, where all ranks have the same one. Collective: yes. Raises: ConfigError on all if not."""
    key = signing_key(context.config)
    if key is None:
        return None
    proofs = gather_json(proof_of(key), group=context.group.control)
    others = [rank for rank, proof in enumerate(proofs) if proof != proofs[0]]
    if others:
        message = f"must name the same secret on all hosts, but {key.name} of rank {others[0]} is another"
        raise ConfigError([Problem("checkpoint.key_env", message)])
    return key


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
