"""What checks look at: files of the kernel, tools of vendors, and what other hosts leave word of.

All of it is handed in, so that a test can make it up.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import psutil

from elastictrain.bounded_json import DOCUMENT, MalformedJsonError, encode_record, parse_record

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """What a tool printed, and how it ended. `timed_out`: it was killed, and `returncode` means nothing."""

    returncode: int
    stdout: str
    stderr: str
    timed_out: bool = False


class Exchange(Protocol):
    """A table of small values that hosts, or ranks, share, for example the store of torchrun.

    Raises, in both methods: TransportError if the table cannot be reached.
    """

    def put(self, key: str, value: bytes) -> None:
        """Leave word under a key that is used once; visible to all."""

    def get(self, key: str, *, limit_s: float) -> bytes | None:
        """Wait for word; None if nobody has left it in time. What is there already is found with a limit of 0."""


def put_record(exchange: Exchange, key: str, record: object) -> None:
    """Leave a record for all. Raises: TransportError."""
    exchange.put(key, encode_record(record))


def get_record(exchange: Exchange, key: str, kind: type[T], *, limit_s: float) -> T | None:
    """Wait for a record. Raises: TransportError; MalformedJsonError for what another release writes."""
    data = exchange.get(key, limit_s=max(0.0, limit_s))
    try:
        return None if data is None else parse_record(data, kind, limits=DOCUMENT)
    except MalformedJsonError as error:
        raise MalformedJsonError(f"{key} {error}") from error


class Tools:
    """Other people's programs on this host."""

    def run(self, arguments: Sequence[str], *, limit_s: float) -> ToolOutput | None:
        """None if there is no such program. Never raises for what the program does."""
        program = shutil.which(arguments[0])
        if program is None:
            return None
        try:
            # Their words are parsed, so they must not be translated.
            done = subprocess.run(  # noqa: S603
                [program, *arguments[1:]],
                capture_output=True,
                timeout=limit_s,
                check=False,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "LC_ALL": "C"},
                # What asks this process to stop may be sent to its group, and is not for the tool.
                process_group=0,
            )
        except subprocess.TimeoutExpired:
            return ToolOutput(-1, "", "", timed_out=True)
        except OSError as error:
            return ToolOutput(-1, "", str(error))
        return ToolOutput(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


_ANY_PORT = 9


def system_addresses() -> dict[str, tuple[str, ...]]:
    """The addresses of each interface, IPv4 before IPv6, otherwise in the kernel's order; nothing if it does not tell."""
    try:
        found = psutil.net_if_addrs()
    except OSError:
        return {}
    return {
        name: tuple(
            entry.address.partition("%")[0]
            for family in (socket.AF_INET, socket.AF_INET6)
            for entry in entries
            if entry.family == family
        )
        for name, entries in found.items()
    }


def ask_kernel(target: str) -> tuple[str, str]:
    """From a name or address of a peer to its address and our own towards it, both perhaps with `%SCOPE`: of the addresses in
    the order of the resolver the first one with a way to it. Raises: OSError."""
    refused: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(target, _ANY_PORT, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as connected:
                connected.connect(address)
                return str(address[0]), _own_name(connected)
        except OSError as error:
            refused = refused or error
    raise refused or OSError(f"{target} has no address")


def _own_name(connected: socket.socket) -> str:
    own = connected.getsockname()
    address = str(own[0])
    scoped = connected.family == socket.AF_INET6 and own[3] and "%" not in address
    return f"{address}%{socket.if_indextoname(own[3])}" if scoped else address


@dataclass(frozen=True, slots=True)
class Surroundings:
    """This host, as checks see it. `root` stands for `/`: below it are `sys`, `proc` and `etc`. `probe`: as `ask_kernel`."""

    host: str = field(default_factory=socket.gethostname)
    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    tools: Tools = field(default_factory=Tools)
    addresses: Callable[[], Mapping[str, Sequence[str]]] = system_addresses
    probe: Callable[[str], tuple[str, str]] = ask_kernel

    def ask(self, *arguments: str, limit_s: float) -> str:
        """What a tool prints, errors last; nothing if there is no such tool, or no answer in time."""
        answer = self.tools.run(arguments, limit_s=limit_s)
        return "" if answer is None or answer.timed_out else f"{answer.stdout}\n{answer.stderr}"

    def read(self, path: str) -> str | None:
        """The text of a file below `root`, stripped; None if it cannot be read, for whatever reason."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """What is in a folder below `root`, sorted; nothing if it cannot be read."""
        try:
            return sorted(entry.name for entry in (self.root / path.lstrip("/")).iterdir())
        except OSError:
            return []
