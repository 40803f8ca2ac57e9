"""The group checks in their order, run collectively, each under a deadline of its own."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from elastictrain.config.preflight import PreflightGroup
from elastictrain.distributed.exchange import Exchange
from elastictrain.distributed.group import Group
from elastictrain.identity import Identity
from elastictrain.preflight.group import judge, measurements
from elastictrain.preflight.group.attendance import Act, Entries, judge_attendance, run_act
from elastictrain.preflight.group.collectives import Collective, Collectives, WrongResult, examine
from elastictrain.preflight.group.corruption import COPIES, CPU_S, FULL_S, QUICK_S, DeviceFindings, examine_device, multiply
from elastictrain.preflight.group.measurements import BandwidthPoint, PairBandwidth
from elastictrain.preflight.group.members import GroupMember, Planned, introduced, neighbours, strangers
from elastictrain.preflight.group.nccl_transport import NcclChannels, judge_transport, log_path, parse_log
from elastictrain.preflight.host.counters import sent_bytes
from elastictrain.preflight.host.nvidia import LIMIT_S, read_nvidia
from elastictrain.preflight.host.visible import visible_gpus
from elastictrain.preflight.links.rounds import first_rounds
from elastictrain.preflight.verdict import Reporter, Scope, Verdict
from elastictrain.surroundings import Surroundings

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupFindings:
    """Result of the group checks; the same on all ranks. If not `usable`, a collective hangs in a thread that cannot be ended:
    leave with `os._exit`, and without `leave(group)`, which would wait for it."""

    verdicts: list[Verdict]
    usable: bool
    points: tuple[BandwidthPoint, ...] = ()  # of all-reduce, by size
    pairs: Mapping[int, Sequence[PairBandwidth]] = field(default_factory=dict)  # by receiving rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to check. The same on all ranks, except for what only a host knows: its network and its plan."""

    full: bool
    table: bool = False  # measure all-reduce at more sizes
    settings: PreflightGroup = field(default_factory=PreflightGroup)
    present_s: float = 5.0  # until every rank has introduced itself; ranks leave the making of the group together
    grace_s: float = 1.0  # a rank whose result is later than the deadline by this counts as silent
    network_gbps: float | None = None  # as in `GroupMember`
    planned: Planned | None = None  # as in `GroupMember`


class _IncompleteError(Exception):
    """Not all ranks completed a part: a collective may hang, so nothing further can be checked."""

    def __init__(self, culprits: list[Verdict]) -> None:
        super().__init__()
        self.culprits = culprits


