"""Thresholds, sizes and deadlines of the group checks."""

from dataclasses import dataclass

MB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """Times in seconds. The same on all ranks."""

    present_s: float = 5.0
    """Until every rank has said that it is there. Ranks come out of the making of the group together."""

    collective_s: float = 5.0
    """All trials of one collective. The first one under NCCL connects the ranks, which takes about a second."""

    bandwidth_s: float = 20.0
    matmul_s: float = 10.0
    p2p_s: float = 20.0
    transport_s: float = 5.0

    grace_s: float = 1.0
    """How much later than the deadline the word of a rank may come before it counts as silent."""

    expected_ratio: float = 0.7
    """Bus bandwidth below this share of what the link can do is a warning."""

    slack_s: float = 5e-5
    """What a collective takes, and varies by, whatever its size. Source: 64 MB between 2 H200 took 40 to 60 microseconds longer
    than at the rate of 1 GB, of 260 in all, and 16 more or less from one time to the next."""

    straggler_ratio: float = 0.85
    """A rank with less than this share of the median rate of matrix products is a straggler: every step waits for it."""

    straggler_ratio_cpu: float = 0.7
    """The same on CPUs, where other processes take their part: two idle ranks on busy processors differed by 0.82."""

    pair_ratio: float = 0.5
    """A pair of GPUs with less than this share of the median of its host is slow. Pairs across sockets may be a bit slower."""

    seed: int = 20
    small: int = 7
    """Elements per rank of a small message: odd, and less than the number of threads that share it."""

    sweep_budget_s: float = 5.0
    """No larger message is begun after this long: the group has a slow link, and the smaller ones have told so."""

    point_budget_s: float = 0.05
    """For one collective at one size, at the least a few rounds."""

    matmul_budget_s: float = 0.02

    def straggler_share(self, *, cuda: bool) -> float:
        """Below this share of the median a rank is a straggler."""
        return self.straggler_ratio if cuda else self.straggler_ratio_cpu

    def large_bytes(self, *, cuda: bool, full: bool) -> int:
        """Of all ranks' parts together, in a large message."""
        return (64 * MB if cuda else 4 * MB) if full else (MB if cuda else MB // 4)

    def sweep_sizes(self, *, cuda: bool, full: bool) -> tuple[int, ...]:
        """Bytes, growing."""
        if cuda:
            return (1 * MB, 64 * MB, 1024 * MB) if full else (1 * MB, 64 * MB)
        return (1 * MB, 16 * MB) if full else (1 * MB,)
