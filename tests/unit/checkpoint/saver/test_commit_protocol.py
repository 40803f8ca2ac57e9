from elastictrain.checkpoint.saver.commit_protocol import SHORTENED_S, Deadline


def test_a_wait_ends_with_its_limit() -> None:
    now = [100.0]
    deadline = Deadline(60.0, clock=lambda: now[0])
    assert deadline.left_s(100.0) == 60.0
    assert deadline.left_s(90.0, alike_s=1000.0) == 50.0
    now[0] = 161.0
    assert deadline.left_s(100.0) < 0


def test_who_is_hurried_waits_a_little_from_that_moment_on() -> None:
    """Not from the beginning of the wait: the others need a moment, too, to find out."""
    now = [100.0]
    deadline = Deadline(900.0, clock=lambda: now[0])
    now[0] = 700.0
    deadline.shorten()
    assert deadline.left_s(100.0) == SHORTENED_S
    now[0] = 705.0
    deadline.shorten()
    assert deadline.left_s(100.0) == SHORTENED_S - 5.0, "the first word counts"
    now[0] = 720.0
    assert deadline.left_s(720.0) == SHORTENED_S, "a wait that begins later has its time"
    assert deadline.left_s(100.0) < 0


def test_others_get_as_long_as_this_host_took() -> None:
    now = [100.0]
    deadline = Deadline(900.0, clock=lambda: now[0])
    deadline.shorten()
    assert deadline.left_s(100.0, alike_s=42.0) == SHORTENED_S + 42.0


def test_being_hurried_makes_no_wait_longer() -> None:
    now = [100.0]
    deadline = Deadline(3.0, clock=lambda: now[0])
    deadline.shorten()
    assert deadline.left_s(100.0) == 3.0
