"""Error counters of ports and GPUs, and how often ports lost their carrier, since the last preflight on this host."""

import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from elastictrain.bounded_json import RECORD, encode_record, parse_record
from elastictrain.preflight.host.gpu import Gpu, decimal
from elastictrain.preflight.verdict import Reporter, Status, Verdict
from elastictrain.storage.private import write_file
from elastictrain.surroundings import Surroundings

# More of these per hour deserve a look at the cable; fewer are noise. One wrong bit in 10^12, as InfiniBand's specification
# allows, makes about 120 an hour at 32 Gbit/s of data. DCGM warns of 8 PCIe replays a minute, of any NVLink replay or recovery,
# and of 100 NVLink CRC errors a second. The other figures are rules of thumb, not a standard.
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
    "pcie_replays": 480.0,
    "nvlink_replay": 1.0,
    "nvlink_recovery": 1.0,
    "nvlink_crc": 360_000.0,
}
FLAPPING_OUTAGES = 3
FLAPPING_PER_HOUR = 3.0  # a link with at least both of these is unfit for a run: each outage can end it
_GPU = "GPU "
_PORT_FILES = (
    *("counters/link_downed", "counters/link_error_recovery", "counters/symbol_error", "counters/port_rcv_errors"),
    *("counters/local_link_integrity_errors", "counters/excessive_buffer_overrun_errors", "hw_counters/local_ack_timeout_err"),
)
_NET_FILES = ("carrier_changes", "statistics/rx_errors", "statistics/tx_errors", "statistics/rx_crc_errors")


@dataclass(frozen=True, slots=True)
class PortCounters:
    boot_id: str
    time: float  # unix seconds
    uptime_s: float  # since boot
    ports: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # counters by port ("mlx5_0/1", "eth0")
    format: Literal[1] = 1  # other formats are rejected


def read_counters(
    surroundings: Surroundings, *, now: float, gpus: Sequence[Gpu] = (), errors: Mapping[int, Mapping[str, int]] = {}
) -> PortCounters:
    """Counters of InfiniBand and RoCE ports, of wired network cards, and of `gpus`. `errors`: of their NVLinks, by index."""
    ports: dict[str, dict[str, int]] = {}
    for gpu in gpus:
        replays = {} if gpu.replays is None else {"pcie_replays": gpu.replays}
        ports[f"{_GPU}{gpu.index} at {gpu.where}"] = {**replays, **errors.get(gpu.index, {})}
    for port, folder in _rdma_ports(surroundings):
        ports[port] = _numbers(surroundings, folder, _PORT_FILES)
    for name in surroundings.names("/sys/class/net"):
        base = f"/sys/class/net/{name}"
        inside = surroundings.names(base)
        if "device" in inside and "wireless" not in inside:
            ports[name] = _numbers(surroundings, base, _NET_FILES)
    return PortCounters(
        boot_id=surroundings.read("/proc/sys/kernel/random/boot_id") or "",
        time=now,
        uptime_s=decimal(surroundings.read("/proc/uptime")) or 0.0,
        ports={port: counters for port, counters in ports.items() if counters},
    )


def sent_bytes(surroundings: Surroundings) -> int | None:
    """What all RDMA ports have sent, over InfiniBand or RoCE but not over sockets; None without counters. Source: the kernel's
    sysfs-class-infiniband counts `port_xmit_data` in units of four bytes."""
    found = [_numbers(surroundings, folder, ["counters/port_xmit_data"]) for _, folder in _rdma_ports(surroundings)]
    counts = [count for one in found for count in one.values()]
    return 4 * sum(counts) if counts else None


def _rdma_ports(surroundings: Surroundings) -> Iterator[tuple[str, str]]:
    """Names ("mlx5_0/1") and folders of the ports."""
    base = "/sys/class/infiniband"
    for device in surroundings.names(base):
        for port in surroundings.names(f"{base}/{device}/ports"):
            yield f"{device}/{port}", f"{base}/{device}/ports/{port}"


