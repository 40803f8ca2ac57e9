"""Error counters of ports, and how often they lost their carrier, since the last preflight on this host."""

import json
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from elastictrain.bounded_json import parse_json
from elastictrain.preflight.devices.words import integer
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Reporter, Status, Verdict

_MOST_BYTES = 1 << 20
_FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def load_kept(path: Path) -> Mapping[str, object] | None:
    """The object that was kept; None if there is none, or none that can be understood, or if it may be somebody else's."""
    try:
        # Neither a link nor a pipe of somebody else leads us away or holds us up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # noqa: PTH123
            if not _is_trusted(os.fstat(descriptor), path.parent):
                return None
            row = parse_json(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def keep(path: Path, row: Mapping[str, object]) -> None:
    """Replaces the file at once, so that nobody reads half of it. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name that nobody can foresee: in a folder for all, another user could have put a link there.
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w") as file:  # noqa: PTH123
            file.write(json.dumps(row, indent=1))
        os.replace(name, path)  # noqa: PTH105
    except OSError:
        with suppress(OSError):
            os.unlink(name)  # noqa: PTH108
        raise


def _is_trusted(found: os.stat_result, folder: Path) -> bool:
    """On a file server our own file may show as nobody's; that is no reason for doubt in a folder that only we write to."""
    ours = found.st_uid == os.geteuid() or not folder.stat().st_mode & _FOR_OTHERS
    return stat.S_ISREG(found.st_mode) and ours


_verdict = Reporter("counters")

FORMAT = 1

PER_HOUR = {
    "link_error_recovery": 1.0,
    "symbol_error": 120.0,
    "port_rcv_errors": 10.0,
    "local_link_integrity_errors": 10.0,
    "excessive_buffer_overrun_errors": 10.0,
    "local_ack_timeout_err": 60.0,
    "rx_errors": 10.0,
    "rx_crc_errors": 10.0,
    "tx_errors": 10.0,
}
"""More of these in an hour is worth a look at the cable; less is noise. One wrong bit in 10^12, as InfiniBand's specification
allows, makes about 120 an hour at 32 Gbit/s of data; the other figures are rules of thumb, not a standard."""

FLAPPING_OUTAGES = 3
FLAPPING_PER_HOUR = 3.0
"""From both on a link is not fit for a run: each outage can end it."""

_PORT_FILES = {
    "counters": (
        "link_downed",
        "link_error_recovery",
        "symbol_error",
        "port_rcv_errors",
        "local_link_integrity_errors",
        "excessive_buffer_overrun_errors",
    ),
    "hw_counters": ("local_ack_timeout_err",),
}
_NET_FILES = ("carrier_changes", "statistics/rx_errors", "statistics/tx_errors", "statistics/rx_crc_errors")


@dataclass(frozen=True, slots=True)
class PortCounters:
    """A reading. `ports`: counters by port ("mlx5_0/1", "eth0"). `time`: unix seconds; `uptime_s`: since boot."""

    boot_id: str
    time: float
    uptime_s: float
    ports: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Growth:
    """By how much counters grew between two readings. `hours`: the time in which they did; `gone`: ports that are no more."""

    hours: float
    ports: Mapping[str, Mapping[str, int]]
    gone: tuple[str, ...] = ()


def read_counters(surroundings: Surroundings, *, now: float) -> PortCounters:
    """Counters of InfiniBand and RoCE ports and of wired network cards."""
    ports: dict[str, dict[str, int]] = {}
    for device in surroundings.names("/sys/class/infiniband"):
        for port in surroundings.names(f"/sys/class/infiniband/{device}/ports"):
            base = f"/sys/class/infiniband/{device}/ports/{port}"
            paths = {name: f"{base}/{folder}/{name}" for folder, names in _PORT_FILES.items() for name in names}
            ports[f"{device}/{port}"] = _numbers(surroundings, paths)
    for name in surroundings.names("/sys/class/net"):
        base = f"/sys/class/net/{name}"
        inside = surroundings.names(base)
        if "device" in inside and "wireless" not in inside:
            ports[name] = _numbers(surroundings, {path.rpartition("/")[2]: f"{base}/{path}" for path in _NET_FILES})
    return PortCounters(
        boot_id=surroundings.read("/proc/sys/kernel/random/boot_id") or "",
        time=now,
        uptime_s=_uptime(surroundings),
        ports={port: counters for port, counters in ports.items() if counters},
    )


def growth(before: PortCounters | None, after: PortCounters) -> Growth | None:
    """What came to the counters of ports that both readings know; None without an earlier reading.

    A counter that is smaller than before was reset, and counts from zero; after a boot all do, and the time since boot counts.
    """
    if before is None:
        return None
    rebooted = before.boot_id != after.boot_id
    seconds = after.uptime_s if rebooted else after.time - before.time
    ports = {}
    for port, counters in after.ports.items():
        earlier = {} if rebooted else before.ports.get(port)
        if earlier is None:
            continue
        known = {name: value for name, value in counters.items() if rebooted or name in earlier}
        # A port that comes up with the host is no outage: its first carrier is expected.
        if rebooted:
            known = {name: max(0, value - 2) if name == "carrier_changes" else value for name, value in known.items()}
        ports[port] = {name: value - old if value >= (old := earlier.get(name, 0)) else value for name, value in known.items()}
    gone = tuple(sorted(set(before.ports) - set(after.ports)))
    return Growth(max(seconds, 0.0) / 3600, ports, gone)


def judge_counters(grown: Growth | None, *, host: str, num_ports: int) -> list[Verdict]:
    """Ports that lost their link, or made more errors than noise explains."""
    if not num_ports and (grown is None or not grown.gone):
        return []
    if grown is None:
        remedy = "none: the next preflight on this host compares with what this one has written down"
        return [_verdict(host, Status.SKIP, "first reading", "", remedy)]
    remedy = (
        "see whether the card is still there (lspci; dmesg | grep -i mlx5) and its driver loaded; reboot, or replace the host"
    )
    found = [_verdict(f"{port} on {host}", Status.WARN, "gone", "there, as last time", remedy) for port in grown.gone]
    for port, counters in grown.ports.items():
        found += _judge_port(port, counters, grown.hours, host)
    return found or [_verdict(host, Status.PASS, f"{len(grown.ports)} ports without trouble in {grown.hours:.2g} h", "", "")]


def _judge_port(port: str, counters: Mapping[str, int], hours: float, host: str) -> list[Verdict]:
    found = []
    # A carrier is counted when it goes and when it comes back: two changes are one outage.
    outages = max(counters.get("link_downed", 0), (counters.get("carrier_changes", 0) + 1) // 2)
    look = f"mlxlink -d {port.partition('/')[0]} -m" if "/" in port else f"ethtool -S {port}; ethtool -m {port}"
    if outages:
        flapping = outages >= FLAPPING_OUTAGES and outages >= FLAPPING_PER_HOUR * max(hours, 1.0)
        remedy = (
            f"clean or replace the cable or transceiver, try another port of the switch; look: {look}; dmesg | grep -i link"
        )
        status = Status.FAIL if flapping else Status.WARN
        found.append(_verdict(f"{port} on {host}", status, f"link lost {outages} times in {hours:.2g} h", "never", remedy))
    # Less than an hour counts as one, or a single error right after the last preflight would look like a storm.
    many = {
        name: grown
        for name, grown in counters.items()
        if name in PER_HOUR and grown > PER_HOUR[name] * max(hours, 1.0)
    }  # fmt: skip
    if many:
        measured = ", ".join(f"{name} +{grown}" for name, grown in many.items()) + f" in {hours:.2g} h"
        expected = ", ".join(f"{name} at most {PER_HOUR[name]:g} an hour" for name in many)
        remedy = f"check cable and transceiver, and the switch's own counters of that port; look: {look}"
        found.append(_verdict(f"{port} on {host}", Status.WARN, measured, expected, remedy))
    return found


def load(path: Path) -> PortCounters | None:
    """What an earlier preflight wrote down; None if there is nothing, or nothing that can be understood."""
    data = load_kept(path)
    if data is None or data.get("format") != FORMAT:
        return None
    boot_id, time, uptime_s, kept = (data.get(name) for name in ("boot_id", "time", "uptime_s", "ports"))
    if not isinstance(boot_id, str) or not isinstance(time, int | float) or not isinstance(uptime_s, int | float):
        return None
    if not isinstance(kept, dict):
        return None
    ports = {
        str(port): {str(name): value for name, value in counters.items() if isinstance(value, int)}
        for port, counters in kept.items()
        if isinstance(counters, dict)
    }
    return PortCounters(boot_id, float(time), float(uptime_s), ports)


def store(path: Path, counters: PortCounters) -> None:
    """Write a reading down for the next preflight. Raises: OSError."""
    times = {"boot_id": counters.boot_id, "time": counters.time, "uptime_s": counters.uptime_s}
    keep(path, {"format": FORMAT, **times, "ports": counters.ports})


def _numbers(surroundings: Surroundings, paths: Mapping[str, str]) -> dict[str, int]:
    texts = {name: surroundings.read(path) for name, path in paths.items()}
    return {name: value for name, text in texts.items() if (value := integer(text)) is not None and value >= 0}


def _uptime(surroundings: Surroundings) -> float:
    try:
        return float((surroundings.read("/proc/uptime") or "").split()[0])
    except (ValueError, IndexError):
        return 0.0
