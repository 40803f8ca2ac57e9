"""The preflight of a run: what is asked of the hosts, what is recorded and shown of the findings, and who has to leave."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from elastictrain.config.composed import RunConfig
from elastictrain.config.digest import group_digest
from elastictrain.distributed.bounded import within
from elastictrain.distributed.device import Backend
from elastictrain.distributed.generation import AgreedGeneration
from elastictrain.distributed.group import Group
from elastictrain.distributed.store import StoreExchange
from elastictrain.errors import PreflightError
from elastictrain.events import Event, Preflight, TransportPlanned
from elastictrain.identity import Identity
from elastictrain.preflight.group.checks import GroupChecks, Request
from elastictrain.preflight.group.members import Planned
from elastictrain.preflight.group.nccl_transport import DEBUG, FILE, SUBSYSTEMS, debug_variables, log_path
from elastictrain.preflight.host_checks import OwnChecks
from elastictrain.preflight.host_preflight import HostLayout, HostPreflight, Report, find_layout
from elastictrain.preflight.policy import Level, PastFindings, apply_modes, choose_level, decide, find_repeated
from elastictrain.preflight.transport.infiniband import Rdma
from elastictrain.preflight.transport.plan import TransportPlan, describe
from elastictrain.preflight.transport.settings import own_variables
from elastictrain.preflight.verdict import Verdict, count, failures, findings, render, summary
from elastictrain.preflight.verdict import describe as describe_verdict
from elastictrain.storage.private import temporary_folder
from elastictrain.storage.store import Store
from elastictrain.train.past_starts import PastStarts

logger = logging.getLogger(__name__)

_NCCL_NETWORKS: dict[Rdma, Planned] = {
    Rdma.INFINIBAND: "rdma",
    Rdma.ROCE: "rdma",
    Rdma.EFA: "rdma",
    Rdma.NONE: "socket",
}
_WIDTH = 120
_READ_S = 5.0


@dataclass(frozen=True, slots=True)
class Chosen:
    """How much is checked, and why."""

    level: Level
    reason: str
    after_failure: bool = False
    """Whether the transport has failed before this start."""


class RunPreflight:
    """One rank's preflights of one bring-up."""

    def __init__(
        self,
        config: RunConfig,
        identity: Identity,
        incarnation: AgreedGeneration,
        exchange: StoreExchange,
        *,
        store: Store,
        record: Callable[[Event], None],
        data_digest: str,
    ) -> None:
        self._config = config
        self._identity = identity
        self._incarnation = incarnation
        self._exchange = exchange
        self._store = store
        self._record = record
        self._data_digest = data_digest
        self._past = PastStarts(store, incarnation=incarnation.name)
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
            config=group_digest(self._config, data_digest=self._data_digest),
            after_failure=self.chosen.after_failure,
        ).check()
        self._plan = report.plan
        if report.plan is not None:
            self._record(_planned(report.plan))
        if self._identity.speaks:
            self._record(_event("hosts", report.verdicts, level=level, reason=reason, seconds=report.seconds))
            _say(report, level=level, reason=reason, repeated=find_repeated(report.verdicts, self._past_findings(report)))
        if (error := report.outcome.error()) is not None:
            raise error

    def listen_to_nccl(self, backend: Backend) -> None:
        """Before the group is made: have NCCL write down which transport it takes, where that will be looked at."""
        if self.chosen.level is Level.FULL and backend == "nccl" and self._identity.world_size > 1:
            # What the transport plan has set is not a person's wish to read it on the terminal.
            persons = {name: value for name, value in os.environ.items() if own_variables(os.environ).get(name) != value}
            os.environ.update(debug_variables(self._nccl_log, present=persons))

    def check_group(self, group: Group, *, on_part: Callable[[str], None]) -> None:
        """The collectives of a group that was just made. `on_part` hears what this rank enters. Collective: yes.

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
        found = GroupChecks(group, self._exchange, self._identity, request, hosts=hosts, on_part=on_part).run()
        self._forget_nccl_log()
        verdicts, seconds = apply_modes(found.verdicts, asdict(settings.checks)), time.monotonic() - began
        outcome = decide(verdicts, host=layout.host, hosts=layout.hosts)
        if self._identity.speaks:
            self._record(_event("group", verdicts, level=level, reason=reason, seconds=seconds))
            _say_verdicts("collectives", verdicts, seconds=seconds)
        if (error := outcome.error()) is not None:
            raise error
        if not found.usable:
            # Its check only warns, but the group is of no use any more.
            culprits = "; ".join(describe_verdict(one) for one in failures(found.verdicts))
            raise PreflightError(f"a collective hangs, and the group is of no use any more: {culprits}")

    def _layout(self) -> HostLayout:
        return find_layout(
            [(one.host, one.local_world_size) for one in self._incarnation.ranks],
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
        if self._identity.speaks:
            launcher = self._identity.launcher
            first_start = not launcher.restarted if launcher else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            ended, world_size = ([], 1) if first_start else within(_READ_S, self._past.ended) or ([], 1)
            level, reason = choose_level(wanted, first_start=first_start, ended=ended, world_size=world_size)
            after_failure = level is Level.FULL and not first_start
            self._exchange.put("level", json.dumps([level, reason, after_failure]).encode())
            return Chosen(level, reason, after_failure)
        limit_s = self._config.preflight.limit_s
        data = self._exchange.get("level", limit_s=limit_s)
        if data is None:
            raise PreflightError(f"rank 0 did not say within {limit_s:g} s how much is to be checked")
        level_name, reason, after_failure = json.loads(data)
        return Chosen(Level(level_name), reason, after_failure)

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


def _say(report: Report, *, level: Level, reason: str, repeated: Sequence[str]) -> None:
    """As the rank that speaks: one line if all is well, else what is not."""
    _say_verdicts(f"{level}, {reason}", report.verdicts, seconds=report.seconds)
    sys.stderr.write("".join(f"  again: {one}\n" for one in repeated))
    if report.plan is not None and (not report.alone or report.plan.kept):
        sys.stderr.write("".join(f"  {line}\n" for line in describe(report.plan)))
    sys.stderr.flush()


def _say_verdicts(what: str, verdicts: Sequence[Verdict], *, seconds: float) -> None:
    sys.stderr.write(f"preflight ({what}): {summary(verdicts)} in {seconds:.1f} s\n")
    if findings(verdicts):
        colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
        table = render(verdicts, colour=colour, width=_WIDTH, everything=False)
        sys.stderr.write(f"{table}\n")
    sys.stderr.flush()
