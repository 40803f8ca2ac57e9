"""Identity of this process: rank, local rank, world and host, read once from an environment mapping."""

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from elastictrain.bounded_json import parse_record
from elastictrain.errors import ConfigError, Problem

LAUNCHER, GENERATION, RESTARTED, FOLDER, PREVIOUS_WORKERS, STORE_HOST, RECOVERY, POISONED, CHANNEL = (
    f"ELASTICTRAIN_{name}"
    for name in (
        "LAUNCHER",
        "GENERATION",
        "RESTARTED",
        "LAUNCH_FOLDER",
        "PREVIOUS_WORKERS",
        "STORE_HOST",
        "RECOVERY",
        "POISONED",
        "CHANNEL",
    )
)

Rung = Literal["in_place", "restart", "regroup"]


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """How a generation follows one that has failed, as the launcher of a host sees it."""

    rung: Rung
    lost: tuple[str, ...]  # what has died: `rank 1 on hosta`, or the name of a host
    reason: str
    since: float  # unix time at which the launcher noticed the failure
    step: int = 0  # the newest step that is known to have been finished before it; 0: none


@dataclass(frozen=True, slots=True)
class PoisonedSteps:
    """Steps that failed again and again, and how the run gets past them (`fault.on_poisoned`). All hosts have the same."""

    skipped: tuple[int, ...] = ()  # their batches are never read
    went_back: tuple[int, ...] = ()  # from which the run went back to an earlier checkpoint
    before_step: int = 0
    """0, or the step from which the failures began. Of all that a generation before `generation` has made these count last:
    checkpoints from the newest one up to this step on, and what is in memory."""
    generation: int = 0


NOTHING_POISONED = PoisonedSteps()


@dataclass(frozen=True, slots=True)
class Launcher:
    """The process of `python -m elastictrain.launch` on this host, which restarts workers."""

    pid: int
    generation: int
    restarted: bool  # whether this start follows another one of the same launch
    folder: str  # its own, for notes that outlive the workers
    previous_workers: str = (
        ""  # processes of the previous generation that held devices and memory, as `fault.exits` writes them
    )
    recovery: RecoveryPlan | None = None  # None where no generation of this launch has failed before this one
    poisoned: PoisonedSteps = PoisonedSteps()  # frozen
    channel: int = -1  # descriptor of this process's end of its channel; -1: it has none


@dataclass(frozen=True, slots=True)
class Identity:
    """This process's place in its group. Fixed for the life of the process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    launched: bool  # whether torchrun or our launcher started it; otherwise it is a world of one and needs no rendezvous
    launcher: Launcher | None = None

    @property
    def poisoned(self) -> PoisonedSteps:
        return self.launcher.poisoned if self.launcher is not None else NOTHING_POISONED

    @property
    def is_log_rank(self) -> bool:
        """Whether this rank writes for the group (terminal, TensorBoard, shared files)."""
        return self.rank == 0

    @property
    def host_ranks(self) -> range:
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)

    @property
    def only_host(self) -> bool:
        return self.local_world_size == self.world_size


def read_identity(environment: Mapping[str, str]) -> Identity:
    """Read torchrun's variables; without them, a world of one.
    Raises: ConfigError if only some of them are set, one is not a number, or they count workers that were not started."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    present = [name for name in names if name in environment]
    host = socket.gethostname()
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return Identity(0, 1, 0, 1, host, launched=False)
    if pods := pods_without_workers(environment):
        message = (
            f"must be {pods} where each of the {pods} pods (PET_NNODES) is one worker, but is {environment['WORLD_SIZE']}:"
            " for a worker per GPU start `python -m elastictrain.launch ...` in each pod, or"
            " `torchrun ... -m elastictrain.run ...`"
        )
        raise ConfigError([Problem("WORLD_SIZE", message)])
    problems = []
    values = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for name in names:
        text, least = environment.get(name), 1 if name.endswith("WORLD_SIZE") else 0
        if text is None:
            if name in ("RANK", "WORLD_SIZE"):
                problems.append(Problem(name, f"must be set in the environment when {present[0]} is; start with torchrun"))
        elif not text.isdecimal() or int(text) < least:
            problems.append(Problem(name, f"must be a whole number >= {least} in the environment, but is {text!r}"))
        else:
            values[name] = int(text)
    if problems:
        raise ConfigError(problems)
    if values["RANK"] >= values["WORLD_SIZE"]:
        raise ConfigError([Problem("RANK", f"must be < WORLD_SIZE={values['WORLD_SIZE']}, but is {values['RANK']}")])
    ranks = {name.lower(): value for name, value in values.items()}
    pid, generation, folder = (environment.get(name, "") for name in (LAUNCHER, GENERATION, FOLDER))
    launcher = None
    if pid.isdecimal() and generation.isdecimal() and folder:
        previous_workers = environment.get(PREVIOUS_WORKERS, "")
        recovery, poisoned = None, NOTHING_POISONED
        with suppress(ValueError):
            recovery = parse_record(environment.get(RECOVERY, ""), RecoveryPlan)
        with suppress(ValueError):
            poisoned = parse_record(environment.get(POISONED, ""), PoisonedSteps)
        restarted = environment.get(RESTARTED) == "1"
        channel = int(text) if (text := environment.get(CHANNEL, "")).isdecimal() else -1
        launcher = Launcher(int(pid), int(generation), restarted, folder, previous_workers, recovery, poisoned, channel)
    return Identity(**ranks, host=host, launched=True, launcher=launcher)


def pods_without_workers(environment: Mapping[str, str]) -> int:
    """The pods of a job whose cluster counts GPUs in WORLD_SIZE and pods in RANK, and where no workers were started; else 0.
    Kubeflow's operators and RunAI set both in each pod. torchrun replaces them for its workers, and adds LOCAL_WORLD_SIZE."""
    pods, world_size = environment.get("PET_NNODES", ""), environment.get("WORLD_SIZE", "")
    if "RANK" not in environment or "LOCAL_WORLD_SIZE" in environment or not (pods.isdecimal() and world_size.isdecimal()):
        return 0
    return int(pods) if int(pods) != int(world_size) else 0
