"""Generations that live on side by side, and commit whatever they like: what a start makes of it."""

from collections.abc import Iterable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integration.simulated.commits import Commit, Made, Resume, Stale, is_stale


def overlap(seed: int, stale: Stale) -> tuple[list[Made], list[Resume]]:
    """Generations that all live on side by side. Each sees what the others wrote late, and in any order."""
    random = Random(seed)
    made: list[Made] = []
    resumes: list[Resume] = []
    begun: dict[int, tuple[Made | None, int]] = {}
    on_its_way: list[Made | Resume] = []
    for _ in range(random.randint(5, 40)):
        number = random.randint(1, 5)
        if random.random() < 0.4 and on_its_way:
            record = on_its_way.pop(random.randrange(len(on_its_way)))
            resumes.append(record) if isinstance(record, Resume) else made.append(record)
        elif number not in begun:
            known = [resume for resume in resumes if random.random() < 0.8]
            observed = [one for one in made if random.random() < 0.8]
            parent = max(
                (one for one in observed if not stale(one.commit, known)), key=lambda one: one.commit.step, default=None
            )
            step = 0 if parent is None else parent.commit.step
            begun[number] = (parent, step)
            on_its_way.append(Resume(number, step, 0 if parent is None else parent.commit.generation))
        elif any(resume.generation == number for resume in resumes):
            # It commits nothing before its record is there.
            parent, step = begun[number]
            step += random.randint(1, 5)
            begun[number] = (parent, step)
            on_its_way.append(Made(Commit(number, step), parent))
    return made, resumes


def is_one_history(seed: int, stale: Stale) -> bool:
    made, resumes = overlap(seed, stale)
    history = sorted((one for one in made if not stale(one.commit, resumes)), key=lambda one: one.commit.step)
    newest = max(resumes, key=lambda resume: resume.generation, default=None)
    if newest is not None and newest.step and stale(Commit(newest.parent, newest.step), resumes):
        return False
    return all(before.commit.step < after.commit.step and after.stands_on(before) for before, after in pairwise(history))


@settings(max_examples=2000, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_is_not_stale_is_one_history(seed: int) -> None:
    assert is_one_history(seed, is_stale)


def by_step_alone(commit: Commit, resumes: Iterable[Resume]) -> bool:
    return any(resume.generation > commit.generation and resume.step < commit.step for resume in resumes)


def never(commit: Commit, resumes: Iterable[Resume]) -> bool:
    return False


@pytest.mark.parametrize("weaker", [by_step_alone, never])
def test_weaker_rules_mix_histories(weaker: Stale) -> None:
    assert not all(is_one_history(seed, weaker) for seed in range(3000))
