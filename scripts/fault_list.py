"""What `faults.py` can make wrong with hosts, and what the preflight must say of it."""

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from elastictrain.chaos.network.hosts import INTERFACE, VirtualHost  # noqa: E402
from elastictrain.chaos.network.links import delay, inside, jumbo, jumbo_bridge, limit_rate, lose, without_offloads  # noqa: E402

PORT = 29610

Named = set[tuple[str, str]]  # check and subject


@dataclass
class Scene:
    """Hosts before their preflight, one or two of which a fault makes ill."""

    hosts: list[VirtualHost]
    folder: Path
    run_dir: Path
    chance: random.Random
    variables: dict[str, dict[str, str]] = field(default_factory=dict)  # of a host's preflight, by its name
    prefixes: dict[str, list[str]] = field(default_factory=dict)  # of a host's command
    absent: set[str] = field(default_factory=set)
    later: list[tuple[float, Callable[[Mapping[str, Any]], None]]] = field(default_factory=list)  # seconds after the start

    def __post_init__(self) -> None:
        self.ill, self.other = self.chance.sample(self.hosts, 2)
        # The first host speaks for all.
        if self.ill is self.hosts[0]:
            self.ill, self.other = self.other, self.ill

    def shell(self, host: VirtualHost, text: str) -> None:
        inside(host.namespaces, "sh", "-c", text)

    def firewall(self, host: VirtualHost, *rules: str) -> None:
        chains = "".join(
            f"add chain inet wall {hook} {{ type filter hook {hook} priority 0; }}; " for hook in ("input", "output")
        )
        inside(
            host.namespaces, "nft", f"add table inet wall; {chains}" + "; ".join(f"add rule inet wall {one}" for one in rules)
        )


Act = Callable[[Scene], Named]  # makes hosts ill; returns what must be named


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    act: Act
    words: str = ""  # that the advice must have
    warned: bool = False  # whether a warning is enough
    hosts: int = 3
    level: str = "quick"


def nothing(_: Scene) -> Named:
    return set()


def docker(scene: Scene) -> None:
    address = "ip link add docker0 type bridge && ip address add 172.17.0.1/16 dev docker0 && ip link set docker0 up"
    scene.shell(scene.ill, address)


def pinned(scene: Scene, *, name: str, all_hosts: bool = False) -> Named:
    docker(scene)
    chosen = scene.hosts if all_hosts else [scene.ill]
    for one in chosen:
        scene.variables[one.name] = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {("interface", one.name) for one in chosen}


def routed_through_docker(scene: Scene) -> Named:
    docker(scene)
    for one in scene.hosts:
        if one is not scene.ill:
            scene.shell(scene.ill, f"ip route add {one.address}/32 dev docker0")
    return {("interface", scene.ill.name)}


def docker_beside(scene: Scene) -> Named:
    docker(scene)
    return set()


def same_address(scene: Scene) -> Named:
    pair = [one for one in scene.hosts if one is not scene.hosts[0]][:2]
    pair[1].move(pair[0].address)
    return {("interface", one.name) for one in pair}


def own_name(scene: Scene, *, line: str, hosts: int = 1, harmless: bool = False) -> Named:
    ill = [scene.ill, *(one for one in scene.hosts[1:] if one is not scene.ill)][:hosts]
    for one in ill:
        file = scene.folder / f"hosts-{one.name}"
        others = "".join(f"{host.address} {host.name}\n" for host in scene.hosts if host is not one)
        file.write_text(f"127.0.0.1 localhost\n{others}{line.format(name=one.name)}\n")
        inside(one.namespaces, "mount", "--bind", str(file), "/etc/hosts")
    return set() if harmless else {("name", one.name) for one in ill}


def unplugged(scene: Scene) -> Named:
    scene.ill.cut()
    return {("reachable", scene.ill.name)}


def all_jumbo(scene: Scene, *, ports: Collection[VirtualHost] | None = None) -> None:
    for one in scene.hosts:
        jumbo(one, switch_too=ports is None or one in ports)
    jumbo_bridge(scene.hosts[0])


def black_hole(scene: Scene) -> Named:
    for one in scene.hosts:
        jumbo(one, switch_too=False)
    return {("mtu", "all")}