def growth(before: PortCounters, after: PortCounters) -> tuple[float, Mapping[str, Mapping[str, int]]]:
    """The hours between two readings, and the growth of counters of ports that both have. A counter that is smaller than before
    was reset and counts from zero; after a boot all count from zero, over the time since boot."""
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
    """Ports that lost their link, or made more errors than noise explains. `before`: the earlier reading, if any."""
    verdict = Reporter("counters", host)
    if before is None and after.ports:
        remedy = "none: the next preflight on this host compares with what this one has written down"
        return [verdict.skipped("first reading", remedy=remedy)]
    # The check `gpus` names a GPU that is lost.
    gone = sorted(port for port in before.ports.keys() - after.ports.keys() if not port.startswith(_GPU)) if before else []
    if before is None or not (after.ports or gone):
        return []
    found = []
    for port in gone:
        see = "see whether the card is still there (lspci; dmesg | grep -i mlx5) and its driver loaded"
        remedy = f"{see}; reboot, or replace the host"
        found.append(verdict(f"{port} on {host}", Status.WARN, "gone", "there, as last time", remedy))
    hours, ports = growth(before, after)
    # Less than an hour counts as one: otherwise a single error right after the last preflight would look like a storm.
    counted_h = max(hours, 1.0)
    for port, counters in ports.items():
        about = f"{port} on {host}"
        look = f"mlxlink -d {port.partition('/')[0]} -m" if "/" in port else f"ethtool -S {port}; ethtool -m {port}"
        if port.startswith(_GPU):
            look = f"nvidia-smi nvlink -e -i {port.split()[1]}; dmesg | grep -i -e xid -e aer"
        # A carrier change is counted when the link goes down and when it comes up: two changes are one outage.
        if outages := max(counters.get("link_downed", 0), (counters.get("carrier_changes", 0) + 1) // 2):
            flapping = outages >= FLAPPING_OUTAGES and outages >= FLAPPING_PER_HOUR * counted_h
            mending = "clean or replace the cable or transceiver, try another port of the switch"
            remedy, status = f"{mending}; look: {look}; dmesg | grep -i link", Status.FAIL if flapping else Status.WARN
            found.append(verdict(about, status, f"link lost {outages} times in {hours:.2g} h", "never", remedy))
        if many := {name: count for name, count in counters.items() if count > PER_HOUR.get(name, math.inf) * counted_h}:
            measured = ", ".join(f"{name} +{count}" for name, count in many.items()) + f" in {hours:.2g} h"
            expected = ", ".join(f"{name} at most {PER_HOUR[name]:g} an hour" for name in many)
            mending = "check cable and transceiver, and the switch's own counters of that port"
            if port.startswith(_GPU):
                mending = "reseat the GPU or its bridge, reboot, and replace the host if it stays"
            remedy = f"{mending}; look: {look}"
            found.append(verdict(about, Status.WARN, measured, expected, remedy))
    return found or [verdict.passed(f"{len(ports)} ports without trouble in {hours:.2g} h")]


def load(path: Path) -> PortCounters | None:
    """The reading of an earlier preflight; None if it cannot be parsed, or may be another user's."""
    try:
        # Another user's link or pipe must neither redirect nor block this read.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # noqa: PTH123
            found, for_all = os.fstat(descriptor), path.parent.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            # On a file server the own file may belong to `nobody`: accept it in a folder that only this user writes to.
            if not stat.S_ISREG(found.st_mode) or (for_all and found.st_uid != os.geteuid()):
                return None
            return parse_record(file.read(RECORD.max_bytes), PortCounters)
    except (OSError, ValueError):
        return None


def store(path: Path, counters: PortCounters) -> None:
    """Replace the reading for the next preflight atomically. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(str(path), encode_record(counters))


def check_counters(surroundings: Surroundings, after: PortCounters) -> list[Verdict]:
    """Compare with the stored reading, and store the new one."""
    host, path = surroundings.host, counters_path(surroundings)
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
    """Where this host keeps its counters between preflights. Never raises."""
    # Hosts may share home folders, and users the one for temporary files: the name has both.
    environment, name = surroundings.environment, f"counters-{surroundings.host}-{os.getuid()}.json"
    if environment.get("XDG_STATE_HOME"):
        return Path(environment["XDG_STATE_HOME"]) / "elastictrain" / name
    try:
        home = Path(environment.get("HOME") or Path.home())
    except RuntimeError:
        # A container's user may have no entry in the user database.
        return Path(environment.get("TMPDIR") or "/tmp") / f"elastictrain-{name}"  # noqa: S108
    return home / ".local" / "state" / "elastictrain" / name


def _numbers(surroundings: Surroundings, folder: str, files: Sequence[str]) -> dict[str, int]:
    found = {path.rpartition("/")[2]: surroundings.number(f"{folder}/{path}") for path in files}
    return {name: value for name, value in found.items() if value is not None and value >= 0}
