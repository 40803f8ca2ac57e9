"""Who is to blame in fleets of hosts with random faults, by simulation: rounds, their time, precision and recall.

    python scripts/bench_fleet.py                    (8, 128 and 1024 hosts; under a minute)
    python scripts/bench_fleet.py --hosts 128 --seeds 200

Each host, and each direction of each link, is bad with a probability of 1 %: a bad host sends, receives or does both with 5 to
40 % of the bandwidth of the others; a bad link likewise. Figures scatter by 10 %, and one in 200 is down to 20 to 60 % for no
reason that lasts, as with a busy processor. Hosts are named out of all, links out of those that were measured (`covered`:
their part of all links; other links are measured at the next start).

`s/round` is what the streams of one round take, connecting not counted; all pairs of a round are measured at the same time.
"""

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from elastictrain.config.preflight import PreflightLimits, PreflightThresholds
from elastictrain.preflight.links.culprit import Direction
from elastictrain.preflight.links.judge import flow_blame, suspect_rounds
from elastictrain.preflight.links.messages import Flow, Link
from elastictrain.preflight.links.rounds import Round, first_rounds

FAULTS = 0.01
SCATTER = 0.1
DIPS = 0.005
GBPS = 25.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """A simulated fleet: what is wrong with whom, as the part of the bandwidth that is left."""

    num_hosts: int
    hosts: dict[int, tuple[Direction, float]]
    seed: int

    def bad_link(self, link: Link) -> float | None:
        """The same answer each time, without a table of a million links."""
        random = Random(f"{self.seed} {link}")
        return random.uniform(0.05, 0.4) if random.random() < FAULTS else None

    def gbps(self, link: Link, random: Random) -> float:
        """One measurement."""
        source, target = self.hosts.get(link[0]), self.hosts.get(link[1])
        left = min(
            1.0,
            self.bad_link(link) or 1.0,
            source[1] if source and source[0] is not Direction.IN else 1.0,
            target[1] if target and target[0] is not Direction.OUT else 1.0,
        )
        dip = random.uniform(0.2, 0.6) if random.random() < DIPS else 1.0
        return GBPS * left * dip * random.lognormvariate(0.0, SCATTER)

    def measure(self, rounds: Iterable[Round], random: Random) -> list[Flow]:
        """Both directions of each pair, and both at once."""
        links = [link for pairs in rounds for a, b in pairs for link in ((a, b), (b, a))]
        return [Flow(link=link, gbps=self.gbps(link, random), both=both) for link in links for both in (False, True)]


@dataclass(slots=True)
class Score:
    """Named rightly, named wrongly, and not named."""

    right: int = 0
    wrong: int = 0
    missed: int = 0

    def add(self, named: set[object], bad: set[object]) -> None:
        self.right += len(named & bad)
        self.wrong += len(named - bad)
        self.missed += len(bad - named)

    def precision(self) -> float:
        return self.right / max(1, self.right + self.wrong)

    def recall(self) -> float:
        return self.right / max(1, self.right + self.missed)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: rounds are the most of all seeds, `deciding_s` is the processor's time for one fleet."""

    num_hosts: int
    hosts: Score
    links: Score
    first: int
    second: int
    covered: float
    deciding_s: float


def make_fleet(num_hosts: int, *, seed: int) -> Fleet:
    """One fleet, the same for the same seed."""
    random = Random(seed)
    bad = [host for host in range(num_hosts) if random.random() < FAULTS]
    return Fleet(num_hosts, {host: (random.choice(list(Direction)), random.uniform(0.05, 0.4)) for host in bad}, seed)


def simulate(num_hosts: int, *, seeds: Iterable[int]) -> Row:
    """Many fleets of one size, each through the rounds of a full check."""
    thresholds, hosts, links = PreflightThresholds(), Score(), Score()
    most_first = most_second = num_fleets = 0
    covered, deciding_s = 0.0, 0.0
    for seed in seeds:
        fleet, random = make_fleet(num_hosts, seed=seed), Random(f"noise {seed}")
        began = time.process_time()
        plan = first_rounds(num_hosts, seed=seed)
        deciding_s += time.process_time() - began
        first = fleet.measure(plan, random)
        began = time.process_time()
        again = suspect_rounds(first, num_hosts=num_hosts, thresholds=thresholds)
        deciding_s += time.process_time() - began
        second = fleet.measure(again, random)
        began = time.process_time()
        found = flow_blame(first, second, thresholds=thresholds)[0]
        deciding_s += time.process_time() - began
        hosts.add(
            {(one.subject, one.way) for one in found.hosts if one.confirmed},
            {(host, way) for host, (way, _) in fleet.hosts.items()},
        )
        measured = {flow.link for flow in first}
        links.add({bad.subject for bad in found.links if bad.confirmed}, bad_links(fleet, measured))
        covered += len(measured) / (num_hosts * (num_hosts - 1))
        most_first, most_second = max(most_first, len(plan)), max(most_second, len(again))
        num_fleets += 1
    return Row(num_hosts, hosts, links, most_first, most_second, covered / num_fleets, deciding_s / num_fleets)


def bad_links(fleet: Fleet, measured: Iterable[Link]) -> set[object]:
    """Those that a host's fault does not explain."""
    out = {host for host, (way, _) in fleet.hosts.items() if way is not Direction.IN}
    into = {host for host, (way, _) in fleet.hosts.items() if way is not Direction.OUT}
    return {link for link in measured if link[0] not in out and link[1] not in into and fleet.bad_link(link) is not None}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[8, 128, 1024])
    parser.add_argument("--seeds", type=int, help="fleets of each size (default: as many as have 32,000 hosts, at most 500)")
    told = parser.parse_args(arguments)
    streams_s = 3 * PreflightLimits().stream_s
    print("hosts  fleets  bad hosts  precision  recall  bad links  precision  recall  covered  rounds  s/round  deciding s")
    for num_hosts in told.hosts:
        num = told.seeds or min(500, max(20, 32_000 // num_hosts))
        row = simulate(num_hosts, seeds=range(num))
        print(
            f"{num_hosts:5}  {num:6}  {row.hosts.right + row.hosts.missed:9}  {row.hosts.precision():9.2%}  "
            f"{row.hosts.recall():6.2%}  {row.links.right + row.links.missed:9}  {row.links.precision():9.2%}  "
            f"{row.links.recall():6.2%}  {row.covered:7.1%}  {row.first:2} + {row.second:1}  {streams_s:7.1f}  "
            f"{row.deciding_s:10.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
