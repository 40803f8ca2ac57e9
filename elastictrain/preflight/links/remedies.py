"""What to type where a link check fails."""

from collections.abc import Iterable, Sequence

from elastictrain.preflight.links.culprit import Way
from elastictrain.preflight.links.messages import HostIntroduction

_MOST_NAMES = 8


def names(found: Sequence[str]) -> str:
    """A list that stays readable with a thousand hosts."""
    rest = len(found) - _MOST_NAMES
    return ", ".join(found[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def lower_mtu(hosts: Iterable[tuple[str, HostIntroduction]], *, to: int, intended: int) -> str:
    """For frames above `to` that vanish between interfaces that send up to `intended`."""
    by_interface: dict[str, list[str]] = {}
    for label, host in hosts:
        by_interface.setdefault(host.interface, []).append(label)
    commands = [
        f"`ip link set dev {interface} mtu {to}` on {names(labels)}" for interface, labels in sorted(by_interface.items())
    ]
    return (
        f"set the interface's MTU to {to} ({'; '.join(commands)}), or that of the switch or bridge between them to {intended}"
    )


def open_port(
    source: HostIntroduction, target: HostIntroduction, *, target_label: str, ports: Sequence[int], protocol: str
) -> str:
    """For connections from `source` to `target` that are not let through."""
    wanted = ",".join(map(str, ports))
    rule = f"-p {protocol} -s {source.address} -m multiport --dports {wanted} -j ACCEPT"
    return (
        f"let {source.address} reach {target.address}, {protocol.upper()} ports {wanted}: on {target_label} `iptables -I INPUT "
        f"{rule}`, and in the security group or firewall between them"
    )


def reach_address(target: HostIntroduction, *, label: str) -> str:
    """For an address at which another host answers."""
    return (
        f"give {label} an address of its own ({target.address} on {target.interface} is used twice: `ip address show dev "
        f"{target.interface}`), or choose another interface there: `NCCL_SOCKET_IFNAME` and `GLOO_SOCKET_IFNAME`"
    )


def look_at_host(host: HostIntroduction, *, label: str, way: Way) -> str:
    """For a host that is slow."""
    device = host.interface
    limits = f"limits of bandwidth (`tc -s qdisc show dev {device}`)"
    cable = f"speed and duplex (`ethtool {device}`) and errors (`ip -s link show dev {device}`)"
    first, then = (limits, cable) if way is Way.OUT else (cable, limits)
    return f"on {label} look at {first}, then at {then}; if it stays, replace the host"


def look_at_link(source: str, target: str) -> str:
    """For a link between two hosts that are well otherwise."""
    return (
        f"look at what is between {source} and {target} only: switch ports, cables, routes (`tracepath` from one to the "
        f"other); or run without one of them"
    )


def set_clock(label: str) -> str:
    """For a clock that is off."""
    return (
        f"on {label} set the clock: `chronyc makestep`, or `timedatectl set-ntp true` and `systemctl restart systemd-timesyncd`"
    )
