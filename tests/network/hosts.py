"""Several hosts on one machine, each with network, hostname and host memory of its own, and training runs on them."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from namespaces import Namespaces, run_tool
from torchruns import Run, environment, events, last_step, last_wins, wait_until
from warm import WarmProcess, can_be_warm, warm_host

INTERFACE = "eth0"
"""Every host's only interface beside loopback."""

_SUBNET = "10.89.0"
# With two digits in each last part, addresses sort as text as they do as numbers: c10d ranks hosts by that order.
_FIRST_PART, _LAST_PART = 11, 99
_FIRST_PORT = 29500
_KILL_LIMIT_S = 60.0


class Host:
    """One host of a `Network`. `memory` is the folder that stands for its host memory: all share one /dev/shm."""

    def __init__(self, name: str, *, address: str, switch: Namespaces, folder: Path, hosts_file: Path) -> None:
        self.name = name
        self.address = address
        self.memory = Path(tempfile.mkdtemp(prefix=f"elastictrain-host-{name}-", dir="/dev/shm"))
        self.switch_port = f"to-{address.rpartition('.')[2]}"
        self.switch = switch
        self.runs: list[Run] = []
        self._last_port = _FIRST_PORT
        self.namespaces = Namespaces(name, folder=folder, hosts_file=hosts_file, removed=self.memory)
        self.network = self.namespaces.network

    def connect(self) -> None:
        """Plug the host into the switch."""
        inside, port = self.namespaces, self.switch_port
        near, far = (INTERFACE, "netns", str(inside.pid)), (port, "netns", str(self.switch.pid))
        run_tool("ip", "link", "add", "name", *near, "type", "veth", "peer", "name", *far)
        # No address that nobody gave it: gloo takes the first one of its interface.
        inside.ip("link", "set", INTERFACE, "addrgenmode", "none")
        inside.ip("address", "add", f"{self.address}/24", "dev", INTERFACE)
        inside.ip("link", "set", INTERFACE, "up")
        self.switch.ip("link", "set", port, "master", "bridge", "up")

    def move(self, address: str) -> None:
        """The host has another address from now on, and the old one no more."""
        self.namespaces.ip("address", "flush", "dev", INTERFACE, "scope", "global")
        self.namespaces.ip("address", "add", f"{address}/24", "dev", INTERFACE)
        self.address = address

    def popen(
        self,
        command: Sequence[str | Path],
        *,
        log: Path,
        extra_environment: Mapping[str, str] = {},
        cwd: Path | None = None,
    ) -> Run:
        """Start a process on this host, warm if it can be; it ends with the host at the latest.
        Without `cwd` it runs in the folder of its log."""
        log.parent.mkdir(parents=True, exist_ok=True)
        words, folder = last_wins(command), cwd or log.parent
        variables = environment({"GLOO_SOCKET_IFNAME": INTERFACE, **extra_environment})
        process: subprocess.Popen[bytes] | WarmProcess
        if can_be_warm(words):
            files = self.namespaces.files
            process = warm_host().start(words[1:], environment=variables, log=log, cwd=folder, namespaces=files)
        else:
            with log.open("ab") as output:
                entered = self.namespaces.entered(["env", f"--chdir={folder}", *words])
                process = subprocess.Popen(entered, stdout=output, stderr=subprocess.STDOUT, env=variables)
        self.runs.append(Run(process, log))
        return self.runs[-1]

    def torchrun(
        self,
        arguments: Sequence[str],
        *,
        nnodes: int,
        node_rank: int,
        master: "Host",
        port: int,
        log: Path,
        rendezvous: str = "static",
        nproc_per_node: int = 1,
        max_restarts: int = 0,
        extra_environment: Mapping[str, str] = {},
    ) -> Run:
        """This host's torchrun of a training run, with snapshots in this host's memory.

        `master` holds the store at `port`. `rendezvous` is static, or c10d, which ranks hosts by their addresses, not by
        `node_rank`.
        """
        if rendezvous == "static":
            meeting = ["--node-rank", str(node_rank), "--master-addr", master.address, "--master-port", str(port)]
        else:
            meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{master.address}:{port}", "--rdzv-id", f"run{port}"]
            # A lost agent counts as gone before a worker's step limit is over, or its place would still be taken then.
            patience = "keep_alive_interval=1,keep_alive_max_attempt=3"
            meeting += ["--rdzv-conf", f"is_host={int(master is self)},{patience}"]
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nnodes), "--local-addr", self.address]
        command += ["--log-dir", str(log.with_suffix(""))]
        command += ["--nproc-per-node", str(nproc_per_node), "--max-restarts", str(max_restarts), "--monitor-interval", "0.2"]
        command += [*meeting, "-m", "elastictrain.run", *arguments, f"checkpoint.memory_dir={self.memory}"]
        return self.popen(command, log=log, extra_environment=extra_environment)

    def port(self) -> int:
        """A port of this host that no earlier caller was given."""
        self._last_port += 1
        return self._last_port

    def cut(self) -> None:
        """Pull the cable at the switch: no peer is told, and connections stay open in silence."""
        self.switch.ip("link", "set", self.switch_port, "down")

    def restore(self) -> None:
        """Plug the cable in again."""
        self.switch.ip("link", "set", self.switch_port, "up")

    def kill(self) -> None:
        """SIGKILL every process that lives here, whoever started it; peers that it reaches are told by its kernel.

        What is in host memory stays. Raises: AssertionError if something does not end.
        """
        deadline = time.monotonic() + _KILL_LIMIT_S
        # Again and again: a process may have had a child after it was looked for, and one that was just started may not have
        # entered yet.
        while living := {
            *self.namespaces.inhabitants(),
            *(run.process.pid for run in self.runs if run.process.poll() is None),
        }:
            assert time.monotonic() < deadline, f"processes {living} on host {self.name} do not end"
            for pid in living:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def lose(self) -> None:
        """The host vanishes for good, without a word, and its memory with it."""
        self.cut()
        self.kill()
        shutil.rmtree(self.memory)
        self.memory.mkdir(mode=0o700)

    def close(self) -> None:
        """End everything on the host, and the host."""
        with ExitStack() as stack:
            stack.callback(self.namespaces.close)
            stack.callback(self.kill)


