"""Where a plan is carried out: hosts of their own on this machine, or this machine as the only host."""

import ctypes
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from elastictrain.chaos.fleet import FleetHost, FleetProgram, LauncherFleet
from elastictrain.chaos.in_process import HostControl
from elastictrain.chaos.injectors import Injectors
from elastictrain.chaos.local_host import LocalHost
from elastictrain.chaos.network.hosts import VirtualNetwork
from elastictrain.chaos.network.namespaces import run_tool
from elastictrain.chaos.processes import StuckError, wait_until

MODEL = {
    "recipe": "llama_tiny",
    "model.dim": "32",
    "model.num_layers": "2",
    "model.num_heads": "2",
    "model.num_kv_heads": "1",
    "model.ffn_dim": "64",
    "train.seq_len": "32",
    "train.global_batch": "12",
    "train.micro_batch": "3",
    "train.eval_every_steps": "0",
    "telemetry.log_every_steps": "1000",
    "telemetry.loggers": "[]",
    "optim.warmup_steps": "2",
    "optim.schedule": "constant",
    # Worlds of other sizes add in another order; at a high rate rounding grows over thousands of steps.
    "optim.lr": "1e-4",
    "data.ledger": "true",
    "launch.notices": "false",
}
"""What is trained, with faults and without; a user may replace any of it."""

_DISTURBED = {
    "train.steps": "1000000",
    "checkpoint.every_steps": "50",
    "checkpoint.snapshot_every_steps": "5",
    "fault.heartbeat_s": "0.2",
    "fault.compare_every_steps": "10",
    "fault.hang_floor_s": "4",
    "fault.step_timeout_s": "30",
    "fault.init_timeout_s": "120",
    "fault.rendezvous_timeout_s": "90",
    "fault.save_timeout_s": "150",
    "launch.min_hosts": "1",
    "launch.join_s": "60",
    "launch.grow_after_s": "1",
    "launch.grow_every_s": "2",
    "launch.retry_unfit_s": "5",
}
_DISK = "size=1g"
_STORE = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore(sys.argv[1], 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(1e6)
"""
_UNDISTURBED_LIMIT_S = 3600.0
_CLONE_NEWNS = 0x20000


@dataclass(frozen=True, slots=True)
class ChaosArena:
    """`alone`: why this machine is the only host; empty where it can have hosts of its own."""

    hosts: tuple[str, ...]
    workers: int  # of each host
    overrides: Mapping[str, str]
    pause_s: float = 0.1  # before each update: steps take a while without work for the processor
    alone: str = ""
    small_disk: bool = False

    @property
    def own_name(self) -> str:
        """What a run calls the only host."""
        return socket.gethostname() if self.alone else ""

    def arguments(self) -> list[str]:
        """Of each launcher."""
        fixed = {"launch.max_hosts": str(len(self.hosts)), "launch.processes": str(self.workers)}
        return [f"{key}={value}" for key, value in ({**MODEL, **_DISTURBED} | fixed | dict(self.overrides)).items()]

    @contextmanager
    def opened(self, folder: Path, *, plain: bool = False) -> Iterator[Injectors]:
        """Hosts without launchers yet; all is gone at the end of the block, but for what is in `folder`. `plain`: torchrun and
        the plain loop take the place of launchers."""
        with ExitStack() as stack:
            network = disk = None
            hosts: dict[str, FleetHost] = {}
            if self.alone:
                hosts[self.hosts[0]] = stack.enter_context(LocalHost(self.hosts[0], folder=folder))
            else:
                disk = stack.enter_context(_small_disk(folder / "disk")) if self.small_disk else None
                network = stack.enter_context(VirtualNetwork(folder / "network"))
                hosts |= {name: network.add(name) for name in self.hosts}
            run_dir = (disk or folder) / "run"
            fleet = LauncherFleet(run_dir, folder / "logs", self.arguments())
            if plain:
                # Nothing ever happens to the host of the rendezvous.
                head = network.add("head") if network else stack.enter_context(LocalHost("head", folder=folder))
                fleet.program = self._torchrun(head, folder)
            controls = {name: HostControl(folder / "control" / name) for name in hosts}
            yield Injectors(fleet, hosts, controls, folder, self.pause_s, network, disk)

    def _torchrun(self, head: FleetHost, folder: Path) -> FleetProgram:
        """torchrun with a rendezvous that outlives every host."""
        store = head.popen([sys.executable, "-c", _STORE, head.address], log=folder / "logs" / "store.txt")
        wait_until(lambda: store.output().endswith("\n"), timeout_s=60.0, what="the store of torchrun's rendezvous")
        at = f"{head.address}:{store.output().split()[-1]}"
        fixed = ["--nnodes", f"1:{len(self.hosts)}", "--nproc-per-node", str(self.workers), "--max-restarts", "1000"]
        fixed += ["--rdzv-backend", "c10d", "--rdzv-endpoint", at, "--rdzv-id", "run", "--monitor-interval", "0.5"]
        # Ready for what happens here: torchrun's own limits are minutes.
        fixed += ["--rdzv-conf", "is_host=0,last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"]
        # Otherwise agents do not tell a new one where the workers' store is.
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        name = "elastictrain.chaos.plain_loop"
        options = lambda host: (*fixed, "--local-addr", host.address, "-m", name)  # noqa: E731
        return FleetProgram("torch.distributed.run", options, name, variables)

    def undisturbed(self, folder: Path, *, steps: int) -> Path:
        """The run folder of a run of the same that nothing happens to: of the same world where the world never changes, else
        of one worker. Raises: StuckError."""
        processes = self.workers if self.alone else 1
        changed = {"train.steps": str(steps), "launch.processes": str(processes), "preflight": "off"}
        options = {**MODEL, **{key: value for key, value in self.overrides.items() if not key.startswith("launch.")}, **changed}
        with LocalHost("undisturbed", folder=folder) as host:
            fleet = LauncherFleet(folder / "run", folder / "logs", [f"{key}={value}" for key, value in options.items()])
            fleet.start(host)
            code = fleet.launchers[host.name].wait(_UNDISTURBED_LIMIT_S)
        if code:
            raise StuckError(f"the undisturbed run ended with {code}:\n{fleet.output()[-4000:]}")
        return fleet.run_dir


def parse_overrides(words: Sequence[str]) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in words)


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    """A disk that can be filled; nobody else sees it, and it ends with this process at the latest."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise StuckError(f"no mounts of its own can be had: {os.strerror(ctypes.get_errno())}")
    run_tool("mount", "--make-rprivate", "/")
    folder.mkdir(parents=True)
    run_tool("mount", "-t", "tmpfs", "-o", _DISK, "tmpfs", str(folder))
    try:
        yield folder
    finally:
        # What was on it stays for whoever keeps the folder.
        kept = folder.with_name(f"{folder.name}-kept")
        shutil.copytree(folder, kept, symlinks=True)
        run_tool("umount", "--lazy", str(folder))
        folder.rmdir()
        kept.rename(folder)


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="elastictrain-chaos-", ignore_cleanup_errors=True)
