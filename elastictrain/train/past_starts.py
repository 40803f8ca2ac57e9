"""What the records of a run tell of its earlier starts: how ranks ended, and what preflights found."""

import json
import logging
import re

from elastictrain.errors import StorageError
from elastictrain.preflight.history import STARTS, Findings
from elastictrain.preflight.policy import Ended
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

_LOG = re.compile(r"events/(\d+-\w+)-r(\d+)(?:\.part-\d+)?\.jsonl")
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
            starts = self._starts()
            logs = starts[max(starts)] if starts else {}
            first = dict(sorted(logs.items())[:_READ_AT_MOST])
            # A log in a bucket grows by objects; the last one has the last word.
            words = [last_word(self._store.read(keys[-1]), rank=rank) for rank, keys in first.items()]
        except StorageError as error:
            logger.warning("how the last incarnation ended cannot be read: %s", error)
            return [], 1
        return [word for word in words if word is not None], len(first)

    def findings(self) -> list[Findings]:
        """Of each earlier preflight of the hosts, the newest last."""
        found: list[Findings] = []
        try:
            for _, logs in sorted(self._starts().items())[-STARTS:]:
                # A preflight is among the first that happens.
                found += findings_in(self._store.read(logs[0][0])) if 0 in logs else []
        except StorageError as error:
            logger.warning("what earlier starts found cannot be read: %s", error)
        return found

    def _starts(self) -> dict[str, dict[int, list[str]]]:
        """By incarnation and rank: the keys of its log, in their order."""
        starts: dict[str, dict[int, list[str]]] = {}
        for key in sorted(info.key for info in self._store.list("events")):
            match = _LOG.fullmatch(key)
            if match is not None and match[1] != self._incarnation:
                starts.setdefault(match[1], {}).setdefault(int(match[2]), []).append(key)
        return starts


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
