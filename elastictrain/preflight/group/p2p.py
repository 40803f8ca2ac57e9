"""How the GPUs of a host reach each other: access, and bandwidth of every pair in both directions."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastictrain.preflight.group.backend import Collectives

PAIR_BYTES = 64 << 20
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Reach:
    """What a rank receives from another one of its host. `access`: directly from its memory; None is unknown."""

    source: int
    gbs: float
    access: bool | None


def pair_rounds(num: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs, in which each of `num` meets each other once.

    Source: the circle method of tournaments: one stays, the others move on by a place; an odd one out rests.
    """
    places = list(range(num + num % 2))
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < num])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def measure_pairs(
    collectives: Collectives,
    *,
    rank: int,
    neighbours: Sequence[int],
    device: torch.device,
    num_bytes: int = PAIR_BYTES,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Reach]:
    """What this rank receives from each other one. `neighbours`: ranks of this host, by local rank.

    Collective: within a host.
    """
    own = neighbours.index(rank)
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    found = []
    for pairs in pair_rounds(len(neighbours)):
        for low, high in pairs:
            if own not in (low, high):
                continue
            # One direction after the other: both at once share what is between them, where that is PCIe.
            for source, target in ((low, high), (high, low)):
                peer = neighbours[target if own == source else source]
                seconds = _pass_on(collectives, buffer, peer=peer, sends=own == source, clock=clock)
                if own == target:
                    found.append(Reach(peer, num_bytes / seconds / 1e9, _access(device, own, source)))
    return found


def _pass_on(collectives: Collectives, buffer: Tensor, *, peer: int, sends: bool, clock: Callable[[], float]) -> float:
    """Seconds of one message. The first one connects, and is not counted."""
    began = 0.0
    for index in range(_ROUNDS + 1):
        if index == 1:
            _settle(buffer)
            began = clock()
        collectives.send_recv(None if sends else buffer, buffer if sends else None, source=peer, target=peer)
    _settle(buffer)
    return (clock() - began) / _ROUNDS


def _access(device: torch.device, own: int, other: int) -> bool | None:
    """None where each process sees its own device only."""
    if device.type != "cuda" or device.index != own or torch.cuda.device_count() <= other:
        return None
    return bool(torch.cuda.can_device_access_peer(own, other))


def _settle(buffer: Tensor) -> None:
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
