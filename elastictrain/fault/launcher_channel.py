"""The channel between a launcher and each of its workers: a socket pair over which JSON lines go both ways.

A worker trains in one generation after the other, in the same process. When its generation ends, the launcher has it detach:
it leaves its groups, keeps what it has built, and waits for the rank of the next generation. A standby waits in the same way.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue

import msgspec

from elastictrain.errors import DetachedError

logger = logging.getLogger(__name__)

CHANNEL_VARIABLE = "ELASTICTRAIN_CHANNEL"  # descriptor of the worker's end
STANDBY_VARIABLE = "ELASTICTRAIN_STANDBY"  # the process gets its rank later; the variables of a rank are a likely one, or:
ANY_RANK, EXACT = "any", "exact"  # that rank and no other


class Attach(msgspec.Struct, tag="attach", frozen=True):
    """To a waiting worker: take part in a generation."""

    environment: dict[str, str]  # the variables of the rank, as torchrun would set them


class Detach(msgspec.Struct, tag="detach", frozen=True):
    """To a worker: its generation has ended."""

    reason: str


class Introduced(msgspec.Struct, tag="introduced", frozen=True):
    """From a worker: it has checked what it can check alone, and goes to meet the other ranks."""


class Monitored(msgspec.Struct, tag="monitored", frozen=True):
    """From the first worker of a host: from now on the launcher must watch this generation's workers."""

    folder: str  # with their progress files
    facts: str  # a `liveness.monitor_client.MonitoredHost`


class Attached(msgspec.Struct, tag="attached", frozen=True):
    """From a worker: its groups are made."""

    transport: str  # the variables that the preflight has set for NCCL and gloo, as `preflight.transport.settings` keeps them


class Detached(msgspec.Struct, tag="detached", frozen=True):
    """From a worker: it takes part in nothing, and waits for a rank."""

    exit_code: int  # with which the worker would have ended otherwise; 0 for a new standby
    built: bool = False  # whether it has its part of the model already


ToWorker = Attach | Detach
FromWorker = Introduced | Monitored | Attached | Detached


class Lines:
    """The messages in a stream of bytes."""

    def __init__(self, kinds: object) -> None:
        """`kinds`: a union of messages."""
        self._decoder = msgspec.json.Decoder(kinds)
        self._rest = b""

    def feed(self, data: bytes) -> list[object]:
        """The messages that `data` completes. Raises: msgspec.MsgspecError."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [self._decoder.decode(line) for line in lines]


def encode_line(message: ToWorker | FromWorker) -> bytes:
    return msgspec.json.encode(message) + b"\n"


class LauncherChannel:
    """A worker's end. `detach_reason` is set from the moment in which the launcher ends the present generation."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # guards the fields below: the generation may end while the worker attaches to it
        self._acting = threading.Lock()  # held while `_on_detach` is called
        self._on_detach: Callable[[], None] | None = None
        self.detach_reason: str | None = None
        self._offers: SimpleQueue[Attach | None] = SimpleQueue()
        threading.Thread(target=self._read, name="launcher-channel", daemon=True).start()

    def send(self, message: FromWorker) -> None:
        """A launcher that has ended is noticed by the reader."""
        with suppress(OSError):
            self._connection.sendall(encode_line(message))

    def on_detach(self, act: Callable[[], None] | None) -> None:
        """Have `act` called, in another thread, when the generation ends; None waits until such a call is over. Raises:
        DetachedError if it has ended already."""
        with self._acting, self._lock:
            self._on_detach = act
        if act is not None:
            self.check_attached()

    def end_generation(self, reason: str) -> None:
        """Have this process leave the present generation, as when the launcher asks for it; from any thread."""
        with self._acting:
            with self._lock:
                self.detach_reason, act = self.detach_reason or reason, self._on_detach
            if act is None:
                return
            try:
                act()
            except Exception:
                # The edge of the reading thread, without which the worker would hear of nothing any more.
                logger.exception("the groups could not be aborted")

    def check_attached(self) -> None:
        """Raises: DetachedError if the launcher has ended the generation."""
        if self.detach_reason is not None:
            raise DetachedError(self.detach_reason)

    def wait(self) -> Mapping[str, str] | None:
        """Wait for a rank; returns its variables, or None if the launcher has ended."""
        offer = self._offers.get()
        if offer is None:
            return None
        return offer.environment

    def _read(self) -> None:
        lines = Lines(ToWorker)
        try:
            with suppress(OSError, msgspec.MsgspecError):
                while data := self._connection.recv(1 << 16):
                    for message in lines.feed(data):
                        self._receive(message)
        finally:
            self._offers.put(None)

    def _receive(self, message: object) -> None:
        if isinstance(message, Attach):
            with self._lock:
                self.detach_reason = None
            self._offers.put(message)
        elif isinstance(message, Detach):
            self.end_generation(message.reason)


def open_channel(environment: Mapping[str, str]) -> LauncherChannel | None:
    """The worker's end of its channel; None if no launcher has started this process."""
    descriptor = environment.get(CHANNEL_VARIABLE, "")
    if not descriptor.isdecimal():
        return None
    os.set_inheritable(int(descriptor), False)
    return LauncherChannel(socket.socket(fileno=int(descriptor)))
