"""Everything that a worker does about hangs: it shows where it is, looks at the others, and says whose fault a hang is."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastictrain.config.composed import RunConfig
from elastictrain.distributed.bounded import within
from elastictrain.distributed.entered import Entered, last_entered
from elastictrain.distributed.group import flight_recorder
from elastictrain.events import Hang
from elastictrain.fault.hang.guilty import Blame, blame, paragraph
from elastictrain.fault.hang.outpost import HostFacts, Outpost
from elastictrain.fault.hang.standing import Standing
from elastictrain.fault.watchdog import LostPeer, Overdue, bound_s
from elastictrain.fault.whereabouts import Mark, Whereabouts
from elastictrain.identity import Identity
from elastictrain.storage.opening import absolute_url
from elastictrain.torch_private import follow_compilations
from elastictrain.train.bringup import Met
from elastictrain.train.lookout import Lookout

logger = logging.getLogger(__name__)

_STORE_LIMIT_S = 3.0


@dataclass(frozen=True, slots=True)
class Accusation:
    """What is known of a hang that ends this rank."""

    text: str
    hang: Hang | None
    """The record of it; None where another rank keeps it."""

    stacks: str
    """Of all ranks of this host."""


class HangWatch:
    """Complete from the moment on that the ranks have met; before that it knows of nothing."""

    def __init__(self, config: RunConfig, identity: Identity, whereabouts: Whereabouts) -> None:
        self._config = config
        self._identity = identity
        self._whereabouts = whereabouts
        self._met: Met | None = None
        self._outpost: Outpost | None = None
        self._lookout: Lookout | None = None
        self._sees_compiler = False
        self._traced: tuple[Mark, str] | None = None

    def begin(self, met: Met) -> None:
        """The ranks have met. Where nobody starts this process again, nobody ends it from outside either."""
        self._met = met
        if not self._identity.launched:
            return
        self._lookout = Lookout(
            met.board,
            rank=self._identity.rank,
            mark=lambda: self._whereabouts.mark,
            entered=self._entered,
            options=self._config.fault,
        )
        self._lookout.start()
        try:
            self._outpost = self._open_outpost(met)
        except OSError as error:
            logger.warning("this rank is not watched from outside (%s): a hang that holds its locks is not ended", error)
            return
        self._whereabouts.follow(self._on_mark)

    def beat(self) -> None:
        """Threads of this process can run."""
        if self._outpost is not None:
            self._outpost.beat()

    @property
    def in_vain(self) -> bool:
        """Whether a silence beyond this rank's bound will not end by itself."""
        return self._lookout is not None and self._lookout.in_vain

    @property
    def fallen(self) -> LostPeer | None:
        """Another rank that ends because of an error."""
        return self._lookout.fallen if self._lookout is not None else None

    @property
    def trace(self) -> str | None:
        """The last collectives of this rank as JSON, as they were when it began to be silent for long, if it is."""
        traced = self._traced
        return traced[1] if traced is not None and traced[0] is self._whereabouts.mark else None

    def say_ending(self) -> None:
        """This rank ends because of an error, and is left the time to say so."""
        if self._outpost is not None:
            self._outpost.say_ending()

    def tell_others(self) -> None:
        """This rank ends because of an error, which a collective of the others may never notice."""
        # Before the first step ranks find the same faults at different times, and each host is to say its own.
        if self._met is not None and self._whereabouts.mark.first_step_done:
            self._met.board.fall()

    def accuse(self, overdue: Overdue) -> Accusation:
        """What there is to say of a hang, as the end of a sentence; takes a bounded time."""
        if not overdue.hangs:
            return Accusation("", None, "")
        found = self._lookout.blame if self._lookout is not None else None
        mark, rank = self._whereabouts.mark, self._identity.rank
        if found is None and self._identity.world_size == 1:
            found = blame([self._standing(mark)], frozen_s=float("inf"))
        if found is None:
            return Accusation("", None, "")
        text = paragraph(found)
        # One record of one hang: the guilty rank's, as long as it can write one.
        first_waiting = min((one.rank for one in found.waiting), default=rank)
        if not found.is_guilty(rank) and rank != first_waiting:
            return Accusation(f"\n{text}", None, "")
        stacks = self._outpost.take_stacks() if self._outpost is not None else ""
        return Accusation(f"\n{text}", self._event(found, mark, text), stacks)

    def keep(self, accusation: Accusation) -> None:
        """Record a hang in the run's folder. Storage may be what hangs: it is not waited for long."""
        met, hang = self._met, accusation.hang
        if met is None or hang is None:
            return
        within(_STORE_LIMIT_S, lambda: met.journal.record(hang))
        if hang.stacks is not None:
            key = hang.stacks
            within(_STORE_LIMIT_S, lambda: met.store.write(key, accusation.stacks.encode()))

    def close(self) -> None:
        """The run ends as it should; from the main thread."""
        if self._lookout is not None:
            self._lookout.close()
        if self._outpost is not None:
            self._outpost.close()

    def _open_outpost(self, met: Met) -> Outpost:
        config, identity = self._config, self._identity
        facts = HostFacts(
            incarnation=met.incarnation.name,
            host=identity.host,
            ranks=tuple(identity.host_ranks),
            run_dir=absolute_url(config.run.dir),
            flush_s=config.telemetry.flush_s,
            close_s=config.fault.close_s,
            launcher_folder=identity.launcher.folder if identity.launcher is not None else "",
        )
        outpost = Outpost(facts, rank=identity.rank, options=config.fault)
        if identity.local_rank == 0:
            try:
                outpost.start_watcher()
            except OSError:
                outpost.close()
                raise
        return outpost

    def _entered(self) -> Entered:
        mark, trace = self._whereabouts.mark, flight_recorder()
        if trace is None:
            return Entered()
        self._traced = mark, trace
        return last_entered(trace)

    def _on_mark(self, mark: Mark) -> None:
        if self._outpost is not None:
            self._outpost.write(mark)
        if mark.first_step_done and not self._sees_compiler:
            self._sees_compiler = True
            _follow_compiler(self._whereabouts.compiling)

    def _standing(self, mark: Mark) -> Standing:
        silent_s = time.monotonic() - mark.since_s
        return Standing(self._identity.rank, self._identity.host, mark, silent_s, bound_s(mark, self._config.fault))

    def _event(self, found: Blame, mark: Mark, text: str) -> Hang:
        first = found.guilty[0] if found.guilty else self._standing(mark)
        met = self._met
        name = f"{met.incarnation.name}-r{self._identity.rank:05d}" if met is not None else ""
        return Hang(
            guilty=tuple(one.name for one in found.guilty),
            hosts=tuple(sorted({one.host for one in found.guilty})),
            reason=found.reason,
            phase=str(first.mark.phase),
            step=first.mark.step,
            silent_s=round(first.silent_s, 3),
            bound_s=first.bound_s,
            waiting={one.name: f"{one.mark}{f', {one.collective}' if one.collective else ''}" for one in found.waiting},
            text=text,
            stacks=f"stacks/{name}.txt" if self._outpost is not None else None,
        )


def _follow_compiler(tell: Callable[..., None]) -> None:
    """Hear of compilations from now on, if anything in this process compiles."""
    changes = follow_compilations(begins=lambda: tell(begins=True), ends=lambda: tell(begins=False))
    if changes:
        logger.warning("a compilation after the first step counts as a hang if it takes longer than a step may: %s", changes[0])
