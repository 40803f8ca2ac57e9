"""Commits of generations that may overlap, and the rule by which a start tells which of them lie on one line."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from elastictrain.checkpoint.lineage import ResumeOrigin, is_in_lineage


@dataclass(frozen=True, slots=True)
class Commit:
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a generation went on from: the step, and the generation that had committed it."""

    generation: int
    step: int
    parent: int


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A commit, and the one that its generation went on from: the truth, which no reader knows."""

    commit: Commit
    parent: "Made | None"

    def stands_on(self, other: "Made") -> bool:
        made: Made | None = self
        while made is not None:
            first_step = 0 if made.parent is None else made.parent.commit.step
            if made.commit.generation == other.commit.generation:
                return first_step < other.commit.step <= made.commit.step
            made = made.parent
        return False


Stale = Callable[[Commit, Iterable[Resume]], bool]


def is_stale(commit: Commit, resumes: Iterable[Resume]) -> bool:
    """As the checkpoints' own rule has it."""
    origins = {
        _name(one.generation): ResumeOrigin(
            one.generation, _name(one.generation), one.step, _name(one.parent) if one.step else ""
        )
        for one in resumes
    }
    newest = max(origins.values(), key=lambda origin: origin.generation, default=None)
    return not is_in_lineage(_name(commit.generation), commit.step, newest=newest, lookup=origins.get)


def _name(generation: int) -> str:
    return f"{generation:04d}-made"
