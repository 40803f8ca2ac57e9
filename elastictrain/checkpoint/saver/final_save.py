"""When the saver ends, and what it saves from host memory before that."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from elastictrain.checkpoint.folders import list_checkpoints
from elastictrain.checkpoint.lineage import Lineage
from elastictrain.checkpoint.memory.folder import Held
from elastictrain.checkpoint.memory.records import load_digests
from elastictrain.checkpoint.run_folder import RunFolder
from elastictrain.checkpoint.saver.commit_protocol import PENDING, CommitProtocol, steps_begun
from elastictrain.checkpoint.saver.messages import HostRanks
from elastictrain.checkpoint.saver.pending_snapshots import Cause, LeasedSnapshot, cause_of, lease
from elastictrain.checkpoint.saver.process import SaverConfig
from elastictrain.errors import ElasticTrainError, InvalidCheckpointError, TransientStorageError
from elastictrain.lease.chain import Starts
from elastictrain.storage.opening import check_writable
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

ALONE_S = 60.0  # lifetime of a saver that no worker ever connected to: the worker that started it may have died at once
KEPT_S = 12 * 3600.0  # how long snapshots that storage refuses stay in host memory after all workers: a person may need a night

Decision = Literal["stay", "flush", "keep", "leave"]


@dataclass(frozen=True, slots=True)
class SaverClients:
    """State of a saver's clients and saves: the input of `decide`."""

    workers: int
    agents: int  # processes that would restart workers; without torchrun the workers themselves
    ever: bool  # whether a worker ever connected
    age_s: float
    saving: bool
    finished: bool  # whether the run is complete
    flushed: bool  # whether all that only host memory had has been written, or cannot be now
    unsaved: bool = False  # whether storage refused some of it, which is kept for a while
    asked: bool = False  # whether a launcher at its end waits for the final save


def decide(life: SaverClients) -> Decision:
    """A saver stays as long as a worker may connect again, and leaves nothing unwritten."""
    if life.saving or life.workers:
        return "stay"
    if life.finished:
        return "leave"
    if not life.asked and (life.agents or (not life.ever and life.age_s < ALONE_S)):
        return "stay"
    if not life.flushed:
        return "flush"
    if life.unsaved:
        return "keep"
    return "stay" if life.asked else "leave"


_PAUSE_S = 0.25
_STORAGE_PAUSE_S = 1.0
_AGAIN = 5  # times `grace_s`, for a first host that is alive and has chosen a step that is not whole here


def whole_here(held: Sequence[Held], host_ranks: HostRanks) -> list[tuple[Held, ...]]:
    """Steps that could be saved from this host's memory, newest first, each in the order of its ranks. Pure.

    A host that holds all ranks takes any incarnation: the last one may have ended before its first snapshot. One of several
    hosts takes only steps of the last incarnation, the only one whose ranks on this host are known.
    """
    found: dict[tuple[int, str, int], dict[int, Held]] = {}
    for one in held:
        facts = one.facts
        found.setdefault((facts.step, facts.incarnation, facts.world_size), {})[facts.rank] = one
    whole = []
    for (_, incarnation, world_size), ranks in sorted(found.items(), reverse=True, key=lambda pair: pair[0]):
        ours = set(host_ranks.ranks) if incarnation == host_ranks.incarnation else set(range(world_size))
        if ranks.keys() >= ours:
            whole.append(tuple(ranks[rank] for rank in sorted(ours)))
    return whole


def last_host_ranks(held: Sequence[Held], *, run: str) -> HostRanks | None:
    """The ranks that left these snapshots, derived from the snapshots alone; None if there are none. Pure."""
    facts = [one.facts for one in held if not one.replica and one.facts.run == run]
    last = max(facts, key=lambda one: one.incarnation, default=None)
    if last is None:
        return None
    ranks = {one.rank for one in facts if one.incarnation == last.incarnation}
    return HostRanks(last.incarnation, last.world_size, tuple(sorted(ranks)), from_worker=False)


def last_with_snapshots(incarnations: Sequence[HostRanks], held: Sequence[Held]) -> HostRanks:
    """The newest of `incarnations` (the newest first) that has a whole step here, or else the newest one: that may have ended
    before its first snapshot. Pure."""
    return next((one for one in incarnations if whole_here(held, one)), incarnations[0])


