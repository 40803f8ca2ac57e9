"""Links between the GPUs of a host: `nvidia-smi nvlink --status` and `nvidia-smi topo -m`."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastictrain.preflight.devices.words import decimal
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Reporter, Scope, Status, Verdict

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
