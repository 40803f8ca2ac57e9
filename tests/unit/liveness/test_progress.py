import pytest

from elastictrain.liveness.progress import ENOUGH_STEPS, Phase, ProgressMark, ProgressTracker


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


def test_a_step_is_finished_while_the_next_one_is_under_way() -> None:
    now_s = [0.0]
    tracker = ProgressTracker(lambda: now_s[0])
    followed: list[ProgressMark] = []
    tracker.follow(followed.append)
    tracker.set_phase(Phase.UPDATE, step=3)
    assert not tracker.has_trained
    now_s[0] += 1.0
    tracker.step_finished(2)
    assert followed[1:] == [ProgressMark(Phase.UPDATE, 3, 0, 0.0, False, finished_step=one) for one in (0, 2)]
    tracker.set_phase(Phase.DATA, step=4)
    assert tracker.mark == ProgressMark(Phase.DATA, 4, 0, 1.0, False, finished_step=2)
    # The next generation may go back: what it repeats is counted from what it has finished itself.
    assert tracker.has_trained
    tracker.begin_generation()
    assert tracker.mark.finished_step == 0
    assert tracker.has_trained, "a generation that fails before its first step takes nothing from what was done"


def test_another_generation_begins_like_a_new_process_but_knows_how_long_a_step_takes() -> None:
    now_s = [0.0]
    tracker = ProgressTracker(lambda: now_s[0])
    followed: list[ProgressMark] = []
    tracker.follow(followed.append)
    tracker.first_step_done()
    for step in range(1, ENOUGH_STEPS + 3):
        for phase in (Phase.DATA, Phase.FORWARD):
            tracker.set_phase(phase, step=step)
            now_s[0] += 2.0
    before, seen = tracker.mark, len(followed)
    assert before.first_step_done
    tracker.set_phase(Phase.DETACH, step=tracker.mark.step)
    tracker.set_phase(Phase.STANDBY)
    now_s[0] += 1000.0
    tracker.begin_generation()
    mark = tracker.mark
    assert (mark.phase, mark.step, mark.since_s, mark.first_step_done) == (Phase.START, 0, now_s[0], False)
    assert (mark.longest_s, mark.usual_s) == (2.0, before.usual_s), "waiting for a rank is no step"
    tracker.set_phase(Phase.BUILD)
    assert len(followed) == seen + 2, "the observers of the generation before are told nothing more"
    # A first step that compiles is no measure of what comes later.
    tracker.set_phase(Phase.FORWARD, step=9)
    now_s[0] += 500.0
    tracker.set_phase(Phase.DATA, step=10)
    assert (tracker.mark.longest_s, tracker.mark.usual_s) == (2.0, before.usual_s)


def test_who_waits_for_a_rank_or_leaves_a_group() -> None:
    marks = {phase: ProgressMark(phase, 0, 0, 0.0, False) for phase in Phase}
    assert [phase for phase, mark in marks.items() if not mark.in_collective] == [Phase.STANDBY, Phase.START, Phase.DATA]