def choose_final_save(
    store: Store,
    host_ranks: HostRanks,
    held: Sequence[Held],
    *,
    done: Collection[int],
    config: SaverConfig,
    needed_no_more: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Held, ...]:
    """Choose the snapshots of the step to save; none if storage has all whole steps, or once it is `needed_no_more`.

    The leader takes its newest step. The other hosts wait until the leader begins a step that they have, and refuse one that
    they lack, unless their part of it is `done`. Unreachable storage is waited for, too: these snapshots exist nowhere else.
    Raises: StorageError.
    """
    give_up_s = clock() + config.save_timeout_s
    while True:
        try:
            wanted = _wanted(store, host_ranks, held)
            break
        except TransientStorageError as error:
            if clock() > give_up_s or needed_no_more():
                raise
            logger.warning("snapshots in host memory wait for storage: %s", error)
        sleep(_STORAGE_PAUSE_S)
    if not wanted or needed_no_more():
        return ()
    if wanted[0][0].facts.rank == 0:
        return wanted[0]
    noted: set[int] = set()
    deadline_s = clock() + config.grace_s
    while clock() < deadline_s and not needed_no_more():
        try:
            begun = set(steps_begun((info.key for info in store.list(PENDING)), incarnation=host_ranks.incarnation))
            if noted - begun:
                # That save is over. If it failed, the leader tries an older step next.
                wanted = _wanted(store, host_ranks, held)
                noted &= begun
                deadline_s = clock() + config.grace_s
        except TransientStorageError as error:
            logger.warning("cannot see yet whether the first host saves: %s", error)
            begun = noted
        common = next((one for one in wanted if one[0].facts.step in begun), ())
        if common or not wanted:
            return common
        for step in sorted(begun - noted):
            noted.add(step)
            deadline_s = clock() + _AGAIN * config.grace_s
            if step not in done and step > wanted[-1][0].facts.step:
                # Incomplete here, because its writers were killed. The leader writes its own files before it reads this.
                protocol = CommitProtocol(store, host_ranks.incarnation, step, first_rank=min(host_ranks.ranks))
                protocol.refuse("it has no whole snapshot of this step")
        sleep(_PAUSE_S)
    if not needed_no_more():
        # The leader has not begun: it may have ended, or storage refuses its writes as well as this host's.
        check_writable(store)
    return ()


def _wanted(store: Store, host_ranks: HostRanks, held: Sequence[Held]) -> list[tuple[Held, ...]]:
    """Whole steps that storage lacks, newest first. Raises: StorageError."""
    folders = [folder for folder in list_checkpoints(store).folders if folder.has_manifest and not folder.quarantined]
    _, off_lineage = Lineage(store).lineage_first(folders)
    newest = max((folder.step for folder in folders if folder.name not in off_lineage), default=-1)
    whole = whole_here(held, host_ranks)
    # Memory may hold snapshots of a deleted run of the same name; their incarnations are unknown here.
    known = {
        *Starts(store).known(one[0].facts.incarnation for one in whole),
        *((host_ranks.incarnation,) if host_ranks.from_worker else ()),
    }
    return [one for one in whole if one[0].facts.step > newest and one[0].facts.incarnation in known]


_LETTING_GO_S = 2.0
_RETRY_S, _RETRY_AT_MOST_S = 5.0, 60.0  # between two tries to write what storage refused: each pause doubles
AGAIN_S = 1.0  # until a refused step is tried again


