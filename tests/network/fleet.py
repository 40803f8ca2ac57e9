"""Launchers on hosts of a network, all of one run, and what can be asked of them."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from hosts import Host
from torchruns import REPOSITORY, Run, events, last_step, rank_of, wait_until


@dataclass(slots=True)
class Fleet:
    """The launchers of one run, by name of host; `starts` keeps those that have ended."""

    run_dir: Path
    logs: Path
    arguments: Sequence[str]
    launchers: dict[str, Run] = field(default_factory=dict)
    num_started: int = 0

    def start(self, *hosts: Host, more: Sequence[str] = (), environment: Mapping[str, str] = {}) -> None:
        """One launcher on each of these hosts, in this order."""
        for host in hosts:
            self.num_started += 1
            command = [sys.executable, "-m", "elastictrain.launch", *self.arguments, f"run.dir={self.run_dir}"]
            command += [f"checkpoint.memory_dir={host.memory}", *more]
            log = self.logs / f"{self.num_started:02d}-{host.name}.txt"
            extra = {"PYTHONPATH": str(REPOSITORY), **environment}
            self.launchers[host.name] = host.popen(command, log=log, extra_environment=extra)

    def output(self) -> str:
        """Everything that any launcher and its workers have printed."""
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in sorted(self.logs.glob("*.txt")))

    def generations(self) -> list[dict[str, Any]]:
        """All there are, in order."""
        folder = self.run_dir / "launch" / "generations"
        return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]

    def members(self) -> list[str]:
        """Names of the newest generation's hosts."""
        found = self.generations()
        return [member["name"] for member in found[-1]["members"]] if found else []

    def wait_for_members(self, names: Sequence[str], *, timeout_s: float = 60) -> None:
        """Until the newest generation has these hosts."""
        wait_until(lambda: sorted(self.members()) == sorted(names), timeout_s=timeout_s, what=f"a generation of {names}")

    def wait_for_step(self, step: int, *, timeout_s: float = 60) -> float:
        """Until `step` is done; returns how long that took."""
        began = time.monotonic()
        try:
            wait_until(lambda: last_step(self.run_dir) >= step, timeout_s=timeout_s, what=f"step {step}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output()[-12000:]}") from None
        return time.monotonic() - began

    def go_on(self, *, steps: int = 2, timeout_s: float = 60) -> float:
        """Until steps that nobody has done yet are done; returns how long that took."""
        return self.wait_for_step(last_step(self.run_dir) + steps, timeout_s=timeout_s)

    def wait(self, *, timeout_s: float = 120) -> dict[str, int]:
        """The exit code of each launcher that was started last on its host."""
        deadline = time.monotonic() + timeout_s
        return {name: run.wait(max(0.0, deadline - time.monotonic())) for name, run in self.launchers.items()}


def launcher_of(host: Host) -> int:
    """The process of the launcher that lives on a host."""
    found = []
    for pid in host.namespaces.inhabitants():
        try:
            if psutil.Process(pid).cmdline()[1:3] == ["-m", "elastictrain.launch"]:
                found.append(pid)
        except psutil.Error:
            continue
    (only,) = found
    return only


def workers(host: Host) -> list[psutil.Process]:
    """The worker processes on a host, in order of rank."""
    found = []
    for pid in host.namespaces.inhabitants():
        try:
            process = psutil.Process(pid)
            if (rank := rank_of(process, program="elastictrain.run")) is not None:
                found.append((rank, process))
        except psutil.Error:
            continue
    return [process for _, process in sorted(found, key=lambda pair: pair[0])]


def resumed(run_dir: Path) -> list[int]:
    """The steps from which incarnations went on, in order."""
    return [row["step"] for row in events(run_dir, "resume")]
