"""NVLinks of the GPUs, and the manager of the fabric that joins them."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastictrain.preflight.devices.gpu import GpuReport, subject
from elastictrain.preflight.devices.words import decimal
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Reporter, Scope, Status, Verdict

_fabric = Reporter("fabric_manager")

SERVICE_LIMIT_S = 5.0
SERVICE = "nvidia-fabricmanager"
_VERSION = re.compile(r"Fabric Manager version is\s*:?\s*(\d+(?:\.\d+){1,3})")
_DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+){1,3})\s")
_STATES = frozenset({"active", "inactive", "failed", "activating", "deactivating", "reloading"})
_UNJOINED = frozenset({"not started", "in progress"})


@dataclass(frozen=True, slots=True)
class FabricFacts:
    """`service`: what systemd says of the fabric manager, None if it says nothing; `version`: that of the installed program."""

    service: str | None
    version: str | None
    driver: str | None


def read_fabric(surroundings: Surroundings, report: GpuReport | None) -> FabricFacts:
    """The state of the service, its version and the driver's."""
    state = surroundings.tools.run(("systemctl", "is-active", SERVICE), limit_s=SERVICE_LIMIT_S)
    version = surroundings.tools.run(("nv-fabricmanager", "--version"), limit_s=SERVICE_LIMIT_S)
    return FabricFacts(
        service=None if state is None or state.timed_out else parse_service(state.stdout),
        version=None if version is None or version.timed_out else parse_version(f"{version.stdout}\n{version.stderr}"),
        driver=(report.driver if report else None) or read_driver_version(surroundings),
    )


def read_driver_version(surroundings: Surroundings) -> str | None:
    """The version of the NVIDIA driver that the kernel has loaded."""
    found = _DRIVER.search((surroundings.read("/proc/driver/nvidia/version") or "") + " ")
    return found[1] if found else None


def parse_service(text: str) -> str | None:
    """The answer of `systemctl is-active`; None if it is no state of a service."""
    state = text.strip()
    return state if state in _STATES else None


def parse_version(text: str) -> str | None:
    """The answer of `nv-fabricmanager --version`."""
    found = _VERSION.search(text)
    return found[1] if found else None


def switched_fabric(report: GpuReport | None, *, num_switches: int) -> bool:
    """Whether NVSwitches join the GPUs: they are on the PCI bus, or the GPUs speak of a fabric (from Hopper on)."""
    return num_switches > 0 or bool(report and any(gpu.fabric_state for gpu in report.gpus))


def judge_fabric(facts: FabricFacts, report: GpuReport | None, *, switched: bool, host: str) -> list[Verdict]:
    """What GPUs themselves say of the fabric goes first: on rack-scale machines and in containers the service is elsewhere."""
    if not switched:
        return []
    gpus = report.gpus if report else ()
    found = []
    for gpu in gpus:
        state, status = gpu.fabric_state, gpu.fabric_status
        if state is None or (state.lower() == "completed" and (status is None or status.lower() == "success")):
            continue
        waiting = state.lower() in _UNJOINED
        found.append(Verdict(
            check="fabric_manager", scope=Scope.HOST, subject=subject(gpu, host),
            status=Status.FAIL if waiting or state.lower() == "completed" else Status.WARN,
            measured=f"{state}, {status}" if status else state, expected="Completed, Success",
            remedy=_remedy(facts) if waiting and facts.service != "active" else
            f"as root: systemctl restart {SERVICE}; then see journalctl -u {SERVICE} and dmesg | grep -e SXid -e Xid",
        ))  # fmt: skip
    if found:
        return found
    joined = bool(gpus) and all((gpu.fabric_state or "").lower() == "completed" for gpu in gpus)
    differs = facts.version is not None and facts.driver is not None and facts.version != facts.driver
    if not joined and facts.service not in {"active", None}:
        return [_fabric(host, Status.FAIL, str(facts.service), "active", _remedy(facts))]
    if differs:
        status = Status.WARN if joined or facts.service == "active" else Status.FAIL
        return [_fabric(host, status, f"version {facts.version}", f"version {facts.driver}, as the driver", _remedy(facts))]
    if joined or facts.service == "active":
        state = facts.service if facts.service == "active" else "GPUs have joined the fabric"
        return [_fabric(host, Status.PASS, f"{state}{', ' + facts.version if facts.version else ''}", "", "")]
    return [
        _fabric(
            host,
            Status.SKIP,
            "unknown",
            "active",
            f"ask the host itself, outside of any container: systemctl is-active {SERVICE}",
        )
    ]