def small_port(scene: Scene) -> Named:
    all_jumbo(scene, ports=[one for one in scene.hosts if one is not scene.ill])
    return {("mtu", scene.ill.name)}


def own_jumbo(scene: Scene) -> Named:
    jumbo(scene.ill, switch_too=False)
    return set()


def small_frames(scene: Scene, *, hook: str, link: bool = False) -> Named:
    for one in scene.hosts:
        without_offloads(one)
    peer = f"ip {'daddr' if hook == 'ingress' else 'saddr'} {scene.other.address}" if link else ""
    port, table = scene.ill.switch_port, "add table netdev small; add chain netdev small c"
    rule = f"add rule netdev small c {peer} meta length > 1300 drop"
    inside(scene.ill.switch, "nft", f"{table} {{ type filter hook {hook} device {port} priority 0; }}; {rule}")
    ends = (scene.ill.name, scene.other.name)
    return {("mtu", " -> ".join(ends if hook == "ingress" else ends[::-1]) if link else scene.ill.name)}


def slow(scene: Scene, *, sent: bool = True, received: bool = True, rate: str = "100mbit") -> Named:
    limit_rate(scene.ill, sent=sent, received=received, rate=rate)
    return {("bandwidth", scene.ill.name)}


def far(scene: Scene) -> Named:
    others = [one for one in scene.hosts if one is not scene.ill]
    delay(scene.ill, others, seconds=0.02, log=scene.folder / "relay.txt")
    return {("latency", scene.ill.name)}


def lossy(scene: Scene, *, percent: float, where: str) -> Named:
    for one in scene.hosts:
        without_offloads(one)
    pair = sorted(scene.chance.sample(scene.hosts[1:], 2), key=scene.hosts.index) if where == "two" else [scene.ill]
    for one in pair:
        other = scene.other if where == "link" else None
        lose(one, percent, sent=where != "received", received=where in ("host", "received", "two"), other=other)
    if where == "link":
        return {("loss", f"{scene.ill.name} -> {scene.other.name}")}
    return {("loss", one.name) for one in pair}


def walled(scene: Scene, *, rule: str, link: str = "", hosts: int = 1) -> Named:
    ill = [scene.ill, *(one for one in scene.hosts[1:] if one is not scene.ill)][:hosts]
    for one in ill:
        scene.firewall(one, *rule.format(other=scene.other.address).split(";"))
    if link:
        return {("reachable", one.format(ill=scene.ill.name, other=scene.other.name)) for one in link.split(";")}
    return {("reachable", one.name) for one in ill}


def harmless_wall(scene: Scene, *, rule: str) -> Named:
    for one in scene.hosts:
        scene.firewall(one, rule)
    return set()


def walled_off(scene: Scene) -> Named:
    for one in scene.hosts:
        scene.firewall(one, "input tcp flags syn / syn,ack drop")
    return {("reachable", "all")}


def clock(scene: Scene, *, seconds: float) -> Named:
    hooks = scene.folder / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(f"import time\nreal = time.time\ntime.time = lambda: real() + {seconds}\n")
    scene.variables[scene.ill.name] = {"PYTHONPATH": f"{hooks}:{ROOT}"}
    return {("clock", scene.ill.name)}


def signalled(scene: Scene, *, number: int, after_s: float) -> Named:
    name = scene.ill.name
    scene.later.append((after_s, lambda runs: os.kill(runs[name].process.pid, number)))
    return {("roster", name)}


def absent(scene: Scene) -> Named:
    scene.absent.add(scene.ill.name)
    return {("roster", scene.ill.name)}


def late(scene: Scene) -> Named:
    scene.prefixes[scene.ill.name] = ["sh", "-c", 'sleep 3; exec "$@"', "late"]
    return set()


def disk(scene: Scene, *, command: str, hosts: int = 1, checks: Sequence[str] = ("storage",)) -> Named:
    ill = [scene.ill, *(one for one in scene.hosts[1:] if one is not scene.ill)][:hosts]
    for one in ill:
        scene.shell(one, command.format(folder=scene.run_dir))
    return {(check, one.name) for one in ill for check in checks}


def limited(scene: Scene, *, limit: str, check: str) -> Named:
    scene.prefixes[scene.ill.name] = ["sh", "-c", f'ulimit {limit}; exec "$@"', "limited"]
    return {(check, scene.ill.name)}


