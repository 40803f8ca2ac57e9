"""Several hosts on one machine, each with network, hostname and host memory of its own."""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from elastictrain.chaos.network.namespaces import Namespaces, run_tool
from elastictrain.chaos.processes import StartedProcess, child_environment, kill_all, start_process
from elastictrain.errors import UsageError

INTERFACE = "eth0"
"""Every host's only interface beside loopback."""

_SUBNET = "10.89.0"
# With two digits in each last part, addresses sort as text as they do as numbers: c10d ranks hosts by that order.
_FIRST_PART, _LAST_PART = 11, 99
_FIRST_PORT = 29500
_AS_BRIDGE = ("type", "bridge", "stp_state", "0", "mcast_snooping", "0")

StartInside = Callable[[Namespaces, Sequence[str], Path, Path, Mapping[str, str]], StartedProcess]
"""Starts a command in namespaces: the command, its log, its working directory, its environment."""


def start_inside(
    place: Namespaces, command: Sequence[str], log: Path, cwd: Path, environment: Mapping[str, str]
) -> StartedProcess:
    """A new process."""
    entered = place.entered(["env", f"--chdir={cwd}", *command])
    return start_process(entered, log=log, cwd=Path("/"), environment=environment)


class VirtualHost:
    """One host of a `VirtualNetwork`. `memory` is the folder that stands for its host memory: all share one /dev/shm."""

    def __init__(
        self, name: str, *, address: str, switch: Namespaces, folder: Path, hosts_file: Path, start: StartInside
    ) -> None:
        self.name = name
        self.address = address
        self.memory = Path(tempfile.mkdtemp(prefix=f"elastictrain-host-{name}-", dir="/dev/shm"))
        self.switch_port = f"to-{address.rpartition('.')[2]}"
        self.switch = switch
        self.runs: list[StartedProcess] = []
        self._start = start
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
    ) -> StartedProcess:
        """Start a process on this host; it ends with the host at the latest. Without `cwd` it runs in the folder of its log."""
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = child_environment({"GLOO_SOCKET_IFNAME": INTERFACE, **extra_environment})
        self.runs.append(self._start(self.namespaces, [*map(str, command)], log, cwd or log.parent, variables))
        return self.runs[-1]

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

    def inhabitants(self) -> list[int]:
        """Every process that lives here, whoever started it."""
        return self.namespaces.inhabitants()

    def kill(self) -> None:
        """SIGKILL every process that lives here, whoever started it; peers that it reaches are told by its kernel.

        What is in host memory stays. Raises: StuckError if something does not end.
        """
        # One that was just started may not have entered yet.
        kill_all(lambda: {*self.inhabitants(), *(one.process.pid for one in self.runs if one.process.poll() is None)})

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


class VirtualNetwork:
    """A switch, and the hosts that are plugged into it. All are gone at the end of the block, whatever happened in it."""

    def __init__(self, folder: Path, *, start: StartInside = start_inside) -> None:
        self._folder = folder
        self._start = start
        self._hosts_file = folder / "hosts"
        self._stack = ExitStack()
        self._hosts: list[VirtualHost] = []
        self._parts: set[int] = set()

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._hosts_file.write_text("127.0.0.1 localhost\n::1 localhost\n::ffff:127.0.0.1 localhost\n")
        hosts_file = self._hosts_file
        self.switch = Namespaces("switch", folder=self._folder / "switch", hosts_file=hosts_file, removed=hosts_file)
        self._stack.callback(self.switch.close)
        try:
            self.switch.ip("link", "add", "name", "bridge", *_AS_BRIDGE)
            self.switch.ip("link", "set", "bridge", "up")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stack.close()

    def split(self, *parts: Sequence[VirtualHost]) -> None:
        """From now on hosts reach those of their own part alone, in silence; connections stay open."""
        for number, part in enumerate(parts):
            bridge = f"part-{number}"
            if number not in self._parts:
                self.switch.ip("link", "add", "name", bridge, *_AS_BRIDGE)
                self.switch.ip("link", "set", bridge, "up")
                self._parts.add(number)
            for host in part:
                self.switch.ip("link", "set", host.switch_port, "master", bridge)

    def join(self) -> None:
        """All hosts reach each other again."""
        for host in self._hosts:
            self.switch.ip("link", "set", host.switch_port, "master", "bridge")

    def add(self, name: str) -> VirtualHost:
        """A new host; it is reached from the others by this name, too, and never takes over the address of another."""
        number = _FIRST_PART + len(self._hosts)
        if number > _LAST_PART:
            raise UsageError(f"a network must have at most {_LAST_PART - _FIRST_PART + 1} hosts, but one more was asked for")
        address = f"{_SUBNET}.{number}"
        with self._hosts_file.open("a") as file:
            # The store's client looks up the name of the address as it sees it in a socket for both kinds of addresses.
            file.write(f"{address} {name}\n::ffff:{address} {name}\n")
        folder = self._folder / f"{number}-{name}"
        hosts_file, start = self._hosts_file, self._start
        host = VirtualHost(name, address=address, switch=self.switch, folder=folder, hosts_file=hosts_file, start=start)
        self._hosts.append(host)
        self._stack.callback(host.close)
        host.connect()
        return host
