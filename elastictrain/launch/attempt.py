"""One host's part in a generation: how far it is, and what its workers left behind."""

import itertools
from dataclasses import dataclass
from pathlib import Path

from elastictrain.fault.reasons import read_reasons
from elastictrain.launch.ending import Remains
from elastictrain.launch.membership.records import End, Generation
from elastictrain.launch.orders import ANSWER_NAME, read_answer


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