def other_code(scene: Scene) -> Named:
    other = scene.folder / "other"
    shutil.copytree(ROOT / "elastictrain", other / "elastictrain", ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "elastictrain/train/loop.py").open("a") as file:
        file.write("# another version\n")
    scene.variables[scene.ill.name] = {"PYTHONPATH": str(other)}
    return {("alike", scene.ill.name)}


def other_variable(scene: Scene, *, name: str, value: str) -> Named:
    scene.variables[scene.ill.name] = {name: value}
    return {("alike", scene.ill.name)}


def together(scene: Scene, *, acts: Sequence[Act]) -> Named:
    """Two faults, the second one of another host."""
    wanted = acts[0](scene)
    scene.ill, scene.other = next(one for one in scene.hosts[1:] if one is not scene.ill), scene.hosts[0]
    return wanted | acts[1](scene)


DROP_NEW = "tcp flags syn / syn,ack"
FULL_DISK = "mount -t tmpfs -o size=64k tmpfs {folder}; head -c 100000 /dev/zero > {folder}/fill || true"
READ_ONLY = "mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}"
OWN_DISK = "mount -t tmpfs tmpfs {folder}"

FAULTS = [
    Fault("interface: docker0 is chosen", partial(pinned, name="docker0"), INTERFACE),
    Fault("interface: one is chosen that is not there", partial(pinned, name="ens7"), INTERFACE),
    Fault("interface: one is chosen that is not there, on all", partial(pinned, name="ens7", all_hosts=True), INTERFACE),
    Fault("interface: the others are routed through docker0", routed_through_docker, "docker0"),
    Fault("interface: an address that two hosts have", same_address),
    Fault("interface: cable out", unplugged),
    Fault("name: loopback", partial(own_name, line="127.0.1.1 {name}"), "/etc/hosts"),
    Fault("name: loopback, two hosts", partial(own_name, line="127.0.1.1 {name}", hosts=2), "/etc/hosts"),
    Fault("mtu: large frames of all vanish", black_hole, "ip link set"),
    Fault("mtu: large frames of all vanish (full)", black_hole, "ip link set", level="full"),
    Fault("mtu: one port of the switch is small", small_port, "ip link set"),
    Fault("mtu: a host sends no large frames", partial(small_frames, hook="ingress"), "mtu"),
    Fault("mtu: a host gets no large frames", partial(small_frames, hook="egress"), "mtu"),
    Fault("mtu: a link takes no large frames", partial(small_frames, hook="ingress", link=True), "mtu"),
    Fault("mtu: a link brings no large frames", partial(small_frames, hook="egress", link=True), "mtu"),
    Fault("bandwidth: 100 Mbit/s", slow, level="full"),
    Fault("bandwidth: 100 Mbit/s sent", partial(slow, received=False), level="full"),
    Fault("bandwidth: 100 Mbit/s received", partial(slow, sent=False), level="full"),
    Fault("bandwidth: 10 Mbit/s", partial(slow, rate="10mbit"), level="full"),
    Fault("latency: 20 ms (full)", far, level="full"),
    Fault("latency: 20 ms", far),
    *(
        Fault(f"loss: {percent} % {where}", partial(lossy, percent=percent, where=where), "", percent == 1, hosts, level)
        for percent in (1, 5, 20)
        for where, hosts, level in (
            ("host", 3, "full"),
            ("host", 3, "quick"),
            ("sent", 3, "quick"),
            ("received", 3, "quick"),
            ("link", 3, "quick"),
            ("two", 5, "quick"),
        )
    ),
    Fault("firewall: nothing comes in", partial(walled, rule=f"input {DROP_NEW} drop")),
    Fault("firewall: nothing comes in, said so", partial(walled, rule=f"input {DROP_NEW} reject with tcp reset")),
    Fault("firewall: nothing goes out", partial(walled, rule=f"output {DROP_NEW} drop")),
    Fault("firewall: nothing comes in or goes out", partial(walled, rule=f"input {DROP_NEW} drop;output {DROP_NEW} drop")),
    Fault(
        "firewall: nothing comes in from one host",
        partial(walled, rule=f"input ip saddr {{other}} {DROP_NEW} drop", link="{other} -> {ill}"),
    ),
    Fault(
        "firewall: nothing goes out to one host",
        partial(walled, rule=f"output ip daddr {{other}} {DROP_NEW} drop", link="{ill} -> {other}"),
    ),
    Fault(
        "firewall: two hosts do not reach each other",
        partial(
            walled,
            rule=f"input ip saddr {{other}} {DROP_NEW} drop;output ip daddr {{other}} {DROP_NEW} drop",
            link="{ill} -> {other};{other} -> {ill}",
        ),
    ),
    Fault("firewall: one port is closed", partial(walled, rule=f"input tcp dport {PORT} drop"), str(PORT)),
    Fault("firewall: high ports are closed", partial(walled, rule="input tcp dport 32768-60999 drop"), "-"),
    Fault("firewall: two hosts of five", partial(walled, rule=f"input {DROP_NEW} drop", hosts=2), hosts=5),
    Fault("firewall: no host reaches another", walled_off),
    Fault("clock: 20 s ahead", partial(clock, seconds=20.0)),
    Fault("clock: 20 s behind", partial(clock, seconds=-20.0)),
    Fault("clock: 3 s ahead (full)", partial(clock, seconds=3.0), level="full"),
    Fault("clock: 1.5 s ahead", partial(clock, seconds=1.5), warned=True),
    Fault("roster: a host is absent", absent),
    Fault("roster: a host is absent (full)", absent, level="full"),
    Fault("roster: frozen at the start", partial(signalled, number=signal.SIGSTOP, after_s=0.1)),
    Fault("roster: killed at the start", partial(signalled, number=signal.SIGKILL, after_s=0.1)),
    Fault("storage: full", partial(disk, command=FULL_DISK, checks=("disk", "storage"))),
    Fault("storage: read-only", partial(disk, command=READ_ONLY)),
    Fault("storage: not shared by one", partial(disk, command=OWN_DISK)),
    Fault("storage: not shared by two", partial(disk, command=OWN_DISK, hosts=2)),
    Fault("storage: not shared by one (full)", partial(disk, command=OWN_DISK), level="full"),
    Fault(
        "limits: little shared memory",
        partial(disk, command="mount -t tmpfs -o size=1m tmpfs /dev/shm", checks=("shared_memory",)),
    ),
    Fault("limits: 64 open files", partial(limited, limit="-n 64", check="open_files")),
    Fault("alike: other code", other_code),
    Fault("alike: NCCL_ALGO", partial(other_variable, name="NCCL_ALGO", value="Tree"), "NCCL_ALGO"),
    Fault("alike: NCCL_IB_DISABLE", partial(other_variable, name="NCCL_IB_DISABLE", value="1"), "NCCL_IB_DISABLE"),
    Fault("alike: NCCL_PROTO", partial(other_variable, name="NCCL_PROTO", value="LL"), "NCCL_PROTO"),
    Fault(
        "alike: NCCL_SOCKET_FAMILY", partial(other_variable, name="NCCL_SOCKET_FAMILY", value="AF_INET6"), "NCCL_SOCKET_FAMILY"
    ),
    Fault(
        "two faults: name, clock",
        partial(together, acts=(partial(own_name, line="127.0.1.1 {name}"), partial(clock, seconds=20.0))),
    ),
    Fault(
        "two faults: storage, firewall",
        partial(together, acts=(partial(disk, command=READ_ONLY), partial(walled, rule=f"input {DROP_NEW} drop"))),
    ),
    Fault(
        "two faults: clock, frames",
        partial(together, acts=(partial(clock, seconds=20.0), partial(small_frames, hook="ingress"))),
    ),
    # Collectives use the interface that was planned, whatever the name leads to.
    Fault("nothing: the own name is of another address", partial(own_name, line="10.89.0.77 {name}", harmless=True)),
    Fault("nothing: the own name is unknown", partial(own_name, line="", harmless=True)),
    Fault("nothing: docker0 beside", docker_beside),
    Fault("nothing: no UDP", partial(harmless_wall, rule="input meta l4proto udp drop"), level="full"),
    Fault("nothing: no ICMP", partial(harmless_wall, rule="input meta l4proto icmp drop"), level="full"),
    Fault("nothing: one host would send large frames", own_jumbo),
    Fault("nothing: 3 s late", late),
]
