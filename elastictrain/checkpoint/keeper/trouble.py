"""Remembers what storage complained of last, so that a person can be told why a save takes long."""

import logging
import threading


class LastTrouble(logging.Handler):
    """A log handler that keeps the newest warning."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self._guard = threading.Lock()
        self._text: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        with self._guard:
            self._text = record.getMessage()

    def take(self) -> str | None:
        """The newest warning since the last call, if there is one."""
        with self._guard:
            text, self._text = self._text, None
            return text
