import pytest

from elastictrain.fault.whereabouts import Mark, Phase, Whereabouts


def test_begins_at_the_start() -> None:
    assert Whereabouts(lambda: 5.0).mark == Mark(Phase.START, 0, 0, 5.0, False)


def test_each_entry_replaces_the_mark_with_its_own_time() -> None:
    times = iter([0.0, 1.0, 2.0])
    whereabouts = Whereabouts(lambda: next(times))
    before = whereabouts.mark
    whereabouts.enter(Phase.FORWARD, step=3, micro_batch=2)
    assert whereabouts.mark == Mark(Phase.FORWARD, 3, 2, 1.0, False)
    whereabouts.enter(Phase.SAVE, step=3)
    assert whereabouts.mark == Mark(Phase.SAVE, 3, 0, 2.0, False)
    assert before == Mark(Phase.START, 0, 0, 0.0, False)


def test_marks_say_whether_the_first_step_is_through() -> None:
    whereabouts = Whereabouts(lambda: 0.0)
    whereabouts.enter(Phase.UPDATE, step=1)
    whereabouts.first_step_done()
    assert not whereabouts.mark.first_step_done
    whereabouts.enter(Phase.DATA, step=2)
    assert whereabouts.mark.first_step_done


@pytest.mark.parametrize(
    ("phase", "step", "micro_batch", "text"),
    [
        (Phase.RENDEZVOUS, 0, 0, "rendezvous"),
        (Phase.GROUP, 0, 0, "process group"),
        (Phase.FORWARD, 4, 1, "forward of step 4, micro-batch 1"),
        (Phase.BACKWARD, 4, 0, "backward of step 4, micro-batch 0"),
        (Phase.REDUCE, 4, 0, "reduce of step 4"),
        (Phase.SAVE, 4, 0, "save of step 4"),
    ],
)
def test_a_mark_reads_as_a_place(phase: Phase, step: int, micro_batch: int, text: str) -> None:
    assert str(Mark(phase, step, micro_batch, 0.0, False)) == text


def test_the_longest_phase_of_a_step_is_remembered_from_the_first_step_on() -> None:
    now_s = [0.0]
    whereabouts = Whereabouts(lambda: now_s[0])

    def spend(phase: Phase, seconds: float) -> float:
        """Enter a phase, let time pass, and enter the next; the longest so far."""
        whereabouts.enter(phase, step=1)
        now_s[0] += seconds
        whereabouts.enter(Phase.UPDATE, step=1)
        return whereabouts.mark.longest_s

    assert spend(Phase.FORWARD, 100.0) == 0.0, "compilation is no measure of what comes later"
    whereabouts.first_step_done()
    whereabouts.enter(Phase.DATA, step=2)
    assert spend(Phase.FORWARD, 3.0) == 3.0
    assert spend(Phase.BACKWARD, 7.0) == 7.0
    assert spend(Phase.REDUCE, 5.0) == 7.0
    assert spend(Phase.SAVE, 50.0) == 7.0, "a save has a bound of its own"
    assert spend(Phase.EVAL, 8.0) == 8.0
