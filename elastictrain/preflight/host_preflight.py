"""The preflight of all hosts of a group, before any process group: what each rank does in it.

The first rank of each host checks the host, meets the others on real links, decides and applies the transport plan, and sends
its word to the first host, which judges them together. The other ranks take over plan and result. All ranks come back with the
same verdicts. Every wait has a limit.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial

from elastictrain.bounded_json import MalformedJsonError
from elastictrain.distributed.bounded import within
from elastictrain.errors import ElasticTrainError, PreflightError
from elastictrain.preflight.host.alike import Likeness, compare, describe
from elastictrain.preflight.host_checks import OwnChecks, check_host
from elastictrain.preflight.links.messages import HostIntroduction
from elastictrain.preflight.links.probes import LinkOptions
from elastictrain.preflight.links.session import LinkReport, LinkSession
from elastictrain.preflight.policy import Level, apply_modes, decide
from elastictrain.preflight.surroundings import Exchange, Surroundings, get_record, put_record
from elastictrain.preflight.transport.infiniband import Rdma, common, kinds_here
from elastictrain.preflight.transport.interfaces import find_route, way_out
from elastictrain.preflight.transport.judge import judge_alike, judge_infiniband, judge_interface
from elastictrain.preflight.transport.plan import Facts, TransportPlan, apply_plan, decide_transport, read_facts
from elastictrain.preflight.transport.settings import OWN_VARIABLES
from elastictrain.preflight.verdict import Reporter, Status, Verdict, failures, findings, worst_first
from elastictrain.preflight.verdict import describe as describe_verdict

logger = logging.getLogger(__name__)

_LOOK_UP_S = 5.0
_LATE_WORD_S = 2.0
_READ_S = 2.0

_FOLLOW_S = 5.0
"""How much longer than its own limit the first host may take to bring everything together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLayout:
    """`hosts` are in the order of their first ranks; names that several have are told apart by their node rank.

    `hosts_of_ranks`: the same names, for each rank of the group. `rendezvous`: address or name of where the group meets; None
    in a world of one.
    """

    hosts: tuple[str, ...]
    node_rank: int
    local_rank: int
    local_world_size: int
    hosts_of_ranks: tuple[str, ...] = ()
    rendezvous: str | None = None

    @property
    def host(self) -> str:
        """What this host is called in verdicts."""
        return self.hosts[self.node_rank]

    @property
    def leads_host(self) -> bool:
        """Whether this rank checks on behalf of its host."""
        return self.local_rank == 0

    @property
    def leads_group(self) -> bool:
        """Whether this rank brings the words of all hosts together."""
        return self.leads_host and self.node_rank == 0


def find_layout(ranks: Sequence[tuple[str, int]], *, rank: int, local_rank: int, rendezvous: str | None) -> HostLayout:
    """`ranks`: host and local world size of each rank, those of a host one after another, as torchrun numbers them."""
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
    """What all ranks go by: warnings and failures, and on the first rank whatever else was found.

    `error`: why this host leaves, if it does. `alone`: there is one host only. `plan`: of this host, on the rank that acts for
    it.
    """

    verdicts: tuple[Verdict, ...]
    error: ElasticTrainError | None
    seconds: float
    alone: bool
    plan: TransportPlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """What one host tells the first one of itself. `hcas`: the ports that it plans to use."""

    verdicts: tuple[Verdict, ...]
    likeness: Likeness
    hcas: tuple[str, ...]


def judge_host_reports(
    words: Mapping[str, HostReport | None], *, kinds: Mapping[str, frozenset[Rdma]], waited_s: float
) -> list[Verdict]:
    """What hosts found of themselves, and what they have unlike each other. A host whose word is None said nothing, or nothing
    that is understood. `kinds`: what RDMA each could do."""
    known = {host: word for host, word in words.items() if word is not None}
    verdicts = [verdict for word in known.values() for verdict in word.verdicts]
    for host in (host for host, word in words.items() if word is None):
        looking = "it tells which check does not end; see the log of its ranks"
        remedy = f"python -m elastictrain.preflight  # on {host}: {looking}"
        expected = f"its word within {waited_s:.3g} s"
        verdicts.append(Reporter("roster", host).failed("said nothing of its own checks", expected=expected, remedy=remedy))
    if len(words) > 1:
        verdicts += compare({host: word.likeness for host, word in known.items()})
        hcas = {host: word.hcas for host, word in known.items()}
        told = {host: kinds[host] for host in known if host in kinds}
        verdicts += judge_alike(hcas, told, agreed=common(kinds))
    return verdicts


