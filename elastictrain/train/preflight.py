"""The preflight of a run: which checks are requested, how findings are recorded and shown, and which hosts must leave."""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from elastictrain.bounded_json import as_record, parse_json, parse_record
from elastictrain.checkpoint.lineage import number_of
from elastictrain.config.digest import group_digest
from elastictrain.distributed.bounded import within
from elastictrain.distributed.exchange import get_record, put_record
from elastictrain.distributed.first_collective import FirstCollective
from elastictrain.distributed.store import StoreExchange
from elastictrain.errors import ObjectNotFoundError, PreflightError, StorageError
from elastictrain.events import Preflight, TransportPlanned
from elastictrain.lease.chain import StartRecord, Starts
from elastictrain.preflight.group.checks import GroupChecks, Request
from elastictrain.preflight.group.collectives import Collectives
from elastictrain.preflight.group.members import Planned
from elastictrain.preflight.group.nccl_transport import DEBUG, FILE, SUBSYSTEMS, debug_variables, log_path
from elastictrain.preflight.host_checks import OwnChecks
from elastictrain.preflight.host_preflight import HostPreflight, find_layout
from elastictrain.preflight.policy import (
    STARTS,
    Chosen,
    Level,
    PastFindings,
    apply_modes,
    choose_level,
    decide,
    find_repeated,
    find_slow,
)
from elastictrain.preflight.transport.infiniband import Rdma
from elastictrain.preflight.transport.plan import TransportPlan, describe_plan
from elastictrain.preflight.transport.settings import own_variables
from elastictrain.preflight.verdict import Verdict, count, describe, failures, findings, render, summary
from elastictrain.storage.appendlog import last_part, part_key
from elastictrain.storage.bounded_read import run_concurrently
from elastictrain.storage.private import temporary_folder
from elastictrain.storage.store import Store
from elastictrain.telemetry.progress import terminal_width
from elastictrain.train.context import TrainContext

logger = logging.getLogger(__name__)

_READ_S = 5.0
_READ_AT_MOST = 64  # logs of the last generation: in a large group those of the first ranks are enough
_READ_BYTES = 256 << 10  # of each log: its last record gives the phases of all ranks, and a long run's log is long