def _remedy(facts: FabricFacts) -> str:
    if facts.driver is not None and facts.version != facts.driver:
        branch = facts.driver.partition(".")[0]
        package = SERVICE if int(branch) >= 580 else f"{SERVICE}-{branch}"
        return (
            f"as root: install {package} in exactly the driver's version {facts.driver}, then systemctl enable --now {SERVICE}"
        )
    return f"as root: systemctl enable --now {SERVICE}; if it does not stay up: journalctl -u {SERVICE}"


_verdict = Reporter("nvlink")

LIMIT_S = 20.0
SLOW_LINK = 0.9
"""A link below this share of the usual speed on its host has trained badly; links of one host are all of one kind."""

_GPU = re.compile(r"\s*GPU (\d{1,3}):")
_LINK = re.compile(r"\s*Link (\d{1,3}):\s*(.*)")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_CONNECTION = re.compile(r"X|SYS|SOC|NODE|PHB|PXB|PIX|PSB|NV\d{1,2}")
_DEVICE = re.compile(r"GPU\d+|NIC\d+|mlx5_\w+|[a-z]\w*_\d+")


@dataclass(frozen=True, slots=True)
class GpuLinks:
    """NVLinks of one GPU. `speeds_gbs`: GB/s per direction, of links that are up, by number; `down`: numbers of the others."""

    index: int
    speeds_gbs: Mapping[int, float] = field(default_factory=dict)
    down: tuple[int, ...] = ()
    all_down: bool = False
    """The driver says that all its links are inactive: no bridge, no fabric, or all broken."""


@dataclass(frozen=True, slots=True)
class Topology:
    """How devices of a host are connected: "NV18" (18 NVLinks), "PIX", "PXB", "PHB", "NODE", "SYS" (ever farther over PCIe)."""

    devices: tuple[str, ...] = ()
    between: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def gpus(self) -> list[str]:
        """Names of the GPUs, in order."""
        return [name for name in self.devices if name.startswith("GPU")]

    def num_nvlinks(self, one: str, other: str) -> int | None:
        """How many NVLinks join two GPUs; None if unknown."""
        connection = self.between.get((one, other))
        return None if connection is None else int(connection[2:]) if connection.startswith("NV") else 0


def read_links(surroundings: Surroundings) -> list[GpuLinks] | None:
    """The NVLinks of all GPUs; None if nobody could tell."""
    answer = surroundings.tools.run(("nvidia-smi", "nvlink", "--status"), limit_s=LIMIT_S)
    return None if answer is None or answer.timed_out else parse_links(f"{answer.stdout}\n{answer.stderr}")


def read_topology(surroundings: Surroundings) -> Topology | None:
    """How GPUs and NICs are connected; None if nobody could tell."""
    answer = surroundings.tools.run(("nvidia-smi", "topo", "-m"), limit_s=LIMIT_S)
    if answer is None or answer.timed_out:
        return None
    topology = parse_topology(answer.stdout)
    return topology if topology.between else None


def parse_links(text: str) -> list[GpuLinks]:
    """NVLinks by GPU. A link in a state that is neither a speed nor inactive is left out, and so is a GPU without any word."""
    found: dict[int, GpuLinks] = {}
    index: int | None = None
    for line in text.splitlines():
        if header := _GPU.match(line):
            index = int(header[1])
        elif index is not None and (link := _LINK.match(line)):
            known = found.get(index, GpuLinks(index))
            number, state = int(link[1]), link[2].strip()
            speed = decimal(state) if state.endswith("GB/s") else None
            if speed:
                found[index] = GpuLinks(index, {**known.speeds_gbs, number: speed}, known.down)
            elif "inactive" in state.lower():
                found[index] = GpuLinks(index, known.speeds_gbs, (*known.down, number))
        elif index is not None and "all links are inactive" in line.lower():
            found[index] = GpuLinks(index, all_down=True)
    return list(found.values())


def parse_topology(text: str) -> Topology:
    """The matrix, as far as it can be read: a row counts up to its first cell that is no connection."""
    columns: list[str] = []
    between: dict[tuple[str, str], str] = {}
    for line in _ESCAPE.sub("", text).splitlines():
        cells = [cell.strip() for cell in (line.split("\t") if "\t" in line else line.split())]
        if not columns:
            names = [cell for cell in cells if cell]
            if names and re.fullmatch(r"GPU\d+", names[0]) and "X" not in names:
                columns = _devices(names)
        elif cells and cells[0] in columns:
            for name, cell in zip(columns, cells[1:], strict=False):
                if not _CONNECTION.fullmatch(cell):
                    break
                between[cells[0], name] = cell
    return Topology(tuple(columns), between)


