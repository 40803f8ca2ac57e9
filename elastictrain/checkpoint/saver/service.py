"""The saver's main loop: reacts to worker messages, finished writes, and the end of the workers."""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from elastictrain.checkpoint.memory.folder import SlotName, look, remove_slot, slot_names
from elastictrain.checkpoint.saver import messages
from elastictrain.checkpoint.saver.commit_protocol import Deadline, RefusedSave
from elastictrain.checkpoint.saver.connections import WorkerConnection, WorkerConnections
from elastictrain.checkpoint.saver.event_log import SaverEventLogs, SlowSaves
from elastictrain.checkpoint.saver.final_save import FinalSaveLoop, SaverClients, decide
from elastictrain.checkpoint.saver.messages import HostRanks, MalformedError, Saved, SaveFailure, ToSaver, is_past
from elastictrain.checkpoint.saver.pending_snapshots import (
    Cause,
    IncarnationSaves,
    LeasedSnapshot,
    SaveJob,
    lease,
    with_digests,
)
from elastictrain.checkpoint.saver.process import SaverConfig
from elastictrain.checkpoint.saver.replication import ReplicaService
from elastictrain.checkpoint.saver.snapshot_writer import SaveOutcome, SnapshotWriter
from elastictrain.checkpoint.signing import SigningKey, proof_of
from elastictrain.errors import InvalidCheckpointError
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

_TURN_S = 0.5
_INCARNATIONS = 16  # whose ranks are remembered
DIGEST_SHARE = 0.01  # of the time: digests of snapshots that are not to be saved


