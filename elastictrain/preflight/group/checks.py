"""The group checks in their order, run collectively, each under a deadline of its own."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch

from elastictrain.config.preflight import PreflightGroup
from elastictrain.distributed.group import Group
from elastictrain.identity import Identity
from elastictrain.preflight.group.attendance import Act, Attendance, DeadlineThread, Entries, judge_attendance
from elastictrain.preflight.group.collectives import Collective, Collectives, Examination, WrongResult
from elastictrain.preflight.group.judge import (
    STRAGGLER_RATIO_CPU,
    agreed,
    judge_bandwidth,
    judge_pairs,
    judge_rates,
    judge_results,
    stragglers,
)
from elastictrain.preflight.group.measurements import (
    Point,
    Reach,
    free_memory,
    matmul_tflops,
    measure_all_reduce,
    measure_pairs,
    sweep_sizes,
)
from elastictrain.preflight.group.members import GroupMember, Planned, introduced, neighbours, strangers
from elastictrain.preflight.group.nccl_transport import NcclChannels, judge_transport, log_path, parse_log
from elastictrain.preflight.surroundings import Exchange
from elastictrain.preflight.verdict import Reporter, Scope, Verdict

CHECKS = ("present", "collectives", "bus_bandwidth", "p2p", "matmul", "nccl_transport")
"""Their names, as in `preflight.checks`."""

_P2P_S = 20.0
_TRANSPORT_S = 5.0
_MATMUL_BUDGET_S = 0.02


class MeasureRate(Protocol):
    """The rate of matrix products, in TFLOP/s."""

    def __call__(self, device: torch.device, *, budget_s: float) -> float: ...


@dataclass(frozen=True, slots=True)
class GroupDevices:
    """What is measured with; handed in, so that a test can break it."""

    collectives: Collectives = field(default_factory=Collectives)
    matmul: MeasureRate = matmul_tflops


@dataclass(frozen=True, slots=True)
class GroupFindings:
    """What the group checks found; the same on all ranks. `point`: the largest all-reduce that was measured.

    `usable`: whether collectives can still be used. If not, one of them hangs in a thread that cannot be ended: leave with
    `os._exit`, and without `leave(group)`, which would wait for it.
    """

    verdicts: list[Verdict]
    usable: bool
    point: Point | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be checked. The same on all ranks, except for what one host knows: its network, its plan, its environment.

    `present_s`: until every rank has said that it is there; ranks come out of the making of the group together. `grace_s`: how
    much later than the deadline the word of a rank may come before it counts as silent. `network_gbps`, `planned`: as in
    `GroupMember`. `environment`: as it was when NCCL started.
    """

    full: bool
    settings: PreflightGroup = field(default_factory=PreflightGroup)
    present_s: float = 5.0
    grace_s: float = 1.0
    network_gbps: float | None = None
    planned: Planned | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


