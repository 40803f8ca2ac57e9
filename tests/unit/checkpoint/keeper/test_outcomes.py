from elastictrain.checkpoint.keeper.messages import Message
from elastictrain.checkpoint.keeper.outcomes import Outcomes


def said(step: int) -> Message:
    return {"op": "saved", "step": step}


def test_a_step_is_saved_once_and_again_where_it_failed() -> None:
    books = Outcomes()
    books.announced(5)
    assert not books.is_handed_over(5)
    books.handed_over(5)
    books.announced(5)
    assert books.is_handed_over(5), "it is announced once more by a worker that was not connected"
    books.failed(5)
    assert not books.is_handed_over(5)


def test_who_has_done_its_part_takes_part_in_the_next_attempt() -> None:
    books = Outcomes()
    books.handed_over(5)
    books.done_here(5)
    assert books.is_handed_over(5)
    books.announced(5)
    assert not books.is_handed_over(5)
    books.handed_over(5)
    books.announced(5)
    assert books.is_handed_over(5)


def test_the_newest_outcomes_are_told_again_until_a_step_is_tried_again() -> None:
    books = Outcomes()
    for step in range(12):
        books.told(step, said(step))
    assert [message["step"] for message in books.to_tell_again] == list(range(4, 12))
    books.announced(7)
    assert said(7) not in books.to_tell_again
    books.clear()
    assert books.to_tell_again == ()
