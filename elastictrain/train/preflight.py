"""The preflight of a run: what is asked of the hosts, what is recorded and shown of the findings, and who has to leave."""

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from elastictrain.bounded_json import as_record, encode_record, parse_json, parse_record
from elastictrain.checkpoint.lineage import number_of
from elastictrain.config.digest import group_digest
from elastictrain.distributed.bounded import within
from elastictrain.distributed.store import StoreExchange
from elastictrain.errors import ObjectNotFoundError, PreflightError, StorageError
from elastictrain.events import Preflight, TransportPlanned
from elastictrain.lease.chain import StartRecord, Starts
from elastictrain.preflight.group.checks import GroupChecks, Request
from elastictrain.preflight.group.members import Planned
from elastictrain.preflight.group.nccl_transport import DEBUG, FILE, SUBSYSTEMS, debug_variables, log_path
from elastictrain.preflight.host_checks import OwnChecks
from elastictrain.preflight.host_preflight import HostLayout, HostPreflight, Report, find_layout
from elastictrain.preflight.policy import STARTS, Ended, Level, PastFindings, apply_modes, choose_level, decide, find_repeated
from elastictrain.preflight.transport.infiniband import Rdma
from elastictrain.preflight.transport.plan import TransportPlan, describe
from elastictrain.preflight.transport.settings import own_variables
from elastictrain.preflight.verdict import Verdict, count, failures, findings, render, summary
from elastictrain.preflight.verdict import describe as describe_verdict
from elastictrain.storage.appendlog import last_part, part_key
from elastictrain.storage.bounded_read import side_by_side
from elastictrain.storage.private import temporary_folder
from elastictrain.storage.store import Store
from elastictrain.train.context import TrainContext

logger = logging.getLogger(__name__)

_NCCL_NETWORKS: dict[Rdma, Planned] = {
    Rdma.INFINIBAND: "rdma",
    Rdma.ROCE: "rdma",
    Rdma.EFA: "rdma",
    Rdma.NONE: "socket",
}
_WIDTH = 120
_READ_S = 5.0
_READ_AT_MOST = 64
"""Records of the last incarnation: in a large group those of the first ranks tell enough."""

