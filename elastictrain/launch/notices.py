"""What may take this host away, asked in a thread: the cloud, the scheduler's time limit, and our own."""

import time
from collections.abc import Callable

from elastictrain.config.composed import RunConfig
from elastictrain.fault.clouds import detect, source_of
from elastictrain.fault.notices import LimitSource, Notice, NoticePoller, NoticeSource
from elastictrain.fault.stop import StopListener
from elastictrain.launch.cluster.place import ClusterPlace
from elastictrain.launch.records import NoticeGiven, Recorder

_LEAD_S = 120.0
"""A limit that is known beforehand is met in time, however large the state is that has to be saved."""


class CloudSource:
    """The metadata service of whatever cloud this is; which one is found out with the first question."""

    name = "the cloud's metadata service"

    def __init__(self) -> None:
        self._source: NoticeSource | None = None
        self._looked = False

    def look(self) -> Notice | None:
        """Nothing, outside of clouds. Raises: MetadataError."""
        if not self._looked:
            cloud = detect()
            self._source, self._looked = source_of(cloud) if cloud is not None else None, True
        return self._source.look() if self._source is not None else None


def watch_notices(
    config: RunConfig, place: ClusterPlace, *, listener: StopListener, recorder: Recorder, say: Callable[[str], None]
) -> NoticePoller:
    """Begin to ask; what comes becomes a stop request, or is only told where it is a hint."""

    def on_notice(notice: Notice) -> None:
        recorder.record(0, NoticeGiven(reason=notice.reason, leave=notice.leave, deadline=notice.deadline))
        if notice.leave:
            listener.ask(notice.reason, deadline=notice.deadline)
        else:
            say(f"this host may be taken away soon ({notice.reason}); training goes on")

    lead_s = max(config.fault.notice_s, _LEAD_S)
    limit = LimitSource(started=time.time(), max_hours=config.launch.max_hours, job_end=place.deadline, lead_s=lead_s)
    sources: list[NoticeSource] = [limit]
    if config.launch.notices:
        sources.append(CloudSource())
    poller = NoticePoller(sources, on_notice=on_notice)
    poller.start()
    return poller
