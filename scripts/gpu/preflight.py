"""The group checks on real GPUs: what they find, what they cost, and their bus bandwidth against a sweep written by hand.

    torchrun --standalone --nproc-per-node 2 scripts/gpu/preflight.py

Exit code 1 if a check failed, if the all-reduce of the largest message differs by more than 5 % from the sweep by hand, or if
the group could not be used any more. Without GPUs it runs under gloo, where the comparison is printed and does not count.
"""

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from elastictrain.distributed.group import Group, connect, make_group
from elastictrain.distributed.store import StoreExchange
from elastictrain.identity import Identity, read_identity
from elastictrain.preflight.group.checks import GroupChecks, GroupFindings, Request
from elastictrain.preflight.group.nccl_transport import debug_variables
from elastictrain.preflight.verdict import Status, worst_first

TOLERANCE = 0.05
ROUNDS = 20


def main() -> int:
    identity = read_identity(os.environ)
    cuda = torch.cuda.device_count() >= identity.local_world_size
    folder = tempfile.gettempdir()
    os.environ.update(debug_variables(f"{folder}/elastictrain-nccl-%h-%p.txt", present=os.environ))
    store = connect(identity, timeout_s=60)
    began = time.perf_counter()
    group = make_group(
        dist.PrefixStore("preflight", store),
        identity,
        backend="nccl" if cuda else "gloo",
        init_timeout_s=120,
        save_timeout_s=120,
    )
    print_line(identity, f"group of {identity.world_size} under {group.backend}: {time.perf_counter() - began:.2f} s")
    for name, full in (("quick", False), ("quick again", False), ("full", True), ("full again", True)):
        findings = check(name, group, identity, store, full=full)
        if not findings.usable:
            return 1
    good = not any(verdict.status is Status.FAIL for verdict in findings.verdicts)
    if identity.world_size == 1:
        return 0 if good else 1
    assert findings.points, "bus_bandwidth was not measured"
    ours = findings.points[-1]
    theirs = [by_hand(group.device, ours.num_bytes) for _ in range(3)]
    hand = sorted(theirs)[1]
    difference = ours.bus_gbs / hand - 1
    print_line(
        identity,
        f"all-reduce of {ours.num_bytes / 2**20:.0f} MB: {ours.bus_gbs:.2f} GB/s, by hand {hand:.2f} GB/s "
        f"({', '.join(f'{one:.2f}' for one in theirs)}), difference {100 * difference:+.1f} %",
    )
    if cuda:
        print_line(identity, f"memory left in use: {torch.cuda.memory_reserved() / 2**20:.0f} MB")
    return 0 if good and (abs(difference) <= TOLERANCE or not cuda) else 1


def check(name: str, group: Group, identity: Identity, store: dist.Store, *, full: bool) -> GroupFindings:
    exchange = StoreExchange(dist.PrefixStore(f"checks of {name}", store))
    dist.barrier(group=group.control)
    began = time.perf_counter()
    hosts = [identity.host] * identity.world_size
    findings = GroupChecks(group, exchange, identity, Request(full=full), hosts=hosts).run()
    print_line(identity, f"\n{name}: {time.perf_counter() - began:.2f} s")
    for one in worst_first(findings.verdicts):
        expected = "" if one.expected is None else f", expected {one.expected}"
        print_line(
            identity,
            f"  {one.status:4} {one.check:14} {one.subject}: {one.measured} {one.unit}{expected} [{one.seconds:.3f} s]",
        )
        if one.remedy:
            print_line(identity, f"       {one.remedy}")
    return findings


def by_hand(device: torch.device, num_bytes: int) -> float:
    """Bus bandwidth in GB/s of an all-reduce, without anything of ours."""
    buffer = torch.zeros(num_bytes // 4, device=device)
    for _ in range(3):
        dist.all_reduce(buffer)
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        for _ in range(ROUNDS):
            dist.all_reduce(buffer)
        end.record()
        torch.cuda.synchronize()
        seconds = begin.elapsed_time(end) / 1e3 / ROUNDS
    else:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(ROUNDS):
            dist.all_reduce(buffer)
        seconds = (time.perf_counter() - began) / ROUNDS
    world_size = dist.get_world_size()
    return num_bytes / seconds * 2 * (world_size - 1) / world_size / 1e9


def print_line(identity: Identity, text: str) -> None:
    if identity.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # What hangs cannot be ended otherwise, and gloo may abort at an orderly end.
    os._exit(code)