_READ_BYTES = 256 << 10
"""Of each log: its last record names where all ranks were, and a long run's log is long."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """How much is checked, and why."""

    level: Level
    reason: str
    after_failure: bool = False
    """Whether the transport has failed before this start."""


class RunPreflight:
    """One rank's preflights of one bring-up."""

    def __init__(self, context: TrainContext, exchange: StoreExchange) -> None:
        self._context = context
        self._config = context.config
        self._identity = context.identity
        self._record = context.journal.record
        self._exchange = exchange
        self._past = PastStarts(context.store, number=number_of(context.generation.name))
        self._plan: TransportPlan | None = None
        self._nccl_log = f"{temporary_folder()}/nccl-%h-%p.txt"
        self.chosen = self._choose()

    def check_hosts(self) -> None:
        """Each host, and the links between them; then the variables of NCCL and gloo are set. Collective: yes.

        Raises: HostUnfitError on a host that failed; ConfigError where all failed alike; PreflightError on the others.
        """
        level, reason = self.chosen.level, self.chosen.reason
        if level is Level.OFF:
            return
        layout = self._layout()
        report = HostPreflight(
            layout=layout,
            own=self._own_checks(level, layout),
            exchange=self._exchange,
            packages=("elastictrain", self._config.task.target),
            config=group_digest(self._config, data_digest=self._context.samples.digest),
            after_failure=self.chosen.after_failure,
        ).check()
        self._plan = report.plan
        if report.plan is not None:
            self._record(_planned(report.plan))
        if self._identity.is_log_rank:
            self._record(_event("hosts", report.verdicts, level=level, reason=reason, seconds=report.seconds))
            _print_report(
                report, level=level, reason=reason, repeated=find_repeated(report.verdicts, self._past_findings(report))
            )
        if report.error is not None:
            raise report.error

    def listen_to_nccl(self) -> None:
        """Before the group is made: have NCCL write down which transport it takes, where that will be looked at."""
        if self.chosen.level is Level.FULL and self._context.backend == "nccl" and self._identity.world_size > 1:
            # What the transport plan has set is not a person's wish to read it on the terminal.
            persons = {name: value for name, value in os.environ.items() if own_variables(os.environ).get(name) != value}
            os.environ.update(debug_variables(self._nccl_log, present=persons))

    def check_group(self, *, on_part: Callable[[str], None]) -> None:
        """The collectives of the group that was just made. `on_part` hears what this rank enters. Collective: yes.

        Raises: HostUnfitError on a host that failed; PreflightError on the others. A collective may then still be under way.
        """
        level, reason = self.chosen.level, self.chosen.reason
        if level is Level.OFF or self._identity.world_size == 1:
            return
        layout = self._layout()
        began = time.monotonic()
        plan, settings = self._plan, self._config.preflight
        request = Request(
            full=level is Level.FULL,
            settings=settings,
            network_gbps=plan.link_gbps if plan is not None else None,
            planned=_NCCL_NETWORKS.get(plan.rdma) if plan is not None else None,
        )
        hosts = layout.hosts_of_ranks
        group = self._context.group
        found = GroupChecks(group, self._exchange, self._identity, request, hosts=hosts, on_part=on_part).run()
        self._forget_nccl_log()
        verdicts, seconds = apply_modes(found.verdicts, asdict(settings.checks)), time.monotonic() - began
        error = decide(verdicts, host=layout.host, hosts=layout.hosts)
        if self._identity.is_log_rank:
            self._record(_event("group", verdicts, level=level, reason=reason, seconds=seconds))
            _print_verdicts("collectives", verdicts, seconds=seconds)
        if error is not None:
            raise error
        if not found.usable:
            # Its check only warns, but the group is of no use any more.
            culprits = "; ".join(describe_verdict(one) for one in failures(found.verdicts))
            raise PreflightError(f"a collective hangs, and the group is of no use any more: {culprits}")

    def _layout(self) -> HostLayout:
        return find_layout(
            [(one.host, one.local_world_size) for one in self._context.generation.ranks],
            rank=self._identity.rank,
            local_rank=self._identity.local_rank,
            rendezvous=os.environ.get("MASTER_ADDR") if self._identity.launched else None,
        )

    def _own_checks(self, level: Level, layout: HostLayout) -> OwnChecks:
        config = self._config
        return OwnChecks(
            level=level,
            settings=config.preflight,
            local_world_size=layout.local_world_size,
            run_dir=config.run.dir,
            memory_dir=config.checkpoint.memory_dir,
            cpus=float(config.run.num_threads * layout.local_world_size),
            several_hosts=len(layout.hosts) > 1,
            towards=layout.rendezvous,
        )

    def _choose(self) -> Chosen:
        """As the first rank chose for all."""
        wanted = self._config.preflight.level
        if wanted != "auto":
            return Chosen(Level(wanted), f"preflight={wanted}")
        if self._identity.is_log_rank:
            launcher = self._identity.launcher
            first_start = not launcher.restarted if launcher else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            ended, world_size = ([], 1) if first_start else within(_READ_S, self._past.ended) or ([], 1)
            level, reason = choose_level(wanted, first_start=first_start, ended=ended, world_size=world_size)
            after_failure = level is Level.FULL and not first_start
            chosen = Chosen(level, reason, after_failure)
            self._exchange.put("level", encode_record(chosen))
            return chosen
        limit_s = self._config.preflight.limit_s
        data = self._exchange.get("level", limit_s=limit_s)
        if data is None:
            raise PreflightError(f"rank 0 did not say within {limit_s:g} s how much is to be checked")
        return parse_record(data, Chosen)

    def _past_findings(self, report: Report) -> list[PastFindings]:
        """Nothing is read where there is nothing to compare."""
        return (within(_READ_S, self._past.findings) or []) if findings(report.verdicts) else []

    def _forget_nccl_log(self) -> None:
        """Take back what `listen_to_nccl` has set."""
        if os.environ.get(FILE) != self._nccl_log:
            return
        path = log_path(os.environ, host=self._identity.host, pid=os.getpid())
        for name in (DEBUG, SUBSYSTEMS, FILE):
            del os.environ[name]
        if path is not None:
            with suppress(OSError):
                Path(path).unlink()


def _planned(plan: TransportPlan) -> TransportPlanned:
    return TransportPlanned(
        host=plan.host,
        interface=plan.interface,
        rdma=plan.rdma.value,
        variables={one.name: one.value for one in plan.variables},
        reasons={one.name: one.reason for one in plan.variables},
        kept={one.name: one.value for one in plan.kept},
    )


def _event(stage: str, verdicts: Sequence[Verdict], *, level: Level, reason: str, seconds: float) -> Preflight:
    return Preflight(
        stage=stage,
        level=level.value,
        reason=reason,
        counts=count(verdicts),
        findings=tuple(asdict(one) for one in findings(verdicts)),
        seconds=round(seconds, 4),
    )


