"""The saver at work: what it does when a worker says something, when something is written, and when all are gone."""

import logging
import os
import time
from collections import deque
from collections.abc import Callable

from elastictrain.checkpoint.memory.folder import SlotName, look, remove_slot, slot_names
from elastictrain.checkpoint.saver.commit_protocol import Deadline
from elastictrain.checkpoint.saver.connections import WorkerConnection, WorkerConnections
from elastictrain.checkpoint.saver.event_log import SaverEventLogs, SlowSaves
from elastictrain.checkpoint.saver.final_save import FinalSaveLoop, SaverClients, decide
from elastictrain.checkpoint.saver.messages import MalformedError, Message, RunFacts, count, is_past, read_hello
from elastictrain.checkpoint.saver.pending_snapshots import (
    Cause,
    DigestThread,
    LeasedSnapshot,
    PendingSnapshots,
    RefusedSave,
    SaveJob,
    SlotLeases,
    StepOutcomes,
)
from elastictrain.checkpoint.saver.replication import ReplicaService
from elastictrain.checkpoint.saver.snapshot_writer import SaveCallbacks, SnapshotWriter
from elastictrain.checkpoint.signing import SigningKey, proof_of
from elastictrain.errors import InvalidCheckpointError
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

_TURN_S = 0.5


class SaverService:
    """Keeps the snapshots of one run on one host. Its thread is the one that calls `run`; others only leave tasks for it."""

    def __init__(
        self,
        folder: str,
        facts: RunFacts,
        store: Store,
        *,
        clock: Callable[[], float] = time.monotonic,
        signing: SigningKey | None = None,
    ) -> None:
        """`signing` signs checkpoints; it is the key that `facts` names, and only workers with the same one are served."""
        self._proof = proof_of(signing)
        self._folder = folder
        self._facts = facts
        self._store = store
        self._clock = clock
        self._began_s = clock()
        self._pending = PendingSnapshots()
        self._leases = SlotLeases(folder)
        self._event_logs = SaverEventLogs(store, facts)
        self._workers = WorkerConnections(folder, on_message=self._on_message, on_gone=self._on_gone)
        self._tasks: deque[Callable[[], None]] = deque()
        self._digest_thread = DigestThread(lambda leased: self._later(lambda: self._on_digested(leased)))
        self._num_digesting = 0
        self._left: set[str] = set()
        """Incarnations that others have followed."""
        self._ever = self._finished = False
        self._lost = False
        """Whether the group of the present incarnation is broken: other hosts may be gone, too."""
        self._outcomes = StepOutcomes()
        """Of the present incarnation."""
        self._final_save = FinalSaveLoop(store, facts, self._leases, begin=self._begin, later=self._later, clock=clock)
        self._slow = SlowSaves()
        self._missing: dict[int, WorkerConnection] = {}
        self._held: dict[tuple[str, int], tuple[LeasedSnapshot, ...]] = {}
        self._writer = SnapshotWriter(
            store,
            facts,
            SaveCallbacks(
                record=self._event_logs.record,
                written=lambda job: self._later(lambda: self._let_go(job)),
                saved=lambda job, name, size: self._later(lambda: self._on_saved(job, name, size)),
                failed=lambda job, error, cause: self._later(lambda: self._on_failed(job, error, cause)),
            ),
            signing=signing,
        )
        self._replicas = ReplicaService(
            folder,
            facts.run,
            record=self._event_logs.record,
            ended=lambda incarnation, step, whole: self._later(lambda: self._on_sent(incarnation, step, whole)),
        )

    @property
    def _incarnation(self) -> str:
        return self._pending.host_ranks.incarnation if self._pending.host_ranks is not None else ""

    def run(self) -> None:
        """Until nobody needs a saver any more; then nothing of the run is left in host memory."""
        self._writer.start()
        while True:
            self._workers.turn(_TURN_S)
            while self._tasks:
                self._tasks.popleft()()
            self._watch_save()
            if self._ever and not self._workers.connections and not self._workers.agents:
                self._writer.shorten_deadline()
            life = self._life()
            self._tell_flushed(life)
            decision = decide(life)
            if decision == "flush":
                self._final_save.look(self._pending.host_ranks, look(self._folder, host=0))
            elif decision == "keep":
                self._final_save.try_again()
            elif decision == "leave" and self._nobody_at_the_door():
                break
        self._workers.stop_listening()
        self._writer.close()
        self._replicas.close()
        self._event_logs.close()
        self._workers.close()
        self._digest_thread.close()
        self._leases.close()

    def _nobody_at_the_door(self) -> bool:
        """Whether it is still to leave after a last look: who came in the meantime needs what is here."""
        for _ in range(2):
            # One to let somebody in, one to hear who it is.
            self._workers.turn(0.0)
        return decide(self._life()) == "leave"

    def _watch_save(self) -> None:
        """Tell of a save that takes long, once."""
        under_way = self._writer.under_way
        slow = self._slow.look(under_way)
        if under_way is not None and slow is not None:
            self._event_logs.record(under_way[0].incarnation, slow)
            self._workers.tell({"op": "slow", "step": slow.step, "seconds": round(slow.seconds), "trouble": slow.trouble or ""})

    def _life(self) -> SaverClients:
        return SaverClients(
            workers=len(self._workers.connections),
            agents=self._workers.agents,
            ever=self._ever,
            age_s=self._clock() - self._began_s,
            saving=self._writer.busy or self._final_save.busy or self._num_digesting > 0 or bool(self._tasks),
            finished=self._finished,
            flushed=self._final_save.over,
            asked=bool(self._workers.asking),
            unsaved=self._final_save.unsaved,
        )

    def _tell_flushed(self, life: SaverClients) -> None:
        """A launcher waits for nothing any more; what storage refuses it waits for, since it is tried again."""
        if life.saving or not life.flushed or life.unsaved:
            return
        for one in self._workers.asking:
            if not one.told_flushed:
                one.told_flushed = True
                self._workers.answer(one, {"op": "flushed"})

    def _later(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        self._workers.wake()

    def _on_message(self, one: WorkerConnection, message: Message) -> None:
        match message["op"]:
            case "hello":
                self._on_hello(one, message)
            case "snapshot":
                if one.rank < 0 or one.incarnation != self._incarnation:
                    raise MalformedError("a snapshot was announced by a worker of no living incarnation")
                slot, step = count(message, "slot"), count(message, "step")
                if message.get("durable"):
                    self._outcomes.announced(step)
                if (error := self._take(one.rank, slot, step)) and message.get("durable"):
                    self._give_up(step, f"the snapshot of rank {one.rank}: {error}")
            case "roster" | "replicate" | "send" | "step":
                self._on_peer_message(one, message)
            case "old":
                if one.rank < 0 or one.incarnation != self._incarnation:
                    raise MalformedError("slots were given up by a worker of no living incarnation")
                self._drop_old(one.rank, count(message, "slots"))
            case "finish":
                if one.rank >= 0 and one.incarnation == self._incarnation:
                    self._finished = True
            case "bye" | "flush" as op:
                one.said_goodbye, one.asks_to_flush = op == "bye", op == "flush"
            case other:
                raise MalformedError(f"{other!r} is no message to a saver")

    def _on_peer_message(self, one: WorkerConnection, message: Message) -> None:
        """What concerns other hosts."""
        if one.rank < 0 or one.incarnation != self._incarnation:
            raise MalformedError("a worker of no living incarnation speaks of other hosts")
        match message["op"]:
            case "roster":
                self._replicas.meet(message)
                self._workers.answer(one, {"op": "met"})
            case "replicate":
                self._replicas.switch(
                    on=bool(message.get("on")), unpaced=bool(message.get("unpaced")), incarnation=self._incarnation
                )
            case "send":
                self._replicas.send(count(message, "step"), incarnation=self._incarnation)
            case "step":
                self._replicas.step_took(count(message, "micros") / 1e6)

    def _on_hello(self, one: WorkerConnection, message: Message) -> None:
        hello = read_hello(message)
        if message.get("key", "") != self._proof:
            raise MalformedError("the saver on this host was started with another `checkpoint.key_env`, and has not ended yet")
        rank, host_ranks = hello.rank, hello.host_ranks
        connected = any(other.incarnation == self._incarnation for other in self._workers.connections)
        if is_past(host_ranks.incarnation, present=self._incarnation, left=self._left, connected=connected):
            raise MalformedError(f"incarnation {host_ranks.incarnation} is past: {self._incarnation} has begun")
        if host_ranks.incarnation != self._incarnation:
            self._left.add(self._incarnation)
            self._writer.shorten_deadline()
            self._lost = False
            self._outcomes.clear()
            for leased in self._pending.move_to(host_ranks):
                self._leases.release(leased)
            self._event_logs.move_to(host_ranks)
        one.rank, one.incarnation = rank, host_ranks.incarnation
        self._missing.pop(rank, None)
        self._ever, self._finished = True, False
        self._final_save.interrupt()
        self._workers.watch(hello.agent)
        listening = self._replicas.listen(hello.address, port=hello.port)
        self._workers.answer(one, {"op": "welcome", "pid": os.getpid(), "port": listening})
        for told in self._outcomes.to_tell_again:
            # It may have been said while this worker was not connected.
            self._workers.answer(one, told)
        # After a saver was killed its successor finds out from the slots what it would have been told.
        self._take_all(rank)

    def _on_gone(self, one: WorkerConnection) -> None:
        host_ranks = self._pending.host_ranks
        if host_ranks is None or one.incarnation != host_ranks.incarnation:
            return
        # The last thing that it did may have been a snapshot.
        self._take_all(one.rank)
        here = any(other.rank == one.rank and other.incarnation == one.incarnation for other in self._workers.connections)
        if not one.said_goodbye and not here:
            # It may have hung up only: then it comes again.
            self._missing[one.rank] = one
            self._workers.when_ended(one.pid, lambda: self._on_ended(one))

    def _on_ended(self, one: WorkerConnection) -> None:
        """The process of a worker that hung up without goodbye is gone."""
        if self._missing.get(one.rank) is one:
            del self._missing[one.rank]
            self._lost = True
            self._writer.shorten_deadline()
            self._workers.tell({"op": "lost", "rank": one.rank})

    def _take_all(self, rank: int) -> None:
        names = {str(name): name for name in slot_names(self._folder) if name.kind == "own" and name.rank == rank}
        held = [(one.facts.step, one.slot) for one in look(self._folder, host=0) if one.slot in names]
        # In the order of the steps, or the older ones would look overtaken.
        for _, slot in sorted(held):
            self._take(rank, names[slot].index, None)

    def _take(self, rank: int, index: int, step: int | None) -> str:
        """Pin a snapshot, digest it, and see what is to be done with it; returns why it cannot be used, if so."""
        name = str(SlotName("own", rank, index))
        error, leased = f"{name} holds nothing whole", None
        try:
            leased = self._leases.lease(name)
        except (OSError, InvalidCheckpointError) as exception:
            error = f"{name} cannot be read: {exception}"
        if step is not None:
            # Also of one that is of no use: its worker waits for this before it uses the slot again.
            self._workers.tell({"op": "seen", "slot": index, "step": step}, rank=rank)
        if leased is None:
            if step is not None:
                logger.warning("%s", error)
            return error
        facts = leased.facts
        if facts.incarnation != self._incarnation or facts.rank != rank or (step is not None and facts.step != step):
            self._leases.release(leased)
            return f"{name} holds another snapshot"
        self._num_digesting += 1
        self._digest_thread.begin(leased)
        return ""

    def _give_up(self, step: int, error: str) -> None:
        """A step cannot become durable: whoever waits for it is told, and what of it is here is let go."""
        for leased in self._pending.give_up(step):
            self._leases.release(leased)
        self._tell_outcome({"op": "failed", "step": step, "error": error})
        host_ranks = self._pending.host_ranks
        if host_ranks is not None and not host_ranks.leader:
            deadline = Deadline(self._facts.save_timeout_s, clock=self._clock)
            self._writer.begin(RefusedSave(host_ranks.incarnation, step, min(host_ranks.ranks), error, deadline))

    def _tell_outcome(self, message: Message) -> None:
        """What became of a step; who is not connected now is told when it comes again."""
        self._outcomes.told(count(message, "step"), message)
        self._workers.tell(message)

    def _on_digested(self, leased: LeasedSnapshot) -> None:
        self._num_digesting -= 1
        facts, host_ranks = leased.facts, self._pending.host_ranks
        if host_ranks is None or facts.incarnation != host_ranks.incarnation:
            self._leases.release(leased)
            return
        self._pending.newest[facts.rank] = max(facts.step, self._pending.newest.get(facts.rank, -1))
        known = facts.rank in self._pending.waiting.get(facts.step, {}) or self._outcomes.is_handed_over(facts.step)
        if facts.durable and not known and facts.step > self._pending.saved_step:
            job = self._pending.arrived(leased)
            if job:
                self._begin(job, leader=host_ranks.leader, reason=facts.reason)
        else:
            self._leases.release(leased)
        for step in self._pending.overtaken():
            self._give_up(step, "a rank has no snapshot of this step")

    def _on_saved(self, job: SaveJob, name: str, size_bytes: int) -> None:
        self._let_go(job)
        if job.incarnation == self._incarnation:
            self._pending.saved_step = max(self._pending.saved_step, job.step)
            self._tell_outcome({"op": "saved", "step": job.step, "checkpoint": name, "bytes": size_bytes})

    def _on_failed(self, job: SaveJob, error: str, cause: Cause) -> None:
        logger.warning("step %d could not be saved: %s", job.step, error)
        self._let_go(job)
        self._final_save.failed(job.incarnation, job.step, cause=cause, error=error)
        if job.incarnation != self._incarnation:
            return
        self._outcomes.failed(job.step)
        if job.leader:
            self._tell_outcome({"op": "failed", "step": job.step, "error": error})

    def _on_sent(self, incarnation: str, step: int, whole: bool) -> None:
        if incarnation == self._incarnation:
            self._workers.tell({"op": "sent", "step": step, "whole": whole})

    def _drop_old(self, rank: int, slots: int) -> None:
        """All ranks have a whole snapshot of this incarnation: what older ones left is of no use. Each rank tells its slots."""
        host_ranks = self._pending.host_ranks
        if host_ranks is None:
            return
        for name in slot_names(self._folder):
            unused = name.rank == rank and not slots >> name.index & 1
            if name.kind == "own" and (unused or name.rank not in host_ranks.ranks):
                remove_slot(self._folder, name)
        self._replicas.drop_others()

    def _begin(self, snapshots: tuple[LeasedSnapshot, ...], *, leader: bool, reason: str) -> None:
        deadline = Deadline(self._facts.save_timeout_s, clock=self._clock)
        job = SaveJob(snapshots, leader=leader, reason=reason, deadline=deadline)
        present = job.incarnation == self._incarnation
        if present:
            self._outcomes.handed_over(job.step)
        if self._lost or not present:
            deadline.shorten()
        self._held[(job.incarnation, job.step)] = job.snapshots
        self._writer.begin(job)

    def _let_go(self, job: SaveJob) -> None:
        """The job needs its snapshots no more."""
        for leased in self._held.pop((job.incarnation, job.step), ()):
            self._leases.release(leased)
        if job.incarnation != self._incarnation:
            # Those who train now may come to the same step.
            return
        if not job.leader:
            self._outcomes.done_here(job.step)
        # Only the leader hears what became of the step: for the ranks of other hosts it ends here.
        released: Message = {"op": "released", "step": job.step, "done": not job.leader}
        self._workers.tell(released) if job.leader else self._tell_outcome(released)
