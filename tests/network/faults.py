"""The link checks of all hosts of a network."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastictrain.chaos.network.hosts import INTERFACE, VirtualHost

PORT = 29477
BLOCKED_PORT = 29478
ROSTER_S = 10.0

_MEMBER = Path(__file__).with_name("link_member.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """What `link_member.py` is told."""

    name: str
    node_rank: int
    num_hosts: int
    address: str
    folder: str
    interface: str = INTERFACE
    ports: tuple[int, ...] = (PORT, BLOCKED_PORT)
    full: bool = True
    roster_s: float = ROSTER_S
    stop_at: str = ""
    skew_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of the link checks; `verdicts` are those of the first host. `seconds`: from the roster on."""

    verdicts: list[dict[str, Any]]
    seconds: float
    num_rounds: int

    def of(self, *statuses: str) -> list[tuple[str, str, str]]:
        """Check, scope and subject of the verdicts with such a status."""
        return [(row["check"], row["scope"], row["subject"]) for row in self.verdicts if row["status"] in statuses]

    def failed(self) -> list[tuple[str, str, str]]:
        return self.of("fail")

    def verdict(self, check: str, subject: str) -> dict[str, Any]:
        (found,) = [row for row in self.verdicts if row["check"] == check and row["subject"] == subject]
        return found


def check_links(
    hosts: Sequence[VirtualHost],
    folder: Path,
    *,
    absent: Sequence[str] = (),
    changed: Mapping[str, Mapping[str, Any]] = {},
    **facts: Any,
) -> Checked:
    """The link checks on all hosts but the absent ones. `changed`: what is different on a host, by its name.

    Who is to fall silent has nothing to report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    runs = {}
    for rank, host in enumerate(hosts):
        if host.name in absent:
            continue
        told = LinkFacts(
            name=host.name,
            node_rank=rank,
            num_hosts=len(hosts),
            address=host.address,
            folder=str(folder),
            **{**facts, **changed.get(host.name, {})},
        )
        command = [sys.executable, _MEMBER, json.dumps(asdict(told))]
        runs[host.name] = host.popen(command, log=folder / "logs" / f"{host.name}.txt")
    reports = []
    deadline = time.monotonic() + 60
    for name, run in runs.items():
        if changed.get(name, {}).get("stop_at"):
            continue
        assert run.wait(max(0.0, deadline - time.monotonic())) == 0, run.output()
        reports.append(json.loads(run.output().strip().rpartition("\n")[2]))
    assert not any(report["verdicts"] for report in reports[1:]), "another host than the first one speaks"
    return Checked(
        reports[0]["verdicts"],
        seconds=max(report["seconds"] for report in reports),
        num_rounds=reports[0]["num_rounds"],
    )