def _print_report(report: Report, *, level: Level, reason: str, repeated: Sequence[str]) -> None:
    """As the rank that speaks: one line if all is well, else what is not."""
    _print_verdicts(f"{level}, {reason}", report.verdicts, seconds=report.seconds)
    sys.stderr.write("".join(f"  again: {one}\n" for one in repeated))
    if report.plan is not None and (not report.alone or report.plan.kept):
        sys.stderr.write("".join(f"  {line}\n" for line in describe(report.plan)))
    sys.stderr.flush()


def _print_verdicts(what: str, verdicts: Sequence[Verdict], *, seconds: float) -> None:
    sys.stderr.write(f"preflight ({what}): {summary(verdicts)} in {seconds:.1f} s\n")
    if findings(verdicts):
        colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
        table = render(verdicts, colour=colour, width=_WIDTH, everything=False)
        sys.stderr.write(f"{table}\n")
    sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class _End:
    """The last record of a rank that said how it ended."""

    event: Literal["failure", "stop"]
    exit_code: int


@dataclass(frozen=True, slots=True)
class _HostsPreflight:
    """The record of a preflight of hosts."""

    stage: Literal["hosts"]
    findings: list[Any]


class PastStarts:
    """Starts of the run in `store` before that `number`. What cannot be read is not known, and said. Nothing is listed."""

    def __init__(self, store: Store, *, number: int) -> None:
        self._store = store
        self._number = number

    def ended(self) -> tuple[list[Ended], int]:
        """How the ranks of the last incarnation said that they ended, and how many of them there were: of the first ones only,
        where there were many. One that was killed at once may have left no log."""
        try:
            starts = Starts(self._store).last(self._number, count=STARTS)
            if not starts:
                return [], 1
            num_ranks = min(starts[-1].world_size, _READ_AT_MOST)
            ends = side_by_side([partial(self._end_of, starts[-1], rank) for rank in range(num_ranks)])
        except StorageError as error:
            logger.warning("how the last incarnation ended cannot be read: %s", error)
            return [], 1
        return [word for rank, data in enumerate(ends) if (word := last_word(data, rank=rank)) is not None], num_ranks

    def findings(self) -> list[PastFindings]:
        """Of each earlier preflight of the hosts, the newest last."""
        try:
            starts = Starts(self._store).last(self._number, count=STARTS)
            found = side_by_side([partial(self._begin_of, start) for start in starts])
        except StorageError as error:
            logger.warning("what earlier starts found cannot be read: %s", error)
            return []
        return [one for data in found for one in findings_in(data)]

    def _end_of(self, start: StartRecord, rank: int) -> bytes:
        """The last records of a rank; the last object of a log has the last word."""
        stem = _stem(start, rank)
        key = f"{stem}.jsonl"
        try:
            size_bytes = self._store.stat(key).size_bytes
        except ObjectNotFoundError:
            number = last_part(self._store, stem)
            return self._store.read(part_key(stem, number))[-_READ_BYTES:] if number else b""
        return self._store.read(key, start=max(0, size_bytes - _READ_BYTES))

    def _begin_of(self, start: StartRecord) -> bytes:
        """The first records of rank 0: a preflight is among the first that happens."""
        stem = _stem(start, 0)
        for key in (f"{stem}.jsonl", part_key(stem, 1)):
            try:
                return self._store.read(key, end=_READ_BYTES)
            except ObjectNotFoundError:
                continue
        return b""


def _stem(start: StartRecord, rank: int) -> str:
    return f"events/{start.incarnation}-r{rank:05d}"


def last_word(data: bytes, *, rank: int) -> Ended | None:
    """How a rank ended, by the last line of its records; None if it did not say."""
    lines = data.strip().splitlines()
    try:
        return Ended(rank, parse_record(lines[-1], _End).exit_code) if lines else None
    except ValueError:
        return None


def findings_in(data: bytes) -> list[PastFindings]:
    """What the records of one incarnation tell of its preflight of hosts; lines that are no records are counted and skipped."""
    whole = data if len(data) < _READ_BYTES else data[: data.rfind(b"\n") + 1]
    found: list[PastFindings] = []
    num_skipped = 0
    for line in whole.splitlines():
        if b'"preflight"' not in line:
            continue
        try:
            row = parse_json(line)
        except ValueError:
            num_skipped += 1
            continue
        with suppress(ValueError):
            findings = as_record(row, _HostsPreflight).findings
            found.append([one for one in findings if isinstance(one, dict)])
    if num_skipped:
        logger.warning("skipped %d malformed lines in the events of an earlier start", num_skipped)
    return found