def judge_nvlink(
    links: Sequence[GpuLinks] | None, topology: Topology | None, *, switched: bool, mig: bool, num_gpus: int, host: str
) -> list[Verdict]:
    """Links that are down or slow, and pairs of GPUs that miss links which other pairs have.

    On a machine with NVSwitches every GPU must have all its links. Elsewhere bridges may join only some GPUs, so that a GPU
    without links means nothing, and one with fewer than another is worth a look.
    """
    if mig:
        return [_verdict(host, Status.SKIP, "MIG is on", "", "none: GPUs that are divided by MIG do not use NVLink")]
    if not links and topology is None:
        return [
            _verdict(
                host, Status.SKIP, "unknown", "link states", "look yourself: nvidia-smi nvlink --status; nvidia-smi topo -m"
            )
        ]
    links = links or []
    most = max((len(one.speeds_gbs) for one in links), default=0)
    found = [verdict for one in links for verdict in _judge_gpu(one, links, switched=switched, host=host)]
    found += _judge_speeds(links, host)
    if switched and topology is not None and not found:
        found += _judge_pairs(topology, host)
    total = max((len(one.speeds_gbs) + len(one.down) for one in links), default=0)
    whole = [one for one in links if one.all_down or len(one.speeds_gbs) + len(one.down) == total]
    if len(whole) < num_gpus and (switched or most):
        measured, expected = f"{len(whole)} GPUs told all their links", f"{num_gpus} GPUs"
        found.append(_verdict(host, Status.WARN, measured, expected, "look yourself: nvidia-smi nvlink --status"))
    if found:
        return found
    if not most:
        return [_verdict(host, Status.PASS, "no NVLink in use", "", "")]
    speed = Counter(speed for one in links for speed in one.speeds_gbs.values()).most_common(1)[0][0]
    return [_verdict(host, Status.PASS, f"{most} links at {speed:g} GB/s", "", "")]


def _judge_gpu(one: GpuLinks, links: Sequence[GpuLinks], *, switched: bool, host: str) -> list[Verdict]:
    active = len(one.speeds_gbs)
    most = max(len(other.speeds_gbs) for other in links)
    about = f"GPU {one.index} on {host}"
    down = f", down: {', '.join(map(str, sorted(one.down)))}" if one.down else ""
    if switched and (one.all_down or one.down):
        # Some models have fewer links than their chip: then the same number is down on every GPU, and that is no failure.
        alike = not one.all_down and len({len(other.down) for other in links}) == 1
        remedy = (
            "see dmesg | grep -e Xid -e SXid; as root, with all GPUs idle: systemctl restart nvidia-fabricmanager, "
            f"or reboot; if GPU {one.index} still misses links, replace the host"
        )
        expected = f"{max(most, active + len(one.down)) or 'all'} links up"
        return [_verdict(about, Status.WARN if alike else Status.FAIL, f"{active} links up{down}", expected, remedy)]
    if not switched and one.down and 0 < active < most:
        remedy = f"check its NVLink bridge: nvidia-smi nvlink --status -i {one.index}; reseat it, or reboot"
        return [_verdict(about, Status.WARN, f"{active} links up{down}", f"{most} links up, as on other GPUs", remedy)]
    return []


def _judge_speeds(links: Sequence[GpuLinks], host: str) -> list[Verdict]:
    speeds = Counter(speed for one in links for speed in one.speeds_gbs.values())
    if not speeds:
        return []
    usual = speeds.most_common(1)[0][0]
    found = []
    for one in links:
        slow = sorted(number for number, speed in one.speeds_gbs.items() if speed < SLOW_LINK * usual)
        if slow:
            worst = min(one.speeds_gbs[number] for number in slow)
            remedy = (
                f"look for retraining and errors: nvidia-smi nvlink -e -i {one.index}; reboot, and replace the host if it stays"
            )
            found.append(Verdict(
                check="nvlink", scope=Scope.HOST, subject=f"GPU {one.index} on {host}", status=Status.WARN,
                measured=f"link {', '.join(map(str, slow))}: {worst:g}", expected=usual, unit="GB/s", remedy=remedy,
            ))  # fmt: skip
    return found


def _judge_pairs(topology: Topology, host: str) -> list[Verdict]:
    names = topology.gpus()
    pairs = [(one, other) for at, one in enumerate(names) for other in names[at + 1 :]]
    counts = {pair: topology.num_nvlinks(*pair) for pair in pairs}
    most = max((count for count in counts.values() if count), default=0)
    found = []
    for (one, other), count in counts.items():
        if count is not None and count < most:
            subject = f"GPU {one[3:]} -> GPU {other[3:]} on {host}"
            remedy = "as root, with all GPUs idle: systemctl restart nvidia-fabricmanager; then look again: nvidia-smi topo -m"
            found.append(_verdict(subject, Status.FAIL, topology.between[one, other], f"NV{most}", remedy))
    return found


def _devices(names: Sequence[str]) -> list[str]:
    devices = []
    for name in names:
        if not _DEVICE.fullmatch(name):
            break
        devices.append(name)
    return devices
