from elastictrain.checkpoint.saver.link import News, PendingSaves
from elastictrain.checkpoint.saver.messages import Saved, SaveFailure, SnapshotTaken


def failures_of(books: PendingSaves) -> list[News]:
    news, books.news = books.news, []
    return [one for one in news if isinstance(one, SaveFailure)]


def test_a_successor_is_told_what_nobody_has_looked_at_and_whether_it_is_still_to_be_written() -> None:
    books = PendingSaves()
    first = books.announce(0, 10, durable=True, now_s=1.0)
    assert first == SnapshotTaken(0, 10, durable=True)
    books.announce(1, 20, durable=False, now_s=2.0)
    books.seen(1, 10)
    assert [one.slot for one in books.announcements()] == [0, 1], "another step was in that slot"
    books.seen(1, 20)
    books.saved(Saved(10, "c", 5))
    assert books.announcements() == [SnapshotTaken(0, 10, durable=False)]


def test_only_what_is_to_be_durable_and_neither_saved_nor_failed_is_overdue() -> None:
    books = PendingSaves()
    for slot, step in enumerate((10, 20, 30)):
        books.announce(slot, step, durable=True, now_s=float(step))
    books.announce(3, 5, durable=False, now_s=0.0)
    books.saved(Saved(10, "c", 5))
    books.failed(SaveFailure(20, "full"))
    assert books.overdue(now_s=40.0, limit_s=10.0) is None
    assert books.overdue(now_s=40.1, limit_s=10.0) == 30
    # Its slot may be used again, and it is not durable yet.
    books.released(30, done=False)
    assert books.overdue(now_s=40.1, limit_s=10.0) == 30
    # Except for who is told no more.
    books.released(30, done=True)
    assert books.overdue(now_s=40.1, limit_s=10.0) is None


def test_what_is_given_up_has_failed_for_that_reason() -> None:
    books = PendingSaves()
    books.announce(0, 20, durable=True, now_s=0.0)
    books.announce(1, 10, durable=True, now_s=0.0)
    books.announce(2, 30, durable=False, now_s=0.0)
    books.give_up("no saver")
    assert failures_of(books) == [SaveFailure(10, "no saver"), SaveFailure(20, "no saver")]
    assert failures_of(books) == []
    assert not any(books.needs(slot, step) for slot, step in ((0, 20), (1, 10), (2, 30)))
    assert books.overdue(now_s=99.0, limit_s=1.0) is None


def test_what_is_given_up_between_its_writing_and_its_commit_has_failed_too() -> None:
    """A worker that waits for its last save would wait on until its limit."""
    books = PendingSaves()
    books.announce(0, 10, durable=True, now_s=0.0)
    books.released(10, done=False)
    books.give_up("no saver")
    assert failures_of(books) == [SaveFailure(10, "no saver")]


def test_a_successor_finds_what_is_in_the_slots_and_nothing_else() -> None:
    books = PendingSaves()
    for slot, step in enumerate((10, 20)):
        books.announce(slot, step, durable=True, now_s=0.0)
    for slot, step in enumerate((10, 20)):
        books.seen(slot, step)
        books.released(step, done=False)
    books.announce(0, 30, durable=False, now_s=0.0)
    books.succeed("killed")
    assert failures_of(books) == [SaveFailure(10, "killed")]
    assert books.needs(1, 20), "its slot is not written to before the successor has looked at it"
    assert books.overdue(now_s=99.0, limit_s=1.0) == 20


def test_what_was_being_overwritten_when_a_successor_came_has_failed() -> None:
    books = PendingSaves()
    books.announce(1, 20, durable=True, now_s=0.0)
    books.seen(1, 20)
    books.released(20, done=False)
    books.succeed("killed")
    assert failures_of(books) == []
    books.announce(1, 30, durable=False, now_s=0.0)
    assert failures_of(books) == [SaveFailure(20, "killed")]
    assert books.overdue(now_s=99.0, limit_s=1.0) is None


def test_what_became_of_a_step_is_told_once_however_often_it_is_heard() -> None:
    books = PendingSaves()
    for _ in range(2):
        books.announce(0, 10, durable=True, now_s=0.0)
        for _ in range(3):
            books.failed(SaveFailure(10, "full"))
        assert failures_of(books) == [SaveFailure(10, "full")]
    books.announce(0, 10, durable=True, now_s=0.0)
    for _ in range(3):
        books.saved(Saved(10, "c", 5))
    assert books.news == [Saved(10, "c", 5)]


def test_a_save_settles_what_came_before_it() -> None:
    """What became of step 10 was said while this worker was not connected."""
    books = PendingSaves()
    for slot, step in enumerate((10, 20, 30)):
        books.announce(slot, step, durable=True, now_s=0.0)
        books.seen(slot, step)
    books.saved(Saved(20, "c", 5))
    assert [books.needs(slot, step) for slot, step in enumerate((10, 20, 30))] == [False, False, True]
    assert books.overdue(now_s=99.0, limit_s=1.0) == 30
    assert failures_of(books) == []
