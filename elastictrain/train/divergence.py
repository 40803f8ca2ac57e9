"""Which replicas differ from the others, by the digests of their state. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Divergence:
    """Replicas do not hold the same state."""

    wrong: tuple[int, ...] = ()
    """Ranks that differ from the majority of their replicas."""

    disputed: tuple[int, ...] = ()
    """Ranks whose replicas have no majority, so that any of them may be the wrong one."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks under suspicion."""
        return tuple(sorted((*self.wrong, *self.disputed)))


def find_divergence(digests: Sequence[int], *, shards: int) -> Divergence | None:
    """Compare the digests of all ranks, in rank order; None if all replicas are alike.

    The ranks of one copy of the model follow each other, `shards` of them, so every `shards`-th rank holds the same part.
    """
    wrong: list[int] = []
    disputed: list[int] = []
    for first in range(shards):
        ranks = range(first, len(digests), shards)
        (digest, count), *others = Counter(digests[rank] for rank in ranks).most_common()
        if not others:
            continue
        if 2 * count > len(ranks):
            wrong += [rank for rank in ranks if digests[rank] != digest]
        else:
            disputed += ranks
    return Divergence(tuple(sorted(wrong)), tuple(sorted(disputed))) if wrong or disputed else None


def describe_divergence(divergence: Divergence, *, step: int, hosts: Sequence[str]) -> str:
    """The sentence for a person; `hosts` names the host of each rank."""
    causes = []
    if divergence.wrong:
        verb = "differs" if len(divergence.wrong) == 1 else "differ"
        causes.append(
            f"{_listed(divergence.wrong, hosts)} {verb} from the majority of the replicas: "
            f"replace {_hosts(divergence.wrong, hosts)}"
        )
    if divergence.disputed:
        causes.append(
            f"{_listed(divergence.disputed, hosts)} differ from each other, and no majority tells which one is wrong: test the "
            f"memory and devices of {_hosts(divergence.disputed, hosts)}, and replace the host that fails"
        )
    return (
        f"after step {step} replicas hold different parameters or optimizer state. {'; '.join(causes)}. "
        "Nothing was saved of this step: the next start resumes from the checkpoint before it"
    )


def _listed(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)


def _hosts(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    return " and ".join(dict.fromkeys(hosts[rank] for rank in ranks))
