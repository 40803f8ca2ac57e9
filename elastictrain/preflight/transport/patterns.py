"""The little languages in which NCCL and gloo take names of interfaces and devices."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    port: int | None = None


@dataclass(frozen=True, slots=True)
class NcclPattern:
    """NCCL_SOCKET_IFNAME and NCCL_IB_HCA: `^` first excludes, then `=` matches whole names, else prefixes, in a comma list;
    a device can be followed by `:PORT`.

    Source: NCCL's `ncclOsFindInterfaces`, `parseStringList` and `matchIfList`.
    """

    entries: tuple[_Entry, ...]
    exclude: bool
    exact: bool

    @classmethod
    def parse(cls, text: str) -> "NcclPattern":
        """The value of the variable; any text is one."""
        exclude = text.startswith("^")
        text = text.removeprefix("^")
        exact = text.startswith("=")
        entries = [_entry(one) for one in text.removeprefix("=").split(",") if one]
        return cls(tuple(entry for entry in entries if entry.name), exclude, exact)

    def matches(self, name: str, port: int | None = None) -> bool:
        """Whether NCCL may use it. Without entries everything matches, and `^` alone matches nothing."""
        hit = not self.entries or any(self._hit(entry, name, port) for entry in self.entries)
        return hit != self.exclude

    def without_match(self, names: list[str]) -> list[str]:
        """What is asked for by name, but fits none of `names`."""
        if self.exclude:
            return []
        return [entry.name for entry in self.entries if not any(self._hit(entry, name, None) for name in names)]

    def _hit(self, entry: _Entry, name: str, port: int | None) -> bool:
        named = name == entry.name if self.exact else name.startswith(entry.name)
        return named and (port is None or entry.port is None or port == entry.port)


def gloo_names(text: str) -> list[str]:
    """GLOO_SOCKET_IFNAME: whole names in a comma list; what is between two commas counts, a last empty part does not."""
    return text.removesuffix(",").split(",")


def counts(text: str) -> bool:
    """Whether NCCL and gloo look at this value of their *_SOCKET_IFNAME at all: one letter they take for nothing."""
    return len(text) > 1


def _entry(text: str) -> _Entry:
    name, _, rest = text.partition(":")
    port = rest.partition(":")[0]
    # As atoi: what is no number is 0, and no port has that number; nothing at all stands for any port.
    digits = port if port.isascii() and port.isdecimal() and len(port) < 10 else "0"
    return _Entry(name, int(digits) if port and port != "-1" else None)
