"""A worker's connection to its saver: starts the saver, exchanges messages, and replaces a saver that has ended."""

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import msgspec

from elastictrain.bounded_json import JsonLines, MalformedJsonError
from elastictrain.checkpoint.memory.slot import SnapshotId
from elastictrain.checkpoint.saver import messages
from elastictrain.checkpoint.saver.messages import (
    Saved,
    SaveFailure,
    SlowSave,
    SnapshotTaken,
    ToSaver,
    ToWorker,
    encode,
)
from elastictrain.checkpoint.saver.process import SaverConfig, SaverStarter, clear_if_abandoned, connect_saver, log_tail
from elastictrain.errors import CheckpointError, ElasticTrainError
from elastictrain.events import Event, KeeperLost, KeeperStarted

logger = logging.getLogger(__name__)

_PAUSE_S = 0.02
_ANSWER_S = 30.0  # limit for a saver to start, or for the one before it to end


News: TypeAlias = Saved | SaveFailure | SlowSave


class PendingSaves:
    """What the saver still has to do with one worker's snapshots, and their outcomes. Pure; not thread-safe."""

    def __init__(self) -> None:
        self._unseen: dict[int, int] = {}  # steps that the saver has not looked at yet, by slot
        self._unreleased: set[int] = set()  # steps whose slots the saver still needs
        self._unsaved: dict[int, float] = {}  # steps that are to become durable, and since when
        self._in_slot: dict[int, int] = {}  # the step announced last, by slot
        # Steps that an ended saver had written, which its successor finds in their slots unless a newer snapshot overwrites
        # them; with the failure message for that case.
        self._left_over: dict[int, str] = {}
        self.news: list[News] = []

    def announce(self, slot: int, step: int, *, durable: bool, now_s: float) -> SnapshotTaken:
        """Record a whole snapshot; returns the message to the saver."""
        self._unseen[slot] = step
        overwritten, self._in_slot[slot] = self._in_slot.get(slot), step
        if overwritten in self._left_over:
            self.failed(SaveFailure(overwritten, self._left_over[overwritten]))
        if durable:
            self._unreleased.add(step)
            self._unsaved[step] = now_s
        return SnapshotTaken(slot, step, durable=step in self._unreleased)

    def announcements(self) -> list[SnapshotTaken]:
        """The messages to a new saver."""
        return [SnapshotTaken(slot, step, durable=step in self._unreleased) for slot, step in self._unseen.items()]

    def needs(self, slot: int, step: int) -> bool:
        """Whether the saver must still look at a snapshot, or write it."""
        return self._unseen.get(slot) == step or step in self._unreleased

    def seen(self, slot: int, step: int) -> None:
        """The saver has looked at a snapshot; a newer one in the slot stays announced."""
        if self._unseen.get(slot) == step:
            del self._unseen[slot]

    def released(self, step: int, *, done: bool) -> None:
        """The saver has released the slots of a step. `done`: it sends nothing else about it."""
        self._unreleased.discard(step)
        if done:
            self._unsaved.pop(step, None)

    def saved(self, saved: Saved) -> None:
        """A step is durable. Older ones are over, too: their outcome was sent while this worker was not connected."""
        if saved.step in self._unsaved:
            self.news.append(saved)
        for step in [step for step in {*self._unsaved, *self._unreleased} if step <= saved.step]:
            self._finished(step)

    def failed(self, failure: SaveFailure) -> None:
        if failure.step in self._unsaved:
            self._finished(failure.step)
            self.news.append(failure)

    def overdue(self, *, now_s: float, limit_s: float) -> int | None:
        """A step that is not durable after `limit_s`."""
        return next((step for step, since in self._unsaved.items() if now_s - since > limit_s), None)

    def give_up(self, reason: str) -> None:
        """Fail all pending saves: no saver will handle them."""
        self.news += [SaveFailure(step, reason) for step in sorted({*self._unreleased, *self._unsaved})]
        for left in (self._unseen, self._unreleased, self._unsaved, self._left_over):
            left.clear()

    def succeed(self, reason: str) -> None:
        """A new saver has answered: of uncommitted steps it knows only those that are still in their slots."""
        for step in sorted(self._unsaved.keys() - self._unreleased):
            if step in self._in_slot.values():
                self._unreleased.add(step)
                self._left_over[step] = reason
            else:
                self.failed(SaveFailure(step, reason))

    def _finished(self, step: int) -> None:
        self._unreleased.discard(step)
        self._unsaved.pop(step, None)
        self._left_over.pop(step, None)


