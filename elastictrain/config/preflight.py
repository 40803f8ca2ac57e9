"""The group `preflight`: what is checked before the first step of every start, and what a bad finding means."""

from dataclasses import asdict, dataclass, field, make_dataclass
from typing import Annotated, Literal

from elastictrain.config.constraints import Range

Mode = Literal["fail", "exclude", "warn", "off"]
Port = Annotated[int, Range(1, 65535)]


CHECKS = {
    "name": "The host's own name does not resolve to loopback.",
    "lookup": "Names and addresses are looked up without stalling.",
    "ports": "The ports of `preflight.ports` are free when a launcher starts.",
    "shared_memory": "Room for snapshots in `checkpoint.memory_dir`.",
    "disk": "Room and inodes in `run.dir`, if it is a local folder, and in the folder for temporary files.",
    "memlock": "As much memory can be locked as RDMA needs, where it is planned.",
    "open_files": "Enough files can be open at once.",
    "processes": "Enough processes and threads can be started.",
    "memory": "Free memory of the host, and of its control group.",
    "cpu": "A control group leaves the CPUs that are needed.",
    "load": "Nobody else keeps the CPUs busy.",
    "storage": "`run.dir` can be written, read back and cleaned up, and is the same on all hosts.",
    "alike": "All hosts have the same code, versions, settings of NCCL and kind of GPUs.",
    "gpus": "As many GPUs as local ranks are there.",
    "fabric_manager": "On machines with NVSwitches their manager runs, in the driver's version.",
    "ecc": "No memory of a GPU has errors that could not be corrected.",
    "row_remap": "No memory of a GPU waits to be remapped, or cannot be any more.",
    "xid": "The kernel's log tells of no hardware error of a GPU since boot.",
    "pcie": "Devices have all the lanes that they are made for.",
    "throttle": "No GPU is slowed down by heat or power.",
    "nvlink": "All NVLinks of the GPUs are up.",
    "counters": "No link has flapped or lost frames since the last preflight.",
    "interface": "The network interface that is used is the one by which the kernel reaches the other hosts.",
    "infiniband": "InfiniBand or RoCE ports are active, and the ones that are used exist.",
    "roster": "Every host is there.",
    "clock": "Clocks agree to within 1 s (a warning) or 2 s (a failure).",
    "reachable": "Every host reaches every other on the ports that are used, in both directions.",
    "mtu": "Frames as large as the interfaces allow arrive.",
    "loss": "Packets do not get lost: 0.1 % is a warning, 1 % a failure.",
    "latency": "Answers come in the time that is usual in the group.",
    "bandwidth": "No host and no link is much slower than the others.",
    "present": "Every rank takes part in collectives.",
    "collectives": "Collectives compute what they should.",
    "bus_bandwidth": "Collectives are as fast as the links between the devices allow.",
    "p2p": "The GPUs of a host reach each other directly.",
    "matmul": "No rank multiplies matrices much more slowly than the others.",
    "sdc": "No device computes, stores or copies wrong bits (silent data corruption).",
    "rails": "No GPU's way to other hosts is much slower than that of others, and it is the planned one.",
    "nccl_transport": "NCCL uses the transport that was planned.",
}
"""Each check, and what it makes sure of."""

MODES: dict[str, Mode] = {
    **dict.fromkeys(CHECKS, "fail"),
    **dict.fromkeys(("latency", "bandwidth", "matmul", "rails"), "exclude"),
    **dict.fromkeys(("bus_bandwidth", "p2p", "nccl_transport"), "warn"),
}
"""The default mode of each check. What is slow is not broken: it trains where no other host could take its place."""

_Modes = make_dataclass(
    "_Modes",
    [(name, Mode, field(default=MODES[name], metadata={"doc": doc})) for name, doc in CHECKS.items()],
    frozen=True,
)


class PreflightChecks(_Modes):  # type: ignore[misc, valid-type]
    """What a failure of each check means: `fail` stops the start; `exclude` leaves the host out if enough others remain, else
    it warns; `warn` only says so; `off` leaves the check out."""