class FinalSaveLoop:
    """Searches for unsaved snapshots while no worker is connected. Only the search runs in a thread of its own."""

    def __init__(
        self,
        store: Store,
        config: SaverConfig,
        folder: str,
        *,
        begin: Callable[[tuple[LeasedSnapshot, ...]], None],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        """`begin` has the snapshots of one step written; it runs in a task that is passed to `later`."""
        self._store = store
        self._run_folder = RunFolder(store)
        self._config = config
        self._folder = folder
        self._begin = begin
        self._later = later
        self._since_s: float | None = None
        self._tried: set[tuple[str, int]] = set()
        self._pause_s = 0.0
        self.busy = False
        self.over = False  # whether all that only host memory had has been written, or cannot be now
        self.unsaved = False  # whether storage refused some of it, which is kept for another try
        self._refused = ""  # storage error of a step in this round; empty if there was none
        self._retry_s = _RETRY_S
        self._next_s = 0.0

    def interrupt(self) -> None:
        """A worker has connected: the next final save begins anew."""
        self._since_s = None
        self._retry_s = _RETRY_S
        self._begin_round()

    def try_again(self) -> None:
        if time.monotonic() >= self._next_s:
            self._begin_round()

    def _begin_round(self) -> None:
        self._tried.clear()
        self._refused = ""
        self.over = self.unsaved = False

    def look(self, incarnations: Sequence[HostRanks], held: Sequence[Held]) -> None:
        """Begin to search for what is to be saved among the snapshots of this host, which has taken part in `incarnations`,
        newest first."""
        # The last saver was killed with its workers and none has connected to this one: the snapshots identify their ranks.
        derived = last_host_ranks(held, run=self._config.run)
        candidates = [*incarnations] or ([derived] if derived is not None else [])
        if not candidates:
            self.over = True
            return
        since_s = self._since_s = time.monotonic() if self._since_s is None else self._since_s
        own = [one for one in held if not one.replica and one.facts.run == self._config.run]
        own = [one for one in own if (one.facts.incarnation, one.facts.step) not in self._tried]
        whose = last_with_snapshots(candidates, own)
        done = {step for incarnation, step in self._tried if incarnation == whose.incarnation}
        pause_s, self._pause_s = self._pause_s, 0.0
        self.busy = True

        def choose() -> None:
            """In a thread of its own: passes what it found, or what storage refused, to `_on_found` through `later`."""
            found: tuple[Held, ...] = ()
            refused = ""
            time.sleep(pause_s)
            try:
                if self._run_folder.is_there():
                    found = choose_final_save(
                        self._store,
                        whose,
                        own,
                        done=done,
                        config=self._config,
                        needed_no_more=lambda: self._since_s != since_s,
                    )
            except Exception as error:
                # The edge of the thread.
                if not isinstance(error, ElasticTrainError):
                    logger.exception("what is in memory only cannot be saved")
                logger.warning("snapshots in host memory cannot be saved: %s", error)
                refused = str(error) if cause_of(error) is not Cause.OTHER else ""
            self._later(lambda: self._on_found(found, since_s, refused))

        threading.Thread(target=choose, name="flush", daemon=True).start()

    def failed(self, incarnation: str, step: int, *, cause: Cause, error: str = "") -> None:
        """A step was not saved. Within `save_timeout_s` a passing cause has it tried again; otherwise, unless the cause is
        OTHER, `error` is noted: storage refuses what only host memory has."""
        if (
            cause is Cause.PASSING
            and self._since_s is not None
            and time.monotonic() - self._since_s < self._config.save_timeout_s
        ):
            # No worker would try again, and an older step would fare no better.
            self._tried.discard((incarnation, step))
            self._pause_s = AGAIN_S
        elif cause is not Cause.OTHER:
            self._refused = error or self._refused

    def _on_found(self, found: Sequence[Held], since_s: float, refused: str) -> None:
        self.busy = False
        if self._since_s != since_s:
            return
        self._refused = refused or self._refused
        if found:
            self._tried.add((found[0].facts.incarnation, found[0].facts.step))
            self._save(found)
            return
        # All steps were tried. What storage refused stays in memory for a while: it exists nowhere else.
        self.over = True
        left_s = since_s + KEPT_S - time.monotonic()
        self.unsaved = bool(self._refused) and left_s > 0
        if self._refused:
            what = f"is kept for {left_s / 3600:.1f} h more" if self.unsaved else "is given up"
            logger.warning("what storage refused %s: %s", what, self._refused)
        self._next_s = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _RETRY_AT_MOST_S)

    def _save(self, chosen: Sequence[Held]) -> None:
        """Save the newest whole step, or else the one before it: all workers have ended, and host memory may be lost soon."""
        leased: list[LeasedSnapshot] = []
        # A slot in use becomes free later; an unreadable one does not change, and the step before it need not wait.
        cause = Cause.PASSING
        for held in chosen:
            try:
                # A worker that is being killed disconnects a moment before its slots are released.
                one = lease(self._folder, held.slot, wait_s=_LETTING_GO_S)
                if one is None:
                    break
                leased.append(one)
                if one.facts != held.facts:
                    raise InvalidCheckpointError(f"{held.slot} holds another snapshot now")
            except (OSError, InvalidCheckpointError) as error:
                logger.warning("%s cannot be read: %s", held.slot, error)
                cause = Cause.OTHER
                break
        else:
            logger.warning("all workers have exited: saving step %d from host memory", chosen[0].facts.step)
            self._begin(tuple(replace(one, digests=load_digests(one.slot.path, one.facts)) for one in leased))
            return
        for one in leased:
            one.slot.close()
        self.failed(chosen[0].facts.incarnation, chosen[0].facts.step, cause=cause)
