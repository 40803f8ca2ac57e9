"""One host's part in a generation: how far it is, and what its workers left behind."""

import logging
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from elastictrain.errors import (
    EXIT_BUG,
    EXIT_CONFIG,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_STORAGE,
    EXIT_TRANSPORT,
    EXIT_UNFIT,
    EXIT_USAGE,
)
from elastictrain.fault.reasons import Reason
from elastictrain.fault.stop import StopNote, write_stop_note
from elastictrain.launch.membership.messages import listed
from elastictrain.launch.membership.records import End, EndKind, Generation
from elastictrain.launch.worker_group import STOP_NAME, WorkersEnd

logger = logging.getLogger(__name__)

_BY_THEMSELVES_S = 0.5
"""How long workers of a host that has lost one have before they are asked to end: they notice it, and say what they know."""

_ASKED_S = 30.0  # how long they have after that, as with torchrun

_DEAD_GROUP_S = 1.5
"""How long workers of a group that has lost one may take to end by themselves: they have nothing to save any more."""

_EXPLAINS_MOST = (EXIT_CONFIG, EXIT_USAGE, EXIT_UNFIT, EXIT_BUG, EXIT_STORAGE)
"""Codes that tell a cause, the clearest first. Then comes the death of a worker; a transport failure may be its consequence."""

_OWN_CODES = frozenset((EXIT_OK, *_EXPLAINS_MOST, EXIT_TRANSPORT, EXIT_STOPPED))

_SIGNAL_BASE = 128


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A generation in which this host takes part. Times are monotonic."""

    generation: Generation
    folder: Path  # for what the launcher and the workers tell each other
    joined_s: float
    started: bool = False
    begun: bool = False  # whether its first step is through, as far as this host's workers said
    asked: End | None = None  # why it is being ended here, if it is; the end of another host where that one came first
    asked_s: float = inf
    ask_s: float = inf  # when its workers are asked to end once more: some may not have been there yet
    kill_s: float = inf

    def lose_worker(self, *, now_s: float) -> None:
        """One of this host's workers has failed: the others end, too. May be called again and again."""
        self.ask_s = min(self.ask_s, now_s + _BY_THEMSELVES_S)
        self.kill_s = min(self.kill_s, now_s + _BY_THEMSELVES_S + _ASKED_S)

    def finish(self, end: End, *, at_once: bool, now_s: float, stop_limit_s: float, deadline_s: float | None) -> bool:
        """Have it end; returns whether nobody had asked for that before.

        `stop_limit_s` is what an orderly end may take, `deadline_s` when somebody takes this host away.
        """
        if at_once:
            # Also where an orderly end is under way, which will not come any more.
            self.kill_s = min(self.kill_s, now_s + _DEAD_GROUP_S)
        if self.asked is not None:
            if deadline_s is not None and deadline_s < self.kill_s:
                # This host is wanted back, or sooner than was known: what is under way for another reason has less time.
                self.kill_s = deadline_s
                self._write_stop_note(self.asked, now_s=now_s)
            return False
        self.asked, self.asked_s = end, now_s
        if not at_once:
            self.kill_s = min(self.kill_s, now_s + stop_limit_s if deadline_s is None else deadline_s)
            self.ask_s = now_s
            self._write_stop_note(end, now_s=now_s)
        return True

    def _write_stop_note(self, end: End, *, now_s: float) -> None:
        """Tell the workers why they are stopped and until when; they read it at the next signal that they get."""
        if self.ask_s == inf:
            return
        # Workers say by themselves that they are asked to stop.
        reason = end.reason.removeprefix("asked to stop (").removesuffix(")")
        try:
            # Folders for temporary files are swept of what is old, and a generation may last for weeks.
            self.folder.mkdir(parents=True, exist_ok=True)
            write_stop_note(str(self.folder / STOP_NAME), StopNote(reason, time.time() + self.kill_s - now_s))
        except OSError as error:
            # The signal alone makes them save, too.
            logger.warning("the workers cannot be told why they are stopped: %s", error)


