import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.fault.notices.limits import LimitSource, TimeLimits, due, first_limit


@pytest.mark.parametrize(
    ("limits", "reason", "deadline"),
    [
        (TimeLimits(1000.0), None, None),
        (TimeLimits(1000.0, max_hours=2.0), "launch.max_hours = 2 is reached", 8200.0),
        (TimeLimits(1000.0, job_end=5000.0), "the time limit of the job is reached", 5000.0),
        (TimeLimits(1000.0, max_hours=2.0, job_end=5000.0), "the time limit of the job is reached", 5000.0),
        (TimeLimits(1000.0, max_hours=1.0, job_end=5000.0), "launch.max_hours = 1 is reached", 4600.0),
    ],
)
def test_the_first_limit_counts(limits: TimeLimits, reason: str | None, deadline: float | None) -> None:
    notice = first_limit(limits)
    assert (notice and notice.reason, notice and notice.deadline) == (reason, deadline)


@given(st.floats(0, 1e6), st.floats(0, 100), st.none() | st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e4))
def test_a_notice_comes_its_lead_before_the_limit_and_stays(
    started: float, hours: float, job_end: float | None, now: float, lead_s: float
) -> None:
    limits = TimeLimits(started, hours, job_end)
    notice = due(limits, now=now, lead_s=lead_s)
    first = first_limit(limits)
    if first is None or first.deadline is None:
        assert notice is None
        return
    assert notice == (first if now >= first.deadline - lead_s else None)
    assert due(limits, now=max(now, first.deadline), lead_s=lead_s) == first


def test_the_source_tells_when_it_is_time() -> None:
    now = [0.0]
    source = LimitSource(TimeLimits(0.0, max_hours=1.0), lead_s=100.0, wall=lambda: now[0])
    assert source.look() is None
    now[0] = 3501.0
    notice = source.look()
    assert notice is not None
    assert (notice.kind, notice.leave, notice.deadline) == ("limit", True, 3600.0)