class RunPreflight:
    def __init__(self, context: TrainContext, exchange: StoreExchange) -> None:
        self._context = context
        self._config = context.config
        self._identity = context.identity
        self._record = context.journal.record
        self._exchange = exchange
        self._past = EarlierStarts(context.store, number_of(context.generation.name))
        self._plan: TransportPlan | None = None
        self._nccl_log = f"{temporary_folder()}/nccl-%h-%p.txt"
        self._layout = find_layout(
            [(one.host, one.local_world_size) for one in context.generation.ranks],
            rank=self._identity.rank,
            local_rank=self._identity.local_rank,
            rendezvous=os.environ.get("MASTER_ADDR") if self._identity.launched else None,
        )
        self.chosen = self._choose()

    @property
    def _spare(self) -> int:
        """How many hosts can be left out for being slow: none under torchrun, which starts them all again."""
        least = self._config.launch.min_hosts if self._identity.launcher is not None else len(self._layout.hosts)
        return max(0, len(self._layout.hosts) - least)

    def check_hosts(self) -> None:
        """Check each host and the links between them; then set the variables of NCCL and gloo. Collective: yes. Raises:
        HostUnfitError on a host that failed; ConfigError where all failed alike; PreflightError on the others."""
        level, reason = self.chosen.level, self.chosen.reason
        if level in (Level.OFF, Level.GROUP):
            return
        layout, config = self._layout, self._config
        own = OwnChecks(
            level=level,
            settings=config.preflight,
            local_world_size=layout.local_world_size,
            run_dir=config.run.dir,
            memory_dir=config.checkpoint.memory_dir,
            cpus=float(config.run.num_threads * layout.local_world_size),
            several_hosts=len(layout.hosts) > 1,
            towards=layout.rendezvous,
        )
        report = HostPreflight(
            layout=layout,
            own=own,
            exchange=self._exchange,
            packages=("elastictrain", config.task.target),
            config=group_digest(config, data_digest=self._context.samples.digest),
            after_failure=self.chosen.after_failure,
            spare=self._spare,
        ).check()
        plan = self._plan = report.plan
        if plan is not None:
            planned = TransportPlanned(
                host=plan.host,
                interface=plan.interface,
                rdma=plan.rdma.value,
                variables={one.name: one.value for one in plan.variables},
                reasons={one.name: one.reason for one in plan.variables},
                kept={one.name: one.value for one in plan.kept},
            )
            self._record(planned)
        if self._identity.is_log_rank:
            self._report("hosts", f"{level}, {reason}", report.verdicts, seconds=report.seconds)
            # Past findings are read only if there are findings to compare.
            past = within(_READ_S, self._past.findings) if findings(report.verdicts) else None
            lines = [f"again: {one}" for one in find_repeated(report.verdicts, past or [])]
            lines += describe_plan(plan) if plan is not None and (len(layout.hosts) > 1 or plan.kept) else []
            sys.stderr.write("".join(f"  {line}\n" for line in lines))
            sys.stderr.flush()
        if report.error is not None:
            raise report.error

    def enable_nccl_log(self) -> None:
        """Before the group is made: have NCCL log its choice of transport, if a check will read the log."""
        if self.chosen.level is Level.FULL and self._context.backend == "nccl" and self._identity.world_size > 1:
            # Variables that the transport plan has set are no user's request to see the log on the terminal.
            persons = {name: value for name, value in os.environ.items() if own_variables(os.environ).get(name) != value}
            os.environ.update(debug_variables(self._nccl_log, present=persons))

    @property
    def connects_later(self) -> bool:
        """Whether NCCL connects in the first collective, beside the restore. DDP uses the group to get ready."""
        return self.chosen.first_collective and self._context.backend == "nccl" and self._config.parallel.kind == "fsdp"

    def check_group(self, *, on_part: Callable[[str], None], in_background: Callable[[], None] = lambda: None) -> None:
        """Check the collectives of the new group; one that `connects_later` in `TrainContext.await_group`. `on_part` is called
        with each part that this rank enters, `in_background` in another thread while GPUs are examined in full. Collective:
        yes. Raises: HostUnfitError on a host that failed; PreflightError on the others. A collective may then still be in
        flight."""
        if self.chosen.level is Level.OFF or (self._identity.world_size == 1 and self._context.backend != "nccl"):
            return
        layout, began = self._layout, time.monotonic()
        if self.chosen.first_collective:
            self._check_first_collective()
            return
        plan, settings = self._plan, self._config.preflight
        planned: Planned | None = None
        if plan is not None and plan.rdma is not Rdma.UNKNOWN:
            planned = "socket" if plan.rdma is Rdma.NONE else "rdma"
        request = Request(
            full=self.chosen.level is Level.FULL,
            settings=settings,
            network_gbps=plan.link_gbps if plan is not None else None,
            planned=planned,
        )
        group, hosts = self._context.group, layout.hosts_of_ranks
        collectives = None
        if self._context.backend == "gloo":
            # It copies a GPU's tensors through host memory, and cannot send one from rank to rank.
            collectives = Collectives(self._identity.rank, self._identity.world_size, torch.device("cpu"))
        found = GroupChecks(
            group,
            self._exchange,
            self._identity,
            request,
            hosts=hosts,
            on_part=on_part,
            collectives=collectives,
            in_background=in_background,
        ).run()
        if os.environ.get(FILE) == self._nccl_log:
            path = log_path(os.environ, host=self._identity.host, pid=os.getpid())
            for name in (DEBUG, SUBSYSTEMS, FILE):
                del os.environ[name]
            if path is not None:
                with suppress(OSError):
                    Path(path).unlink()
        verdicts, seconds = apply_modes(found.verdicts, settings.modes, spare=self._spare), time.monotonic() - began
        error = decide(verdicts, host=layout.host, hosts=layout.hosts)
        if self._identity.is_log_rank:
            self._report("group", "collectives", verdicts, seconds=seconds)
        if error is not None:
            raise error
        if not found.usable:
            # The check only warns, but the group cannot be used any more.
            culprits = "; ".join(describe(one) for one in failures(found.verdicts))
            raise PreflightError(f"a collective hangs, and the group is of no use any more: {culprits}")

    def _check_first_collective(self) -> None:
        """Where no host failed, all that is new on hosts that have trained: the group. Raises: PreflightError."""
        context, collective = self._context, FirstCollective(self._context.group, self._identity)

        def finish() -> None:
            seconds = round(collective.wait(context.leave_if_asked), 4)
            if self._identity.is_log_rank:
                level, reason, counts = self.chosen.level.value, self.chosen.reason, {"pass": 1}
                self._record(Preflight(stage="group", level=level, reason=reason, counts=counts, findings=(), seconds=seconds))

        if self.connects_later:
            context.await_group = finish
        else:
            finish()

    def _choose(self) -> Chosen:
        """The level that rank 0 chooses for all ranks."""
        wanted, limit_s, launcher = self._config.preflight.level, self._config.preflight.limit_s, self._identity.launcher
        if wanted == "off" or (wanted != "auto" and launcher is None):
            return Chosen(Level(wanted), f"preflight={wanted}")
        if self._identity.is_log_rank:
            plan = launcher.recovery if launcher is not None else None
            # Launchers hand the variables that a preflight has set on to new processes.
            planned = self._context.generation.planned_hosts
            if plan is not None and plan.rung == "in_place" and planned >= set(self._layout.hosts):
                reason = "the hosts are the same, and a process was replaced in place"
                chosen = Chosen(Level.GROUP, reason, first_collective=True)
            elif wanted != "auto":
                chosen = Chosen(Level(wanted), f"preflight={wanted}")
            else:
                first_start = not launcher.restarted if launcher else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
                exit_codes = [] if first_start else within(_READ_S, self._past.exit_codes) or []
                chosen = choose_level(first_start=first_start, exit_codes=exit_codes)
                failed = any(one.recovers for one in self._context.generation.ranks)
                orderly = plan is None and launcher is not None and not failed
                slow = ""
                if chosen.level is Level.QUICK:
                    past = within(_READ_S, self._past.findings) or []
                    slow = find_slow(past, modes=self._config.preflight.modes, hosts=self._layout.hosts)
                if slow:
                    chosen = Chosen(Level.FULL, slow)
                elif orderly and chosen.level is Level.QUICK and self._identity.host in planned:
                    # This host took part in the last generation, which has ended in order.
                    chosen = Chosen(Level.QUICK, "hosts came or left, and nothing has failed", first_collective=True)
            put_record(self._exchange, "level", chosen)
            return chosen
        if (told := get_record(self._exchange, "level", Chosen, limit_s=limit_s)) is None:
            raise PreflightError(f"rank 0 did not say within {limit_s:g} s how much is to be checked")
        return told

    def _report(self, stage: str, what: str, verdicts: Sequence[Verdict], *, seconds: float) -> None:
        """As the log rank: write a record, and print a summary and the findings."""
        event = Preflight(
            stage=stage,
            level=self.chosen.level.value,
            reason=self.chosen.reason,
            counts=count(verdicts),
            findings=tuple(asdict(one) for one in findings(verdicts)),
            seconds=round(seconds, 4),
        )
        self._record(event)
        sys.stderr.write(f"preflight ({what}): {summary(verdicts)} in {seconds:.1f} s\n")
        if event.findings:
            colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
            sys.stderr.write(f"{render(verdicts, colour=colour, width=terminal_width(sys.stderr), everything=False)}\n")
        sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class _End:
    event: Literal["failure", "stop"]
    exit_code: int


