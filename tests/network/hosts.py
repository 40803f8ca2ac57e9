"""Training runs by torchrun on hosts of a network."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchruns import Run, events, last_step, last_wins, wait_until
from warm import can_be_warm, warm_host

from elastictrain.chaos.network.hosts import VirtualHost, start_inside
from elastictrain.chaos.network.namespaces import Namespaces


def start_warm(place: Namespaces, command: Sequence[str], log: Path, cwd: Path, environment: Mapping[str, str]) -> Run:
    """A fork that has imported torch, if that can become the command."""
    words = last_wins(command)
    if not can_be_warm(words):
        return start_inside(place, words, log, cwd, environment)
    return Run(warm_host().start(words[1:], environment=environment, log=log, cwd=cwd, namespaces=place.files), log)


def torchrun(
    host: VirtualHost,
    arguments: Sequence[str],
    *,
    nnodes: int,
    node_rank: int,
    master: VirtualHost,
    port: int,
    log: Path,
    rendezvous: str = "static",
    nproc_per_node: int = 1,
    max_restarts: int = 0,
    extra_environment: Mapping[str, str] = {},
) -> Run:
    """A host's torchrun of a training run, with snapshots in this host's memory.

    `master` holds the store at `port`. `rendezvous` is static, or c10d, which ranks hosts by their addresses, not by
    `node_rank`.
    """
    if rendezvous == "static":
        meeting = ["--node-rank", str(node_rank), "--master-addr", master.address, "--master-port", str(port)]
    else:
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{master.address}:{port}", "--rdzv-id", f"run{port}"]
        # A lost agent counts as gone before a worker's step limit is over, or its place would still be taken then.
        patience = "keep_alive_interval=1,keep_alive_max_attempt=3"
        meeting += ["--rdzv-conf", f"is_host={int(master is host)},{patience}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nnodes), "--local-addr", host.address]
    command += ["--log-dir", str(log.with_suffix(""))]
    command += ["--nproc-per-node", str(nproc_per_node), "--max-restarts", str(max_restarts), "--monitor-interval", "0.2"]
    command += [*meeting, "-m", "elastictrain.run", *arguments, f"checkpoint.memory_dir={host.memory}"]
    return host.popen(command, log=log, extra_environment=extra_environment)


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
    hosts: Sequence[VirtualHost],
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
        host.name: torchrun(
            host,
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
