"""One host's part in a generation: how far it is, and what its workers left behind."""

import itertools
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from elastictrain.fault.reasons import Reason, read_reasons
from elastictrain.launch.membership.records import End, EndKind, Generation
from elastictrain.launch.orders import ANSWER_NAME, read_answer

_EXPLAINS_MOST = (EXIT_CONFIG, EXIT_USAGE, EXIT_UNFIT, EXIT_BUG, EXIT_STORAGE)
"""Codes that tell a cause, the clearest first. Then comes the death of a worker; a transport failure may be its consequence."""

_OWN_CODES = frozenset((EXIT_OK, *_EXPLAINS_MOST, EXIT_TRANSPORT, EXIT_STOPPED))

_SIGNAL_BASE = 128


@dataclass(frozen=True, slots=True)
class Remains:
    """What is known when a torchrun is gone."""

    torchrun_code: int
    signals: Mapping[int, int]
    """By local rank: the exit codes that torchrun saw, negative for a signal."""

    reasons: Sequence[Reason]
    committed_step: int
    """The newest step that a start would go on from: in storage, or the one that this generation went on from."""

    first_rank: int = 0
    """Rank of the host's first worker: reasons go by rank."""

    missing: tuple[str, ...] = ()
    """Other hosts that did not meet this one in torchrun's store in time."""


def judge_end(remains: Remains, *, generation: int, host: str) -> End:
    """How it ended, if nobody had asked for it."""
    committed = remains.committed_step
    if remains.torchrun_code == EXIT_OK:
        return End(generation, host, EndKind.DONE, EXIT_OK, "", 0, committed, "the last step is done")
    chosen = _choose(remains)
    if chosen is not None:
        # As where no heartbeats of a host arrive any more, which is nobody's failure.
        missing = remains.missing if chosen.exit_code == EXIT_TRANSPORT else ()
        return End(
            generation,
            host,
            EndKind.LOST if missing else EndKind.FAILED,
            chosen.exit_code,
            chosen.phase,
            chosen.step,
            committed,
            chosen.sentence,
            lost=next(iter(missing), ""),
            blames=(host,) if any(reason.guilty for reason in remains.reasons) else missing,
        )
    where = next((reason for reason in remains.reasons if reason.exit_code == EXIT_TRANSPORT), None)
    phase, step = (where.phase, where.step) if where else ("", 0)
    dead = _first_dead(remains)
    if dead is None and remains.torchrun_code < 0:
        sentence = f"torchrun was ended by {_name(-remains.torchrun_code)}"
        return End(generation, host, EndKind.FAILED, _SIGNAL_BASE - remains.torchrun_code, phase, step, committed, sentence)
    if dead is None:
        known = [code for code in (*_EXPLAINS_MOST, EXIT_TRANSPORT, EXIT_STOPPED) if code in remains.signals.values()]
        exit_code, who = (known[0], f"exit code {known[0]}") if known else (EXIT_BUG, f"torchrun: {remains.torchrun_code}")
        sentence = f"workers ended without a word ({who})"
        return End(generation, host, EndKind.FAILED, exit_code, phase, step, committed, sentence)
    rank, code = dead
    how = f"was ended by {_name(-code)}" if code < 0 else f"ended with exit code {code} without a word"
    exit_code = _SIGNAL_BASE - code if code < 0 else EXIT_BUG
    return End(generation, host, EndKind.FAILED, exit_code, phase, step, committed, f"local rank {rank} {how}")


def _choose(remains: Remains) -> Reason | None:
    """The reason that explains most; None if a worker or torchrun died without one: the others may only have noticed that."""
    # What torchrun says of itself, which is no rank, comes last: of what workers do it knows least.
    last_first = sorted(remains.reasons, key=lambda reason: (reason.rank >= 0, -reason.rank))
    by_code = {reason.exit_code: reason for reason in last_first}
    for code in _EXPLAINS_MOST:
        if code in by_code:
            return by_code[code]
    dead = _first_dead(remains)
    hung = any(reason.guilty for reason in remains.reasons)
    # One that hung was killed by its host, which says why.
    if not hung and (remains.torchrun_code < 0 or (dead is not None and dead[1] != -signal.SIGTERM)):
        return None
    guilty = next((reason for reason in remains.reasons if reason.guilty), None)
    return guilty or by_code.get(EXIT_TRANSPORT) or by_code.get(EXIT_STOPPED)


def _first_dead(remains: Remains) -> tuple[int, int] | None:
    """A local rank that did not end as our workers do, and its code: if possible not one that torchrun asked to end.

    One that has left a reason, or for which one was left, is explained: a hang is ended by SIGKILL.
    """
    explained = {reason.rank - remains.first_rank for reason in remains.reasons}
    codes = sorted(remains.signals.items())
    strange = [(rank, code) for rank, code in codes if code not in _OWN_CODES and rank not in explained]
    return min(strange, key=lambda one: one[1] == -signal.SIGTERM, default=None)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A generation in which this host takes part. Times are monotonic."""

    generation: Generation
    joined_s: float
    starts_s: float
    """When its torchrun is due."""

    started: bool = False
    asked: End | None = None
    """Why it is being ended here, if it is; the word of another host where that one came first."""

    asked_s: float = float("inf")
    begun: bool = False
    """Whether its first step is through, as far as this host's workers said."""

    ask_s: float = float("inf")
    """When its workers are asked to end once more: some may not have been there yet."""

    kill_s: float = float("inf")
    """When workers that have not ended by themselves are killed."""


def read_remains(attempt: Attempt, folder: Path, *, host: str, code: int, committed_step: int) -> Remains:
    """What is left of it on this host; `code` is torchrun's."""
    members = attempt.generation.members
    before = itertools.takewhile(lambda member: member.host != host, members)
    first_rank = sum(member.processes for member in before)
    answer = read_answer(folder / ANSWER_NAME)
    missing = tuple(members[place].host for place in answer.missing if 0 <= place < len(members))
    return Remains(code, answer.codes, read_reasons(str(folder)), committed_step, first_rank, missing)
