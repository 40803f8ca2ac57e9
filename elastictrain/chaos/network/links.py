"""What can be wrong with the network of a `VirtualHost`: links that are slow, lossy, small, far or closed."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from elastictrain.chaos.network.hosts import INTERFACE, VirtualHost
from elastictrain.chaos.network.namespaces import Namespaces, run_tool
from elastictrain.chaos.processes import StartedProcess, wait_until

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
    """Run a command on a host or on the switch. Raises: RuntimeError with what it complains about."""
    run_tool(*place.entered(command))


def without_offloads(host: VirtualHost) -> None:
    """From now on frames are on the wire as they are sent."""
    switch, port = host.switch, host.switch_port
    inside(host.namespaces, sys.executable, "-c", _OFFLOADS_OFF, INTERFACE)
    inside(switch, sys.executable, "-c", _OFFLOADS_OFF, port)


def jumbo(host: VirtualHost, *, switch_too: bool) -> None:
    """The host sends frames up to 9000 bytes; its port of the switch takes them, or drops them without a word."""
    without_offloads(host)
    switch, port = host.switch, host.switch_port
    host.namespaces.ip("link", "set", INTERFACE, "mtu", "9000")
    if switch_too:
        switch.ip("link", "set", port, "mtu", "9000")


def jumbo_bridge(host: VirtualHost) -> None:
    """The switch itself passes frames up to 9000 bytes; its ports decide. Call it when all ports have their MTU."""
    host.switch.ip("link", "set", "bridge", "mtu", "9000")


def limit_rate(
    host: VirtualHost, *, sent: bool = True, received: bool = True, rate: str = "100mbit", burst: str = "64kb"
) -> None:
    """From now on the host's link is this fast."""
    switch, port = host.switch, host.switch_port
    shape = ("rate", rate, "burst", burst, "latency", "50ms")
    if sent:
        inside(host.namespaces, "tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *shape)
    if received:
        inside(switch, "tc", "qdisc", "replace", "dev", port, "root", "tbf", *shape)


def delay(host: VirtualHost, others: Sequence[VirtualHost], *, seconds: float, log: Path) -> None:
    """Frames to and from this host take so much longer, each way."""
    for one in (host, *others):
        without_offloads(one)
    switch, port = host.switch, host.switch_port
    switch.ip("link", "add", "name", "held", "type", "veth", "peer", "name", "passed")
    switch.ip("link", "set", port, "nomaster")
    for name in ("held", "passed"):
        inside(switch, sys.executable, "-c", _OFFLOADS_OFF, name)
    switch.ip("link", "set", "passed", "master", "bridge", "up")
    switch.ip("link", "set", "held", "promisc", "on", "up")
    switch.ip("link", "set", port, "promisc", "on")
    with log.open("wb") as output:
        command = switch.entered([sys.executable, "-u", "-c", _RELAY, port, "held", str(seconds)])
        relay = StartedProcess(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT), log)  # noqa: S603
    # As if it lived on the host: it ends with it.
    host.runs.append(relay)
    wait_until(lambda: "relays" in relay.output(), timeout_s=60, what="the relay")


def lose(
    host: VirtualHost, percent: float, *, sent: bool = True, received: bool = True, other: VirtualHost | None = None
) -> None:
    """From now on the switch drops so many frames at random that this host sends or receives, or only from and to another."""
    switch, port = host.switch, host.switch_port
    table = f"loss_{host.name}"
    rules = [f"add table netdev {table}"]
    for wanted, hook, peer in ((sent, "ingress", "daddr"), (received, "egress", "saddr")):
        if wanted:
            only = f"ip {peer} {other.address}" if other else ""
            rules.append(f"add chain netdev {table} {hook} {{ type filter hook {hook} device {port} priority 0; }}")
            which = "" if percent >= 100 else f"numgen random mod 10000 < {round(100 * percent)}"
            rules.append(f"add rule netdev {table} {hook} {only} {which} drop")
    inside(switch, "nft", "; ".join(rules))


def lose_nothing(host: VirtualHost) -> None:
    """The end of `lose`."""
    inside(host.switch, "nft", f"delete table netdev loss_{host.name}")


def drop_sent(host: VirtualHost, match: str) -> None:
    """From now on the switch drops the frames of this host that nft's expression matches."""
    switch, port = host.switch, host.switch_port
    chain = f"add chain netdev drop_{host.name} sent {{ type filter hook ingress device {port} priority 0; }}"
    rule = f"add rule netdev drop_{host.name} sent {match} drop"
    inside(switch, "nft", f"add table netdev drop_{host.name}; {chain}; {rule}")


def block(source: VirtualHost, target: VirtualHost, *, port: int) -> None:
    """Connections from one host to a TCP port of another get no answer; those in the other direction do."""
    place = target.namespaces
    # Its own addresses are looked up first of all: after this, only after the rule below.
    place.ip("rule", "add", "pref", "100", "lookup", "local")
    place.ip("rule", "del", "pref", "0")
    place.ip("rule", "add", "pref", "10", "from", source.address, "ipproto", "tcp", "dport", str(port), "blackhole")
