import pytest

from elastictrain.liveness.progress import Phase, ProgressMark, ProgressTracker


def test_begins_at_the_start() -> None:
    assert ProgressTracker(lambda: 5.0).mark == ProgressMark(Phase.START, 0, 0, 5.0, False)


def test_each_entry_replaces_the_mark_with_its_own_time() -> None:
    times = iter([0.0, 1.0, 2.0])
    tracker = ProgressTracker(lambda: next(times))
    before = tracker.mark
    tracker.set_phase(Phase.FORWARD, step=3, micro_batch=2)
    assert tracker.mark == ProgressMark(Phase.FORWARD, 3, 2, 1.0, False)
    tracker.set_phase(Phase.SAVE, step=3)
    assert tracker.mark == ProgressMark(Phase.SAVE, 3, 0, 2.0, False)
    assert before == ProgressMark(Phase.START, 0, 0, 0.0, False)


def test_marks_say_whether_the_first_step_is_through() -> None:
    tracker = ProgressTracker(lambda: 0.0)
    tracker.set_phase(Phase.UPDATE, step=1)
    tracker.first_step_done()
    assert not tracker.mark.first_step_done
    tracker.set_phase(Phase.DATA, step=2)
    assert tracker.mark.first_step_done


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
    assert str(ProgressMark(phase, step, micro_batch, 0.0, False)) == text


def test_the_longest_phase_of_a_step_is_remembered_from_the_first_step_on() -> None:
    now_s = [0.0]
    tracker = ProgressTracker(lambda: now_s[0])

    def spend(phase: Phase, seconds: float) -> float:
        """Enter a phase, let time pass, and enter the next; the longest so far."""
        tracker.set_phase(phase, step=1)
        now_s[0] += seconds
        tracker.set_phase(Phase.UPDATE, step=1)
        return tracker.mark.longest_s

    assert spend(Phase.FORWARD, 100.0) == 0.0, "compilation is no measure of what comes later"
    tracker.first_step_done()
    tracker.set_phase(Phase.DATA, step=2)
    assert spend(Phase.FORWARD, 3.0) == 3.0
    assert spend(Phase.BACKWARD, 7.0) == 7.0
    assert spend(Phase.REDUCE, 5.0) == 7.0
    assert spend(Phase.SAVE, 50.0) == 7.0, "a save has a bound of its own"
    assert spend(Phase.EVAL, 8.0) == 8.0
