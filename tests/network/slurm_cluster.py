"""A Slurm cluster: a controller and two nodes, each on a host of its own, with daemons that are really Slurm's."""

import secrets
import shutil
import subprocess
from pathlib import Path

from torchruns import environment, wait_until

from elastictrain.chaos.network.hosts import VirtualHost, VirtualNetwork

_TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue")
# Launchers on the same machine lock by number of job and name of host: another cluster on it has other numbers.
# Jobs of `urgent` take the nodes of others. A requeued job waits for `cred_expire`, at least 5 s.
_CONFIGURATION = """
ClusterName=test
FirstJobId={first_job}
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
KillWait=30
CompleteWait=1
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-2] CPUs=2 RealMemory=2000 Gres=gpu:1 State=UNKNOWN
PartitionName=spot Nodes=n[1-2] Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n[1-2] PriorityTier=9 PreemptMode=OFF
"""
# Any device stands for a GPU: Slurm hands out its number, and does not open it.
_GPUS = "NodeName=n[1-2] Name=gpu File=/dev/null\n"


def missing_tools() -> str | None:
    """Why no cluster can be made here, or None if it can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"needs Slurm's {', '.join(missing)} (Debian's slurm-wlm and munge)" if missing else None


class SlurmCluster:
    """Its hosts are `head`, which has the controller and on which commands run, and the nodes `n1` and `n2`.

    Each node has at `memory` a host memory of its own.
    """

    def __init__(self, network: VirtualNetwork, folder: Path) -> None:
        self.folder = folder
        self.memory = folder / "host-memory"
        for name in ("state", "host-memory"):
            (folder / name).mkdir(parents=True)
        self.head, *nodes = (network.add(name) for name in ("head", "n1", "n2"))
        self.nodes: dict[str, VirtualHost] = {node.name: node for node in nodes}
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                controller=f"head({self.head.address})", folder=folder, first_job=1 + secrets.randbelow(10**7)
            ).lstrip()
        )
        (folder / "gres.conf").write_text(_GPUS)
        self._variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._start_munge()
        self._daemon(self.head, "slurmctld", "-D", "-i")
        for node in nodes:
            self._start(node)
        wait_until(lambda: self.states() == {"n1": "IDLE", "n2": "IDLE"}, timeout_s=30, what="two idle nodes")

    def _start_munge(self) -> None:
        """Credentials are checked through a socket in the file system, which all hosts see."""
        folder = self.folder
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("log", "pid", "seed")]
        socket = folder / "munge.socket"
        self._daemon(self.head, "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}", *files)
        wait_until(socket.exists, timeout_s=10, what="munge's socket")

    def _daemon(self, host: VirtualHost, *command: str) -> None:
        host.popen(command, log=self.folder / f"{command[0]}-{host.name}.txt", extra_environment=self._variables)

    def _start(self, node: VirtualHost) -> None:
        node.popen(["mount", "-t", "tmpfs", "none", self.memory], log=self.folder / "mount.txt").wait(10)
        self._daemon(node, "slurmd", "-D", "-N", node.name)

    def command(self, *words: str | Path, folder: Path | None = None) -> str:
        """What a command of Slurm prints, on the head. Raises: RuntimeError with what it complains about."""
        entered = self.head.namespaces.entered(["env", f"--chdir={folder or self.folder}", *words])
        variables = environment(self._variables)
        done = subprocess.run(entered, env=variables, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")
        return done.stdout

    def set_node(self, name: str, state: str) -> None:
        """As an administrator does. Slurm 22.05 cancels a job whose batch script ends on a node that is down but alive."""
        self.command("scontrol", "update", f"NodeName={name}", f"State={state}", "Reason=test")

    def lose(self, name: str) -> None:
        """The node vanishes with its memory, and the administrator's health check says so before Slurm finds out."""
        self.nodes[name].lose()
        self.set_node(name, "DOWN")

    def restore(self, name: str) -> None:
        """It is back, and empty."""
        self.nodes[name].restore()
        self._start(self.nodes[name])
        self.set_node(name, "RESUME")

    def states(self) -> dict[str, str]:
        """The state of each node."""
        lines = self.command("sinfo", "--noheader", "--Node", "--partition=spot", "--format=%N %T").splitlines()
        return {name: state.upper() for name, state in (line.split() for line in lines)}

    def job(self, number: int) -> dict[str, str]:
        """What the controller knows about a job."""
        fields = self.command("scontrol", "show", "job", "--oneliner", str(number)).split()
        return dict(field.partition("=")[::2] for field in fields)
