"""Launchers of one run on several hosts, and what can be asked of them."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from elastictrain.chaos.processes import StartedProcess, StuckError, wait_until, workers_among
from elastictrain.chaos.run_events import RunEvents


class FleetHost(Protocol):
    """A host that a launcher can live on."""

    name: str
    address: str
    memory: Path

    def popen(
        self, command: Sequence[str | Path], *, log: Path, extra_environment: Mapping[str, str] = {}
    ) -> StartedProcess: ...
    def inhabitants(self) -> list[int]: ...
    def kill(self) -> None: ...
    def lose(self) -> None: ...
    def restore(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FleetProgram:
    """What runs on each host: the module of its first process, the options of that, and the module of its workers."""

    module: str
    options: Callable[[FleetHost], Sequence[str]]
    worker: str
    environment: Mapping[str, str] = field(default_factory=dict)


LAUNCHER = FleetProgram("elastictrain.launch", lambda _: (), "elastictrain.run")


@dataclass(slots=True)
class LauncherFleet:
    """The launchers of one run, by name of host; `launchers` keeps those that have ended. Another `program` may take their
    place."""

    run_dir: Path
    logs: Path
    arguments: Sequence[str]
    program: FleetProgram = LAUNCHER
    launchers: dict[str, StartedProcess] = field(default_factory=dict)
    num_started: int = 0
    _events: RunEvents | None = None

    @property
    def events(self) -> RunEvents:
        """Those of rank 0 and of launchers so far; `update` reads what is new."""
        self._events = self._events or RunEvents(self.run_dir)
        return self._events

    def start(self, *hosts: FleetHost, more: Sequence[str] = (), environment: Mapping[str, str] = {}) -> None:
        """One launcher on each of these hosts, in this order."""
        for host in hosts:
            self.num_started += 1
            command = [sys.executable, "-m", self.program.module, *self.program.options(host), *self.arguments]
            command += [f"run.dir={self.run_dir}", f"checkpoint.memory_dir={host.memory}", *more]
            log = self.logs / f"{self.num_started:02d}-{host.name}.txt"
            variables = {**environment, **self.program.environment}
            self.launchers[host.name] = host.popen(command, log=log, extra_environment=variables)

    def lives(self, name: str) -> bool:
        """Whether the launcher that was started last on a host has not ended."""
        return name in self.launchers and self.launchers[name].process.poll() is None

    def output(self) -> str:
        """Everything that any launcher and its workers have printed."""
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in sorted(self.logs.glob("*.txt")))

    def generations(self) -> list[dict[str, Any]]:
        """All there are, in order."""
        folder = self.run_dir / "launch" / "generations"
        return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]

    def members(self) -> list[str]:
        """Names of the newest generation's hosts."""
        found = sorted((self.run_dir / "launch" / "generations").glob("*.json"))
        return [member["name"] for member in json.loads(found[-1].read_text())["members"]] if found else []

    def last_step(self) -> int:
        """The newest step that is done."""
        self.events.update()
        return self.events.last_step

    def wait_for_members(self, names: Sequence[str], *, timeout_s: float = 60) -> None:
        """Until the newest generation has these hosts."""
        wait_until(lambda: sorted(self.members()) == sorted(names), timeout_s=timeout_s, what=f"a generation of {names}")

    def wait_for_step(self, step: int, *, timeout_s: float = 60) -> float:
        """Until `step` is done; returns how long that took. Raises: StuckError, with what was printed."""
        began = time.monotonic()
        try:
            wait_until(lambda: self.last_step() >= step, timeout_s=timeout_s, what=f"step {step}")
        except StuckError as error:
            raise StuckError(f"{error}\n{self.output()[-12000:]}") from None
        return time.monotonic() - began

    def go_on(self, *, steps: int = 2, timeout_s: float = 60) -> float:
        """Until steps that nobody has done yet are done; returns how long that took."""
        return self.wait_for_step(self.last_step() + steps, timeout_s=timeout_s)

    def wait(self, *, timeout_s: float = 120) -> dict[str, int]:
        """The exit code of each launcher that was started last on its host."""
        deadline = time.monotonic() + timeout_s
        return {name: run.wait(max(0.0, deadline - time.monotonic())) for name, run in self.launchers.items()}


def processes_on(host: FleetHost, *words: str) -> list[psutil.Process]:
    """The processes on a host whose command begins, after the interpreter, with these words."""
    found = []
    for pid in host.inhabitants():
        try:
            process = psutil.Process(pid)
            if process.cmdline()[1 : 1 + len(words)] == list(words):
                found.append(process)
        except psutil.Error:
            continue
    return found


def launcher_of(host: FleetHost) -> int:
    """The process of the launcher that lives on a host."""
    (only,) = processes_on(host, "-m", "elastictrain.launch")
    pid: int = only.pid
    return pid


def workers(host: FleetHost, *, program: str = LAUNCHER.worker) -> list[psutil.Process]:
    """The worker processes on a host, in order of rank."""
    return workers_among(processes_on(host), program=program)
