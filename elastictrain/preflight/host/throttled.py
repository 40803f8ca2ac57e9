"""How often this host's control group was throttled, kept from one preflight to the next."""

import logging
from pathlib import Path

from elastictrain.preflight.host.cgroup import Throttling
from elastictrain.preflight.kept import keep, load_kept
from elastictrain.preflight.surroundings import Surroundings

logger = logging.getLogger(__name__)

FORMAT = 1


def load_throttling(path: Path, surroundings: Surroundings) -> Throttling | None:
    """As it was kept for this control group since this boot; None if nothing is known of it."""
    row, wanted = load_kept(path), _group(surroundings)
    if row is None or wanted is None or any(row.get(name) != value for name, value in wanted.items()):
        return None
    periods, throttled, seconds = (row.get(name) for name in ("periods", "throttled_periods", "throttled_s"))
    if not _is_count(periods) or not _is_count(throttled) or not isinstance(seconds, int | float):
        return None
    return Throttling(int(str(periods)), int(str(throttled)), float(seconds))


def keep_throttling(path: Path, now: Throttling, surroundings: Surroundings) -> None:
    """For the next preflight on this host, which counts from the group's beginning where this fails."""
    group = _group(surroundings)
    if group is None:
        return
    counts = {"periods": now.periods, "throttled_periods": now.throttled_periods, "throttled_s": now.throttled_s}
    try:
        keep(path, {**group, **counts})
    except OSError as error:
        logger.info("how often this host is throttled cannot be kept in %s: %s", path, error)


def _group(surroundings: Surroundings) -> dict[str, object] | None:
    """Whose counters they are: those of another boot or another group mean nothing here."""
    boot_id, group = surroundings.read("/proc/sys/kernel/random/boot_id"), surroundings.read("/proc/self/cgroup")
    return {"format": FORMAT, "boot_id": boot_id, "group": group} if boot_id and group else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
