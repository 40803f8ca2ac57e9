"""The preflight of all hosts of a group, before any process group. The first rank of each host checks the host, takes part in
the link checks, decides and applies the transport plan, and reports to the first host, which judges all. The other ranks take
over plan and result. All ranks return the same warnings and failures. Every wait has a limit."""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from elastictrain.bounded_json import MalformedJsonError
from elastictrain.distributed.bounded import within
from elastictrain.distributed.exchange import Exchange, get_record, put_record
from elastictrain.errors import ElasticTrainError, PreflightError
from elastictrain.net.interfaces import NetworkInterface, find_route, way_out
from elastictrain.preflight.host.alike import SoftwareDigest, compare, describe, describe_devices
from elastictrain.preflight.host.storage_trip import SharedFolder, blame_unshared
from elastictrain.preflight.host_checks import HostFacts, OwnChecks, check_host
from elastictrain.preflight.links.messages import HostIntroduction
from elastictrain.preflight.links.probes import LinkOptions
from elastictrain.preflight.links.session import LinkReport, LinkSession
from elastictrain.preflight.policy import Level, apply_modes, decide, drop_symptoms
from elastictrain.preflight.transport.infiniband import Rdma, common, kinds_here
from elastictrain.preflight.transport.judge import judge_addresses, judge_alike, judge_infiniband, judge_interface
from elastictrain.preflight.transport.plan import TransportFacts, TransportPlan, apply_plan, decide_transport, read_facts
from elastictrain.preflight.transport.settings import OWN_VARIABLES
from elastictrain.preflight.verdict import Reporter, Status, Verdict, failures, findings
from elastictrain.preflight.verdict import describe as describe_verdict
from elastictrain.surroundings import Surroundings

logger = logging.getLogger(__name__)

_LATE_WORD_S = 2.0
_READ_S = 2.0
_FOLLOW_S = 5.0  # the first host may exceed its own limit by this to gather and judge all reports


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLayout:
    """The hosts of a group, and this rank's place."""

    hosts: tuple[str, ...]  # in the order of their first ranks; equal names are made different by their node rank
    node_rank: int
    local_rank: int
    local_world_size: int
    hosts_of_ranks: tuple[str, ...] = ()  # the same names, for each rank of the group
    rendezvous: str | None = None  # address or name; None in a world of one

    @property
    def host(self) -> str:
        return self.hosts[self.node_rank]


