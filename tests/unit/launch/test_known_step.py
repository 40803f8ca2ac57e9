from elastictrain.identity import PoisonedSteps
from elastictrain.launch.known_step import KnownStep


def test_it_is_the_newest_of_all_and_stays_where_they_are_not_told() -> None:
    known = KnownStep()
    known.join(PoisonedSteps())
    known.note(restored=5, saved=(10, 12))
    known.note(restored=0, saved=(0, 0))
    assert known.step == 12


def test_repeated_steps_are_progress_after_the_run_went_back() -> None:
    known, back = KnownStep(), PoisonedSteps(before_step=11, generation=4)
    known.note(restored=5, saved=(10, 12))
    found = []
    for restored in (5, 8, 10):
        known.join(back)
        # The job's note and memory still tell what was reached before.
        known.note(restored=restored, saved=(10, 12))
        found.append(known.step)
    assert found == [5, 8, 10]
    known.note(restored=10, saved=(13, 12))
    assert known.step == 13
    known.join(PoisonedSteps(before_step=4, generation=9))
    known.note(restored=3, saved=(13, 12))
    assert known.step == 3