class SaverService:
    """Saves the snapshots of one run on one host. State belongs to the thread that calls `run`; others queue tasks for it."""

    def __init__(self, folder: str, config: SaverConfig, store: Store, *, signing: SigningKey | None = None) -> None:
        """`signing`: the key that `config` names; it signs checkpoints, and only workers with the same key are served."""
        self._proof = proof_of(signing)
        self._folder = folder
        self._config = config
        self._store = store
        self._began_s = time.monotonic()
        self._saves: IncarnationSaves | None = None  # of the present incarnation
        self._incarnations: list[HostRanks] = []  # the newest first
        self._event_logs = SaverEventLogs(store, config)
        self._workers = WorkerConnections(folder, on_message=self._on_message, on_gone=self._on_gone)
        self._tasks: deque[Callable[[], None]] = deque()
        self._digest_thread = ThreadPoolExecutor(1, thread_name_prefix="digest")
        self._num_digesting = 0
        self._digest_due_s = 0.0  # earliest time of the next digest that no save needs; monotonic
        self._undigested: dict[SlotName, None] = {}  # the newest last
        self._left: set[str] = set()  # incarnations that others have followed
        self._ever = self._finished = False
        self._lost = False  # whether the present group is broken: other hosts may have ended, too
        self._final_save = FinalSaveLoop(store, config, folder, begin=self._begin, later=self._later)
        self._slow = SlowSaves()
        self._missing: dict[int, WorkerConnection] = {}
        self._jobs: set[SaveJob] = set()  # those that still need their snapshots
        self._writer = SnapshotWriter(
            store,
            config,
            record=self._event_logs.record,
            report=lambda job, outcome, cause: self._later(lambda: self._on_outcome(job, outcome, cause)),
            signing=signing,
        )
        self._replicas = ReplicaService(
            folder,
            config.run,
            record=self._event_logs.record,
            ended=lambda incarnation, step, whole: self._later(lambda: self._on_sent(incarnation, step, whole)),
        )

    @property
    def _incarnation(self) -> str:
        return self._saves.host_ranks.incarnation if self._saves is not None else ""

    def run(self) -> None:
        """Serve until `decide` says to leave; then close the logs, threads and sockets."""
        while True:
            self._workers.turn(_TURN_S)
            while self._tasks:
                self._tasks.popleft()()
            self._digest_newest()
            under_way = self._writer.under_way
            slow = self._slow.look(under_way)
            if under_way is not None and slow is not None:
                self._event_logs.record(under_way[0].incarnation, slow)
                self._workers.send_all(messages.SlowSave(slow.step, round(slow.seconds), slow.trouble or ""))
            if self._ever and not self._workers.connections and not self._workers.agents:
                self._writer.shorten_deadline()
            life = self._life()
            if life.flushed and not life.saving and not life.unsaved:
                # Refused snapshots are tried again, so launchers wait for them, too.
                for one in self._workers.asking:
                    if not one.told_flushed:
                        one.told_flushed = True
                        self._workers.send(one, messages.Flushed())
            decision = decide(life)
            if decision == "flush":
                self._final_save.look(self._incarnations, look(self._folder, host=0))
            elif decision == "keep":
                self._final_save.try_again()
            elif decision == "leave":
                for _ in range(2):
                    # A worker that has connected meanwhile needs it: one turn accepts it, one receives its hello.
                    self._workers.turn(0.0)
                if decide(self._life()) == "leave":
                    break
        self._workers.stop_listening()
        self._writer.close()
        self._replicas.close()
        self._event_logs.close()
        self._workers.close()
        self._digest_thread.shutdown(wait=False, cancel_futures=True)

    def _life(self) -> SaverClients:
        return SaverClients(
            workers=len(self._workers.connections),
            agents=len(self._workers.agents),
            ever=self._ever,
            age_s=time.monotonic() - self._began_s,
            saving=self._writer.busy or self._final_save.busy or self._num_digesting > 0 or bool(self._tasks),
            finished=self._finished,
            flushed=self._final_save.over,
            asked=bool(self._workers.asking),
            unsaved=self._final_save.unsaved,
        )

    def _later(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        self._workers.wake()

    def _on_message(self, one: WorkerConnection, message: ToSaver) -> None:
        match message:
            case messages.WorkerHello():
                self._on_hello(one, message)
            case messages.Goodbye():
                one.said_goodbye, one.asks_to_flush = True, False
            case messages.FlushRequest():
                one.said_goodbye, one.asks_to_flush = False, True
            case _ if one.rank >= 0 and one.incarnation == self._incarnation and self._saves is not None:
                self._on_worker_message(one, message, self._saves)
            case messages.RunFinished():
                # Of a past incarnation: snapshots of the present one are still needed.
                pass
            case _:
                raise MalformedError("the sender is no worker of the present incarnation")

    def _on_worker_message(self, one: WorkerConnection, message: ToSaver, saves: IncarnationSaves) -> None:
        match message:
            case messages.SnapshotTaken():
                if message.durable:
                    saves.announced(message.step)
                error = self._take(one.rank, message.slot, message.step)
                # Also if the snapshot is unusable: its worker waits for this before it uses the slot again.
                self._workers.send(one, messages.SnapshotSeen(message.slot, message.step))
                if error:
                    logger.warning("%s", error)
                    if message.durable:
                        self._give_up(message.step, f"the snapshot of rank {one.rank}: {error}", saves)
            case messages.OldSlots():
                # All ranks have a whole snapshot of this incarnation. Each lists its own slots.
                for name in slot_names(self._folder):
                    unused = name.rank == one.rank and not message.slots >> name.index & 1
                    if name.kind == "own" and (unused or name.rank not in saves.host_ranks.ranks):
                        remove_slot(self._folder, name)
                self._replicas.drop_others()
            case messages.RunFinished():
                self._finished = True
            case messages.SaverRoster():
                self._replicas.set_roster(message)
                self._workers.send(one, messages.RosterKnown())
            case messages.SendReplicas():
                self._replicas.send(message.step, incarnation=self._incarnation, safe=message.safe, unpaced=message.unpaced)
            case messages.StepTook():
                self._replicas.step_took(message.micros / 1e6)

    def _on_hello(self, one: WorkerConnection, hello: messages.WorkerHello) -> None:
        if hello.key != self._proof:
            raise MalformedError("the saver on this host was started with another `checkpoint.key_env`, and has not ended yet")
        connected = any(other.incarnation == self._incarnation for other in self._workers.connections)
        if is_past(hello.incarnation, present=self._incarnation, left=self._left, connected=connected):
            raise MalformedError(f"incarnation {hello.incarnation} is past: {self._incarnation} has begun")
        if self._saves is None or hello.incarnation != self._incarnation:
            self._left.add(self._incarnation)
            self._writer.shorten_deadline()
            self._lost = False
            if self._saves is not None:
                for step in list(self._saves.waiting):
                    self._saves.give_up(step)
            # It may resume from an older step than the last one that its predecessor saved.
            self._saves = IncarnationSaves(hello.host_ranks)
            self._incarnations = [hello.host_ranks, *self._incarnations][:_INCARNATIONS]
            self._event_logs.move_to(hello.host_ranks)
            self._replicas.begin_incarnation()
        one.rank, one.incarnation = hello.rank, hello.incarnation
        self._missing.pop(hello.rank, None)
        self._ever, self._finished = True, False
        self._final_save.interrupt()
        self._workers.watch(hello.agent)
        listening = self._replicas.listen(hello.address, port=hello.port)
        self._workers.send(one, messages.SaverWelcome(os.getpid(), listening))
        for outcome in list(self._saves.outcomes.values()):
            # It may have been sent while this worker was not connected.
            self._workers.send(one, outcome)
        # The successor of a killed saver learns from the slots what workers announced to its predecessor.
        self._take_all(hello.rank)

    def _on_gone(self, one: WorkerConnection) -> None:
        if one.incarnation != self._incarnation:
            return
        # Its last act may have been a snapshot.
        self._take_all(one.rank)
        here = any(other.rank == one.rank and other.incarnation == one.incarnation for other in self._workers.connections)
        if not one.said_goodbye and not here:
            # It may only have disconnected: then it connects again.
            self._missing[one.rank] = one

            def ended() -> None:
                if self._missing.get(one.rank) is one:
                    del self._missing[one.rank]
                    self._lost = True
                    self._writer.shorten_deadline()
                    self._workers.send_all(messages.RankLost(one.rank))

            self._workers.when_ended(one.pid, ended)

    def _take_all(self, rank: int) -> None:
        names = {str(name): name for name in slot_names(self._folder) if name.kind == "own" and name.rank == rank}
        held = [(one.facts.step, one.slot) for one in look(self._folder, host=0) if one.slot in names]
        # In the order of the steps, or the older ones would look overtaken.
        for _, slot in sorted(held):
            self._take(rank, names[slot].index, None)

    def _digest_newest(self) -> None:
        """Digest what no save needs, if enough time has passed since the last one."""
        if self._undigested and self._may_digest():
            name = next(reversed(self._undigested))
            self._take(name.rank, name.index, None)

    def _may_digest(self) -> bool:
        # Without workers it slows nothing. One at a time: the next generation needs the slots.
        return self._num_digesting == 0 and (time.monotonic() >= self._digest_due_s or not self._workers.connections)

    def _take(self, rank: int, index: int, step: int | None) -> str:
        """Lease a snapshot and have it digested; returns why it is unusable, empty if it is usable.

        Unless it is to be saved, it is digested only if enough time has passed since the last digest. Most snapshots are
        overwritten unread, and whatever reads one computes the digests that are missing.
        """
        name = SlotName("own", rank, index)
        self._undigested.pop(name, None)
        try:
            leased = lease(self._folder, str(name))
        except (OSError, InvalidCheckpointError) as error:
            return f"{name} cannot be read: {error}"
        if leased is None:
            return f"{name} holds nothing whole"
        facts = leased.facts
        if facts.incarnation != self._incarnation or facts.rank != rank or (step is not None and facts.step != step):
            leased.slot.close()
            return f"{name} holds another snapshot"
        later = not facts.reason and not self._may_digest()
        if later:
            # Its worker may overwrite it meanwhile.
            self._undigested[name] = None
            leased.slot.close()

        def digest() -> None:
            # Also without digests: one thread keeps the order in which the snapshots were announced.
            began_s = time.monotonic()
            digested = leased if later else with_digests(leased)
            if not facts.reason and not later:
                self._digest_due_s = time.monotonic() + (time.monotonic() - began_s) * (1 / DIGEST_SHARE - 1)
            self._later(lambda: self._on_digested(digested))

        self._num_digesting += 1
        self._digest_thread.submit(digest)
        return ""

    def _give_up(self, step: int, error: str, saves: IncarnationSaves) -> None:
        """Fail a step that cannot become durable: notify its workers and the leader, and release its snapshots."""
        saves.give_up(step)
        self._send_outcome(SaveFailure(step, error), saves)
        host_ranks = saves.host_ranks
        if 0 not in host_ranks.ranks:
            deadline = Deadline(self._config.save_timeout_s)
            self._writer.begin(RefusedSave(host_ranks.incarnation, step, min(host_ranks.ranks), error, deadline))

    def _send_outcome(self, outcome: Saved | SaveFailure | messages.SlotsReleased, saves: IncarnationSaves) -> None:
        """Send a step's outcome to all workers, and keep it for one that is not connected now."""
        saves.sent(outcome.step, outcome)
        self._workers.send_all(outcome)

    def _on_digested(self, leased: LeasedSnapshot) -> None:
        self._num_digesting -= 1
        facts, saves = leased.facts, self._saves
        if saves is None or facts.incarnation != self._incarnation:
            leased.slot.close()
            return
        saves.newest[facts.rank] = max(facts.step, saves.newest.get(facts.rank, -1))
        if saves.is_wanted(facts):
            if whole := saves.arrived(leased):
                self._begin(whole)
        else:
            leased.slot.close()
        for step in saves.overtaken():
            self._give_up(step, "a rank has no snapshot of this step", saves)

    def _on_outcome(self, job: SaveJob, outcome: SaveOutcome, cause: Cause) -> None:
        """Handle a report of the writer: it has released a job's snapshots, or knows the outcome of the step."""
        # The next incarnation may reach the same step.
        saves = self._saves if job.incarnation == self._incarnation else None
        if job in self._jobs:
            self._jobs.remove(job)
            for leased in job.snapshots:
                leased.slot.close()
            released = messages.SlotsReleased(job.step, done=not job.leader)
            if saves is not None and job.leader:
                self._workers.send_all(released)
            elif saves is not None:
                # Only the leader learns the outcome of the step: for the ranks of other hosts it ends here.
                saves.done_here.add(job.step)
                self._send_outcome(released, saves)
        if isinstance(outcome, SaveFailure):
            logger.warning("step %d could not be saved: %s", job.step, outcome.error)
            self._final_save.failed(job.incarnation, job.step, cause=cause, error=outcome.error)
            if saves is not None:
                saves.failed(job.step)
                if job.leader:
                    self._send_outcome(outcome, saves)
        elif isinstance(outcome, Saved) and saves is not None:
            saves.saved_step = max(saves.saved_step, job.step)
            self._send_outcome(outcome, saves)

    def _on_sent(self, incarnation: str, step: int, whole: bool) -> None:
        if incarnation == self._incarnation:
            self._workers.send_all(messages.ReplicasSent(step, whole))

    def _begin(self, snapshots: tuple[LeasedSnapshot, ...]) -> None:
        job = SaveJob(snapshots, Deadline(self._config.save_timeout_s))
        saves = self._saves if job.incarnation == self._incarnation else None
        if saves is not None:
            saves.handed_over.add(job.step)
        if self._lost or saves is None:
            job.deadline.shorten()
        self._jobs.add(job)
        self._writer.begin(job)
