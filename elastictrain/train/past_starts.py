"""What the records of a run tell of its earlier starts: how ranks ended, and what preflights found."""

import json
import logging
from pathlib import Path

from elastictrain.errors import StorageError
from elastictrain.preflight.history import STARTS, Findings
from elastictrain.preflight.policy import Ended
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

_READ_AT_MOST = 64
"""Records of the last incarnation: in a large group those of the first ranks tell enough."""


class PastStarts:
    """Of the run in `store`, before `incarnation`. What cannot be read is not known, and said."""

    def __init__(self, store: Store, *, incarnation: str) -> None:
        self._store = store
        self._incarnation = incarnation

    def ended(self) -> tuple[list[Ended], int]:
        """How the ranks of the last incarnation said that they ended, and how many of them there were."""
        try:
            names = self._names()
            before = max((name.rpartition("-r")[0] for name in names), default=None)
            of_last = [name for name in names if before is not None and name.startswith(f"{before}-r")][:_READ_AT_MOST]
            ended = [one for name in of_last if (one := last_word(self._store.read(name), rank=rank_of(name))) is not None]
        except StorageError as error:
            logger.warning("how the last incarnation ended cannot be read: %s", error)
            return [], 1
        return ended, len({rank_of(name) for name in of_last})

    def findings(self) -> list[Findings]:
        """Of each earlier preflight of the hosts, the newest last."""
        found: list[Findings] = []
        try:
            for name in [name for name in self._names() if rank_of(name) == 0][-STARTS:]:
                found += findings_in(self._store.read(name))
        except StorageError as error:
            logger.warning("what earlier starts found cannot be read: %s", error)
        return found

    def _names(self) -> list[str]:
        return sorted(
            info.key for info in self._store.list("events") if rank_of(info.key) >= 0 and self._incarnation not in info.key
        )


def last_word(data: bytes, *, rank: int) -> Ended | None:
    """How a rank ended, by the last line of its records; None if it did not say."""
    lines = data.decode(errors="replace").strip().splitlines()
    try:
        row = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return None
    if not isinstance(row, dict) or row.get("event") not in ("failure", "stop"):
        return None
    code = row.get("exit_code")
    return Ended(rank, code) if isinstance(code, int) else None


def findings_in(data: bytes) -> list[Findings]:
    """What the records of one incarnation tell of its preflight of hosts."""
    found: list[Findings] = []
    for line in data.decode(errors="replace").splitlines():
        if '"preflight"' not in line:
            continue
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("stage") == "hosts" and isinstance(row.get("findings"), list):
            found.append([one for one in row["findings"] if isinstance(one, dict)])
    return found


def rank_of(key: str) -> int:
    """Whose records a key names; -1 if they are of no rank."""
    digits = Path(key).name.rpartition("-r")[2].partition(".")[0]
    return int(digits) if digits.isdecimal() else -1