@dataclass(eq=False)
class GroupChecks:
    """The checks of one group of ranks, to be run once, right after the group was made."""

    group: Group
    exchange: Exchange  # new to this generation
    identity: Identity
    request: Request
    _: KW_ONLY
    hosts: Sequence[str]  # of each rank
    on_part: Callable[[str], None] = lambda _: None  # gets, in the caller's thread, the part to enter; may raise to leave
    collectives: Collectives | None = None  # what is measured, and `product`
    product: Callable[[Tensor, Tensor], Tensor] = multiply
    in_background: Callable[[], None] = lambda: None  # called in a thread while GPUs are examined in full

    def __post_init__(self) -> None:
        identity, self._device, self._nccl = self.identity, self.group.device, self.group.backend == "nccl"
        self._collectives = self.collectives or Collectives(identity.rank, identity.world_size, self._device)
        self._entries = Entries(self.exchange, identity.rank, identity.world_size, self.request.grace_s)
        self._members, self._limits = strangers(self.hosts), self.request.settings.limits
        self._seconds = 0.0
        self._points: list[BandwidthPoint] = []
        self._pairs: Mapping[int, Sequence[PairBandwidth]] = {}

    def run(self) -> GroupFindings:
        """Run all checks until the first that not all ranks complete, which ends with verdicts on its culprits. Collective:
        yes. Returns in bounded time, also if a collective hangs. Raises: TransportError if the exchange cannot be reached."""
        verdicts, modes = list[Verdict](), self.request.settings.modes
        try:
            for names, step in self._steps():
                # Without `present` no rank knows the others: it runs also if it is off.
                if names == "present" or any(modes[name] != "off" for name in names.split()):
                    self._seconds = 0.0
                    verdicts += [replace(one, seconds=self._seconds) for one in step() if modes[one.check] != "off"]
        except _IncompleteError as incomplete:
            return GroupFindings(judge.agreed([*verdicts, *incomplete.culprits]), usable=False)
        if self._device.type == "cuda":
            # Free the device memory that the checks used.
            torch.cuda.empty_cache()
        return GroupFindings(judge.agreed(verdicts), True, tuple(self._points), self._pairs)

    def _steps(self) -> Iterator[tuple[str, Callable[[], list[Verdict]]]]:
        yield "present", self._present
        several = self.identity.world_size > 1
        # A single GPU is examined, and communicates with nobody.
        for collective in Collective if several or not self._nccl else ():
            yield "collectives", partial(self._collective, collective)
        if several:
            if self._nccl:
                yield "nccl_transport", self._transport
            yield "bus_bandwidth", self._bandwidth
        yield "matmul sdc", self._devices
        if several and self.request.full and (self._nccl or self.request.table):
            yield "p2p", self._p2p
            if len(set(self.hosts)) > 1:
                yield "rails", self._rails

    def _run(
        self,
        check: str,
        act: Act,
        kind: type[T],
        *,
        limit_s: float,
        part: str = "",
        in_background: Callable[[], None] | None = None,
    ) -> dict[int, T]:
        """Results of all ranks for a part, soon after `limit_s`. Raises: _IncompleteError."""
        part = part or check

        def on_device(at: Callable[[str], None]) -> object:
            # The current device is per thread.
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            return act(at)

        self.on_part(part)
        began = time.monotonic()
        self._entries.enter(part)
        word = run_act(on_device, limit_s=limit_s, in_background=in_background)
        attendance = self._entries.settle(part, word, began=began, limit_s=limit_s)
        self._seconds += attendance.seconds
        if check == "present":
            self._members = introduced(self._members, {rank: one.figure for rank, one in attendance.words.items()})
        if not attendance.complete:
            raise _IncompleteError(judge_attendance(check, attendance, self._members))
        return attendance.figures(kind)

    def _present(self) -> list[Verdict]:
        identity, device = self.identity, self._device
        own = GroupMember(
            rank=identity.rank,
            host=self._members[identity.rank].host,
            local_rank=identity.local_rank,
            pid=os.getpid(),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            free_bytes=measurements.free_memory(device, local_world_size=identity.local_world_size),
            network_gbps=self.request.network_gbps,
            planned=self.request.planned,
        )
        num = len(self._run("present", lambda _: own, GroupMember, limit_s=self.request.present_s))
        return [Reporter("present", scope=Scope.GROUP).passed(num, expected=num, unit="ranks")]

    def _collective(self, collective: Collective) -> list[Verdict]:
        act = partial(examine, collective, collectives=self._collectives, full=self.request.full)
        wrong = self._run("collectives", act, list[WrongResult], limit_s=self._limits.collective_s, part=collective)
        return judge.judge_results(collective, wrong, self._members)

    def _transport(self) -> list[Verdict]:
        def read(_: Callable[[str], None]) -> NcclChannels:
            path = log_path(os.environ, host=self.identity.host, pid=os.getpid())
            try:
                return parse_log(Path(path).read_text(errors="replace") if path else "")
            except OSError:
                return NcclChannels()

        return judge_transport(self._run("nccl_transport", read, NcclChannels, limit_s=5.0), self._members)

    def _bandwidth(self) -> list[Verdict]:
        cuda, free_bytes = self._device.type == "cuda", min(member.free_bytes for member in self._members)
        sizes = measurements.sweep_sizes(cuda=cuda, full=self.request.full, table=self.request.table, free_bytes=free_bytes)
        act = partial(measurements.measure_all_reduce, self._collectives, sizes=sizes)
        self._points = self._run("bus_bandwidth", act, list[BandwidthPoint], limit_s=self._limits.bandwidth_s)[0]
        ratio = self.request.settings.thresholds.bus_ratio
        return [judge.judge_bandwidth(self._points[-1], self._members, nccl=self._nccl, least_ratio=ratio)]

    def _devices(self) -> list[Verdict]:
        full, cuda, thresholds = self.request.full, self._device.type == "cuda", self.request.settings.thresholds
        budget_s, free_bytes = (FULL_S if full else QUICK_S) if cuda else CPU_S, min(one.free_bytes for one in self._members)
        look = partial(examine_device, self._device, budget_s=budget_s, free_bytes=free_bytes, product=self.product)
        copied = SimpleQueue[bool]()

        def examine(at: Callable[[str], None]) -> DeviceFindings:
            if not full or not cuda or self.identity.local_rank != 0:
                return look(at)
            with ThreadPoolExecutor(1) as thread:
                reading = thread.submit(read_nvidia, Surroundings())
                found, report = look(at, busy=lambda: not reading.done()), reading.result()
            return replace(found, gpus=visible_gpus(report, os.environ) if report is not None else ())

        def act(at: Callable[[str], None]) -> DeviceFindings:
            """Examines, and tells when the copies are over, or that nothing follows."""

            def tell(call: str) -> None:
                at(call)
                if call != COPIES:
                    copied.put(True)

            try:
                return examine(tell)
            finally:
                copied.put(False)

        def in_background() -> None:
            # The host times the copies, and must not be busy with anything else.
            if copied.get():
                self.in_background()

        ratio = thresholds.straggler_ratio if cuda else judge.STRAGGLER_RATIO_CPU
        limit_s = self._limits.matmul_s + (LIMIT_S if full and cuda else 0.0)
        found: list[Mapping[int, DeviceFindings]] = []
        rates: list[Mapping[int, float]] = []
        for part in ("matmul", "matmul, second time"):
            if rates and not judge.stragglers(rates[0], ratio=ratio):
                break
            once = in_background if full and cuda and not found else None
            found.append(self._run("matmul", act, DeviceFindings, limit_s=limit_s, part=part, in_background=once))
            rates.append({rank: one.tflops for rank, one in found[-1].items()})
        slow = judge.judge_rates(rates[0], rates[1] if len(rates) > 1 else None, self._members, ratio=ratio)
        return [*slow, *judge.judge_corruption(found, self._members), *judge.judge_load(found[0], self._members)]

    def _p2p(self) -> list[Verdict]:
        local = neighbours(self._members, host=self._members[self.identity.rank].host)
        measure = partial(measurements.measure_pairs, self._collectives, neighbours=local)
        self._pairs = self._run("p2p", lambda _: measure(), list[PairBandwidth], limit_s=20.0)
        return judge.judge_pairs(self._pairs, self._members, least_ratio=self.request.settings.thresholds.bus_ratio)

    def _rails(self) -> list[Verdict]:
        members, ratio = self._members, self.request.settings.thresholds.slow_ratio
        rail = [one.rank for one in members if one.local_rank == self.identity.local_rank]

        def act(_: Callable[[str], None]) -> judge.RailFindings:
            rounds, surroundings = first_rounds(len(rail), seed=0), Surroundings()
            before = sent_bytes(surroundings) if self.identity.local_rank == 0 else None
            pairs = measurements.measure_pairs(self._collectives, neighbours=rail, rounds=rounds)
            after = sent_bytes(surroundings) if before is not None else None
            grown = None if before is None or after is None else after - before
            return judge.RailFindings(tuple(pairs), len(pairs) * (measurements.ROUNDS + 1) * measurements.PAIR_BYTES, grown)

        parts: list[Mapping[int, judge.RailFindings]] = []
        while judge.needs_more(parts, members, ratio=ratio):
            part = f"rails {len(parts) + 1}"
            parts.append(self._run("rails", act, judge.RailFindings, limit_s=self._limits.bandwidth_s, part=part))
        return judge.judge_rails(parts, members, ratio=ratio)
