"""A person's settings for NCCL (RCCL reads the same) and gloo, without those of an earlier plan, and what they match."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from elastictrain.bounded_json import MalformedJsonError, parse_record
from elastictrain.surroundings import Surroundings

# Names and values that a plan has set, as JSON. Child processes inherit them; they are no person's settings.
OWN_VARIABLES = "ELASTICTRAIN_TRANSPORT"
IN_ENVIRONMENT = "the environment"


@dataclass(frozen=True, slots=True)
class Setting:
    value: str
    origin: str = IN_ENVIRONMENT  # or a file

    @property
    def number(self) -> int:
        """As NCCL reads it: the leading number, also hexadecimal, or 0."""
        match = re.match(r"\s*([+-]?(?:(0x)[0-9a-f]{1,16}|\d{1,18}))", self.value, re.ASCII | re.IGNORECASE)
        return int(match[1], 16 if match[2] else 10) if match else 0

    def undo(self, name: str) -> str:
        """The remedy that removes it."""
        return f"unset {name}" if self.origin == IN_ENVIRONMENT else f"remove {name} from {self.origin}"


def read_settings(surroundings: Surroundings) -> dict[str, Setting]:
    """A person's settings by name, without empty ones. The first place that has a name wins. Source: NCCL's `initEnv`: the
    environment, then $NCCL_CONF_FILE or else ~/.nccl.conf, then /etc/nccl.conf."""
    environment = surroundings.environment
    own = own_variables(environment)
    found = {
        name: Setting(value)
        for name, value in environment.items()
        if name.startswith(("NCCL_", "GLOO_")) and value and own.get(name) != value
    }
    home = environment.get("HOME", "")
    personal = environment.get("NCCL_CONF_FILE") or (f"{home}/.nccl.conf" if home else "")
    for path in (personal, "/etc/nccl.conf"):
        for line in (surroundings.read(path) or "").splitlines() if path else []:
            name, _, value = line.partition("=")
            if value and name.startswith("NCCL_"):
                found.setdefault(name, Setting(value, path))
    return found


def own_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What an earlier plan has set, in this process or an ancestor."""
    try:
        return parse_record(environment.get(OWN_VARIABLES, "{}"), dict[str, str])
    except MalformedJsonError:
        return {}


@dataclass(frozen=True, slots=True)
class NcclPattern:
    """NCCL_SOCKET_IFNAME and NCCL_IB_HCA: a leading `^` excludes, then `=` matches whole names, else prefixes, in a comma list.
    A device may have a `:PORT`. Source: NCCL's `ncclOsFindInterfaces`, `parseStringList` and `matchIfList`."""

    entries: tuple[tuple[str, int | None], ...]  # names; the port of a device or None for any
    exclude: bool
    exact: bool

    @classmethod
    def parse(cls, text: str) -> "NcclPattern":
        """Any text is valid."""
        listed = text.removeprefix("^")
        entries: list[tuple[str, int | None]] = []
        for one in listed.removeprefix("=").split(","):
            name, port, *_ = *one.split(":"), ""
            # As atoi: text that is no number is 0, which no port has; an empty port stands for any.
            digits = port if port.isascii() and port.isdecimal() and len(port) < 10 else "0"
            entries += [(name, int(digits) if port and port != "-1" else None)] if name else []
        return cls(tuple(entries), exclude=text.startswith("^"), exact=listed.startswith("="))

    def matches(self, name: str, port: int | None = None) -> bool:
        """Whether NCCL may use it. Without entries everything matches; `^` alone matches nothing."""
        hit = not self.entries or any(self._hits(entry, name, port) for entry in self.entries)
        return hit != self.exclude

    def without_match(self, names: list[str]) -> list[str]:
        """Entries that match none of `names`."""
        if self.exclude:
            return []
        return [entry[0] for entry in self.entries if not any(self._hits(entry, name, None) for name in names)]

    def _hits(self, entry: tuple[str, int | None], name: str, port: int | None) -> bool:
        named = name == entry[0] if self.exact else name.startswith(entry[0])
        return named and (port is None or entry[1] is None or port == entry[1])
