"""Lets planned faults happen to a fleet, on real processes and networks. Which comes when is decided elsewhere."""

import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from elastictrain.chaos.damage import flip_in_memory, flip_in_storage, replica_ranks
from elastictrain.chaos.fleet import FleetHost, LauncherFleet, processes_on, workers
from elastictrain.chaos.fleet_faults import LAUNCHER_BACK_S, OTHER_CODE_S
from elastictrain.chaos.in_process import HostControl, StorageFault
from elastictrain.chaos.network.hosts import VirtualHost, VirtualNetwork
from elastictrain.chaos.network.links import lose, lose_nothing
from elastictrain.chaos.plan import ChaosKind, PlannedFault
from elastictrain.chaos.processes import SOURCES, StuckError, rank_of, savers, send_signal, wait_until
from elastictrain.errors import ElasticTrainError

K = ChaosKind
_DIGESTED_WITHIN_S = 10.0
_KILLED_WITHIN_S = 60.0

NEEDS_HOSTS = frozenset((K.CABLE, K.ONE_WAY, K.FULL_DISK, K.FLIP_REPLICA, K.PARTITION, K.BLIP, K.WRONG_VERSION))
"""Kinds that need hosts of their own, or a disk of their own."""


class NoTargetError(ElasticTrainError):
    """What a fault is to strike is not there now."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that has happened. `repair` is due after `lasts_s`; `rank` is that of the struck worker, -1 if it is none's."""

    repair: Callable[[], None] | None = None
    lasts_s: float = 0.0
    rank: int = -1
    taken_s: float | None = None  # when the host is taken away that was told to leave
    absent: tuple[str, ...] = ()  # hosts that are away until the repair


