"""Check `shared_memory`: room in host memory for snapshots, and for what ranks of one host tell each other."""

from dataclasses import dataclass

from elastictrain.preflight.host.gibibytes import MIB, in_gib
from elastictrain.preflight.host.mounts import read_mounts
from elastictrain.preflight.host.space import Space, read_space
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Reporter, Verdict

CONTAINER_BYTES = 64 * MIB
"""What Docker, containerd and Kubernetes give a container unless they are told otherwise. Source: `docker run --shm-size`."""

LEAST_BYTES = 16 * MIB
"""Below it NCCL and gloo cannot set up their buffers between ranks of one host."""

_SUGGESTED_BYTES = 16 << 30
_MEMORY_KINDS = ("tmpfs", "ramfs", "hugetlbfs")


@dataclass(frozen=True, slots=True)
class SharedMemoryFacts:
    """The folder `checkpoint.memory_dir`, and the room it has, if known."""

    folder: str
    space: Space | None


def read_shared_memory(surroundings: Surroundings, *, memory_dir: str) -> SharedMemoryFacts:
    """Asks the file system."""
    return SharedMemoryFacts(memory_dir, read_space(memory_dir, mounts=read_mounts(surroundings)))


def judge_shared_memory(facts: SharedMemoryFacts, *, host: str) -> Verdict:
    """A run can go on with little of it, but keeps no snapshots in memory then."""
    report, space, folder = Reporter("shared_memory", host), facts.space, facts.folder
    elsewhere = "or set checkpoint.memory_dir to a tmpfs"
    if space is None:
        return report.warned(f"nothing known of {folder}", remedy=f"look at it on {host}: `df -h {folder}`, {elsewhere}")
    size, unit = _SUGGESTED_BYTES >> 30, f"GiB free in {folder}"
    larger = (
        f"give {folder} on {host} {size} GiB: `docker run --shm-size={size}g`, in Kubernetes an "
        f"emptyDir with `medium: Memory` on {folder}, on a plain host `mount -o remount,size={size}g {folder}`"
    )
    free, expected = in_gib(space.free_bytes), in_gib(LEAST_BYTES)
    if space.kind is not None and space.kind not in _MEMORY_KINDS:
        measured = f"{folder} is on {space.kind}"
        remedy = f"mount a tmpfs: `mount -t tmpfs tmpfs {folder}`, {elsewhere} such as /dev/shm"
        return report.warned(measured, expected="a file system in memory", remedy=remedy)
    if space.free_bytes < LEAST_BYTES:
        remedy = f"`ls -la {folder}` shows what fills it on {host}: remove what dead processes left; {larger}"
        return report.failed(free, expected=expected, unit=unit, remedy=remedy)
    if space.total_bytes <= CONTAINER_BYTES:
        return report.warned(free, expected=size, unit=unit, remedy=larger)
    return report.passed(free, expected=expected, unit=unit)