class Network:
    """A switch, and the hosts that are plugged into it. All are gone at the end of the block, whatever happened in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hosts_file = folder / "hosts"
        self._stack = ExitStack()
        self._hosts: list[Host] = []
        self._parts: set[int] = set()

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._hosts_file.write_text("127.0.0.1 localhost\n::1 localhost\n::ffff:127.0.0.1 localhost\n")
        hosts_file = self._hosts_file
        self.switch = Namespaces("switch", folder=self._folder / "switch", hosts_file=hosts_file, removed=hosts_file)
        self._stack.callback(self.switch.close)
        try:
            self.switch.ip("link", "add", "name", "bridge", "type", "bridge", "stp_state", "0", "mcast_snooping", "0")
            self.switch.ip("link", "set", "bridge", "up")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stack.close()

    def split(self, *parts: Sequence[Host]) -> None:
        """From now on hosts reach those of their own part alone, in silence; connections stay open."""
        for number, part in enumerate(parts):
            bridge = f"part-{number}"
            if number not in self._parts:
                self.switch.ip("link", "add", "name", bridge, "type", "bridge", "stp_state", "0", "mcast_snooping", "0")
                self.switch.ip("link", "set", bridge, "up")
                self._parts.add(number)
            for host in part:
                self.switch.ip("link", "set", host.switch_port, "master", bridge)

    def join(self) -> None:
        """All hosts reach each other again."""
        for host in self._hosts:
            self.switch.ip("link", "set", host.switch_port, "master", "bridge")

    def add(self, name: str) -> Host:
        """A new host; it is reached from the others by this name, too, and never takes over the address of another."""
        number = _FIRST_PART + len(self._hosts)
        assert number <= _LAST_PART, "no address is left"
        address = f"{_SUBNET}.{number}"
        with self._hosts_file.open("a") as file:
            # The store's client looks up the name of the address as it sees it in a socket for both kinds of addresses.
            file.write(f"{address} {name}\n::ffff:{address} {name}\n")
        folder = self._folder / f"{number}-{name}"
        host = Host(name, address=address, switch=self.switch, folder=folder, hosts_file=self._hosts_file)
        self._hosts.append(host)
        self._stack.callback(host.close)
        host.connect()
        return host


@dataclass(slots=True)
class Job:
    """One torchrun on each of some hosts, all of the same training run."""

    run_dir: Path
    runs: dict[str, Run]
    """By name of host."""

    def wait_for_step(self, step: int, *, timeout_s: float = 120) -> None:
        """Until `step` is committed. Fails at once if a torchrun has ended before."""

        def reached() -> bool:
            done = last_step(self.run_dir) >= step
            for name, run in self.runs.items():
                assert done or run.process.poll() is None, (
                    f"torchrun on {name} ended before step {step}:\n{run.output()[-4000:]}"
                )
            return done

        wait_until(reached, timeout_s=timeout_s, what=f"step {step}")

    def wait(self, *, timeout_s: float = 120) -> dict[str, int]:
        """Exit code of each torchrun; fails if one takes longer, with its output."""
        deadline = time.monotonic() + timeout_s
        return {name: run.wait(max(0.0, deadline - time.monotonic())) for name, run in self.runs.items()}

    def train(self, *, timeout_s: float = 120) -> None:
        """Wait for the end. Fails unless every exit code is 0."""
        codes = self.wait(timeout_s=timeout_s)
        texts = [f"{name} ended with {code}:\n{self.runs[name].output()[-4000:]}" for name, code in codes.items() if code]
        assert not texts, "\n".join(texts)


def start_run(
    hosts: Sequence[Host],
    arguments: Sequence[str],
    *,
    run_dir: Path,
    logs: Path,
    rendezvous: str = "static",
    nproc_per_node: int = 1,
    max_restarts: int = 0,
    extra_environment: Mapping[str, str] = {},
) -> Job:
    """Start a training run on these hosts, the first of which holds the store and rank 0. Each logs to `logs`/NAME.txt."""
    port = hosts[0].port()
    runs = {
        host.name: host.torchrun(
            [*arguments, f"run.dir={run_dir}"],
            nnodes=len(hosts),
            node_rank=node_rank,
            master=hosts[0],
            port=port,
            log=logs / f"{host.name}.txt",
            rendezvous=rendezvous,
            nproc_per_node=nproc_per_node,
            max_restarts=max_restarts,
            extra_environment=extra_environment,
        )
        for node_rank, host in enumerate(hosts)
    }
    return Job(run_dir, runs)


def durable_step(run_dir: Path) -> int:
    """The newest step that a checkpoint in storage holds, by the events so far; 0 if there is none."""
    return max((row["step"] for row in events(run_dir, "checkpoint_saved")), default=0)
