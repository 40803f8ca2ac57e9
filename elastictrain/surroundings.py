"""What this host tells of itself: kernel files, vendors' tools, addresses and routes. All injected, so that tests can replace
them."""

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class ToolOutput:
    returncode: int  # means nothing if `timed_out`
    stdout: str
    stderr: str
    timed_out: bool = False  # it was killed


class Tools:
    """Vendors' programs on this host."""

    def run(self, arguments: Sequence[str], *, limit_s: float) -> ToolOutput | None:
        """None if the program does not exist. Never raises for what the program does."""
        program = shutil.which(arguments[0])
        if program is None:
            return None
        try:
            # The output is parsed, so it must not be translated.
            done = subprocess.run(  # noqa: S603
                [program, *arguments[1:]],
                capture_output=True,
                timeout=limit_s,
                check=False,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "LC_ALL": "C"},
                # A signal to this process's group must not reach the tool.
                process_group=0,
            )
        except subprocess.TimeoutExpired:
            return ToolOutput(-1, "", "", timed_out=True)
        except OSError as error:
            return ToolOutput(-1, "", str(error))
        return ToolOutput(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


_ANY_PORT = 9


def system_addresses() -> dict[str, tuple[str, ...]]:
    """The addresses of each interface, IPv4 before IPv6, else in the kernel's order; empty if the kernel gives none."""
    found: dict[str, tuple[str, ...]] = {}
    with suppress(OSError):
        for name, entries in psutil.net_if_addrs().items():
            for family in (socket.AF_INET, socket.AF_INET6):
                own = tuple(one.address.partition("%")[0] for one in entries if one.family == family)
                found[name] = found.get(name, ()) + own
    return found


def ask_kernel(target: str) -> tuple[str, str]:
    """A peer's first address that has a route, and the own one towards it, both perhaps with `%SCOPE`. Raises: OSError."""
    refused: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(target, _ANY_PORT, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as connected:
                connected.connect(address)
                own = connected.getsockname()
                scoped = family == socket.AF_INET6 and own[3] and "%" not in str(own[0])
                return str(address[0]), f"{own[0]}%{socket.if_indextoname(own[3])}" if scoped else str(own[0])
        except OSError as error:
            refused = refused or error
    raise refused or OSError(f"{target} has no address")


def can_load(library: str) -> bool:
    """Whether the dynamic linker finds a library and what it needs, as it does for NCCL."""
    with suppress(OSError):
        ctypes.CDLL(library)
        return True
    return False


@dataclass(frozen=True, slots=True)
class Surroundings:
    """This host, as checks and the choice of its address see it."""

    host: str = field(default_factory=socket.gethostname)
    root: Path = Path("/")  # stands for `/`: contains `sys`, `proc` and `etc`
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    tools: Tools = field(default_factory=Tools)
    addresses: Callable[[], Mapping[str, Sequence[str]]] = system_addresses
    probe: Callable[[str], tuple[str, str]] = ask_kernel  # as `ask_kernel`
    can_load: Callable[[str], bool] = can_load

    def ask(self, *arguments: str, limit_s: float) -> str:
        """What a tool prints, errors last; empty if it does not exist or does not end in time."""
        answer = self.tools.run(arguments, limit_s=limit_s)
        return "" if answer is None or answer.timed_out else f"{answer.stdout}\n{answer.stderr}"

    def read(self, path: str) -> str | None:
        """The text of a file below `root`, stripped; None if it cannot be read."""
        with suppress(OSError):
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        return None

    def number(self, path: str, *, base: int = 10) -> int | None:
        """The whole number in a file below `root`; None if there is none."""
        with suppress(ValueError):
            return int(self.read(path) or "", base)
        return None

    def names(self, path: str) -> list[str]:
        """The names in a folder below `root`, sorted; empty if it cannot be read."""
        with suppress(OSError):
            return sorted(entry.name for entry in (self.root / path.lstrip("/")).iterdir())
        return []
