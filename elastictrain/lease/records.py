"""What storage says of the owner of a run, and when that owner counts as gone. Pure.

A generation is one object, created if it does not exist; the newest one names the owner. An owner shows that it lives by a
number that grows in an object of its own. All observers use their own monotonic clock.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum, auto

from elastictrain.bounded_json import as_record, encode_record, parse_json, parse_record

LAUNCHER = "launch"
"""The owner of every generation of `python -m elastictrain.launch`: launchers agree among themselves."""

BEAT_S = 5.0
"""Interval at which an owner shows that it lives."""

STALE_S = 20.0
"""How long an owner may be silent before another one may take over; a few of its beats, so that slow storage is survived."""


class Hold(StrEnum):
    """What is known of an owner."""

    FREE = auto()
    HELD = auto()
    UNKNOWN = auto()
    """Not looked at for long enough."""


@dataclass(frozen=True, slots=True)
class LeaseClaim:
    """A generation, as far as its owner goes."""

    number: int
    owner: str
    """Empty where the record is damaged, or older than owners."""

    host: str = ""
    pid: int = 0
    lines: tuple[str, ...] = ()
    """Names of the objects in which its owner shows that it lives."""

    over: bool = False
    """Whether the run was over: nobody holds it."""

    def __str__(self) -> str:
        who = f"launcher(s) on {self.host}" if self.owner == LAUNCHER else f"process {self.pid} on {self.host}"
        return f"{who}, generation {self.number}"


@dataclass(frozen=True, slots=True)
class Sign:
    """What an owner's object says."""

    beat: int
    gone: bool
    """Whether it has left, or its processes are known to be dead."""


@dataclass(frozen=True, slots=True)
class _Member:
    name: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class _LauncherGeneration:
    """As launchers write it, as far as its owner goes."""

    number: int
    outcome: str
    owner: str = ""
    members: tuple[_Member, ...] = ()

    def claim(self) -> LeaseClaim:
        owner = LAUNCHER if self.owner == LAUNCHER else ""
        names, lines = ", ".join(one.name for one in self.members), tuple(one.host for one in self.members)
        return LeaseClaim(self.number, owner, names, lines=lines, over=self.outcome != "run")


@dataclass(frozen=True, slots=True)
class _SignRecord:
    beat: int
    state: str = ""
    writers: tuple[str, ...] = ()


def parse_claim(number: int, data: bytes) -> LeaseClaim:
    """From the record of a generation, also one that launchers made. What cannot be read has no owner, and is over."""
    try:
        document = parse_json(data)
        if "outcome" in document:
            claim = as_record(document, _LauncherGeneration).claim()
        else:
            claim = as_record({"over": True, **document}, LeaseClaim)
    except (ValueError, TypeError):
        return LeaseClaim(number, "", over=True)
    return claim if claim.number == number else LeaseClaim(number, "", over=True)


def encode_sign(*, beat: int, gone: bool, writers: tuple[str, ...]) -> bytes:
    """What an owner's object says."""
    return encode_record(_SignRecord(beat, "gone" if gone else "busy", writers))


def parse_sign(data: bytes, *, is_dead: Callable[[str], bool]) -> Sign | None:
    """The inverse; reads the lines of launchers, too. None if it is damaged."""
    try:
        record = parse_record(data, _SignRecord)
    except ValueError:
        return None
    return Sign(record.beat, record.state == "gone" or (bool(record.writers) and all(map(is_dead, record.writers))))


def judge(before: Mapping[str, Sign], now: Mapping[str, Sign], *, watched_s: float) -> Hold:
    """Whether the owner of these objects lives; `before` was read `watched_s` ago."""
    living = {name: sign for name, sign in now.items() if not sign.gone}
    if now and not living:
        return Hold.FREE
    if any(before.get(name) != sign for name, sign in living.items()):
        return Hold.HELD
    return Hold.FREE if watched_s >= STALE_S else Hold.UNKNOWN
