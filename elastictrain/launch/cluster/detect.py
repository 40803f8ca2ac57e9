"""Which of the clusters a launcher is on, where several have left their traces."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from elastictrain.errors import ConfigError, Problem
from elastictrain.launch.cluster.kubernetes import is_kubernetes, read_kubernetes
from elastictrain.launch.cluster.place import ClusterPlace, Probes
from elastictrain.launch.cluster.plain import HOSTS_KEY, read_plain
from elastictrain.launch.cluster.runai import is_runai, read_runai
from elastictrain.launch.cluster.slurm import is_slurm, read_slurm
from elastictrain.launch.cluster.vast import is_vast, read_vast

_PODS = ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE")
_RANKS = ("RANK", "WORLD_SIZE")
_NOBODY = Probes()


def detect(environment: Mapping[str, str], probes: Probes = _NOBODY, *, hosts: Sequence[str] = ()) -> ClusterPlace:
    """Where this launcher is. `hosts` is the list that a person gave; it comes before every environment.

    Slurm comes before Kubernetes, because it runs inside of it and numbers its own hosts; RunAI before Kubernetes, which it is
    made of; Kubernetes before Vast.

    Raises: ConfigError with every variable that is wrong or contradicts another; and if torchrun started this process.
    """
    _refuse_torchrun(environment)
    if hosts:
        place = read_plain(environment, probes=probes, hosts=hosts)
        others = [name for name, is_there in _signs(environment) if is_there]
        return _aside(place, [f"`{HOSTS_KEY}` is given, so that {name} is not asked" for name in others])
    place, not_read = _read(environment, probes)
    aside = [name for name in not_read if name in environment]
    if not aside:
        return place
    why = "Slurm says where this host is" if place.kind == "slurm" else "outside of Kubernetes they do not number hosts"
    return _aside(place, [f"{', '.join(aside)} of the environment are left aside: {why}"])


def _read(environment: Mapping[str, str], probes: Probes) -> tuple[ClusterPlace, tuple[str, ...]]:
    """The place, and the variables that may be there without being read."""
    if is_slurm(environment):
        return read_slurm(environment), (*_PODS, *_RANKS)
    if is_runai(environment):
        return read_runai(environment), ()
    if is_kubernetes(environment):
        return read_kubernetes(environment), ()
    if is_vast(environment):
        return read_vast(environment, probes=probes), _RANKS
    return read_plain(environment, probes=probes), _RANKS


def _signs(environment: Mapping[str, str]) -> tuple[tuple[str, bool], ...]:
    return (
        ("Slurm", is_slurm(environment)),
        ("RunAI", is_runai(environment)),
        ("Kubernetes", is_kubernetes(environment) and not is_runai(environment)),
        ("Vast", is_vast(environment)),
    )


def _aside(place: ClusterPlace, warnings: Sequence[str]) -> ClusterPlace:
    return replace(place, warnings=(*place.warnings, *warnings))


def _refuse_torchrun(environment: Mapping[str, str]) -> None:
    """A launcher for each worker would be the result.

    RunAI sets LOCAL_RANK=0 in each pod beside a RANK that numbers pods: that is a host, and no worker.
    """
    in_pod = is_kubernetes(environment) or is_runai(environment)
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment
    by_another = all(name in environment for name in ("LOCAL_RANK", *_RANKS))
    if by_torchrun or (by_another and not (in_pod and environment["LOCAL_RANK"] == "0")):
        name = "TORCHELASTIC_RUN_ID" if by_torchrun else "LOCAL_RANK"
        message = (
            f"must not be set where the launcher starts, but is {environment[name]!r}: it starts torchrun itself; use"
            " `python -m elastictrain.launch ...` once per host, or `torchrun ... -m elastictrain.run ...`"
        )
        raise ConfigError([Problem(name, message)])
