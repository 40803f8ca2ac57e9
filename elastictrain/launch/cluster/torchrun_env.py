"""The variables `PET_*`, which torchrun itself would read: what they say of the host and the others.

Source: the arguments of torch.distributed.run; Kubeflow's training operator (v1) and trainer (v2), which set them in each pod.
"""

import re
from dataclasses import dataclass

from elastictrain.launch.cluster.gpus import count
from elastictrain.launch.cluster.variables import Variables, as_whole

_NNODES = re.compile(r"([0-9]{1,9})(?::([0-9]{1,9}))?")
_ASK_THE_GPUS = ("auto", "gpu")
_THIS_HOST = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class TorchrunEnvironment:
    """What is not said is -1 for the order, 0 or empty otherwise."""

    order: int
    num_hosts: int
    """The largest number, where a range is given."""

    least_hosts: int
    processes: int
    master: str
    """Name or address of the host that would be torchrun's master, unless it is this one."""

    conclusions: tuple[str, ...]
    warnings: tuple[str, ...]


def read_torchrun_environment(variables: Variables) -> TorchrunEnvironment:
    """Problems are left in `variables`."""
    conclusions, warnings = [], []
    least, most = _hosts(variables)
    if most:
        name = variables.show("PET_NNODES")
        conclusions.append(f"{count(most, 'host')} ({name})" if least == most else f"{least} to {most} hosts ({name})")
    if 1 < least < most:
        warnings.append(f"PET_NNODES asks for at least {least} hosts: say `launch.min_hosts={least}`, or fewer will train, too")
    order = variables.whole("PET_NODE_RANK")
    if order is not None and most and order >= most:
        variables.refuse("PET_NODE_RANK", f"must be < {most}, the hosts of PET_NNODES, in the environment, but is {order}")
    if order is not None:
        conclusions.append(f"this is host {order} (PET_NODE_RANK={order}), counted from 0")
    processes = _processes(variables)
    if processes:
        conclusions.append(f"{count(processes, 'worker')} ({variables.show('PET_NPROC_PER_NODE')})")
    master = _master(variables)
    return TorchrunEnvironment(
        order=-1 if order is None else order,
        num_hosts=most,
        least_hosts=least,
        processes=processes,
        master="" if order == 0 else other_host(master),
        conclusions=tuple(conclusions),
        warnings=tuple(warnings),
    )


def other_host(name: str) -> str:
    """The name, unless it means this host; then nothing."""
    return "" if name in _THIS_HOST else name


def _hosts(variables: Variables) -> tuple[int, int]:
    if not variables.first("PET_NNODES"):
        return 0, 0
    text = variables.text("PET_NNODES")
    match = _NNODES.fullmatch(text)
    least = int(match[1]) if match else 0
    most = int(match[2] or match[1]) if match else 0
    if not 1 <= least <= most:
        message = f"must be a number of hosts >= 1, or a range like 1:4, in the environment, but is {text!r}"
        variables.refuse("PET_NNODES", message)
        return 0, 0
    return least, most


def _processes(variables: Variables) -> int:
    text = variables.text("PET_NPROC_PER_NODE")
    if not variables.first("PET_NPROC_PER_NODE") or text in _ASK_THE_GPUS:
        return 0
    number = as_whole(text)
    if not number:
        message = f"must be a whole number >= 1, `auto` or `gpu` in the environment, but is {text!r}"
        variables.refuse("PET_NPROC_PER_NODE", message)
        return 0
    return number


def _master(variables: Variables) -> str:
    if variables.text("PET_MASTER_ADDR"):
        return variables.text("PET_MASTER_ADDR")
    host, colon, _ = variables.text("PET_RDZV_ENDPOINT").rpartition(":")
    return host.strip("[]") if colon else variables.text("PET_RDZV_ENDPOINT")
