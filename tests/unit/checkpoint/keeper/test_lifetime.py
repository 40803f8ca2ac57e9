from dataclasses import replace
from itertools import product

from elastictrain.checkpoint.keeper.lifetime import ALONE_S, Life, decide

LIFE = Life(workers=1, agents=1, ever=True, age_s=1000.0, saving=False, finished=False, flushed=False)


def test_as_long_as_anybody_may_come_back() -> None:
    assert decide(LIFE) == "stay"
    assert decide(replace(LIFE, workers=0)) == "stay"
    assert decide(replace(LIFE, agents=0)) == "stay"
    assert decide(replace(LIFE, workers=0, agents=0)) == "flush"
    assert decide(replace(LIFE, workers=0, agents=0, flushed=True)) == "leave"
    assert decide(replace(LIFE, workers=0, agents=0, flushed=True, unsaved=True)) == "keep"
    assert decide(replace(LIFE, workers=0, agents=0, flushed=True, unsaved=True, finished=True)) == "leave"


def test_the_end_of_a_run() -> None:
    assert decide(replace(LIFE, finished=True)) == "stay"
    assert decide(replace(LIFE, finished=True, workers=0)) == "leave"
    assert decide(replace(LIFE, finished=True, workers=0, saving=True)) == "stay"


def test_a_keeper_that_nobody_spoke_to_waits_a_while() -> None:
    alone = replace(LIFE, workers=0, agents=0, ever=False)
    assert decide(replace(alone, age_s=ALONE_S - 1)) == "stay"
    assert decide(replace(alone, age_s=ALONE_S + 1)) == "flush"


def test_a_launcher_that_leaves_has_what_is_in_memory_written_and_is_waited_for() -> None:
    asked = replace(LIFE, workers=0, asked=True)
    assert decide(replace(asked, workers=1)) == "stay"
    assert decide(asked) == "flush"
    # Host memory is given back when it is gone.
    assert decide(replace(asked, flushed=True)) == "stay"
    assert decide(replace(asked, flushed=True, asked=False)) == "stay"
    assert decide(replace(asked, flushed=True, asked=False, agents=0)) == "leave"
    # Of a keeper that no worker has come to since the one before was killed.
    assert decide(replace(asked, agents=0, ever=False, age_s=1.0)) == "flush"


def test_it_never_leaves_anything_unwritten_or_anybody_alone() -> None:
    for workers, agents, ever, saving, finished, flushed, asked in product((0, 1), (0, 1), *[(False, True)] * 5):
        life = Life(workers, agents, ever, 1000.0, saving, finished, flushed, asked)
        decision = decide(life)
        if decision == "leave":
            assert not workers
            assert not saving
            assert finished or (flushed and not agents and not asked)
        if decision == "flush":
            assert not any((workers, agents and not asked, saving, flushed, finished))
