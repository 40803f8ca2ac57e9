"""Logging of worker processes: to stderr, prefixed with generation, rank and step; only rank 0 logs below WARNING."""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from elastictrain.telemetry.progress import write_above

OWN_LOGGERS = ("elastictrain", "recipes", "__main__")


@dataclass(slots=True)
class LogPrefix:
    """The prefix of each message; the trainer updates it."""

    rank: int
    incarnation: str = "-"
    step: Callable[[], int] = int  # the current step; 0, for none, is not shown


class WorkerHandler(logging.Handler):
    """Writes to a stream without tearing its progress bar."""

    def __init__(self, stream: TextIO, *, prefix: LogPrefix) -> None:
        super().__init__()
        self._stream = stream
        self._prefix = prefix
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(prefix)s %(message)s", "%H:%M:%S"))

    def format(self, record: logging.LogRecord) -> str:
        if record.name == "py.warnings":
            # The text of a Python warning is followed by its source line.
            record = logging.makeLogRecord({**record.__dict__, "msg": record.getMessage().split("\n")[0], "args": ()})
        step = f" step {number}" if (number := self._prefix.step()) else ""
        record.prefix = f"[{self._prefix.incarnation} rank {self._prefix.rank}{step}]"
        return super().format(record)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            write_above(self._stream, self.format(record))
        except Exception:  # noqa: BLE001 - logging must never end the run
            self.handleError(record)


def set_up_logging(prefix: LogPrefix, *, stream: TextIO | None = None) -> None:
    """Send all logging of this process, and Python's warnings, to `stream` (stderr). Rank 0 logs the messages of elastictrain
    and the recipes; other ranks, and other libraries, only warn. Only rank 0 logs Python's warnings, since all ranks have the
    same. A second call replaces the handler."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, WorkerHandler)]:
        root.removeHandler(handler)
    handler = WorkerHandler(stream if stream is not None else sys.stderr, prefix=prefix)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO if prefix.rank == 0 else logging.WARNING)
    logging.getLogger("py.warnings").setLevel(logging.WARNING if prefix.rank == 0 else logging.ERROR)
    logging.captureWarnings(True)
