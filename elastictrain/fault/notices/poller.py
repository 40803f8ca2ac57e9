"""A thread that asks for notices every few seconds, whatever happens."""

import logging
import threading
from collections.abc import Callable, Sequence

from elastictrain.fault.notices.metadata import MetadataError
from elastictrain.fault.notices.notice import Notice, Source, is_news

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""The shortest notices are 30 s long. AWS recommends 5 s, Azure 1 s; all of them refuse who asks many times a second."""


class NoticePoller:
    """Asks each source in turn, and passes on what is new."""

    def __init__(self, sources: Sequence[Source], *, on_notice: Callable[[Notice], None], interval_s: float = POLL_S) -> None:
        """`on_notice` is called from the poller's thread."""
        self._sources = sources
        self._on_notice = on_notice
        self._interval_s = interval_s
        self._last: dict[int, Notice] = {}
        self._errors: dict[int, str] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def close(self) -> None:
        """Ask no more; a question that is under way may last seconds, and is not waited for."""
        self._closed.set()

    def _run(self) -> None:
        while True:
            for index, source in enumerate(self._sources):
                self._turn(index, source)
            if self._closed.wait(self._interval_s):
                return

    def _turn(self, index: int, source: Source) -> None:
        try:
            notice = source.look()
            if notice is None:
                # Called off, or over: the next one is news again, also if it reads the same.
                self._last.pop(index, None)
            elif is_news(notice, before=self._last.get(index)) and not self._closed.is_set():
                # Only what was passed on counts as known: an error on the way is no reason never to say it again.
                self._on_notice(notice)
                self._last[index] = notice
        except Exception as error:  # noqa: BLE001  # the edge of the thread: the next answer may be the one that matters
            self._complain(
                index, source, str(error) if isinstance(error, MetadataError) else f"{type(error).__name__}: {error}"
            )
            return
        if self._errors.pop(index, ""):
            logger.info("%s answers again", source.name)

    def _complain(self, index: int, source: Source, error: str) -> None:
        if self._errors.get(index) != error:
            self._errors[index] = error
            logger.warning("whether %s has a notice for this host is not known: %s", source.name, error)