def judge_end(ended: WorkersEnd, reasons: Sequence[Reason], *, generation: Generation, host: str, committed_step: int) -> End:
    """How it ended, if nobody had asked for it. `reasons` are what the host's workers have left."""
    number = generation.number
    if ended.code == EXIT_OK:
        return End(number, host, EndKind.DONE, EXIT_OK, "", 0, committed_step, "the last step is done")
    # A worker that has left a reason, or for which one was left, is explained: a hang is ended by SIGKILL.
    explained = {reason.rank - generation.first_rank(host) for reason in reasons}
    strange = [(rank, code) for rank, code in sorted(ended.codes.items()) if code not in _OWN_CODES and rank not in explained]
    # A local rank that did not end as our workers do, and its code: if possible not one that was asked to end.
    dead = min(strange, key=lambda one: one[1] == -signal.SIGTERM, default=None)
    chosen = _choose(ended, reasons, dead)
    if chosen is None:
        exit_code, sentence = _describe_death(ended, dead)
        where = next((reason for reason in reasons if reason.exit_code == EXIT_TRANSPORT), None)
        phase, step = (where.phase, where.step) if where else ("", 0)
        return End(number, host, EndKind.FAILED, exit_code, phase, step, committed_step, sentence)
    missing = {generation.host_of(rank): None for rank in chosen.missing}
    missing.pop(host, None)
    sentence = chosen.sentence
    if missing:
        names = listed(member.name for member in generation.members if member.host in missing)
        sentence = f"{names} did not meet the workers of this host: {sentence}"
    return End(
        number,
        host,
        # As where no heartbeats of a host arrive any more, which is nobody's failure.
        EndKind.LOST if missing else EndKind.FAILED,
        chosen.exit_code,
        chosen.phase,
        chosen.step,
        committed_step,
        sentence,
        lost=next(iter(missing), ""),
        blames=(host,) if any(reason.guilty for reason in reasons) else tuple(missing),
    )


def _describe_death(ended: WorkersEnd, dead: tuple[int, int] | None) -> tuple[int, str]:
    """Exit code and sentence where nobody has left a reason."""
    if dead is not None:
        rank, code = dead
        if code < 0:
            return _SIGNAL_BASE - code, f"local rank {rank} was ended by {_signal_name(-code)}"
        return EXIT_BUG, f"local rank {rank} ended with exit code {code} without a word"
    if ended.code < 0:
        return _SIGNAL_BASE - ended.code, f"the fork server was ended by {_signal_name(-ended.code)}"
    known = [code for code in (*_EXPLAINS_MOST, EXIT_TRANSPORT, EXIT_STOPPED) if code in ended.codes.values()]
    if known:
        return known[0], f"workers ended without a word (exit code {known[0]})"
    return EXIT_BUG, f"workers ended without a word (fork server: {ended.code})"


def _choose(ended: WorkersEnd, reasons: Sequence[Reason], dead: tuple[int, int] | None) -> Reason | None:
    """The reason that explains most; None if a worker or the fork server died without one: the others may only have noticed."""
    # What the fork server says of itself, which is no rank, comes last: of what workers do it knows least.
    last_first = sorted(reasons, key=lambda reason: (reason.rank >= 0, -reason.rank))
    by_code = {reason.exit_code: reason for reason in last_first}
    for code in _EXPLAINS_MOST:
        if code in by_code:
            return by_code[code]
    guilty = next((reason for reason in reasons if reason.guilty), None)
    # One that hung was killed by its host, which says why.
    if guilty is None and (ended.code < 0 or (dead is not None and dead[1] != -signal.SIGTERM)):
        return None
    return guilty or by_code.get(EXIT_TRANSPORT) or by_code.get(EXIT_STOPPED)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
