"""One rank of a test of the group checks: runs scenarios one after the other, and writes down what each found.

Usage: group_ranks.py FOLDER SCENARIO...
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastictrain.config.preflight import PreflightChecks, PreflightGroup, PreflightLimits
from elastictrain.distributed.group import Group, connect, make_group
from elastictrain.distributed.store import StoreExchange
from elastictrain.identity import Identity, read_identity
from elastictrain.preflight.group.checks import GroupChecks, GroupFindings, Request
from elastictrain.preflight.group.collectives import Collective, Collectives, Trial, root
from elastictrain.preflight.group.corruption import multiply
from elastictrain.preflight.group.measurements import measure_pairs

LESS = PreflightChecks(collectives="off", bus_bandwidth="off", present="off")
HASTY = Request(full=False, settings=PreflightGroup(limits=PreflightLimits(collective_s=1.0)), present_s=1.0, grace_s=0.5)


class Wrongly(Collectives):
    """Gathers wrong elements on rank 1, broadcasts wrong ones from rank 2, and adds nothing of rank 0."""

    def run(self, trial: Trial, given: Tensor) -> Tensor:
        if trial.collective is Collective.BROADCAST and self.rank == root(trial, world_size=self.world_size) == 2:
            given[3] = 100
        if trial.collective is Collective.ALL_REDUCE and self.rank == 0 and given.dtype == torch.bfloat16:
            given.zero_()
        received = super().run(trial, given)
        if trial.collective is Collective.ALL_GATHER and self.rank == 1:
            received[0] += 1
            received[-1] += 1
        return received


class Freezing(Collectives):
    """Stops its whole process in an exchange of all with all."""

    def run(self, trial: Trial, given: Tensor) -> Tensor:
        if trial.collective is Collective.ALL_TO_ALL and self.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().run(trial, given)


class Rank:
    """This rank and its group."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.identity: Identity = read_identity(os.environ)
        self.store = connect(self.identity, timeout_s=30)
        shared = dist.PrefixStore("test", self.store)
        self.group: Group = make_group(shared, self.identity, backend="gloo", init_timeout_s=60, save_timeout_s=60)

    def check(
        self,
        name: str,
        request: Request,
        *,
        on_part: Callable[[str], None] = lambda _: None,
        collectives: type[Collectives] = Collectives,
        product: Callable[[Tensor, Tensor], Tensor] = multiply,
    ) -> GroupFindings:
        dist.barrier()
        exchange = StoreExchange(dist.PrefixStore(name, self.store))
        hosts = [f"h{rank + 1}" for rank in range(self.identity.world_size)]
        began = time.monotonic()
        checks = GroupChecks(
            self.group,
            exchange,
            # Each is the only rank of its host.
            replace(self.identity, local_rank=0, local_world_size=1),
            request,
            hosts=hosts,
            on_part=on_part,
            collectives=collectives(self.identity.rank, self.identity.world_size, self.group.device),
            product=product,
        )
        findings = checks.run()
        seconds = time.monotonic() - began
        verdicts = [asdict(verdict) for verdict in findings.verdicts]
        self.write(name, {"verdicts": verdicts, "usable": findings.usable, "seconds": seconds})
        return findings

    def write(self, name: str, found: dict[str, Any]) -> None:
        file = self.folder / f"{name}-{self.identity.rank}.json"
        temporary = file.with_suffix(".part")
        temporary.write_text(json.dumps(found))
        temporary.rename(file)


def healthy(rank: Rank) -> None:
    before = torch.get_rng_state()
    rank.check("quick", Request(full=False))
    rank.check("quick_again", Request(full=False))
    rank.check("full", Request(full=True))
    assert torch.equal(before, torch.get_rng_state()), "the run's random numbers were used"
    rank.check("less", Request(full=True, settings=PreflightGroup(checks=LESS)))


def wrong(rank: Rank) -> None:
    rank.check("wrong", Request(full=False), collectives=Wrongly)


def slow(rank: Rank) -> None:
    def product(left: Tensor, right: Tensor) -> Tensor:
        time.sleep(0.05 if rank.identity.rank == 1 else 0.0)
        return multiply(left, right)

    rank.check("slow", Request(full=False), product=product)


def corrupt(rank: Rank) -> None:
    def product(left: Tensor, right: Tensor) -> Tensor:
        result = multiply(left, right)
        result.view(torch.int32)[5, 7] ^= rank.identity.rank == 1
        return result

    rank.check("corrupt", Request(full=False), product=product)


def tables(rank: Rank) -> None:
    found = rank.check("tables", Request(full=True, table=True))
    rank.write("points", {"sizes": [point.num_bytes for point in found.points]})


def pieces(rank: Rank) -> None:
    """What under gloo only a test calls, and what cannot be broken from outside."""
    own, world = rank.identity.rank, rank.identity.world_size
    reached = measure_pairs(Collectives(own, world, torch.device("cpu")), neighbours=list(range(world)), num_bytes=1 << 16)
    rank.write("pieces", {"reached": [asdict(one) for one in reached]})


def absent(rank: Rank) -> None:
    if rank.identity.rank == 2:
        dist.barrier()
        time.sleep(2)
    else:
        rank.check("absent", HASTY)
    dist.barrier()


def late(rank: Rank) -> None:
    def pause(part: str) -> None:
        if part == "reduce_scatter" and rank.identity.rank == 2:
            time.sleep(3600)

    rank.check("late", HASTY, on_part=pause)


def frozen(rank: Rank) -> None:
    rank.check("frozen", HASTY, collectives=Freezing)


if __name__ == "__main__":
    torch.set_num_threads(1)
    one = Rank(Path(sys.argv[1]))
    for scenario in sys.argv[2:]:
        globals()[scenario](one)
    # Whoever is done must not end the others, which may still be read.
    time.sleep(3600)
