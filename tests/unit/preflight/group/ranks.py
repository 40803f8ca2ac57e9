"""Made-up groups."""

from elastictrain.preflight.group.members import GroupMember


def members(*hosts: str, device: str = "cpu", **known: object) -> tuple[GroupMember, ...]:
    """Introduced ranks, one for each host named; the process of rank 3 is 1003."""
    return tuple(
        GroupMember(
            rank=rank,
            host=host,
            local_rank=hosts[:rank].count(host),
            pid=1000 + rank,
            device=device,
            free_bytes=1 << 34,
            **known,  # type: ignore[arg-type]
        )
        for rank, host in enumerate(hosts)
    )


H200 = "NVIDIA H200"
