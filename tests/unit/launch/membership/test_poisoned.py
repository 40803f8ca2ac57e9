from dataclasses import replace

import pytest

from elastictrain.errors import EXIT_BUG, EXIT_STORAGE, EXIT_TRANSPORT
from elastictrain.identity import NOTHING_POISONED, PoisonedSteps
from elastictrain.launch.membership.poisoned import MOST_SKIPPED, OnPoisoned, poisoned_step
from elastictrain.launch.membership.policy import judge
from elastictrain.launch.membership.records import EndKind, Generation, GenerationFailure, GenerationOutcome
from tests.unit.launch.membership.made import OPTIONS, by_host, end, generation

RUN, GIVE_UP = GenerationOutcome.RUN, GenerationOutcome.GIVE_UP
SEGFAULT, KILLED = 139, 137


def failure(*, step: int = 412, code: int = EXIT_BUG, phase: str = "backward", committed: int = 400) -> GenerationFailure:
    return GenerationFailure(1, (), code, phase, step, committed, "a: it broke")


def after_the_third(
    mode: OnPoisoned, *, step: int = 412, before: PoisonedSteps = NOTHING_POISONED, committed: int = 400, restored: int = 400
) -> Generation:
    ended = replace(generation(7, "a", failures=(failure(step=step, committed=committed),) * 2), poisoned=before)
    last = end("a", EndKind.FAILED, EXIT_BUG, step=step, committed=committed, phase="backward", restored=restored)
    return judge(ended, by_host([last]), OPTIONS, ready=frozenset("a"), on_poisoned=mode)


def test_three_failures_at_one_step_poison_it() -> None:
    assert poisoned_step([failure()] * 3, max_failures=3) == 412
    assert poisoned_step([failure(step=3), *[failure()] * 3], max_failures=9) == 412
    assert poisoned_step([failure(code=SEGFAULT), failure(phase="data"), failure()], max_failures=3) == 412
    assert poisoned_step([failure()] * 2, max_failures=2) == 412


@pytest.mark.parametrize(
    "other",
    [
        failure(step=411),
        failure(step=0, phase="build"),
        failure(phase="save"),
        failure(phase="eval"),
        # The cause is outside of what the step computes.
        failure(code=KILLED),
        failure(code=EXIT_TRANSPORT),
        failure(code=EXIT_STORAGE),
    ],
)
def test_one_that_differs_does_not(other: GenerationFailure) -> None:
    for place in range(3):
        failures = [failure(), failure()]
        failures.insert(place, other)
        assert poisoned_step(failures, max_failures=3) == 0
    assert poisoned_step([failure()] * 2, max_failures=3) == 0


def test_by_default_the_run_is_given_up() -> None:
    assert after_the_third("stop").outcome is GIVE_UP


def test_the_step_is_skipped_and_the_budget_of_failures_refilled() -> None:
    following = after_the_third("skip")
    assert (following.outcome, following.failures, following.poisoned.skipped) == (RUN, (), (412,))
    assert after_the_third("skip", before=PoisonedSteps(skipped=(9,))).poisoned.skipped == (9, 412)


@pytest.mark.parametrize("skipped", [(412,), (411,), (413,)])
def test_a_mistake_in_the_program_does_not_skip_the_whole_run(skipped: tuple[int, ...]) -> None:
    assert after_the_third("skip", before=PoisonedSteps(skipped=skipped)).outcome is GIVE_UP


def test_after_so_many_skipped_steps_the_run_is_given_up() -> None:
    nine = tuple(range(0, 2 * MOST_SKIPPED - 2, 2))
    assert len(after_the_third("skip", before=PoisonedSteps(skipped=nine)).poisoned.skipped) == MOST_SKIPPED
    assert after_the_third("skip", before=PoisonedSteps(skipped=(*nine, 99))).outcome is GIVE_UP


def test_the_run_goes_back_once_if_there_is_a_checkpoint() -> None:
    following = after_the_third("back")
    assert (following.outcome, following.failures) == (RUN, ())
    assert following.poisoned == PoisonedSteps(went_back=(412,), before_step=400, generation=8)
    assert after_the_third("back", before=following.poisoned).outcome is GIVE_UP
    assert after_the_third("back", restored=0).outcome is GIVE_UP


def test_from_a_step_below_the_first_one_the_run_goes_back_further() -> None:
    """Though a newer step had been committed before it went back the first time."""
    first = after_the_third("back", step=412, committed=400, restored=398).poisoned
    second = after_the_third("back", step=397, committed=400, restored=390, before=first).poisoned
    assert (second.went_back, second.before_step) == ((412, 397), 390)
