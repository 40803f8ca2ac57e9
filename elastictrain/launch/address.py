"""The address at which the others reach this host, which may change while its launcher lives."""

import ipaddress
from collections.abc import Callable, Collection


def next_address(before: str, *, own: Collection[str], found: str) -> str:
    """What to tell the others from now on. Pure. `own` are this host's addresses now, `found` is the one that would be chosen.

    An address stays as long as the host has it, whichever route is the default one meanwhile: a change costs a restart. A host
    that is not connected for a while keeps the address that it had.
    """
    if before in own or found == before or _is_loopback(found):
        return before
    return found


class OwnAddress:
    """This host's address, looked at again each time. Where an operator or the cluster has set one, it stays."""

    def __init__(self, first: str, *, own: Callable[[], Collection[str]], find: Callable[[], str]) -> None:
        """`own`: this host's addresses; `find`: the one that others may reach. A `first` that is none of its own was set."""
        self._address = first
        self._own = own
        self._find = find
        self._is_set = first not in own()
        self._missing = False

    def look(self) -> str:
        """The address now; asks the kernel, and looks up names of peers."""
        own = self._own()
        missing = not self._is_set and self._address not in own
        # Not at the first look: an interface that is set up anew has no address for a moment.
        if missing and self._missing:
            self._address = next_address(self._address, own=own, found=self._find())
        self._missing = missing
        return self._address


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return True
