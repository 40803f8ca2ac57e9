"""Coming to the roster that one host serves, as that host or as another; and leaving it. Acts."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from elastictrain.config.roster_address import RosterAddress
from elastictrain.errors import StopRequestedError, StorageError, TransientStorageError
from elastictrain.launch.membership.codec import decode
from elastictrain.launch.membership.objects import Objects
from elastictrain.launch.membership.records import Entry
from elastictrain.launch.membership.registry import HOSTS, Registry
from elastictrain.launch.membership.serving import Site, serves, still_needed_by
from elastictrain.launch.membership.tcp_roster import LIMIT_S, TcpRoster, look_up
from elastictrain.launch.membership.tcp_server import RosterServer
from elastictrain.launch.membership.words import listed
from elastictrain.storage.failures import reason_of

_AGAIN_S = 0.25
_COMING_S = 1.0
"""Whoever was there before the server is taken in before it looks around: else its own host begins alone each time."""

_WORTH_SAYING_S = 1.5
_LINGER_S = 15.0
"""How long the server stays for others once its own host has ended: they form the next generation, or read that it is over."""

_CLOSING_S = 5.0


@dataclass(frozen=True, slots=True)
class Around:
    """What joining needs of the launcher."""

    store: Objects
    """The run's storage."""

    token: bytes
    site: Site
    asked_to_stop: Callable[[], bool]
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class JoinedRoster:
    """The roster at `address`: served here if this host has the address, reached in any case."""

    def __init__(self, address: RosterAddress, around: Around) -> None:
        self._address = address
        self._around = around
        self._server: RosterServer | None = None
        self._waits_for = self._said = ""
        self._waits_since_s = 0.0
        self.objects = TcpRoster(address, token=around.token)

    def join(self, *, wait_s: float) -> None:
        """Return when the roster answers; 0 s are for ever.

        Raises: ConfigError if this host can never serve it; TransientStorageError after `wait_s`; StopRequestedError.
        """
        around = self._around
        until_s = around.clock() + wait_s if wait_s else None
        while True:
            trouble = self._serve_if_own()
            try:
                Registry(self.objects).entries()
            except StorageError as error:
                # Where the name leads nowhere, that is the reason for the rest.
                trouble = trouble or str(error)
            else:
                break
            if around.asked_to_stop():
                raise StopRequestedError(f"asked to stop, while waiting for {self._sentence(trouble)}")
            if until_s is not None and around.clock() >= until_s:
                raise TransientStorageError(f"waited {wait_s:g} s (`launch.wait_s`) for {self._sentence(trouble)}")
            self._say_waiting(trouble, until_s)
            around.sleep(_AGAIN_S)
        if self._server is not None and self._server.objects is not None:
            around.say(f"this host serves the roster at {self._address}")
            if not self._is_loopback():
                around.sleep(_COMING_S)

    def close(self, *, host: str, quiet_s: float) -> None:
        """Leave. A server stays a little while for those whose lines are not older than `quiet_s`."""
        around, server = self._around, self._server
        if server is not None:
            until_s = around.clock() + _LINGER_S
            names = self._needed_by(server, host, quiet_s)
            if names:
                around.say(f"this host serves the roster until {listed(names)} can do without it, for {_LINGER_S:g} s at most")
            while names and around.clock() < until_s:
                around.sleep(_AGAIN_S)
                names = self._needed_by(server, host, quiet_s)
            server.close(limit_s=_CLOSING_S)
        self.objects.close()

    def _serve_if_own(self) -> str:
        """Why the address says nothing yet, if that is so."""
        if self._server is not None:
            return ""
        around = self._around
        try:
            found = [host for host, _ in look_up(self._address, limit_s=LIMIT_S)]
        except OSError as error:
            return f"{self._address.host} cannot be looked up: {reason_of(error)}"
        if serves(self._address, found, around.site):
            server = RosterServer(self._address, around.store, token=around.token)
            server.start()
            self._server = server
        return ""

    def _needed_by(self, server: RosterServer, host: str, quiet_s: float) -> tuple[str, ...]:
        kept = server.objects
        if kept is None:
            return ()
        now_s = time.monotonic()
        late = [one.data for one in kept.below(HOSTS) if one.data is not None and now_s - one.written_s <= quiet_s]
        lines = [entry for entry in (decode(Entry, data) for data in late) if entry is not None]
        try:
            newest = Registry(kept).newest()
        except StorageError:
            newest = None
        return still_needed_by(lines, newest, own=host)

    def _sentence(self, trouble: str) -> str:
        whose = "this host" if self._server is not None else "the host that has this address"
        return f"the roster, which {whose} serves ({trouble})"

    def _say_waiting(self, trouble: str, until_s: float | None) -> None:
        """Once for each reason that lasts."""
        now_s = self._around.clock()
        if trouble != self._waits_for:
            self._waits_for, self._waits_since_s = trouble, now_s
        if trouble != self._said and now_s - self._waits_since_s >= _WORTH_SAYING_S:
            self._said = trouble
            limit = "" if until_s is None else f", for {max(0.0, until_s - now_s):.0f} s at most"
            self._around.say(f"waiting for {self._sentence(trouble)}{limit}")

    def _is_loopback(self) -> bool:
        literal = self._address.literal
        return self._address.host == "localhost" or (literal is not None and literal.is_loopback)
