"""Restores from the memory of hosts: finds the steps that are complete there, and reads them like a checkpoint."""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import KW_ONLY, dataclass, replace
from typing import TypeAlias

import torch.distributed as dist

from elastictrain.checkpoint.copier import Arena
from elastictrain.checkpoint.exchange import gather_json, gather_records
from elastictrain.checkpoint.manifest import Manifest
from elastictrain.checkpoint.manifest_format import check_manifest
from elastictrain.checkpoint.memory.folder import Held, SnapshotSet, look, whole_sets
from elastictrain.checkpoint.memory.layout import RankPart
from elastictrain.checkpoint.memory.records import compute_digests, load_digests, load_layout
from elastictrain.checkpoint.memory.slot import ReadSnapshot, Slot, SnapshotFacts, SnapshotSource
from elastictrain.checkpoint.saver.commit_protocol import decode_parts, encode_parts
from elastictrain.checkpoint.verified_read import READ_THREADS
from elastictrain.checkpoint.writer import build_manifest
from elastictrain.errors import ElasticTrainError, InvalidCheckpointError

logger = logging.getLogger(__name__)

_LETTING_GO_S = 2.0
_SIDE_BY_SIDE = 4  # snapshots whose digests are computed at once; each reads its files in parallel, too

RemoteReader: TypeAlias = Callable[[Held], ReadSnapshot]  # of another host's snapshot. Raises: ElasticTrainError


@dataclass(frozen=True, slots=True)
class FromMemory:
    """A snapshot set, readable like a checkpoint."""

    manifest: Manifest
    source: SnapshotSource
    replicas: bool


@dataclass(frozen=True, slots=True)
class _HostSnapshots:
    """One rank's report: its host and, from one rank of each host, the snapshots there."""

    host: int
    held: tuple[Held, ...]