@dataclass(frozen=True, slots=True)
class PreflightThresholds:
    """From where on a figure is a finding."""

    clock_warn_s: Annotated[float, Range(0.0)] = 1.0
    """Clocks of two hosts that differ by more are a warning."""

    clock_fail_s: Annotated[float, Range(0.0)] = 2.0
    """Clocks of two hosts that differ by more are a failure."""

    loss_warn: Annotated[float, Range(0.0, 1.0)] = 0.001
    """Where a larger part of the TCP segments gets lost for sure, it is a warning."""

    loss_fail: Annotated[float, Range(0.0, 1.0)] = 0.01
    """Where a larger part of the TCP segments gets lost for sure, it is a failure."""

    slow_ratio: Annotated[float, Range(0.0, 1.0)] = 0.5
    """A host whose best link has less than this part of the median of all hosts' best links is slow."""

    late_factor: Annotated[float, Range(1.0)] = 3.0
    """A host whose best latency is so many times the median of all hosts' best ones is far away."""

    bus_ratio: Annotated[float, Range(0.0, 1.0)] = 0.7
    """Bandwidth of collectives, and between two GPUs on NVLinks, below this part of what the links can do is a finding."""

    straggler_ratio: Annotated[float, Range(0.0, 1.0)] = 0.85
    """A GPU with less than this part of the median rate of matrix products is a straggler."""


@dataclass(frozen=True, slots=True)
class PreflightLimits:
    """How long parts of a preflight may take before they count as failed, in seconds."""

    storage_s: Annotated[float, Range(0.0, exclusive=True)] = 8.0
    """Writing, reading and deleting an object in `run.dir`."""

    contact_s: Annotated[float, Range(0.0, exclusive=True)] = 4.0
    """All that one host asks of the others at a time: reachability, MTU, loss, latency, clock."""

    stream_s: Annotated[float, Range(0.0, exclusive=True)] = 0.3
    """How long bytes flow between two hosts in one direction."""

    collective_s: Annotated[float, Range(0.0, exclusive=True)] = 5.0
    """One collective, right or wrong."""

    bandwidth_s: Annotated[float, Range(0.0, exclusive=True)] = 20.0
    """The bandwidth of all-reduce; likewise that of rails."""

    matmul_s: Annotated[float, Range(0.0, exclusive=True)] = 10.0
    """Matrix products, memory patterns and copies on each device, besides waiting for `nvidia-smi`."""


@dataclass(frozen=True, slots=True)
class PreflightGroup:
    """What is checked before the first step of every start. `preflight=off|quick|full` chooses the level."""

    level: Literal["auto", "off", "quick", "full"] = "auto"
    """How much is checked; auto: everything on a first start and after a transport failure, else what takes a second."""

    wait_s: Annotated[float, Range(0.0, exclusive=True)] = 10.0
    """How long the hosts that are there wait for the others to introduce themselves."""

    limit_s: Annotated[float, Range(0.0, exclusive=True)] = 60.0
    """How long the whole preflight may take before it counts as failed."""

    ports: tuple[Port, ...] = ()
    """TCP ports on which hosts must reach each other, besides three that are spread over those that the kernel picks from."""

    strict: bool = False
    """Whether a check with the mode `exclude` or `warn` stops the start, too, when it fails."""

    thresholds: PreflightThresholds = field(default_factory=PreflightThresholds)
    """From where on a figure is a finding."""

    limits: PreflightLimits = field(default_factory=PreflightLimits)
    """How long parts of a preflight may take."""

    checks: PreflightChecks = field(default_factory=PreflightChecks)
    """What a failure of each check means."""

    @property
    def modes(self) -> dict[str, Mode]:
        """The mode of each check that counts."""
        modes = asdict(self.checks)
        return {name: "fail" if self.strict and mode != "off" else mode for name, mode in modes.items()}
