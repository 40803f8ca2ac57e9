"""The memory of simulated hosts: the real slots, digests and replicas, in a folder for each machine."""

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from elastictrain.chaos.simulated_group import TrainedGroup, machine_of, tensors_of
from elastictrain.checkpoint.memory.folder import SlotName, look, remove_slot, slot_names
from elastictrain.checkpoint.memory.layout import HEADER_BYTES, RankLayout
from elastictrain.checkpoint.memory.records import load_digests, load_layout, store_layout
from elastictrain.checkpoint.memory.slot import Slot, SnapshotFacts, facts_in
from elastictrain.checkpoint.peers.placement import Peer, replica_target_of
from elastictrain.checkpoint.peers.requests import Put
from elastictrain.checkpoint.peers.server import ReplicaSlots
from elastictrain.checkpoint.saver.commit_protocol import Deadline
from elastictrain.checkpoint.saver.pending_snapshots import SaveJob, lease, with_digests
from elastictrain.checkpoint.tensor_bytes import own_items, reader_of
from elastictrain.errors import ElasticTrainError

RUN = "simulated"
_SHARD_BYTES = 1 << 20
_SLOTS = 4


class SimulatedMemory:
    def __init__(self, folder: Path, *, workers: int) -> None:
        self._folder, self._workers = folder, workers

    @contextmanager
    def union(self, hosts: Sequence[str]) -> Iterator[str]:
        """One folder with the snapshots of all these hosts, as ranks that list theirs would see them together."""
        union, places = self._folder / "union", Counter[tuple[str, int]]()
        union.mkdir()
        try:
            for folder in dict.fromkeys(self.folder_of(host) for host in hosts):
                for layout in folder.glob("layout-*.json"):
                    with suppress(FileExistsError):
                        (union / layout.name).hardlink_to(layout)
                for name in slot_names(str(folder)):
                    alias = SlotName(name.kind, name.rank, places[name.kind, name.rank])
                    places[name.kind, name.rank] += 1
                    (union / str(alias)).hardlink_to(folder / str(name))
                    with suppress(FileNotFoundError):
                        (union / f"{alias}.digests").hardlink_to(folder / f"{name}.digests")
            yield str(union)
        finally:
            shutil.rmtree(union)

    def folder_of(self, host: str) -> Path:
        return self._folder / f"m{machine_of(host)}"

    def snapshot(
        self, group: TrainedGroup, host: str, hosts: Sequence[str], *, step: int, reason: str, created: float
    ) -> SaveJob:
        """Write the slots of a host's ranks, and digest them. The job is closed unless it is for a save."""
        folder, first = self.folder_of(host), hosts.index(host) * self._workers
        folder.mkdir(exist_ok=True)
        ranks = range(first, first + self._workers)
        for one in slot_names(str(folder)):
            if one.kind == "own" and one.rank not in ranks:
                remove_slot(str(folder), one)
        leased = []
        for rank in ranks:
            name = self._write_slot(str(folder), group, rank, step=step, reason=reason, created=created)
            found = lease(str(folder), name)
            assert found is not None  # noqa: S101
            leased.append(with_digests(found))
        job = SaveJob(tuple(leased), Deadline(0.0))
        if not reason:
            close(job)
        return job

    def _write_slot(self, folder: str, group: TrainedGroup, rank: int, *, step: int, reason: str, created: float) -> str:
        """Into the slot with the oldest snapshot that nobody reads; returns its name."""
        tensors = tensors_of(group.values[step])
        layout = RankLayout(own_items(tensors, rank=rank, world_size=group.world_size), _SHARD_BYTES)
        store_layout(folder, layout)
        slot = self._free_slot(folder, rank, size_bytes=layout.size_bytes)
        slot.begin()
        with closing(slot), slot.data as data:
            for file, base in zip(layout.template, layout.starts, strict=True):
                data[base : base + len(file.header)] = file.header
                for placed in file.items:
                    read, begin = reader_of(tensors[placed.item.name], placed.item), base + placed.start
                    data[begin : begin + placed.item.size_bytes] = read(0, placed.item.size_bytes)
            about = (group.incarnation, step, group.world_size, rank, layout.digest, "", created, reason, {"step": step})
            slot.complete(SnapshotFacts(1, RUN, *about))
        return Path(slot.path).name

    def _free_slot(self, folder: str, rank: int, *, size_bytes: int) -> Slot:
        paths = [f"{folder}/{SlotName('own', rank, index)}" for index in range(_SLOTS)]
        held = {path: (facts.incarnation, facts.step) if (facts := facts_in(path)) is not None else ("", 0) for path in paths}
        for path in sorted(paths, key=held.__getitem__):
            slot = Slot.make(path, size_bytes=size_bytes)
            if slot.lock(shared=False):
                return slot
            slot.close()
        raise AssertionError(f"all slots of rank {rank} are being read")

    def replicate(self, hosts: Sequence[str]) -> None:
        """The newest snapshot of each rank, to the host that keeps its replicas."""
        ranks = {host: tuple(range(n * self._workers, (n + 1) * self._workers)) for n, host in enumerate(hosts)}
        roster = [Peer(host, host, 1, ranks[host], number) for number, host in enumerate(hosts)]
        for peer in roster:
            if (target := replica_target_of(peer, roster)) is None:
                continue
            replicas = ReplicaSlots(str(self.folder_of(target.host)), run=RUN)
            replicas.kept = frozenset(peer.ranks)
            replicas.drop_others()
            folder = str(self.folder_of(peer.host))
            newest = {one.facts.rank: one for one in sorted(look(folder, host=0), key=lambda one: one.facts.step)}
            for rank in peer.ranks:
                found = lease(folder, newest[rank].slot)
                assert found is not None  # noqa: S101
                with closing(with_digests(found).slot) as slot, slot.data as data:
                    digests = load_digests(slot.path, found.facts)
                    assert digests is not None  # noqa: S101
                    rest = data

                    def receive(part: memoryview) -> int:
                        nonlocal rest
                        part[:] = rest[: len(part)]
                        rest = rest[len(part) :]
                        return len(part)

                    with suppress(ElasticTrainError):
                        # Damaged bytes are refused.
                        replicas.take(Put(found.facts, found.layout, digests), go=lambda: None, receive=receive)
                    rest.release()

    def flip(self, kind: str, machine: int, *, place: int, share: float) -> None:
        """Flip a bit in the newest snapshot (`own`) or `replica` of a machine."""
        folder = str(self._folder / f"m{machine}")
        held = [one for one in look(folder, host=0) if one.replica == (kind == "replica")]
        newest = max((one.facts.step for one in held), default=0)
        if chosen := [one for one in held if one.facts.step == newest]:
            one = chosen[place % len(chosen)]
            places = [*_chunk_places(load_layout(folder, one.facts.layout))]
            if places:
                flip_bit(Path(folder, one.slot), places[int(share * (len(places) - 1))])


def _chunk_places(layout: RankLayout) -> Iterator[int]:
    """Where the bytes of tensors are: the rest of a slot is a header, or unused."""
    for file, base in zip(layout.template, layout.starts, strict=True):
        for chunk in (chunk for placed in file.items for chunk in placed.chunks):
            yield from range(HEADER_BYTES + base + chunk.start, HEADER_BYTES + base + chunk.start + chunk.size_bytes)


def flip_bit(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def close(job: SaveJob) -> None:
    """Let go of its slots."""
    for leased in job.snapshots:
        leased.slot.close()