@dataclass(slots=True)
class Injectors:
    """A run's fleet with all that can be done to it. `network` and `disk` are None where this is the only host."""

    fleet: LauncherFleet
    hosts: Mapping[str, FleetHost]
    controls: Mapping[str, HostControl]
    folder: Path
    pause_s: float
    network: VirtualNetwork | None = None
    disk: Path | None = None  # a small one that the run folder is on
    damaged: set[int] = field(default_factory=set)  # steps whose checkpoint is spoilt

    def start(self, name: str, *, sources: Path = SOURCES) -> None:
        """The launcher of a host, unless one lives there: it would refuse another one of its run."""
        if self.fleet.lives(name):
            return
        variables = self.controls[name].environment(hooks=self.folder / "hooks", sources=sources, pause_s=self.pause_s)
        self.fleet.start(self.hosts[name], environment=variables)

    def strike(self, fault: PlannedFault) -> Strike:
        """Raises: NoTargetError."""
        return getattr(self, f"_{fault.kind}")(fault)  # type: ignore[no-any-return]

    def take_away(self, name: str) -> None:
        """A host that was told to leave is ended, whatever it still does."""
        self.hosts[name].lose()

    def stop(self, name: str) -> None:
        """Ask a host to leave."""
        send_signal(processes_on(self.hosts[name], "-m", self.fleet.program.module), signal.SIGTERM)

    def _worker(self, fault: PlannedFault) -> tuple[psutil.Process, int]:
        there = workers(self.hosts[fault.host], program=self.fleet.program.worker)
        if fault.worker >= len(there):
            raise NoTargetError(f"{fault.host} has {len(there)} workers now")
        found = there[fault.worker]
        try:
            rank = rank_of(found, program=self.fleet.program.worker)
        except psutil.Error:
            rank = None
        if rank is None:
            raise NoTargetError(f"worker {fault.worker} of {fault.host} has just ended")
        return found, rank

    def _restart(self, *names: str) -> Callable[[], None]:
        def restart() -> None:
            for name in names:
                self.hosts[name].restore()
                self.start(name)

        return restart

    def _kill_worker(self, fault: PlannedFault) -> Strike:
        worker, rank = self._worker(fault)
        send_signal([worker], signal.SIGKILL)
        return Strike(rank=rank)

    def _kill_launcher(self, fault: PlannedFault) -> Strike:
        send_signal(self._launcher(fault.host), signal.SIGKILL)
        wait_until(lambda: not self.fleet.lives(fault.host), timeout_s=_KILLED_WITHIN_S, what="the end of a killed launcher")
        return Strike(self._restart(fault.host), LAUNCHER_BACK_S, absent=(fault.host,))

    def _kill_saver(self, fault: PlannedFault) -> Strike:
        found = savers(self.hosts[fault.host].memory)
        if not found:
            raise NoTargetError(f"{fault.host} has no saver now")
        send_signal(found, signal.SIGKILL)
        return Strike()

    def _freeze(self, fault: PlannedFault) -> Strike:
        frozen = self._present(fault.host)
        send_signal(frozen, signal.SIGSTOP)
        return Strike(lambda: send_signal(frozen, signal.SIGCONT), fault.lasts_s)

    def _hang(self, fault: PlannedFault) -> Strike:
        worker, rank = self._worker(fault)
        self.controls[fault.host].order(worker.pid, "spin" if fault.amount else "hang")
        return Strike(rank=rank)

    def _leave(self, fault: PlannedFault) -> Strike:
        send_signal(self._launcher(fault.host), signal.SIGTERM)
        restart = self._restart(fault.host)

        def another() -> None:
            # The launcher may still wait for the saver, and none of its processes is on another host.
            self.take_away(fault.host)
            restart()

        return Strike(another, fault.lasts_s, taken_s=fault.amount, absent=(fault.host,))

    def _host_lost(self, fault: PlannedFault) -> Strike:
        self._present(fault.host)
        self.hosts[fault.host].lose()
        return Strike(self._restart(fault.host), fault.lasts_s, absent=(fault.host,))

    def _launcher(self, name: str) -> list[psutil.Process]:
        return self._present(name, "-m", self.fleet.program.module)

    def _present(self, name: str, *words: str) -> list[psutil.Process]:
        found = processes_on(self.hosts[name], *words)
        if not found:
            raise NoTargetError(f"{name} is away")
        return found

    def _virtual(self, name: str) -> VirtualHost:
        host = self.hosts[name]
        if not isinstance(host, VirtualHost):
            raise NoTargetError(f"{name} has no network of its own")
        return host

    def _cable(self, fault: PlannedFault) -> Strike:
        host = self._virtual(fault.host)
        host.cut()
        return Strike(host.restore, fault.lasts_s)

    def _one_way(self, fault: PlannedFault) -> Strike:
        host = self._virtual(fault.host)
        lose(host, 100.0, received=False)
        return Strike(lambda: lose_nothing(host), fault.lasts_s)

    def _blip(self, fault: PlannedFault) -> Strike:
        hosts = [self._virtual(name) for name in self.hosts]
        for host in hosts:
            host.cut()

        def restore() -> None:
            for host in hosts:
                host.restore()

        return Strike(restore, fault.lasts_s)

    def _partition(self, fault: PlannedFault) -> Strike:
        names = list(self.hosts)
        first = names.index(fault.host)
        turned = [*names[first:], *names[:first]]
        parts = [[self._virtual(name) for name in part] for part in (turned[: int(fault.amount)], turned[int(fault.amount) :])]
        if self.network is None or not all(parts):
            raise NoTargetError(f"{len(names)} hosts cannot be parted into {fault.amount:g} and others")
        self.network.split(*parts)
        return Strike(self.network.join, fault.lasts_s)

    def _storage(self, names: Sequence[str], storage: StorageFault, lasts_s: float) -> Strike:
        def everywhere(what: StorageFault | None) -> None:
            for name in names:
                self.controls[name].set_storage(what)

        everywhere(storage)
        return Strike(lambda: everywhere(None), lasts_s)

    def _slow_disk(self, fault: PlannedFault) -> Strike:
        return self._storage([fault.host], StorageFault(slower_s=fault.amount, only=("write", "create")), fault.lasts_s)

    def _store_503(self, fault: PlannedFault) -> Strike:
        return self._storage([*self.hosts], StorageFault(refused=fault.amount), fault.lasts_s)

    def _store_slow(self, fault: PlannedFault) -> Strike:
        return self._storage([*self.hosts], StorageFault(slower_s=fault.amount), fault.lasts_s)

    def _store_away(self, fault: PlannedFault) -> Strike:
        return self._storage([*self.hosts], StorageFault(refused=1.0), fault.lasts_s)

    def _full_disk(self, fault: PlannedFault) -> Strike:
        if self.disk is None:
            raise NoTargetError("the run folder has no small disk of its own")
        ballast = self.disk / "ballast"
        with ballast.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 20)):
                    pass
            except OSError:
                pass
        return Strike(ballast.unlink, fault.lasts_s)

    def _clock(self, fault: PlannedFault) -> Strike:
        control = self.controls[fault.host]
        control.set_clock(fault.amount)
        return Strike(lambda: control.set_clock(0.0), fault.lasts_s)

    def _flip_snapshot(self, fault: PlannedFault) -> Strike:
        worker, rank = self._worker(fault)
        self._flip(self.hosts[fault.host].memory, "own", rank, fault.amount)
        # It is read by whoever takes the place of its rank.
        send_signal([worker], signal.SIGKILL)
        return Strike(rank=rank)

    def _flip_replica(self, fault: PlannedFault) -> Strike:
        _, rank = self._worker(fault)
        holders = [one for name, one in self.hosts.items() if name != fault.host and rank in replica_ranks(one.memory)]
        if not holders:
            raise NoTargetError(f"no host has a replica of rank {rank} now")
        self._flip(holders[0].memory, "replica", rank, fault.amount)
        return self._host_lost(fault)

    def _flip(self, memory: Path, kind: str, rank: int, share: float) -> None:
        # The saver digests a snapshot now and then.
        flip = partial(flip_in_memory, memory, kind=kind, rank=rank, share=share)
        try:
            wait_until(lambda: flip() is not None, timeout_s=_DIGESTED_WITHIN_S, what="a snapshot with digests")
        except StuckError:
            raise NoTargetError(f"no {kind} snapshot of rank {rank} gets digests") from None

    def _flip_shard(self, fault: PlannedFault) -> Strike:
        step = flip_in_storage(self.fleet.run_dir, share=fault.amount)
        if step is None:
            raise NoTargetError("there must be two checkpoints, or none would be left")
        self.damaged.add(step)
        # It is read where no host has anything in memory.
        for host in self.hosts.values():
            host.lose()
        return Strike(self._restart(*self.hosts), LAUNCHER_BACK_S, absent=tuple(self.hosts))

    def _flip_gradient(self, fault: PlannedFault) -> Strike:
        worker, rank = self._worker(fault)
        self.controls[fault.host].order(worker.pid, f"flip {fault.amount}")
        return Strike(rank=rank)

    def _wrong_version(self, fault: PlannedFault) -> Strike:
        self._present(fault.host)
        other = self.folder / "other-version"
        if not other.exists():
            shutil.copytree(SOURCES / "elastictrain", other / "elastictrain", ignore=shutil.ignore_patterns("__pycache__"))
            with (other / "elastictrain/train/loop.py").open("a") as file:
                file.write("# another version\n")
        self.hosts[fault.host].kill()
        self.start(fault.host, sources=other)

        def right() -> None:
            self.hosts[fault.host].kill()
            self.start(fault.host)

        return Strike(right, max(fault.lasts_s, OTHER_CODE_S), absent=(fault.host,))


def left_out(kinds: Sequence[ChaosKind], *, hosts: int, workers: int, alone: str) -> dict[ChaosKind, str]:
    """Kinds that cannot be had here, and why. `alone`: why there are no hosts of their own; empty if there are."""
    found = {}
    for kind in kinds:
        if alone and kind in NEEDS_HOSTS:
            found[kind] = alone
        elif not alone and hosts < 2 and kind in NEEDS_HOSTS - {K.FULL_DISK}:
            found[kind] = "needs --hosts 2 or more"
        elif kind is K.ONE_WAY and shutil.which("nft") is None:
            found[kind] = "needs nft"
        elif kind is K.FLIP_GRADIENT and hosts * workers < 3:
            found[kind] = "needs three workers, or nobody can tell which one differs"
    return found
