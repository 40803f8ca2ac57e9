"""The launcher's loop: asks what is to be done, and does it. What is decided elsewhere is only carried out here."""

import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastictrain.config.composed import RunConfig
from elastictrain.errors import EXIT_OK, EXIT_STOPPED, EXIT_UNFIT, RunHeldError
from elastictrain.fault.exits import PREVIOUS_EXIT_TIMEOUT_S
from elastictrain.fault.reasons import read_begun, read_noted_step
from elastictrain.fault.stop import StopNote, StopRequest, write_stop_note
from elastictrain.launch.attempt import Attempt, judge_end, read_remains
from elastictrain.launch.final_save import FinalSave, SaverHandle, await_final_save, exit_message, waiting_message
from elastictrain.launch.heartbeat.mesh import HeartbeatMesh
from elastictrain.launch.host_registry import HostRegistry
from elastictrain.launch.membership.decide import decide
from elastictrain.launch.membership.messages import headline, listed
from elastictrain.launch.membership.observation import ClusterState
from elastictrain.launch.membership.records import (
    Create,
    Decision,
    End,
    EndKind,
    Finish,
    Generation,
    GenerationOutcome,
    HostState,
    Join,
    Leave,
    LeaveOut,
    Wait,
)
from elastictrain.launch.orders import ANSWER_NAME, HostContext, plan_torchrun, read_answer
from elastictrain.launch.records import GenerationBegun, GenerationEnded, Recorder, WorkersNotForked
from elastictrain.launch.torchrun import Torchrun, free_port
from elastictrain.liveness.progress import Phase
from elastictrain.storage.failures import reason_of

logger = logging.getLogger(__name__)

_TURN_S = 0.1
_BRIEF_TURN_S = 0.02
_HURRIED_S = 10.0
"""How long turns are brief after an end: each of them brings the next start forward."""

_STOP_NAME = "stop.json"
_ASK_EVERY_S = 1.0
_DEAD_GROUP_S = 1.5
"""How long workers of a group that has lost one may take to end by themselves: they have nothing to save any more."""

_WORTH_SAYING_S = 1.5
"""A wait that is over sooner is of no interest to anybody."""

_LAST_WORDS_S = 1.0
_SHARE_OF_THE_END = 0.25
"""What is kept of the time before a deadline to say what is saved."""

_LEAVING_LIMIT_S = 10.0
"""How long what a launcher leaves for the others may take to reach storage."""


