"""How much is checked, and what a failure of a check means. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from elastictrain.errors import EXIT_TRANSPORT
from elastictrain.preflight.verdict import Status, Verdict


class Level(StrEnum):
    """How much is checked."""

    OFF = "off"
    QUICK = "quick"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Ended:
    """How one rank of the last incarnation said that it ended."""

    rank: int
    exit_code: int


def choose_level(wanted: str, *, first_start: bool, ended: Sequence[Ended], world_size: int) -> tuple[Level, str]:
    """The level, and why. `wanted` is `preflight.level`; `ended` is what ranks of the last incarnation said, of `world_size`.

    A group whose ranks all ended with a transport failure has a network that fails. If a rank is gone without a word, its
    process was killed, and the others only noticed.
    """
    if wanted != "auto":
        return Level(wanted), f"preflight={wanted}"
    if first_start:
        return Level.FULL, "first start"
    spoke = {one.rank for one in ended}
    if ended and spoke >= set(range(world_size)) and any(one.exit_code == EXIT_TRANSPORT for one in ended):
        return Level.FULL, "the last incarnation ended with a transport failure"
    return Level.QUICK, "restart"


def wanted_checks(names: Iterable[str], modes: Mapping[str, str]) -> set[str]:
    """Those that are not off."""
    return {name for name in names if modes.get(name, "fail") != "off"}


def apply_modes(verdicts: Iterable[Verdict], modes: Mapping[str, str]) -> list[Verdict]:
    """What the configuration makes of the findings: checks that are off are left out, failures of some are warnings."""
    kept = []
    for verdict in verdicts:
        mode = modes.get(verdict.check, "fail")
        if mode == "off":
            continue
        demoted = mode == "warn" and verdict.status is Status.FAIL
        kept.append(replace(verdict, status=Status.WARN) if demoted else verdict)
    return kept
