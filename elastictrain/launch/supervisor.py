"""The launcher's observe-decide-act loop. All policy lives in `membership/decide.py`."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from elastictrain.config.composed import RunConfig
from elastictrain.errors import EXIT_OK, EXIT_STOPPED, EXIT_TRANSPORT, EXIT_UNFIT, RunHeldError
from elastictrain.events import event_time
from elastictrain.fault.exits import PREVIOUS_EXIT_TIMEOUT_S
from elastictrain.fault.reasons import read_noted_step
from elastictrain.fault.stop import StopRequest
from elastictrain.identity import RecoveryPlan
from elastictrain.launch.attempt import Attempt, judge_end, what_died
from elastictrain.launch.final_save import (
    FinalSave,
    SaverConnection,
    WaitingMessages,
    await_final_save,
    exit_message,
    final_save_until_s,
)
from elastictrain.launch.heartbeat import HeartbeatMesh
from elastictrain.launch.host_registry import HostRegistry
from elastictrain.launch.known_step import KnownStep
from elastictrain.launch.membership.decide import decide
from elastictrain.launch.membership.messages import headline, listed
from elastictrain.launch.membership.observation import ClusterState
from elastictrain.launch.membership.proposal import likely_generation
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
    Rejoin,
    Wait,
)
from elastictrain.launch.rank_variables import plan_workers
from elastictrain.launch.records import GenerationBegun, GenerationEnded, LauncherEnded, Recorder, WorkersNotForked
from elastictrain.launch.recovering import Recovering, after_end
from elastictrain.launch.worker_group import WorkerGroup
from elastictrain.launch.worker_process import BUILT_FOR
from elastictrain.launch.workers_of_generation import WorkersEnd
from elastictrain.liveness.progress import Phase
from elastictrain.net.listening import bind_everywhere

_TURN_S = 0.1
_BRIEF_TURN_S = 0.02
_HURRIED_S = 10.0  # turns are brief for so long after an end: each makes the next start earlier
_ASK_EVERY_S = 1.0
_LEAVING_LIMIT_S = 10.0  # limit for writing the launcher's last records to storage


@dataclass(kw_only=True)
class Supervisor:
    """One launcher's life, from its first look at the registry to its exit code. Built in __main__.py."""

    config: RunConfig
    registry: HostRegistry
    heartbeat: HeartbeatMesh
    workers: WorkerGroup
    recorder: Recorder
    folder: Path
    expected_hosts: int
    free_after: int  # the newest generation when this launcher found that no other run trains in the folder
    stop_request: Callable[[], StopRequest | None]
    check_host: Callable[[], str]  # why this host is unfit; empty if it is not
    committed_step: Callable[[], int | None]
    remembered_step: Callable[[], int]
    ask_to_flush: Callable[[], SaverConnection | None]  # these three: see `final_save`
    print_line: Callable[[str], None]
    uses_gpus: bool = False
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self._began_s = self.clock()
        self._stop_limit_s = self.config.fault.save_timeout_s + self.config.fault.shutdown_grace_s
        self._attempt: Attempt | None = None
        self._recovery: Recovering | None = None  # from the failure of a generation until a step of a later one is done
        self._stop_cost_s: float | None = None  # duration of the last end; waiting for hosts after it is no restart cost
        self._restart_cost_s = 0.0
        self._known = KnownStep()
        self._stopped_step, self._unforked = 0, ""
        self._waiting = WaitingMessages(self.print_line)
        self._prepared_for = 0  # the newest generation beside which workers were prepared
        self._retry_s = float("inf")
        self._hurried_until_s = self._began_s + _HURRIED_S

    def run(self) -> int:
        """Run until nothing is left to do here; returns the exit code.
        Raises: RunHeldError if another run took the folder first; this launcher must begin anew after it."""
        while True:
            self._look_after_workers()
            self._exchange_records()
            if (code := self._leave_if_taken()) is not None:
                return code
            if self.registry.record.state is HostState.UNFIT and self.clock() >= self._retry_s:
                self._check_again()
            if self.registry.known.reads or self.stop_request() is not None:
                decision = decide(self._cluster_state(), self.config.launch)
                if isinstance(decision, Leave):
                    return self._leave(decision.exit_code, decision.reason)
                self._act(decision)
                if isinstance(decision, Join):
                    # Its workers wait for nothing else.
                    continue
            self.sleep(_BRIEF_TURN_S if self.clock() < self._hurried_until_s else _TURN_S)

    def _exchange_records(self) -> None:
        """Publish whom this host hears; while it waits, send heartbeats to all live hosts."""
        self.registry.hears = tuple(sorted(self.heartbeat.heard[0]))
        news, received = self.heartbeat.pop_received()
        if received:
            self.registry.receive(received)
        if news:
            self.registry.wake(news)
        records = [one.record for one in self.registry.known.observed.values()] if self._attempt is None else []
        self.heartbeat.send_to([record for record in records if record.state is not HostState.GONE])

    def _cluster_state(self) -> ClusterState:
        (heard, heard_since_s), hours = self.heartbeat.heard, self.config.launch.max_hours
        request, run = self.stop_request(), self.workers.run
        return replace(
            self.registry.known,
            now_s=self.clock(),
            me=self.registry.record,
            running=self._attempt.generation if self._attempt is not None else None,
            silent=self.heartbeat.silent,
            heard=heard,
            heard_since_s=heard_since_s,
            expected_hosts=self.expected_hosts,
            ready=self.workers.ready,
            restart_cost_s=self._restart_cost_s,
            most_processes=self.config.train.global_batch,
            on_poisoned=self.config.fault.on_poisoned,
            left_s=max(0.0, self._began_s + 3600 * hours - self.clock()) if hours else float("inf"),
            stop_limit_s=self._stop_limit_s,
            stop_reason=f"asked to stop ({request.reason})" if request is not None else "",
            straggles=run.slow if run is not None else None,
        )

    def _act(self, decision: Decision) -> None:
        match decision:
            case Join(generation) if self._attempt is None:
                self._join(generation)
            case Create(generation) if generation.number not in self.registry.known.created:
                self.registry.post(generation)
            case Finish(end, at_once) if self._attempt is not None:
                self._finish(self._attempt, end, at_once=at_once)
            case LeaveOut(number, reason):
                self._leave_out(reason, ended=number)
            case Rejoin():
                self._check_again()
            case Wait():
                if self._attempt is None:
                    self._prepare_to_join()
                self._waiting.show(decision, now_s=self.clock())
            case _:
                pass

    def _join(self, generation: Generation) -> None:
        self._attempt = Attempt(generation=generation, joined_s=self.clock())
        self._known.join(generation.poisoned)
        self.registry.update(HostState.BUSY, committed_step=self._known.step)
        self.registry.attentive = generation.members[0].host == self.registry.record.host
        self.heartbeat.follow(generation)
        self._waiting.forget()
        names = tuple(member.name for member in generation.members)
        because = f", because {headline(generation.reason)}" if generation.reason else ""
        self.print_line(f"generation {generation.number}: {generation.world_size} worker(s) on {listed(names)}{because}")
        begun = GenerationBegun(names, generation.world_size, generation.reason, generation.pause_s)
        self.recorder.record(generation.number, begun)

    def _start(self, attempt: Attempt) -> None:
        generation, host = attempt.generation, self.registry.record.host
        restarted = self.registry.known.follows_another
        recovery = self._recovery.plan(generation) if self._recovery is not None else None
        if self._recovery is not None and not self._recovery.keeps_workers(generation):
            self.workers.release()
        environments = self._plan(generation, restarted=restarted, recovery=recovery)
        store_port = generation.master_port if generation.members[0].host == host else 0
        run = self.workers.start(environments, store_port=store_port)
        attempt.start(
            now_s=self.clock(),
            reused=run.reused,
            in_place=recovery is not None and recovery.rung == "in_place",
            init_timeout_s=self.config.fault.init_timeout_s,
        )

    def _plan(self, generation: Generation, *, restarted: bool, recovery: RecoveryPlan | None = None) -> list[dict[str, str]]:
        host, folder = self.registry.record.host, str(self.folder)
        return plan_workers(generation, host, folder=folder, pid=os.getpid(), restarted=restarted, recovery=recovery)

    def _finish(self, attempt: Attempt, end: End, *, at_once: bool) -> None:
        """End this host's part of the generation, and publish the end if it is this host's own."""
        request, now_s, own = self.stop_request(), self.clock(), end.host == self.registry.record.host
        if own and end.exit_code == EXIT_UNFIT:
            request = request or StopRequest(end.reason, now_s)  # the next generation does not have what this host keeps
        if attempt.finish(end, at_once=at_once, now_s=now_s, stop_limit_s=self._stop_limit_s, request=request):
            self._hurried_until_s = now_s + _HURRIED_S
            if own:
                self.registry.post(end)
                self.heartbeat.send_end(self.registry.record)

    def _look_after_workers(self) -> None:
        attempt, now_s = self._attempt, self.clock()
        if attempt is None:
            return
        if not attempt.started:
            if attempt.asked is not None:
                self._over(attempt, attempt.asked)
            elif now_s >= attempt.joined_s + attempt.generation.pause_s:
                self._start(attempt)
            return
        self._tell_workers(attempt, now_s=now_s)
        ended, run = self.workers.poll(), self.workers.run
        if ended is None and run is not None:
            if codes := run.codes:
                attempt.lose_worker(codes, now_s=now_s)
            elif late := attempt.late(now_s=now_s, silent=run.silent, attached=run.attached):
                number, host = attempt.generation.number, self.registry.record.host
                end = End(number, host, EndKind.FAILED, EXIT_TRANSPORT, str(Phase.START), 0, 0, late, blames=(host,))
                self._finish(attempt, end, at_once=True)
            if run.begun is not None and not attempt.begun:
                self._note_begin(attempt, unforked=run.unforked)
        elif ended is not None:
            self._over(attempt, self._judge(attempt, ended))

    def _tell_workers(self, attempt: Attempt, *, now_s: float) -> None:
        """What is due by now."""
        if now_s >= attempt.detach_s:
            attempt.detaching(now_s=now_s)
            self.workers.detach(attempt.reason)
        if now_s >= attempt.acknowledge_by_s:
            attempt.acknowledge_by_s = float("inf")
            self.workers.kill_unresponsive()
        if now_s >= attempt.ask_s:
            attempt.ask_s = now_s + _ASK_EVERY_S
            self.workers.ask_to_stop(attempt.stop_message(now_s=now_s))
        if now_s >= attempt.kill_s:
            self.workers.kill()

    def _judge(self, attempt: Attempt, ended: WorkersEnd) -> End:
        # Every step from which a start would resume counts. Storage is not asked: all hosts wait for this one.
        self._known.note(restored=ended.begun or 0, saved=(read_noted_step(str(self.folder)), self.remembered_step()))
        attempt.codes, attempt.finished_step = ended.codes, ended.finished_step
        attempt.hung = [one.rank for one in ended.reasons if one.guilty]
        self._stopped_step = max((one.step for one in ended.reasons if one.exit_code == EXIT_STOPPED), default=0)
        host, step = self.registry.record.host, self._known.step
        return attempt.conclude(judge_end(ended, generation=attempt.generation, host=host, committed_step=step))

    def _over(self, attempt: Attempt, end: End) -> None:
        """Close the generation here: nothing of it runs on this host any more."""
        number = attempt.generation.number
        host, since = self.registry.record.host, attempt.broken_at or event_time()
        lost = what_died(end, attempt, host=host)
        self._recovery = after_end(
            self._recovery, attempt.generation, end, since=since, lost=lost, finished_step=attempt.finished_step
        )
        if not end.loses_state and EXIT_TRANSPORT in attempt.codes.values():
            self.workers.release()  # connections broke: that may be the network, which new processes check
        self._hurried_until_s = self.clock() + _HURRIED_S
        self._attempt = None
        # The fork server may have ended, too; prepare() starts it again before the next generation.
        self.workers.prepare()
        self._stop_cost_s = self.clock() - attempt.asked_s if attempt.asked is not None else 0.0
        if end is not attempt.asked:
            self.registry.post(end)
        self.recorder.record(number, GenerationEnded.of(end, died=lost))
        if end.kind is not EndKind.DONE:
            self.print_line(f"generation {number} has ended here: {headline(end.reason)}")
        self.registry.attentive = True
        if end.host == host and end.exit_code == EXIT_UNFIT:
            self._leave_out(end.reason, ended=number)
        else:
            self.registry.update(HostState.READY, ended=number, master_port=bind_everywhere(0), committed_step=self._known.step)
        self.heartbeat.send_end(self.registry.record)

    def _prepare_to_join(self) -> None:
        """Beside a generation without this host: prepare workers for the place that it would get."""
        me = self.registry.record
        likely = likely_generation(self.registry.known.newest, me, self.config.launch)
        if likely is not None and likely.number > self._prepared_for:
            self._prepared_for = likely.number
            self.workers.prepare()
            self._keep_standbys(likely, auto=None, bound=("LOCAL_RANK",) if self.uses_gpus else ())

    def _keep_standbys(self, generation: Generation, *, auto: int | None, bound: tuple[str, ...]) -> None:
        """Have standbys for the ranks that this host has in `generation`. `auto`: how many where the configuration does not
        say it; None: all. `bound`: see `WorkerProcess`."""
        environments = self._plan(generation, restarted=True)
        number = auto if self.config.launch.standbys == "auto" else self.config.launch.standbys
        self.workers.keep_standbys(environments[:number], bound=bound)

    def _leave_out(self, reason: str, *, ended: int) -> None:
        self.workers.release()
        before = self.registry.record
        if before.state is not HostState.UNFIT:
            self._retry_s = self.clock() + (self.config.launch.retry_unfit_s or float("inf"))
        self.registry.update(HostState.UNFIT, reason=reason, ended=max(ended, before.ended), committed_step=self._known.step)

    def _note_begin(self, attempt: Attempt, *, unforked: str) -> None:
        """After the first step: measure the restart cost, and report what makes restarts slow."""
        attempt.begun, self._recovery = True, None
        # On a device a standby is built for one rank; on CPUs it takes any.
        self._keep_standbys(attempt.generation, auto=None if self.uses_gpus else 1, bound=BUILT_FOR if self.uses_gpus else ())
        if self._stop_cost_s is not None:
            self._restart_cost_s = self._stop_cost_s + self.clock() - attempt.joined_s
        # Once: slow restarts are no reason not to train.
        if unforked and unforked != self._unforked:
            self._unforked = unforked
            self.print_line(f"each restart imports torch anew, which takes seconds longer: {unforked}")
            self.recorder.record(attempt.generation.number, WorkersNotForked(reason=unforked))

    def _leave_if_taken(self) -> int | None:
        """Leave if a run that no launcher started took the folder, at the start or while this host was frozen or cut off.
        Raises: RunHeldError if it came first and `run.on_held` is "wait"."""
        newest = self.registry.known.newest
        if newest is None or newest.outcome is not GenerationOutcome.ELSEWHERE or newest.number <= self.free_after:
            return None
        if self._attempt is not None:
            # `decide` ends it at once.
            return None
        if self.config.run.on_held == "wait" and not self.registry.record.ended:
            # The other hosts must not count on this one; it has nothing to save.
            self.registry.update(HostState.GONE, reason=newest.reason)
            self.registry.close(limit_s=_LEAVING_LIMIT_S)
            self.heartbeat.close()
            raise RunHeldError(newest.reason)
        return self._leave(EXIT_STOPPED, newest.reason)

    def _check_again(self) -> None:
        if unfit := self.check_host():
            self.print_line(f"this host is still unfit: {unfit}")
            self._retry_s = self.clock() + (self.config.launch.retry_unfit_s or float("inf"))
            self.registry.update(HostState.UNFIT, reason=unfit)
        else:
            self.print_line("this host passes its checks again, and waits to be taken in")
            self.registry.update(HostState.READY, master_port=bind_everywhere(0))

    def _leave(self, code: int, reason: str) -> int:
        self.workers.close()
        newest = self.registry.known.newest
        self.recorder.record(newest.number if newest is not None else 0, LauncherEnded(exit_code=code, reason=reason))
        # Before any wait: the others must not count on this host.
        self.registry.update(HostState.GONE, reason=reason)
        final = self._final_save() if code != EXIT_OK else FinalSave(self.committed_step())
        # Before further waits: a process killed at a deadline gets no time after it.
        self.print_line(exit_message(code, reason, run_dir=self.config.run.dir, final=final))
        self.registry.close(limit_s=_LEAVING_LIMIT_S)
        self.heartbeat.close()
        request, left_s = self.stop_request(), PREVIOUS_EXIT_TIMEOUT_S
        if request is not None and request.deadline_s is not None:
            left_s = min(left_s, request.deadline_s - self.clock())
        self.workers.wait_until_gone(left_s)
        return code

    def _final_save(self) -> FinalSave:
        """Have the saver write what only memory has: in a container every process ends with this one, the saver too."""
        request, notice_s = self.stop_request(), self.config.fault.notice_s
        return await_final_save(
            max(self._stopped_step, self.remembered_step()),
            until_s=final_save_until_s(request, now_s=self.clock(), notice_s=notice_s),
            committed_step=self.committed_step,
            ask=self.ask_to_flush,
            print_line=self.print_line,
            clock=self.clock,
            sleep=self.sleep,
        )