@dataclass(frozen=True, slots=True)
class SupervisorParts:
    """What the loop works with; put together in __main__.py."""

    config: RunConfig
    run_arguments: tuple[str, ...]
    registry: HostRegistry
    heartbeat: HeartbeatMesh
    torchrun: Torchrun
    recorder: Recorder
    folder: Path
    """Private to this launcher."""

    expected_hosts: int
    stop_request: Callable[[], StopRequest | None]
    check_host: Callable[[], str]
    """Why this host is unfit; empty if it is not."""

    free_after: int
    """The newest generation when this launcher found that no other run trains in the folder."""

    committed_step: Callable[[], int | None]
    """The step in storage that a start would go on from; None where storage does not answer."""

    remembered_step: Callable[[], int]
    """The newest step in this host's memory."""

    ask_to_flush: Callable[[], SaverHandle | None]
    """Have this host's saver write what only memory has; None if there is no saver."""

    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Supervisor:
    """One launcher's life, from its first look at the registry to its exit code."""

    def __init__(self, parts: SupervisorParts) -> None:
        self._parts = parts
        self._began_s = parts.clock()
        self._stop_limit_s = parts.config.fault.save_timeout_s + parts.config.fault.shutdown_grace_s
        self._attempt: Attempt | None = None
        self._stop_cost_s: float | None = None
        """What the end of the last generation took; waiting for hosts after it is no cost of a restart."""

        self._done = False
        """Whether this host's workers have reached the last step."""

        self._restart_cost_s = 0.0
        self._committed_step = 0
        """The newest step that this host has known to be committed; storage that does not answer makes it no smaller."""

        self._left_step = 0
        self._unforked = ""
        """Why workers were not forks, as last said."""

        self._said = self._waits_for = ""
        self._waits_since_s = 0.0
        self._retry_s = float("inf")
        self._hurried_until_s = self._began_s + _HURRIED_S

    def run(self) -> int:
        """Until there is nothing more to do here; returns the exit code.

        Raises: RunHeldError where another run was faster, and this launcher is to begin anew when that has ended.
        """
        parts = self._parts
        while True:
            self._look_after_workers()
            self._listen()
            code = self._leave_if_asked()
            if code is None:
                code = self._leave_if_taken()
            if code is None:
                code = self._retry_if_unfit()
            if code is not None:
                return code
            decision = decide(self._cluster_state(), parts.config.launch) if parts.registry.known.reads else None
            if isinstance(decision, Leave):
                return self._leave(decision.exit_code, decision.reason)
            if decision is not None:
                self._act(decision)
            if news := parts.heartbeat.pop_news():
                parts.registry.wake(news)
            parts.sleep(_BRIEF_TURN_S if parts.clock() < self._hurried_until_s else _TURN_S)

    def _listen(self) -> None:
        """Have this host's record tell whom it hears, and hosts that wait speak to all that live."""
        parts = self._parts
        heard, _ = parts.heartbeat.heard
        parts.registry.hears = tuple(sorted(heard))
        if told := parts.heartbeat.pop_records():
            parts.registry.hear(told)
        waits = self._attempt is None
        lines = [one.record for one in parts.registry.known.observed.values()] if waits else []
        parts.heartbeat.call([line for line in lines if line.state is not HostState.GONE])

    def _cluster_state(self) -> ClusterState:
        known, parts = self._parts.registry.known, self._parts
        heard, heard_since_s = parts.heartbeat.heard
        return ClusterState(
            now_s=parts.clock(),
            me=parts.registry.record,
            began_s=known.began_s,
            running=self._attempt.generation if self._attempt is not None else None,
            newest=known.newest,
            newest_since_s=known.newest_since_s,
            ends=known.ends,
            ended_since_s=known.ended_since_s,
            observed=known.observed,
            read_s=known.read_s,
            silent=parts.heartbeat.silent,
            heard=heard,
            heard_since_s=heard_since_s,
            expected_hosts=parts.expected_hosts,
            restart_cost_s=self._restart_cost_s,
            most_processes=parts.config.train.global_batch,
            left_s=self._left_s(),
            stop_limit_s=self._stop_limit_s,
            wants_to_leave=parts.stop_request() is not None,
        )

    def _act(self, decision: Decision) -> None:
        match decision:
            case Join(generation):
                self._join(generation)
            case Create(generation) if generation.number not in self._parts.registry.known.created:
                self._parts.registry.post(generation)
            case Finish(end, at_once):
                self._finish(end, at_once=at_once)
            case LeaveOut(generation, reason):
                self._leave_out(reason, ended=generation)
            case Wait():
                self._wait(decision)
            case _:
                pass

    def _join(self, generation: Generation) -> None:
        parts = self._parts
        if self._attempt is not None:
            return
        self._attempt = Attempt(generation=generation, joined_s=parts.clock(), starts_s=parts.clock() + generation.pause_s)
        parts.registry.say(HostState.BUSY)
        parts.registry.attentive = generation.members[0].host == parts.registry.record.host
        parts.heartbeat.follow(generation)
        self._said = ""
        names = listed(member.name for member in generation.members)
        because = f", because {headline(generation.reason)}" if generation.reason else ""
        parts.say(f"generation {generation.number}: {generation.world_size} worker(s) on {names}{because}")
        parts.recorder.record(
            generation.number,
            GenerationBegun(
                hosts=tuple(member.name for member in generation.members),
                world_size=generation.world_size,
                reason=generation.reason,
                pause_s=generation.pause_s,
            ),
        )

    def _start(self, attempt: Attempt) -> None:
        parts, generation = self._parts, attempt.generation
        try:
            folder = self._make_folder(generation)
        except OSError as error:
            reason = f"{self._folder_of(generation)} cannot be made: {reason_of(error)}"
            host = parts.registry.record.host
            self._over(attempt, End(generation.number, host, EndKind.FAILED, EXIT_UNFIT, str(Phase.START), 0, 0, reason))
            return
        here = HostContext(
            host=parts.registry.record.host,
            address=parts.registry.record.address,
            pid=os.getpid(),
            folder=str(folder),
            run_arguments=parts.run_arguments,
            restarted=parts.registry.known.follows_another,
            stop_file=str(folder / _STOP_NAME),
            rendezvous_limit_s=parts.config.fault.rendezvous_timeout_s,
        )
        parts.torchrun.start(plan_torchrun(generation, here))
        attempt.started = True

    def _finish(self, end: End, *, at_once: bool) -> None:
        """Have this host's part of the generation end, and tell the others if that is this host's word."""
        parts, attempt = self._parts, self._attempt
        if attempt is None:
            return
        request, now_s = parts.stop_request(), parts.clock()
        if at_once:
            # Also where an orderly end is under way, which will not come any more.
            attempt.kill_s = min(attempt.kill_s, now_s + _DEAD_GROUP_S)
        if attempt.asked is not None:
            if request is not None and request.deadline_s is not None and request.deadline_s < attempt.kill_s:
                # This host is wanted back, or sooner than was known: what is under way for another reason has less time.
                attempt.kill_s = request.deadline_s
                self._tell_workers(attempt)
            return
        attempt.asked, attempt.asked_s = end, now_s
        self._hurried_until_s = now_s + _HURRIED_S
        if end.host == parts.registry.record.host:
            parts.registry.post(end)
            parts.heartbeat.send_end(parts.registry.record)
        if not at_once:
            attempt.kill_s = now_s + self._stop_limit_s
            if request is not None and request.deadline_s is not None:
                attempt.kill_s = request.deadline_s
            attempt.ask_s = now_s
            self._tell_workers(attempt)

    def _tell_workers(self, attempt: Attempt) -> None:
        """Why they are stopped and until when, for the next signal that they get."""
        if attempt.asked is None or attempt.ask_s == float("inf"):
            return
        deadline = time.time() + attempt.kill_s - self._parts.clock()
        try:
            note = self._make_folder(attempt.generation) / _STOP_NAME
            # Workers say by themselves that they are asked to stop.
            reason = attempt.asked.reason.removeprefix("asked to stop (").removesuffix(")")
            write_stop_note(str(note), StopNote(reason, deadline))
        except OSError as error:
            # The signal alone makes them save, too.
            logger.warning("the workers cannot be told why they are stopped: %s", error)

    def _look_after_workers(self) -> None:
        parts, attempt = self._parts, self._attempt
        if attempt is None:
            return
        now_s = parts.clock()
        if not attempt.started:
            if attempt.asked is not None:
                self._over(attempt, attempt.asked)
            elif now_s >= attempt.starts_s:
                self._start(attempt)
            return
        if now_s >= attempt.ask_s:
            attempt.ask_s = now_s + _ASK_EVERY_S
            parts.torchrun.ask_to_stop()
        if now_s >= attempt.kill_s:
            parts.torchrun.kill()
        code = parts.torchrun.poll()
        if code is None:
            self._note_begin(attempt)
            return
        self._over(attempt, self._judge(attempt, code))

    def _judge(self, attempt: Attempt, code: int) -> End:
        """How it ended here."""
        parts, folder = self._parts, self._folder_of(attempt.generation)
        # What a start would go on from is progress, wherever it is kept. Storage is not asked: all hosts wait for this one.
        known = (read_noted_step(str(parts.folder)), parts.remembered_step(), read_begun(str(folder)) or 0)
        self._committed_step = max(self._committed_step, *known)
        remains = read_remains(attempt, folder, host=parts.registry.record.host, code=code, committed_step=self._committed_step)
        self._left_step = max((one.step for one in remains.reasons if one.exit_code == EXIT_STOPPED), default=0)
        end = judge_end(remains, generation=attempt.generation.number, host=parts.registry.record.host)
        # What workers do when they are asked to end is no news, but that they were at the last step already is.
        return end if attempt.asked is None or end.kind is EndKind.DONE else attempt.asked

    def _over(self, attempt: Attempt, end: End) -> None:
        """Nothing of the generation runs here any more."""
        parts = self._parts
        self._hurried_until_s = parts.clock() + _HURRIED_S
        self._attempt, self._done = None, end.kind is EndKind.DONE
        # All of it was read, and a run may start again thousands of times.
        shutil.rmtree(self._folder_of(attempt.generation), ignore_errors=True)
        self._stop_cost_s = parts.clock() - attempt.asked_s if attempt.asked is not None else 0.0
        if end is not attempt.asked:
            parts.registry.post(end)
        parts.recorder.record(
            attempt.generation.number,
            GenerationEnded(
                kind=end.kind, exit_code=end.exit_code, phase=end.phase, step=end.step, reason=end.reason, lost=end.lost
            ),
        )
        if end.kind is not EndKind.DONE:
            parts.say(f"generation {attempt.generation.number} has ended here: {headline(end.reason)}")
        parts.registry.attentive = True
        if end.host == parts.registry.record.host and end.exit_code == EXIT_UNFIT:
            self._leave_out(end.reason, ended=attempt.generation.number)
        else:
            parts.registry.say(
                HostState.READY,
                ended=attempt.generation.number,
                master_port=free_port(),
                committed_step=self._committed_step,
            )
        parts.heartbeat.send_end(parts.registry.record)

    def _leave_out(self, reason: str, *, ended: int) -> None:
        """Take no part for a while."""
        parts = self._parts
        if parts.registry.record.state is not HostState.UNFIT:
            self._retry_s = parts.clock() + parts.config.launch.retry_unfit_s
        ended = max(ended, parts.registry.record.ended)
        parts.registry.say(HostState.UNFIT, reason=reason, ended=ended, committed_step=self._committed_step)

    def _note_begin(self, attempt: Attempt) -> None:
        """Once the first step is through there is time to start the next torchrun ahead."""
        if attempt.begun or read_begun(str(self._folder_of(attempt.generation))) is None:
            return
        attempt.begun = True
        if self._stop_cost_s is not None:
            self._restart_cost_s = self._stop_cost_s + self._parts.clock() - attempt.joined_s
        self._parts.torchrun.prepare()
        self._say_unforked(attempt.generation)

    def _say_unforked(self, generation: Generation) -> None:
        """Once: what makes restarts slower is no reason not to train."""
        unforked = read_answer(self._folder_of(generation) / ANSWER_NAME).unforked
        if unforked and unforked != self._unforked:
            self._unforked = unforked
            self._parts.say(f"each restart imports torch anew, which takes seconds longer: {unforked}")
            self._parts.recorder.record(generation.number, WorkersNotForked(reason=unforked))

    def _leave_if_asked(self) -> int | None:
        """A person, a scheduler or the cloud wants this host back."""
        parts, attempt = self._parts, self._attempt
        request = parts.stop_request()
        if request is None:
            return None
        if attempt is None:
            if self._done:
                return self._leave(EXIT_OK, "the last step is done")
            return self._leave(EXIT_STOPPED, f"asked to stop ({request.reason})")
        if attempt.asked is None:
            reason = f"asked to stop ({request.reason})"
            host, number = parts.registry.record.host, attempt.generation.number
            self._finish(End(number, host, EndKind.LEAVING, EXIT_STOPPED, "", 0, 0, reason), at_once=False)
        return None

    def _leave_if_taken(self) -> int | None:
        """A run that no launcher has started was faster, or has taken over while this host was frozen or cut off.

        Raises: RunHeldError where it was faster, and is to be waited for.
        """
        newest = self._parts.registry.known.newest
        if newest is None or newest.outcome is not GenerationOutcome.ELSEWHERE or newest.number <= self._parts.free_after:
            return None
        if self._attempt is not None:
            # Which ends it at once.
            return None
        if self._parts.config.run.on_held == "wait" and not self._parts.registry.record.ended:
            self._withdraw(newest.reason)
            raise RunHeldError(newest.reason)
        return self._leave(EXIT_STOPPED, newest.reason)

    def _retry_if_unfit(self) -> int | None:
        """A host that was left out is looked at again, or leaves."""
        parts = self._parts
        if parts.registry.record.state is not HostState.UNFIT or parts.clock() < self._retry_s:
            return None
        if parts.config.launch.retry_unfit_s == 0:
            return self._leave(EXIT_UNFIT, parts.registry.record.reason)
        if unfit := parts.check_host():
            parts.say(f"this host is still unfit: {unfit}")
            self._retry_s = parts.clock() + parts.config.launch.retry_unfit_s
        else:
            parts.say("this host passes its checks again, and waits to be taken in")
            parts.registry.say(HostState.READY, master_port=free_port())
        return None

    def _wait(self, decision: Wait) -> None:
        """Say what is waited for, each time that it changes."""
        now_s = self._parts.clock()
        if decision.for_what != self._waits_for:
            self._waits_for, self._waits_since_s = decision.for_what, now_s
        if decision.for_what and decision.for_what != self._said and now_s - self._waits_since_s >= _WORTH_SAYING_S:
            self._said = decision.for_what
            self._parts.say(waiting_message(decision, now_s=now_s))

    def _leave(self, code: int, reason: str) -> int:
        parts = self._parts
        parts.torchrun.close()
        # Before anything is waited for: the others are not to count on this host.
        parts.registry.say(HostState.GONE, reason=reason)
        final = self._final_save() if code != EXIT_OK else FinalSave(parts.committed_step())
        # Before more is waited for: whoever ends this process at a deadline leaves no time after it.
        parts.say(exit_message(code, reason, run_dir=parts.config.run.dir, final=final))
        parts.registry.close(limit_s=_LEAVING_LIMIT_S)
        parts.heartbeat.close()
        request = parts.stop_request()
        left_s = (
            request.deadline_s - parts.clock()
            if request is not None and request.deadline_s is not None
            else PREVIOUS_EXIT_TIMEOUT_S
        )
        parts.torchrun.wait_until_gone(min(left_s, PREVIOUS_EXIT_TIMEOUT_S))
        return code

    def _withdraw(self, reason: str) -> None:
        """Nobody is to count on this host; it has nothing to save."""
        self._parts.registry.say(HostState.GONE, reason=reason)
        self._parts.registry.close(limit_s=_LEAVING_LIMIT_S)
        self._parts.heartbeat.close()

    def _final_save(self) -> FinalSave:
        """What only memory has is brought to storage: in a container all ends with this process, the saver too."""
        parts, request = self._parts, self._parts.stop_request()
        now_s = parts.clock()
        if request is None:
            until_s = now_s + parts.config.fault.notice_s
        elif request.deadline_s is None:
            # Nobody ends this host, and the saver goes on.
            until_s = now_s
        else:
            until_s = request.deadline_s - min(_LAST_WORDS_S, _SHARE_OF_THE_END * max(0.0, request.deadline_s - now_s))
        return await_final_save(
            max(self._left_step, parts.remembered_step()),
            until_s=until_s,
            committed_step=parts.committed_step,
            ask=parts.ask_to_flush,
            say=parts.say,
            clock=parts.clock,
            sleep=parts.sleep,
        )

    def _left_s(self) -> float:
        """Until our own limit on the time that all may take."""
        hours = self._parts.config.launch.max_hours
        return max(0.0, self._began_s + 3600 * hours - self._parts.clock()) if hours else float("inf")

    def _make_folder(self, generation: Generation) -> Path:
        """Raises: OSError."""
        folder = self._folder_of(generation)
        # Folders for temporary files are swept of what is old, and a generation may last for weeks.
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _folder_of(self, generation: Generation) -> Path:
        return self._parts.folder / f"generation-{generation.number}"