class SaverLink:
    """One worker's link to its saver. One thread reads; any thread may send."""

    def __init__(
        self,
        folder: str,
        config: SaverConfig,
        hello: messages.WorkerHello,
        *,
        starts: bool,
        record: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hello` introduces this worker; `starts`: whether this worker starts savers for its host."""
        self._folder = folder
        self._config = config
        self._hello = hello
        self._starts = starts
        self._record = record
        self._clock = clock
        self._changed = threading.Condition()
        # All fields below are guarded by the condition.
        self._socket: socket.socket | None = None
        self._roster: messages.SaverRoster | None = None
        self._roster_known = False
        self._pending_saves = PendingSaves()
        self.replicates = False  # whether another host keeps replicas of the snapshots
        self._sending: int | None = None
        self._sending_failed = False
        self._closing = False
        self._welcomed = False
        self.broken = ""  # why there is no saver and none is tried any more; empty otherwise
        self.pid = 0
        self.port = 0  # where other hosts reach the saver; 0 until it has answered
        self.lost: tuple[int, float] | None = None  # a rank of this host that ended without a goodbye, and since when
        self._process = SaverStarter(folder, config)
        self._thread = threading.Thread(target=self._run, name="saver-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, timeout_s: float = _ANSWER_S) -> None:
        """Wait until the saver has answered. Raises: CheckpointError with the reason if it does not."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.pid or self.broken, timeout_s):
                reason = f"does not answer within {timeout_s:g} s{log_tail(self._folder)}"
                raise CheckpointError(f"the saver in {self._folder} {reason}")
            if self.broken:
                raise CheckpointError(self.broken)

    def send_roster(self, roster: messages.SaverRoster, timeout_s: float = _ANSWER_S) -> None:
        """Send the saver the list of all savers. Raises: CheckpointError if it does not confirm."""
        with self._changed:
            self._roster, self._roster_known = roster, False
            self.send_message(roster)
            if not self._changed.wait_for(lambda: self._roster_known or self.broken, timeout_s):
                raise CheckpointError(f"the saver in {self._folder} does not answer within {timeout_s:g} s")

    def announce(self, slot: int, step: int, *, durable: bool) -> None:
        with self._changed:
            self.send_message(self._pending_saves.announce(slot, step, durable=durable, now_s=self._clock()))
            if self.broken:
                self._pending_saves.give_up(self.broken)

    def send_message(self, message: ToSaver) -> None:
        """Send, if a saver is connected; its successor does not get the message."""
        with self._changed:
            if self._socket is None:
                return
            data = encode(message)
            try:
                sent = self._socket.send(data, socket.MSG_DONTWAIT)
            except OSError:
                sent = 0
            if sent < len(data):
                # The saver does not read, and training must not wait for it. Unreceived messages are sent again after a
                # reconnect.
                self._hang_up()

    def send(self, step: int | None, *, unpaced: bool = False, safe: SnapshotId | None = None) -> None:
        """Have the saver send the snapshots of a step, and none older, to another host; None: stop sending. `sending` reports
        the end. `unpaced`: nothing is training that could be slowed down. `safe`: of which all replicas are there, and stay."""
        with self._changed:
            if self._starts:
                # Without a saver there is no answer, and its successor does not get this message.
                lost = step is not None and self._socket is None
                self._sending, self._sending_failed = (None if lost else step, lost)
                self.send_message(messages.SendReplicas(step, unpaced, safe))

    def sending(self) -> tuple[bool, bool]:
        """Whether the saver is still sending, and whether the last sending failed."""
        with self._changed:
            return self._sending is not None, self._sending_failed

    def step_took(self, seconds: float) -> None:
        """Report the duration of a step to a saver that sends replicas: they must not slow training down."""
        with self._changed:
            if self._starts and self.replicates:
                self.send_message(messages.StepTook(round(1e6 * seconds)))

    def needs(self, slot: int, step: int) -> bool:
        with self._changed:
            return self._pending_saves.needs(slot, step)

    def take_news(self) -> list[News]:
        """Return what was committed, failed or was slow since the last call."""
        with self._changed:
            limit_s = self._config.save_timeout_s
            overdue = self._pending_saves.overdue(now_s=self._clock(), limit_s=limit_s)
            if overdue is not None and not self.broken:
                # The saver or its storage hangs. Waiting longer would train without checkpoints and without a warning.
                self._break(f"step {overdue} was not durable within {limit_s:g} s")
            news, self._pending_saves.news = self._pending_saves.news, []
            return news

    def wait_for_news(self, timeout_s: float) -> None:
        """Wait until a step was saved, failed or released, or for `timeout_s`."""
        with self._changed:
            self._changed.wait(timeout_s)

    def finish(self, timeout_s: float) -> None:
        """Report that the run is complete; the worker that started the saver waits until it has ended."""
        with self._changed:
            self._closing = True
            if self._starts:
                self.send_message(messages.RunFinished())
        self.close()
        if self._starts:
            if self.pid:
                self._process.wait_for_end(self.pid, timeout_s=timeout_s)
            # A saver that was killed just now, or is broken, does not clear its folder.
            clear_if_abandoned(self._folder)

    def close(self) -> None:
        """Send goodbye; the saver stays for the next workers."""
        with self._changed:
            self._closing = True
            self.send_message(messages.Goodbye())
            self._hang_up()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def _hang_up(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while not self._closing and not self.broken:
            try:
                self._talk(self._connect())
            except (OSError, MalformedJsonError, ElasticTrainError) as error:
                with self._changed:
                    if not self._closing:
                        self._break(f"the saver of this host does not run: {error}{log_tail(self._folder)}")
                return

    def _connect(self) -> socket.socket:
        deadline = self._clock() + _ANSWER_S
        while not self._closing:
            with suppress(OSError):
                return connect_saver(self._folder)
            if self._starts:
                with suppress(FileNotFoundError):
                    self._process.start_if_gone()
            if self._clock() > deadline:
                raise CheckpointError(f"nobody answers in {self._folder}")
            time.sleep(_PAUSE_S)
        raise CheckpointError("closed")

    def _talk(self, connection: socket.socket) -> None:
        lines: JsonLines[ToWorker] = JsonLines(ToWorker)  # type: ignore[arg-type]
        with self._changed:
            self._socket = connection
            self._welcomed = False
            self.send_message(self._hello)
        try:
            while data := connection.recv(65536):
                for message in lines.feed(data):
                    self._receive(message)
        except OSError:
            pass
        finally:
            with self._changed:
                self._socket = None
                if self._sending is not None:
                    self._sending, self._sending_failed = None, True
                pid, closing, welcomed = self.pid, self._closing or bool(self.broken), self._welcomed
            connection.close()
        if closing:
            return
        if not welcomed:
            # A saver that was about to end did not accept this connection any more.
            time.sleep(_PAUSE_S)
            return
        logger.warning("the saver of this host (process %d) is gone; another one is started", pid)
        if self._starts:
            self._record(KeeperLost(pid=pid))

    def _receive(self, message: ToWorker) -> None:
        with self._changed:
            match message:
                case messages.SaverWelcome():
                    self._welcome(message)
                case messages.RosterKnown():
                    self._roster_known = True
                case messages.SnapshotSeen():
                    self._pending_saves.seen(message.slot, message.step)
                case messages.SlotsReleased():
                    self._pending_saves.released(message.step, done=message.done)
                case messages.RankLost():
                    self.lost = self.lost or (message.rank, self._clock())
                case messages.WorkerRefused():
                    raise CheckpointError(f"it refuses this worker: {message.reason}")
                case Saved():
                    self._pending_saves.saved(message)
                case SaveFailure():
                    self._pending_saves.failed(message)
                case messages.ReplicasSent() if self._sending == message.step:
                    self._sending, self._sending_failed = None, not message.whole
                case SlowSave():
                    self._pending_saves.news.append(message)
            self._changed.notify_all()
        if isinstance(message, messages.SaverWelcome) and self._starts:
            # Without the condition: storage that hangs would block all other threads of this link.
            self._record(KeeperStarted(pid=self.pid))

    def _welcome(self, message: messages.SaverWelcome) -> None:
        self._welcomed = True
        before, self.pid, self.port = self.pid, message.pid, message.port
        if before not in (0, self.pid):
            self._pending_saves.succeed("its saver ended before it was committed")
        # The other hosts know this port, so its successor is asked to listen on it.
        self._hello = msgspec.structs.replace(self._hello, port=self.port)
        if self._roster is not None:
            self.send_message(self._roster)
        for announcement in self._pending_saves.announcements():
            self.send_message(announcement)

    def _break(self, reason: str) -> None:
        self.broken = reason
        logger.warning("%s", reason)
        self._pending_saves.give_up(reason)
        self._hang_up()
        self._changed.notify_all()
