"""The environment of workers, as torchrun would set it."""

from contextlib import suppress

from elastictrain.bounded_json import MalformedJsonError, encode_record, parse_record
from elastictrain.identity import (
    FOLDER,
    GENERATION,
    LAUNCHER,
    NOTHING_POISONED,
    POISONED,
    RECOVERY,
    RESTARTED,
    STORE_HOST,
    RecoveryPlan,
)
from elastictrain.launch.membership.records import Generation
from elastictrain.preflight.transport.settings import OWN_VARIABLES

_LOOPBACK = "127.0.0.1"


def plan_workers(
    generation: Generation, host: str, *, folder: str, pid: int, restarted: bool, recovery: RecoveryPlan | None = None
) -> list[dict[str, str]]:
    """The environments of a member's workers, as torchrun would set them, to add to the launcher's own.
    `folder` and `pid` are the launcher's."""
    members = generation.members
    index = next(place for place, member in enumerate(members) if member.host == host)
    first_rank, count = generation.first_rank(host), members[index].processes
    common = {
        "WORLD_SIZE": str(generation.world_size),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(index),
        "GROUP_WORLD_SIZE": str(len(members)),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(generation.world_size),
        # A single host needs no network, not even its own address.
        "MASTER_ADDR": _LOOPBACK if len(members) == 1 else members[0].address,
        "MASTER_PORT": str(generation.master_port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCHER: str(pid),
        GENERATION: str(generation.number),
        RESTARTED: "1" if restarted else "0",
        FOLDER: folder,
        STORE_HOST: members[0].name,
        RECOVERY: encode_record(recovery).decode() if recovery is not None else "",
        POISONED: encode_record(generation.poisoned).decode() if generation.poisoned != NOTHING_POISONED else "",
    }
    ranks = [(str(first_rank + local_rank), str(local_rank)) for local_rank in range(count)]
    return [{**common, "RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": local} for rank, local in ranks]


def transport_variables(transport: str) -> dict[str, str]:
    """What the preflight of a worker has set for NCCL and gloo, for one that takes part without such a preflight."""
    if not transport:
        return {}
    with suppress(MalformedJsonError):
        return {**parse_record(transport, dict[str, str]), OWN_VARIABLES: transport}
    return {}
