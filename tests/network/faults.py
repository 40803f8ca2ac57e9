"""Networks that are ill in known ways, and the link checks of all hosts on them."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hosts import INTERFACE, Host
from namespaces import Namespaces
from torchruns import Run, wait_until

PORT = 29477
BLOCKED_PORT = 29478
ROSTER_S = 10.0

_MEMBER = Path(__file__).with_name("link_member.py")

# Frames that are put together in software would pass a small MTU as if it were large.
_OFFLOADS_OFF = """
import ctypes, fcntl, socket, struct, sys
with socket.socket() as control:
    for command in (0x17, 0x1F, 0x24, 0x2C):  # ETHTOOL_STXCSUM, _STSO, _SGSO and _SGRO
        value = ctypes.create_string_buffer(struct.pack("II", command, 0))
        request = struct.pack("16sP", sys.argv[1].encode(), ctypes.addressof(value)).ljust(40, b"\\0")
        fcntl.ioctl(control, 0x8946, request)  # SIOCETHTOOL
"""

# Passes whole frames on between two interfaces, each after a while.
_RELAY = """
import collections, select, socket, sys, time
names, delay = sys.argv[1:3], float(sys.argv[3])
ends = []
for name in names:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    end.bind((name, 0))
    end.setblocking(False)
    ends.append(end)
queues = [collections.deque(), collections.deque()]
print("relays", flush=True)
while True:
    now = time.monotonic()
    for queue, end in zip(queues, reversed(ends)):
        while queue and queue[0][0] <= now:
            try:
                end.send(queue.popleft()[1])
            except OSError:
                pass
    wait = min((queue[0][0] - now for queue in queues if queue), default=1.0)
    for end in select.select(ends, [], [], max(0.0, wait))[0]:
        try:
            for _ in range(64):
                frame, sender = end.recvfrom(65536)
                if sender[2] != socket.PACKET_OUTGOING and len(queues[ends.index(end)]) < 10000:
                    queues[ends.index(end)].append((time.monotonic() + delay, frame))
        except BlockingIOError:
            pass
"""


def inside(place: Namespaces, *command: str) -> None:
    """Run a command on a host or on the switch. Raises: AssertionError with what it complains about."""
    done = subprocess.run(place.entered(command), check=False, capture_output=True, text=True)
    assert not done.returncode, f"{' '.join(command)}: {done.stderr}"


def switch_of(host: Host) -> tuple[Namespaces, str]:
    """The switch, and the port that the host is on."""
    return host.switch, host.switch_port


def place_of(host: Host) -> Namespaces:
    return host.namespaces


def without_offloads(host: Host) -> None:
    """From now on frames are on the wire as they are sent."""
    switch, port = switch_of(host)
    inside(place_of(host), sys.executable, "-c", _OFFLOADS_OFF, INTERFACE)
    inside(switch, sys.executable, "-c", _OFFLOADS_OFF, port)


def jumbo(host: Host, *, switch_too: bool) -> None:
    """The host sends frames up to 9000 bytes; its port of the switch takes them, or drops them without a word."""
    without_offloads(host)
    switch, port = switch_of(host)
    place_of(host).ip("link", "set", INTERFACE, "mtu", "9000")
    if switch_too:
        switch.ip("link", "set", port, "mtu", "9000")


def jumbo_bridge(host: Host) -> None:
    """The switch itself passes frames up to 9000 bytes; its ports decide. Call it when all ports have their MTU."""
    switch, _ = switch_of(host)
    switch.ip("link", "set", "bridge", "mtu", "9000")


def limit_rate(host: Host, *, sent: bool = True, received: bool = True, rate: str = "100mbit", burst: str = "64kb") -> None:
    """From now on the host's link is this fast."""
    switch, port = switch_of(host)
    shape = ("rate", rate, "burst", burst, "latency", "50ms")
    if sent:
        inside(place_of(host), "tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *shape)
    if received:
        inside(switch, "tc", "qdisc", "replace", "dev", port, "root", "tbf", *shape)


def delay(host: Host, others: Sequence[Host], *, seconds: float, log: Path) -> None:
    """Frames to and from this host take so much longer, each way."""
    for one in (host, *others):
        without_offloads(one)
    switch, port = switch_of(host)
    switch.ip("link", "add", "name", "held", "type", "veth", "peer", "name", "passed")
    switch.ip("link", "set", port, "nomaster")
    for name in ("held", "passed"):
        inside(switch, sys.executable, "-c", _OFFLOADS_OFF, name)
    switch.ip("link", "set", "passed", "master", "bridge", "up")
    switch.ip("link", "set", "held", "promisc", "on", "up")
    switch.ip("link", "set", port, "promisc", "on")
    with log.open("wb") as output:
        command = switch.entered([sys.executable, "-u", "-c", _RELAY, port, "held", str(seconds)])
        relay = Run(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT), log)
    # As if it lived on the host: it ends with it.
    host.runs.append(relay)
    wait_until(lambda: "relays" in relay.output(), timeout_s=60, what="the relay")


def lose(host: Host, percent: float, *, sent: bool = True, received: bool = True, other: Host | None = None) -> None:
    """From now on the switch drops so many frames at random that this host sends or receives, or only from and to another."""
    switch, port = switch_of(host)
    table = f"loss_{host.name}"
    rules = [f"add table netdev {table}"]
    for wanted, hook, peer in ((sent, "ingress", "daddr"), (received, "egress", "saddr")):
        if wanted:
            only = f"ip {peer} {other.address}" if other else ""
            rules.append(f"add chain netdev {table} {hook} {{ type filter hook {hook} device {port} priority 0; }}")
            rules.append(f"add rule netdev {table} {hook} {only} numgen random mod 10000 < {round(100 * percent)} drop")
    inside(switch, "nft", "; ".join(rules))


def drop_sent(host: Host, match: str) -> None:
    """From now on the switch drops the frames of this host that nft's expression matches."""
    switch, port = switch_of(host)
    chain = f"add chain netdev drop_{host.name} sent {{ type filter hook ingress device {port} priority 0; }}"
    rule = f"add rule netdev drop_{host.name} sent {match} drop"
    inside(switch, "nft", f"add table netdev drop_{host.name}; {chain}; {rule}")


def block(source: Host, target: Host, *, port: int) -> None:
    """Connections from one host to a TCP port of another get no answer; those in the other direction do."""
    place = place_of(target)
    # Its own addresses are looked up first of all: after this, only after the rule below.
    place.ip("rule", "add", "pref", "100", "lookup", "local")
    place.ip("rule", "del", "pref", "0")
    place.ip("rule", "add", "pref", "10", "from", source.address, "ipproto", "tcp", "dport", str(port), "blackhole")


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
    hosts: Sequence[Host],
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