def relabel(verdicts: Iterable[Verdict], *, name: str, label: str) -> list[Verdict]:
    """A host that calls itself `name` is called `label` in the group, where several may have that name."""
    relabelled = []
    for verdict in verdicts:
        subject = verdict.subject
        if subject == name or subject.endswith(f" on {name}"):
            subject = subject.removesuffix(name) + label
        elif subject.startswith(f"{name} -> "):
            subject = label + subject.removeprefix(name)
        relabelled.append(replace(verdict, subject=subject))
    return relabelled


@dataclass(slots=True)
class HostPreflight:
    """One rank's part. All but `layout` is asked of every host alike.

    `packages`: whose code all hosts must have alike. `config`: digest of what else they must have in common. `after_failure`:
    whether NCCL should say more than usual. `environment` is what process groups will read.
    """

    layout: HostLayout
    own: OwnChecks
    exchange: Exchange
    packages: tuple[str, ...] = ("elastictrain",)
    config: str = ""
    after_failure: bool = False
    environment: MutableMapping[str, str] = field(default_factory=lambda: os.environ)
    surroundings: Surroundings = field(default_factory=Surroundings)
    links: LinkOptions = field(default_factory=LinkOptions)
    clock: Callable[[], float] = time.monotonic
    _began: float = field(default=0.0, init=False)

    def check(self) -> Report:
        """Collective: yes, through the exchange.

        Raises: PreflightError if a host that the others depend on says nothing; TransportError if the exchange does not answer.
        """
        self._began = self.clock()
        plan = result = None
        if self.layout.leads_host:
            plan, result = self._lead_host()
        else:
            self._follow_host()
        if result is None:
            limit_s = self._limit_s + _FOLLOW_S - (self.clock() - self._began)
            result = get_record(self.exchange, "result", list[Verdict], limit_s=limit_s)
            if result is None:
                said = f"did not say what the preflight found within {self._limit_s:g} s"
                raise PreflightError(f"{self.layout.hosts[0]}, the first host, {said}")
            if self.layout.leads_host and failures(result):
                put_record(self.exchange, f"read/{self.layout.node_rank}", True)
        return Report(
            verdicts=tuple(result),
            error=decide(result, host=self.layout.host, hosts=self.layout.hosts),
            seconds=self.clock() - self._began,
            alone=self._alone,
            plan=plan,
        )

    @property
    def _alone(self) -> bool:
        return len(self.layout.hosts) == 1

    @property
    def _limit_s(self) -> float:
        return self.own.settings.limit_s

    def _left_s(self) -> float:
        return max(0.0, self._limit_s - (self.clock() - self._began))

    def _lead_host(self) -> tuple[TransportPlan, list[Verdict] | None]:
        """The plan of this host, and on the first one the result."""
        own: list[list[Verdict]] = []
        thread = threading.Thread(target=lambda: own.append(self._check_own()), name="own-checks", daemon=True)
        thread.start()
        look = partial(read_facts, self.surroundings, alone=self._alone)
        facts = within(_LOOK_UP_S, partial(look, rendezvous=self.layout.rendezvous)) or look(rendezvous=None)
        here = kinds_here(facts.ports, settings=facts.settings)
        links = LinkReport(()) if self._alone else self._check_links(facts, here)
        leader = self.layout.hosts[0]
        if links.roster is None and (lost := [one for one in links.verdicts if one.subject == leader]):
            # Nobody will bring the reports of all hosts together.
            raise PreflightError(f"preflight failed: {describe_verdict(lost[0])}")
        kinds = {self.layout.host: here if self._alone else frozenset({Rdma.UNKNOWN})}
        if links.roster is not None:
            kinds = {one.name: one.kinds for one in links.roster.hosts}
            others = [one for one in links.roster.hosts if one.node_rank != self.layout.node_rank]
            find = partial(find_route, interfaces=facts.interfaces, surroundings=self.surroundings)
            facts = replace(facts, peers={one.name: find(one.address) for one in others})
        plan = decide_transport(facts, agreed=common(kinds), after_failure=self.after_failure)
        put_record(self.exchange, f"environment/{self.layout.node_rank}", apply_plan(plan, self.environment))
        thread.join(self._left_s())
        if own:
            # One whose checks do not end says nothing, and is named for it.
            found = relabel(
                [*own[0], *judge_interface(facts), *judge_infiniband(facts)],
                name=self.surroundings.host,
                label=self.layout.host,
            )
            # Of the links the first host speaks, but for a host that could not take part to the end.
            found += [] if self.layout.leads_group else links.verdicts
            likeness = describe(self.packages, config=self.config)
            report = HostReport(verdicts=tuple(found), likeness=likeness, hcas=plan.hcas)
            put_record(self.exchange, f"word/{self.layout.node_rank}", report)
        if not self.layout.leads_group:
            return plan, None
        gone = {one.subject for one in links.verdicts if one.check == "roster" and one.status is Status.FAIL}
        reports = judge_host_reports(self._words(gone), kinds=kinds, waited_s=self._limit_s)
        result = worst_first(apply_modes([*links.verdicts, *reports], self.own.modes))
        self._publish(result, gone)
        return plan, result

    def _check_own(self) -> list[Verdict]:
        try:
            return check_host(self.surroundings, self.own)
        except Exception as error:
            # The edge of a thread; a host whose checks broke must not pass for one that is well.
            logger.exception("the checks of this host broke")
            host, measured = self.surroundings.host, f"its checks broke: {type(error).__name__}: {error}"
            remedy = f"python -m elastictrain.preflight  # on {host}: it shows where; report it as a bug"
            return [Reporter("roster", host).failed(measured, expected="verdicts", remedy=remedy)]

    def _check_links(self, facts: Facts, kinds: frozenset[Rdma]) -> LinkReport:
        # The first host may meet the others at a name that means loopback to itself.
        known = facts.rendezvous.remote if facts.rendezvous is not None else None
        route = way_out([known] if known else [], interfaces=facts.interfaces, surroundings=self.surroundings)
        interface = facts.interface(route.interface) if route is not None else None
        settings = self.own.settings
        session = LinkSession(
            host=HostIntroduction(
                name=self.layout.host,
                node_rank=self.layout.node_rank,
                address=(route.local if route is not None else None) or "127.0.0.1",
                interface=interface.name if interface is not None else "",
                mtu=interface.mtu_bytes if interface is not None else None,
                tcp_ports=(0, *settings.ports),
                kinds=kinds,
            ),
            names=self.layout.hosts,
            exchange=self.exchange,
            full=self.own.level is Level.FULL,
            options=replace(self.links, roster_s=settings.wait_s, thresholds=settings.thresholds, limits=settings.limits),
        )
        return session.run()

    def _words(self, gone: Set[str]) -> dict[str, HostReport | None]:
        """Of all hosts. Who is known to be gone is not waited for long, nor named again; but it may still tell why."""
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
        """As the first host. What passed matters to nobody but the rank that shows it."""
        put_record(self.exchange, "result", findings(verdicts))
        if not failures(verdicts):
            return
        # This host leaves, and may take the store along: the others should have heard why before.
        deadline = self.clock() + _READ_S
        for node, host in enumerate(self.layout.hosts):
            if node != self.layout.node_rank and host not in gone:
                self.exchange.get(f"read/{node}", limit_s=max(0.0, deadline - self.clock()))

    def _follow_host(self) -> None:
        """Take over what the rank that acts for this host has decided."""
        done = get_record(self.exchange, f"environment/{self.layout.node_rank}", dict[str, str], limit_s=self._limit_s)
        if done is None:
            message = f"the first rank of {self.layout.host} did not decide on its interfaces within {self._limit_s:g} s"
            raise PreflightError(message)
        self.environment.update(done)
        self.environment[OWN_VARIABLES] = json.dumps(done)
