"""A worker's hang handling: it publishes its progress, watches its peers, and diagnoses which rank hangs."""

import logging
import time
from contextlib import ExitStack
from dataclasses import replace

from elastictrain.bounded_json import encode_record
from elastictrain.checkpoint.saver.link import SaverLink
from elastictrain.config.composed import RunConfig
from elastictrain.distributed.bounded import within
from elastictrain.events import CollectiveFaultFound, Hang
from elastictrain.fault.launcher_channel import Monitored, tell_launcher
from elastictrain.identity import Identity
from elastictrain.liveness.diagnosis import RankStatus, diagnose, paragraph
from elastictrain.liveness.flight_recorder import Entered, parse_trace
from elastictrain.liveness.heartbeats import PeerMonitor
from elastictrain.liveness.monitor_client import MonitoredHost, RankMonitorClient
from elastictrain.liveness.progress import ProgressMark, ProgressTracker
from elastictrain.liveness.watchdog import LAUNCHER_PATIENCE_S, LostPeer, Others, Overdue, bound_s
from elastictrain.storage.opening import absolute_url
from elastictrain.torch_private import flight_recorder, follow_compilations
from elastictrain.train.context import TrainContext

logger = logging.getLogger(__name__)

_STORE_LIMIT_S = 3.0


class HangWatch:
    """Works from the moment the ranks have met; before that it observes nothing."""

    def __init__(self, config: RunConfig, identity: Identity, tracker: ProgressTracker) -> None:
        self._config = config
        self._identity = identity
        self._tracker = tracker
        self._context: TrainContext | None = None
        self._link: SaverLink | None = None
        self._grouped_by = ""
        self._monitor_client: RankMonitorClient | None = None
        self._peer_monitor: PeerMonitor | None = None
        self._traced: tuple[ProgressMark, str] | None = None
        self._met_ns = 0  # when the ranks of this generation have met, unix time
        # The hang that ends this rank, with its collective, and the stacks of this host's ranks.
        self._hang: tuple[Hang, CollectiveFaultFound | None, str] | None = None

    def begin(self, context: TrainContext) -> None:
        """Start after the ranks have met. A process that no one would restart is not monitored. A launcher monitors the workers
        of its host itself."""
        self._context, self._met_ns = context, time.time_ns()
        if not self._identity.launched:
            return
        self._peer_monitor = PeerMonitor(context.heartbeats, entered=self.entered)
        self._peer_monitor.start()
        config, identity = self._config, self._identity
        facts = MonitoredHost(
            generation=context.generation.name,
            host=identity.host,
            ranks=tuple(identity.host_ranks),
            run_dir=absolute_url(config.run.dir),
            flush_s=config.telemetry.flush_s,
            close_s=config.fault.close_s,
        )
        try:
            with ExitStack() as undo:
                monitor_client = RankMonitorClient(facts, rank=identity.rank, options=config.fault)
                undo.callback(monitor_client.close)
                if identity.local_rank == 0 and identity.launcher is None:
                    monitor_client.start_monitor()
                undo.pop_all()
        except OSError as error:
            logger.warning("no rank monitor (%s): a hang that holds the interpreter lock will not be ended", error)
            return
        self._monitor_client = monitor_client
        if identity.local_rank == 0:
            tell_launcher(identity, Monitored(monitor_client.folder, encode_record(facts).decode()))
        self._tracker.follow(self._on_mark)

    def group_formed(self, backend: str, link: SaverLink | None) -> None:
        """From now on collectives of `backend` may notice a lost rank, and the saver reports lost ranks of this host."""
        self._grouped_by, self._link = backend, link

    def beat(self) -> None:
        """Show that threads of this process can run."""
        if self._monitor_client is not None:
            self._monitor_client.progress.beat()

    def others(self) -> Others:
        """A lost rank, and whether a silence beyond this rank's bound will not end by itself."""
        peers = self._peer_monitor
        lost = peers.failed_peer if peers is not None else None
        if self._link is not None and self._link.lost is not None:
            rank, since_s = self._link.lost
            lost = LostPeer(f"rank {rank} of this host", since_s)
        if lost is not None:
            if self._identity.launcher is not None:
                # It knows of the loss, too, and this process goes on in the next generation.
                lost = replace(lost, patience_s=LAUNCHER_PATIENCE_S)
            elif self._grouped_by == "nccl":
                # NCCL never notices a lost rank.
                lost = replace(lost, patience_s=0.0)
        return Others(lost, in_vain=peers is not None and peers.in_vain)

    @property
    def trace(self) -> str | None:
        """This rank's last collectives as JSON, taken when its present long silence began; None if it is not silent."""
        traced = self._traced
        return traced[1] if traced is not None and traced[0] is self._tracker.mark else None

    def announce_ending(self) -> None:
        """This rank ends because of an error; the rank monitor leaves it time to report."""
        if self._monitor_client is not None:
            self._monitor_client.progress.announce_ending()

    def notify_others(self) -> None:
        """Announce the end of this rank: a collective of the other ranks may never notice it."""
        # Before the first step ranks find the same faults at different times, and each host must report its own.
        if self._context is not None and self._tracker.mark.first_step_done:
            self._context.heartbeats.announce_failure()

    @property
    def holds_others_up(self) -> bool:
        """Whether the others wait in a collective that this rank has not entered. If it has, it may wait for a link."""
        found = self._peer_monitor.diagnosis if self._peer_monitor is not None else None
        fault = found.fault if found is not None else None
        return fault is not None and fault.kind in ("missing", "not_started") and self._identity.rank in fault.culprits

    def waits_for_another(self, overdue: Overdue) -> bool:
        """Whether this rank only waits for one that hangs or is gone, as far as is known."""
        if not overdue.hangs:
            # A lost rank, for which stacks show nothing; or an end that was asked for and takes too long.
            return not overdue.show_stacks
        found = self._peer_monitor.diagnosis if self._peer_monitor is not None else None
        return found is not None and bool(found.guilty) and not found.is_guilty(self._identity.rank)

    def name_culprits(self, overdue: Overdue) -> str:
        """Diagnose a hang, as the end of a sentence; takes a bounded time."""
        found = self._peer_monitor.diagnosis if self._peer_monitor is not None else None
        mark, rank = self._tracker.mark, self._identity.rank
        if found is None and self._identity.world_size == 1:
            silent_s = time.monotonic() - mark.since_s
            status = RankStatus(rank, self._identity.host, mark, silent_s, bound_s(mark, self._config.fault))
            found = diagnose([status], frozen_s=float("inf"))
        if found is None or not overdue.hangs:
            return ""
        text = paragraph(found)
        # One record per hang: the guilty rank writes it, as long as it can.
        if found.is_guilty(rank) or rank == min((one.rank for one in found.waiting), default=rank):
            key, stacks = None, ""
            if self._monitor_client is not None and self._context is not None:
                key = f"stacks/{self._context.generation.name}-r{rank:05d}.txt"
                stacks = self._monitor_client.take_stacks()
            self._hang = found.event(text, stacks=key), found.collective_event, stacks
        return f"\n{text}"

    def keep_record(self) -> None:
        """Record a hang in the run folder. The wait is short, since storage itself may hang."""
        if self._context is None or self._hang is None:
            return
        journal, store, (hang, collective, stacks) = self._context.journal, self._context.store, self._hang

        def record() -> None:
            journal.record(hang)
            if collective is not None:
                journal.record(collective)

        within(_STORE_LIMIT_S, record)
        if (key := hang.stacks) is not None:
            within(_STORE_LIMIT_S, lambda: store.write(key, stacks.encode()))

    def close(self) -> None:
        """Close from the main thread when the run ends without an error."""
        self.close_peers()
        self.close_monitor()

    def close_peers(self) -> None:
        """Observe the other ranks no more. May wait for the shared store, for a second."""
        if self._peer_monitor is not None:
            self._peer_monitor.close()

    def close_monitor(self) -> None:
        """From the main thread: leave the monitor of this generation."""
        monitor_client, self._monitor_client = self._monitor_client, None
        if monitor_client is not None:
            monitor_client.close()

    def entered(self) -> Entered:
        """The last collectives that this rank has entered; `trace` keeps them while the silence lasts."""
        mark, trace = self._tracker.mark, flight_recorder()
        if trace is None:
            return Entered()
        self._traced = mark, trace
        return parse_trace(trace, since_ns=self._met_ns).shortened(self._identity.world_size)

    def _on_mark(self, mark: ProgressMark) -> None:
        if self._monitor_client is not None:
            self._monitor_client.write(mark)
        if not mark.first_step_done or self._tracker.sees_compiler:
            return
        self._tracker.sees_compiler = True
        tell = self._tracker.compiling
        if changes := follow_compilations(begins=lambda: tell(begins=True), ends=lambda: tell(begins=False)):
            message = "a compilation after the first step counts as a hang if it takes longer than a step may: %s"
            logger.warning(message, changes[0])
