"""Words of other people's tools, read with care: what cannot be understood is unknown (None), never a guess."""

import re

_NUMBER = re.compile(r"[+-]?\d{1,18}(?:\.\d{1,9})?(?![\d.])")
_BUS = re.compile(
    r"\b(?:(?P<domain>[0-9a-f]{4,8}):)?(?P<rest>[0-9a-f]{2}:[0-9a-f]{2})(?:\.(?P<function>[0-7]))?(?![0-9a-f])", re.I
)
_TRUE = frozenset({"yes", "active", "enabled", "true", "1"})
_FALSE = frozenset({"no", "not active", "disabled", "false", "0", "none"})


def decimal(text: str | None) -> float | None:
    """The number a text begins with ("16x", "27 C", "26.562 GB/s"), or None ("N/A", "[Unknown Error]", "ERR!", nothing)."""
    found = _NUMBER.match((text or "").strip())
    return float(found[0]) if found else None


def integer(text: str | None) -> int | None:
    """The whole number a text begins with, or None."""
    found = decimal(text)
    return int(found) if found is not None and found == int(found) else None


def truth(text: str | None) -> bool | None:
    """Yes or no, or None if the text says neither."""
    word = (text or "").strip().lower()
    return True if word in _TRUE else False if word in _FALSE else None


def word(text: str | None) -> str | None:
    """The text in one line, or None where a tool says that it does not know."""
    line = " ".join((text or "").split())
    vague = line.strip("[]").lower()
    known = (
        line and vague not in {"n/a", "not supported", "unknown error", "err!", "unknown", "none"} and "deprecated" not in vague
    )
    return line if known else None


def bus_id(text: str | None) -> str | None:
    """A PCI address as the kernel writes it (`0000:3b:00.0`), from any of the ways tools write one, or None."""
    found = _BUS.search(text or "")
    if found is None:
        return None
    domain = (found["domain"] or "0000").lower()
    return f"{domain[-4:] if domain[:-4].strip('0') == '' else domain}:{found['rest'].lower()}.{found['function'] or '0'}"
