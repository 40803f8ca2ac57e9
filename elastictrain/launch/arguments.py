"""From a generation to one host's torchrun. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastictrain.fault.stop import STOP_FILE_VARIABLE
from elastictrain.identity import FOLDER, GENERATION, LAUNCHER, RESTARTED, STORE_HOST
from elastictrain.launch.membership.records import Generation
from elastictrain.launch.orders import ANSWER_NAME, Orders

_LOOPBACK = "127.0.0.1"
_MONITOR_INTERVAL_S = 0.1
_LIMIT_MARGIN_S = 60


@dataclass(frozen=True, slots=True)
class HostContext:
    """What only this host knows."""

    host: str
    address: str
    pid: int
    folder: str
    """For words between the launcher and the workers of one generation."""

    run_arguments: tuple[str, ...]
    """As on the launcher's command line."""

    restarted: bool
    stop_file: str
    rendezvous_limit_s: float


def plan_torchrun(generation: Generation, here: HostContext) -> Orders:
    """The torchrun of this host, which must be a member."""
    members = generation.members
    index = next(place for place, member in enumerate(members) if member.host == here.host)
    # A single host needs no network, not even its own address.
    alone = len(members) == 1
    arguments: Sequence[str] = (
        *("--nnodes", str(len(members))),
        *("--node-rank", str(index)),
        *("--nproc-per-node", str(members[index].processes)),
        *("--master-addr", _LOOPBACK if alone else members[0].address),
        *("--master-port", str(generation.master_port)),
        *("--local-addr", _LOOPBACK if alone else here.address),
        # Its own limit of 600 s ends by a sentence that names nobody: ours comes first.
        *("--rdzv-conf", f"timeout={math.ceil(here.rendezvous_limit_s) + _LIMIT_MARGIN_S}"),
        # What follows an end is decided by the hosts together, not by each torchrun for itself.
        *("--max-restarts", "0"),
        *("--monitor-interval", str(_MONITOR_INTERVAL_S)),
        # Else it leaves empty folders in the one for temporary files.
        *("--log-dir", f"{here.folder}/torchrun"),
        *("-m", "elastictrain.run"),
        *here.run_arguments,
    )
    environment = {
        LAUNCHER: str(here.pid),
        GENERATION: str(generation.number),
        RESTARTED: "1" if here.restarted else "0",
        FOLDER: here.folder,
        STORE_HOST: members[0].name,
        STOP_FILE_VARIABLE: here.stop_file,
    }
    return Orders(
        tuple(arguments),
        environment,
        answer_file=f"{here.folder}/{ANSWER_NAME}",
        processes=members[index].processes,
        hosts=tuple(member.name for member in members),
        limit_s=here.rendezvous_limit_s,
    )
