"""Error counters of ports, and how often they lost their carrier, since the last preflight on this host."""

import json
import math
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from elastictrain.bounded_json import RECORD, parse_record
from elastictrain.preflight.host.gpu import decimal, integer
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Reporter, Status, Verdict

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
    """A reading. `ports`: counters by port ("mlx5_0/1", "eth0"). `time`: unix seconds; `uptime_s`: since boot. A file of
    another `format` is no reading."""

    boot_id: str
    time: float
    uptime_s: float
    ports: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    format: Literal[1] = 1


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
        uptime_s=decimal(surroundings.read("/proc/uptime")) or 0.0,
        ports={port: counters for port, counters in ports.items() if counters},
    )


def growth(before: PortCounters, after: PortCounters) -> tuple[float, Mapping[str, Mapping[str, int]]]:
    """The hours between two readings, and what came in them to the counters of ports that both know. A counter that is smaller
    than before was reset, and counts from zero; after a boot all do, and the time since boot counts."""
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
    return max(seconds, 0.0) / 3600, ports


def judge_counters(before: PortCounters | None, after: PortCounters, *, host: str) -> list[Verdict]:
    """Ports that lost their link, or made more errors than noise explains. `before`: the earlier reading, if there is one."""
    verdict = Reporter("counters", host)
    gone = sorted(set(before.ports) - set(after.ports)) if before is not None else []
    if not after.ports and not gone:
        return []
    if before is None:
        remedy = "none: the next preflight on this host compares with what this one has written down"
        return [verdict.skipped("first reading", remedy=remedy)]
    found = []
    for port in gone:
        see = "see whether the card is still there (lspci; dmesg | grep -i mlx5) and its driver loaded"
        remedy = f"{see}; reboot, or replace the host"
        found.append(verdict(f"{port} on {host}", Status.WARN, "gone", "there, as last time", remedy))
    hours, ports = growth(before, after)
    # Less than an hour counts as one, or a single error right after the last preflight would look like a storm.
    counted_h = max(hours, 1.0)
    for port, counters in ports.items():
        about = f"{port} on {host}"
        look = f"mlxlink -d {port.partition('/')[0]} -m" if "/" in port else f"ethtool -S {port}; ethtool -m {port}"
        # A carrier is counted when it goes and when it comes back: two changes are one outage.
        if outages := max(counters.get("link_downed", 0), (counters.get("carrier_changes", 0) + 1) // 2):
            flapping = outages >= FLAPPING_OUTAGES and outages >= FLAPPING_PER_HOUR * counted_h
            mending = "clean or replace the cable or transceiver, try another port of the switch"
            remedy, status = f"{mending}; look: {look}; dmesg | grep -i link", Status.FAIL if flapping else Status.WARN
            found.append(verdict(about, status, f"link lost {outages} times in {hours:.2g} h", "never", remedy))
        if many := {name: count for name, count in counters.items() if count > PER_HOUR.get(name, math.inf) * counted_h}:
            measured = ", ".join(f"{name} +{count}" for name, count in many.items()) + f" in {hours:.2g} h"
            expected = ", ".join(f"{name} at most {PER_HOUR[name]:g} an hour" for name in many)
            remedy = f"check cable and transceiver, and the switch's own counters of that port; look: {look}"
            found.append(verdict(about, Status.WARN, measured, expected, remedy))
    return found or [verdict.passed(f"{len(ports)} ports without trouble in {hours:.2g} h")]


def load(path: Path) -> PortCounters | None:
    """What an earlier preflight wrote down; None if it cannot be understood, or may be somebody else's."""
    try:
        # Neither a link nor a pipe of somebody else leads us away or holds us up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # noqa: PTH123
            found, for_all = os.fstat(descriptor), path.parent.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            # On a file server our own file may show as nobody's; that is no reason for doubt in a folder that only we write to.
            if not stat.S_ISREG(found.st_mode) or (for_all and found.st_uid != os.geteuid()):
                return None
            return parse_record(file.read(RECORD.max_bytes), PortCounters)
    except (OSError, ValueError):
        return None


def store(path: Path, counters: PortCounters) -> None:
    """Write a reading down for the next preflight, at once, so that nobody reads half of it. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name that nobody can foresee: in a folder for all, another user could have put a link there.
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w") as file:  # noqa: PTH123
            file.write(json.dumps(asdict(counters), indent=1))
        os.replace(name, path)  # noqa: PTH105
    except OSError:
        with suppress(OSError):
            os.unlink(name)  # noqa: PTH108
        raise


def check_counters(surroundings: Surroundings, *, now: float) -> list[Verdict]:
    """Compares with what is kept, and keeps what is found for the next time."""
    path = counters_path(surroundings)
    host, after = surroundings.host, read_counters(surroundings, now=now)
    verdicts = judge_counters(load(path), after, host=host)
    if after.ports:
        try:
            store(path, after)
        except OSError as error:
            remedy = f"make {path.parent} writable, or keep the counters elsewhere"
            measured, expected = f"cannot be written down: {error}", f"{path} written"
            verdicts.append(Reporter("counters", host).warned(measured, expected=expected, remedy=remedy))
    return verdicts


def counters_path(surroundings: Surroundings) -> Path:
    """Where this host keeps the counters of its ports between preflights. Never raises."""
    # Home folders may be shared by hosts and the one for temporary files by users, so the name bears both.
    environment, name = surroundings.environment, f"counters-{surroundings.host}-{os.getuid()}.json"
    if environment.get("XDG_STATE_HOME"):
        return Path(environment["XDG_STATE_HOME"]) / "elastictrain" / name
    try:
        home = Path(environment.get("HOME") or Path.home())
    except RuntimeError:
        # Containers may run as a user whom nobody has entered anywhere.
        return Path(environment.get("TMPDIR") or "/tmp") / f"elastictrain-{name}"  # noqa: S108
    return home / ".local" / "state" / "elastictrain" / name


def _numbers(surroundings: Surroundings, paths: Mapping[str, str]) -> dict[str, int]:
    texts = {name: surroundings.read(path) for name, path in paths.items()}
    return {name: value for name, text in texts.items() if (value := integer(text)) is not None and value >= 0}
