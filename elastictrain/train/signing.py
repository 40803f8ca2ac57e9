"""The key that signs the checkpoints of a run."""

import torch.distributed as dist

from elastictrain.checkpoint.exchange import gather_json
from elastictrain.checkpoint.signing import SigningKey, load_key, proof_of
from elastictrain.config.composed import RunConfig
from elastictrain.errors import ConfigError, Problem

_KEY = "checkpoint.key_env"


def signing_key(config: RunConfig) -> SigningKey | None:
    """The key in the environment of this process; None if none is asked for. Raises: ConfigError if it is none."""
    try:
        return load_key(config.checkpoint.key_env)
    except ValueError as error:
        raise ConfigError([Problem(_KEY, str(error))]) from error


def agreed_key(config: RunConfig, *, group: dist.ProcessGroup | None) -> SigningKey | None:
    """The same, where all ranks have the same. Collective: yes. Raises: ConfigError on all of them if not."""
    key = signing_key(config)
    if key is None:
        return None
    proofs = gather_json(proof_of(key), group=group)
    others = [rank for rank, proof in enumerate(proofs) if proof != proofs[0]]
    if others:
        message = f"must name the same secret on all hosts, but {key.name} of rank {others[0]} is another"
        raise ConfigError([Problem(_KEY, message)])
    return key
