import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.fault.clouds import AWS_ACTION, GCP_PREEMPTED, MetadataService, aws_source, gcp_source
from elastictrain.fault.notices import LimitSource, MetadataError, Notice, NoticePoller, NoticeSource, adds_to
from tests.unit.fault.metadata_servers import FakeAws, FakeGcp, serving

NOTICE = Notice("preempt", "taken", 100.0)


@pytest.mark.parametrize(
    ("notice", "before", "news"),
    [
        (NOTICE, None, True),
        (NOTICE, NOTICE, False),
        (replace(NOTICE, deadline=102.0), NOTICE, False),
        (replace(NOTICE, deadline=99.5), NOTICE, False),
        (replace(NOTICE, deadline=98.0), NOTICE, True),
        (NOTICE, replace(NOTICE, deadline=None), True),
        (replace(NOTICE, deadline=None), NOTICE, False),
        (replace(NOTICE, kind="limit"), NOTICE, True),
        (replace(NOTICE, leave=False), NOTICE, True),
    ],
)
def test_news(notice: Notice, before: Notice | None, news: bool) -> None:
    assert adds_to(notice, before) is news


@dataclass
class Script:
    """Answers one after another, the last one for ever; `done` once it was given."""

    answers: list[Notice | Exception | None]
    name: str = "the script"
    given: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def look(self) -> Notice | None:
        answer = self.answers[min(self.given, len(self.answers) - 1)]
        self.given += 1
        if self.given > len(self.answers):
            self.done.set()
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextmanager
def polling(*sources: NoticeSource) -> Iterator["queue.SimpleQueue[Notice]"]:
    heard: queue.SimpleQueue[Notice] = queue.SimpleQueue()
    poller = NoticePoller(sources, on_notice=heard.put, interval_s=0.001)
    poller.start()
    try:
        yield heard
    finally:
        poller.close()
        for thread in [thread for thread in threading.enumerate() if thread.name == "notices"]:
            thread.join(5.0)
            assert not thread.is_alive()


def all_of(heard: "queue.SimpleQueue[Notice]") -> list[Notice]:
    found = []
    while not heard.empty():
        found.append(heard.get())
    return found


def test_what_is_new_is_passed_on_once_and_again_after_it_was_called_off() -> None:
    hint = Notice("rebalance", "soon", None, leave=False)
    script = Script([None, hint, hint, NOTICE, NOTICE, None, NOTICE])
    with polling(script) as heard:
        assert script.done.wait(5.0)
        assert all_of(heard) == [hint, NOTICE, NOTICE]


def test_errors_are_survived_and_told_when_they_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "elastictrain.fault.notices")
    gone, odd = MetadataError("no answer"), KeyError("bug")
    script = Script([gone, gone, odd, odd, None, gone, NOTICE])
    with polling(script) as heard:
        assert script.done.wait(5.0)
        assert all_of(heard) == [NOTICE]
    assert [(record.levelname, record.args) for record in caplog.records] == [
        ("WARNING", (script.name, str(gone))),
        ("WARNING", (script.name, "KeyError: 'bug'")),
        ("INFO", (script.name,)),
        ("WARNING", (script.name, str(gone))),
        ("INFO", (script.name,)),
    ]


def test_a_notice_that_could_not_be_passed_on_is_passed_on_again() -> None:
    heard: queue.SimpleQueue[Notice] = queue.SimpleQueue()
    times: Iterator[int] = iter(range(10))

    def listen(notice: Notice) -> None:
        if next(times) == 0:
            raise OSError("disk full")
        heard.put(notice)

    poller = NoticePoller([Script([NOTICE])], on_notice=listen, interval_s=0.001)
    poller.start()
    assert heard.get(timeout=5.0) == NOTICE
    poller.close()


def test_a_source_that_fails_does_not_silence_the_others() -> None:
    with serving(FakeAws(misbehave="error")) as aws, serving(FakeGcp(items={GCP_PREEMPTED: b"TRUE"})) as google:
        sources = aws_source(MetadataService(aws.url)), gcp_source(MetadataService(google.url))
        with polling(*sources) as heard:
            assert "Google" in heard.get(timeout=5.0).reason
            # It gets better, and has something to say.
            aws.items[AWS_ACTION] = b'{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'
            aws.misbehave = ""
            assert heard.get(timeout=5.0).deadline == 1505722920.0


@pytest.mark.parametrize(
    ("max_hours", "job_end", "reason", "deadline"),
    [
        (0.0, None, None, None),
        (2.0, None, "launch.max_hours = 2 is reached", 8200.0),
        (0.0, 5000.0, "the time limit of the job is reached", 5000.0),
        (2.0, 5000.0, "the time limit of the job is reached", 5000.0),
        (1.0, 5000.0, "launch.max_hours = 1 is reached", 4600.0),
    ],
)
def test_the_first_limit_counts(max_hours: float, job_end: float | None, reason: str | None, deadline: float | None) -> None:
    notice = LimitSource(started=1000.0, max_hours=max_hours, job_end=job_end, lead_s=10.0, wall=lambda: 1e9).look()
    assert (notice and notice.reason, notice and notice.deadline) == (reason, deadline)


@given(st.floats(0, 1e6), st.floats(0, 100), st.none() | st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e4))
def test_a_notice_comes_its_lead_before_the_limit_and_stays(
    started: float, max_hours: float, job_end: float | None, now: float, lead_s: float
) -> None:
    clock = [now]
    source = LimitSource(started=started, max_hours=max_hours, job_end=job_end, lead_s=lead_s, wall=lambda: clock[0])
    limits = [*([started + 3600 * max_hours] if max_hours else []), *([] if job_end is None else [job_end])]
    notice = source.look()
    assert (notice is not None) == any(now >= limit - lead_s for limit in limits)
    if limits:
        clock[0] = max(now, *limits, min(limits))
        final = source.look()
        assert final is not None
        assert (final.kind, final.leave, final.deadline) == ("limit", True, min(limits))