@dataclass
class MemoryRestore:
    """The memory tiers at the start of one incarnation. Methods marked as collective are so over `group`."""

    folder: str
    _: KW_ONLY
    run: str
    host: int  # the first rank of this host
    lists_host_memory: bool
    group: dist.ProcessGroup | None
    remote: RemoteReader | None
    names: Sequence[str] = ()  # host names by rank
    arena: Arena | None = None  # slots that this process has mapped

    def __post_init__(self) -> None:
        self._rank = 0 if self.group is None else dist.get_rank(self.group)
        self._hosts: list[int] = []
        self.held: list[Held] = []  # all snapshots of this run that are not forgotten; the same on all ranks
        self._off_lineage: frozenset[tuple[str, int]] = frozenset()
        self._digested: set[int] = set()  # ranks whose snapshots this process has digested to open the present set

    def look(self) -> None:
        """List the snapshots on all hosts. Collective: yes."""
        own = tuple(look(self.folder, host=self.host)) if self.lists_host_memory else ()
        told = gather_records(_HostSnapshots(self.host, own), group=self.group)
        self._hosts = [one.host for one in told]
        self.held = [held for one in told for held in one.held if held.facts.run == self.run]

    def name_of(self, held: Held) -> str:
        return self.names[held.host] if held.host < len(self.names) else f"number {held.host}"

    def best(self) -> SnapshotSet | None:
        """The best complete step. Collective: no; the same on all ranks."""
        return next(iter(self.whole()), None)

    def whole(self) -> tuple[SnapshotSet, ...]:
        """All complete steps, the best one first. Collective: no; the same on all ranks."""
        return whole_sets(self.held, run=self.run, off_lineage=self._off_lineage)

    def tier(self, recalled: FromMemory) -> str:
        """`peer` if any rank read a replica or another host's snapshot, else `memory`. Collective: yes."""
        return "peer" if any(gather_json(recalled.replicas or recalled.source.remote, group=self.group)) else "memory"

    def keep(self, incarnations: Collection[str], *, off_lineage: Iterable[tuple[str, int]]) -> None:
        """Drop the snapshots of other incarnations; those `off_lineage` (incarnation, step) count last."""
        self.held = [one for one in self.held if one.facts.incarnation in incarnations]
        self._off_lineage = frozenset(off_lineage)

    def forget(self, held: Held) -> None:
        """Drop a snapshot that is damaged or out of reach."""
        self.held = [one for one in self.held if (one.host, one.slot) != (held.host, held.slot)]

    def open(self, chosen: SnapshotSet) -> FromMemory | Held:
        """Open the first source of each rank's snapshot; returns the one that cannot be read, if any. Collective: yes."""
        self._digested.clear()
        primary = [sources[0] for sources in chosen.sources]
        # Each snapshot's layout and digests come from a rank of the host that holds it.
        own = [held for held in primary if teller(held, hosts=self._hosts) == self._rank]
        with ThreadPoolExecutor(_SIDE_BY_SIDE, thread_name_prefix="tell") as pool:
            told = [part for part in pool.map(self._tell, own) if part is not None]
        parts: dict[int, RankPart] = {}
        for text in gather_json(encode_parts(told).decode(), group=self.group):
            try:
                decoded = decode_parts(str(text).encode(), where="a snapshot")
                parts |= {part.rank: part for part in decoded if isinstance(part, RankPart)}
            except InvalidCheckpointError as error:
                logger.warning("the records of snapshots cannot be read: %s", error)
        if missing := [held for rank, held in enumerate(primary) if rank not in parts]:
            return missing[0]
        for rank in self._digested & parts.keys():
            # Bytes that this process has just digested it need not digest again.
            parts[rank] = replace(parts[rank], digests=parts[rank].layout.digests_of_headers())
        known = [parts[rank] for rank in range(len(primary))]
        try:
            facts = chosen.sources[0][0].facts  # as rank 0 recorded them
            about = Manifest(
                facts.step, facts.world_size, facts.incarnation, facts.created, facts.config_digest, {}, facts.state
            )
            manifest = build_manifest(known, facts=about)
            check_manifest(manifest)
        except (ElasticTrainError, ValueError) as error:
            logger.warning("the snapshots of step %d do not fit together: %s", chosen.step, error)
            return primary[0]
        source = SnapshotSource(f"memory:{self.folder}")
        culprit = self._fill(source, primary, known)
        culprits = [found for found in gather_json(culprit, group=self.group) if isinstance(found, int)]
        if culprits:
            source.resources.close()
            return primary[min(culprits)]
        return FromMemory(manifest, source, replicas=any(held.replica for held in primary))

    def _tell(self, held: Held) -> RankPart | None:
        path = f"{self.folder}/{held.slot}"
        try:
            layout = load_layout(self.folder, held.facts.layout)
            with closing(_open_soon(path, held.facts)) as slot:
                digests = load_digests(path, held.facts)
                if digests is None and len(set(self._hosts)) > 1:
                    # Another host may read it, through a network. The saver was killed, or has not computed them yet.
                    mapped = self.arena.mapped(path) if self.arena is not None else None
                    digests = compute_digests(slot, layout, threads=READ_THREADS, whole_files=False, mapped=mapped)
                    self._digested.add(held.facts.rank)
                elif digests is None:
                    # One that is computed now would match whatever is there, and so find nothing.
                    digests = layout.digests_of_headers()
        except (OSError, ElasticTrainError, ValueError) as error:
            logger.warning("%s cannot be used: %s", path, error)
            return None
        return RankPart(held.facts.rank, layout, digests)

    def _fill(self, source: SnapshotSource, primary: Sequence[Held], parts: Sequence[RankPart]) -> int | None:
        """Add all snapshots to `source`; returns the rank whose snapshot cannot be opened here, if any."""
        for rank, (held, part) in enumerate(zip(primary, parts, strict=True)):
            here, mapped = held.host == self.host, None
            try:
                if here:
                    slot = _open_soon(f"{self.folder}/{held.slot}", held.facts)
                    source.resources.callback(slot.close)
                    mapped = self.arena.mapped(slot.path) if self.arena is not None else None
                    read: ReadSnapshot = slot.read_snapshot
                elif self.remote is not None:
                    read = self.remote(held)
                else:
                    raise InvalidCheckpointError(f"{held.slot} is on a host that cannot be reached")
                incarnation = held.facts.incarnation
                source.add(part.layout, read, incarnation=incarnation, rank=rank, remote=not here, mapped=mapped)
            except (OSError, ElasticTrainError) as error:
                logger.warning("the snapshot of rank %d cannot be opened: %s", rank, error)
                return rank
        return None


def teller(held: Held, *, hosts: Sequence[int]) -> int:
    """The rank that describes a snapshot: its own rank if that runs on the host that holds it, else the first there. Pure."""
    rank = held.facts.rank
    return rank if rank < len(hosts) and hosts[rank] == held.host else hosts.index(held.host)


def ranks_of_files(names: Sequence[str], chosen: SnapshotSet) -> list[int]:
    """The ranks whose snapshots contain these files; all ranks if none is known. Pure."""
    prefixes = [f"{chosen.incarnation}-r{rank:05d}-" for rank in range(chosen.world_size)]
    ranks = [rank for rank, prefix in enumerate(prefixes) if any(name.startswith(prefix) for name in names)]
    return ranks or list(range(chosen.world_size))


def _open_soon(path: str, facts: SnapshotFacts) -> Slot:
    """The slot with this snapshot; waits until a dying writer unlocks it. Raises: OSError; InvalidCheckpointError."""
    slot = Slot.hold(path, wait_s=_LETTING_GO_S)
    if slot is None:
        raise InvalidCheckpointError(f"{path} is held by a worker that has not ended yet")
    with ExitStack() as undo:
        undo.callback(slot.close)
        if slot.facts != facts:
            raise InvalidCheckpointError(f"{path} holds another snapshot now")
        undo.pop_all()
    return slot
