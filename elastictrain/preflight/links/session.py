"""The link checks of one host among all: introduces it, does its part, and comes back with the verdicts that all adopt."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from elastictrain.errors import HostUnfitError, TransportError
from elastictrain.preflight.exchange import Exchange
from elastictrain.preflight.links.follower import Actor, LinkExchange
from elastictrain.preflight.links.judge import claimed_twice, leaderless, unheard
from elastictrain.preflight.links.leader import Leader, gather_roster
from elastictrain.preflight.links.messages import Adopt, GarbledError, HostIntroduction, Order, Roster
from elastictrain.preflight.links.options import LinkOptions
from elastictrain.preflight.links.responder import Responder
from elastictrain.preflight.verdict import Scope, Status, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMember:
    """This host. `address` is where the others reach it, on `interface` with `mtu` (None: unknown). `ports`: the TCP ports that
    training will use, as far as they are known and free; 0 is any."""

    name: str
    node_rank: int
    num_hosts: int
    address: str
    interface: str
    mtu: int | None
    ports: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """What all hosts go by. `roster` is None if there was none. `num_rounds` is known to the first host.

    `seconds`: from the roster to the verdicts, without waiting for hosts to come.
    """

    verdicts: tuple[Verdict, ...]
    roster: Roster | None = None
    num_rounds: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class LinkSession:
    """`prefix` of the keys must be new for each bring-up. `full` measures bandwidth; `names`: hosts by node rank, if known.

    `wall` is the clock that the hosts compare.
    """

    member: LinkMember
    exchange: Exchange
    prefix: str = "links"
    full: bool = False
    options: LinkOptions = field(default_factory=LinkOptions)
    names: Mapping[int, str] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time

    def run(self) -> LinkReport:
        """Never raises for what hosts or the network do, and every wait in it has a limit."""
        responder = Responder(self.member.address, ports=self.member.ports, wall=self.wall)
        try:
            responder.start()
            return self._run(responder)
        except HostUnfitError as error:
            return LinkReport(verdicts=(self._no_port(error),))
        except (TransportError, GarbledError) as error:
            return LinkReport(verdicts=(unheard(self.member.name, why=str(error)),))
        finally:
            responder.close()

    def _run(self, responder: Responder) -> LinkReport:
        began = self.clock()
        board = LinkExchange(self.exchange, prefix=self.prefix)
        own = self._introduction(responder)
        board.put_introduction(own)
        leads = self.member.node_rank == 0
        roster = self._lead_roster(board, own) if leads else self._follow_roster(board)
        if roster is None:
            leader = self.names.get(0, "node rank 0")
            return LinkReport(verdicts=(leaderless(self.member.name, waited_s=self.clock() - began, leader=leader),))
        listed = next((host for host in roster.hosts if host.node_rank == own.node_rank), None)
        if listed is None:
            return LinkReport(verdicts=(unheard(own.name, why="it came too late"),), roster=roster)
        if listed != own:
            return LinkReport(verdicts=(claimed_twice(own, listed),), roster=roster)
        complete = self.clock()
        responder.set_token(bytes.fromhex(roster.token))
        actor = Actor(
            roster.hosts.index(own), roster=roster, board=board, options=self.options, clock=self.clock, wall=self.wall
        )
        report = self._lead(actor, roster, board) if leads else self._follow(actor, roster, board)
        return LinkReport(
            verdicts=report.verdicts,
            roster=roster,
            num_rounds=report.num_rounds,
            seconds=round(self.clock() - complete, 4),
        )

    def _lead_roster(self, board: LinkExchange, own: HostIntroduction) -> Roster:
        return gather_roster(board, own=own, num_hosts=self.member.num_hosts, limit_s=self.options.roster_s, clock=self.clock)

    def _follow_roster(self, board: LinkExchange) -> Roster | None:
        # The first host may have begun a whole limit after us.
        return board.roster(limit_s=2 * self.options.roster_s + self.options.grace_s)

    def _lead(self, actor: Actor, roster: Roster, board: LinkExchange) -> LinkReport:
        leader = Leader(
            actor,
            roster=roster,
            board=board,
            options=self.options,
            full=self.full,
            names=self.names,
            clock=self.clock,
        )
        found = leader.lead()
        return LinkReport(verdicts=found.verdicts, num_rounds=found.num_rounds)

    def _follow(self, actor: Actor, roster: Roster, board: LinkExchange) -> LinkReport:
        # For the next order the first host may take as long as everybody may take for this one, and judge a little.
        limit_s, number = self.options.contact_s, 0
        while True:
            patience_s = limit_s + 2 * self.options.grace_s
            order: Order | None = board.order(number, num_hosts=len(roster.hosts), limit_s=patience_s)
            if order is None:
                leader = roster.labels()[0]
                return LinkReport(verdicts=(leaderless(self.member.name, waited_s=patience_s, leader=leader),))
            if isinstance(order, Adopt):
                return LinkReport(verdicts=order.verdicts)
            actor.carry_out(number, order)
            limit_s = max(order.limit_s(self.options), 0.0)
            number += 1

    def _introduction(self, responder: Responder) -> HostIntroduction:
        return HostIntroduction(
            name=self.member.name,
            node_rank=self.member.node_rank,
            address=self.member.address,
            interface=self.member.interface,
            mtu=self.member.mtu,
            tcp_ports=responder.tcp_ports,
            udp_port=responder.udp_port,
            nonce=responder.nonce.hex(),
        )

    def _no_port(self, error: HostUnfitError) -> Verdict:
        return Verdict(
            check="reachable",
            scope=Scope.HOST,
            subject=self.member.name,
            status=Status.FAIL,
            measured=str(error),
            expected=f"a listener on {self.member.address}",
            remedy=f"see who has the address and the ports: `ip address show dev {self.member.interface}`, `ss -ltnp`; choose "
            f"others",
        )