@dataclass(slots=True)
class GroupChecks:
    """The checks of one group of ranks, to be run once, right after the group was made.

    `hosts`: of each rank. `exchange` must be new to this generation. `on_part` is told, in the caller's thread, what this rank
    is about to enter, and may raise in order to leave.
    """

    group: Group
    exchange: Exchange
    identity: Identity
    request: Request
    hosts: Sequence[str] = field(kw_only=True)
    devices: GroupDevices = field(default_factory=GroupDevices, kw_only=True)
    on_part: Callable[[str], None] = field(default=lambda _: None, kw_only=True)
    _members: tuple[GroupMember, ...] = field(init=False)
    _entries: Entries = field(init=False)
    _thread: DeadlineThread = field(init=False)
    _verdicts: list[Verdict] = field(default_factory=list, init=False)
    _culprits: list[Verdict] = field(default_factory=list, init=False)
    _point: Point | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._members = strangers(self.hosts)
        self._entries = Entries(self.exchange, self.identity.rank, self.identity.world_size, self.request.grace_s)
        self._thread = DeadlineThread(self._take_device)

    def run(self) -> GroupFindings:
        """All checks, or as many as can be run until ranks do not come through one together: then who is to blame for it.

        Collective: yes. Returns in bounded time, also where a collective hangs. Raises: TransportError if the exchange cannot
        be reached.
        """
        for check, step in self._steps():
            if check == "present" or not self._is_off(check):
                self._verdicts += step()
            if self._culprits:
                break
        self._thread.close()
        if self.group.device.type == "cuda" and not self._culprits:
            # What the checks took of the device's memory is given back.
            torch.cuda.empty_cache()
        return GroupFindings(agreed([*self._verdicts, *self._culprits]), not self._culprits, self._point)

    def _steps(self) -> Iterator[tuple[str, Callable[[], list[Verdict]]]]:
        """What applies here, in order."""
        # Also where it is off: without it, nobody knows who the others are.
        yield "present", self._present
        yield "collectives", self._collectives
        several, nccl = self.identity.world_size > 1, self.group.backend == "nccl"
        if several and nccl:
            yield "nccl_transport", self._transport
        if several:
            yield "bus_bandwidth", self._bandwidth
        yield "matmul", self._matmul
        if self.request.full and nccl:
            yield "p2p", self._p2p

    def _is_off(self, check: str) -> bool:
        return bool(getattr(self.request.settings.checks, check) == "off")

    def _run(self, check: str, part: str, act: Act, *, limit_s: float) -> Attendance | None:
        """What all ranks brought back from a part; None if not all came through: nothing further may be run then.

        Returns a little after `limit_s` at the latest.
        """
        self.on_part(part)
        began = time.monotonic()
        self._entries.enter(part)
        word = self._thread.run(act, limit_s=limit_s)
        attendance = self._entries.settle(part, word, began=began, limit_s=limit_s)
        if check == "present":
            self._members = introduced(self._members, {rank: one.figure for rank, one in attendance.words.items()})
        if attendance.complete:
            return attendance
        self._culprits += judge_attendance(check, attendance, self._members)
        return None

    def _take_device(self) -> None:
        # The current device is each thread's own.
        if self.group.device.type == "cuda":
            torch.cuda.set_device(self.group.device)

    def _present(self) -> list[Verdict]:
        attendance = self._run("present", "present", lambda _: self._introduction(), limit_s=self.request.present_s)
        if attendance is None or self._is_off("present"):
            return []
        num = len(self._members)
        return _timed([Reporter("present", scope=Scope.GROUP).passed(num, expected=num, unit="ranks")], attendance)

    def _introduction(self) -> GroupMember:
        identity, device = self.identity, self.group.device
        return GroupMember(
            rank=identity.rank,
            host=self._members[identity.rank].host,
            local_rank=identity.local_rank,
            pid=os.getpid(),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            free_bytes=free_memory(device, local_world_size=identity.local_world_size),
            network_gbps=self.request.network_gbps,
            planned=self.request.planned,
        )

    def _collectives(self) -> list[Verdict]:
        examination = Examination(
            self.devices.collectives,
            rank=self.identity.rank,
            world_size=self.identity.world_size,
            device=self.group.device,
            full=self.request.full,
        )
        verdicts: list[Verdict] = []
        for collective in Collective:

            def act(at: Callable[[str], None], collective: Collective = collective) -> object:
                return examination.run(collective, at=at)

            attendance = self._run("collectives", collective, act, limit_s=self.request.settings.limits.collective_s)
            if attendance is None:
                break
            faults = attendance.figures(list[WrongResult])
            verdicts += _timed(judge_results(collective, faults, self._members), attendance)
        return verdicts

    def _transport(self) -> list[Verdict]:
        def read(_: Callable[[str], None]) -> NcclChannels:
            path = log_path(self.request.environment, host=self.identity.host, pid=os.getpid())
            try:
                return parse_log(Path(path).read_text(errors="replace") if path else "")
            except OSError:
                return NcclChannels()

        attendance = self._run("nccl_transport", "nccl_transport", read, limit_s=_TRANSPORT_S)
        return _timed(judge_transport(attendance.figures(NcclChannels), self._members), attendance) if attendance else []

    def _bandwidth(self) -> list[Verdict]:
        cuda, free_bytes = self.group.device.type == "cuda", min(member.free_bytes for member in self._members)
        sizes = sweep_sizes(cuda=cuda, full=self.request.full, free_bytes=free_bytes)

        def act(at: Callable[[str], None]) -> Point:
            return measure_all_reduce(
                self.devices.collectives,
                rank=self.identity.rank,
                world_size=self.identity.world_size,
                device=self.group.device,
                sizes=sizes,
                at=at,
            )

        attendance = self._run("bus_bandwidth", "bus_bandwidth", act, limit_s=self.request.settings.limits.bandwidth_s)
        if attendance is None:
            return []
        self._point = attendance.figures(Point)[0]
        nccl, ratio = self.group.backend == "nccl", self.request.settings.thresholds.bus_ratio
        return _timed([judge_bandwidth(self._point, self._members, nccl=nccl, least_ratio=ratio)], attendance)

    def _matmul(self) -> list[Verdict]:
        ratio = self.request.settings.thresholds.straggler_ratio if self.group.device.type == "cuda" else STRAGGLER_RATIO_CPU
        first = self._rates("matmul")
        if first is None:
            return []
        again, rates = None, first.figures(float)
        if stragglers(rates, ratio=ratio):
            again = self._rates("matmul, second time")
            if again is None:
                return []
        verdicts = judge_rates(rates, again.figures(float) if again else None, self._members, ratio=ratio)
        return _timed(verdicts, *filter(None, (first, again)))

    def _rates(self, part: str) -> Attendance | None:
        def act(_: Callable[[str], None]) -> float:
            return self.devices.matmul(self.group.device, budget_s=_MATMUL_BUDGET_S)

        return self._run("matmul", part, act, limit_s=self.request.settings.limits.matmul_s)

    def _p2p(self) -> list[Verdict]:
        rank, device = self.identity.rank, self.group.device
        local = neighbours(self._members, host=self._members[rank].host)

        def act(_: Callable[[str], None]) -> list[Reach]:
            return measure_pairs(self.devices.collectives, rank=rank, neighbours=local, device=device)

        attendance = self._run("p2p", "p2p", act, limit_s=_P2P_S)
        return _timed(judge_pairs(attendance.figures(list[Reach]), self._members), attendance) if attendance else []


def _timed(verdicts: list[Verdict], *parts: Attendance) -> list[Verdict]:
    """With what the parts took that they come from."""
    return [replace(verdict, seconds=sum(part.seconds for part in parts)) for verdict in verdicts]
