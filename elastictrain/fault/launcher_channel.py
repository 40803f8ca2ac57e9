"""The channel between a launcher and each of its workers: a socket pair over which JSON lines go both ways.

A worker trains in one generation after the other, in the same process. When its generation ends, the launcher has it detach:
it leaves its groups, keeps what it has built, and waits for the rank of the next generation. A standby waits in the same way.
"""

import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue

import msgspec

from elastictrain.bounded_json import JsonLines, MalformedJsonError, encode_record
from elastictrain.errors import DetachedError
from elastictrain.fault.reasons import Reason, SlowRank
from elastictrain.fault.stop import StopListener
from elastictrain.identity import Identity

logger = logging.getLogger(__name__)

STANDBY_VARIABLE = "ELASTICTRAIN_STANDBY"  # the process gets its rank later; the variables of a rank are a likely one, or:
ANY_RANK, EXACT = "any", "exact"  # that rank and no other


class Attach(msgspec.Struct, tag="attach", frozen=True):
    """To a waiting worker: take part in a generation."""

    environment: dict[str, str]  # the variables of the rank, as torchrun would set them


class Detach(msgspec.Struct, tag="detach", frozen=True):
    """To a worker: its generation has ended."""

    reason: str


class AskToStop(msgspec.Struct, tag="stop", frozen=True):
    """To a worker, repeatedly: save and leave in order, with the other ranks."""

    reason: str
    deadline: float  # unix time at which the worker is killed
    host_stays: bool  # this host takes part in a later generation: what its memory holds is safe there


class Introduced(msgspec.Struct, tag="introduced", frozen=True):
    """From a worker: it has checked what it can check alone, and goes to meet the other ranks."""


class Monitored(msgspec.Struct, tag="monitored", frozen=True):
    """From the first worker of a host: from now on the launcher must watch this generation's workers."""

    folder: str  # with their progress files
    facts: str  # a `liveness.monitor_client.MonitoredHost`


class Attached(msgspec.Struct, tag="attached", frozen=True):
    """From a worker: its groups are made."""

    transport: str  # the variables that the preflight has set for NCCL and gloo, as `preflight.transport.settings` keeps them


class Begun(msgspec.Struct, tag="begun", frozen=True):
    """From the first worker of a host: the first step is done."""

    resumed_step: int  # whose state was restored


class LeaveOutSlow(msgspec.Struct, tag="straggler", frozen=True):
    """From the first worker of a host: leave this host out, whose rank holds up the others; None: not any more."""

    slow: SlowRank | None


class DetachReceived(msgspec.Struct, tag="detach_received", frozen=True):
    """From a worker: it has been told to detach, and its threads run."""


class Detached(msgspec.Struct, tag="detached", frozen=True):
    """From a worker: it takes part in nothing, and waits for a rank."""

    exit_code: int  # with which the worker would have ended otherwise; 0 for a new standby
    built: bool = False  # whether it has its part of the model already


ToWorker = Attach | Detach | AskToStop
FromWorker = Introduced | Monitored | Attached | Begun | LeaveOutSlow | Reason | DetachReceived | Detached


def tell_launcher(identity: Identity, message: FromWorker) -> None:
    """From any thread. Never raises: a launcher that has ended is noticed by whoever reads from it."""
    if identity.launcher is not None:
        with suppress(OSError):
            os.write(identity.launcher.channel, encode_line(message))


def has_been_called(identity: Identity) -> bool:
    """Whether the launcher has asked a process to end that does not read its channel yet."""
    launcher = identity.launcher
    return launcher is not None and launcher.channel >= 0 and bool(select.select([launcher.channel], [], [], 0.0)[0])


def encode_line(message: ToWorker | FromWorker) -> bytes:
    return encode_record(message) + b"\n"


class LauncherChannel:
    """A worker's end. `detach_reason` is set from the moment in which the launcher ends the present generation."""

    def __init__(self, connection: socket.socket, *, on_stop: Callable[[AskToStop], None]) -> None:
        """`on_stop` is called in another thread."""
        self._connection = connection
        self.on_stop = on_stop
        self._lock = threading.Lock()  # guards the fields below: the generation may end while the worker attaches to it
        self._acting = threading.Lock()  # held while `_on_detach` is called
        self._on_detach: Callable[[], None] | None = None
        self.detach_reason: str | None = None
        self._offers: SimpleQueue[Attach | None] = SimpleQueue()
        threading.Thread(target=self._read, name="launcher-channel", daemon=True).start()

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
        return None if offer is None else offer.environment

    def _read(self) -> None:
        lines: JsonLines[ToWorker] = JsonLines(ToWorker)  # type: ignore[arg-type]
        try:
            with suppress(OSError, MalformedJsonError):
                while data := self._connection.recv(1 << 16):
                    for message in lines.feed(data):
                        self._receive(message)
        finally:
            self._offers.put(None)

    def _receive(self, message: ToWorker) -> None:
        if isinstance(message, Attach):
            with self._lock:
                self.detach_reason = None
            self._offers.put(message)
        elif isinstance(message, Detach):
            with suppress(OSError):
                self._connection.send(encode_line(DetachReceived()))
            self.end_generation(message.reason)
        else:
            self.on_stop(message)


def open_channel(identity: Identity, stop: StopListener) -> LauncherChannel | None:
    """The worker's end of its channel; None if no launcher has started this process. `stop` gets what the launcher asks for."""
    if identity.launcher is None or identity.launcher.channel < 0:
        return None

    def ask(message: AskToStop) -> None:
        stop.ask(message.reason, deadline=message.deadline, host_stays=message.host_stays)

    os.set_inheritable(identity.launcher.channel, False)
    return LauncherChannel(socket.socket(fileno=identity.launcher.channel), on_stop=ask)
