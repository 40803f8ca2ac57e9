"""The group checks in their order, run collectively, each under a deadline of its own."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from elastictrain.distributed.group import Group
from elastictrain.identity import Identity
from elastictrain.preflight.group.attendance import Attendance
from elastictrain.preflight.group.collectives import BackendCollectives, Collective, Collectives, WrongResult, make_examination
from elastictrain.preflight.group.judge import (
    judge_bandwidth,
    judge_pairs,
    judge_present,
    judge_rates,
    judge_results,
    stragglers,
)
from elastictrain.preflight.group.judge_attendance import agreed
from elastictrain.preflight.group.measurements import Point, Reach, Sweep, matmul_tflops, measure_pairs
from elastictrain.preflight.group.members import Known, neighbours
from elastictrain.preflight.group.nccl_transport import NcclChannels, judge_transport, log_path, parse_log
from elastictrain.preflight.group.options import GroupOptions
from elastictrain.preflight.group.runner import GroupCheckRunner
from elastictrain.preflight.surroundings import Exchange
from elastictrain.preflight.verdict import Verdict

CHECKS = ("present", "collectives", "bus_bandwidth", "p2p", "matmul", "nccl_transport")
"""Their names, as in `preflight.checks`."""


class MeasureRate(Protocol):
    """The rate of matrix products, in TFLOP/s."""

    def __call__(self, device: torch.device, *, budget_s: float) -> float: ...


@dataclass(frozen=True, slots=True)
class GroupDevices:
    """What is measured with; handed in, so that a test can break it."""

    collectives: Collectives = field(default_factory=BackendCollectives)
    matmul: MeasureRate = matmul_tflops


@dataclass(frozen=True, slots=True)
class GroupFindings:
    """What the group checks found; the same on all ranks."""

    verdicts: list[Verdict]
    usable: bool
    """Whether collectives can still be used. If not, one of them hangs in a thread that cannot be ended: leave with `os._exit`,
    and without `leave(group)`, which would wait for it."""

    points: tuple[Point, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be checked. The same on all ranks, except for `known` and `environment`."""

    full: bool
    off: frozenset[str] = frozenset()
    """Names of checks to leave out."""

    options: GroupOptions = field(default_factory=GroupOptions)
    known: Known = field(default_factory=Known)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """As it was when NCCL started."""