def find_layout(ranks: Sequence[tuple[str, int]], *, rank: int, local_rank: int, rendezvous: str | None) -> HostLayout:
    """`ranks`: host and local world size of each rank, those of a host in a row, as torchrun numbers them."""
    names: list[str] = []
    nodes: list[int] = []
    while len(nodes) < len(ranks):
        host, local_world_size = ranks[len(nodes)]
        nodes += [len(names)] * max(1, local_world_size)
        names.append(host)
    labels = [name if names.count(name) == 1 else f"{name} (node rank {node})" for node, name in enumerate(names)]
    return HostLayout(
        hosts=tuple(labels),
        node_rank=nodes[rank],
        local_rank=local_rank,
        local_world_size=ranks[rank][1],
        hosts_of_ranks=tuple(labels[node] for node in nodes[: len(ranks)]),
        rendezvous=rendezvous,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result on all ranks."""

    verdicts: tuple[Verdict, ...]  # warnings and failures; on the first rank all
    error: ElasticTrainError | None  # why this host leaves, if it does
    seconds: float
    plan: TransportPlan | None = None  # of this host, on the rank that leads it


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    verdicts: tuple[Verdict, ...]
    likeness: SoftwareDigest
    hcas: tuple[str, ...]  # ports that it plans to use
    met: HostIntroduction | None = None  # as the link checks know it; None if they do not
    machine: str = ""  # tells apart kernels and network namespaces


def judge_host_reports(words: Mapping[str, HostReport | None], *, waited_s: float) -> list[Verdict]:
    """Findings of hosts about themselves, and their differences. None for a host: no report, or one that cannot be parsed."""
    known = {host: word for host, word in words.items() if word is not None}
    verdicts = blame_unshared([verdict for word in known.values() for verdict in word.verdicts], num_hosts=len(words))
    for host in (host for host, word in words.items() if word is None):
        looking = "it tells which check does not end; see the log of its ranks"
        remedy = f"python -m elastictrain.preflight  # on {host}: {looking}"
        expected = f"its word within {waited_s:.3g} s"
        verdicts.append(Reporter("roster", host).failed("said nothing of its own checks", expected=expected, remedy=remedy))
    if len(words) > 1:
        verdicts += compare({host: word.likeness for host, word in known.items()})
        met = {host: (word.met, word.machine) for host, word in known.items() if word.met is not None}
        hcas, kinds = {host: word.hcas for host, word in known.items()}, {host: one.kinds for host, (one, _) in met.items()}
        verdicts += judge_alike(hcas, kinds)
        lost = {one.subject for one in failures(verdicts) if one.check == "interface"}
        verdicts += judge_addresses({host: (one.address, its) for host, (one, its) in met.items() if host not in lost})
    return verdicts


def relabel(verdicts: Iterable[Verdict], *, name: str, label: str) -> list[Verdict]:
    """Rename host `name` in its verdicts to `label`, its name in the group, where several hosts may have the same name."""
    own = re.compile(r"\A{0}(?=\Z| -> )|(?<= on ){0}\Z".format(re.escape(name)))
    return [replace(verdict, subject=own.sub(lambda _: label, verdict.subject)) for verdict in verdicts]


def _check_own(at: HostFacts) -> list[Verdict]:
    try:
        return check_host(at)
    except Exception as error:
        # A host whose checks raise must not pass as healthy.
        logger.exception("the checks of this host broke")
        remedy = f"python -m elastictrain.preflight  # on {at.host}: it shows where; report it as a bug"
        measured = f"its checks broke: {type(error).__name__}: {error}"
        return [Reporter("roster", at.host).failed(measured, expected="verdicts", remedy=remedy)]


@dataclass(slots=True)
class HostPreflight:
    """One rank's part of the preflight; all hosts request the same checks."""

    layout: HostLayout
    own: OwnChecks
    exchange: Exchange
    packages: tuple[str, ...] = ("elastictrain",)  # their code must be the same on all hosts
    config: str = ""  # digest of what else must be the same
    after_failure: bool = False  # set NCCL's debug output
    spare: int | None = None  # hosts that may be left out for being slow; None: any number
    environment: MutableMapping[str, str] = field(default_factory=lambda: os.environ)  # what process groups will read
    surroundings: Surroundings = field(default_factory=Surroundings)
    links: LinkOptions = field(default_factory=LinkOptions)
    _began: float = field(default=0.0, init=False)

    def check(self) -> Report:
        """Collective: yes. Raises: PreflightError if a host does not report; TransportError if the exchange does not answer."""
        self._began = time.monotonic()
        plan = result = None
        if self.layout.local_rank == 0:
            plan, result = self._lead_host()
        else:
            # Take over the plan of the rank that leads this host.
            done = get_record(self.exchange, f"environment/{self.layout.node_rank}", dict[str, str], limit_s=self._limit_s)
            if done is None:
                message = f"the first rank of {self.layout.host} did not decide on its interfaces within {self._limit_s:g} s"
                raise PreflightError(message)
            self.environment.update(done, **{OWN_VARIABLES: json.dumps(done)})
        if result is None:
            limit_s = self._limit_s + _FOLLOW_S - (time.monotonic() - self._began)
            result = get_record(self.exchange, "result", list[Verdict], limit_s=limit_s)
            if result is None:
                said = f"did not say what the preflight found within {self._limit_s:g} s"
                raise PreflightError(f"{self.layout.hosts[0]}, the first host, {said}")
            if self.layout.local_rank == 0 and failures(result):
                put_record(self.exchange, f"read/{self.layout.node_rank}", True)
        error = decide(result, host=self.layout.host, hosts=self.layout.hosts)
        return Report(verdicts=tuple(result), error=error, seconds=time.monotonic() - self._began, plan=plan)

    @property
    def _limit_s(self) -> float:
        return self.own.settings.limit_s

    def _left_s(self) -> float:
        return max(0.0, self._limit_s - (time.monotonic() - self._began))

    def _lead_host(self) -> tuple[TransportPlan, list[Verdict] | None]:
        """Check this host; returns its plan, and on the first host the result."""
        own, alone = list[list[Verdict]](), len(self.layout.hosts) == 1
        shared = None if alone else SharedFolder(self.exchange, is_first=self.layout.node_rank == 0)
        at = HostFacts(self.surroundings, replace(self.own, shared=shared))
        thread = threading.Thread(target=lambda: own.append(_check_own(at)), name="own-checks", daemon=True)
        thread.start()
        look = partial(read_facts, self.surroundings, alone=alone)
        facts = within(5.0, partial(look, rendezvous=self.layout.rendezvous)) or look(rendezvous=None)
        here = kinds_here(facts.ports, settings=facts.settings)
        links = LinkReport(()) if alone else self._check_links(facts, here)
        leader = self.layout.hosts[0]
        if links.roster is None and (lost := [one for one in links.verdicts if one.subject == leader]):
            # No host can gather the reports.
            raise PreflightError(f"preflight failed: {describe_verdict(lost[0])}")
        kinds, known = {self.layout.host: here if alone else frozenset({Rdma.UNKNOWN})}, {}
        if links.roster is not None:
            known = {one.node_rank: one for one in links.roster.hosts}
            kinds = {one.name: one.kinds for one in known.values()}
            others = [one for rank, one in known.items() if rank != self.layout.node_rank]
            find = partial(find_route, interfaces=facts.interfaces, surroundings=self.surroundings)
            facts = replace(facts, peers={one.name: find(one.address) for one in others})
        plan = decide_transport(facts, agreed=common(kinds), after_failure=self.after_failure)
        put_record(self.exchange, f"environment/{self.layout.node_rank}", apply_plan(plan, self.environment))
        thread.join(self._left_s())
        if own:
            # If the own checks do not end, no report is sent, and the first host names this host.
            found = [*own[0], *judge_interface(facts), *judge_infiniband(facts)]
            found = relabel(found, name=self.surroundings.host, label=self.layout.host)
            # The first host reports on links; another host only if it had to leave the link checks early.
            found += [] if self.layout.node_rank == 0 else links.verdicts
            settings = {name: setting.value for name, setting in facts.settings.items()}
            devices = describe_devices(within(1.0, at.used), maps=self.surroundings.read("/proc/self/maps") or "")
            likeness = describe(self.packages, config=self.config, settings=settings, devices=devices)
            network = Path("/proc/self/ns/net")
            namespace = network.stat().st_ino if network.exists() else 0
            machine = f"{self.surroundings.read('/proc/sys/kernel/random/boot_id')} {namespace}"
            met = known.get(self.layout.node_rank)
            report = HostReport(verdicts=tuple(found), likeness=likeness, hcas=plan.hcas, met=met, machine=machine)
            put_record(self.exchange, f"word/{self.layout.node_rank}", report)
        if self.layout.node_rank != 0:
            return plan, None
        gone = {one.subject for one in links.verdicts if one.check == "roster" and one.status is Status.FAIL}
        reports = judge_host_reports(self._words(gone), waited_s=self._limit_s)
        if shared is not None:
            shared.remove(self.own.run_dir or "")
        judged = apply_modes([*links.verdicts, *reports], self.own.settings.modes, spare=self.spare)
        result = drop_symptoms(judged, hosts=self.layout.hosts)
        self._publish(result, gone)
        return plan, result

    def _check_links(self, facts: TransportFacts, kinds: frozenset[Rdma]) -> LinkReport:
        # The rendezvous' name may resolve to loopback on the first host itself.
        known = facts.rendezvous.remote if facts.rendezvous is not None else None
        route = way_out([known] if known else [], interfaces=facts.interfaces, surroundings=self.surroundings)
        interface = (facts.interface(route.interface) if route is not None else None) or NetworkInterface("")
        settings, full = self.own.settings, self.own.level is Level.FULL
        own = HostIntroduction(
            name=self.layout.host,
            node_rank=self.layout.node_rank,
            address=(route.local if route is not None else None) or "127.0.0.1",
            interface=interface.name,
            mtu=interface.mtu_bytes,
            tcp_ports=(0, 0, 0, *settings.ports),
            kinds=kinds,
        )
        options = replace(self.links, roster_s=settings.wait_s, thresholds=settings.thresholds, limits=settings.limits)
        return LinkSession(own, self.layout.hosts, self.exchange, full=full, options=options).run()

    def _words(self, gone: Set[str]) -> dict[str, HostReport | None]:
        """The reports of all hosts. A host that the check `roster` already names gets only a short wait to report why."""
        words: dict[str, HostReport | None] = {}
        for node, host in enumerate(self.layout.hosts):
            limit_s = min(_LATE_WORD_S, self._left_s()) if host in gone else self._left_s()
            word = None
            try:
                word = get_record(self.exchange, f"word/{node}", HostReport, limit_s=limit_s)
            except MalformedJsonError as error:
                logger.warning("%s does not report as this release does: %s", host, error)
            if word is not None or host not in gone:
                words[host] = word
        return words

    def _publish(self, verdicts: list[Verdict], gone: Set[str]) -> None:
        """As the first host. Only findings are published: only the reporting rank shows what passed."""
        put_record(self.exchange, "result", findings(verdicts))
        if not failures(verdicts):
            return
        # This host leaves, perhaps with the store: wait until the others have read why.
        deadline = time.monotonic() + _READ_S
        for node, host in enumerate(self.layout.hosts):
            if node != self.layout.node_rank and host not in gone:
                self.exchange.get(f"read/{node}", limit_s=max(0.0, deadline - time.monotonic()))