@dataclass(frozen=True, slots=True)
class _PastPreflight:
    event: Literal["preflight"]
    findings: list[Any]


@dataclass(frozen=True, slots=True)
class EarlierStarts:
    """Starts of the run in `store` before start `number`, read without a listing. A storage error counts as no records."""

    store: Store
    number: int

    def exit_codes(self) -> list[int | None]:
        """Exit codes that the first ranks of the last generation recorded, or None: a rank that was killed may leave no log."""
        return [last_exit_code(data) for data in self._logs("how the last incarnation ended", first=False)]

    def findings(self) -> list[PastFindings]:
        """Findings of each earlier start that had a preflight, newest last: it is among a start's first records."""
        found = (findings_in(data) for data in self._logs("what earlier starts found", first=True))
        return [rows for rows in found if rows is not None]

    def _logs(self, what: str, *, first: bool) -> list[bytes]:
        """The first records of rank 0 of the last `STARTS` starts, or the last records of the last start's first ranks."""
        try:
            starts = Starts(self.store).last(self.number, count=STARTS)
            places = [(start, 0) for start in starts]
            if starts and not first:
                places = [(starts[-1], rank) for rank in range(min(starts[-1].world_size, _READ_AT_MOST))]
            return run_concurrently([partial(self._read, start, rank, first=first) for start, rank in places])
        except StorageError as error:
            logger.warning("%s cannot be read: %s", what, error)
            return []

    def _read(self, start: StartRecord, rank: int, *, first: bool) -> bytes:
        """The first or the last records of a rank's log, whole or in parts; empty without a log."""
        stem = f"events/{start.incarnation}-r{rank:05d}"
        key = f"{stem}.jsonl"
        with suppress(ObjectNotFoundError):
            if first:
                return self.store.read(key, end=_READ_BYTES)
            return self.store.read(key, start=max(0, self.store.stat(key).size_bytes - _READ_BYTES))
        with suppress(ObjectNotFoundError):
            if first:
                return self.store.read(part_key(stem, 1), end=_READ_BYTES)
            number = last_part(self.store, stem)
            return self.store.read(part_key(stem, number))[-_READ_BYTES:] if number else b""
        return b""


def last_exit_code(data: bytes) -> int | None:
    """The exit code in the last line of a rank's records; None if there is none."""
    lines = data.strip().splitlines()
    try:
        return parse_record(lines[-1], _End).exit_code if lines else None
    except ValueError:
        return None


def findings_in(data: bytes) -> PastFindings | None:
    """The preflight findings in the records of one start, None without a preflight; malformed lines are counted and skipped."""
    whole = data if len(data) < _READ_BYTES else data[: data.rfind(b"\n") + 1]
    found: list[Mapping[str, object]] | None = None
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
            findings = as_record(row, _PastPreflight).findings
            found = [*(found or []), *(one for one in findings if isinstance(one, dict))]
    if num_skipped:
        logger.warning("skipped %d malformed lines in the events of an earlier start", num_skipped)
    return found