class GroupChecks:
    """The checks of one group of ranks, to be run once, right after the group was made.

    `hosts`: of each rank. `exchange` must be new to this incarnation. `on_part` is told, in the caller's thread, what this rank
    is about to enter, and may raise in order to leave.
    """

    def __init__(
        self,
        group: Group,
        exchange: Exchange,
        identity: Identity,
        request: Request,
        *,
        hosts: Sequence[str],
        devices: GroupDevices | None = None,
        on_part: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._group = group
        self._identity = identity
        self._request = request
        self._options = request.options
        self._devices = devices or GroupDevices()
        grace_s = request.options.grace_s
        self._together = GroupCheckRunner(group, exchange, identity, hosts=hosts, grace_s=grace_s, on_part=on_part)
        self._verdicts: list[Verdict] = []
        self._points: tuple[Point, ...] = ()

    def run(self) -> GroupFindings:
        """All checks, or as many as can be run until ranks do not come through one together: then who is to blame for it.

        Collective: yes. Returns in bounded time, also where a collective hangs. Raises: TransportError if the exchange cannot
        be reached.
        """
        for check, step in self._steps():
            if check == "present" or check not in self._request.off:
                step()
            if self._together.culprits:
                break
        self._together.close()
        verdicts = agreed([*self._verdicts, *self._together.culprits])
        return GroupFindings(verdicts, not self._together.culprits, self._points)

    def _steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What applies here, in order."""
        # Also where it is off: without it, nobody knows who the others are.
        yield "present", self._present
        yield "collectives", self._collectives
        several, full, nccl = self._identity.world_size > 1, self._request.full, self._group.backend == "nccl"
        if several and nccl:
            yield "nccl_transport", self._transport
        if several:
            yield "bus_bandwidth", self._bandwidth
        yield "matmul", self._matmul
        if full and nccl:
            yield "p2p", self._p2p

    def _present(self) -> None:
        attendance = self._together.introduce(self._request.known, limit_s=self._options.present_s)
        if attendance is not None and "present" not in self._request.off:
            self._verdicts.append(judge_present(self._together.members, seconds=attendance.seconds))

    def _collectives(self) -> None:
        examination = make_examination(
            self._devices.collectives,
            rank=self._identity.rank,
            world_size=self._identity.world_size,
            device=self._group.device,
            options=self._options,
            full=self._request.full,
        )
        for collective in Collective:

            def act(at: Callable[[str], None], collective: Collective = collective) -> object:
                return [asdict(fault) for fault in examination.run(collective, at=at)]

            attendance = self._together.run("collectives", collective, act, limit_s=self._options.collective_s)
            if attendance is None:
                return
            faults = {rank: [WrongResult(**row) for row in rows] for rank, rows in _rows(attendance).items()}
            self._verdicts += judge_results(collective, faults, self._together.members, seconds=attendance.seconds)

    def _transport(self) -> None:
        attendance = self._together.run(
            "nccl_transport", "nccl_transport", lambda _: self._chosen(), limit_s=self._options.transport_s
        )
        if attendance is not None:
            chosen = {
                rank: NcclChannels(tuple(row["networks"]), tuple(row["devices"]), row["direct"], tuple(row["local"]))
                for rank, row in _figures(attendance).items()
            }
            self._verdicts += judge_transport(chosen, self._together.members, seconds=attendance.seconds)

    def _bandwidth(self) -> None:
        sweep = Sweep(
            self._devices.collectives,
            rank=self._identity.rank,
            world_size=self._identity.world_size,
            device=self._group.device,
            options=self._options,
        )
        free_bytes = min(member.free_bytes for member in self._together.members)

        def act(at: Callable[[str], None]) -> object:
            return [asdict(point) for point in sweep.run(full=self._request.full, free_bytes=free_bytes, at=at)]

        attendance = self._together.run("bus_bandwidth", "bus_bandwidth", act, limit_s=self._options.bandwidth_s)
        if attendance is None:
            return
        self._points = tuple(Point(**row) for row in _rows(attendance)[0])
        self._verdicts += judge_bandwidth(
            self._points,
            self._together.members,
            nccl=self._group.backend == "nccl",
            options=self._options,
            seconds=attendance.seconds,
        )

    def _matmul(self) -> None:
        first = self._rates("matmul")
        if first is None:
            return
        again = None
        if stragglers(_rates(first), ratio=self._options.straggler_share(cuda=self._group.device.type == "cuda")):
            again = self._rates("matmul, second time")
            if again is None:
                return
        seconds = first.seconds + (again.seconds if again else 0.0)
        self._verdicts += judge_rates(
            _rates(first), _rates(again) if again else None, self._together.members, options=self._options, seconds=seconds
        )

    def _p2p(self) -> None:
        local = neighbours(self._together.members, host=self._together.members[self._identity.rank].host)

        def act(_: Callable[[str], None]) -> object:
            reached = measure_pairs(
                self._devices.collectives, rank=self._identity.rank, neighbours=local, device=self._group.device
            )
            return [asdict(one) for one in reached]

        attendance = self._together.run("p2p", "p2p", act, limit_s=self._options.p2p_s)
        if attendance is not None:
            reached = {rank: [Reach(**row) for row in rows] for rank, rows in _rows(attendance).items()}
            self._verdicts += judge_pairs(reached, self._together.members, options=self._options, seconds=attendance.seconds)

    def _rates(self, part: str) -> Attendance | None:
        budget_s = self._options.matmul_budget_s
        return self._together.run(
            "matmul",
            part,
            lambda _: self._devices.matmul(self._group.device, budget_s=budget_s),
            limit_s=self._options.matmul_s,
        )

    def _chosen(self) -> dict[str, object]:
        path = log_path(self._request.environment, host=self._identity.host, pid=os.getpid())
        try:
            text = Path(path).read_text(errors="replace") if path else ""
        except OSError:
            text = ""
        return asdict(parse_log(text))


def _figures(attendance: Attendance) -> dict[int, dict]:  # type: ignore[type-arg]
    return {rank: word.figure for rank, word in sorted(attendance.words.items()) if isinstance(word.figure, dict)}


def _rows(attendance: Attendance) -> dict[int, list]:  # type: ignore[type-arg]
    return {rank: word.figure for rank, word in sorted(attendance.words.items()) if isinstance(word.figure, list)}


def _rates(attendance: Attendance) -> dict[int, float]:
    return {rank: float(str(word.figure)) for rank, word in sorted(attendance.words.items())}
